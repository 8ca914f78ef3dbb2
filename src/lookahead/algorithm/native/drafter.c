/* The host's inner loops in C. Every function here has a readable twin in Python, with the same results bit for bit:

     memory_*            DictMemory, in sources/recycle.py
     text_*              SuffixSource, PromptSource and JacobiSource, in sources/suffix.py and sources/pool.py
     draft_grow, _tree   Draft._grow, in draft.py, and WindowLayout.tree, in tree.py
     calibration_learn   Calibration.learn_step, in sources/base.py
     tree_write          Packet.put_tree, in backends/packet.py

   A tree comes as `numbers`: the tokens, depths and parents of its nodes, the nodes of its needed rows, and the origins
   of its guesses, which are the nodes after the first `branch`.

   No Python.h: plain pointers come in through ctypes, and the caller holds the interpreter's lock. A negative number
   says that there was no memory (-1), or that a number from outside points nowhere (-2). */

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "doubles are computed with more bits than Python's"
#endif

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) (void)(address)
#endif

#define TOP 8 /* successors kept per row */
#define NONE INT32_MIN /* in place of the tokens that a short key does not have; -1 is 'nothing before' */
#define CHAIN_MASS 0.95
#define LEVELS 16 /* probability levels of a row's tokens */
#define SMALL 2048 /* entries; more are given back when they are cleared */
#define SCAN 24 /* earlier places looked at per pair of tokens */

/* 1. Recycled rows: keys of one, two or three tokens, in the order in which they came.

   As Python's dict does it: entries in a dense array, oldest first, and a table of places in it, by hash, with linear
   probing. A removed entry leaves a hole (count -1) that goes when the array is full. A slot of the table holds part
   of the hash, too, so that an entry, far off in memory, is looked at only when it is most likely the right one. */

typedef struct {
    int32_t token[TOP];
    uint8_t level[TOP];
    int32_t count;
} Row;

typedef struct {
    int32_t key[3];
    Row row;
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
} Memory;

enum { FREE = -1, GONE = -2 };

static uint64_t hash(const int32_t key[3]) {
    uint64_t h = (uint32_t)key[2] * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29) ^ (uint32_t)key[1]) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32) ^ (uint32_t)key[0]) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static int same(const int32_t a[3], const int32_t b[3]) {
    return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

/* The slot in the table of the key with this hash, or -1. */
static int64_t find_hashed(const Memory *m, const int32_t key[3], uint64_t h) {
    if (!m->room) return -1;
    for (uint64_t slot = h & m->mask;; slot = (slot + 1) & m->mask) {
        Slot at = m->table[slot];
        if (at.place == FREE) return -1;
        if (at.place >= 0 && at.tag == (uint32_t)(h >> 32) && same(m->entries[at.place].key, key)) return (int64_t)slot;
    }
}

static int64_t find(const Memory *m, const int32_t key[3]) { return find_hashed(m, key, hash(key)); }

static Entry *entry_at(const Memory *m, int64_t slot) { return &m->entries[m->table[slot].place]; }

/* Enter a place into the table, under a key with this hash that is not there. */
static void enter(Slot *table, uint64_t mask, uint64_t h, int64_t place) {
    uint64_t slot = h & mask;
    while (table[slot].place >= 0) slot = (slot + 1) & mask;
    table[slot] = (Slot){(uint32_t)(h >> 32), (int32_t)place};
}

/* Make room for one more entry: drop the holes, and double where they were fewer than a quarter. */
static int make_room(Memory *m) {
    int64_t room = m->room ? m->room : 64;
    if (m->live > room - room / 4) room *= 2;
    if (room > INT32_MAX / 4) return -1;
    uint64_t slots = 2 * (uint64_t)room;
    Entry *entries = malloc((size_t)room * sizeof(Entry));
    Slot *table = malloc(slots * sizeof(Slot));
    if (!entries || !table) {
        free(entries);
        free(table);
        return -1;
    }
    for (uint64_t slot = 0; slot < slots; slot++) table[slot].place = FREE;
    int64_t used = 0;
    for (int64_t i = m->oldest; i < m->used; i++) {
        if (m->entries[i].row.count < 0) continue;
        entries[used] = m->entries[i];
        enter(table, slots - 1, hash(entries[used].key), used);
        used++;
    }
    free(m->entries);
    free(m->table);
    *m = (Memory){entries, table, used, room, used, 0, slots - 1};
    return 0;
}

/* A new entry, the youngest, under a key with this hash that is not there. NULL: out of memory. */
static Entry *new_entry(Memory *m, const int32_t key[3], uint64_t h) {
    if (m->used == m->room && make_room(m)) return NULL;
    enter(m->table, m->mask, h, m->used);
    m->live++;
    Entry *entry = &m->entries[m->used++];
    memcpy(entry->key, key, sizeof entry->key);
    return entry;
}

/* The key's entry, or a new one. NULL: out of memory. */
static Entry *entry_for(Memory *m, const int32_t key[3]) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(m, key, h);
    return slot >= 0 ? entry_at(m, slot) : new_entry(m, key, h);
}

static void remove_at(Memory *m, int64_t slot) {
    entry_at(m, slot)->row.count = -1;
    m->table[slot].place = GONE;
    m->live--;
}

Memory *memory_new(void) { return calloc(1, sizeof(Memory)); }

void memory_free(Memory *m) {
    free(m->entries);
    free(m->table);
    free(m);
}

int64_t memory_length(const Memory *m) { return m->live; }

/* Memory that a step's rows need is kept for the next step's. */
void memory_clear(Memory *m) {
    if (m->room && m->room <= SMALL) {
        for (uint64_t slot = 0; slot <= m->mask; slot++) m->table[slot].place = FREE;
        m->used = m->live = m->oldest = 0;
        return;
    }
    free(m->entries);
    free(m->table);
    *m = (Memory){0};
}

/* A row of these numbers: the tokens, then their levels. */
static Row row_of(const int32_t *numbers, int32_t count) {
    Row row = {.count = count};
    for (int32_t i = 0; i < count; i++) {
        row.token[i] = numbers[i];
        uint32_t level = (uint32_t)numbers[count + i];
        row.level[i] = (uint8_t)(level < LEVELS ? level : LEVELS - 1);
    }
    return row;
}

static int set(Memory *m, const int32_t key[3], Row row) {
    Entry *entry = entry_for(m, key);
    if (!entry) return -1;
    entry->row = row;
    return 0;
}

/* One row under one key. */
int memory_set(Memory *m, const int32_t key[3], const int32_t *row, int32_t count) {
    return set(m, key, row_of(row, count));
}

/* Copies the key's row; how many tokens it has, or -1. */
int32_t memory_get(const Memory *m, const int32_t key[3], int32_t *row) {
    int64_t slot = find(m, key);
    if (slot < 0) return -1;
    const Row *known = &entry_at(m, slot)->row;
    for (int32_t i = 0; i < known->count; i++) {
        row[i] = known->token[i];
        row[known->count + i] = known->level[i];
    }
    return known->count;
}

int memory_remove(Memory *m, const int32_t key[3]) {
    int64_t slot = find(m, key);
    if (slot < 0) return -1;
    remove_at(m, slot);
    return 0;
}

/* The first key at or after `place`; where to go on, or -1 when there is none. */
int64_t memory_next(const Memory *m, int64_t place, int32_t key[3]) {
    for (int64_t i = place > m->oldest ? place : m->oldest; i < m->used; i++) {
        if (m->entries[i].row.count < 0) continue;
        memcpy(key, m->entries[i].key, sizeof m->entries[i].key);
        return i + 1;
    }
    return -1;
}

/* Let the oldest keys go beyond the limit. */
void memory_forget(Memory *m, int64_t limit) {
    while (m->live > limit) {
        while (m->entries[m->oldest].row.count < 0) m->oldest++;
        remove_at(m, find(m, m->entries[m->oldest].key));
    }
}

/* Keep the row of every needed node under the node's last three, two and one tokens. `top` is [rows, 2 * count]. */
int memory_keep(
    Memory *m, const int32_t *numbers, int32_t nodes, int32_t rows, int32_t before2, int32_t before,
    const int32_t *top, int32_t count
) {
    const int32_t *tokens = numbers, *parents = numbers + 2 * nodes, *needed = parents + nodes;
    for (int32_t r = 0; r < rows; r++) {
        int32_t node = needed[r], one = before, two = before2;
        if (node < 0 || node >= nodes || parents[node] >= node) return -2;
        int32_t parent = parents[node];
        if (parent > 0 && (parents[parent] < 0 || parents[parent] >= parent)) return -2;
        if (parent >= 0) {
            one = tokens[parent];
            two = parent ? tokens[parents[parent]] : before;
        }
        int32_t keys[3][3] = {{two, one, tokens[node]}, {NONE, one, tokens[node]}, {NONE, NONE, tokens[node]}};
        Row row = row_of(top + (int64_t)r * 2 * count, count);
        for (int k = 0; k < 3; k++) {
            if (set(m, keys[k], row)) return -1;
        }
    }
    return 0;
}

/* 2. What the text suggests: how it went on where it ended like this before, and n-grams, by their first token.

   Memories double as indexes here: the first number of a key's row is what the key leads to. */

typedef struct {
    const int32_t *tokens, *origins;
    int32_t length;
} Chain;

typedef struct {
    int32_t *ngrams; /* oldest first; the tokens after the first one, and who fed it */
    int64_t count, room;
} Pool;

enum { PROMPT, JACOBI, FEEDERS };

typedef struct {
    int32_t ngram, guesses;        /* N and G, if there is a pool */
    int32_t key, branches, reach;  /* of the suffix index: the longest match, how many, how far they go on */
    int32_t suffix, fed[FEEDERS];  /* which sources there are: the first origin of each, or -1 */
    int32_t longest, deepest;      /* the last bucket of the suffix index and of a feeder */
} Settings;

typedef struct {
    Settings is;
    int32_t *origins;               /* of the suffix index by matched length, then of each feeder by depth */
    int32_t *tokens, *one, *two;    /* the text; and where a token, and a token after the same one, stood before, or -1 */
    int64_t length, room, indexed;
    Memory *places, *firsts;        /* one or two tokens -> their last place; an n-gram's first token -> its pool */
    Pool *pools;
    int64_t pool_count, pool_room;
    Chain *chains;                  /* of the last draft */
    int64_t chain_room;
} Text;

void text_free(Text *t) {
    for (int64_t i = 0; i < t->pool_count; i++) free(t->pools[i].ngrams);
    if (t->places) memory_free(t->places);
    if (t->firsts) memory_free(t->firsts);
    free(t->origins);
    free(t->tokens);
    free(t->one);
    free(t->two);
    free(t->pools);
    free(t->chains);
    free(t);
}

static int32_t *suffix_origins(const Text *t) { return t->origins; }

static int32_t *feeder_origins(const Text *t, int feeder) {
    return t->origins + (int64_t)t->is.key + t->is.reach + (int64_t)feeder * t->is.ngram;
}

/* NULL: out of memory. */
Text *text_new(const Settings *settings) {
    Text *t = calloc(1, sizeof(Text));
    if (!t) return NULL;
    t->is = *settings;
    size_t matched = (size_t)t->is.key + (size_t)t->is.reach;
    t->origins = malloc((matched + FEEDERS * (size_t)t->is.ngram) * sizeof *t->origins);
    t->places = memory_new();
    t->firsts = memory_new();
    if (!t->origins || !t->places || !t->firsts) {
        text_free(t);
        return NULL;
    }
    for (int32_t i = 0; i < (int32_t)matched; i++) {
        suffix_origins(t)[i] = t->is.suffix + (i < t->is.longest ? i : t->is.longest);
    }
    for (int feeder = 0; feeder < FEEDERS; feeder++) {
        for (int32_t i = 0; i < t->is.ngram; i++) {
            feeder_origins(t, feeder)[i] = t->is.fed[feeder] + (i < t->is.deepest ? i : t->is.deepest);
        }
    }
    return t;
}

/* The array, or a larger copy in its place, with room for what is needed. NULL: out of memory, and it is as it was. */
static void *roomy(void *array, int64_t *room, int64_t needed, size_t size) {
    if (needed <= *room) return array;
    int64_t larger = needed > 2 * *room ? needed : 2 * *room;
    void *moved = realloc(array, (size_t)larger * size);
    if (moved) *room = larger;
    return moved;
}

/* What the key led to so far, or -1; from now on it leads to `place`. -2: out of memory. */
static int32_t lead(Memory *index, const int32_t key[3], int32_t place) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(index, key, h);
    Entry *entry = slot >= 0 ? entry_at(index, slot) : new_entry(index, key, h);
    if (!entry) return -2;
    int32_t before = slot >= 0 ? entry->row.token[0] : -1;
    entry->row.count = 1;
    entry->row.token[0] = place;
    return before;
}

/* Where a key leads, or -1. */
static int32_t led(const Memory *index, const int32_t key[3]) {
    int64_t slot = find(index, key);
    return slot >= 0 ? entry_at(index, slot)->row.token[0] : -1;
}

/* Add an n-gram as its pool's newest; beyond G the oldest goes. */
static int feed(Text *t, const int32_t *ngram, int feeder) {
    if (!t->is.guesses) return 0;
    int32_t key[3] = {NONE, NONE, ngram[0]}, place = led(t->firsts, key), size = t->is.ngram;
    if (place < 0) {
        place = (int32_t)t->pool_count;
        Pool *pools = roomy(t->pools, &t->pool_room, t->pool_count + 1, sizeof *pools);
        if (!pools) return -1;
        t->pools = pools;
        if (lead(t->firsts, key, place) == -2) return -1;
        t->pools[t->pool_count++] = (Pool){0};
    }
    Pool *pool = &t->pools[place];
    int32_t *ngrams = roomy(pool->ngrams, &pool->room, pool->count + 1, (size_t)size * sizeof *ngrams);
    if (!ngrams) return -1;
    pool->ngrams = ngrams;
    int64_t gone = 0;
    while (gone < pool->count && memcmp(ngrams + gone * size, ngram + 1, (size_t)(size - 1) * sizeof *ngram)) gone++;
    if (gone == pool->count && pool->count == t->is.guesses) gone = 0;
    if (gone < pool->count) {
        int32_t *at = ngrams + gone * size;
        memmove(at, at + size, (size_t)((--pool->count - gone) * size) * sizeof *at);
    }
    int32_t *at = ngrams + pool->count++ * size;
    memcpy(at, ngram + 1, (size_t)(size - 1) * sizeof *at);
    at[size - 1] = feeder;
    return 0;
}

/* The text goes on with these tokens, and the window has made these n-grams. */
int text_take(Text *t, const int32_t *tokens, int32_t count, const int32_t *ngrams, int32_t ngram_count) {
    if (!count) return 0;
    int64_t length = t->length + count, room = t->room, first = t->length - t->is.ngram + 1;
    int32_t **arrays[3] = {&t->tokens, &t->one, &t->two};
    for (int i = 0; i < 3; i++) {
        room = t->room;
        int32_t *array = roomy(*arrays[i], &room, length, sizeof *array);
        if (!array) return -1;
        *arrays[i] = array;
    }
    t->room = room;
    memcpy(t->tokens + t->length, tokens, (size_t)count * sizeof *tokens);
    t->length = length;
    /* The very last token is indexed once something follows it. */
    for (; t->is.suffix >= 0 && t->indexed < t->length - 1; t->indexed++) {
        int64_t i = t->indexed;
        int32_t key[3] = {NONE, NONE, t->tokens[i]};
        if ((t->one[i] = lead(t->places, key, (int32_t)i)) == -2) return -1;
        t->two[i] = -1;
        if (!i) continue;
        key[1] = t->tokens[i - 1];
        if ((t->two[i] = lead(t->places, key, (int32_t)i)) == -2) return -1;
    }
    if (t->is.fed[PROMPT] >= 0) {
        for (int64_t i = first > 0 ? first : 0; i + t->is.ngram <= t->length; i++) {
            if (feed(t, t->tokens + i, PROMPT)) return -1;
        }
    }
    for (int32_t i = 0; t->is.fed[JACOBI] >= 0 && i < ngram_count; i++) {
        if (feed(t, ngrams + (int64_t)i * t->is.ngram, JACOBI)) return -1;
    }
    return 0;
}

/* Add the continuation of an earlier place. */
static void go_on(Text *t, int64_t *count, int32_t matched, int64_t end) {
    int64_t left = t->length - 1 - end;
    t->chains[(*count)++] = (Chain){
        t->tokens + end + 1, suffix_origins(t) + matched, (int32_t)(left < t->is.reach ? left : t->is.reach)
    };
}

/* The continuations of the longest earlier matches of the text's end, newest first among equals. */
static void suffixes(Text *t, int64_t *count) {
    const int32_t *last = t->tokens + t->length - 1;
    int32_t key[3] = {NONE, t->length > 1 ? last[-1] : NONE, *last}, branches = t->is.branches;
    int64_t end = t->length > 1 && t->is.key > 1 ? led(t->places, key) : -1;
    if (end < 0) {
        key[1] = NONE;
        end = led(t->places, key);
        for (; end >= 0 && branches--; end = t->one[end]) go_on(t, count, 1, end);
        return;
    }
    struct { int32_t matched, end; } found[SCAN];
    int32_t seen = 0;
    for (; end >= 0 && seen < SCAN; end = t->two[end], seen++) {
        int32_t matched = 2, at = seen;
        while (matched < t->is.key && matched <= end && t->tokens[end - matched] == last[-matched]) matched++;
        for (; at && found[at - 1].matched < matched; at--) found[at] = found[at - 1];
        found[at].matched = matched;
        found[at].end = (int32_t)end;
    }
    for (int32_t i = 0; i < seen && i < branches; i++) go_on(t, count, found[i].matched, found[i].end);
}

/* All that the text suggests now, surest source first: `chains`, and how many they are. -1: out of memory. */
static int64_t suggest(Text *t) {
    if (!t->length) return 0;
    int32_t key[3] = {NONE, NONE, t->tokens[t->length - 1]}, place = led(t->firsts, key);
    const Pool *pool = place >= 0 ? &t->pools[place] : NULL;
    int64_t places = t->is.branches < t->length ? t->is.branches : t->length, count = 0;
    int64_t needed = (places > SCAN ? places : SCAN) + (pool ? pool->count : 0);
    Chain *chains = roomy(t->chains, &t->chain_room, needed, sizeof *chains);
    if (!chains) return -1;
    t->chains = chains;
    if (t->is.suffix >= 0) suffixes(t, &count);
    for (int feeder = 0; pool && feeder < FEEDERS; feeder++) {
        for (int64_t i = pool->count - 1; i >= 0; i--) {
            const int32_t *ngram = pool->ngrams + i * t->is.ngram;
            if (ngram[t->is.ngram - 1] != feeder) continue;
            t->chains[count++] = (Chain){ngram, feeder_origins(t, feeder), t->is.ngram - 1};
        }
    }
    return count;
}

/* 3. The best-first draft. */

typedef struct {
    int32_t token, origin;
    int32_t first, last, next; /* children in the order they came, and the next sibling; 0 is none */
} Node;

typedef struct {
    double negative; /* minus the score */
    int32_t parent, index, trie;
} Candidate;

typedef struct {
    const Row *row;
    int32_t origin; /* of the row's level 0 */
    int32_t trie;
    double weight;
} Taken;

static int before_(const Candidate *a, const Candidate *b) {
    if (a->negative != b->negative) return a->negative < b->negative;
    if (a->parent != b->parent) return a->parent < b->parent;
    if (a->index != b->index) return a->index < b->index;
    return a->trie < b->trie;
}

static void push(Candidate *heap, int32_t *size, Candidate new) {
    int32_t at = (*size)++;
    while (at && before_(&new, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = new;
}

/* Put another candidate in the first one's place. */
static void replace(Candidate *heap, int32_t size, Candidate new) {
    int32_t at = 0, child;
    while ((child = 2 * at + 1) < size) {
        if (child + 1 < size && before_(&heap[child + 1], &heap[child])) child++;
        if (!before_(&heap[child], &new)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = new;
}

static void pop(Candidate *heap, int32_t *size) {
    if (--*size) replace(heap, *size, heap[*size]);
}

static int32_t child_of(const Node *trie, int32_t node, int32_t token) {
    int32_t child = trie[node].first;
    while (child && trie[child].token != token) child = trie[child].next;
    return child;
}

/* Where a chain runs along an earlier one, the likelier origin names the node. Returns how many nodes there are. */
static int32_t plant(Node *trie, int32_t nodes, const int32_t *chain, int32_t length, const int32_t *origins,
                     const double *rates) {
    int32_t node = 0;
    for (int32_t i = 0; i < length; i++) {
        int32_t child = child_of(trie, node, chain[i]);
        if (!child) {
            child = nodes++;
            trie[child] = (Node){chain[i], origins[i], 0, 0, 0};
            if (trie[node].first) trie[trie[node].last].next = child;
            else trie[node].first = child;
            trie[node].last = child;
        } else if (rates[origins[i]] > rates[trie[child].origin]) {
            trie[child].origin = origins[i];
        }
        node = child;
    }
    return nodes;
}

/* The row of a path's last token. Six kinds of key, each with its own LEVELS origins: three, two and one tokens of the
   request's own rows, then the same of the shared ones. Its own are those of the last step and all before. Asked in
   this order: */
enum { LAST, OWN, SHARED, MEMORIES };
static const struct { int of, length; } ASKED[] = {
    {LAST, 3}, {OWN, 3}, {LAST, 2}, {OWN, 2}, {SHARED, 3}, {SHARED, 2}, {LAST, 1}, {OWN, 1}, {SHARED, 1},
};

static const Row *look_up(const Memory *const memories[MEMORIES], const int32_t last[3], int32_t *kind) {
    /* By length less one. The table's slots are fetched side by side: each is a wait for memory by itself. */
    int32_t keys[3][3] = {{NONE, NONE, last[2]}, {NONE, last[1], last[2]}, {last[0], last[1], last[2]}};
    uint64_t hashes[3];
    for (int i = 0; i < 3; i++) {
        hashes[i] = hash(keys[i]);
        for (int of = OWN; of <= SHARED; of++) {
            if (memories[of]->room) PREFETCH(&memories[of]->table[hashes[i] & memories[of]->mask]);
        }
    }
    for (size_t i = 0; i < sizeof ASKED / sizeof *ASKED; i++) {
        const Memory *m = memories[ASKED[i].of];
        int length = ASKED[i].length;
        int64_t slot = find_hashed(m, keys[length - 1], hashes[length - 1]);
        if (slot < 0 || !entry_at(m, slot)->row.count) continue;
        *kind = (ASKED[i].of == SHARED ? 3 : 0) + 3 - length;
        return &entry_at(m, slot)->row;
    }
    return NULL;
}

/* How many entries (the root's 1.0 first, then best first) give most tokens per unit of time; each guess is worth
   `taught` tokens for what it teaches. */
static int32_t worth(
    const double *scores, int32_t count, const double *cost, int32_t costs, int32_t base, double taught
) {
    double expected = 0.0, best = 0.0;
    int32_t keep = 0;
    for (int32_t k = 0; k < count; k++) {
        int32_t at = base - 1 + k < costs - 1 ? base - 1 + k : costs - 1;
        expected = k ? expected + scores[k] : scores[k];
        double gain = (expected + taught * k) / cost[at];
        if (!k || gain > best) {
            best = gain;
            keep = k + 1;
        }
    }
    return keep;
}

/* Grow a draft. `text` are its last three tokens and the chains below it: `chain_tokens` tokens, then as many origins,
   then the lengths of `chain_count` chains; `whole`, if it is there, suggests further ones. `origin` is the first of the
   rows' origins. Results, entry 0 being the root:
   `out` are 1 + room tokens, then as many depths, parents and origins; and the scores. Returns how many guesses were
   taken. `base` tokens, the root among them, stand before the guesses. */
int32_t draft_grow(
    const Memory *last, const Memory *own, const Memory *shared, int32_t origin, Text *whole, const double *rates,
    int32_t rate_count, const int32_t *text, int32_t chain_tokens, int32_t chain_count, int32_t room, int32_t max_depth,
    const double *cost, int32_t costs, int32_t base, double taught, int32_t *out, double *scores
) {
    for (int32_t i = 0; i < chain_tokens; i++) {
        int32_t named = text[3 + chain_tokens + i];
        if (named < 0 || named >= rate_count) return -2;
    }
    if ((last || own || shared) && (origin < 0 || origin + 6 * LEVELS > rate_count)) return -2;
    static const Memory empty;
    const Memory *const memories[MEMORIES] = {last ? last : &empty, own ? own : &empty, shared ? shared : &empty};
    int32_t *tokens = out, *depths = tokens + room + 1, *parents = depths + room + 1, *origins = parents + room + 1;
    int64_t suggested = whole ? suggest(whole) : 0, suggested_tokens = 0;
    if (suggested < 0) return -1;
    for (int64_t i = 0; i < suggested; i++) {
        Chain chain = whole->chains[i];
        for (int32_t k = 0; k < chain.length; k++) {
            if (chain.origins[k] < 0 || chain.origins[k] >= rate_count) return -2;
        }
        suggested_tokens += chain.length;
    }
    size_t most = (size_t)suggested_tokens + (size_t)chain_tokens + (size_t)room + 2;
    Candidate *heap = malloc(most * sizeof(Candidate) + most * sizeof(Node) + ((size_t)room + 1) * sizeof(Taken));
    if (!heap) return -1;
    Taken *taken = (Taken *)(heap + most);
    Node *trie = (Node *)(taken + room + 1);

    /* 1. The trie of chains. */
    int32_t nodes = 1, size = 0;
    const int32_t *chain = text + 3, *lengths = chain + 2 * (int64_t)chain_tokens;
    trie[0] = (Node){text[2], -1, 0, 0, 0};
    for (int32_t i = 0; i < chain_count; chain += lengths[i++]) {
        nodes = plant(trie, nodes, chain, lengths[i], chain + chain_tokens, rates);
    }
    for (int64_t i = 0; i < suggested; i++) {
        Chain one = whole->chains[i];
        nodes = plant(trie, nodes, one.tokens, one.length, one.origins, rates);
    }

    int32_t node = 0;
    tokens[0] = text[2], parents[0] = -1, depths[0] = 0, origins[0] = -1, scores[0] = 1.0;
    taken[0].trie = 0;
    while (node < room) {
        /* 2. The node taken last offers its chains' tokens and the best of its row. */
        double score = scores[node], weight = score;
        Taken *this = &taken[node];
        this->row = NULL;
        if (depths[node] < max_depth) {
            int32_t kind = 0, parent = parents[node];
            int32_t before = node ? tokens[parent] : text[1];
            int32_t before2 = !node ? text[0] : parent ? tokens[parents[parent]] : text[1];
            const Row *row = look_up(memories, (int32_t[3]){before2, before, tokens[node]}, &kind);
            this->row = row;
            this->origin = origin + kind * LEVELS;
            if (this->trie >= 0 && trie[this->trie].first) {
                double mass = 0.0;
                for (int32_t child = trie[this->trie].first; child; child = trie[child].next) {
                    double rate = rates[trie[child].origin];
                    for (int32_t i = 0; row && i < row->count; i++) {
                        if (row->token[i] != trie[child].token) continue;
                        int32_t other = this->origin + row->level[i];
                        if (rates[other] > rate) {
                            rate = rates[other];
                            trie[child].origin = other;
                        }
                        break;
                    }
                    mass += rate;
                    push(heap, &size, (Candidate){-score * rate, node, -1, child});
                }
                weight = score * (1 - (mass < CHAIN_MASS ? mass : CHAIN_MASS));
            }
            if (row) push(heap, &size, (Candidate){-weight * rates[this->origin + row->level[0]], node, 0, -1});
        }
        this->weight = weight;
        /* 3. Take the best candidate there is. Its next sibling of the row is a candidate from now on. */
        int found = 0;
        Candidate best = {0};
        int32_t token = 0, from = 0;
        while (size && !found) {
            best = heap[0];
            if (best.index < 0) {
                pop(heap, &size);
                token = trie[best.trie].token, from = trie[best.trie].origin;
                found = 1;
                break;
            }
            const Taken *parent = &taken[best.parent];
            token = parent->row->token[best.index], from = parent->origin + parent->row->level[best.index];
            int32_t next = best.index + 1;
            if (next < parent->row->count) {
                double rate = rates[parent->origin + parent->row->level[next]];
                replace(heap, size, (Candidate){-parent->weight * rate, best.parent, next, -1});
            } else {
                pop(heap, &size);
            }
            found = parent->trie < 0 || !child_of(trie, parent->trie, token);
        }
        if (!found) break;
        node++;
        tokens[node] = token, parents[node] = best.parent, depths[node] = depths[best.parent] + 1;
        origins[node] = from, scores[node] = -best.negative;
        taken[node].trie = best.trie;
    }
    free(heap);
    for (int32_t i = 1; i <= node; i++) parents[i] += parents[i] ? base - 1 : 0;
    return (cost ? worth(scores, node + 1, cost, costs, base, taught) : node + 1) - 1;
}

/* The same as a tree's numbers: the guesses stand behind a branch of `base` tokens, which follow the chains in `text`.
   Its depths, its parents and its `first` needed rows are the `layout`. */
int32_t draft_tree(
    const Memory *last, const Memory *own, const Memory *shared, int32_t origin, Text *whole, const double *rates,
    int32_t rate_count, const int32_t *text, int32_t chain_tokens, int32_t chain_count, int32_t room, int32_t max_depth,
    const double *cost, int32_t costs, int32_t base, double taught, const int32_t *layout, int32_t first, int32_t *out
) {
    size_t most = (size_t)room + 1, of_branch = (size_t)base * sizeof *out;
    double *scores = malloc(most * (sizeof *scores + 4 * sizeof *out));
    if (!scores) return -1;
    int32_t *guesses = (int32_t *)(scores + most);
    int32_t taken = draft_grow(
        last, own, shared, origin, whole, rates, rate_count, text, chain_tokens, chain_count, room, max_depth,
        cost, costs, base, taught, guesses, scores
    );
    const int32_t *branch[3] = {text + 3 + 2 * (int64_t)chain_tokens + chain_count, layout, layout + base};
    for (int part = 0; taken >= 0 && part < 3; part++) {
        memcpy(out, branch[part], of_branch);
        memcpy(out + base, guesses + part * most + 1, (size_t)taken * sizeof *out);
        out += base + taken;
    }
    if (taken >= 0) {
        memcpy(out, layout + 2 * (int64_t)base, (size_t)first * sizeof *out);
        for (int32_t i = 0; i < taken; i++) out[first + i] = base + i;
        memcpy(out + first + taken, guesses + 3 * most + 1, (size_t)taken * sizeof *out);
    }
    free(scores);
    return taken;
}

/* 4. How good the guesses of a step were: all those whose parent was accepted. `steps` are these parents, the root
   first, and the token that the model wanted after each. An origin's rate is an average over its last 1 / `least`
   trials. */
int calibration_learn(
    double *rates, int64_t *trials, int32_t rate_count, double least, const int32_t *numbers, int32_t length,
    int32_t nodes, int32_t rows, int32_t branch, const int32_t *steps, int32_t count
) {
    const int32_t *tokens = numbers, *parents = numbers + 2 * nodes, *origins = parents + nodes + rows;
    if (branch < 1 || length < 3 * nodes + rows + nodes - branch) return -2;
    for (int32_t i = 0; i < count; i++) {
        int32_t parent = steps[i], target = steps[count + i];
        for (int32_t node = parent < branch ? branch : parent + 1; node < nodes; node++) {
            if (parents[node] != parent) continue;
            int32_t origin = origins[node - branch];
            if (origin < 0 || origin >= rate_count) return -2;
            double step = 1.0 / (double)++trials[origin];
            rates[origin] += ((double)(tokens[node] == target) - rates[origin]) * (step > least ? step : least);
        }
    }
    return 0;
}

/* 5. A tree in the form that a device reads it.

   It becomes a row of `count` of each of these: the tokens, the positions (`length` plus depth), the needed rows
   (`first` plus node) and who sees whom, as `words` 32-bit words per token: the parent's bits and one's own. The nodes
   that the tree leaves empty are zeros that see themselves. */
int tree_write(
    const int32_t *numbers, int32_t nodes, int32_t rows, int32_t count, int32_t words, int32_t length, int32_t first,
    int32_t *tokens, int32_t *positions, int32_t *needed, uint32_t *bits
) {
    const int32_t *depths = numbers + nodes, *parents = depths + nodes, *nodes_needed = parents + nodes;
    if (nodes > count || rows > count) return -2;
    memset(tokens, 0, (size_t)count * sizeof *tokens);
    memcpy(tokens, numbers, (size_t)nodes * sizeof *tokens);
    for (int32_t i = 0; i < count; i++) {
        uint32_t *row = bits + (int64_t)i * words;
        if (i < nodes && parents[i] >= i) return -2;
        positions[i] = length + (i < nodes ? depths[i] : 0);
        needed[i] = first + (i < rows ? nodes_needed[i] : 0);
        if (i < nodes && parents[i] >= 0) memcpy(row, bits + (int64_t)parents[i] * words, (size_t)words * sizeof *row);
        else memset(row, 0, (size_t)words * sizeof *row);
        row[i / 32] |= 1u << i % 32;
    }
    return 0;
}
