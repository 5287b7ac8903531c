//! AMX tiles by inline assembly (the intrinsics are not in stable Rust).
//!
//! Tile registers are used nowhere else, so they need no clobbers. A kernel loads a configuration, multiplies, and
//! releases the tiles, so that threads which do something else keep a small context.

#![cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    allow(dead_code)
)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use imp::*;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod imp {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;

    /// Whether the processor has AMX with 8-bit integers and the kernel lets this process use it.
    pub(crate) fn available() -> bool {
        const AMX_TILE: u32 = 1 << 24;
        const AMX_INT8: u32 = 1 << 25;
        let edx = __cpuid_count(7, 0).edx;
        edx & AMX_TILE != 0 && edx & AMX_INT8 != 0 && request_permission()
    }

    /// Asks the kernel for the tile registers' state (Linux 5.16 and newer).
    fn request_permission() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const XFEATURE_XTILEDATA: i64 = 18;
        let result: i64;
        // SAFETY: a system call that touches no memory of this process.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA, out("rcx") _, out("r11") _, options(nostack));
        }
        result == 0
    }

    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_a_row: [u16; 16],
        rows: [u8; 16],
    }

    /// Configures tiles: 0-3 results (16 x 16 `i32`), 4 and 5 activations (16 x `k` bytes), 6 and 7 weights (`k`/4 x 64 bytes).
    ///
    /// # Safety
    /// The processor must have AMX and the process its permission (an `Amx` token proves both). `k` is 32 or 64.
    pub(crate) unsafe fn configure(k: u8) {
        let mut c = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_a_row: [0; 16],
            rows: [0; 16],
        };
        for tile in 0..8 {
            let (bytes, rows) = match tile {
                0..4 => (64, 16),
                4 | 5 => (u16::from(k), 16),
                _ => (64, k / 4),
            };
            c.bytes_a_row[tile] = bytes;
            c.rows[tile] = rows;
        }
        // SAFETY: 64 readable bytes of a valid configuration; the instruction exists (caller).
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const c, options(nostack, readonly)) }
    }

    /// Gives the tile registers back.
    ///
    /// # Safety
    /// As [`configure`].
    pub(crate) unsafe fn release() {
        // SAFETY: the instruction exists (caller).
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    /// Four results of 16 tokens x 16 rows over 32 values: what [`first32`] begins.
    ///
    /// The tile registers hold `a[0] w[0]`, `a[0] w[1]`, `a[1] w[0]`, `a[1] w[1]`. A product takes some 50 cycles until it can be
    /// stored, so a result is stored only when its register is wanted for the next block: [`next32`], [`last32`].
    #[derive(Clone, Copy)]
    pub(crate) struct Block32 {
        /// Codes of two token tiles, 512 bytes each.
        pub(crate) a: [*const i8; 2],
        /// Weights of two tiles of rows, 512 signed bytes each.
        pub(crate) w: [*const i8; 2],
    }

    macro_rules! block32 {
        ($block:expr, $c:expr, $s0:expr, $s1:expr, $s2:expr, $s3:expr) => {
            asm!("tileloadd tmm4, [{a0} + {k}*1]", "tileloadd tmm6, [{w0} + {s}*1]",
                $s0, "tilezero tmm0", "tdpbssd tmm0, tmm4, tmm6", "tileloadd tmm7, [{w1} + {s}*1]",
                $s1, "tilezero tmm1", "tdpbssd tmm1, tmm4, tmm7", "tileloadd tmm5, [{a1} + {k}*1]",
                $s2, "tilezero tmm2", "tdpbssd tmm2, tmm5, tmm6",
                $s3, "tilezero tmm3", "tdpbssd tmm3, tmm5, tmm7", "/* {c} */",
                a0 = in(reg) $block.a[0], a1 = in(reg) $block.a[1], w0 = in(reg) $block.w[0], w1 = in(reg) $block.w[1],
                c = in(reg) $c, k = in(reg) 32usize, s = in(reg) 64usize, options(nostack))
        };
    }

    /// Multiplies a first block.
    ///
    /// # Safety
    /// Tiles configured with `k = 32`; 512 readable bytes behind each pointer.
    #[inline(always)]
    pub(crate) unsafe fn first32(block: Block32) {
        // SAFETY: the caller's contract.
        unsafe { block32!(block, std::ptr::null::<i32>(), "", "", "", "") }
    }

    /// Stores the block before to `c` and multiplies the next.
    ///
    /// # Safety
    /// As [`first32`], and 1024 writable `i32` behind `c`.
    #[inline(always)]
    pub(crate) unsafe fn next32(block: Block32, c: *mut i32) {
        // SAFETY: the caller's contract.
        unsafe {
            block32!(
                block,
                c,
                "tilestored [{c} + {s}*1], tmm0",
                "tilestored [{c} + {s}*1 + 1024], tmm1",
                "tilestored [{c} + {s}*1 + 2048], tmm2",
                "tilestored [{c} + {s}*1 + 3072], tmm3"
            )
        }
    }

    /// Stores the last block to `c`.
    ///
    /// # Safety
    /// Tiles configured; 1024 writable `i32` behind `c`.
    #[inline(always)]
    pub(crate) unsafe fn last32(c: *mut i32) {
        // SAFETY: the caller's contract.
        unsafe {
            asm!("tilestored [{c} + {s}*1], tmm0", "tilestored [{c} + {s}*1 + 1024], tmm1",
                "tilestored [{c} + {s}*1 + 2048], tmm2", "tilestored [{c} + {s}*1 + 3072], tmm3",
                c = in(reg) c, s = in(reg) 64usize, options(nostack))
        }
    }

    /// Two 16-token tiles times the two planes of 16 rows over 256 values:
    /// `c[0] = a0 * high`, `c[1] = a0 * low`, `c[2] = a1 * high`, `c[3] = a1 * low` (`low` unsigned, the rest signed).
    ///
    /// # Safety
    /// Tiles configured with `k = 64`; `a0`, `a1`, `high`, `low` 4096 readable bytes each, `c` 1024 writable `i32`.
    #[inline(always)]
    pub(crate) unsafe fn planes256(
        a0: *const i8,
        a1: *const i8,
        high: *const i8,
        low: *const u8,
        c: *mut i32,
    ) {
        macro_rules! step {
            ($at:literal) => {
                concat!(
                    "tileloadd tmm4, [{a0} + {s}*1 + ",
                    $at,
                    "]\n tileloadd tmm6, [{h} + {s}*1 + ",
                    $at,
                    "]\n tdpbssd tmm0, tmm4, tmm6\n",
                    "tileloadd tmm7, [{l} + {s}*1 + ",
                    $at,
                    "]\n tdpbsud tmm1, tmm4, tmm7\n",
                    "tileloadd tmm5, [{a1} + {s}*1 + ",
                    $at,
                    "]\n tdpbssd tmm2, tmm5, tmm6\n tdpbsud tmm3, tmm5, tmm7"
                )
            };
        }
        // SAFETY: the caller's contract.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                step!("0"), step!("1024"), step!("2048"), step!("3072"),
                "tilestored [{c} + {s}*1], tmm0", "tilestored [{c} + {s}*1 + 1024], tmm1",
                "tilestored [{c} + {s}*1 + 2048], tmm2", "tilestored [{c} + {s}*1 + 3072], tmm3",
                a0 = in(reg) a0, a1 = in(reg) a1, h = in(reg) high, l = in(reg) low, c = in(reg) c, s = in(reg) 64usize,
                options(nostack))
        }
    }
}
