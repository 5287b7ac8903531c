//! What allocations take of a device's memory: more than was asked for.

/// Allocations larger than [`SMALL_BYTES_MAX`] come in multiples of this: measured with `cuMemGetInfo` on an H200, driver 580.159.04.
const PAGE_BYTES: u64 = 2 << 20;

/// Up to this size several allocations share a page.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// What small allocations are multiples of.
const SMALL_UNIT_BYTES: u64 = 512;

/// Rows that a matrix comes in multiples of on a device.
const ROWS: u64 = 16;

/// Bytes behind a matrix that kernels may read.
const SLACK_BYTES: u64 = 4096;

/// What the driver takes for an allocation of so many bytes. Pages that small ones share count by what each has of them.
pub fn device_alloc_bytes(bytes: u64) -> u64 {
    let unit = if bytes > SMALL_BYTES_MAX {
        PAGE_BYTES
    } else {
        SMALL_UNIT_BYTES
    };
    bytes.checked_next_multiple_of(unit).unwrap_or(bytes)
}

/// What a tensor takes: a matrix in whole tiles of rows, what has one dimension as `f32`.
pub(crate) fn device_tensor_bytes(dims: &[u64], elements: u64, bytes: u64) -> u64 {
    let row = dims.first().copied().unwrap_or(0).max(1);
    let rows = elements / row;
    if dims.len() < 2 || rows == 0 {
        return device_alloc_bytes(elements.saturating_mul(4));
    }
    let padded = rows.checked_next_multiple_of(ROWS).unwrap_or(rows);
    let tiles = (bytes / rows).saturating_mul(padded);
    device_alloc_bytes(tiles.saturating_add(SLACK_BYTES))
}

/// What `count` allocations of `bytes` each take beyond what was asked for.
pub(crate) fn device_padding_bytes(bytes: u64, count: u64) -> u64 {
    (device_alloc_bytes(bytes) - bytes).saturating_mul(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// As measured, 4 to 20 allocations of each size.
    #[test]
    fn large_allocations_are_whole_pages() {
        for (asked, taken) in [
            (MIB, MIB),
            (MIB + 512, 2 * MIB),
            (1_500_000, 2 * MIB),
            (2 * MIB, 2 * MIB),
            (2 * MIB + 512, 4 * MIB),
            (3 * MIB, 4 * MIB),
            (5_600_000, 6 * MIB),
            (32 * MIB + 4096, 34 * MIB),
            (100 * MIB, 100 * MIB),
            (4, 512),
            (0, 0),
        ] {
            assert_eq!(device_alloc_bytes(asked), taken, "{asked}");
        }
        assert_eq!(device_alloc_bytes(u64::MAX), u64::MAX);
        assert_eq!(device_padding_bytes(3 * MIB, 5), 5 * MIB);
    }

    #[test]
    fn matrices_have_whole_tiles_and_vectors_are_floats() {
        // Q8_0 [1000, 4096]: 1008 rows of 4352 bytes, and what is behind them.
        let q8 = 1008 * 4352 + 4096;
        let found = device_tensor_bytes(&[4096, 1000], 4096 * 1000, 4352 * 1000);
        assert_eq!(found, device_alloc_bytes(q8));
        assert_eq!(device_tensor_bytes(&[300], 300, 600), 1536);
        for (dims, elements, bytes) in [
            (&[][..], 0, 0),
            (&[0, 0], 0, 0),
            (&[u64::MAX, 2], u64::MAX, u64::MAX),
        ] {
            let _ = device_tensor_bytes(dims, elements, bytes);
        }
    }
}
