//! Recorded work, given to a stream in one call.
//!
//! A graph holds addresses, not what they are of. So while any graph of a device exists, buffers, pinned memory and modules that are
//! dropped are kept, and given back to the driver with the last graph.

use crate::device::Device;
use crate::driver::Handle;
use crate::error::Error;
use crate::stream::Stream;

/// Work that a [stream](crate::Stream) recorded.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    executable: Handle,
}

// SAFETY: the driver's functions may be called with the handle from any thread; launching takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Makes a captured graph ready to be launched. Takes `graph` over.
    pub(crate) fn new(device: &Device, graph: Handle) -> Result<Self, Error> {
        let driver = device.bind()?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: `graph` came from a capture; `executable` may be written.
        let code = unsafe { (driver.graph_instantiate)(&mut executable, graph, 0) };
        // SAFETY: an executable graph does not need the one it was made from.
        unsafe { (driver.graph_destroy)(graph) };
        device.check("cuGraphInstantiate", code)?;
        device.add_graph();
        Ok(Self {
            device: device.clone(),
            executable,
        })
    }

    /// The same, or `None` if nothing was captured.
    pub(crate) fn of_any(device: &Device, graph: Handle) -> Result<Option<Self>, Error> {
        let driver = device.bind()?;
        let mut nodes = 0;
        // SAFETY: `graph` came from a capture; their number alone is asked for, which may be written.
        let code = unsafe { (driver.graph_nodes)(graph, std::ptr::null_mut(), &mut nodes) };
        if code == 0 && nodes > 0 {
            return Self::new(device, graph).map(Some);
        }
        Self::forget(device, graph);
        device.check("cuGraphGetNodes", code).map(|()| None)
    }

    /// Destroys what was captured.
    pub(crate) fn forget(device: &Device, graph: Handle) {
        if let Ok(driver) = device.bind() {
            // SAFETY: it came from a capture, and is destroyed once.
            unsafe { (driver.graph_destroy)(graph) };
        }
    }

    /// Gives the recorded work to a stream.
    pub fn launch(&mut self, stream: &Stream) -> Result<(), Error> {
        let driver = self.device.bind()?;
        // SAFETY: both live, and so does what the work was recorded with: it is kept while there are graphs.
        self.device.check("cuGraphLaunch", unsafe {
            (driver.graph_launch)(self.executable, stream.handle())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(driver) = self.device.bind() {
            // SAFETY: made once, destroyed once; the driver waits with it until launches are done.
            unsafe { (driver.graph_exec_destroy)(self.executable) };
        }
        self.device.remove_graph();
    }
}
