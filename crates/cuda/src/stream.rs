//! Queues of work, and marks in them.

use std::sync::Arc;

use crate::device::Device;
use crate::driver::{Handle, NOT_READY, flag};
use crate::error::Error;
use crate::graph::Graph;

/// A queue of a device's work. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Stream(Arc<Owned>);

/// A mark in a stream.
#[derive(Debug)]
pub struct Event(Owned);

/// A stream that records its work.
#[derive(Debug)]
pub struct Capture {
    stream: Stream,
    is_over: bool,
}

/// Whether an event can tell time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// It only orders work.
    Off,
    /// [`Event::elapsed_ms`] works.
    On,
}

#[derive(Debug)]
enum Kind {
    Stream,
    Event,
}

#[derive(Debug)]
struct Owned {
    device: Device,
    handle: Handle,
    kind: Kind,
}

// SAFETY: the driver's functions may be called with these handles from any thread.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Stream {
    /// A new stream, which does not wait for others.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let driver = device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` may be written; it is destroyed in `Owned::drop`.
        device.check("cuStreamCreate", unsafe {
            (driver.stream_create)(&mut handle, flag::STREAM_NON_BLOCKING)
        })?;
        Ok(Self(Arc::new(Owned {
            device: device.clone(),
            handle,
            kind: Kind::Stream,
        })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Waits until all work given so far is done; says if any of it failed.
    pub fn synchronise(&self) -> Result<(), Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: the stream lives.
        self.0.device.check("cuStreamSynchronize", unsafe {
            (driver.stream_synchronise)(self.0.handle)
        })
    }

    /// Work given from here on waits for the event.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: both live.
        self.0.device.check("cuStreamWaitEvent", unsafe {
            (driver.stream_wait)(self.0.handle, event.0.handle, 0)
        })
    }

    /// Marks the work given so far.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: both live.
        self.0.device.check("cuEventRecord", unsafe {
            (driver.event_record)(event.0.handle, self.0.handle)
        })
    }

    /// The same, in a stream whose work is recorded: a graph marks its own work then, each time it is launched.
    pub fn record_in_graph(&self, event: &Event) -> Result<(), Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: both live; who launches the graph has the event still.
        self.0.device.check("cuEventRecordWithFlags", unsafe {
            (driver.event_record_with)(event.0.handle, self.0.handle, flag::EVENT_RECORD_EXTERNAL)
        })
    }

    /// Records the work that `give` gives to this stream, instead of doing it.
    pub fn capture(&self, give: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let mut capture = self.begin_capture()?;
        let given = give();
        let graph = capture.stop();
        let graph = graph.and_then(|graph| Graph::new(&self.0.device, graph));
        given.and(graph)
    }

    /// Records the work that is given to this stream until the capture ends, instead of doing it.
    pub fn begin_capture(&self) -> Result<Capture, Error> {
        let device = &self.0.device;
        let driver = device.bind()?;
        // SAFETY: the stream lives.
        device.check("cuStreamBeginCapture", unsafe {
            (driver.capture_begin)(self.0.handle, flag::CAPTURE_THREAD_LOCAL)
        })?;
        Ok(Capture {
            stream: self.clone(),
            is_over: false,
        })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.0.handle
    }
}

impl Capture {
    /// What was recorded, if anything; the stream does its work again.
    pub fn end(mut self) -> Result<Option<Graph>, Error> {
        let graph = self.stop()?;
        Graph::of_any(self.stream.device(), graph)
    }

    fn stop(&mut self) -> Result<Handle, Error> {
        self.is_over = true;
        let device = self.stream.device();
        let driver = device.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a capture was begun; `graph` may be written.
        device.check("cuStreamEndCapture", unsafe {
            (driver.capture_end)(self.stream.handle(), &mut graph)
        })?;
        Ok(graph)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.is_over
            && let Ok(graph) = self.stop()
        {
            Graph::forget(self.stream.device(), graph);
        }
    }
}

impl Event {
    /// A new event.
    pub fn new(device: &Device, timing: Timing) -> Result<Self, Error> {
        let driver = device.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = match timing {
            Timing::On => 0,
            Timing::Off => flag::EVENT_DISABLE_TIMING,
        };
        // SAFETY: `handle` may be written; it is destroyed in `Owned::drop`.
        device.check("cuEventCreate", unsafe {
            (driver.event_create)(&mut handle, flags)
        })?;
        Ok(Self(Owned {
            device: device.clone(),
            handle,
            kind: Kind::Event,
        }))
    }

    /// Waits for the work that was marked.
    pub fn synchronise(&self) -> Result<(), Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: the event lives.
        self.0.device.check("cuEventSynchronize", unsafe {
            (driver.event_synchronise)(self.0.handle)
        })
    }

    /// Whether the work that was marked is done.
    pub fn is_done(&self) -> Result<bool, Error> {
        let driver = self.0.device.bind()?;
        // SAFETY: the event lives.
        match unsafe { (driver.event_query)(self.0.handle) } {
            NOT_READY => Ok(false),
            code => self.0.device.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds from `start` to this event. Both must tell time and be done.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f32, Error> {
        let driver = self.0.device.bind()?;
        let mut ms = 0.0;
        // SAFETY: `ms` may be written, both events live.
        self.0.device.check("cuEventElapsedTime", unsafe {
            (driver.event_elapsed)(&mut ms, start.0.handle, self.0.handle)
        })?;
        Ok(ms)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let Ok(driver) = self.device.bind() else {
            return;
        };
        // SAFETY: made once, destroyed once. The driver waits with it until work that uses it is done.
        unsafe {
            match self.kind {
                Kind::Stream => (driver.stream_destroy)(self.handle),
                Kind::Event => (driver.event_destroy)(self.handle),
            };
        }
    }
}
