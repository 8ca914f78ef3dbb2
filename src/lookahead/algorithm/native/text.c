/* The sources that follow the text: the twins of SuffixSource, PromptSource and JacobiSource, in sources/. */

#include "drafter.h"

#define SCAN 24 /* the most earlier places that a lookup in the text compares */

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
    Entry *entry = slot >= 0 ? entry_at(index, slot) : table_enter(index, key, h);
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
int64_t text_find_chains(Text *t) {
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
