/* What the sequences of a step accept: the twin of accept, in verify.py. In the same call the texts take the
   accepted tokens, and the tables `last` what the step computed, as TextSource.absorb and RecycleSource.absorb do. */

#include "drafter.h"

/* From the root, follow the guess that equals the target. No guess stands before its parent, so one pass finds all.
   Returns how many tokens are accepted. `results` begin with the root's. */
static int32_t follow(
    const Ran *ran, const int32_t *tree, const int32_t *results, int32_t stride, int32_t *tokens, int32_t *path
) {
    const int32_t *parents = tree + ran->nodes;
    const int32_t *of_guess = results + ((int64_t)ran->needed_count - ran->nodes) * stride;
    int32_t node = 0, count = 1;
    tokens[0] = results[0];
    for (int32_t guess = ran->branch; guess < ran->nodes; guess++) {
        if (parents[guess] != node || tree[guess] != tokens[count - 1]) continue;
        node = path[count - 1] = guess;
        tokens[count++] = of_guess[(int64_t)guess * stride];
    }
    return count;
}

/* The window's n-grams, one per column: the twin of Window.ngrams. The root is column 0 of the first window row, the
   nodes of the other rows follow, and the targets of the newest row end the n-grams. NULL: out of memory. */
static int32_t *new_ngrams(const Ran *ran, const int32_t *tree, const int32_t *results, int32_t stride, int32_t size) {
    int32_t *ngrams = malloc((size_t)ran->width * (size_t)size * sizeof *ngrams), first = size > 2;
    for (int32_t column = 0; ngrams && column < ran->width; column++) {
        int32_t *ngram = ngrams + (int64_t)column * size;
        for (int32_t row = 0; row < size - 1; row++) ngram[row] = tree[row * ran->width + column];
        ngram[size - 1] = results[(int64_t)(first + column) * stride];
    }
    return ngrams;
}

/* Let the text and the table `last` take what the step showed. */
static int take(
    const Ran *ran, const int32_t *tree, const int32_t *results, int32_t stride, const int32_t *tokens, int32_t count
) {
    Text *text = ran->candidates->text;
    int64_t root = text->length - 1;
    int32_t one = root > 0 ? text->tokens[root - 1] : -1, two = root > 1 ? text->tokens[root - 2] : -1;
    Computed step = {ran->nodes, ran->needed_count, (stride - 1) / 2, {two, one}, 1, stride};
    int result = table_keep(ran->candidates->last, &step, tree, results + 1);
    if (result) return result;
    if (!ran->width) return text_take(text, tokens, count, NULL, 0);
    int32_t *ngrams = new_ngrams(ran, tree, results, stride, text->set.ngram);
    if (!ngrams) return -1;
    result = text_take(text, tokens, count, ngrams, ran->width);
    free(ngrams);
    return result;
}

/* `results` has `stride` numbers for each needed row of the step: the target, the top tokens, and their levels.
   `trees` are the tokens, parents and needed nodes of each tree. `counts` are how many tokens each sequence accepts,
   or why one failed; their tokens and paths stand one after the other, each path with one number to spare. There is
   room for as many numbers as the trees have nodes. */
void draft_accept(
    const Ran *ran, int32_t sequences, const int32_t *trees, const int32_t *results, int32_t stride, int32_t *counts,
    int32_t *tokens, int32_t *paths
) {
    for (int32_t i = 0; i < sequences; i++) {
        const Ran *one = &ran[i];
        int32_t count = one->nodes ? follow(one, trees, results, stride, tokens, paths) : 0;
        int result = count && one->candidates ? take(one, trees, results, stride, tokens, count) : 0;
        counts[i] = result ? result : count;
        if (!result) tokens += count, paths += count;
        trees += 2 * (int64_t)one->nodes + one->needed_count;
        results += (int64_t)one->needed_count * stride;
    }
}
