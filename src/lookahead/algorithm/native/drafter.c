/* The drafter in C: the tables of successors, the sources that follow the text, and the best-first search. Each part
   gives, bit for bit, the results of a Python twin. The twins are the place to read what it does:

     table_*       SuccessorDict, in successors.py
     look_up       SuccessorTables.look_up, in successors.py
     text_*        SuffixSource, PromptSource and JacobiSource, in sources/suffix.py and sources/pool.py
     draft_grow    PythonDrafter.grow, in draft.py
     best_counts   best_counts, in counts.py

   No Python.h: plain pointers come in through ctypes, and the caller holds the interpreter's lock. A negative result
   means: out of memory (-1), or an index from the caller is out of range (-2). */

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

#define KEPT_TOKENS 8 /* successors kept per key */
#define NONE INT32_MIN /* fills up keys of fewer than three tokens; -1 means: before the beginning of the text */
#define CHAIN_MASS 0.95
#define LEVELS 16 /* probability levels of successors */
#define SCAN 24 /* the most earlier places that a lookup in the text compares */
#define SMALL 2048 /* entries; a larger table gives its memory back when it is cleared */

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
static int64_t find_hashed(const Table *m, const int32_t key[3], uint64_t h) {
    if (!m->room) return -1;
    for (uint64_t slot = h & m->mask;; slot = (slot + 1) & m->mask) {
        Slot at = m->table[slot];
        if (at.place == FREE) return -1;
        if (at.place >= 0 && at.tag == (uint32_t)(h >> 32) && same(m->entries[at.place].key, key)) return (int64_t)slot;
    }
}

static int64_t find(const Table *m, const int32_t key[3]) { return find_hashed(m, key, hash(key)); }

static Entry *entry_at(const Table *m, int64_t slot) { return &m->entries[m->table[slot].place]; }

/* Enter a place into the table, under a key with this hash that is not there. */
static void enter(Slot *table, uint64_t mask, uint64_t h, int64_t place) {
    uint64_t slot = h & mask;
    while (table[slot].place >= 0) slot = (slot + 1) & mask;
    table[slot] = (Slot){(uint32_t)(h >> 32), (int32_t)place};
}

/* Make room for one more entry: drop the holes, and double where they were fewer than a quarter. */
static int make_room(Table *m) {
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
        if (m->entries[i].value.count < 0) continue;
        entries[used] = m->entries[i];
        enter(table, slots - 1, hash(entries[used].key), used);
        used++;
    }
    free(m->entries);
    free(m->table);
    *m = (Table){entries, table, used, room, used, 0, slots - 1};
    return 0;
}

/* A new entry, the youngest, under a key with this hash that is not there. NULL: out of memory. */
static Entry *new_entry(Table *m, const int32_t key[3], uint64_t h) {
    if (m->used == m->room && make_room(m)) return NULL;
    enter(m->table, m->mask, h, m->used);
    m->live++;
    Entry *entry = &m->entries[m->used++];
    memcpy(entry->key, key, sizeof entry->key);
    return entry;
}

/* The key's entry, or a new one. NULL: out of memory. */
static Entry *entry_for(Table *m, const int32_t key[3]) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(m, key, h);
    return slot >= 0 ? entry_at(m, slot) : new_entry(m, key, h);
}

static void remove_at(Table *m, int64_t slot) {
    entry_at(m, slot)->value.count = -1;
    m->table[slot].place = GONE;
    m->live--;
}

Table *table_new(void) { return calloc(1, sizeof(Table)); }

void table_free(Table *m) {
    free(m->entries);
    free(m->table);
    free(m);
}

int64_t table_length(const Table *m) { return m->live; }

/* A small table keeps its room: a step's table is cleared and filled again at the next step. */
void table_clear(Table *m) {
    if (m->room && m->room <= SMALL) {
        for (uint64_t slot = 0; slot <= m->mask; slot++) m->table[slot].place = FREE;
        m->used = m->live = m->oldest = 0;
        return;
    }
    free(m->entries);
    free(m->table);
    *m = (Table){0};
}

/* From `count` tokens and then their levels. */
static Successors successors_of(const int32_t *numbers, int32_t count) {
    Successors value = {.count = count};
    for (int32_t i = 0; i < count; i++) {
        value.token[i] = numbers[i];
        uint32_t level = (uint32_t)numbers[count + i];
        value.level[i] = (uint8_t)(level < LEVELS ? level : LEVELS - 1);
    }
    return value;
}

static int put(Table *m, const int32_t key[3], Successors value) {
    Entry *entry = entry_for(m, key);
    if (!entry) return -1;
    entry->value = value;
    return 0;
}

int table_put(Table *m, const int32_t key[3], const int32_t *numbers, int32_t count) {
    return put(m, key, successors_of(numbers, count));
}

/* Copy the key's successors. Returns how many there are, or -1 if the key is not there. */
int32_t table_get(const Table *m, const int32_t key[3], int32_t *numbers) {
    int64_t slot = find(m, key);
    if (slot < 0) return -1;
    const Successors *known = &entry_at(m, slot)->value;
    for (int32_t i = 0; i < known->count; i++) {
        numbers[i] = known->token[i];
        numbers[known->count + i] = known->level[i];
    }
    return known->count;
}

/* Copy the first key at or after `place`. Returns the place to continue from, or -1 if there is no such key. */
int64_t table_next(const Table *m, int64_t place, int32_t key[3]) {
    for (int64_t i = place > m->oldest ? place : m->oldest; i < m->used; i++) {
        if (m->entries[i].value.count < 0) continue;
        memcpy(key, m->entries[i].key, sizeof m->entries[i].key);
        return i + 1;
    }
    return -1;
}

/* Drop the oldest keys until at most `limit` are left. */
void table_forget(Table *m, int64_t limit) {
    while (m->live > limit) {
        while (m->entries[m->oldest].value.count < 0) m->oldest++;
        remove_at(m, find(m, m->entries[m->oldest].key));
    }
}

/* A step whose successors are kept, `count` per needed node. `before` are the two tokens before the root. */
typedef struct {
    int32_t nodes, needed_count, count, before[2], only;
} Computed;

/* Keep the successors of every needed node under the node's last three, two and one tokens. `tree` are the tokens, the
   parents and the needed nodes; `top` is [needed_count, 2 * count]. With `only`, all that was kept before is dropped. */
int table_keep(Table *m, const Computed *step, const int32_t *tree, const int32_t *top) {
    const int32_t *tokens = tree, *parents = tokens + step->nodes, *needed = parents + step->nodes;
    if (step->only) table_clear(m);
    for (int32_t i = 0; i < step->needed_count; i++) {
        int32_t node = needed[i], one = step->before[1], two = step->before[0];
        if (node < 0 || node >= step->nodes || parents[node] >= node) return -2;
        int32_t parent = parents[node];
        if (parent > 0 && (parents[parent] < 0 || parents[parent] >= parent)) return -2;
        if (parent >= 0) {
            one = tokens[parent];
            two = parent ? tokens[parents[parent]] : step->before[1];
        }
        int32_t token = tokens[node];
        int32_t keys[3][3] = {{two, one, token}, {NONE, one, token}, {NONE, NONE, token}};
        Successors value = successors_of(top + (int64_t)i * 2 * step->count, step->count);
        for (int k = 0; k < 3; k++) {
            if (put(m, keys[k], value)) return -1;
        }
    }
    return 0;
}

/* 2. The text's own chains: how it went on where it ended like this before, and n-grams, by their first token.

   Tables serve as indexes here: the first token of a key's successors is the number that the key leads to. */

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

void text_free(Text *t) {
    for (int64_t i = 0; i < t->pool_count; i++) free(t->pools[i].ngrams);
    if (t->places) table_free(t->places);
    if (t->firsts) table_free(t->firsts);
    free(t->origins);
    free(t->tokens);
    free(t->before1);
    free(t->before2);
    free(t->pools);
    free(t->chains);
    free(t);
}

static int32_t *suffix_origins(const Text *t) { return t->origins; }

static int32_t *feeder_origins(const Text *t, int feeder) {
    return t->origins + (int64_t)t->set.key + t->set.reach + (int64_t)feeder * t->set.ngram;
}

/* NULL: out of memory. */
Text *text_new(const Settings *settings) {
    Text *t = calloc(1, sizeof(Text));
    if (!t) return NULL;
    t->set = *settings;
    size_t matched = (size_t)t->set.key + (size_t)t->set.reach;
    t->origins = malloc((matched + FEEDERS * (size_t)t->set.ngram) * sizeof *t->origins);
    t->places = table_new();
    t->firsts = table_new();
    if (!t->origins || !t->places || !t->firsts) {
        text_free(t);
        return NULL;
    }
    for (int32_t i = 0; i < (int32_t)matched; i++) {
        suffix_origins(t)[i] = t->set.suffix + (i < t->set.longest_match ? i : t->set.longest_match);
    }
    for (int feeder = 0; feeder < FEEDERS; feeder++) {
        for (int32_t i = 0; i < t->set.ngram; i++) {
            feeder_origins(t, feeder)[i] = t->set.fed[feeder] + (i < t->set.deepest ? i : t->set.deepest);
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
static int32_t lead(Table *index, const int32_t key[3], int32_t place) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(index, key, h);
    Entry *entry = slot >= 0 ? entry_at(index, slot) : new_entry(index, key, h);
    if (!entry) return -2;
    int32_t before = slot >= 0 ? entry->value.token[0] : -1;
    entry->value.count = 1;
    entry->value.token[0] = place;
    return before;
}

/* Where a key leads, or -1. */
static int32_t led(const Table *index, const int32_t key[3]) {
    int64_t slot = find(index, key);
    return slot >= 0 ? entry_at(index, slot)->value.token[0] : -1;
}

/* Add an n-gram as its pool's newest; beyond G the oldest goes. */
static int feed(Text *t, const int32_t *ngram, int feeder) {
    if (!t->set.guesses) return 0;
    int32_t key[3] = {NONE, NONE, ngram[0]}, place = led(t->firsts, key), size = t->set.ngram;
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
    if (gone == pool->count && pool->count == t->set.guesses) gone = 0;
    if (gone < pool->count) {
        int32_t *at = ngrams + gone * size;
        memmove(at, at + size, (size_t)((--pool->count - gone) * size) * sizeof *at);
    }
    int32_t *at = ngrams + pool->count++ * size;
    memcpy(at, ngram + 1, (size_t)(size - 1) * sizeof *at);
    at[size - 1] = feeder;
    return 0;
}

/* Note where every token and every pair of tokens ends. The last token waits until something follows it. */
static int index_places(Text *t) {
    for (; t->indexed < t->length - 1; t->indexed++) {
        int64_t i = t->indexed;
        int32_t key[3] = {NONE, NONE, t->tokens[i]};
        if ((t->before1[i] = lead(t->places, key, (int32_t)i)) == -2) return -1;
        t->before2[i] = -1;
        if (!i) continue;
        key[1] = t->tokens[i - 1];
        if ((t->before2[i] = lead(t->places, key, (int32_t)i)) == -2) return -1;
    }
    return 0;
}

/* The text goes on with these tokens, and the window has made these n-grams. */
int text_take(Text *t, const int32_t *tokens, int32_t count, const int32_t *ngrams, int32_t ngram_count) {
    int64_t length = t->length + count, room = t->room, first = t->length - t->set.ngram + 1;
    if (length > INT32_MAX) return -1;
    int32_t **arrays[3] = {&t->tokens, &t->before1, &t->before2};
    for (int i = 0; length > t->room && i < 3; i++) {
        room = t->room;
        int32_t *array = roomy(*arrays[i], &room, length, sizeof *array);
        if (!array) return -1;
        *arrays[i] = array;
    }
    t->room = room;
    if (count) memcpy(t->tokens + t->length, tokens, (size_t)count * sizeof *tokens);
    t->length = length;
    if (t->set.suffix >= 0 && index_places(t)) return -1;
    if (t->set.fed[PROMPT] >= 0) {
        for (int64_t i = first > 0 ? first : 0; i + t->set.ngram <= t->length; i++) {
            if (feed(t, t->tokens + i, PROMPT)) return -1;
        }
    }
    for (int32_t i = 0; t->set.fed[JACOBI] >= 0 && i < ngram_count; i++) {
        if (feed(t, ngrams + (int64_t)i * t->set.ngram, JACOBI)) return -1;
    }
    return 0;
}

/* Add the continuation of an earlier place. */
static void add_continuation(Text *t, int64_t *count, int32_t matched, int64_t end) {
    int64_t left = t->length - 1 - end;
    t->chains[(*count)++] = (Chain){
        t->tokens + end + 1, suffix_origins(t) + matched, (int32_t)(left < t->set.reach ? left : t->set.reach)
    };
}

/* The continuations of the longest earlier matches of the text's end, newest first among equals. */
static void add_continuations(Text *t, int64_t *count) {
    const int32_t *last = t->tokens + t->length - 1;
    int32_t key[3] = {NONE, t->length > 1 ? last[-1] : NONE, *last}, branches = t->set.branches;
    int64_t end = t->length > 1 && t->set.key > 1 ? led(t->places, key) : -1;
    if (end < 0) {
        key[1] = NONE;
        end = led(t->places, key);
        for (; end >= 0 && branches--; end = t->before1[end]) add_continuation(t, count, 1, end);
        return;
    }
    struct { int32_t matched, end; } found[SCAN];
    int32_t seen = 0;
    for (; end >= 0 && seen < SCAN; end = t->before2[end], seen++) {
        int32_t matched = 2, at = seen;
        while (matched < t->set.key && matched <= end && t->tokens[end - matched] == last[-matched]) matched++;
        for (; at && found[at - 1].matched < matched; at--) found[at] = found[at - 1];
        found[at].matched = matched;
        found[at].end = (int32_t)end;
    }
    for (int32_t i = 0; i < seen && i < branches; i++) add_continuation(t, count, found[i].matched, found[i].end);
}

/* Find all chains that the text has now, the surest source's first. Returns how many. -1: out of memory. */
static int64_t find_chains(Text *t) {
    if (!t->length) return 0;
    int32_t key[3] = {NONE, NONE, t->tokens[t->length - 1]}, place = led(t->firsts, key);
    const Pool *pool = place >= 0 ? &t->pools[place] : NULL;
    int64_t places = t->set.branches < t->length ? t->set.branches : t->length, count = 0;
    int64_t needed = (places > SCAN ? places : SCAN) + (pool ? pool->count : 0);
    Chain *chains = roomy(t->chains, &t->chain_room, needed, sizeof *chains);
    if (!chains) return -1;
    t->chains = chains;
    if (t->set.suffix >= 0) add_continuations(t, &count);
    for (int feeder = 0; pool && feeder < FEEDERS; feeder++) {
        for (int64_t i = pool->count - 1; i >= 0; i--) {
            const int32_t *ngram = pool->ngrams + i * t->set.ngram;
            if (ngram[t->set.ngram - 1] != feeder) continue;
            t->chains[count++] = (Chain){ngram, feeder_origins(t, feeder), t->set.ngram - 1};
        }
    }
    return count;
}

/* 3. The best-first search. */

/* What one sequence's drafts are made from, and where their guesses go: tokens, parents, depths and origins, each an array
   of `capacity` entries. */
typedef struct {
    const Table *last, *own, *shared; /* NULL: there is none */
    Text *text;                       /* NULL: no chains but those given */
    const double *rates;
    int32_t *guesses;
    double *scores;
    double taught; /* what a guess is worth for what it teaches, in tokens */
    int32_t rate_count, first_origin, capacity;
} Draft;

/* One step's limits, the end of its text, and the sizes of the chains given. */
typedef struct {
    const double *cost; /* NULL: the room is filled */
    double floor;       /* the first guess that scores less ends the search */
    int32_t cost_count, room, max_depth, branch, chain_token_count, chain_count;
    int32_t text_end[3];
} Step;

typedef struct {
    int32_t token, origin;
    int32_t first, last, next; /* children in the order they came, and the next sibling; 0 is none */
} Node;

typedef struct {
    double negative; /* minus the score */
    int32_t parent, index, trie;
} Candidate;

typedef struct {
    const Successors *successors;
    int32_t origin; /* of the successors' level 0 */
    int32_t token, parent, depth, trie;
    double score, weight;
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

/* Enter a chain into the trie, which has `nodes` nodes. Where it runs along an earlier one, the likelier origin names the
   node. Returns the number of nodes. */
static int32_t plant(Node *trie, int32_t nodes, Chain chain, const double *rates) {
    int32_t node = 0;
    for (int32_t i = 0; i < chain.length; i++) {
        int32_t child = child_of(trie, node, chain.tokens[i]);
        if (!child) {
            child = nodes++;
            trie[child] = (Node){chain.tokens[i], chain.origins[i], 0, 0, 0};
            if (trie[node].first) trie[trie[node].last].next = child;
            else trie[node].first = child;
            trie[node].last = child;
        } else if (rates[chain.origins[i]] > rates[trie[child].origin]) {
            trie[child].origin = chain.origins[i];
        }
        node = child;
    }
    return nodes;
}

/* Enter the text's chains and then the given ones: all tokens, all origins, and all lengths. */
static void plant_all(Node *trie, const Draft *d, int64_t text_chains, const Step *step, const int32_t *given) {
    const int32_t *tokens = given, *origins = tokens + step->chain_token_count;
    const int32_t *lengths = origins + step->chain_token_count;
    int32_t nodes = 1;
    trie[0] = (Node){step->text_end[2], -1, 0, 0, 0};
    for (int64_t i = 0; i < text_chains; i++) nodes = plant(trie, nodes, d->text->chains[i], d->rates);
    for (int32_t i = 0; i < step->chain_count; tokens += lengths[i], origins += lengths[i], i++) {
        nodes = plant(trie, nodes, (Chain){tokens, origins, lengths[i]}, d->rates);
    }
}

static int all_below(const int32_t *origins, int64_t count, int32_t limit) {
    for (int64_t i = 0; i < count; i++) {
        if (origins[i] < 0 || origins[i] >= limit) return 0;
    }
    return 1;
}

/* The order in which `look_up` asks the tables for keys of three, two and one tokens. */
enum { LAST, OWN, SHARED, TABLES };
static const struct { int of, length; } ASKED[] = {
    {LAST, 3}, {OWN, 3}, {LAST, 2}, {OWN, 2}, {SHARED, 3}, {SHARED, 2}, {LAST, 1}, {OWN, 1}, {SHARED, 1},
};

/* The successors of a path's last token, and which of the six kinds of answer they are. */
static const Successors *look_up(const Table *const tables[TABLES], const int32_t last[3], int32_t *kind) {
    /* keys[n - 1] has n tokens. The slots are prefetched together, because waiting for each in turn takes longer. */
    int32_t keys[3][3] = {{NONE, NONE, last[2]}, {NONE, last[1], last[2]}, {last[0], last[1], last[2]}};
    uint64_t hashes[3];
    for (int i = 0; i < 3; i++) {
        hashes[i] = hash(keys[i]);
        for (int of = OWN; of <= SHARED; of++) {
            if (tables[of]->room) PREFETCH(&tables[of]->table[hashes[i] & tables[of]->mask]);
        }
    }
    for (size_t i = 0; i < sizeof ASKED / sizeof *ASKED; i++) {
        const Table *m = tables[ASKED[i].of];
        int length = ASKED[i].length;
        int64_t slot = find_hashed(m, keys[length - 1], hashes[length - 1]);
        if (slot < 0 || !entry_at(m, slot)->value.count) continue;
        *kind = (ASKED[i].of == SHARED ? 3 : 0) + 3 - length;
        return &entry_at(m, slot)->value;
    }
    return NULL;
}

/* Queue what may follow a taken node: the tokens of its chains, and the best of its successors. */
static void offer(
    Candidate *heap, int32_t *size, Taken *taken, int32_t place, Node *trie, const Table *const tables[TABLES],
    const Draft *d, const Step *step
) {
    Taken *node = &taken[place];
    const Taken *parent = place ? &taken[node->parent] : NULL;
    const double *rates = d->rates;
    int32_t before = parent ? parent->token : step->text_end[1], kind = 0;
    int32_t before2 = !parent ? step->text_end[0] : node->parent ? taken[parent->parent].token : step->text_end[1];
    const Successors *likely = look_up(tables, (int32_t[3]){before2, before, node->token}, &kind);
    node->successors = likely;
    node->origin = d->first_origin + kind * LEVELS;
    if (node->trie >= 0 && trie[node->trie].first) {
        double mass = 0.0;
        for (int32_t child = trie[node->trie].first; child; child = trie[child].next) {
            double rate = rates[trie[child].origin];
            for (int32_t i = 0; likely && i < likely->count; i++) {
                if (likely->token[i] != trie[child].token) continue;
                int32_t other = node->origin + likely->level[i];
                if (rates[other] > rate) {
                    rate = rates[other];
                    trie[child].origin = other;
                }
                break;
            }
            mass += rate;
            push(heap, size, (Candidate){-node->score * rate, place, -1, child});
        }
        node->weight = node->score * (1 - (mass < CHAIN_MASS ? mass : CHAIN_MASS));
    }
    if (likely) {
        push(heap, size, (Candidate){-node->weight * rates[node->origin + likely->level[0]], place, 0, -1});
    }
}

/* Take the best candidate as the node at `place`. Its next sibling among the successors is a candidate from now on.
   Returns 0 when there is none. */
static int take(Candidate *heap, int32_t *size, Taken *taken, int32_t place, int32_t *origin, const Node *trie,
                const double *rates) {
    while (*size) {
        Candidate best = heap[0];
        const Taken *parent = &taken[best.parent];
        Taken new = {.parent = best.parent, .depth = parent->depth + 1, .trie = best.trie, .score = -best.negative};
        new.weight = new.score;
        if (best.index < 0) {
            pop(heap, size);
            new.token = trie[best.trie].token, *origin = trie[best.trie].origin;
            taken[place] = new;
            return 1;
        }
        const Successors *likely = parent->successors;
        new.token = likely->token[best.index], *origin = parent->origin + likely->level[best.index];
        int32_t next = best.index + 1;
        if (next < likely->count) {
            double rate = rates[parent->origin + likely->level[next]];
            replace(heap, *size, (Candidate){-parent->weight * rate, best.parent, next, -1});
        } else {
            pop(heap, size);
        }
        if (parent->trie < 0 || !child_of(trie, parent->trie, new.token)) {
            taken[place] = new;
            return 1;
        }
    }
    return 0;
}

/* How many of `count` entries (the root first, then best first) give most tokens per unit of time. */
static int32_t worth(const Taken *taken, int32_t count, const Step *step, double taught) {
    double expected = 0.0, best = 0.0;
    int32_t keep = 0;
    for (int32_t k = 0; k < count; k++) {
        int32_t at = step->branch - 1 + k < step->cost_count - 1 ? step->branch - 1 + k : step->cost_count - 1;
        expected = k ? expected + taken[k].score : taken[k].score;
        double gain = (expected + taught * k) / step->cost[at];
        if (!k || gain > best) {
            best = gain;
            keep = k + 1;
        }
    }
    return keep;
}

/* Fill the draft's guesses. Returns how many there are. `chains` are all tokens, all origins, and all lengths. */
int32_t draft_grow(const Draft *d, const Step *step, const int32_t *chains) {
    if (step->room > d->capacity) return -2;
    if (!all_below(chains + step->chain_token_count, step->chain_token_count, d->rate_count)) return -2;
    int64_t text_chains = d->text ? find_chains(d->text) : 0, chain_tokens = step->chain_token_count;
    if (text_chains < 0) return -1;
    for (int64_t i = 0; i < text_chains; i++) {
        Chain chain = d->text->chains[i];
        if (!all_below(chain.origins, chain.length, d->rate_count)) return -2;
        chain_tokens += chain.length;
    }
    if (chain_tokens > INT32_MAX / 2) return -1;
    if (d->last && (d->first_origin < 0 || d->first_origin + 6 * LEVELS > d->rate_count)) return -2;
    static const Table empty;
    const Table *const tables[TABLES] = {
        d->last ? d->last : &empty, d->own ? d->own : &empty, d->shared ? d->shared : &empty,
    };
    size_t most = (size_t)chain_tokens + (size_t)step->room + 2;
    Candidate *heap = malloc(most * (sizeof(Candidate) + sizeof(Node)) + ((size_t)step->room + 1) * sizeof(Taken));
    if (!heap) return -1;
    Taken *taken = (Taken *)(heap + most);
    Node *trie = (Node *)(taken + step->room + 1);
    plant_all(trie, d, text_chains, step, chains);
    int32_t *tokens = d->guesses, *parents = tokens + d->capacity, *depths = parents + d->capacity;
    int32_t *origins = depths + d->capacity;

    int32_t count = 1, size = 0;
    taken[0] = (Taken){.token = step->text_end[2], .parent = -1, .score = 1.0, .weight = 1.0};
    while (count <= step->room) {
        if (taken[count - 1].depth < step->max_depth) offer(heap, &size, taken, count - 1, trie, tables, d, step);
        if (!take(heap, &size, taken, count, &origins[count - 1], trie, d->rates)) break;
        if (taken[count].score < step->floor) break;
        count++;
    }
    int32_t kept = (step->cost ? worth(taken, count, step, d->taught) : count) - 1;
    for (int32_t i = 0; i < kept; i++) {
        const Taken *node = &taken[i + 1];
        tokens[i] = node->token, depths[i] = node->depth, d->scores[i] = node->score;
        parents[i] = node->parent ? node->parent + step->branch - 1 : 0;
    }
    free(heap);
    return kept;
}

/* 4. How many guesses of each sequence a step takes. */

/* Per sequence, the weight and the bonus of its guesses, how many there are, whether all are kept; and in return how many
   the step takes. */
typedef struct {
    const double *weights, *bonuses;
    const int32_t *lengths, *kept;
    int32_t *taken;
    int32_t sequences, scores, rows, most, cost_count; /* cost_count -1: there is no cost */
} Sharing;

typedef struct {
    double rank, value, weighted;
    int32_t owner;
} Guess;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sort places by the ranks of their guesses, the best first, and equals in the order in which they came. There must be
   room for twice as many. */
static int32_t *sort_places(const Guess *guesses, int32_t *places, int64_t count) {
    int32_t *from = places, *to = places + count;
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t start = 0; start < count; start += 2 * width) {
            int64_t a = start, middle = smaller(start + width, count), b = middle, end = smaller(middle + width, count);
            for (int64_t k = start; k < end; k++) {
                int first = b == end || (a < middle && guesses[from[a]].rank >= guesses[from[b]].rank);
                to[k] = first ? from[a++] : from[b++];
            }
        }
        int32_t *sorted = to;
        to = from, from = sorted;
    }
    return from;
}

/* Fill in what the step takes of each sequence, and what the best guess that it refuses scores. Returns whether there is
   such a guess. */
int32_t best_counts(const Sharing *s, const double *scores, const double *cost, double *refused) {
    int64_t total = 0, least = 0;
    for (int32_t i = 0; i < s->sequences; i++) {
        if (s->lengths[i] < 0 || s->lengths[i] > s->scores - total) return -2;
        total += s->lengths[i];
        least += s->kept[i] ? s->lengths[i] : 0;
        s->taken[i] = 0;
    }
    Guess *guesses = malloc(((size_t)total + 1) * (sizeof *guesses + 2 * sizeof(int32_t)));
    if (!guesses) return -1;
    int32_t *order = (int32_t *)(guesses + total + 1), at = 0;
    for (int32_t i = 0; i < s->sequences; i++) {
        for (int32_t k = 0; k < s->lengths[i]; k++, at++) {
            double weighted = scores[at] * s->weights[i], value = weighted + s->bonuses[i];
            guesses[at] = (Guess){s->kept[i] ? value + 2.0 : value, value, weighted, i};
            order[at] = at;
        }
    }
    order = sort_places(guesses, order, total);
    int64_t count = s->most < 0 ? 0 : smaller(s->most, total);
    least = smaller(least, count);
    if (s->cost_count >= 0) {
        count = smaller(count, (int64_t)s->cost_count - s->rows);
        if (count < least) count = least;
    }
    if (s->cost_count >= 0 && count > least) {
        double tokens = s->sequences, best = 0.0;
        int64_t last = count;
        for (int64_t k = 0; k <= last; k++) {
            if (k) tokens += guesses[order[k - 1]].value;
            if (k < least) continue;
            double gain = tokens / cost[s->rows - 1 + k];
            if (k == least || gain > best) best = gain, count = k;
        }
    }
    for (int64_t k = 0; k < count; k++) s->taken[guesses[order[k]].owner]++;
    int32_t some = count < total;
    if (some) *refused = guesses[order[count]].weighted;
    free(guesses);
    return some;
}
