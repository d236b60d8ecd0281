// The content digest of docs/digest.md, unit by unit; compiled as moves.cuh is. Layouts are those of
// agent/src/executor/digest/table.rs.
#pragma once
#include "moves.cuh"

struct RowLoop {
    u64 count;
    u64 stride; // bytes
    u64 rows;
};

// One dense box of a part: rows of elements, repeated by loops, outermost first. Column numbers are those of the whole
// tensor, and so are the numbers of rows.
struct RowsEntry {
    u64 unit; // first of its units
    u64 base;
    u64 row;
    u64 column;
    u64 columns;
    u64 stride; // bytes from one column to the next
    RowLoop loops[DIMS_MAX];
    u32 depth;
    u32 cast;
    u32 element; // bytes on the wire
    u32 sum;
};

#define LANES 4
// What one thread sums at once: so many words across, whose keys it keeps, and so many rows down.
#define UNIT_WORDS 8
#define UNIT_ROWS 64

DEVICE u64 mix(u64 x) {
    u64 z = x + 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

DEVICE int column_key(u32 lane, u64 word) { return (short)(u16)(mix(((u64)lane << 56) + word) | 1); }

DEVICE u32 row_key(u32 lane, u64 row) { return (u32)mix(((u64)lane << 56) + (1ull << 48) + row) | 1; }

DEVICE u32 digest_words(u32 element) { return element == 1 ? 1 : element / 2; }

DEVICE u64 rows_of(const RowsEntry& entry) {
    u64 rows = 1;
    for (u32 at = 0; at < entry.depth; at++) rows *= entry.loops[at].count;
    return rows;
}

// The entry that has unit `unit`: the last one that begins there or before.
DEVICE u32 entry_of_unit(const RowsEntry* table, u32 entries, u64 unit) {
    u32 low = 0, high = entries;
    ROLLED
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (table[middle].unit <= unit) low = middle; else high = middle;
    }
    return low;
}

// First byte and number of row `index` of the entry.
DEVICE u64 locate_row(const RowsEntry& entry, u64 index, u64* row) {
    u64 address = entry.base;
    *row = entry.row;
    ROLLED
    for (u32 at = entry.depth; at-- > 0;) {
        u64 turn = index % entry.loops[at].count;
        address += turn * entry.loops[at].stride;
        *row += turn * entry.loops[at].rows;
        index /= entry.loops[at].count;
    }
    return address;
}

// Word `word` of the element at `from`, in wire dtype.
DEVICE u32 word_at(const RowsEntry& entry, const u8* from, u32 word) {
    u16 bits = 0;
    if (entry.cast != NONE) {
        u32 wide = 0;
        cast_element((u8*)&wide, from, entry.cast);
        return word == 0 ? wide & 0xffffu : wide >> 16;
    }
    copy_bytes((u8*)&bits, from + 2 * word, entry.element == 1 ? 1 : 2);
    return bits;
}

// `width` elements from `address` on, as words in wire dtype, the first one lowest; 0 beyond them.
DEVICE void read_words(const RowsEntry& entry, u64 address, u32 width, u64 words[2]) {
    u32 across = digest_words(entry.element), count = width * across;
    if (entry.cast == NONE && entry.element > 1 && entry.stride == entry.element && count == UNIT_WORDS && (address & 15) == 0) {
        union { Vector vector; u64 words[2]; } read;
        read.vector = *(const Vector*)address;
        words[0] = read.words[0];
        words[1] = read.words[1];
        return;
    }
    words[0] = words[1] = 0;
    ROLLED
    for (u32 at = 0; at < count; at++) {
        u64 word = word_at(entry, (const u8*)(address + at / across * entry.stride), at % across);
        word <<= at % 4 * 16;
        if (at < 4) words[0] |= word; else words[1] |= word;
    }
}

// Adds unit `unit` of the entry to `lanes`. `row_keys` has the keys of the first `keyed_rows` rows, all lanes of a row
// side by side; those of later rows are computed.
DEVICE void digest_unit(const RowsEntry& entry, u64 unit, const u32* row_keys, u64 keyed_rows, u32 lanes[LANES]) {
    u32 across = digest_words(entry.element), elements = UNIT_WORDS / across;
    u64 strips = (entry.columns + elements - 1) / elements, at = unit - entry.unit;
    u64 column = at % strips * elements, left = entry.columns - column, rows = rows_of(entry);
    u32 width = left < elements ? (u32)left : elements;
    u64 index = at / strips * UNIT_ROWS, end = index + UNIT_ROWS < rows ? index + UNIT_ROWS : rows;
    int keys[LANES][UNIT_WORDS];
    for (u32 lane = 0; lane < LANES; lane++)
        for (u32 word = 0; word < UNIT_WORDS; word++)
            keys[lane][word] = column_key(lane, (entry.column + column) * across + word);
    RowLoop inner = {1, 0, 0};
    if (entry.depth > 0) inner = entry.loops[entry.depth - 1];
    u64 row = 0, address = 0, turn = inner.count;
    ROLLED
    for (; index < end; index++) {
        if (turn == inner.count) {
            address = locate_row(entry, index, &row) + column * entry.stride;
            turn = index % inner.count;
        }
        u64 words[2];
        read_words(entry, address, width, words);
        for (u32 lane = 0; lane < LANES; lane++) {
            u32 dot = 0;
            for (u32 word = 0; word < UNIT_WORDS; word++) dot += (u32)((short)(u16)(words[word / 4] >> word % 4 * 16) * keys[lane][word]);
            lanes[lane] += dot * (row < keyed_rows ? row_keys[row * LANES + lane] : row_key(lane, row));
        }
        address += inner.stride;
        row += inner.rows;
        turn++;
    }
}
