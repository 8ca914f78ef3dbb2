/* The choice among all sequences of a step: the twin of PythonDrafter.draft_trees, in search.py. */

#include "drafter.h"

typedef struct {
    double rank, value, weighted;
    int32_t sequence;
} DraftToken;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sort indexes of draft tokens by rank, the best first; the sort is stable. `indexes` needs room for twice as many. */
static int32_t *sort_by_rank(const DraftToken *drafted, int32_t *indexes, int64_t count) {
    int32_t *from = indexes, *to = indexes + count;
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t start = 0; start < count; start += 2 * width) {
            int64_t a = start, middle = smaller(start + width, count), b = middle, end = smaller(middle + width, count);
            for (int64_t k = start; k < end; k++) {
                int first = b == end || (a < middle && drafted[from[a]].rank >= drafted[from[b]].rank);
                to[k] = first ? from[a++] : from[b++];
            }
        }
        int32_t *sorted = to;
        to = from, from = sorted;
    }
    return from;
}

/* How many of `total` draft tokens, best first, a step takes in addition to `rows` rows; it takes at least `least`. */
static int64_t best_total(
    const StepLimits *limits, const DraftToken *drafted, const int32_t *order, int64_t total, int64_t least,
    int64_t rows
) {
    int64_t count = limits->max_weighed < 0 ? total : smaller(total, least + limits->max_weighed);
    if (limits->max_tokens >= 0) count = smaller(count, limits->max_tokens);
    least = smaller(least, count);
    if (!limits->cost) return count;
    count = smaller(count, limits->cost_count - rows);
    if (count <= least) return least;
    double tokens = limits->sequences, best = 0.0;
    int64_t last = count;
    for (int64_t k = 0; k <= last; k++) {
        if (k) tokens += drafted[order[k - 1]].value;
        if (k < least) continue;
        double gain = tokens / limits->cost[rows - 1 + k];
        if (k == least || gain > best) best = gain, count = k;
    }
    return count;
}

/* Reduce `counts`, the draft tokens of each sequence, to those that the step takes. Returns whether it refuses any;
   `refused` is the weighted score of the best one that it refuses. */
static int32_t best_counts(const StepLimits *limits, const Step *steps, int32_t *counts, double *refused) {
    int64_t total = 0, least = 0, rows = 0;
    for (int32_t i = 0; i < limits->sequences; i++) {
        total += counts[i];
        least += steps[i].all_taken ? counts[i] : 0;
        rows += steps[i].branch;
    }
    DraftToken *drafted = malloc(((size_t)total + 1) * (sizeof *drafted + 2 * sizeof(int32_t)));
    if (!drafted) return -1;
    int32_t *order = (int32_t *)(drafted + total + 1), index = 0;
    for (int32_t i = 0; i < limits->sequences; i++) {
        for (int32_t k = 0; k < counts[i]; k++, index++) {
            double weighted = steps[i].candidates->scores[k] * *steps[i].trust, value = weighted + steps[i].bonus;
            drafted[index] = (DraftToken){steps[i].all_taken ? value + 2.0 : value, value, weighted, i};
            order[index] = index;
        }
        counts[i] = 0;
    }
    order = sort_by_rank(drafted, order, total);
    int64_t count = best_total(limits, drafted, order, total, least, rows);
    for (int64_t k = 0; k < count; k++) counts[drafted[order[k]].sequence]++;
    int32_t refuses = count < total;
    if (refuses) *refused = drafted[order[count]].weighted;
    free(drafted);
    return refuses;
}

/* Write a tree's tokens, parents, depths and origins: the branch, followed by the first `count` draft tokens. These
   fields are `rows` numbers apart. Returns the sum of the draft tokens' scores. */
static double write_tree(int32_t *to, int64_t rows, const Step *step, const int32_t *branch, int32_t count) {
    const int32_t root[3] = {step->root, -1, 0}, none = 0;
    if (step->branch == 1) branch = root;
    for (int field = 0; field < 4; field++, to += rows) {
        int32_t size = field < 3 ? step->branch : 0;
        memcpy(to, branch + (int64_t)field * size, (size_t)size * sizeof *to);
        const Candidates *d = step->candidates;
        const int32_t *drafted = count ? d->drafted + (int64_t)field * d->capacity : &none;
        memcpy(to + size, drafted, (size_t)count * sizeof *to);
    }
    double expected = 0.0;
    for (int32_t i = 0; i < count; i++) expected += step->candidates->scores[i];
    return expected;
}

/* The number of integers that come with a step. */
static int64_t numbers_of(const Step *step) {
    int64_t branch = step->branch > 1 ? 3 * (int64_t)step->branch : 0;
    return 2 * (int64_t)step->chain_token_count + step->chain_count + branch;
}

/* The searches of a step: the integers that come with each sequence, and the number of draft tokens that it finds. */
typedef struct {
    const Step *steps;
    const int32_t **numbers;
    int32_t *counts;
} Searches;

static void search_sequence(void *argument, int32_t index) {
    Searches *s = argument;
    const Step *step = &s->steps[index];
    s->counts[index] = step->candidates && step->max_depth > 0 ? draft_search(step, s->numbers[index]) : 0;
}

/* A copy of a sequence's step with the current floor and, for a cached draft, the current end of its text. */
static Step current_step(const Step *given, double floor) {
    Step step = *given;
    if (!step.candidates) return step;
    step.floor = step.all_taken ? 0.0 : floor / *step.trust;
    if (!step.max_text) return step;
    const Text *text = step.candidates->text;
    for (int i = 0; i < 3; i++) step.text_end[2 - i] = i < text->length ? text->tokens[text->length - 1 - i] : -1;
    step.root = step.text_end[2];
    /* An accepted draft token at depth d gives d + 1 tokens. */
    step.max_depth = (int32_t)smaller(step.max_depth, step.max_text - text->length - 1);
    return step;
}

/* Search for every sequence's draft tokens, take the best of all of them, and write the trees: all tokens, all parents,
   all depths and all origins, one of each per node. `given` are the sequences' steps, and `numbers` the integers that
   come with them; no two steps share candidates. Output: `counts` are the draft tokens taken of each sequence, or after
   an error the results of the searches. `expected` has the sum of scores of each tree, and at its end the weighted
   score of the best refused draft token. Returns whether there is one. */
int32_t draft_trees(
    const StepLimits *limits, const Step *const *given, const int32_t *numbers, int32_t *counts, double *expected,
    int32_t *trees, Workers *workers
) {
    size_t sequences = (size_t)limits->sequences;
    Step *steps = malloc(sequences * (sizeof *steps + sizeof numbers));
    if (!steps) return -1;
    const int32_t **parts = (const int32_t **)(steps + sequences);
    for (size_t i = 0; i < sequences; i++) {
        steps[i] = current_step(given[i], limits->floor);
        parts[i] = numbers;
        numbers += numbers_of(&steps[i]);
    }
    workers_run(workers, search_sequence, &(Searches){steps, parts, counts}, limits->sequences);
    int32_t failed = 0;
    for (size_t i = 0; i < sequences; i++) {
        if (counts[i] < 0) failed = counts[i];
    }
    int32_t refuses = failed ? failed : best_counts(limits, steps, counts, &expected[sequences]);
    int64_t rows = 0;
    for (size_t i = 0; refuses >= 0 && i < sequences; i++) rows += steps[i].branch + counts[i];
    for (size_t i = 0; refuses >= 0 && i < sequences; i++) {
        const int32_t *branch = parts[i] + 2 * (int64_t)steps[i].chain_token_count + steps[i].chain_count;
        expected[i] = write_tree(trees, rows, &steps[i], branch, counts[i]);
        trees += steps[i].branch + counts[i];
    }
    free(steps);
    return refuses;
}
