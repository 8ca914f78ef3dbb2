/* The choice among all sequences of a step: the twin of PythonDrafter.choose, in draft.py. */

#include "drafter.h"

/* What all sequences of a step share. */
typedef struct {
    const double *cost;             /* of a pass; NULL: there is none */
    int32_t cost_count, sequences;
    int32_t most;                   /* guesses of those that are not kept; negative: any number */
    int32_t room;                   /* guesses of all; negative: any number */
} Share;

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

/* How many of `total` guesses a step of so many rows takes, best first; `least` of them are kept. */
static int64_t best_count(
    const Share *share, const Guess *guesses, const int32_t *order, int64_t total, int64_t least, int64_t rows
) {
    int64_t count = share->most < 0 ? total : smaller(total, least + share->most);
    if (share->room >= 0) count = smaller(count, share->room);
    least = smaller(least, count);
    if (!share->cost) return count;
    count = smaller(count, share->cost_count - rows);
    if (count <= least) return least;
    double tokens = share->sequences, best = 0.0;
    int64_t last = count;
    for (int64_t k = 0; k <= last; k++) {
        if (k) tokens += guesses[order[k - 1]].value;
        if (k < least) continue;
        double gain = tokens / share->cost[rows - 1 + k];
        if (k == least || gain > best) best = gain, count = k;
    }
    return count;
}

/* Cut the sequences' guesses, `counts[i]` of each, to those that the step takes. Returns whether it refuses one; `refused`
   is what the best of these scores. */
static int32_t best_counts(const Share *share, const Step *steps, int32_t *counts, double *refused) {
    int64_t total = 0, least = 0, rows = 0;
    for (int32_t i = 0; i < share->sequences; i++) {
        total += counts[i];
        least += steps[i].kept ? counts[i] : 0;
        rows += steps[i].branch;
    }
    Guess *guesses = malloc(((size_t)total + 1) * (sizeof *guesses + 2 * sizeof(int32_t)));
    if (!guesses) return -1;
    int32_t *order = (int32_t *)(guesses + total + 1), at = 0;
    for (int32_t i = 0; i < share->sequences; i++) {
        for (int32_t k = 0; k < counts[i]; k++, at++) {
            double weighted = steps[i].draft->scores[k] * steps[i].trust, value = weighted + steps[i].bonus;
            guesses[at] = (Guess){steps[i].kept ? value + 2.0 : value, value, weighted, i};
            order[at] = at;
        }
        counts[i] = 0;
    }
    order = sort_places(guesses, order, total);
    int64_t count = best_count(share, guesses, order, total, least, rows);
    for (int64_t k = 0; k < count; k++) counts[guesses[order[k]].owner]++;
    int32_t some = count < total;
    if (some) *refused = guesses[order[count]].weighted;
    free(guesses);
    return some;
}

/* Write tokens, parents, depths and origins of a tree: the branch, and behind it the first `count` guesses. Returns the
   end of what was written, and the sum of the guesses' scores in `expected`. */
static int32_t *write_tree(int32_t *to, const Step *step, const int32_t *branch, int32_t count, double *expected) {
    for (int field = 0; field < 4; field++) {
        if (field < 3) {
            memcpy(to, branch + (int64_t)field * step->branch, (size_t)step->branch * sizeof *to);
            to += step->branch;
        }
        if (count) memcpy(to, step->draft->guesses + (int64_t)field * step->draft->capacity, (size_t)count * sizeof *to);
        to += count;
    }
    *expected = 0.0;
    for (int32_t i = 0; i < count; i++) *expected += step->draft->scores[i];
    return to;
}

/* The searches of a step: what comes with each sequence, and how many guesses it finds. */
typedef struct {
    const Step *steps;
    const int32_t **numbers;
    int32_t *counts;
} Searches;

static void search_one(void *of, int32_t place) {
    Searches *s = of;
    s->counts[place] = s->steps[place].draft ? draft_search(&s->steps[place], s->numbers[place]) : 0;
}

/* Search every sequence's guesses, take the best of all of them, and write the trees. `numbers` are what comes with the
   steps; no two steps have the same draft. `counts` are how many guesses each sequence takes; if one fails, all of these
   are the results of the searches. `expected` has the trees' sums of scores, and at its end what the best refused guess
   scores. Returns whether there is one. */
int32_t draft_choose(
    const Share *share, const Step *steps, const int32_t *numbers, int32_t *counts, double *expected, int32_t *trees,
    Workers *workers
) {
    const int32_t **parts = malloc((size_t)share->sequences * sizeof *parts);
    if (!parts) return -1;
    for (int32_t i = 0; i < share->sequences; i++) {
        parts[i] = numbers;
        numbers += numbers_of(&steps[i]) + 3 * (int64_t)steps[i].branch;
    }
    workers_share(workers, search_one, &(Searches){steps, parts, counts}, share->sequences);
    int32_t failed = 0;
    for (int32_t i = 0; i < share->sequences; i++) {
        if (counts[i] < 0) failed = counts[i];
    }
    int32_t some = failed ? failed : best_counts(share, steps, counts, &expected[share->sequences]);
    for (int32_t i = 0; some >= 0 && i < share->sequences; i++) {
        trees = write_tree(trees, &steps[i], parts[i] + numbers_of(&steps[i]), counts[i], &expected[i]);
    }
    free(parts);
    return some;
}
