/* The drafter in C: the tables of successors and the best-first search. Each part gives, bit for bit, the results of a
   Python twin. The twins are the place to read what it does:

     table_*       SuccessorDict, in successors.py
     look_up       SuccessorTables.look_up, in successors.py
     draft_grow    PythonDrafter.grow, in draft.py

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

/* What a step computed. `top` is [needed_count, 2 * count]; `before` are the two tokens before the root. */
typedef struct {
    const int32_t *tokens, *parents, *needed, *top;
    int32_t nodes, needed_count, count, before[2];
} Computed;

/* Keep the successors of every needed node under the node's last three, two and one tokens. */
int table_keep(Table *m, const Computed *step) {
    for (int32_t i = 0; i < step->needed_count; i++) {
        int32_t node = step->needed[i], one = step->before[1], two = step->before[0];
        if (node < 0 || node >= step->nodes || step->parents[node] >= node) return -2;
        int32_t parent = step->parents[node];
        if (parent > 0 && (step->parents[parent] < 0 || step->parents[parent] >= parent)) return -2;
        if (parent >= 0) {
            one = step->tokens[parent];
            two = parent ? step->tokens[step->parents[parent]] : step->before[1];
        }
        int32_t token = step->tokens[node];
        int32_t keys[3][3] = {{two, one, token}, {NONE, one, token}, {NONE, NONE, token}};
        Successors value = successors_of(step->top + (int64_t)i * 2 * step->count, step->count);
        for (int k = 0; k < 3; k++) {
            if (put(m, keys[k], value)) return -1;
        }
    }
    return 0;
}

/* 2. The best-first search. */

/* A draft, its limits, and where the guesses go. `guesses` are the tokens, the parents, the depths and the origins, each
   an array of `room` entries. */
typedef struct {
    const Table *last, *own, *shared; /* NULL: there is none */
    const double *rates, *cost;       /* cost NULL: the room is filled */
    int32_t *guesses;
    double *scores;
    int32_t rate_count, cost_count, chain_token_count, chain_count;
    int32_t first_origin, room, max_depth, branch;
    int32_t text_end[3];
    double taught; /* what a guess is worth for what it teaches, in tokens */
    double floor;  /* the first guess that scores less ends the search */
} Draft;

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

/* Enter the chains into the trie. Where a chain runs along an earlier one, the likelier origin names the node. */
static void plant(Node *trie, const Draft *d, const int32_t *chains) {
    const int32_t *tokens = chains, *origins = chains + d->chain_token_count, *lengths = origins + d->chain_token_count;
    int32_t nodes = 1;
    trie[0] = (Node){d->text_end[2], -1, 0, 0, 0};
    for (int32_t chain = 0; chain < d->chain_count; chain++) {
        int32_t node = 0, length = lengths[chain];
        for (int32_t i = 0; i < length; i++) {
            int32_t child = child_of(trie, node, tokens[i]);
            if (!child) {
                child = nodes++;
                trie[child] = (Node){tokens[i], origins[i], 0, 0, 0};
                if (trie[node].first) trie[trie[node].last].next = child;
                else trie[node].first = child;
                trie[node].last = child;
            } else if (d->rates[origins[i]] > d->rates[trie[child].origin]) {
                trie[child].origin = origins[i];
            }
            node = child;
        }
        tokens += length;
        origins += length;
    }
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
    const Draft *d
) {
    Taken *node = &taken[place];
    const Taken *parent = place ? &taken[node->parent] : NULL;
    const double *rates = d->rates;
    int32_t before = parent ? parent->token : d->text_end[1], kind = 0;
    int32_t before2 = !parent ? d->text_end[0] : node->parent ? taken[parent->parent].token : d->text_end[1];
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
static int32_t worth(const Taken *taken, int32_t count, const Draft *d) {
    double expected = 0.0, best = 0.0;
    int32_t keep = 0;
    for (int32_t k = 0; k < count; k++) {
        int32_t at = d->branch - 1 + k < d->cost_count - 1 ? d->branch - 1 + k : d->cost_count - 1;
        expected = k ? expected + taken[k].score : taken[k].score;
        double gain = (expected + d->taught * k) / d->cost[at];
        if (!k || gain > best) {
            best = gain;
            keep = k + 1;
        }
    }
    return keep;
}

/* Fill the draft's guesses. Returns how many there are. `chains` are all tokens, all origins, and all lengths. */
int32_t draft_grow(const Draft *d, const int32_t *chains) {
    for (int32_t i = d->chain_token_count; i < 2 * d->chain_token_count; i++) {
        if (chains[i] < 0 || chains[i] >= d->rate_count) return -2;
    }
    if (d->last && (d->first_origin < 0 || d->first_origin + 6 * LEVELS > d->rate_count)) return -2;
    static const Table empty;
    const Table *const tables[TABLES] = {
        d->last ? d->last : &empty, d->own ? d->own : &empty, d->shared ? d->shared : &empty,
    };
    size_t most = (size_t)d->chain_token_count + (size_t)d->room + 2;
    Candidate *heap = malloc(most * (sizeof(Candidate) + sizeof(Node)) + ((size_t)d->room + 1) * sizeof(Taken));
    if (!heap) return -1;
    Taken *taken = (Taken *)(heap + most);
    Node *trie = (Node *)(taken + d->room + 1);
    plant(trie, d, chains);
    int32_t *tokens = d->guesses, *parents = tokens + d->room, *depths = parents + d->room, *origins = depths + d->room;

    int32_t count = 1, size = 0;
    taken[0] = (Taken){.token = d->text_end[2], .parent = -1, .score = 1.0, .weight = 1.0};
    while (count <= d->room) {
        if (taken[count - 1].depth < d->max_depth) offer(heap, &size, taken, count - 1, trie, tables, d);
        if (!take(heap, &size, taken, count, &origins[count - 1], trie, d->rates)) break;
        if (taken[count].score < d->floor) break;
        count++;
    }
    int32_t kept = (d->cost ? worth(taken, count, d) : count) - 1;
    for (int32_t i = 0; i < kept; i++) {
        const Taken *node = &taken[i + 1];
        tokens[i] = node->token, depths[i] = node->depth, d->scores[i] = node->score;
        parents[i] = node->parent ? node->parent + d->branch - 1 : 0;
    }
    free(heap);
    return kept;
}
