// How a block of 256 cells lies in memory (the layout of `cpu/src/attention/layout.rs`), and tables of blocks.
//
// A block belongs to one layer and holds, KV head by KV head, first all K, then all V:
//
//   K, f16 or bf16   [4 panels][C][64 cells]                   2 bytes
//   K, q8_0          scales [4][C/32][64] f16, then codes [4][C/4][64 cells][4 values]
//   K, q4_0          scales [4][C/32][64] f16, then nibbles [4][C/32][4 words][64 cells][4]   low: group g, high: group g + 4
//   V, f16 or bf16   [256 cells][C]                            2 bytes
//   V, q8_0          scales [256][C/32] f16, then codes [256][C]
//   V, q4_0          scales [256][C/32] f16, then nibbles [256][C/32][16]    low: value i, high: value i + 16
#pragma once
#include <cstdint>

#include "mma.cuh"

namespace cache {

constexpr int CELLS = 256, PANEL = 64;

enum Type : int { F16 = 0, BF16 = 1, Q8_0 = 2, Q4_0 = 3 };

// An entry of a table: one block of one layer, somewhere that the device can read. A block with cells removed from its middle
// is several entries.
struct Block {
    unsigned long long address;
    unsigned index;             // its cells are 256 * index ..
    unsigned short first, end;  // of those, cells first .. end are there
    unsigned slot, reserved;    // where its partial result goes
};

struct Range {
    int lo, hi;
};

// Cells of a block, counted from its first, that a query at `position` sees. `window` 0: no window.
__device__ __forceinline__ Range visible(const Block& block, int position, int window) {
    const int base = (int)block.index * CELLS, from = window > 0 ? position + 1 - window - base : 0;
    return {max(max(from, 0), (int)block.first), min(min(position + 1 - base, CELLS), (int)block.end)};
}

__host__ __device__ __forceinline__ bool is_float(int type) { return type <= BF16; }

// Bytes of the codes of `values` values, and of their scales.
__host__ __device__ __forceinline__ int code_bytes(int type, int values) {
    return is_float(type) ? 2 * values : type == Q8_0 ? values : values / 2;
}
__host__ __device__ __forceinline__ int scale_bytes(int type, int values) { return is_float(type) ? 0 : values / 32 * 2; }

// Bytes of one head's K or V in a block.
__host__ __device__ __forceinline__ int head_bytes(int type, int c) { return code_bytes(type, CELLS * c) + scale_bytes(type, CELLS * c); }

}  // namespace cache
