// What the kernels compute, for one thread each; compiled by nvcc for the device and by a C++ compiler for the test
// that compares them with the CPU references. Layouts are those of agent/src/executor/table.rs.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DIMS_MAX 6

struct Loop {
    u64 count;
    u64 stride;
};

// One box at one end: runs of contiguous bytes, repeated by loops, outermost first.
struct Entry {
    u64 wire;
    u64 base;
    u64 run;
    Loop loops[DIMS_MAX];
    u32 depth;
    u32 cast;
    u32 wire_element;
    u32 unused;
};

enum Cast { NONE, F32_TO_BF16, F32_TO_F16, F16_TO_F32, BF16_TO_F32 };

DEVICE float as_float(u32 bits) {
    union { u32 bits; float value; } x;
    x.bits = bits;
    return x.value;
}

DEVICE u32 as_bits(float value) {
    union { float value; u32 bits; } x;
    x.value = value;
    return x.bits;
}

// The casts of core/src/dtype/cast.rs, bit by bit: nearest even, one NaN, subnormals kept.
DEVICE u16 f32_to_bf16(u32 bits) {
    u32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    u32 wide = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded;
    return (u16)(wide >> 16);
}

DEVICE u16 f32_to_f16(u32 bits) {
    const u32 overflow = (127u + 16u) << 23, normal_from = (127u - 14u) << 23, align = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    u32 magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    u32 subnormal = as_bits(as_float(magnitude) + as_float(align)) - align;
    u32 normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    u32 finite = magnitude < normal_from ? subnormal : normal;
    u32 number = sign | (magnitude >= overflow ? 0x7c00u : finite);
    return (u16)(magnitude > 0x7f800000u ? 0x7e00u : number);
}

DEVICE u32 f16_to_f32(u16 bits) {
    const u32 rebias = (127u - 15u) << 23, smallest = (127u - 14u) << 23;
    u32 magnitude = (u32)(bits & 0x7fff) << 13, sign = (u32)(bits & 0x8000) << 16;
    u32 subnormal = as_bits(as_float(magnitude + smallest) - as_float(smallest));
    u32 finite = (bits & 0x7c00) == 0 ? subnormal : magnitude + rebias;
    u32 number = (bits & 0x7fff) == 0x7c00 ? 0x7f800000u : finite;
    return (bits & 0x7fff) > 0x7c00 ? 0x7fc00000u : sign | number;
}

DEVICE u32 bf16_to_f32(u16 bits) { return (bits & 0x7fff) > 0x7f80 ? 0x7fc00000u : (u32)bits << 16; }

// Bytes in memory of an element that has `wire` on the wire.
DEVICE u32 memory_element_of(u32 cast, u32 wire) {
    if (cast == F32_TO_BF16 || cast == F32_TO_F16) return 4;
    if (cast == F16_TO_F32 || cast == BF16_TO_F32) return 2;
    return wire;
}

// The entry that holds wire byte `at`: the last one that begins there or before.
DEVICE u32 entry_of(const Entry* table, u32 entries, u64 at) {
    u32 low = 0, high = entries;
    ROLLED
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (table[middle].wire <= at) low = middle; else high = middle;
    }
    return low;
}

// Address of byte `done` of the entry, counted in memory bytes; `left` gets the bytes of its run from there on.
DEVICE u64 locate(const Entry& entry, u64 done, u64* left) {
    u64 runs = done / entry.run, within = done % entry.run, address = entry.base + within;
    *left = entry.run - within;
    ROLLED
    for (u32 at = entry.depth; at-- > 0;) {
        address += runs % entry.loops[at].count * entry.loops[at].stride;
        runs /= entry.loops[at].count;
    }
    return address;
}

DEVICE void copy_bytes(u8* to, const u8* from, u32 bytes) {
    ROLLED
    for (u32 at = 0; at < bytes; at++) to[at] = from[at];
}

DEVICE void cast_element(u8* to, const u8* from, u32 cast) {
    u32 wide = 0;
    u16 narrow = 0;
    if (cast == F32_TO_BF16 || cast == F32_TO_F16) {
        copy_bytes((u8*)&wide, from, 4);
        narrow = cast == F32_TO_BF16 ? f32_to_bf16(wide) : f32_to_f16(wide);
        copy_bytes(to, (const u8*)&narrow, 2);
    } else {
        copy_bytes((u8*)&narrow, from, 2);
        wide = cast == F16_TO_F32 ? f16_to_f32(narrow) : bf16_to_f32(narrow);
        copy_bytes(to, (const u8*)&wide, 4);
    }
}

// Bytes that one thread moves. An element is moved by the thread of its first byte; ranges begin and end between elements.
#define SPAN 16

// Wire bytes [first + SPAN * thread, + SPAN) of [first, first + bytes), between memory and `packed`.
template <bool GATHER>
DEVICE void move_span(const Entry* table, u32 entries, u8* packed, u64 first, u64 bytes, u64 thread) {
    u64 at = first + SPAN * thread, end = first + bytes, stop = at + SPAN < end ? at + SPAN : end;
    if (at >= end) return;
    u32 index = entry_of(table, entries, at);
    ROLLED
    while (at < stop) {
        while (index + 1 < entries && table[index + 1].wire <= at) index++;
        const Entry& entry = table[index];
        u32 element = entry.wire_element;
        u32 into = (u32)((at - entry.wire) % element);
        if (into != 0) {
            at += element - into;
            continue;
        }
        u64 left = 0, done = (at - entry.wire) / element * memory_element_of(entry.cast, element);
        u64 address = locate(entry, done, &left);
        u8* inside = packed + (at - first);
        if (entry.cast == NONE && left >= SPAN && stop - at == SPAN && ((address | (u64)inside) & (SPAN - 1)) == 0 && SPAN % element == 0) {
            if (GATHER) *(Vector*)inside = *(const Vector*)address; else *(Vector*)address = *(const Vector*)inside;
            return;
        }
        if (!GATHER) copy_bytes((u8*)address, inside, element);
        else if (entry.cast == NONE) copy_bytes(inside, (const u8*)address, element);
        else cast_element(inside, (const u8*)address, entry.cast);
        at += element;
    }
}
