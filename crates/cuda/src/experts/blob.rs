//! How an expert's weights lie together, and where each expert's are.

use std::ops::Range;
use std::sync::Arc;

use cpu::mem::ALIGN;
use cpu::pool::Pool;
use gguf::TensorType;
use quant::formats::{self, Class};
use quant::product::CHUNK;
use quant::tile::{Layout, ROWS};

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::{Buffer, Pinned};
use crate::staging;
use crate::stream::Stream;

use super::blobs::Blobs;

/// Values of F that kernels take at once: gate and up then follow each other without a gap, as one matrix.
const FF_STEP: usize = 64;

/// The longest rows of weights: kernels count their chunks in 8 bits.
const K_MAX: usize = 255 * CHUNK;

/// The layout of a layer's experts: gate, up, down, then their biases, each from a multiple of [`ALIGN`] on, as host memory has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blob {
    pub(super) inputs: TensorType,
    pub(super) down: TensorType,
    pub(super) width: usize,
    pub(super) ff: usize,
    pub(super) up_at: usize,
    pub(super) down_at: usize,
    /// Of gate, up and down.
    pub(super) biases_at: Option<[usize; 3]>,
    bytes: usize,
}

impl Blob {
    /// The layout of experts with gate and up `[F, D]` of `inputs` and down `[D, F]` of another format.
    ///
    /// # Errors
    /// If there are no kernels for such experts: says what they are.
    pub fn new(
        [gate, up, down]: [TensorType; 3],
        width: usize,
        ff: usize,
        has_biases: bool,
    ) -> Result<Self, String> {
        if gate != up {
            let (gate, up) = (gate.name(), up.name());
            return Err(format!("experts whose gates are {gate} and whose ups {up}"));
        }
        for (ty, k, what) in [(gate, width, "width"), (down, ff, "feed-forward width")] {
            if matches!(formats::class(ty), None | Some(Class::Float)) {
                return Err(format!("experts of {} weights", ty.name()));
            }
            if !k.is_multiple_of(ty.block_len()) {
                let name = ty.name();
                return Err(format!(
                    "experts with a {what} of {k}, not whole blocks of {name},"
                ));
            }
        }
        if width.max(ff) > K_MAX {
            return Err(format!("experts of {ff} x {width} weights, over {K_MAX},"));
        }
        if !width.is_multiple_of(ROWS) || !ff.is_multiple_of(FF_STEP) {
            return Err(format!(
                "experts of {ff} x {width} weights, not multiples of {FF_STEP} and {ROWS},"
            ));
        }
        let bytes = |ty: TensorType, n: usize, k: usize| {
            let layout = Layout::of(ty)?;
            n.checked_mul(k / layout.block_len())?
                .checked_mul(layout.block_bytes())
        };
        let inputs = bytes(gate, ff, width);
        let outputs = bytes(down, width, ff);
        let (Some(inputs), Some(outputs)) = (inputs, outputs) else {
            return Err(format!("experts of {ff} x {width}"));
        };
        let mut end = 0_usize;
        let mut take = |bytes: usize| {
            let at = end;
            end = end.saturating_add(bytes).saturating_add(ALIGN - 1) / ALIGN * ALIGN;
            at
        };
        let [_, up_at, down_at] = [inputs, inputs, outputs].map(&mut take);
        let biases_at = has_biases.then(|| [ff, ff, width].map(|n| take(4 * n)));
        // Kernels count bytes of a blob in 32 bits.
        if u32::try_from(end).is_err() {
            return Err(format!("experts of {end} bytes"));
        }
        Ok(Self {
            inputs: gate,
            down,
            width,
            ff,
            up_at,
            down_at,
            biases_at,
            bytes: end,
        })
    }

    /// Bytes of an expert, those that fill it up to a multiple of [`ALIGN`] included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether experts have biases.
    pub fn has_biases(&self) -> bool {
        self.biases_at.is_some()
    }

    /// Formats of gate and up, and of down.
    pub fn types(&self) -> [TensorType; 2] {
        [self.inputs, self.down]
    }
}

/// The list of where each expert is, and the memory that they lie in, all of them.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Buffer<u8>>,
    addresses: Vec<u64>,
    /// What kernels read.
    table: Buffer<u64>,
}

impl Arena {
    /// A list of `experts` experts that are nowhere yet, for blobs that lie in `memory`.
    pub fn new(stream: &Stream, memory: Arc<Buffer<u8>>, experts: usize) -> Result<Self, Error> {
        Ok(Self {
            memory,
            addresses: vec![0; experts],
            table: Buffer::zeroed(stream, experts)?,
        })
    }

    /// Says that an expert's blob lies at `at`, or nowhere. Kernels hear of it with [`Arena::publish`].
    pub fn place(&mut self, expert: usize, blob: &Blob, at: Option<usize>) -> Result<(), Error> {
        const OP: &str = "expert";
        let known = self.addresses.len();
        let Some(address) = self.addresses.get_mut(expert) else {
            return length(OP, "number", expert, known);
        };
        *address = match at {
            None => 0,
            Some(at) => {
                let end = at.saturating_add(blob.bytes);
                let over = end.saturating_sub(self.memory.len());
                length(OP, "bytes over the memory", over, 0)?;
                length(OP, "bytes past a boundary", at % ALIGN, 0)?;
                self.memory.address() + at as u64
            }
        };
        Ok(())
    }

    /// Gives kernels the list as it is now, after the stream's earlier work.
    pub fn publish(&mut self, stream: &Stream) -> Result<(), Error> {
        self.table.upload(stream, &self.addresses)
    }

    /// Bytes of device memory, without that of the blobs.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// A layer's experts.
    pub fn layer<'a>(&'a self, blob: &'a Blob, experts: Range<usize>) -> Layer<'a> {
        Layer {
            blob,
            table: &self.table,
            experts,
        }
    }
}

/// Experts that come and go: slots in device memory, blobs in host memory, and lists of where a layer's experts are.
///
/// A list is what one launch is to compute: experts that are not in it are passed over. Lists are written by the host when it knows a layer's routing,
/// which it does only when all earlier layers' launches are past.
#[derive(Debug)]
pub struct Slots {
    slots: Buffer<u8>,
    blobs: Arc<Blobs>,
    experts: usize,
    lists: Pinned<u64>,
    on_device: Buffer<u64>,
    /// Addresses of what a generated token finds in slots, by layer; on the device as they were published last, and whether they have changed since.
    held: Pinned<u64>,
    held_on_device: Buffer<u64>,
    has_changed: bool,
}

impl Slots {
    /// `bytes` bytes of slots for copies of `blobs`, and up to `lists` lists of `layers` layers of `experts` experts.
    pub fn new(
        stream: &Stream,
        blobs: Arc<Blobs>,
        bytes: usize,
        [layers, experts]: [usize; 2],
        lists: usize,
    ) -> Result<Self, Error> {
        let device = stream.device();
        Ok(Self {
            slots: Buffer::new(device, bytes)?,
            blobs,
            experts,
            lists: Pinned::new(device, lists * experts)?,
            on_device: Buffer::zeroed(stream, lists * experts)?,
            held: Pinned::new(device, layers * experts)?,
            held_on_device: Buffer::zeroed(stream, layers * experts)?,
            has_changed: false,
        })
    }

    /// All blobs, in host memory.
    pub fn blobs(&self) -> &Blobs {
        &self.blobs
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.slots.bytes() + self.on_device.bytes() + self.held_on_device.bytes()
    }

    /// Says that a layer's expert is in a slot from now on, or in none. Layers hear of it with [`Slots::publish_held`].
    pub fn hold(&mut self, layer: usize, expert: usize, place: Option<Place>) -> Result<(), Error> {
        const OP: &str = "an expert that is held";
        let over = (expert + 1).saturating_sub(self.experts);
        length(OP, "experts over the layer", over, 0)?;
        let at = layer * self.experts + expert;
        let known = self.held.len();
        let Some(address) = self.held.get_mut(at) else {
            return length(OP, "number", at, known);
        };
        *address = place.map_or(0, Place::address);
        self.has_changed = true;
        Ok(())
    }

    /// Tells layers which experts are in slots, in the stream's order: those stay there until all layers are past that hear of it.
    pub fn publish_held(&mut self, stream: &Stream) -> Result<(), Error> {
        if !std::mem::take(&mut self.has_changed) {
            return Ok(());
        }
        // SAFETY: a change of what is being copied goes one way or the other, and what is no more in a slot by then stays readable there.
        unsafe { self.held_on_device.upload_later(stream, 0, &self.held) }
    }

    /// What a layer finds in slots.
    pub fn held(&self, layer: usize) -> Held<'_> {
        Held {
            table: &self.held_on_device,
            experts: layer * self.experts..(layer + 1) * self.experts,
        }
    }

    /// Copies a blob that is pinned to a slot that begins at `at`, in the stream's order. Returns at once.
    pub fn fetch(&mut self, stream: &Stream, blob: Range<usize>, at: usize) -> Result<(), Error> {
        if self.blobs.address(blob.start, blob.len()).is_none() {
            let known = self.blobs.pinned_bytes();
            return length("fetch of an expert", "end of the blob", blob.end, known);
        }
        let bytes = &self.blobs.bytes()[blob];
        // SAFETY: what is shared is not written, and pinned memory is given back only when the device has done with it.
        unsafe { self.slots.upload_later(stream, at, bytes) }
    }

    /// The same of any blob, through pinned memory, which is waited for until it is free, and filled by the threads of `pool`.
    pub fn fetch_through(
        &mut self,
        stream: &Stream,
        pool: &Pool,
        bounce: &mut staging::Slot,
        blob: Range<usize>,
        at: usize,
    ) -> Result<(), Error> {
        const OP: &str = "fetch of an expert";
        let (from, to, n) = (self.blobs.bytes(), bounce.bytes()?, blob.len());
        length(
            OP,
            "bytes over the blobs",
            blob.end.saturating_sub(from.len()),
            0,
        )?;
        length(OP, "bytes over the slot", n.saturating_sub(to.len()), 0)?;
        pool.copy(&from[blob], &mut to[..n]);
        bounce.send(stream, n, &mut self.slots, at)
    }

    /// Empties the first `n` lists.
    pub fn clear(&mut self, n: usize) {
        let end = (n * self.experts).min(self.lists.len());
        self.lists[..end].fill(0);
    }

    /// Where an expert's copy is that begins at byte `at` of the slots.
    pub fn place(&self, blob: &Blob, at: usize) -> Result<Place, Error> {
        const OP: &str = "expert in a slot";
        let over = at
            .saturating_add(blob.bytes)
            .saturating_sub(self.slots.len());
        length(OP, "bytes over the slots", over, 0)?;
        length(OP, "bytes past a boundary", at % ALIGN, 0)?;
        Ok(Place(self.slots.address() + at as u64))
    }

    /// Where an expert is in host memory, for few reads; `None`: the device does not reach it.
    pub fn place_in_host(&self, blob: &Blob, at: usize) -> Result<Option<Place>, Error> {
        const OP: &str = "expert in host memory";
        let end = at.saturating_add(blob.bytes);
        let over = end.saturating_sub(self.blobs.len());
        length(OP, "bytes over the blobs", over, 0)?;
        length(OP, "bytes past a boundary", at % ALIGN, 0)?;
        Ok(self.blobs.address(at, blob.bytes).map(Place))
    }

    /// Puts an expert of that place into a list.
    pub fn put(&mut self, list: usize, expert: usize, place: Place) -> Result<(), Error> {
        const OP: &str = "expert in a list";
        let over = (expert + 1).saturating_sub(self.experts);
        length(OP, "experts over the list", over, 0)?;
        let at = list * self.experts + expert;
        let known = self.lists.len();
        match self.lists.get_mut(at) {
            Some(address) => *address = place.0,
            None => return length(OP, "list", at, known),
        }
        Ok(())
    }

    /// Gives kernels the first `n` lists as they are now, in the stream's order. They stay as they are until that is past.
    pub fn publish(&mut self, stream: &Stream, n: usize) -> Result<(), Error> {
        let end = (n * self.experts).min(self.lists.len());
        // SAFETY: the host writes lists only when it was told of a routing, which is behind this in the stream.
        unsafe { self.on_device.upload_later(stream, 0, &self.lists[..end]) }
    }

    /// The experts of a list.
    pub fn layer<'a>(&'a self, blob: &'a Blob, list: usize) -> Layer<'a> {
        Layer {
            blob,
            table: &self.on_device,
            experts: list * self.experts..(list + 1) * self.experts,
        }
    }
}

/// Pinned memory for blobs of which a device is to read those that it does not reach where they lie.
#[derive(Debug)]
pub struct Near {
    memory: Pinned<u8>,
    /// Of a piece.
    bytes: usize,
}

impl Near {
    /// So many pieces, for blobs of up to `bytes` bytes.
    pub fn new(device: &Device, pieces: usize, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            memory: Pinned::new(device, pieces.saturating_mul(bytes))?,
            bytes,
        })
    }

    /// Copies a blob to a piece, with the threads of `pool` and without the driver. Nobody reads what was there before.
    pub fn bring(
        &mut self,
        pool: &Pool,
        blobs: &Blobs,
        blob: Range<usize>,
        piece: usize,
    ) -> Result<Place, Error> {
        const OP: &str = "an expert brought near";
        let (from, n) = (blobs.bytes(), blob.len());
        let over = blob.end.saturating_sub(from.len());
        length(OP, "bytes over the blobs", over, 0)?;
        length(OP, "bytes over the piece", n.saturating_sub(self.bytes), 0)?;
        let (at, has) = (piece * self.bytes, self.memory.len());
        let Some(to) = self.memory.get_mut(at..at + n) else {
            return length(OP, "bytes of pieces", at + n, has).map(|()| Place(0));
        };
        pool.copy(&from[blob], to);
        Ok(Place(self.memory.address() + at as u64))
    }
}

/// Where a whole blob is that a device can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place(u64);

impl Place {
    pub(super) fn address(self) -> u64 {
        self.0
    }
}

/// Which of a layer's experts are in slots.
#[derive(Debug, Clone)]
pub struct Held<'a> {
    table: &'a Buffer<u64>,
    experts: Range<usize>,
}

impl Held<'_> {
    /// The address of the layer's part of the list of `experts` experts.
    pub(super) fn list(&self, op: &'static str, experts: usize) -> Result<u64, Error> {
        part(self.table, &self.experts, op, experts)
    }
}

/// The address of a layer's part of a list, which is to have `experts` experts.
fn part(
    table: &Buffer<u64>,
    part: &Range<usize>,
    op: &'static str,
    experts: usize,
) -> Result<u64, Error> {
    length(op, "experts of the layer", part.len(), experts)?;
    let over = part.end.saturating_sub(table.len());
    length(op, "experts over the list", over, 0)?;
    Ok(table.address() + 8 * part.start as u64)
}

/// A layer's experts, and where they are.
#[derive(Debug, Clone)]
pub struct Layer<'a> {
    pub(super) blob: &'a Blob,
    table: &'a Buffer<u64>,
    experts: Range<usize>,
}

impl Layer<'_> {
    /// The address of the layer's part of the list of `experts` experts.
    pub(super) fn list(&self, op: &'static str, experts: usize) -> Result<u64, Error> {
        part(self.table, &self.experts, op, experts)
    }
}
