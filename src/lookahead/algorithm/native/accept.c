/* Verification: the twin of accept, in verify.py. The same call appends the accepted tokens to the texts and stores the
   step's top tokens in the tables `last`, as TextSource.learn_from and RecycleSource.learn_from do. */

#include "drafter.h"

/* From the root, follow the draft token that equals the target. Parents come before their children, so one pass over
   the tree is enough. Returns the number of accepted tokens. `results` begin with the root's. */
static int32_t accept_path(
    const StepTree *tree, const int32_t *nodes, const int32_t *results, int32_t stride, int32_t *tokens, int32_t *path
) {
    const int32_t *parents = nodes + tree->nodes;
    /* The draft tokens are the last of the needed nodes. */
    const int32_t *drafted = results + ((int64_t)tree->needed_count - tree->nodes) * stride;
    int32_t node = 0, count = 1;
    tokens[0] = results[0];
    for (int32_t child = tree->branch; child < tree->nodes; child++) {
        if (parents[child] != node || nodes[child] != tokens[count - 1]) continue;
        node = path[count - 1] = child;
        tokens[count++] = drafted[(int64_t)child * stride];
    }
    return count;
}

/* The window's n-grams, one per column: the twin of Window.ngrams. The root is column 0 of the first window row, the
   nodes of the other rows follow, and the targets of the newest row end the n-grams. NULL: out of memory. */
static int32_t *new_ngrams(
    const StepTree *tree, const int32_t *nodes, const int32_t *results, int32_t stride, int32_t size
) {
    int32_t *ngrams = malloc((size_t)tree->width * (size_t)size * sizeof *ngrams), first = size > 2;
    for (int32_t column = 0; ngrams && column < tree->width; column++) {
        int32_t *ngram = ngrams + (int64_t)column * size;
        for (int32_t row = 0; row < size - 1; row++) ngram[row] = nodes[row * tree->width + column];
        ngram[size - 1] = results[(int64_t)(first + column) * stride];
    }
    return ngrams;
}

/* Append the accepted tokens to the text, and store the step's top tokens in the table `last`. */
static int learn(
    const StepTree *tree, const int32_t *nodes, const int32_t *results, int32_t stride, const int32_t *tokens,
    int32_t count
) {
    Text *text = tree->candidates->text;
    int64_t root = text->length - 1;
    int32_t before = root > 0 ? text->tokens[root - 1] : -1, before2 = root > 1 ? text->tokens[root - 2] : -1;
    StepSuccessors step = {tree->nodes, tree->needed_count, (stride - 1) / 2, {before2, before}, 1, stride};
    int result = table_store_step(tree->candidates->last, &step, nodes, results + 1);
    if (result) return result;
    if (!tree->width) return text_extend(text, tokens, count, NULL, 0);
    int32_t *ngrams = new_ngrams(tree, nodes, results, stride, text->set.ngram);
    if (!ngrams) return -1;
    result = text_extend(text, tokens, count, ngrams, tree->width);
    free(ngrams);
    return result;
}

/* `results` has `stride` numbers for each needed row of the step: the target, the top tokens, and their levels.
   `nodes` are the tokens, parents and needed nodes of each tree. Output: `counts` are the numbers of accepted tokens of
   the sequences, or error codes; `tokens` and `paths` are concatenated, each path with one unused number at its end.
   Both have room for one number per node. */
void draft_accept(
    const StepTree *trees, int32_t sequences, const int32_t *nodes, const int32_t *results, int32_t stride,
    int32_t *counts, int32_t *tokens, int32_t *paths
) {
    for (int32_t i = 0; i < sequences; i++) {
        const StepTree *tree = &trees[i];
        int32_t count = tree->nodes ? accept_path(tree, nodes, results, stride, tokens, paths) : 0;
        int result = count && tree->candidates ? learn(tree, nodes, results, stride, tokens, count) : 0;
        counts[i] = result ? result : count;
        if (!result) tokens += count, paths += count;
        nodes += 2 * (int64_t)tree->nodes + tree->needed_count;
        results += (int64_t)tree->needed_count * stride;
    }
}
