//! Kernels: compiled from PTX by the driver, launched on a stream.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::device::{Device, Owned};
use crate::driver::{Handle, LaunchAttribute, LaunchConfig, OUT_OF_MEMORY, attribute, flag};
use crate::error::Error;
use crate::memory::{Buffer, Plain};
use crate::ptx;
use crate::stream::Stream;

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 8192;

/// Kernels that were compiled together. Clones are the same module.
#[derive(Debug, Clone)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    device: Device,
    handle: Handle,
    name: String,
}

// SAFETY: the driver's functions may be called with the handle from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// A function of a [`Module`].
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Module,
    function: Handle,
}

// SAFETY: the driver's functions may be called with the handle from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// An argument of a kernel: up to 8 bytes, the type being the kernel's affair. A last parameter of several words takes all arguments that are left,
/// as they lie side by side.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Arg(u64);

impl Arg {
    /// No memory.
    pub const NULL: Self = Self(0);

    pub(crate) fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl<T: Plain> From<&Buffer<T>> for Arg {
    fn from(buffer: &Buffer<T>) -> Self {
        Self(buffer.address())
    }
}

impl<T: Plain> From<&mut Buffer<T>> for Arg {
    fn from(buffer: &mut Buffer<T>) -> Self {
        Self(buffer.address())
    }
}

macro_rules! arg {
    ($($ty:ty => $bits:expr),*) => {$(
        impl From<$ty> for Arg {
            fn from(value: $ty) -> Self {
                let bits: fn($ty) -> u64 = $bits;
                Self(bits(value))
            }
        }
    )*};
}
// The driver reads as many bytes as the kernel's parameter has, from the first: devices exist for little-endian hosts only.
arg!(u64 => |v| v, u32 => u64::from, i32 => |v| u64::from(v as u32), f32 => |v| u64::from(v.to_bits()));

/// How many threads a launch has, how much shared memory, and when it may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory a block.
    pub shared_bytes: u32,
    /// When it starts.
    pub start: Start,
}

/// When a kernel may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// When all earlier work of the stream is done.
    After,
    /// While the kernel ahead of it still runs: the kernel itself waits before it touches what that one writes
    /// (`griddepcontrol.wait`). On devices before 9.0 the same as [`Start::After`].
    Overlapped,
}

impl Launch {
    /// A one-dimensional launch without dynamic shared memory, after all earlier work.
    pub fn new(blocks: usize, threads: usize) -> Self {
        Self::grid([blocks as u32, 1, 1], [threads as u32, 1, 1])
    }

    /// A launch without dynamic shared memory, after all earlier work.
    pub fn grid(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self {
            grid,
            block,
            shared_bytes: 0,
            start: Start::After,
        }
    }

    /// The same with dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self {
            shared_bytes: bytes as u32,
            ..self
        }
    }

    /// The same, starting at another time.
    pub fn start(self, start: Start) -> Self {
        Self { start, ..self }
    }
}

impl Module {
    /// Loads the kernels of `kernels/NAME.cu`.
    pub fn load(device: &Device, name: &str) -> Result<Self, Error> {
        Self::load_for(device, name, device.properties().compute)
    }

    /// Loads the kernels of `kernels/NAME.cu` as compiled for another compute capability that the device runs, too.
    pub fn load_for(device: &Device, name: &str, compute: (u32, u32)) -> Result<Self, Error> {
        let text = ptx::of(name, compute).ok_or_else(|| Error::NoModule {
            module: name.into(),
        })?;
        Self::from_ptx(device, name, &text)
    }

    /// Compiles PTX for the device.
    pub fn from_ptx(device: &Device, name: &str, text: &str) -> Result<Self, Error> {
        let driver = device.bind()?;
        let text = CString::new(text).map_err(|_| Error::Compile {
            module: name.into(),
            ordinal: device.ordinal(),
            log: "the text holds a zero byte".into(),
        })?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [flag::JIT_ERROR_LOG, flag::JIT_ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero; two options with their values; `handle` and `log` may be written.
        let code = unsafe {
            (driver.module_load)(
                &mut handle,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == OUT_OF_MEMORY {
            device.check("cuModuleLoadDataEx", code)?;
        }
        if code != 0 {
            let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
            let said = String::from_utf8_lossy(&log[..end]);
            let failure = device.check("cuModuleLoadDataEx", code);
            return Err(Error::Compile {
                module: name.into(),
                ordinal: device.ordinal(),
                log: match (said.trim(), failure) {
                    ("", Err(error)) => error.to_string(),
                    (said, _) => said.replace('\n', "; "),
                },
            });
        }
        Ok(Self(Arc::new(Loaded {
            device: device.clone(),
            handle,
            name: name.into(),
        })))
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let missing = || Error::NoModule {
            module: format!("{}::{name}", self.0.name),
        };
        let device = &self.0.device;
        let driver = device.bind()?;
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module lives, the name ends with a zero, `function` may be written.
        let code =
            unsafe { (driver.module_function)(&mut function, self.0.handle, symbol.as_ptr()) };
        if code != 0 {
            return Err(missing());
        }
        Ok(Kernel {
            module: self.clone(),
            function,
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.device.give_back(Owned::Module(self.handle));
    }
}

impl Kernel {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.module.0.device
    }

    /// Allows launches with up to `bytes` of dynamic shared memory (48 KiB without).
    pub fn allow_shared(&self, bytes: usize) -> Result<(), Error> {
        let driver = self.device().bind()?;
        // SAFETY: the function's module lives.
        self.device().check("cuFuncSetAttribute", unsafe {
            (driver.function_set)(
                self.function,
                attribute::FUNCTION_SHARED_BYTES_MAX,
                bytes as c_int,
            )
        })
    }

    /// Registers a thread.
    pub fn registers(&self) -> Result<usize, Error> {
        self.attribute(attribute::FUNCTION_REGISTERS)
    }

    /// Bytes a thread that did not fit registers.
    pub fn spilled_bytes(&self) -> Result<usize, Error> {
        self.attribute(attribute::FUNCTION_LOCAL_BYTES)
    }

    fn attribute(&self, which: c_int) -> Result<usize, Error> {
        let driver = self.device().bind()?;
        let mut value = 0;
        // SAFETY: the function's module lives, `value` may be written.
        self.device().check("cuFuncGetAttribute", unsafe {
            (driver.function_get)(&mut value, which, self.function)
        })?;
        Ok(value as usize)
    }

    /// Gives the kernel to a stream.
    ///
    /// # Safety
    /// `args` are what the kernel takes, in number, order and type; everything it reads and writes with them lies inside
    /// buffers that exist until it is done.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        args: &[Arg],
    ) -> Result<(), Error> {
        let device = self.device();
        let driver = device.bind()?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGS_MAX];
        crate::error::length(
            "launch",
            "arguments over the limit",
            args.len().saturating_sub(ARGS_MAX),
            0,
        )?;
        for (i, pointer) in pointers.iter_mut().take(args.len()).enumerate() {
            // Of all that follows, too.
            *pointer = args[i..].as_ptr().cast_mut().cast();
        }
        let overlapped = launch.start == Start::Overlapped && device.properties().compute >= (9, 0);
        let mut attributes = [LaunchAttribute {
            id: flag::LAUNCH_PROGRAMMATIC,
            pad: [0; 4],
            value: [1, 0, 0, 0, 0, 0, 0, 0],
        }];
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream: stream.handle(),
            attributes: attributes.as_mut_ptr(),
            attribute_count: c_uint::from(overlapped),
        };
        // SAFETY: `config` and the pointers live through the call, which copies the arguments; the caller vouches for them.
        device.check("cuLaunchKernelEx", unsafe {
            (driver.launch)(
                &config,
                self.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// Arguments of a kernel at most.
const ARGS_MAX: usize = 32;
