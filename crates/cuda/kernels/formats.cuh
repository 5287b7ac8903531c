// The formats of quantised weights on the device: from a tile's block to the operands of `mma`.
//
// A tile's block holds 16 rows x 32 or 256 values, fields interleaved as quant/src/tile.rs says. A warp reads it as the A operand of
// mma.m16n8k32: with gid = lane / 4 and tig = lane % 4, fragment rows gid and gid + 8 are the tile's rows 2 gid and 2 gid + 1, which lie
// side by side, and fragment columns 4 tig.. and 16 + 4 tig.. are the groups tig and tig + 4 of a run of 32 values. So
//
//   a[0], a[1]   group tig of rows 2 gid, 2 gid + 1        a[2], a[3]   group tig + 4 of the same rows
//
// are words of 8 bytes that lie together. A format says
//
//   LEN, BYTES        values of a block, bytes of a row's block
//   SIGNED            codes are signed bytes; otherwise unsigned ones, BIAS above the integers that are multiplied
//   MIN               a minimum (or offset) is added, times the sum of the activations
//   PLANES, SWIZZLE   where the planes of codes begin (bytes of 16 rows); whether they are multiples of 256 bytes that copies may swizzle
//   codes()           the operand of a run; `at` is where the lane's word pair lies in 4 words of 16 rows
//   d(), m()          float factors of rows 2 gid, 2 gid + 1
//   SUB, scale()      values of a sub-block, its integer scales for the two rows
//   extra()           minima, or (with a BIAS) the scales again, as bytes of the two rows, EXTRA above their values
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#include "grids.cuh"

__device__ __forceinline__ uint32_t word16(const uint8_t* p) { return *(const uint16_t*)p; }
__device__ __forceinline__ uint2 pair(const uint8_t* p) { return *(const uint2*)p; }
__device__ __forceinline__ float2 halves(const uint8_t* p) { return __half22float2(*(const __half2*)p); }

__device__ __forceinline__ void nibbles(uint2 v, uint32_t (&a)[4]) {
    a[0] = v.x & 0x0f0f0f0fu, a[1] = v.y & 0x0f0f0f0fu, a[2] = (v.x >> 4) & 0x0f0f0f0fu, a[3] = (v.y >> 4) & 0x0f0f0f0fu;
}

// Two bits a code in two words: word h holds the groups 4 h + i in bits 2 i.
__device__ __forceinline__ void two_bits(const uint8_t* plane, int gid, int tig, uint32_t (&a)[4]) {
    const uint2 v = pair(plane + gid * 8), w = pair(plane + 64 + gid * 8);
    a[0] = (v.x >> (2 * tig)) & 0x03030303u, a[1] = (v.y >> (2 * tig)) & 0x03030303u;
    a[2] = (w.x >> (2 * tig)) & 0x03030303u, a[3] = (w.y >> (2 * tig)) & 0x03030303u;
}

// One bit a code in one word, group i in bit i: put at bit TO of the codes.
template <int TO> __device__ __forceinline__ void add_bit(const uint8_t* plane, int gid, int tig, uint32_t (&a)[4]) {
    const uint2 v = pair(plane + gid * 8);
    const uint32_t x = v.x >> tig, y = v.y >> tig;
    a[0] |= (x & 0x01010101u) << TO, a[1] |= (y & 0x01010101u) << TO;
    a[2] |= ((x >> 4) & 0x01010101u) << TO, a[3] |= ((y >> 4) & 0x01010101u) << TO;
}

// 8 nibbles of a word looked up in a table of 16 bytes: low nibbles to `low`, high ones to `high`.
template <class Table> __device__ __forceinline__ void look_up(uint32_t v, uint32_t& low, uint32_t& high) {
    const uint32_t index = v & 0x77777777u, upper = 0x32103210u | ((v & 0x88888888u) >> 1);
    const uint32_t x = __byte_perm(__byte_perm(Table::T0, Table::T1, index), __byte_perm(Table::T2, Table::T3, index), upper);
    const uint32_t y = __byte_perm(__byte_perm(Table::T0, Table::T1, index >> 16), __byte_perm(Table::T2, Table::T3, index >> 16), upper >> 16);
    low = __byte_perm(x, y, 0x6420), high = __byte_perm(x, y, 0x7531);
}
template <class Table> __device__ __forceinline__ void look_up(uint2 v, uint32_t (&a)[4]) {
    look_up<Table>(v.x, a[0], a[2]);
    look_up<Table>(v.y, a[1], a[3]);
}
struct NonLinear {  // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    static constexpr uint32_t T0 = 0xbfad9881u, T1 = 0xf6eaddcfu, T2 = 0x26190d01u, T3 = 0x71594535u;
};
struct Fp4 {  // 0 1 2 3 4 6 8 12 and their negatives
    static constexpr uint32_t T0 = 0x03020100u, T1 = 0x0c080604u, T2 = 0xfdfeff00u, T3 = 0xf4f8fafcu;
};

// ---------------------------------------------------------------------------------------------------- blocks of 32

struct Q4_0 {
    static constexpr int LEN = 32, BYTES = 18, BIAS = 8, PLANES = 32;
    static constexpr bool SIGNED = false, MIN = false, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int, int, uint32_t (&a)[4]) { nibbles(pair(b + PLANES + at), a); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
struct Q4_1 {
    static constexpr int LEN = 32, BYTES = 20, BIAS = 0, PLANES = 64;
    static constexpr bool SIGNED = false, MIN = true, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int, int, uint32_t (&a)[4]) { nibbles(pair(b + PLANES + at), a); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t* b, int gid) { return halves(b + 32 + 4 * gid); }
};
struct Q5_0 {
    static constexpr int LEN = 32, BYTES = 22, BIAS = 16, PLANES = 32;
    static constexpr bool SIGNED = false, MIN = false, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int gid, int tig, uint32_t (&a)[4]) {
        nibbles(pair(b + PLANES + 64 + at), a);
        add_bit<4>(b + PLANES, gid, tig, a);
    }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
struct Q5_1 {
    static constexpr int LEN = 32, BYTES = 24, BIAS = 0, PLANES = 64;
    static constexpr bool SIGNED = false, MIN = true, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int gid, int tig, uint32_t (&a)[4]) {
        nibbles(pair(b + PLANES + 64 + at), a);
        add_bit<4>(b + PLANES, gid, tig, a);
    }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t* b, int gid) { return halves(b + 32 + 4 * gid); }
};
struct Q8_0 {
    static constexpr int LEN = 32, BYTES = 34, BIAS = 0, PLANES = 32;
    static constexpr bool SIGNED = true, MIN = false, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int, int, uint32_t (&a)[4]) {
        const uint2 v = pair(b + PLANES + at), w = pair(b + PLANES + 256 + at);
        a[0] = v.x, a[1] = v.y, a[2] = w.x, a[3] = w.y;
    }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
struct IQ4_NL {
    static constexpr int LEN = 32, BYTES = 18, BIAS = 0, PLANES = 32;
    static constexpr bool SIGNED = true, MIN = false, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int, int, uint32_t (&a)[4]) { look_up<NonLinear>(pair(b + PLANES + at), a); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
struct MXFP4 {
    static constexpr int LEN = 32, BYTES = 17, BIAS = 0, PLANES = 16;
    static constexpr bool SIGNED = true, MIN = false, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int, int at, int, int, uint32_t (&a)[4]) { look_up<Fp4>(pair(b + PLANES + at), a); }
    // 2^(e - 128); the two smallest are subnormal.
    static __device__ __forceinline__ float power(uint32_t e) { return __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) {
        const uint32_t e = word16(b + 2 * gid);
        return make_float2(power(e & 255), power(e >> 8));
    }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};

// ---------------------------------------------------------------------------------------------------- blocks of 256

// The two rows' bytes as integers, OFF less.
template <int OFF> __device__ __forceinline__ int2 two(uint32_t v) { return make_int2((int)(v & 255) - OFF, (int)(v >> 8) - OFF); }

struct Q2_K {
    static constexpr int LEN = 256, BYTES = 84, BIAS = 0, PLANES = 320, SUB = 16, EXTRA = 0;
    static constexpr bool SIGNED = false, MIN = true, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) { two_bits(b + PLANES + run * 128, gid, tig, a); }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return two<0>(word16(b + 16 * j + 2 * gid) & 0x0f0fu); }
    static __device__ __forceinline__ uint32_t extra(const uint8_t* b, int j, int gid) { return (word16(b + 16 * j + 2 * gid) >> 4) & 0x0f0fu; }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 256 + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t* b, int gid) { return halves(b + 288 + 4 * gid); }
};
struct Q3_K {
    static constexpr int LEN = 256, BYTES = 110, BIAS = 4, PLANES = 224, SUB = 16, EXTRA = 32;
    static constexpr bool SIGNED = false, MIN = false, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        two_bits(b + PLANES + run * 192 + 64, gid, tig, a);
        add_bit<2>(b + PLANES + run * 192, gid, tig, a);
    }
    static __device__ __forceinline__ uint32_t extra(const uint8_t* b, int j, int gid) {
        const uint32_t low = word16(b + 16 * (j % 8) + 2 * gid) >> (j / 8 * 4), high = word16(b + 16 * (8 + j % 4) + 2 * gid) >> (j / 4 * 2);
        return (low & 0x0f0fu) | (high & 0x0303u) << 4;
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return two<32>(extra(b, j, gid)); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 192 + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
// 6-bit scales and minima of Q4_K and Q5_K, 12 bytes a row from 64 on.
struct SixBit {
    static __device__ __forceinline__ uint32_t scales(const uint8_t* b, int j, int gid) {
        const uint8_t* p = b + 64 + 2 * gid;
        if (j < 4) return word16(p + 16 * j) & 0x3f3fu;
        return (word16(p + 16 * (j + 4)) & 0x0f0fu) | ((word16(p + 16 * (j - 4)) >> 2) & 0x3030u);
    }
    static __device__ __forceinline__ uint32_t minima(const uint8_t* b, int j, int gid) {
        const uint8_t* p = b + 64 + 2 * gid;
        if (j < 4) return word16(p + 16 * (j + 4)) & 0x3f3fu;
        return ((word16(p + 16 * (j + 4)) >> 4) & 0x0f0fu) | ((word16(p + 16 * j) >> 2) & 0x3030u);
    }
};
struct Q4_K {
    static constexpr int LEN = 256, BYTES = 144, BIAS = 0, PLANES = 256, SUB = 32, EXTRA = 0;
    static constexpr bool SIGNED = false, MIN = true, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int, int, uint32_t (&a)[4]) { nibbles(pair(b + PLANES + run * 256 + at), a); }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return two<0>(SixBit::scales(b, j, gid)); }
    static __device__ __forceinline__ uint32_t extra(const uint8_t* b, int j, int gid) { return SixBit::minima(b, j, gid); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t* b, int gid) { return halves(b + 32 + 4 * gid); }
};
struct Q5_K {
    static constexpr int LEN = 256, BYTES = 176, BIAS = 0, PLANES = 256, SUB = 32, EXTRA = 0;
    static constexpr bool SIGNED = false, MIN = true, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int gid, int tig, uint32_t (&a)[4]) {
        nibbles(pair(b + PLANES + run * 320 + 64 + at), a);
        add_bit<4>(b + PLANES + run * 320, gid, tig, a);
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return two<0>(SixBit::scales(b, j, gid)); }
    static __device__ __forceinline__ uint32_t extra(const uint8_t* b, int j, int gid) { return SixBit::minima(b, j, gid); }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t* b, int gid) { return halves(b + 32 + 4 * gid); }
};
struct Q6_K {
    static constexpr int LEN = 256, BYTES = 210, BIAS = 32, PLANES = 288, SUB = 16, EXTRA = 128;
    static constexpr bool SIGNED = false, MIN = false, SWIZZLE = false;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int gid, int tig, uint32_t (&a)[4]) {
        const uint8_t* p = b + PLANES + run * 384;
        uint32_t high[4];
        nibbles(pair(p + 128 + at), a);
        two_bits(p, gid, tig, high);
        for (int i = 0; i < 4; i++) a[i] |= high[i] << 4;
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) {
        const uint32_t v = word16(b + 16 * j + 2 * gid);
        return make_int2((int8_t)v, (int8_t)(v >> 8));
    }
    static __device__ __forceinline__ uint32_t extra(const uint8_t* b, int j, int gid) { return word16(b + 16 * j + 2 * gid) ^ 0x8080u; }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 256 + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};
struct IQ4_XS {
    static constexpr int LEN = 256, BYTES = 136, BIAS = 0, PLANES = 128, SUB = 32, EXTRA = 0;
    static constexpr bool SIGNED = true, MIN = false, SWIZZLE = true;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int, int, uint32_t (&a)[4]) { look_up<NonLinear>(pair(b + PLANES + run * 256 + at), a); }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) {
        const uint32_t low = (word16(b + 64 + 16 * (j / 2) + 2 * gid) >> (j % 2 * 4)) & 0x0f0fu;
        const uint32_t high = *(const uint32_t*)(b + 32 + 4 * gid) >> (2 * j);
        return make_int2((int)((low & 255) | (high & 3) << 4) - 32, (int)(low >> 8 | (high >> 16 & 3) << 4) - 32);
    }
    static __device__ __forceinline__ uint32_t extra(const uint8_t*, int, int) { return 0; }
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) { return halves(b + 4 * gid); }
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }
};

// ---------------------------------------------------------------------------------------------------- codebooks

// Byte i of the two rows' blocks, counted from behind the scale.
__device__ __forceinline__ uint32_t grid_bytes(const uint8_t* b, int i, int gid) { return word16(b + 32 + 16 * i + 2 * gid); }
// Bytes i .. i + 4 as a word of row r.
__device__ __forceinline__ uint32_t grid_word(const uint8_t* b, int i, int gid, int r) {
    const uint32_t x = grid_bytes(b, i, gid) | grid_bytes(b, i + 1, gid) << 16, y = grid_bytes(b, i + 2, gid) | grid_bytes(b, i + 3, gid) << 16;
    return __byte_perm(x, y, r ? 0x7531 : 0x6420);
}
// A sign index of 7 bits as a byte with an even number of ones.
__device__ __forceinline__ uint32_t even(uint32_t s) { return (s & 127) | (__popc(s & 127) & 1) << 7; }
// Magnitudes (none is zero) under four signs.
__device__ __forceinline__ uint32_t signed_word(uint32_t magnitudes, uint32_t signs) {
    const uint32_t ones = ((signs & 15) * 0x00204081u) & 0x01010101u;
    return (magnitudes ^ ones * 255) + ones;
}
__device__ __forceinline__ int2 odd_low(uint32_t v) { return make_int2((int)(v & 15) * 2 + 1, (int)(v >> 8 & 15) * 2 + 1); }
__device__ __forceinline__ int2 odd_high(uint32_t v) { return make_int2((int)(v >> 4 & 15) * 2 + 1, (int)(v >> 12 & 15) * 2 + 1); }

#define GRID_FORMAT(LENGTH, POWER)                                                                                              \
    static constexpr int LEN = 256, BYTES = LENGTH, BIAS = 0, PLANES = 32, EXTRA = 0;                                           \
    static constexpr bool SIGNED = true, MIN = false, SWIZZLE = false;                                                          \
    static __device__ __forceinline__ uint32_t extra(const uint8_t*, int, int) { return 0; }                                    \
    static __device__ __forceinline__ float2 m(const uint8_t*, int) { return make_float2(0.0f, 0.0f); }                         \
    static __device__ __forceinline__ float2 d(const uint8_t* b, int gid) {                                                     \
        const float2 d = halves(b + 4 * gid);                                                                                   \
        return make_float2(d.x * POWER, d.y * POWER);                                                                           \
    }

// In IQ2 an entry is two groups: group tig is half tig % 2 of entry tig / 2, group tig + 4 the same half of entry tig / 2 + 2.
struct IQ2_XXS {
    GRID_FORMAT(66, 0.125f)
    static constexpr int SUB = 32;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        const int half = tig & 1, e = tig >> 1;
        const uint32_t i0 = grid_bytes(b, 8 * run + e, gid), i1 = grid_bytes(b, 8 * run + e + 2, gid);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t w = grid_word(b, 8 * run + 4, gid, r);
            a[r] = signed_word(__ldg(&IQ2_XXS_GRID[(i0 >> (8 * r) & 255) * 2 + half]), even(w >> (7 * e)) >> (4 * half));
            a[2 + r] = signed_word(__ldg(&IQ2_XXS_GRID[(i1 >> (8 * r) & 255) * 2 + half]), even(w >> (7 * e + 14)) >> (4 * half));
        }
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return odd_high(grid_bytes(b, 8 * j + 7, gid)); }
};
struct IQ2_XS {
    GRID_FORMAT(74, 0.125f)
    static constexpr int SUB = 16;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        const int half = tig & 1, e = tig >> 1;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t low = grid_bytes(b, 8 * run + 2 * (e + 2 * h), gid), high = grid_bytes(b, 8 * run + 2 * (e + 2 * h) + 1, gid);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t w = (low >> (8 * r) & 255) | (high >> (8 * r) & 255) << 8;
                a[2 * h + r] = signed_word(__ldg(&IQ2_XS_GRID[(w & 511) * 2 + half]), even(w >> 9) >> (4 * half));
            }
        }
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) {
        const uint32_t v = grid_bytes(b, 64 + j / 2, gid);
        return j % 2 ? odd_high(v) : odd_low(v);
    }
};
struct IQ2_S {
    GRID_FORMAT(82, 0.125f)
    static constexpr int SUB = 16;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        const int half = tig & 1, e = tig >> 1;
        const uint32_t upper = grid_bytes(b, 64 + run, gid);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int g = e + 2 * h;
            const uint32_t low = grid_bytes(b, 4 * run + g, gid), signs = grid_bytes(b, 32 + 4 * run + g, gid);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t index = (low >> (8 * r) & 255) | (upper >> (8 * r + 2 * g) & 3) << 8;
                a[2 * h + r] = signed_word(__ldg(&IQ2_S_GRID[index * 2 + half]), signs >> (8 * r + 4 * half));
            }
        }
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) {
        const uint32_t v = grid_bytes(b, 72 + j / 2, gid);
        return j % 2 ? odd_high(v) : odd_low(v);
    }
};
// In IQ3 an entry is a group; two share a sign byte.
struct IQ3_XXS {
    GRID_FORMAT(98, 0.25f)
    static constexpr int SUB = 32;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        const int half = tig & 1, e = tig >> 1;
        const uint32_t i0 = grid_bytes(b, 8 * run + tig, gid), i1 = grid_bytes(b, 8 * run + tig + 4, gid);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t w = grid_word(b, 64 + 4 * run, gid, r);
            a[r] = signed_word(__ldg(&IQ3_XXS_GRID[i0 >> (8 * r) & 255]), even(w >> (7 * e)) >> (4 * half));
            a[2 + r] = signed_word(__ldg(&IQ3_XXS_GRID[i1 >> (8 * r) & 255]), even(w >> (7 * e + 14)) >> (4 * half));
        }
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) { return odd_high(grid_bytes(b, 67 + 4 * j, gid)); }
};
struct IQ3_S {
    GRID_FORMAT(110, 1.0f)
    static constexpr int SUB = 32;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int, int gid, int tig, uint32_t (&a)[4]) {
        const int half = tig & 1, e = tig >> 1;
        const uint32_t upper = grid_bytes(b, 64 + run, gid);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int g = tig + 4 * h;
            const uint32_t low = grid_bytes(b, 8 * run + g, gid), signs = grid_bytes(b, 72 + 4 * run + e + 2 * h, gid);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t index = (low >> (8 * r) & 255) | (upper >> (8 * r + g) & 1) << 8;
                a[2 * h + r] = signed_word(__ldg(&IQ3_S_GRID[index]), signs >> (8 * r + 4 * half));
            }
        }
    }
    static __device__ __forceinline__ int2 scale(const uint8_t* b, int j, int gid) {
        const uint32_t v = grid_bytes(b, 104 + j / 2, gid);
        return j % 2 ? odd_high(v) : odd_low(v);
    }
};
