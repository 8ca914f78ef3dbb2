/* The best-first search: the twin of PythonDrafter.search, in search.py. */

#include "drafter.h"

#define CHAIN_MASS 0.95

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) (void)(address)
#endif

typedef struct {
    int32_t token, origin;
    int32_t first, last, next; /* children in insertion order, and the next sibling; 0 is none */
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

/* Replace the first candidate. */
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

/* Add a chain to the trie, which has `nodes` nodes. A node that two chains share has the origin with the higher rate.
   Returns the new number of nodes. */
static int32_t add_chain(Node *trie, int32_t nodes, Chain chain, const double *rates) {
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

/* Add the step's chains (all tokens, all origins, and all lengths), and then the text's. */
static void add_chains(Node *trie, const Candidates *d, int64_t text_chains, const Step *step, const int32_t *given) {
    const int32_t *tokens = given, *origins = tokens + step->chain_token_count;
    const int32_t *lengths = origins + step->chain_token_count;
    int32_t nodes = 1;
    trie[0] = (Node){step->text_end[2], -1, 0, 0, 0};
    for (int32_t i = 0; i < step->chain_count; tokens += lengths[i], origins += lengths[i], i++) {
        nodes = add_chain(trie, nodes, (Chain){tokens, origins, lengths[i]}, d->rates);
    }
    for (int64_t i = 0; i < text_chains; i++) nodes = add_chain(trie, nodes, d->text->chains[i], d->rates);
}

static int all_in_range(const int32_t *origins, int64_t count, int32_t limit) {
    for (int64_t i = 0; i < count; i++) {
        if (origins[i] < 0 || origins[i] >= limit) return 0;
    }
    return 1;
}

/* The order in which `look_up` searches the tables for keys of three, two and one tokens. */
enum { LAST, OWN, SHARED, BIGRAMS, TABLES };
static const struct { int table, length, group; } LOOKUPS[] = {
    {LAST, 3, 0}, {OWN, 3, 0}, {LAST, 2, 1}, {OWN, 2, 1}, {SHARED, 3, 3}, {SHARED, 2, 4}, {LAST, 1, 2}, {OWN, 1, 2},
    {BIGRAMS, 1, 6}, {SHARED, 1, 5},
};

/* The successors of a path that ends with these tokens, and which group of origins they have. */
static const Successors *look_up(const Table *const tables[TABLES], const int32_t last[3], int32_t *group) {
    /* keys[n - 1] has n tokens. All slots are prefetched first, so that their cache misses overlap. */
    int32_t keys[3][3] = {{PAD, PAD, last[2]}, {PAD, last[1], last[2]}, {last[0], last[1], last[2]}};
    uint64_t hashes[3];
    for (int i = 0; i < 3; i++) {
        hashes[i] = hash(keys[i]);
        for (int t = OWN; t <= (i ? SHARED : BIGRAMS); t++) {
            if (tables[t]->capacity) PREFETCH(&tables[t]->table[hashes[i] & tables[t]->mask]);
        }
    }
    for (size_t i = 0; i < sizeof LOOKUPS / sizeof *LOOKUPS; i++) {
        const Table *m = tables[LOOKUPS[i].table];
        int length = LOOKUPS[i].length;
        int64_t slot = find_hashed(m, keys[length - 1], hashes[length - 1]);
        if (slot < 0 || !entry_at(m, slot)->value.count) continue;
        *group = LOOKUPS[i].group;
        return &entry_at(m, slot)->value;
    }
    return NULL;
}

/* Queue the candidates below a taken node: the tokens of its chains, and the best of its successors. */
static void queue(
    Candidate *heap, int32_t *size, Taken *taken, int32_t index, Node *trie, const Table *const tables[TABLES],
    const Candidates *d, const Step *step
) {
    Taken *node = &taken[index];
    const Taken *parent = index ? &taken[node->parent] : NULL;
    const double *rates = d->rates;
    int32_t before = parent ? parent->token : step->text_end[1], group = 0;
    int32_t before2 = !parent ? step->text_end[0] : node->parent ? taken[parent->parent].token : step->text_end[1];
    const Successors *likely = look_up(tables, (int32_t[3]){before2, before, node->token}, &group);
    node->successors = likely;
    node->origin = d->first_origin + group * LEVELS;
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
            push(heap, size, (Candidate){-node->score * rate, index, -1, child});
        }
        node->weight = node->score * (1 - (mass < CHAIN_MASS ? mass : CHAIN_MASS));
    }
    if (likely) {
        push(heap, size, (Candidate){-node->weight * rates[node->origin + likely->level[0]], index, 0, -1});
    }
}

/* Take the best candidate as node `index`. If it is a successor, its parent's next successor becomes a candidate.
   Returns 0 if no candidate is left. */
static int take_best(Candidate *heap, int32_t *size, Taken *taken, int32_t index, int32_t *origin, const Node *trie,
                     const double *rates) {
    while (*size) {
        Candidate best = heap[0];
        const Taken *parent = &taken[best.parent];
        Taken new = {.parent = best.parent, .depth = parent->depth + 1, .trie = best.trie, .score = -best.negative};
        new.weight = new.score;
        if (best.index < 0) {
            pop(heap, size);
            new.token = trie[best.trie].token, *origin = trie[best.trie].origin;
            taken[index] = new;
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
            taken[index] = new;
            return 1;
        }
    }
    return 0;
}

/* How many of `count` nodes (the root, then draft tokens best first) give most tokens per second: the twin of
   best_count, in budget.py. */
static int32_t best_count(const Taken *taken, int32_t count, const Step *step, double bonus) {
    double expected = 0.0, best = 0.0;
    int32_t best_k = 0;
    for (int32_t k = 0; k < count; k++) {
        int32_t row = step->branch - 1 + k < step->cost_count - 1 ? step->branch - 1 + k : step->cost_count - 1;
        expected = k ? expected + taken[k].score : taken[k].score;
        double gain = (expected + bonus * k) / step->cost[row];
        if (!k || gain > best) {
            best = gain;
            best_k = k + 1;
        }
    }
    return best_k;
}

/* Write the draft tokens to the step's candidates. Returns their number. `chains` come with the step. */
int32_t draft_search(const Step *step, const int32_t *chains) {
    const Candidates *d = step->candidates;
    if (step->max_tokens > d->capacity) return -2;
    if (!all_in_range(chains + step->chain_token_count, step->chain_token_count, d->rate_count)) return -2;
    int64_t text_chains = d->text ? text_find_chains(d->text, d->rates, d->rate_count) : 0;
    int64_t chain_tokens = step->chain_token_count;
    if (text_chains < 0) return (int32_t)text_chains;
    for (int64_t i = 0; i < text_chains; i++) {
        Chain chain = d->text->chains[i];
        if (!all_in_range(chain.origins, chain.length, d->rate_count)) return -2;
        chain_tokens += chain.length;
    }
    if (chain_tokens > INT32_MAX / 2) return -1;
    if (d->last && (d->first_origin < 0 || d->first_origin + ORIGIN_GROUPS * LEVELS > d->rate_count)) return -2;
    static const Table empty;
    const Table *const tables[TABLES] = {
        d->last ? d->last : &empty, d->own ? d->own : &empty, d->shared ? d->shared : &empty,
        d->bigrams ? d->bigrams : &empty,
    };
    size_t most = (size_t)chain_tokens + (size_t)step->max_tokens + 2;
    size_t nodes = (size_t)step->max_tokens + 1;
    Candidate *heap = malloc(most * (sizeof(Candidate) + sizeof(Node)) + nodes * sizeof(Taken));
    if (!heap) return -1;
    Taken *taken = (Taken *)(heap + most);
    Node *trie = (Node *)(taken + nodes);
    add_chains(trie, d, text_chains, step, chains);
    int32_t *tokens = d->drafted, *parents = tokens + d->capacity, *depths = parents + d->capacity;
    int32_t *origins = depths + d->capacity;

    int32_t count = 1, size = 0;
    taken[0] = (Taken){.token = step->text_end[2], .parent = -1, .score = 1.0, .weight = 1.0};
    while (count <= step->max_tokens) {
        if (d->chain) size = 0;
        if (taken[count - 1].depth < step->max_depth) queue(heap, &size, taken, count - 1, trie, tables, d, step);
        if (!take_best(heap, &size, taken, count, &origins[count - 1], trie, d->rates)) break;
        if (taken[count].score < step->floor) break;
        count++;
    }
    int32_t drafted = (step->cost ? best_count(taken, count, step, d->bonus) : count) - 1;
    for (int32_t i = 0; i < drafted; i++) {
        const Taken *node = &taken[i + 1];
        tokens[i] = node->token, depths[i] = node->depth, d->scores[i] = node->score;
        parents[i] = node->parent ? node->parent + step->branch - 1 : 0;
    }
    free(heap);
    return drafted;
}
