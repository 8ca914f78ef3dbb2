/* The structs that Python packs (layout.py has the same fields in the same order). Python checks the table below when it
   loads the library; where pointers have 64 bits, as the offsets here do, the compiler checks them as well. */

#include "drafter.h"

#include <stddef.h>

#define VERSION 1 /* raised in layout.py, too, when the meaning of an argument changes and no struct shows it */

#define LAYOUT(SIZE, FIELD) \
    SIZE(Settings, 40) \
    FIELD(Settings, ngram, 0) FIELD(Settings, guesses, 4) FIELD(Settings, key, 8) FIELD(Settings, branches, 12) \
    FIELD(Settings, reach, 16) FIELD(Settings, suffix, 20) FIELD(Settings, fed, 24) \
    FIELD(Settings, longest_match, 32) FIELD(Settings, deepest, 36) \
    SIZE(Computed, 28) \
    FIELD(Computed, nodes, 0) FIELD(Computed, needed_count, 4) FIELD(Computed, count, 8) FIELD(Computed, before, 12) \
    FIELD(Computed, only, 20) FIELD(Computed, stride, 24) \
    SIZE(Candidates, 80) \
    FIELD(Candidates, last, 0) FIELD(Candidates, own, 8) FIELD(Candidates, shared, 16) FIELD(Candidates, text, 24) \
    FIELD(Candidates, rates, 32) FIELD(Candidates, guesses, 40) FIELD(Candidates, scores, 48) \
    FIELD(Candidates, taught, 56) FIELD(Candidates, rate_count, 64) FIELD(Candidates, first_origin, 68) \
    FIELD(Candidates, capacity, 72) \
    SIZE(Step, 88) \
    FIELD(Step, candidates, 0) FIELD(Step, cost, 8) FIELD(Step, trust, 16) FIELD(Step, bonus, 24) \
    FIELD(Step, floor, 32) FIELD(Step, all_taken, 40) FIELD(Step, cost_count, 44) FIELD(Step, room, 48) \
    FIELD(Step, max_depth, 52) \
    FIELD(Step, branch, 56) FIELD(Step, text_end, 60) FIELD(Step, chain_token_count, 72) FIELD(Step, chain_count, 76) \
    FIELD(Step, most_tokens, 80) FIELD(Step, root, 84) \
    SIZE(Share, 32) \
    FIELD(Share, cost, 0) FIELD(Share, floor, 8) FIELD(Share, cost_count, 16) FIELD(Share, sequences, 20) \
    FIELD(Share, most, 24) FIELD(Share, room, 28) \
    SIZE(Ran, 24) \
    FIELD(Ran, candidates, 0) FIELD(Ran, nodes, 8) FIELD(Ran, branch, 12) FIELD(Ran, width, 16) \
    FIELD(Ran, needed_count, 20)

#if UINTPTR_MAX == UINT64_MAX
#define SAME_SIZE(type, size) _Static_assert(sizeof(type) == (size), "layout.py has another size of " #type);
#define SAME_OFFSET(type, field, offset) \
    _Static_assert(offsetof(type, field) == (offset), "layout.py has another offset of " #type "." #field);
LAYOUT(SAME_SIZE, SAME_OFFSET)
#endif

#define ITS_SIZE(type, size) sizeof(type),
#define ITS_OFFSET(type, field, offset) offsetof(type, field),

static const int32_t numbers[] = {VERSION, LAYOUT(ITS_SIZE, ITS_OFFSET)};

/* How many numbers follow; the version; and of each struct its size and the offsets of its fields. */
const int32_t *drafter_layout(void) {
    static int32_t table[1 + sizeof numbers / sizeof *numbers];
    table[0] = sizeof numbers / sizeof *numbers;
    memcpy(table + 1, numbers, sizeof numbers);
    return table;
}
