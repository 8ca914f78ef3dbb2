/* Tables of successors: the twin of SuccessorDict, in successors.py. */

#include "drafter.h"

#define SMALL 2048 /* entries; a larger table frees its memory when it is cleared */

/* Add the index of an entry to the table, under a new key with this hash. */
static void add_slot(Slot *table, uint64_t mask, uint64_t h, int64_t entry) {
    uint64_t slot = h & mask;
    while (table[slot].entry >= 0) slot = (slot + 1) & mask;
    table[slot] = (Slot){(uint32_t)(h >> 32), (int32_t)entry};
}

/* Make room for another entry: drop the holes, and double the capacity if they were fewer than a quarter. */
static int make_room(Table *m) {
    int64_t capacity = m->capacity ? m->capacity : 64;
    if (m->live > capacity - capacity / 4) capacity *= 2;
    if (capacity > INT32_MAX / 4) return -1;
    uint64_t slots = 2 * (uint64_t)capacity;
    Entry *entries = malloc((size_t)capacity * sizeof(Entry));
    Slot *table = malloc(slots * sizeof(Slot));
    if (!entries || !table) {
        free(entries);
        free(table);
        return -1;
    }
    for (uint64_t slot = 0; slot < slots; slot++) table[slot].entry = FREE;
    int64_t used = 0;
    for (int64_t i = m->oldest; i < m->used; i++) {
        if (m->entries[i].value.count < 0) continue;
        entries[used] = m->entries[i];
        add_slot(table, slots - 1, hash(entries[used].key), used);
        used++;
    }
    free(m->entries);
    free(m->table);
    *m = (Table){entries, table, used, capacity, used, 0, slots - 1};
    return 0;
}

/* A new entry for a new key with this hash. NULL: out of memory. */
Entry *table_add(Table *m, const int32_t key[3], uint64_t h) {
    if (m->used == m->capacity && make_room(m)) return NULL;
    add_slot(m->table, m->mask, h, m->used);
    m->live++;
    Entry *entry = &m->entries[m->used++];
    memcpy(entry->key, key, sizeof entry->key);
    return entry;
}

/* The key's entry, or a new one. NULL: out of memory. */
static Entry *entry_for(Table *m, const int32_t key[3]) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(m, key, h);
    return slot >= 0 ? entry_at(m, slot) : table_add(m, key, h);
}

static void remove_at(Table *m, int64_t slot) {
    entry_at(m, slot)->value.count = -1;
    m->table[slot].entry = REMOVED;
    m->live--;
}

Table *table_new(void) { return calloc(1, sizeof(Table)); }

void table_free(Table *m) {
    free(m->entries);
    free(m->table);
    free(m);
}

int64_t table_length(const Table *m) { return m->live; }

/* A small table keeps its memory: a step's table is cleared and filled again in the next step. */
void table_clear(Table *m) {
    if (m->capacity && m->capacity <= SMALL) {
        for (uint64_t slot = 0; slot <= m->mask; slot++) m->table[slot].entry = FREE;
        m->used = m->live = m->oldest = 0;
        return;
    }
    free(m->entries);
    free(m->table);
    *m = (Table){0};
}

/* From `count` tokens and then their levels. */
static Successors successors_of(const int32_t *numbers, int32_t count) {
    Successors value = {.count = count};
    for (int32_t i = 0; i < count; i++) {
        value.token[i] = numbers[i];
        uint32_t level = (uint32_t)numbers[count + i];
        value.level[i] = (uint8_t)(level < LEVELS ? level : LEVELS - 1);
    }
    return value;
}

static int put(Table *m, const int32_t key[3], Successors value) {
    Entry *entry = entry_for(m, key);
    if (!entry) return -1;
    entry->value = value;
    return 0;
}

int table_put(Table *m, const int32_t key[3], const int32_t *numbers, int32_t count) {
    return put(m, key, successors_of(numbers, count));
}

/* Store `count` successors for each of the tokens 0 to `tokens` - 1, as keys of one token. */
int table_put_tokens(Table *m, const int32_t *numbers, int32_t tokens, int32_t count) {
    for (int32_t token = 0; token < tokens; token++) {
        if (put(m, (int32_t[3]){PAD, PAD, token}, successors_of(numbers + 2 * (int64_t)count * token, count))) return -1;
    }
    return 0;
}

/* Copy the key's successors. Returns their number, or -1 if there is no such key. */
int32_t table_get(const Table *m, const int32_t key[3], int32_t *numbers) {
    int64_t slot = find(m, key);
    if (slot < 0) return -1;
    const Successors *known = &entry_at(m, slot)->value;
    for (int32_t i = 0; i < known->count; i++) {
        numbers[i] = known->token[i];
        numbers[known->count + i] = known->level[i];
    }
    return known->count;
}

/* Copy the first key at or after entry `index`. Returns the index to continue from, or -1 if there is no such key. */
int64_t table_next(const Table *m, int64_t index, int32_t key[3]) {
    for (int64_t i = index > m->oldest ? index : m->oldest; i < m->used; i++) {
        if (m->entries[i].value.count < 0) continue;
        memcpy(key, m->entries[i].key, sizeof m->entries[i].key);
        return i + 1;
    }
    return -1;
}

/* Drop the oldest keys until at most `limit` are left. */
void table_evict(Table *m, int64_t limit) {
    while (m->live > limit) {
        while (m->entries[m->oldest].value.count < 0) m->oldest++;
        remove_at(m, find(m, m->entries[m->oldest].key));
    }
}

/* Store the successors of every needed node under the node's last three, two and one tokens. `tree` are the tokens, the
   parents and the needed nodes; `top` are 2 * count numbers for each needed node. */
int table_store_step(Table *m, const StepSuccessors *step, const int32_t *tree, const int32_t *top) {
    const int32_t *tokens = tree, *parents = tokens + step->nodes, *needed = parents + step->nodes;
    if (step->replace) table_clear(m);
    for (int32_t i = 0; i < step->needed_count; i++) {
        int32_t node = needed[i], before = step->before[1], before2 = step->before[0];
        if (node < 0 || node >= step->nodes || parents[node] >= node) return -2;
        int32_t parent = parents[node];
        if (parent > 0 && (parents[parent] < 0 || parents[parent] >= parent)) return -2;
        if (parent >= 0) {
            before = tokens[parent];
            before2 = parent ? tokens[parents[parent]] : step->before[1];
        }
        int32_t token = tokens[node];
        int32_t keys[3][3] = {{before2, before, token}, {PAD, before, token}, {PAD, PAD, token}};
        Successors value = successors_of(top + (int64_t)i * step->stride, step->count);
        for (int k = 0; k < 3; k++) {
            if (put(m, keys[k], value)) return -1;
        }
    }
    return 0;
}
