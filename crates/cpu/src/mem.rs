//! Memory that kernels like: aligned to cache lines, in huge pages where it is large, and shared between workers that
//! write disjoint parts.

use memmap2::MmapMut;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Bytes a cache line, and the alignment of every buffer.
pub const ALIGN: usize = 64;

/// Bytes a huge page.
const HUGE: usize = 2 << 20;

/// Buffers from this size on ask for huge pages. Streaming weights through 4 KiB pages reaches less than half the memory
/// bandwidth on virtual machines, where a missed translation walks two page tables (`docs/measurements.md`).
const HUGE_MIN: usize = HUGE / 2;

/// Types for which any bit pattern, and so zeroed memory, is a value.
///
/// # Safety
/// All-zero bytes must be a valid value, and the type must need no drop.
pub unsafe trait Plain: Copy {}
// SAFETY: plain integers and floats.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A zeroed, cache-line aligned buffer of fixed length.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    ptr: NonNull<T>,
    len: usize,
    /// What owns the memory if it was mapped; else the allocator does.
    map: Option<MmapMut>,
}

// SAFETY: the buffer owns its memory, and T is plain data.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Plain> Sync for Buffer<T> {}

/// The system would not give this much memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("could not allocate {bytes} bytes of host memory")]
pub struct OutOfMemory {
    /// What was asked for.
    pub bytes: usize,
}

impl<T: Plain> Buffer<T> {
    fn layout(len: usize) -> Option<Layout> {
        Layout::array::<T>(len.max(1)).ok()?.align_to(ALIGN).ok()
    }

    /// A buffer of `len` zeros. Pages are taken from the system as they are first written.
    ///
    /// # Errors
    /// If the size overflows or the allocator refuses it.
    pub fn new(len: usize) -> Result<Self, OutOfMemory> {
        let refused = OutOfMemory {
            bytes: len.saturating_mul(size_of::<T>()),
        };
        let layout = Self::layout(len).ok_or(refused.clone())?;
        if layout.size() >= HUGE_MIN {
            let mut map = huge(layout.size()).ok_or(refused.clone())?;
            let offset = map.as_ptr().align_offset(HUGE);
            let ptr = NonNull::new(map[offset..].as_mut_ptr().cast()).ok_or(refused)?;
            return Ok(Self {
                ptr,
                len,
                map: Some(map),
            });
        }
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<T>()).ok_or(refused)?;
        Ok(Self {
            ptr,
            len,
            map: None,
        })
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.map.is_some() {
            return;
        }
        let layout = Self::layout(self.len).expect("the layout it was made with");
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr().cast(), layout) }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised (zeroed) values are owned.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` initialised values are owned, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

/// Zeroed memory of `bytes` bytes from a huge page's boundary on, in huge pages where the system has them. A last page that
/// would be filled by less than half stays small.
fn huge(bytes: usize) -> Option<MmapMut> {
    let map = MmapMut::map_anon(bytes.checked_add(HUGE)?).ok()?;
    let whole = (bytes + HUGE / 2) / HUGE * HUGE;
    #[cfg(target_os = "linux")]
    if whole > 0 {
        let offset = map.as_ptr().align_offset(HUGE);
        // Only speed hangs on it: a system without huge pages refuses, and small ones serve.
        let _ = map.advise_range(
            memmap2::Advice::HugePage,
            offset,
            whole.min(map.len() - offset),
        );
    }
    Some(map)
}

/// How far ahead of the bytes in work a stream is fetched, into the second-level cache and from there into the first.
///
/// Hardware prefetchers alone keep too few lines in flight for one token's work, which does little with each. The
/// first-level cache can wait for 16 lines only, less than memory's latency times its bandwidth, so that fetching straight
/// into it stops at two thirds of what both steps reach.
const AHEAD_BYTES: [usize; 2] = [4096, 1024];

/// Fetches the cache lines that lie [`AHEAD_BYTES`] behind the first of these bytes.
#[inline(always)]
pub(crate) fn fetch_ahead(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let [far, near] = AHEAD_BYTES.map(|ahead| bytes.as_ptr().wrapping_add(ahead).cast());
        // SAFETY: a prefetch of any address is only a hint and never faults.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(far);
            _mm_prefetch::<_MM_HINT_T0>(near);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Fetches all cache lines of some values.
#[inline(always)]
pub(crate) fn fetch_all<T: Plain>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let begin = values.as_ptr().cast::<i8>();
        // The last line too, where the first value is not at a line's beginning.
        let bytes = size_of_val(values) + begin.addr() % ALIGN;
        for at in (0..bytes).step_by(ALIGN) {
            // SAFETY: a prefetch of any address is only a hint and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(begin.wrapping_add(at)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// A slice that several workers write at once, each its own part.
#[derive(Debug)]
pub struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out under the contract of `part`.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Takes the slice for the time of a fork.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            life: PhantomData,
        }
    }

    /// The part `start .. start + len`.
    ///
    /// # Safety
    /// No other part handed out and still in use may overlap it.
    #[allow(clippy::mut_from_ref, reason = "the contract is disjointness")]
    #[inline(always)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "part {start}+{len} of {}",
            self.len
        );
        // SAFETY: within the slice; disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}
