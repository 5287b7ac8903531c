//! Steps of a generated token as they are recorded: the device's work as graphs, cut where another stream or the CPU has a part in it.

use super::attender::Part;
use super::ring::Deed;
use cuda::{Capture, Error, Graph, Stream};

/// A piece of a step.
#[derive(Debug)]
pub(super) enum Op {
    /// What computes, and waits for nobody.
    Work(Graph),
    /// What is done for slots of the staging ring.
    Ring(Deed),
    /// The CPU is told of its part of a layer.
    Attend(Part),
}

/// A step, in order.
#[derive(Debug)]
pub(super) struct Recorded(pub(super) Vec<Op>);

/// A step that is being recorded.
#[derive(Debug)]
pub(super) struct Tape {
    stream: Stream,
    capture: Option<Capture>,
    ops: Vec<Op>,
    /// What comes behind the work that is being recorded.
    behind: Vec<Op>,
}

impl Tape {
    /// Records what is given to `stream` from here on, instead of doing it.
    pub(super) fn new(stream: &Stream) -> Result<Self, Error> {
        Ok(Self {
            stream: stream.clone(),
            capture: Some(stream.begin_capture()?),
            ops: Vec::new(),
            behind: Vec::new(),
        })
    }

    /// Records what comes between what was given to the stream and what will be.
    pub(super) fn cut(&mut self, op: Op) -> Result<(), Error> {
        self.end_work()?;
        self.ops.push(op);
        self.capture = Some(self.stream.begin_capture()?);
        Ok(())
    }

    /// Records what comes before the stream's work since the last cut, or beside it.
    pub(super) fn before(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Records what comes after it, and before the next cut.
    pub(super) fn behind(&mut self, op: Op) {
        self.behind.push(op);
    }

    /// The stream.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn end(mut self) -> Result<Recorded, Error> {
        self.end_work()?;
        Ok(Recorded(self.ops))
    }

    fn end_work(&mut self) -> Result<(), Error> {
        if let Some(capture) = self.capture.take() {
            self.ops.extend(capture.end()?.map(Op::Work));
            self.ops.append(&mut self.behind);
        }
        Ok(())
    }
}
