/* The choice among all sequences of a step: the twin of PythonDrafter.choose, in search.py. */

#include "drafter.h"

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

/* How many of `total` guesses a step of so many rows takes, best first; `least` of them are taken anyway. */
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

/* Cut the sequences' guesses, `counts[i]` of each, to those that the step takes. Returns whether it refuses one;
   `refused` is what the best of these scores. */
static int32_t best_counts(const Share *share, const Step *steps, int32_t *counts, double *refused) {
    int64_t total = 0, least = 0, rows = 0;
    for (int32_t i = 0; i < share->sequences; i++) {
        total += counts[i];
        least += steps[i].all_taken ? counts[i] : 0;
        rows += steps[i].branch;
    }
    Guess *guesses = malloc(((size_t)total + 1) * (sizeof *guesses + 2 * sizeof(int32_t)));
    if (!guesses) return -1;
    int32_t *order = (int32_t *)(guesses + total + 1), at = 0;
    for (int32_t i = 0; i < share->sequences; i++) {
        for (int32_t k = 0; k < counts[i]; k++, at++) {
            double weighted = steps[i].candidates->scores[k] * *steps[i].trust, value = weighted + steps[i].bonus;
            guesses[at] = (Guess){steps[i].all_taken ? value + 2.0 : value, value, weighted, i};
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

/* Write a tree's tokens, parents, depths and origins: the branch, and behind it the first `count` guesses. These fields
   are `rows` numbers apart. Returns the sum of the guesses' scores. */
static double write_tree(int32_t *to, int64_t rows, const Step *step, const int32_t *branch, int32_t count) {
    const int32_t root[3] = {step->root, -1, 0}, none = 0;
    if (step->branch == 1) branch = root;
    for (int field = 0; field < 4; field++, to += rows) {
        int32_t own = field < 3 ? step->branch : 0;
        memcpy(to, branch + (int64_t)field * own, (size_t)own * sizeof *to);
        const int32_t *guesses = count ? step->candidates->guesses + (int64_t)field * step->candidates->capacity : &none;
        memcpy(to + own, guesses, (size_t)count * sizeof *to);
    }
    double expected = 0.0;
    for (int32_t i = 0; i < count; i++) expected += step->candidates->scores[i];
    return expected;
}

/* How many integers come with a step. */
static int64_t numbers_of(const Step *step) {
    int64_t branch = step->branch > 1 ? 3 * (int64_t)step->branch : 0;
    return 2 * (int64_t)step->chain_token_count + step->chain_count + branch;
}

/* The searches of a step: what comes with each sequence, and how many guesses it finds. */
typedef struct {
    const Step *steps;
    const int32_t **numbers;
    int32_t *counts;
} Searches;

static void search_one(void *of, int32_t place) {
    Searches *s = of;
    const Step *step = &s->steps[place];
    s->counts[place] = step->candidates && step->max_depth > 0 ? draft_search(step, s->numbers[place]) : 0;
}

/* The step of a sequence as it is now: its floor, and where its text ends. */
static Step current(const Step *given, double floor) {
    Step step = *given;
    if (!step.candidates) return step;
    step.floor = step.all_taken ? 0.0 : floor / *step.trust;
    if (!step.most_tokens) return step;
    const Text *text = step.candidates->text;
    for (int i = 0; i < 3; i++) step.text_end[2 - i] = i < text->length ? text->tokens[text->length - 1 - i] : -1;
    step.root = step.text_end[2];
    /* An accepted guess at depth d means d + 1 tokens. */
    step.max_depth = (int32_t)smaller(step.max_depth, step.most_tokens - text->length - 1);
    return step;
}

/* Search every sequence's guesses, take the best of all of them, and write the trees: all tokens, all parents, all
   depths, and all origins, as many of each as the trees have nodes. `given` are the sequences' steps, and `numbers`
   what comes with them; no two steps have the same candidates. `counts` are how many guesses each sequence takes; if one
   fails, all of these are the results of the searches. `expected` has the trees' sums of scores, and at its end the
   weighted score of the best refused guess. Returns whether there is one. */
int32_t draft_choose(
    const Share *share, const Step *const *given, const int32_t *numbers, int32_t *counts, double *expected,
    int32_t *trees, Workers *workers
) {
    size_t sequences = (size_t)share->sequences;
    Step *steps = malloc(sequences * (sizeof *steps + sizeof numbers));
    if (!steps) return -1;
    const int32_t **parts = (const int32_t **)(steps + sequences);
    for (size_t i = 0; i < sequences; i++) {
        steps[i] = current(given[i], share->floor);
        parts[i] = numbers;
        numbers += numbers_of(&steps[i]);
    }
    workers_share(workers, search_one, &(Searches){steps, parts, counts}, share->sequences);
    int32_t failed = 0;
    for (size_t i = 0; i < sequences; i++) {
        if (counts[i] < 0) failed = counts[i];
    }
    int32_t some = failed ? failed : best_counts(share, steps, counts, &expected[sequences]);
    int64_t rows = 0;
    for (size_t i = 0; some >= 0 && i < sequences; i++) rows += steps[i].branch + counts[i];
    for (size_t i = 0; some >= 0 && i < sequences; i++) {
        const int32_t *branch = parts[i] + 2 * (int64_t)steps[i].chain_token_count + steps[i].chain_count;
        expected[i] = write_tree(trees, rows, &steps[i], branch, counts[i]);
        trees += steps[i].branch + counts[i];
    }
    free(steps);
    return some;
}
