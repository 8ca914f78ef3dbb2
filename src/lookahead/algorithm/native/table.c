/* Tables of successors: the twin of SuccessorDict, in successors.py. */

#include "drafter.h"

#define SMALL 2048 /* entries; a larger table gives its memory back when it is cleared */

/* Enter a place into the table, under a key with this hash that is not there. */
static void enter(Slot *table, uint64_t mask, uint64_t h, int64_t place) {
    uint64_t slot = h & mask;
    while (table[slot].place >= 0) slot = (slot + 1) & mask;
    table[slot] = (Slot){(uint32_t)(h >> 32), (int32_t)place};
}

/* Make room for one more entry: drop the holes, and double where they were fewer than a quarter. */
static int make_room(Table *m) {
    int64_t room = m->room ? m->room : 64;
    if (m->live > room - room / 4) room *= 2;
    if (room > INT32_MAX / 4) return -1;
    uint64_t slots = 2 * (uint64_t)room;
    Entry *entries = malloc((size_t)room * sizeof(Entry));
    Slot *table = malloc(slots * sizeof(Slot));
    if (!entries || !table) {
        free(entries);
        free(table);
        return -1;
    }
    for (uint64_t slot = 0; slot < slots; slot++) table[slot].place = FREE;
    int64_t used = 0;
    for (int64_t i = m->oldest; i < m->used; i++) {
        if (m->entries[i].value.count < 0) continue;
        entries[used] = m->entries[i];
        enter(table, slots - 1, hash(entries[used].key), used);
        used++;
    }
    free(m->entries);
    free(m->table);
    *m = (Table){entries, table, used, room, used, 0, slots - 1};
    return 0;
}

/* A new entry, the youngest, under a key with this hash that is not there. NULL: out of memory. */
Entry *table_enter(Table *m, const int32_t key[3], uint64_t h) {
    if (m->used == m->room && make_room(m)) return NULL;
    enter(m->table, m->mask, h, m->used);
    m->live++;
    Entry *entry = &m->entries[m->used++];
    memcpy(entry->key, key, sizeof entry->key);
    return entry;
}

/* The key's entry, or a new one. NULL: out of memory. */
static Entry *entry_for(Table *m, const int32_t key[3]) {
    uint64_t h = hash(key);
    int64_t slot = find_hashed(m, key, h);
    return slot >= 0 ? entry_at(m, slot) : table_enter(m, key, h);
}

static void remove_at(Table *m, int64_t slot) {
    entry_at(m, slot)->value.count = -1;
    m->table[slot].place = GONE;
    m->live--;
}

Table *table_new(void) { return calloc(1, sizeof(Table)); }

void table_free(Table *m) {
    free(m->entries);
    free(m->table);
    free(m);
}

int64_t table_length(const Table *m) { return m->live; }

/* A small table keeps its room: a step's table is cleared and filled again at the next step. */
void table_clear(Table *m) {
    if (m->room && m->room <= SMALL) {
        for (uint64_t slot = 0; slot <= m->mask; slot++) m->table[slot].place = FREE;
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

/* Copy the key's successors. Returns how many there are, or -1 if the key is not there. */
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

/* Copy the first key at or after `place`. Returns the place to continue from, or -1 if there is no such key. */
int64_t table_next(const Table *m, int64_t place, int32_t key[3]) {
    for (int64_t i = place > m->oldest ? place : m->oldest; i < m->used; i++) {
        if (m->entries[i].value.count < 0) continue;
        memcpy(key, m->entries[i].key, sizeof m->entries[i].key);
        return i + 1;
    }
    return -1;
}

/* Drop the oldest keys until at most `limit` are left. */
void table_forget(Table *m, int64_t limit) {
    while (m->live > limit) {
        while (m->entries[m->oldest].value.count < 0) m->oldest++;
        remove_at(m, find(m, m->entries[m->oldest].key));
    }
}

/* Keep the successors of every needed node under the node's last three, two and one tokens. `tree` are the tokens,
   the parents and the needed nodes; `top` are 2 * count numbers of each needed node. With `only`, all that was kept
   before is dropped. */
int table_keep(Table *m, const Computed *step, const int32_t *tree, const int32_t *top) {
    const int32_t *tokens = tree, *parents = tokens + step->nodes, *needed = parents + step->nodes;
    if (step->only) table_clear(m);
    for (int32_t i = 0; i < step->needed_count; i++) {
        int32_t node = needed[i], one = step->before[1], two = step->before[0];
        if (node < 0 || node >= step->nodes || parents[node] >= node) return -2;
        int32_t parent = parents[node];
        if (parent > 0 && (parents[parent] < 0 || parents[parent] >= parent)) return -2;
        if (parent >= 0) {
            one = tokens[parent];
            two = parent ? tokens[parents[parent]] : step->before[1];
        }
        int32_t token = tokens[node];
        int32_t keys[3][3] = {{two, one, token}, {NONE, one, token}, {NONE, NONE, token}};
        Successors value = successors_of(top + (int64_t)i * step->stride, step->count);
        for (int k = 0; k < 3; k++) {
            if (put(m, keys[k], value)) return -1;
        }
    }
    return 0;
}
