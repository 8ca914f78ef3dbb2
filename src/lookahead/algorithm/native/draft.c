/* The best-first search: the twin of PythonDrafter.grow, in search.py. */

#include "drafter.h"

#define CHAIN_MASS 0.95

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) (void)(address)
#endif

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

/* Enter a chain into the trie, which has `nodes` nodes. Where it runs along an earlier one, the likelier origin
   names the node. Returns the number of nodes. */
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

/* Enter the given chains (all tokens, all origins, and all lengths), and then the text's. */
static void plant_all(Node *trie, const Candidates *d, int64_t text_chains, const Step *step, const int32_t *given) {
    const int32_t *tokens = given, *origins = tokens + step->chain_token_count;
    const int32_t *lengths = origins + step->chain_token_count;
    int32_t nodes = 1;
    trie[0] = (Node){step->text_end[2], -1, 0, 0, 0};
    for (int32_t i = 0; i < step->chain_count; tokens += lengths[i], origins += lengths[i], i++) {
        nodes = plant(trie, nodes, (Chain){tokens, origins, lengths[i]}, d->rates);
    }
    for (int64_t i = 0; i < text_chains; i++) nodes = plant(trie, nodes, d->text->chains[i], d->rates);
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
static void queue(
    Candidate *heap, int32_t *size, Taken *taken, int32_t place, Node *trie, const Table *const tables[TABLES],
    const Candidates *d, const Step *step
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

/* Fill the draft's guesses. Returns how many there are. `chains` come with the step. */
int32_t draft_search(const Step *step, const int32_t *chains) {
    const Candidates *d = step->candidates;
    if (step->room > d->capacity) return -2;
    if (!all_below(chains + step->chain_token_count, step->chain_token_count, d->rate_count)) return -2;
    int64_t text_chains = d->text ? text_find_chains(d->text) : 0, chain_tokens = step->chain_token_count;
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
        if (taken[count - 1].depth < step->max_depth) queue(heap, &size, taken, count - 1, trie, tables, d, step);
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
