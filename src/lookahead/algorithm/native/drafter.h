/* The drafter in C: the tables of successors, the sources that follow the text, the best-first search, and the choice
   among all sequences of a step. Each part gives, bit for bit, the results of a Python twin. The twins are the place to
   read what it does:

     table.c    SuccessorDict, in successors.py
     text.c     SuffixSource, PromptSource and JacobiSource, in sources/suffix.py and sources/pool.py
     draft.c    PythonDrafter.grow, in search.py, and SuccessorTables.look_up, in successors.py
     choice.c   PythonDrafter.choose, in search.py, and best_counts, in budget.py
     accept.c   accept, in verify.py
     workers.c  no twin: threads that do some of the searches of a choice
     layout.c   no twin: where the fields of the structs are that Python packs

   No Python.h: plain pointers come in through ctypes, and the caller holds the interpreter's lock. A negative result
   means: out of memory (-1), or an index from the caller is out of range (-2). */

#ifndef DRAFTER_H
#define DRAFTER_H

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "doubles are computed with more bits than Python's"
#endif

#define KEPT_TOKENS 8 /* successors kept per key */
#define NONE INT32_MIN /* fills up keys of fewer than three tokens; -1 means: before the beginning of the text */
#define LEVELS 16 /* probability levels of successors */

/* 1. Tables of successors: keys of one, two or three tokens, in the order in which they came.

   The layout is that of Python's dict: entries in a dense array, oldest first, and a hash table of places in that
   array, with linear probing. A removed entry leaves a hole (count -1) until the array is full. A slot of the table also
   holds part of the hash, so that an entry, which is far off in memory, is read only when it is most likely the right
   one. */

typedef struct {
    int32_t token[KEPT_TOKENS];
    uint8_t level[KEPT_TOKENS];
    int32_t count;
} Successors;

typedef struct {
    int32_t key[3];
    Successors value; /* count -1: a hole */
} Entry;

typedef struct {
    uint32_t tag;
    int32_t place; /* in `entries`, or FREE or GONE */
} Slot;

typedef struct {
    Entry *entries;
    Slot *table;
    int64_t used, room, live;      /* entries written, entries there is room for, entries that are not holes */
    int64_t oldest;                /* no entry before this one is alive */
    uint64_t mask;                 /* slots of the table, a power of two and at least twice the room, minus one */
} Table;

enum { FREE = -1, GONE = -2 };

static inline uint64_t hash(const int32_t key[3]) {
    uint64_t h = (uint32_t)key[2] * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29) ^ (uint32_t)key[1]) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32) ^ (uint32_t)key[0]) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static inline int same(const int32_t a[3], const int32_t b[3]) {
    return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

/* The slot in the table of the key with this hash, or -1. */
static inline int64_t find_hashed(const Table *m, const int32_t key[3], uint64_t h) {
    if (!m->room) return -1;
    for (uint64_t slot = h & m->mask;; slot = (slot + 1) & m->mask) {
        Slot at = m->table[slot];
        if (at.place == FREE) return -1;
        if (at.place >= 0 && at.tag == (uint32_t)(h >> 32) && same(m->entries[at.place].key, key)) return (int64_t)slot;
    }
}

static inline int64_t find(const Table *m, const int32_t key[3]) { return find_hashed(m, key, hash(key)); }

static inline Entry *entry_at(const Table *m, int64_t slot) { return &m->entries[m->table[slot].place]; }

/* A step whose successors are kept, `count` per needed node. `before` are the two tokens before the root. The
   numbers of two needed nodes are `stride` numbers apart. */
typedef struct {
    int32_t nodes, needed_count, count, before[2], only, stride;
} Computed;

Table *table_new(void);
void table_free(Table *m);
int table_keep(Table *m, const Computed *step, const int32_t *tree, const int32_t *top);
Entry *table_enter(Table *m, const int32_t key[3], uint64_t h);

/* 2. The text's own chains: how it went on where it ended like this before, and n-grams, by their first token. */

typedef struct {
    const int32_t *tokens, *origins;
    int32_t length;
} Chain;

typedef struct {
    int32_t *ngrams; /* oldest first; of each the tokens after the first one, and its feeder */
    int64_t count, room;
} Pool;

enum { PROMPT, JACOBI, FEEDERS };

typedef struct {
    int32_t ngram, guesses;              /* N and G */
    int32_t key, branches, reach;        /* of the suffix index: the longest match, how many, how far they go on */
    int32_t suffix, fed[FEEDERS];        /* the first origin of each source, or -1 where it is not in use */
    int32_t longest_match, deepest;      /* the last bucket of the suffix index and of a feeder */
} Settings;

/* Tables serve as indexes here: the first token of a key's successors is the number that the key leads to. */
typedef struct {
    Settings set;
    int32_t *origins;               /* of the suffix index by matched length, then of each feeder by depth */
    int32_t *tokens;                /* the text */
    int32_t *before1, *before2;     /* per place, the last place before it that ends with the same one or two tokens */
    int64_t length, room, indexed;
    Table *places, *firsts;         /* one or two tokens -> their last place; an n-gram's first token -> its pool */
    Pool *pools;
    int64_t pool_count, pool_room;
    Chain *chains;                  /* of the last draft */
    int64_t chain_room;
} Text;

int text_take(Text *t, const int32_t *tokens, int32_t count, const int32_t *ngrams, int32_t ngram_count);
int64_t text_find_chains(Text *t);

/* 3. The best-first search. */

/* What one sequence's drafts are made from, and where their guesses go: tokens, parents, depths and origins, each an
   array of `capacity` entries. */
typedef struct {
    Table *last;
    const Table *own, *shared; /* NULL: there is none */
    Text *text;                /* NULL: no chains but those given */
    const double *rates;
    int32_t *guesses;
    double *scores;
    double taught; /* what a guess is worth for what it teaches, in tokens */
    int32_t rate_count, first_origin, capacity;
} Candidates;

/* One sequence's part of a step: its limits and the end of its text. Integers come with it, one after the other in one
   array: the given chains' tokens, origins and lengths; and in a choice the tokens, parents and depths of a branch that
   is more than the root. */
typedef struct {
    const Candidates *candidates; /* NULL: no guesses */
    const double *cost;  /* NULL: the room is filled */
    const double *trust; /* in a choice, a guess's weighted score is its score times this, */
    double bonus;        /* and the guess is worth that plus this */
    double floor;        /* the first guess that scores less ends the search */
    int32_t all_taken;   /* a choice takes all of them */
    int32_t cost_count, room, max_depth, branch;
    int32_t text_end[3]; /* its last token is the root */
    int32_t chain_token_count, chain_count;
    int32_t most_tokens; /* above 0 in a cached draft: the end of the text is that of the candidates' text, and no guess
                            goes beyond so many tokens of it */
    int32_t root;        /* the token of a branch that is the root alone */
} Step;

int32_t draft_search(const Step *step, const int32_t *chains);

/* What all sequences of a step share. */
typedef struct {
    const double *cost;             /* of a pass; NULL: there is none */
    double floor;                   /* unless all are taken, guesses below this weighted score are not searched for */
    int32_t cost_count, sequences;
    int32_t most;                   /* guesses of those whose guesses are not all taken; negative: any number */
    int32_t room;                   /* guesses of all; negative: any number */
} Share;

/* One sequence's part of a step that has run. */
typedef struct {
    const Candidates *candidates; /* learn what the step showed; NULL: the caller sees to that */
    int32_t nodes, branch, width, needed_count; /* of its tree: the first guess is node `branch` */
} Ran;

/* 4. Threads that share the searches of a step. */

typedef struct Workers Workers;
typedef void (*Search)(void *job, int32_t place);

void workers_share(Workers *w, Search search, void *job, int32_t places); /* NULL: there are none */

#endif
