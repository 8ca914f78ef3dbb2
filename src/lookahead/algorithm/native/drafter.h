/* The drafter in C: the tables of successors, the sources that search the text, the best-first search, the choice
   among all sequences of a step, verification, and the rows of a step's packet. Each part has a Python twin with the same results, bit for bit, which tests/algorithm/
   native compares. Read the twins first:

     table.c    SuccessorDict, in successors.py
     text.c     SuffixSource, PromptSource and JacobiSource, in sources/suffix.py and sources/pool.py
     draft.c    PythonDrafter.search, in search.py, and SuccessorTables.look_up, in successors.py
     choice.c   PythonDrafter.draft_trees, in search.py, and best_counts, in budget.py
     accept.c   accept, in verify.py
     packet.c   Packet.write_rows, in backends/graph/packet.py
     workers.c  no twin: threads that search for several sequences in parallel
     layout.c   no twin: the layout of the structs that Python packs

   No Python.h: plain pointers come in through ctypes, and the caller holds the GIL. A negative result is an error: out
   of memory (-1), or an index from the caller that is out of range (-2). */

#ifndef DRAFTER_H
#define DRAFTER_H

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "doubles are computed with a higher precision than in Python"
#endif

#define MAX_SUCCESSORS 8 /* successors per key */
#define PAD INT32_MIN /* pads keys of fewer than three tokens; -1 means before the beginning of the text */
#define LEVELS 16 /* probability levels of successors */
#define ORIGIN_GROUPS 7 /* of LEVELS origins each; see SuccessorTables, in successors.py */

/* 1. Tables of successors: keys of one, two or three tokens, in insertion order.

   The layout is that of Python's dict: entries in a dense array, oldest first, and a hash table of indexes into that
   array, with linear probing. A removed entry leaves a hole (count -1) until the array is full. A slot of the table
   also has part of the hash, so that an entry, which is a cache miss, is read only if it is likely the right one. */

typedef struct {
    int32_t token[MAX_SUCCESSORS];
    uint8_t level[MAX_SUCCESSORS];
    int32_t count;
} Successors;

typedef struct {
    int32_t key[3];
    Successors value; /* count -1: a hole */
} Entry;

typedef struct {
    uint32_t tag;
    int32_t entry; /* index in `entries`, or FREE or REMOVED */
} Slot;

typedef struct {
    Entry *entries;
    Slot *table;
    int64_t used, capacity, live;  /* entries written, allocated, and not holes */
    int64_t oldest;                /* all entries before this one are holes */
    uint64_t mask;                 /* slots of the table, a power of two and at least twice the capacity, minus one */
} Table;

enum { FREE = -1, REMOVED = -2 };

static inline uint64_t hash(const int32_t key[3]) {
    uint64_t h = (uint32_t)key[2] * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29) ^ (uint32_t)key[1]) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32) ^ (uint32_t)key[0]) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static inline int same(const int32_t a[3], const int32_t b[3]) {
    return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

/* The slot of the key with this hash, or -1. */
static inline int64_t find_hashed(const Table *m, const int32_t key[3], uint64_t h) {
    if (!m->capacity) return -1;
    for (uint64_t slot = h & m->mask;; slot = (slot + 1) & m->mask) {
        Slot found = m->table[slot];
        if (found.entry == FREE) return -1;
        if (found.entry >= 0 && found.tag == (uint32_t)(h >> 32) && same(m->entries[found.entry].key, key)) {
            return (int64_t)slot;
        }
    }
}

static inline int64_t find(const Table *m, const int32_t key[3]) { return find_hashed(m, key, hash(key)); }

static inline Entry *entry_at(const Table *m, int64_t slot) { return &m->entries[m->table[slot].entry]; }

/* A step whose successors are stored, `count` per needed node. `before` are the two tokens before the root. `replace`:
   clear the table first. `stride` is the distance between two needed nodes in the array of successors. */
typedef struct {
    int32_t nodes, needed_count, count, before[2], replace, stride;
} StepSuccessors;

Table *table_new(void);
void table_free(Table *m);
int table_store_step(Table *m, const StepSuccessors *step, const int32_t *tree, const int32_t *top);
Entry *table_add(Table *m, const int32_t key[3], uint64_t h);

/* 2. Chains from the text: continuations of earlier matches of its end, and n-grams by their first token. */

typedef struct {
    const int32_t *tokens, *origins;
    int32_t length;
} Chain;

typedef struct {
    int32_t *ngrams; /* oldest first; each has the tokens after the first one, and its feeder */
    int64_t count, capacity;
} Pool;

enum { PROMPT, JACOBI, FEEDERS };

typedef struct {
    int32_t ngram, guesses;              /* N and G */
    int32_t key, branches, reach;        /* suffix index: longest match, number of matches, length of continuations */
    int32_t suffix, fed[FEEDERS];        /* the first origin of each source, or -1 if it is not in use */
    int32_t longest_match, deepest;      /* the last bucket of the suffix index, and of a feeder */
} TextSettings;

/* Tables are used as indexes here: the first token of a key's successors is the key's value. */
typedef struct {
    TextSettings set;
    int32_t *origins;               /* of the suffix index by matched length, then of each feeder by depth */
    int32_t *tokens;                /* the text */
    int32_t *previous1, *previous2; /* for each position, the last one before it with the same one or two last tokens */
    int64_t length, capacity, indexed;
    Table *last_ends, *pool_index;  /* one or two tokens -> their last position; an n-gram's first token -> its pool */
    Pool *pools;
    int64_t pool_count, pool_capacity;
    Chain *chains;                  /* of the last draft */
    int64_t chain_capacity;
} Text;

int text_extend(Text *t, const int32_t *tokens, int32_t count, const int32_t *ngrams, int32_t ngram_count);
int64_t text_find_chains(Text *t, const double *rates, int32_t rate_count);

/* 3. The best-first search. */

/* The inputs of one sequence's drafts, and their output: tokens, parents, depths and origins of the draft tokens, each
   an array of `capacity` numbers. */
typedef struct {
    Table *last;
    const Table *own, *shared, *bigrams; /* may be NULL */
    Text *text;                /* NULL: only the step's own chains */
    const double *rates;
    int32_t *drafted;
    double *scores;
    double bonus; /* the value of a draft token for learning, in tokens */
    int32_t rate_count, first_origin, capacity;
    int32_t chain; /* every draft token hangs from the one before it */
} Candidates;

/* One sequence's part of a step: its limits and the end of its text. An array of integers comes with it: the tokens,
   origins and lengths of its chains; and in `draft_trees` the tokens, parents and depths of a branch that is more than
   the root. */
typedef struct {
    const Candidates *candidates; /* NULL: no draft tokens */
    const double *cost;  /* NULL: take max_tokens */
    const double *trust; /* in draft_trees, a draft token's weighted score is its score times this, */
    double bonus;        /* and its value is that plus this */
    double floor;        /* the first draft token with a lower score ends the search */
    int32_t all_taken;   /* draft_trees takes all draft tokens */
    int32_t cost_count, max_tokens, max_depth, branch;
    int32_t text_end[3]; /* its last token is the root */
    int32_t chain_token_count, chain_count;
    int32_t max_text;    /* above 0 in a cached draft: read the end of the text from the candidates' text, and do not
                            draft beyond this length of it */
    int32_t root;        /* the token of a branch that is only the root */
} Step;

int32_t draft_search(const Step *step, const int32_t *chains);

/* The limits that all sequences of a step share. */
typedef struct {
    const double *cost;             /* of a pass; may be NULL */
    double floor;                   /* unless all_taken, the search ends below this weighted score */
    int32_t cost_count, sequences;
    int32_t max_weighed;            /* draft tokens of sequences without all_taken; negative: no limit */
    int32_t max_tokens;             /* draft tokens of all sequences; negative: no limit */
} StepLimits;

/* One sequence's tree in a finished step. */
typedef struct {
    const Candidates *candidates; /* learn from the step; NULL: the caller does that */
    int32_t nodes, branch, width, needed_count; /* the first draft token is node `branch` */
} StepTree;

/* 4. Threads that run the searches of a step in parallel. */

typedef struct Workers Workers;
typedef void (*Task)(void *argument, int32_t index);

void workers_run(Workers *w, Task task, void *argument, int32_t count); /* w may be NULL */

/* 5. The packet of a step. */

/* The fields of a packet: their first numbers in it, and how many rows, needed rows and sequences they have room for. */
typedef struct {
    int32_t *numbers;
    int32_t row_room, needed_room, sequence_room;
    int32_t shapes; /* head shapes, each with a field of tiles */
    int32_t tokens, sequence_of, parents, sequences, needed;
} PacketFields;

/* The tiles of a head shape: their first number in the packet, the room for them, the queries of a row per K/V head,
   and the queries of a tile. */
typedef struct {
    int32_t first, room, group, block;
} TileField;

#endif
