/* The sources that search the text: the twins of SuffixSource, PromptSource and JacobiSource, in sources/. */

#include "drafter.h"

#define SCAN 24 /* the most earlier positions that a lookup compares */
#define MIN_SCORE 0.0005 /* a continuation ends before the first token whose score is lower */

void text_free(Text *t) {
    for (int64_t i = 0; i < t->pool_count; i++) free(t->pools[i].ngrams);
    if (t->last_ends) table_free(t->last_ends);
    if (t->pool_index) table_free(t->pool_index);
    free(t->origins);
    free(t->tokens);
    free(t->previous1);
    free(t->previous2);
    free(t->pools);
    free(t->chains);
    free(t);
}

static int32_t *suffix_origins(const Text *t) { return t->origins; }

static int32_t *feeder_origins(const Text *t, int feeder) {
    return t->origins + (int64_t)t->set.key + t->set.reach + (int64_t)feeder * t->set.ngram;
}

/* The bucket of a draft token that follows this many tokens that match: the twin of match_bucket, in
   sources/calibration.py. */
static int32_t match_bucket(int32_t matched) {
    static const int32_t long_matches[] = {16, 24, 32, 48, 64};
    int32_t bucket = matched < 12 ? matched : 12;
    for (size_t i = 0; i < sizeof long_matches / sizeof *long_matches; i++) bucket += matched >= long_matches[i];
    return bucket;
}

/* NULL: out of memory. */
Text *text_new(const TextSettings *settings) {
    Text *t = calloc(1, sizeof(Text));
    if (!t) return NULL;
    t->set = *settings;
    size_t matched = (size_t)t->set.key + (size_t)t->set.reach;
    t->origins = malloc((matched + FEEDERS * (size_t)t->set.ngram) * sizeof *t->origins);
    t->last_ends = table_new();
    t->pool_index = table_new();
    if (!t->origins || !t->last_ends || !t->pool_index) {
        text_free(t);
        return NULL;
    }
    for (int32_t i = 0; i < (int32_t)matched; i++) {
        int32_t bucket = match_bucket(i);
        suffix_origins(t)[i] = t->set.suffix + (bucket < t->set.longest_match ? bucket : t->set.longest_match);
    }
    for (int feeder = 0; feeder < FEEDERS; feeder++) {
        for (int32_t i = 0; i < t->set.ngram; i++) {
            feeder_origins(t, feeder)[i] = t->set.fed[feeder] + (i < t->set.deepest ? i : t->set.deepest);
        }
    }
    return t;
}

/* Grow an array to a capacity of at least `needed`. Returns its address. NULL: out of memory, and it is unchanged. */
static void *grow_array(void *array, int64_t *capacity, int64_t needed, size_t size) {
    if (needed <= *capacity) return array;
    int64_t larger = needed > 2 * *capacity ? needed : 2 * *capacity;
    void *moved = realloc(array, (size_t)larger * size);
    if (moved) *capacity = larger;
    return moved;
}

/* Set the key's value in an index. Returns its previous value, or -1. -2: out of memory. */
static int32_t index_set(Table *index, const int32_t key[3], int32_t value) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(index, key, h);
    Entry *entry = slot >= 0 ? entry_at(index, slot) : table_add(index, key, h);
    if (!entry) return -2;
    int32_t previous = slot >= 0 ? entry->value.token[0] : -1;
    entry->value.count = 1;
    entry->value.token[0] = value;
    return previous;
}

/* The key's value in an index, or -1. */
static int32_t index_get(const Table *index, const int32_t key[3]) {
    int64_t slot = find(index, key);
    return slot >= 0 ? entry_at(index, slot)->value.token[0] : -1;
}

/* Add an n-gram as its pool's newest; a full pool drops its oldest. */
static int feed(Text *t, const int32_t *ngram, int feeder) {
    if (!t->set.guesses) return 0;
    int32_t key[3] = {PAD, PAD, ngram[0]}, index = index_get(t->pool_index, key), size = t->set.ngram;
    if (index < 0) {
        index = (int32_t)t->pool_count;
        Pool *pools = grow_array(t->pools, &t->pool_capacity, t->pool_count + 1, sizeof *pools);
        if (!pools) return -1;
        t->pools = pools;
        if (index_set(t->pool_index, key, index) == -2) return -1;
        t->pools[t->pool_count++] = (Pool){0};
    }
    Pool *pool = &t->pools[index];
    int32_t *ngrams = grow_array(pool->ngrams, &pool->capacity, pool->count + 1, (size_t)size * sizeof *ngrams);
    if (!ngrams) return -1;
    pool->ngrams = ngrams;
    int64_t old = 0; /* the n-gram to remove: an equal one, or the oldest of a full pool */
    while (old < pool->count && memcmp(ngrams + old * size, ngram + 1, (size_t)(size - 1) * sizeof *ngram)) old++;
    if (old == pool->count && pool->count == t->set.guesses) old = 0;
    if (old < pool->count) {
        int32_t *removed = ngrams + old * size;
        memmove(removed, removed + size, (size_t)((--pool->count - old) * size) * sizeof *removed);
    }
    int32_t *added = ngrams + pool->count++ * size;
    memcpy(added, ngram + 1, (size_t)(size - 1) * sizeof *added);
    added[size - 1] = feeder;
    return 0;
}

/* Index where every token and every pair of tokens ends. The last token is indexed when another follows it. */
static int index_text(Text *t) {
    for (; t->indexed < t->length - 1; t->indexed++) {
        int64_t i = t->indexed;
        int32_t key[3] = {PAD, PAD, t->tokens[i]};
        if ((t->previous1[i] = index_set(t->last_ends, key, (int32_t)i)) == -2) return -1;
        t->previous2[i] = -1;
        if (!i) continue;
        key[1] = t->tokens[i - 1];
        if ((t->previous2[i] = index_set(t->last_ends, key, (int32_t)i)) == -2) return -1;
    }
    return 0;
}

/* Append tokens to the text, and add the window's n-grams. */
int text_extend(Text *t, const int32_t *tokens, int32_t count, const int32_t *ngrams, int32_t ngram_count) {
    int64_t length = t->length + count, capacity = t->capacity, first = t->length - t->set.ngram + 1;
    if (length > INT32_MAX) return -1;
    int32_t **arrays[3] = {&t->tokens, &t->previous1, &t->previous2};
    for (int i = 0; length > t->capacity && i < 3; i++) {
        capacity = t->capacity;
        int32_t *array = grow_array(*arrays[i], &capacity, length, sizeof *array);
        if (!array) return -1;
        *arrays[i] = array;
    }
    t->capacity = capacity;
    if (count) memcpy(t->tokens + t->length, tokens, (size_t)count * sizeof *tokens);
    t->length = length;
    if (t->set.suffix >= 0 && index_text(t)) return -1;
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

/* How many of `most` tokens with these origins have a score of at least MIN_SCORE, and not less than one: the twin of
   chain_length, in sources/calibration.py. */
static int32_t chain_length(const double *rates, const int32_t *origins, int32_t most) {
    double score = 1.0;
    for (int32_t length = 0; length < most; length++) {
        score *= rates[origins[length]];
        if (score < MIN_SCORE) return length > 1 ? length : 1;
    }
    return most;
}

/* Add the continuation of an earlier match, which ends at `end`. */
static void add_continuation(Text *t, int64_t *count, int32_t matched, int64_t end, const double *rates) {
    int64_t left = t->length - 1 - end;
    const int32_t *origins = suffix_origins(t) + matched;
    int32_t most = (int32_t)(left < t->set.reach ? left : t->set.reach);
    t->chains[(*count)++] = (Chain){t->tokens + end + 1, origins, chain_length(rates, origins, most)};
}

/* The continuations of the longest earlier matches of the text's end, newest first among equals. */
static void add_continuations(Text *t, int64_t *count, const double *rates) {
    const int32_t *last = t->tokens + t->length - 1;
    int32_t key[3] = {PAD, t->length > 1 ? last[-1] : PAD, *last}, branches = t->set.branches;
    int64_t end = t->length > 1 && t->set.key > 1 ? index_get(t->last_ends, key) : -1;
    if (end < 0) {
        key[1] = PAD;
        end = index_get(t->last_ends, key);
        for (; end >= 0 && branches--; end = t->previous1[end]) add_continuation(t, count, 1, end, rates);
        return;
    }
    struct { int32_t matched, end; } found[SCAN];
    int32_t seen = 0;
    for (; end >= 0 && seen < SCAN; end = t->previous2[end], seen++) {
        int32_t matched = 2, rank = seen;
        while (matched < t->set.key && matched <= end && t->tokens[end - matched] == last[-matched]) matched++;
        for (; rank && found[rank - 1].matched < matched; rank--) found[rank] = found[rank - 1];
        found[rank].matched = matched;
        found[rank].end = (int32_t)end;
    }
    for (int32_t i = 0; i < seen && i < branches; i++) {
        add_continuation(t, count, found[i].matched, found[i].end, rates);
    }
}

/* Find all chains of the text, those of the most reliable source first. Returns their number. */
int64_t text_find_chains(Text *t, const double *rates, int32_t rate_count) {
    if (!t->length) return 0;
    if (t->set.suffix >= 0 && t->set.suffix + t->set.longest_match >= rate_count) return -2;
    int32_t key[3] = {PAD, PAD, t->tokens[t->length - 1]}, index = index_get(t->pool_index, key);
    const Pool *pool = index >= 0 ? &t->pools[index] : NULL;
    int64_t matches = t->set.branches < t->length ? t->set.branches : t->length, count = 0;
    int64_t needed = (matches > SCAN ? matches : SCAN) + (pool ? pool->count : 0);
    Chain *chains = grow_array(t->chains, &t->chain_capacity, needed, sizeof *chains);
    if (!chains) return -1;
    t->chains = chains;
    if (t->set.suffix >= 0) add_continuations(t, &count, rates);
    for (int feeder = 0; pool && feeder < FEEDERS; feeder++) {
        for (int64_t i = pool->count - 1; i >= 0; i--) {
            const int32_t *ngram = pool->ngrams + i * t->set.ngram;
            if (ngram[t->set.ngram - 1] != feeder) continue;
            t->chains[count++] = (Chain){ngram, feeder_origins(t, feeder), t->set.ngram - 1};
        }
    }
    return count;
}
