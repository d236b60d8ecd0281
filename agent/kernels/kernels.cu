// Gather and scatter: one launch per peer and chunk. Digest: one launch for all that a rank holds. Each is driven by a
// table in device memory.
#define DEVICE __device__ __forceinline__
#define ROLLED _Pragma("unroll 1") // unrolled, each cubin has 75 kB
typedef uint4 Vector;
#include "digest.cuh"

template <bool GATHER>
DEVICE void move(const Entry* table, u32 entries, u8* packed, u64 first, u64 bytes) {
    u64 threads = (u64)gridDim.x * blockDim.x, spans = (bytes + SPAN - 1) / SPAN;
    ROLLED
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < spans; at += threads)
        move_span<GATHER>(table, entries, packed, first, bytes, at);
}

extern "C" __global__ void __launch_bounds__(256) weightrefit_gather(const Entry* table, u32 entries, u8* packed, u64 first, u64 bytes) {
    move<true>(table, entries, packed, first, bytes);
}

extern "C" __global__ void __launch_bounds__(256) weightrefit_scatter(const Entry* table, u32 entries, u8* packed, u64 first, u64 bytes) {
    move<false>(table, entries, packed, first, bytes);
}

DEVICE void flush(u32* sums, u32 sum, u32 lanes[LANES]) {
    for (u32 lane = 0; lane < LANES; lane++) {
        if (lanes[lane] != 0) atomicAdd(&sums[sum * LANES + lane], lanes[lane]);
        lanes[lane] = 0;
    }
}

// Each block has neighbouring units, so that a thread meets few entries, and flushes seldom.
extern "C" __global__ void __launch_bounds__(256) weightrefit_digest(const RowsEntry* table, u32 entries, u64 units, const u32* row_keys, u64 keyed_rows, u32* sums) {
    u64 each = (units + gridDim.x - 1) / gridDim.x, unit = each * blockIdx.x + threadIdx.x;
    u64 end = each * (blockIdx.x + 1) < units ? each * (blockIdx.x + 1) : units;
    if (unit >= end) return;
    u32 index = entry_of_unit(table, entries, unit), sum = table[index].sum, lanes[LANES] = {0};
    ROLLED
    for (; unit < end; unit += blockDim.x) {
        while (index + 1 < entries && table[index + 1].unit <= unit) index++;
        if (table[index].sum != sum) {
            flush(sums, sum, lanes);
            sum = table[index].sum;
        }
        digest_unit(table[index], unit, row_keys, keyed_rows, lanes);
    }
    flush(sums, sum, lanes);
}
