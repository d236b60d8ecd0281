// The kernels' code on the CPU, for the test that compares it with the CPU references. From stdin, case by case: kind
// (0 gather, 1 scatter), entries, bytes of memory, first wire byte, wire bytes, all u64; the table, whose bases count
// from the beginning of the memory; the memory; the window. To stdout: what the kernel wrote, window or memory whole.
#include <cstdio>
#include <cstring>
#include <vector>
#define DEVICE static inline
#define ROLLED
struct alignas(16) Vector { unsigned char bytes[16]; };
#include "moves.cuh"

int main() {
    u64 head[5];
    while (fread(head, 8, 5, stdin) == 5) {
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
