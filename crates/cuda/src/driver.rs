//! The functions of the CUDA driver that are used, found in its library at run time.
//!
//! Bound by hand: three dozen functions, all looked up when the driver is loaded, so that a driver without one of them is an
//! error value at the start. The usual binding looks each up at its first use and panics there.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::error::Error;

/// The CUDA version that drivers must have: the PTX in `kernels/ptx` says `.version 8.0`, which came with it.
pub(crate) const CUDA_MIN: (u32, u32) = (12, 0);

#[cfg(not(windows))]
const LIBRARY: &str = "libcuda.so.1";
#[cfg(windows)]
const LIBRARY: &str = "nvcuda.dll";

pub(crate) type Code = c_int;
pub(crate) type DeviceHandle = c_int;
pub(crate) type DevicePtr = u64;
/// Contexts, streams, events, modules, functions, graphs: pointers to things of the driver's.
pub(crate) type Handle = *mut c_void;

pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_READY: Code = 600;

pub(crate) mod attribute {
    use super::c_int;
    pub(crate) const MULTIPROCESSORS: c_int = 16;
    pub(crate) const L2_BYTES: c_int = 38;
    /// Whether registered host memory has one address for host and device.
    pub(crate) const REGISTERED_ADDRESS: c_int = 91;
    pub(crate) const COMPUTE_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_MINOR: c_int = 76;
    pub(crate) const SHARED_BYTES_BLOCK_MAX: c_int = 97;
    pub(crate) const SHARED_BYTES_MULTIPROCESSOR: c_int = 81;
    /// Of a function: bytes of shared memory that a launch may ask for.
    pub(crate) const FUNCTION_SHARED_BYTES_MAX: c_int = 8;
    /// Of a function: registers a thread.
    pub(crate) const FUNCTION_REGISTERS: c_int = 4;
    /// Of a function: bytes of local memory a thread (spills).
    pub(crate) const FUNCTION_LOCAL_BYTES: c_int = 3;
}

pub(crate) mod flag {
    use super::c_uint;
    pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
    pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
    pub(crate) const HOST_PORTABLE: c_uint = 1;
    /// Portable, and in the device's address space.
    pub(crate) const HOST_REGISTER: c_uint = 3;
    pub(crate) const CAPTURE_THREAD_LOCAL: c_uint = 1;
    /// A mark that graphs leave for others, too.
    pub(crate) const EVENT_RECORD_EXTERNAL: c_uint = 1;
    /// Options of the just-in-time compiler.
    pub(crate) const JIT_ERROR_LOG: c_uint = 5;
    pub(crate) const JIT_ERROR_LOG_BYTES: c_uint = 6;
    /// A launch may start before the kernel ahead of it in the stream has ended.
    pub(crate) const LAUNCH_PROGRAMMATIC: c_uint = 6;
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: *mut LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an identifier, then a union of 64 bytes at offset 8.
#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: c_uint,
    pub(crate) pad: [u8; 4],
    pub(crate) value: [u64; 8],
}

/// `CUDA_MEMCPY2D`: rows of one pitch to rows of another.
#[repr(C)]
pub(crate) struct RowsCopy {
    pub(crate) from: RowsPlace,
    pub(crate) to: RowsPlace,
    pub(crate) width_bytes: usize,
    pub(crate) rows: usize,
}

/// Where rows lie: one side of [`RowsCopy`].
#[repr(C)]
pub(crate) struct RowsPlace {
    pub(crate) x_bytes: usize,
    pub(crate) y: usize,
    pub(crate) memory: c_uint,
    pub(crate) host: *const c_void,
    pub(crate) device: DevicePtr,
    pub(crate) array: Handle,
    pub(crate) pitch_bytes: usize,
}

/// `CUmemorytype`.
pub(crate) mod memory_type {
    pub(crate) const HOST: u32 = 1;
    pub(crate) const DEVICE: u32 = 2;
}

macro_rules! driver {
    ($($name:ident = $symbol:literal ($($ty:ty),*);)*) => {
        /// The driver's functions. They stay loaded for the life of the process.
        #[allow(missing_docs)]
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) -> Code,)*
        }

        impl Driver {
            fn bind(library: &'static Library) -> Result<Self, Error> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the symbol is a function of this signature in every driver that has it (cuda.h).
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| Error::MissingFunction { symbol: $symbol, wanted: CUDA_MIN })?
                    },)*
                })
            }
        }
    };
}

driver! {
    init = "cuInit"(c_uint);
    version = "cuDriverGetVersion"(*mut c_int);
    error_name = "cuGetErrorName"(Code, *mut *const c_char);
    error_string = "cuGetErrorString"(Code, *mut *const c_char);

    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut DeviceHandle, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, DeviceHandle);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, DeviceHandle);
    device_total = "cuDeviceTotalMem_v2"(*mut usize, DeviceHandle);
    context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, DeviceHandle);
    context_release = "cuDevicePrimaryCtxRelease_v2"(DeviceHandle);
    context_set = "cuCtxSetCurrent"(Handle);
    context_synchronise = "cuCtxSynchronize"();

    mem_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2"(DevicePtr);
    host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost"(*mut c_void);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    copy_up = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, Handle);
    copy_down = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, Handle);
    copy_any = "cuMemcpyAsync"(DevicePtr, DevicePtr, usize, Handle);
    copy_across = "cuMemcpyDtoDAsync_v2"(DevicePtr, DevicePtr, usize, Handle);
    copy_rows = "cuMemcpy2DAsync_v2"(*const RowsCopy, Handle);
    fill_bytes = "cuMemsetD8Async"(DevicePtr, u8, usize, Handle);

    stream_create = "cuStreamCreate"(*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(Handle);
    stream_synchronise = "cuStreamSynchronize"(Handle);
    stream_wait = "cuStreamWaitEvent"(Handle, Handle, c_uint);
    event_create = "cuEventCreate"(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2"(Handle);
    event_record = "cuEventRecord"(Handle, Handle);
    event_record_with = "cuEventRecordWithFlags"(Handle, Handle, c_uint);
    event_synchronise = "cuEventSynchronize"(Handle);
    event_query = "cuEventQuery"(Handle);
    event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle);

    module_load = "cuModuleLoadDataEx"(*mut Handle, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    module_unload = "cuModuleUnload"(Handle);
    module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    function_set = "cuFuncSetAttribute"(Handle, c_int, c_int);
    function_get = "cuFuncGetAttribute"(*mut c_int, c_int, Handle);
    launch = "cuLaunchKernelEx"(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);

    capture_begin = "cuStreamBeginCapture_v2"(Handle, c_uint);
    capture_end = "cuStreamEndCapture"(Handle, *mut Handle);
    graph_nodes = "cuGraphGetNodes"(Handle, *mut Handle, *mut usize);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, u64);
    graph_launch = "cuGraphLaunch"(Handle, Handle);
    graph_destroy = "cuGraphDestroy"(Handle);
    graph_exec_destroy = "cuGraphExecDestroy"(Handle);
}

impl Driver {
    /// The process's driver, loaded and initialised at the first call.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER
            .get_or_init(Self::load)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load() -> Result<Self, Error> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        // SAFETY: the driver's initialisers are those that every CUDA program runs.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| Error::NoDriver {
            library: LIBRARY,
            // What the system says is below what was tried.
            reason: std::error::Error::source(&error)
                .map_or_else(|| error.to_string(), ToString::to_string),
        })?;
        let driver = Self::bind(LOADED.get_or_init(|| library))?;
        // SAFETY: no preconditions.
        driver.check("cuInit", 0, unsafe { (driver.init)(0) })?;
        let mut version = 0;
        // SAFETY: `version` may be written.
        driver.check("cuDriverGetVersion", 0, unsafe {
            (driver.version)(&mut version)
        })?;
        let found = (version as u32 / 1000, version as u32 % 1000 / 10);
        if found < CUDA_MIN {
            return Err(Error::OldDriver {
                found,
                wanted: CUDA_MIN,
            });
        }
        Ok(driver)
    }

    /// Turns a call's return value into an error.
    pub(crate) fn check(
        &self,
        call: &'static str,
        ordinal: usize,
        code: Code,
    ) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        Err(Error::Call {
            call,
            ordinal,
            code,
            name: self.text(self.error_name, code),
            message: self.text(self.error_string, code),
        })
    }

    fn text(
        &self,
        of: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        code: Code,
    ) -> String {
        let mut text = std::ptr::null();
        // SAFETY: `text` may be written; the driver gives null or a string that lives for ever.
        unsafe {
            if of(code, &mut text) != 0 || text.is_null() {
                return "unknown".into();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

// The layouts that cuda.h gives these on 64-bit systems.
const _: () = assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);
const _: () = assert!(size_of::<RowsCopy>() == 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_and_not_a_panic() {
        match Driver::get() {
            Ok(_) => eprintln!("skipped: this machine has a driver"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("CUDA"), "{text}");
                assert!(!text.contains('\n'), "{text}");
            }
        }
    }
}
