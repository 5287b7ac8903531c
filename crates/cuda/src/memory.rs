//! Memory of the device, and host memory that it can reach.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::{Device, Owned};
use crate::driver::{DevicePtr, OUT_OF_MEMORY, RowsCopy, RowsPlace, flag, memory_type};
use crate::error::{Error, length};
use crate::stream::Stream;

/// Numbers that are the same bytes on host and device.
///
/// # Safety
/// Every bit pattern is a value, there is no padding, and the layout is the device's.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($ty:ty),*) => {$(
        // SAFETY: a number.
        unsafe impl Plain for $ty {}
    )*};
}
plain!(
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    u64,
    i64,
    f32,
    f64,
    half::f16,
    half::bf16
);

/// Bytes of all buffers.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Bytes of devices' memory that this process's buffers have. What the driver takes for itself is not in it.
pub fn taken_bytes() -> u64 {
    TAKEN.load(Ordering::Relaxed)
}

/// Numbers in a device's memory; freed when dropped.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    device: Device,
    at: DevicePtr,
    len: usize,
    /// Where they lie if that is host memory, which kernels reach over the link.
    host: Option<Pinned<T>>,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Memory for `len` numbers, with whatever is in it.
    pub fn new(device: &Device, len: usize) -> Result<Self, Error> {
        let too_many = |_| Error::OutOfMemory {
            ordinal: device.ordinal(),
            wanted_bytes: u64::MAX,
            free_bytes: 0,
            total_bytes: device.properties().total_bytes,
        };
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or(())
            .map_err(too_many)?;
        let driver = device.bind()?;
        let mut at = 0;
        if bytes > 0 {
            // SAFETY: `at` may be written; it is freed in `drop`.
            let code = unsafe { (driver.mem_alloc)(&mut at, bytes) };
            if code == OUT_OF_MEMORY {
                let memory = device.memory()?;
                return Err(Error::OutOfMemory {
                    ordinal: device.ordinal(),
                    wanted_bytes: bytes as u64,
                    free_bytes: memory.free_bytes,
                    total_bytes: memory.total_bytes,
                });
            }
            device.check("cuMemAlloc", code)?;
            TAKEN.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        Ok(Self {
            device: device.clone(),
            at,
            len,
            host: None,
            of: PhantomData,
        })
    }

    /// The same in pinned host memory, for kernels that read little of it.
    pub fn in_host(device: &Device, len: usize) -> Result<Self, Error> {
        let pinned = Pinned::unset(device, len)?;
        Ok(Self {
            device: device.clone(),
            at: pinned.address(),
            len,
            host: Some(pinned),
            of: PhantomData,
        })
    }

    /// Memory for `len` numbers, filled with zero bytes by the stream.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self, Error> {
        let mut buffer = Self::new(stream.device(), len)?;
        buffer.fill_bytes(stream, 0)?;
        Ok(buffer)
    }

    /// A copy of `values` in a device's memory.
    pub fn from_slice(stream: &Stream, values: &[T]) -> Result<Self, Error> {
        let mut buffer = Self::new(stream.device(), values.len())?;
        buffer.upload(stream, values)?;
        Ok(buffer)
    }

    /// Numbers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Bytes of host memory.
    pub fn host_bytes(&self) -> usize {
        self.host.as_ref().map_or(0, |_| self.bytes())
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device's address, for a kernel.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// Fills all bytes with `byte`.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), Error> {
        if self.len == 0 {
            return Ok(());
        }
        let driver = self.device.bind()?;
        // SAFETY: the memory is this buffer's, all of it.
        self.device.check("cuMemsetD8Async", unsafe {
            (driver.fill_bytes)(self.at, byte, self.bytes(), stream.handle())
        })
    }

    /// Copies `values`, as many as the buffer has, after the stream's earlier work. Waits for it.
    pub fn upload(&mut self, stream: &Stream, values: &[T]) -> Result<(), Error> {
        length("upload", "values", values.len(), self.len)?;
        self.upload_at(stream, 0, values)
    }

    /// Copies `values` to number `first` and on, after the stream's earlier work. Waits for it.
    pub fn upload_at(&mut self, stream: &Stream, first: usize, values: &[T]) -> Result<(), Error> {
        self.range("upload", first, values.len())?;
        // SAFETY: `values` lives until the stream is synchronised.
        let copied = unsafe { self.upload_later(stream, first, values) };
        copied.and(stream.synchronise())
    }

    /// Copies `values` to number `first` and on, in the stream's order. Returns at once if they lie in [`Pinned`] memory.
    ///
    /// # Safety
    /// `values` stay where and what they are until the stream has done it.
    pub unsafe fn upload_later(
        &mut self,
        stream: &Stream,
        first: usize,
        values: &[T],
    ) -> Result<(), Error> {
        self.range("upload", first, values.len())?;
        if values.is_empty() {
            return Ok(());
        }
        let driver = self.device.bind()?;
        let to = self.at + (first * size_of::<T>()) as u64;
        if self.host.is_some() {
            // SAFETY: the range is inside the buffer; the caller vouches for `values`. Pinned memory has one address for host and device.
            return self.device.check("cuMemcpyAsync", unsafe {
                let from = values.as_ptr().addr() as u64;
                (driver.copy_any)(to, from, size_of_val(values), stream.handle())
            });
        }
        // SAFETY: the range is inside the buffer; the caller vouches for `values`.
        self.device.check("cuMemcpyHtoDAsync", unsafe {
            (driver.copy_up)(
                to,
                values.as_ptr().cast(),
                size_of_val(values),
                stream.handle(),
            )
        })
    }

    /// Copies rows of `width` numbers, of which `from` is the first and each next one lies `pitch` numbers further, to number `first` and
    /// on, one behind the other, in the stream's order.
    ///
    /// # Safety
    /// All rows lie in one piece of [`Pinned`] memory, which stays until the stream has done it.
    pub(crate) unsafe fn upload_rows(
        &mut self,
        stream: &Stream,
        first: usize,
        from: *const T,
        width: usize,
        pitch: usize,
        rows: usize,
    ) -> Result<(), Error> {
        self.range("upload of rows", first, width.saturating_mul(rows))?;
        let driver = self.device.bind()?;
        let size = size_of::<T>();
        let copy = RowsCopy {
            from: RowsPlace {
                x_bytes: 0,
                y: 0,
                memory: memory_type::HOST,
                host: from.cast(),
                device: 0,
                array: std::ptr::null_mut(),
                pitch_bytes: pitch * size,
            },
            to: RowsPlace {
                x_bytes: 0,
                y: 0,
                memory: memory_type::DEVICE,
                host: std::ptr::null(),
                device: self.at + (first * size) as u64,
                array: std::ptr::null_mut(),
                pitch_bytes: width * size,
            },
            width_bytes: width * size,
            rows,
        };
        // SAFETY: the destination is inside the buffer; the caller vouches for the source.
        self.device.check("cuMemcpy2DAsync", unsafe {
            (driver.copy_rows)(&copy, stream.handle())
        })
    }

    /// Copies all numbers to `values`, after the stream's earlier work. Waits for it.
    pub fn download(&self, stream: &Stream, values: &mut [T]) -> Result<(), Error> {
        length("download", "values", values.len(), self.len)?;
        self.download_at(stream, 0, values)
    }

    /// Copies numbers from `first` on to `values`, after the stream's earlier work. Waits for it.
    pub fn download_at(
        &self,
        stream: &Stream,
        first: usize,
        values: &mut [T],
    ) -> Result<(), Error> {
        // SAFETY: `values` is borrowed until the stream is synchronised.
        let copied = unsafe { self.download_later(stream, first, values) };
        copied.and(stream.synchronise())
    }

    /// Copies numbers from `first` on to `values`, in the stream's order. Returns at once if they lie in [`Pinned`] memory.
    ///
    /// # Safety
    /// `values` are neither read nor written nor freed until the stream has done it.
    pub unsafe fn download_later(
        &self,
        stream: &Stream,
        first: usize,
        values: &mut [T],
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for `values`.
        unsafe { self.download_to(stream, first, values.as_mut_ptr(), values.len()) }
    }

    /// Copies `n` numbers from `first` on to `to`, in the stream's order.
    ///
    /// # Safety
    /// There is room for `n` numbers at `to`, until the stream has done it.
    pub(crate) unsafe fn download_to(
        &self,
        stream: &Stream,
        first: usize,
        to: *mut T,
        n: usize,
    ) -> Result<(), Error> {
        self.range("download", first, n)?;
        if n == 0 {
            return Ok(());
        }
        let driver = self.device.bind()?;
        let from = self.at + (first * size_of::<T>()) as u64;
        // SAFETY: the range is inside the buffer; the caller vouches for `to`.
        self.device.check("cuMemcpyDtoHAsync", unsafe {
            (driver.copy_down)(to.cast(), from, n * size_of::<T>(), stream.handle())
        })
    }

    /// All numbers, after the stream's earlier work.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        let mut values = Vec::<T>::with_capacity(self.len);
        #[allow(
            clippy::uninit_vec,
            reason = "zeros would be written only to be overwritten by the driver"
        )]
        // SAFETY: any bytes are values of `T`; all of them are overwritten by the copy, or the vector is dropped.
        unsafe {
            values.set_len(self.len);
        }
        self.download(stream, &mut values)?;
        Ok(values)
    }

    /// Copies `range` of `from` to number `first` and on, in the stream's order.
    pub fn copy_from(
        &mut self,
        stream: &Stream,
        first: usize,
        from: &Self,
        range: Range<usize>,
    ) -> Result<(), Error> {
        from.range("copy", range.start, range.len())?;
        self.range("copy", first, range.len())?;
        if range.is_empty() {
            return Ok(());
        }
        let driver = self.device.bind()?;
        let at = |base: u64, number: usize| base + (number * size_of::<T>()) as u64;
        // SAFETY: both ranges are inside their buffers, which are different ones.
        self.device.check("cuMemcpyDtoDAsync", unsafe {
            (driver.copy_across)(
                at(self.at, first),
                at(from.at, range.start),
                range.len() * size_of::<T>(),
                stream.handle(),
            )
        })
    }

    /// Copies `range` to number `first` and on, which lies before it, in the stream's order.
    pub fn copy_down(
        &mut self,
        stream: &Stream,
        first: usize,
        range: Range<usize>,
    ) -> Result<(), Error> {
        self.range("copy", range.start, range.len())?;
        let overlap = (first + range.len()).saturating_sub(range.start);
        crate::error::length("copy", "numbers that are copied onto others", overlap, 0)?;
        if range.is_empty() {
            return Ok(());
        }
        let driver = self.device.bind()?;
        let at = |number: usize| self.at + (number * size_of::<T>()) as u64;
        // SAFETY: both ranges are inside the buffer, one before the other.
        self.device.check("cuMemcpyDtoDAsync", unsafe {
            (driver.copy_across)(
                at(first),
                at(range.start),
                range.len() * size_of::<T>(),
                stream.handle(),
            )
        })
    }

    fn range(&self, op: &'static str, first: usize, len: usize) -> Result<(), Error> {
        match first.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::Length {
                op,
                what: "end of the range",
                found: first.saturating_add(len),
                wanted: self.len,
            }),
        }
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.at == 0 || self.host.is_some() {
            return;
        }
        TAKEN.fetch_sub(self.bytes() as u64, Ordering::Relaxed);
        self.device.give_back(Owned::Memory(self.at));
    }
}

/// Host memory that cannot be paged out, so that the device copies from and to it by itself.
#[derive(Debug)]
pub struct Pinned<T: Plain> {
    device: Device,
    at: *mut T,
    len: usize,
}

// SAFETY: it owns its memory.
unsafe impl<T: Plain> Send for Pinned<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Plain> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    /// Memory for `len` numbers, all bytes zero, cached by the CPU and usable with every device.
    pub fn new(device: &Device, len: usize) -> Result<Self, Error> {
        let new = Self::unset(device, len)?;
        // SAFETY: the memory is `len` numbers long, and nobody else's.
        unsafe { new.at.write_bytes(0, len) };
        Ok(new)
    }

    /// The same with whatever is in it.
    pub fn unset(device: &Device, len: usize) -> Result<Self, Error> {
        let none = |wanted_bytes| Error::OutOfPinned { wanted_bytes };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(none(u64::MAX))?;
        if bytes == 0 {
            return Ok(Self {
                device: device.clone(),
                at: std::ptr::NonNull::dangling().as_ptr(),
                len,
            });
        }
        let driver = device.bind()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: `at` may be written; it is freed in `drop`.
        let code = unsafe { (driver.host_alloc)(&mut at, bytes, flag::HOST_PORTABLE) };
        if code == OUT_OF_MEMORY {
            return Err(none(bytes as u64));
        }
        device.check("cuMemHostAlloc", code)?;
        Ok(Self {
            device: device.clone(),
            at: at.cast(),
            len,
        })
    }

    /// Where it lies, for the device as for the host.
    pub fn address(&self) -> u64 {
        self.at.addr() as u64
    }
}

/// Pinned host memory between the host and the work of a stream: records that go to the device, results that come from it.
///
/// Copies from and to it are given to the stream and not waited for, so that they can be recorded in graphs. The host reads and writes
/// between two steps: when the stream has been waited for. In the midst of one it finds, or hands over, old numbers among new ones.
#[derive(Debug)]
pub struct Mailbox<T: Plain>(Pinned<T>);

impl<T: Plain> Mailbox<T> {
    /// Room for `len` numbers, all bytes zero.
    pub fn new(device: &Device, len: usize) -> Result<Self, Error> {
        Ok(Self(Pinned::new(device, len)?))
    }

    /// Copies some of the numbers to the first ones of `to`, in the stream's order.
    pub fn send(
        &self,
        stream: &Stream,
        range: Range<usize>,
        to: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let Some(values) = self.0.get(range.clone()) else {
            return length("send", "numbers", self.0.len(), range.end);
        };
        // SAFETY: pinned memory is not freed while graphs exist, and the driver waits for copies before it is; that the host may
        // write meanwhile changes numbers only.
        unsafe { to.upload_later(stream, 0, values) }
    }

    /// Copies the first `n` numbers of `from` to the first ones here, in the stream's order.
    pub fn receive(&self, stream: &Stream, from: &Buffer<T>, n: usize) -> Result<(), Error> {
        let found = self.0.len();
        if n > found {
            return length("receive", "numbers", found, n);
        }
        // SAFETY: as in `send`; any bits are a number.
        unsafe { from.download_to(stream, 0, self.0.at, n) }
    }
}

impl<T: Plain> Deref for Mailbox<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Plain> DerefMut for Mailbox<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Plain> Deref for Pinned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised numbers, page-aligned.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl<T: Plain> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.len * size_of::<T>() == 0 {
            return;
        }
        self.device.give_back(Owned::Pinned(self.at.cast()));
    }
}
