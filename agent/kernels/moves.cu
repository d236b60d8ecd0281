// Gather and scatter: one launch per peer and chunk, driven by a table in device memory.
#define DEVICE __device__ __forceinline__
#define ROLLED _Pragma("unroll 1") // unrolled, each cubin has 75 kB
typedef uint4 Vector;
#include "moves.cuh"

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
