#!/usr/bin/env python3
"""Writes decode.bin and encode.bin beside this file, with `pip install gguf numpy` as the reference.

decode.bin, one record for each format:
  8 bytes name (zero-padded), u32 values, u32 bytes, the blocks, the expected values as f32
encode.bin: u32 values, the values as f32, and for each format that the reference can write:
  8 bytes name, u32 bytes, the expected blocks
All numbers are little-endian.
"""

import pathlib
import struct

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T

HERE = pathlib.Path(__file__).parent
RNG = np.random.default_rng(20240229)

# Where a block's half-precision factors are.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
}
# Enough blocks for every codebook entry (see number_entries), and for the special factors below.
BLOCKS = {"F32": 8, "F16": 256, "BF16": 256, "MXFP4": 24, "IQ2_XXS": 8, "IQ2_XS": 16, "IQ2_S": 32, "IQ3_XXS": 4, "IQ3_S": 8}
# Largest finite, smallest subnormal, subnormal, zero, negative zero, 1; then random.
SPECIAL = np.array([0x7BFF, 0x8001, 0x0155, 0x0000, 0x8000, 0x3C00], np.uint16)


def finite_halves(n):
    return RNG.integers(0, 0x7C00, n).astype(np.uint16) | (RNG.integers(0, 2, n).astype(np.uint16) << 15)


def number_entries(name, blocks):
    """Lets the codebook indices run through all entries."""
    n = len(blocks)
    if name == "IQ2_XXS":
        index = np.arange(n * 32).reshape(n, 8, 4) % 256
        blocks[:, 2:].reshape(n, 8, 8)[:, :, :4] = index
    elif name == "IQ2_XS":
        words = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
        words = (words & 0xFE00) | (np.arange(n * 32).reshape(n, 32) % 512).astype(np.uint16)
        blocks[:, 2:66] = words.view(np.uint8)
    elif name in ("IQ2_S", "IQ3_S"):
        per_block, bits, at = (32, 2, 66) if name == "IQ2_S" else (64, 1, 66)
        index = np.arange(n * per_block).reshape(n, per_block)
        blocks[:, 2:2 + per_block] = index & 255
        upper = (index >> 8).reshape(n, 8, -1) & ((1 << bits) - 1)
        blocks[:, at:at + 8] = (upper << (np.arange(upper.shape[-1]) * bits)).sum(-1)
    elif name == "IQ3_XXS":
        blocks[:, 2:66] = np.arange(n * 64).reshape(n, 64) % 256


def decode_fixture(name):
    ty = T[name]
    length, size = GGML_QUANT_SIZES[ty]
    n = BLOCKS.get(name, 6 if length == 256 else 16)
    blocks = RNG.integers(0, 256, (n, size)).astype(np.uint8)
    if name == "F16":
        blocks = np.concatenate([SPECIAL, finite_halves(n - len(SPECIAL))]).view(np.uint8).reshape(n, 2)
    for k, at in enumerate(HALVES.get(name, [])):
        factors = np.concatenate([np.roll(SPECIAL, 3 * k), finite_halves(n)])[:n]
        blocks[:, at:at + 2] = factors.view(np.uint8).reshape(n, 2)
    if name == "MXFP4":
        blocks[:8, 0] = [0, 1, 2, 3, 127, 128, 254, 255]
        blocks[8:, 0] = RNG.integers(110, 130, n - 8)
    if name in ("F32", "BF16"):
        blocks[:, -1] = RNG.integers(0, 0x7F, n) | (RNG.integers(0, 2, n) << 7)
    number_entries(name, blocks)
    row = blocks.reshape(1, -1)
    with np.errstate(over="ignore"):
        values = gguf.quants.dequantize(row, ty).astype(np.float32).reshape(-1)
    assert len(values) == n * length and not np.isnan(values).any(), name
    return name.encode().ljust(8, b"\0") + struct.pack("<II", len(values), row.size) + row.tobytes() + values.tobytes()


def encode_fixture(name, values):
    encoded = np.ascontiguousarray(gguf.quants.quantize(values.reshape(1, -1), T[name])).view(np.uint8).reshape(-1)
    return name.encode().ljust(8, b"\0") + struct.pack("<I", len(encoded)) + encoded.tobytes()


def encode_values(n):
    values = RNG.standard_normal((n, 32)).astype(np.float32)
    values *= np.float32(10.0) ** RNG.integers(-4, 4, (n, 1)).astype(np.float32)
    values[0] = 0
    values[1] = np.arange(32) - 16  # ties
    values[2] = 0.75
    values[3] = -np.abs(values[3])
    values[4, 1:] = 0
    return values.reshape(-1)


def main():
    names = ["F32", "F16", "BF16", *HALVES, "MXFP4"]
    (HERE / "decode.bin").write_bytes(b"".join(decode_fixture(name) for name in names))
    values = encode_values(12)
    (HERE / "encode.bin").write_bytes(
        struct.pack("<I", len(values))
        + values.tobytes()
        + b"".join(encode_fixture(n, values) for n in ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
    )


main()
