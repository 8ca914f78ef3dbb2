/* The rows of a step's packet: the twin of Packet.write_rows, in backends/graph/packet.py, for a step without prompt
   chunks whose trees are one forest. */

#include "drafter.h"

static void fill(int32_t *to, int64_t count, int32_t number) {
    for (int64_t i = 0; i < count; i++) to[i] = number;
}

/* The tiles of attention for one head shape. Returns their number; those beyond the field are not written. */
static int32_t write_tiles(const TileField *shape, int32_t *tiles, const int32_t *sequences, int32_t count) {
    int32_t written = 0;
    for (int32_t i = 0, row = 0; i < count; row += sequences[2 * count + i], i++) {
        int32_t slot = sequences[i], length = sequences[count + i], nodes = sequences[2 * count + i];
        int32_t blocks = (int32_t)(((int64_t)nodes * shape->group + shape->block - 1) / shape->block);
        for (int32_t block = 0; block < blocks; block++, written++) {
            if (written >= shape->room) continue;
            int32_t tile[] = {slot, length, row, nodes, block, 1};
            memcpy(tiles + (int64_t)written * 6, tile, sizeof tile);
        }
    }
    return written;
}

/* `sequences` are the slots, the cached tokens, the nodes and the needed nodes of all sequences: the root and the last
   nodes of a tree are needed. `forest` are the tokens of all trees, and then their parents. Output: `tile_counts`, the
   number of tiles of each head shape, which may be more than its field has room for. */
int packet_write_rows(
    const PacketFields *p, const TileField *shapes, const int32_t *sequences, int32_t count, const int32_t *forest,
    int32_t *tile_counts
) {
    const int32_t *slots = sequences, *lengths = slots + count, *nodes = lengths + count, *counts = nodes + count;
    int64_t rows = 0, needed_rows = 0;
    for (int32_t i = 0; i < count; i++) {
        if (counts[i] < 1 || counts[i] > nodes[i]) return -2;
        rows += nodes[i], needed_rows += counts[i];
    }
    if (rows > p->row_room || needed_rows > p->needed_room || count > p->sequence_room) return -2;
    int32_t *sequence_of = p->numbers + p->sequence_of, *needed = p->numbers + p->needed;
    int32_t *records = p->numbers + p->sequences;
    for (int32_t i = 0, row = 0; i < count; row += nodes[i], i++) {
        fill(sequence_of + row, nodes[i], i);
        *needed++ = row;
        for (int32_t node = nodes[i] - counts[i] + 1; node < nodes[i]; node++) *needed++ = row + node;
        int32_t record[] = {slots[i], lengths[i], row, 0, nodes[i]};
        memcpy(records + (int64_t)i * 5, record, sizeof record);
    }
    fill(needed, p->needed_room - needed_rows, 0);
    fill(sequence_of + rows, p->row_room - rows, -1);
    memcpy(p->numbers + p->tokens, forest, (size_t)rows * sizeof *forest);
    fill(p->numbers + p->tokens + rows, p->row_room - rows, 0);
    memcpy(p->numbers + p->parents, forest + rows, (size_t)rows * sizeof *forest);
    fill(p->numbers + p->parents + rows, p->row_room - rows, -1);
    for (int32_t shape = 0; shape < p->shapes; shape++) {
        tile_counts[shape] = write_tiles(&shapes[shape], p->numbers + shapes[shape].first, sequences, count);
    }
    return 0;
}
