/* The structs that Python packs (layout.py has the same fields in the same order). Python checks the table below when
   it loads the library; with 64-bit pointers, which the offsets here assume, the compiler also checks them. */

#include "drafter.h"

#include <stddef.h>

#define VERSION 1 /* increase it here and in layout.py when the meaning of an argument changes but no struct does */

#define LAYOUT(SIZE, FIELD) \
    SIZE(TextSettings, 40) \
    FIELD(TextSettings, ngram, 0) FIELD(TextSettings, guesses, 4) FIELD(TextSettings, key, 8) \
    FIELD(TextSettings, branches, 12) FIELD(TextSettings, reach, 16) FIELD(TextSettings, suffix, 20) \
    FIELD(TextSettings, fed, 24) FIELD(TextSettings, longest_match, 32) FIELD(TextSettings, deepest, 36) \
    SIZE(StepSuccessors, 28) \
    FIELD(StepSuccessors, nodes, 0) FIELD(StepSuccessors, needed_count, 4) FIELD(StepSuccessors, count, 8) \
    FIELD(StepSuccessors, before, 12) FIELD(StepSuccessors, replace, 20) FIELD(StepSuccessors, stride, 24) \
    SIZE(Candidates, 88) \
    FIELD(Candidates, last, 0) FIELD(Candidates, own, 8) FIELD(Candidates, shared, 16) FIELD(Candidates, bigrams, 24) \
    FIELD(Candidates, text, 32) FIELD(Candidates, rates, 40) FIELD(Candidates, drafted, 48) \
    FIELD(Candidates, scores, 56) FIELD(Candidates, bonus, 64) FIELD(Candidates, rate_count, 72) \
    FIELD(Candidates, first_origin, 76) FIELD(Candidates, capacity, 80) \
    FIELD(Candidates, chain, 84) \
    SIZE(Step, 88) \
    FIELD(Step, candidates, 0) FIELD(Step, cost, 8) FIELD(Step, trust, 16) FIELD(Step, bonus, 24) \
    FIELD(Step, floor, 32) FIELD(Step, all_taken, 40) FIELD(Step, cost_count, 44) FIELD(Step, max_tokens, 48) \
    FIELD(Step, max_depth, 52) \
    FIELD(Step, branch, 56) FIELD(Step, text_end, 60) FIELD(Step, chain_token_count, 72) FIELD(Step, chain_count, 76) \
    FIELD(Step, max_text, 80) FIELD(Step, root, 84) \
    SIZE(StepLimits, 32) \
    FIELD(StepLimits, cost, 0) FIELD(StepLimits, floor, 8) FIELD(StepLimits, cost_count, 16) \
    FIELD(StepLimits, sequences, 20) FIELD(StepLimits, max_weighed, 24) FIELD(StepLimits, max_tokens, 28) \
    SIZE(StepTree, 24) \
    FIELD(StepTree, candidates, 0) FIELD(StepTree, nodes, 8) FIELD(StepTree, branch, 12) FIELD(StepTree, width, 16) \
    FIELD(StepTree, needed_count, 20) \
    SIZE(PacketFields, 48) \
    FIELD(PacketFields, numbers, 0) FIELD(PacketFields, row_room, 8) FIELD(PacketFields, needed_room, 12) \
    FIELD(PacketFields, sequence_room, 16) FIELD(PacketFields, shapes, 20) FIELD(PacketFields, tokens, 24) \
    FIELD(PacketFields, sequence_of, 28) FIELD(PacketFields, parents, 32) FIELD(PacketFields, sequences, 36) \
    FIELD(PacketFields, needed, 40) \
    SIZE(TileField, 16) \
    FIELD(TileField, first, 0) FIELD(TileField, room, 4) FIELD(TileField, group, 8) FIELD(TileField, block, 12)

#if UINTPTR_MAX == UINT64_MAX
#define SAME_SIZE(type, size) _Static_assert(sizeof(type) == (size), "layout.py has another size of " #type);
#define SAME_OFFSET(type, field, offset) \
    _Static_assert(offsetof(type, field) == (offset), "layout.py has another offset of " #type "." #field);
LAYOUT(SAME_SIZE, SAME_OFFSET)
#endif

#define ITS_SIZE(type, size) sizeof(type),
#define ITS_OFFSET(type, field, offset) offsetof(type, field),

static const int32_t numbers[] = {VERSION, LAYOUT(ITS_SIZE, ITS_OFFSET)};

/* The count of the numbers that follow; the version; and for each struct its size and the offsets of its fields. */
const int32_t *drafter_layout(void) {
    static int32_t table[1 + sizeof numbers / sizeof *numbers];
    table[0] = sizeof numbers / sizeof *numbers;
    memcpy(table + 1, numbers, sizeof numbers);
    return table;
}
