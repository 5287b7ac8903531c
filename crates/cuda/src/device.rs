//! A GPU, by its number.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cpu::mem;

use crate::driver::{Code, DeviceHandle, DevicePtr, Driver, Handle, attribute, flag};
use crate::error::Error;
use crate::stream::Stream;

/// The compute capability that devices must have.
pub const COMPUTE_MIN: (u32, u32) = (8, 0);

/// The only compute capability whose warpgroups multiply together (`kernels/wgmma.cuh`).
pub(crate) const WGMMA_COMPUTE: (u32, u32) = (9, 0);

/// A GPU that was opened. Clones are the same one; its context is released with the last.
#[derive(Clone)]
pub struct Device(Arc<Opened>);

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The vendor's name of it.
    pub name: String,
    /// Compute capability.
    pub compute: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// Bytes of shared memory that one thread block can have.
    pub shared_bytes_block_max: usize,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_bytes: usize,
    /// Bytes of memory.
    pub total_bytes: u64,
}

struct Opened {
    driver: &'static Driver,
    ordinal: usize,
    handle: DeviceHandle,
    context: Handle,
    properties: Properties,
    kept: Mutex<Kept>,
}

/// What recorded work may still use.
#[derive(Default)]
struct Kept {
    /// Graphs that exist.
    graphs: usize,
    /// What was dropped meanwhile.
    dropped: Vec<Owned>,
}

/// Something that the driver gave and takes back.
pub(crate) enum Owned {
    /// Memory of the device.
    Memory(DevicePtr),
    /// Pinned host memory.
    Pinned(*mut std::ffi::c_void),
    /// Host memory of which the first bytes were registered.
    Registered(mem::Buffer<u8>),
    /// Kernels.
    Module(Handle),
}

impl Owned {
    fn give_back(&self, driver: &Driver) {
        // SAFETY: got once, given back once, with the context current; the driver waits for work that uses it. What it says
        // cannot be handled here.
        unsafe {
            match self {
                Self::Memory(at) => (driver.mem_free)(*at),
                Self::Pinned(at) => (driver.host_free)(*at),
                Self::Registered(memory) => {
                    // Copies from it may be under way.
                    (driver.context_synchronise)();
                    (driver.host_unregister)(memory.as_ptr().cast_mut().cast())
                }
                Self::Module(handle) => (driver.module_unload)(*handle),
            };
        }
    }
}

// SAFETY: the driver's functions may be called from any thread; `context` and what is kept are only ever handed back to them.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// Bytes of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not taken by any process.
    pub free_bytes: u64,
    /// In all.
    pub total_bytes: u64,
}

impl Device {
    /// How many devices the driver sees.
    pub fn count() -> Result<usize, Error> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: `count` may be written.
        driver.check("cuDeviceGetCount", 0, unsafe {
            (driver.device_count)(&mut count)
        })?;
        Ok(count as usize)
    }

    /// The version of CUDA that the driver is for.
    pub fn cuda_version() -> Result<(u32, u32), Error> {
        let driver = Driver::get()?;
        let mut version = 0;
        // SAFETY: `version` may be written.
        driver.check("cuDriverGetVersion", 0, unsafe {
            (driver.version)(&mut version)
        })?;
        Ok((version as u32 / 1000, version as u32 % 1000 / 10))
    }

    /// Opens a device by its number.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        let driver = Driver::get()?;
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let mut handle = 0;
        // SAFETY: `handle` may be written.
        driver.check("cuDeviceGet", ordinal, unsafe {
            (driver.device_get)(&mut handle, ordinal as c_int)
        })?;
        let properties = properties(driver, ordinal, handle)?;
        if properties.compute < COMPUTE_MIN {
            return Err(Error::OldDevice {
                ordinal,
                name: properties.name,
                found: properties.compute,
                wanted: COMPUTE_MIN,
            });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` may be written; it is released in `Opened::drop`.
        driver.check("cuDevicePrimaryCtxRetain", ordinal, unsafe {
            (driver.context_retain)(&mut context, handle)
        })?;
        Ok(Self(Arc::new(Opened {
            driver,
            ordinal,
            handle,
            context,
            properties,
            kept: Mutex::default(),
        })))
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<MemoryInfo, Error> {
        let driver = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both may be written.
        self.check("cuMemGetInfo", unsafe {
            (driver.mem_info)(&mut free, &mut total)
        })?;
        Ok(MemoryInfo {
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }

    /// Has the device copy and read the first `bytes` bytes of some host memory by itself. Returns whether it does: systems bound what may be pinned.
    ///
    /// # Errors
    /// If the device is lost.
    pub(crate) fn register(
        &self,
        memory: &mut mem::Buffer<u8>,
        bytes: usize,
    ) -> Result<bool, Error> {
        let driver = self.bind()?;
        let mut has_one_address = 0;
        // SAFETY: the number may be written.
        let code = unsafe {
            (driver.device_attribute)(
                &mut has_one_address,
                attribute::REGISTERED_ADDRESS,
                self.0.handle,
            )
        };
        self.check("cuDeviceGetAttribute", code)?;
        if has_one_address == 0 || bytes > memory.len() {
            return Ok(false);
        }
        // SAFETY: the memory is there, and stays where it is until it is given back.
        let code = unsafe {
            (driver.host_register)(memory.as_mut_ptr().cast(), bytes, flag::HOST_REGISTER)
        };
        Ok(code == 0)
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream, Error> {
        Stream::new(self)
    }

    /// Makes the device's context the calling thread's and gives the driver.
    pub(crate) fn bind(&self) -> Result<&'static Driver, Error> {
        let driver = self.0.driver;
        // SAFETY: the context is retained.
        self.check("cuCtxSetCurrent", unsafe {
            (driver.context_set)(self.0.context)
        })?;
        Ok(driver)
    }

    /// Gives something back to the driver; while there are graphs, which may use it, when the last of them is gone.
    pub(crate) fn give_back(&self, owned: Owned) {
        let mut kept = self.kept();
        if kept.graphs > 0 {
            kept.dropped.push(owned);
        } else if let Ok(driver) = self.bind() {
            owned.give_back(driver);
        }
    }

    /// There is one more graph.
    pub(crate) fn add_graph(&self) {
        self.kept().graphs += 1;
    }

    /// There is one graph less.
    pub(crate) fn remove_graph(&self) {
        let mut kept = self.kept();
        kept.graphs -= 1;
        if kept.graphs == 0
            && let Ok(driver) = self.bind()
        {
            kept.dropped
                .drain(..)
                .for_each(|owned| owned.give_back(driver));
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), Error> {
        self.0.driver.check(call, self.0.ordinal, code)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.ordinal == other.0.ordinal
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.0.ordinal, self.0.properties.name)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: retained once, in `open`. An error cannot be handled here: the context is gone either way.
        unsafe { (self.driver.context_release)(self.handle) };
    }
}

fn properties(driver: &Driver, ordinal: usize, handle: DeviceHandle) -> Result<Properties, Error> {
    let get = |which: c_int| {
        let mut value = 0;
        // SAFETY: `value` may be written.
        let code = unsafe { (driver.device_attribute)(&mut value, which, handle) };
        driver
            .check("cuDeviceGetAttribute", ordinal, code)
            .map(|()| value as usize)
    };
    let mut name = [0u8; 256];
    // SAFETY: at most 256 bytes are written.
    driver.check("cuDeviceGetName", ordinal, unsafe {
        (driver.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, handle)
    })?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let mut total = 0;
    // SAFETY: `total` may be written.
    driver.check("cuDeviceTotalMem", ordinal, unsafe {
        (driver.device_total)(&mut total, handle)
    })?;
    Ok(Properties {
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        compute: (
            get(attribute::COMPUTE_MAJOR)? as u32,
            get(attribute::COMPUTE_MINOR)? as u32,
        ),
        multiprocessors: get(attribute::MULTIPROCESSORS)?,
        l2_bytes: get(attribute::L2_BYTES)?,
        shared_bytes_block_max: get(attribute::SHARED_BYTES_BLOCK_MAX)?,
        shared_bytes: get(attribute::SHARED_BYTES_MULTIPROCESSOR)?,
        total_bytes: total as u64,
    })
}
