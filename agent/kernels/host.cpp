// The kernels' code on the CPU, for the test that compares it with the CPU references. From stdin, case by case: kind
// (0 gather, 1 scatter), entries, bytes of memory, first wire byte, wire bytes, all u64; the table, whose bases count
// from the beginning of the memory; the memory; the window. To stdout: what the kernel wrote, window or memory whole.
// Kind 2 is a digest: units in place of the first wire byte, sums in place of the wire bytes, and no window; to stdout
// the lanes of each sum.
#include <cstdio>
#include <cstring>
#include <vector>
#define DEVICE static inline
#define ROLLED
struct alignas(16) Vector { unsigned char bytes[16]; };
#include "digest.cuh"

// Keys of so many rows are in a table, so that both ways to a key are tried.
#define KEYED_ROWS 5

static bool digest(u64 entries, u64 bytes, u64 units, u64 count) {
    std::vector<RowsEntry> table(entries);
    std::vector<Vector> memory(bytes / 16 + 2);
    std::vector<u32> sums(count * LANES);
    if (fread(table.data(), sizeof(RowsEntry), entries, stdin) != entries) return false;
    if (fread(memory.data(), 1, bytes, stdin) != bytes) return false;
    for (RowsEntry& entry : table) entry.base += (u64)memory.data();
    u32 row_keys[KEYED_ROWS * LANES];
    for (u32 at = 0; at < KEYED_ROWS * LANES; at++) row_keys[at] = row_key(at % LANES, at / LANES);
    for (u64 unit = 0; unit < units; unit++) {
        const RowsEntry& entry = table[entry_of_unit(table.data(), (u32)entries, unit)];
        digest_unit(entry, unit, row_keys, KEYED_ROWS, &sums[entry.sum * LANES]);
    }
    fwrite(sums.data(), sizeof(u32), sums.size(), stdout);
    return true;
}

int main() {
    u64 head[5];
    while (fread(head, 8, 5, stdin) == 5) {
        if (head[0] == 2) {
            if (!digest(head[1], head[2], head[3], head[4])) return 1;
            continue;
        }
        std::vector<Entry> table(head[1]);
        std::vector<Vector> memory(head[2] / 16 + 2), window(head[4] / 16 + 2);
        u8* packed = (u8*)window.data();
        if (fread(table.data(), sizeof(Entry), table.size(), stdin) != table.size()) return 1;
        if (fread(memory.data(), 1, head[2], stdin) != head[2]) return 1;
        if (fread(packed, 1, head[4], stdin) != head[4]) return 1;
        for (Entry& entry : table) entry.base += (u64)memory.data();
        for (u64 thread = 0; thread * SPAN < head[4]; thread++) {
            if (head[0] == 0) move_span<true>(table.data(), (u32)head[1], packed, head[3], head[4], thread);
            else move_span<false>(table.data(), (u32)head[1], packed, head[3], head[4], thread);
        }
        if (head[0] == 0) fwrite(packed, 1, head[4], stdout);
        else fwrite(memory.data(), 1, head[2], stdout);
    }
    return 0;
}
