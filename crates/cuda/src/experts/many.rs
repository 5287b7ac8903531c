//! Many tokens: gathered by expert, products of many columns, and the sum.

use quant::act::{BLOCK32, BLOCK256};
use quant::product::{act_block, down_passes};

use super::cut::{self, Pad};
use super::{GRID_Y_MAX, Layer, Mixer, ROUTE_WARPS, Shape, Shared, Tokens, shared_args};
use crate::acts::Layout;
use crate::error::{Error, length};
use crate::kernel::{Arg, Launch, Start};
use crate::memory::{Buffer, Pinned};
use crate::stream::Stream;
use cpu::mixture::Routing;

/// Threads of `group`: as in `kernels/experts.cu`.
const GROUP_THREADS: usize = 1024;

/// Threads of the kernels for gated values.
const GATED_THREADS: usize = 128;

/// Threads of the kernels that gather and combine.
const THREADS: usize = 256;

/// Columns of activations, arranged (`kernels/acts.cuh`).
#[derive(Debug)]
struct Columns {
    image: Buffer<u8>,
    /// Of blocks of 32 with their sums behind.
    scale: Buffer<f32>,
    /// Of blocks of 256.
    sums: Buffer<u8>,
}

impl Columns {
    fn new(stream: &Stream, columns: usize, k: usize) -> Result<Self, Error> {
        Ok(Self {
            image: Buffer::zeroed(stream, columns * k.next_multiple_of(128))?,
            scale: Buffer::zeroed(stream, 2 * columns * k.div_ceil(BLOCK32))?,
            sums: Buffer::zeroed(stream, columns * k.div_ceil(BLOCK32) * 4)?,
        })
    }

    /// As products read `columns` columns of `k` values.
    fn read(&self, block: usize, columns: usize, k: usize) -> [Arg; 3] {
        let sums = match block {
            BLOCK32 => Arg::from(self.scale.address() + (k / BLOCK32 * columns * 4) as u64),
            _ => (&self.sums).into(),
        };
        [(&self.image).into(), (&self.scale).into(), sums]
    }

    /// As kernels write them.
    fn write(&self, block: usize) -> Vec<Arg> {
        let both = vec![Arg::from(&self.image), (&self.scale).into()];
        match block {
            BLOCK32 => both,
            _ => [both, vec![(&self.sums).into()]].concat(),
        }
    }

    fn bytes(&self) -> usize {
        self.image.bytes() + self.scale.bytes() + self.sums.bytes()
    }
}

/// What products of many tokens work in.
#[derive(Debug)]
pub(super) struct Many {
    place: Buffer<u32>,
    pair: Buffer<u32>,
    experts: Buffer<u32>,
    count: Buffer<u32>,
    inputs: Columns,
    /// `[places, 2 F]`.
    gated: Buffer<f32>,
    activations: Columns,
    /// `[places, D]`.
    outputs: Buffer<f32>,
}

impl Many {
    /// For up to `tokens` tokens. Which padding is chosen depends on how many there are: there is room for any.
    pub(super) fn new(stream: &Stream, shape: &Shape, tokens: usize) -> Result<Self, Error> {
        let Routing { experts, used, .. } = shape.routing;
        let pairs = tokens * used;
        let places = Pad::room(pairs, experts);
        let zeroed = |n| Buffer::zeroed(stream, n);
        Ok(Self {
            place: zeroed(pairs)?,
            pair: zeroed(places)?,
            experts: zeroed(places / Pad::ALL[0] + 1)?,
            count: zeroed(1)?,
            inputs: Columns::new(stream, places, shape.width)?,
            gated: Buffer::zeroed(stream, places * 2 * shape.ff)?,
            activations: Columns::new(stream, 2 * places, shape.ff)?,
            outputs: Buffer::zeroed(stream, places * shape.width)?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let lists = [&self.place, &self.pair, &self.experts, &self.count];
        let lists: usize = lists.map(Buffer::bytes).iter().sum();
        let rows = self.gated.bytes() + self.outputs.bytes();
        lists + rows + self.inputs.bytes() + self.activations.bytes()
    }
}

impl Mixer {
    fn many(&self, op: &'static str) -> Result<&Many, Error> {
        self.many.as_ref().ok_or_else(|| Error::NoModule {
            module: format!("{op} of many tokens"),
        })
    }

    /// Many tokens: chooses their experts, and gathers the tokens of each.
    pub fn group(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "groups of experts";
        self.check(OP, layer, tokens.n)?;
        self.check_tokens(OP, layer.blob, tokens)?;
        let choosing = self.choosing(OP, tokens.n, tokens.scores)?;
        let Routing { experts, used, .. } = self.shape.routing;
        let pairs = tokens.n * used;
        let pad = Pad::of(pairs, experts);
        let places = pad.blocks(pairs, experts) * pad.0;
        let args = [
            &choosing[..],
            &[
                (tokens.n as i32).into(),
                (&self.ids).into(),
                (&self.weights).into(),
            ],
        ]
        .concat();
        let launch = Launch::new(tokens.n.div_ceil(ROUTE_WARPS), 32 * ROUTE_WARPS)
            .shared(ROUTE_WARPS * cut::route_bytes(&self.shape.routing))
            .start(start);
        // SAFETY: the arguments are those of the kernels; lengths are checked, and the work space has room for every choice of as many tokens.
        unsafe { self.common.route.launch(stream, launch, &args) }?;
        let told = match &mut self.told {
            None => [Arg::NULL; 3],
            Some(told) => told.next(),
        };
        let many = self.many(OP)?;
        let args = [
            &[
                Arg::from(&self.ids),
                (pairs as i32).into(),
                (experts as i32).into(),
                (pad.0 as i32).into(),
                (&many.place).into(),
                (&many.pair).into(),
                (&many.experts).into(),
                (&many.count).into(),
            ][..],
            &told,
        ]
        .concat();
        let launch = Launch::new(1, GROUP_THREADS).start(start);
        // SAFETY: as above.
        unsafe { self.common.group.launch(stream, launch, &args) }?;
        let (acts, k) = (tokens.acts, self.shape.width);
        let block = act_block(layer.blob.inputs).unwrap_or(BLOCK256);
        let from_atoms = match acts.layout() {
            Layout::Blocks => 0,
            Layout::Arranged => tokens.n.next_multiple_of(16) / 8,
        };
        let first = [
            Arg::from(&many.pair),
            (&many.count).into(),
            (pad.0 as i32).into(),
            (used as i32).into(),
            (&acts.q).into(),
        ];
        let (kernel, own) = if block == BLOCK32 {
            (&self.common.gather_32, vec![Arg::from(&acts.meta)])
        } else {
            let own = vec![Arg::from(&acts.d), (&acts.s16).into()];
            (&self.common.gather_256, own)
        };
        let last = [Arg::from(k as i32), (places as i32).into()];
        let from_atoms = [Arg::from(from_atoms as i32)];
        let to = many.inputs.write(block);
        let args = [&first[..], &own, &from_atoms, &to, &last].concat();
        let runs = (k / 32).next_multiple_of(4);
        let grid = [(runs * 16).div_ceil(THREADS), places / 16, 1];
        let launch = Launch::grid(grid.map(|n| n as u32), [THREADS as u32, 1, 1]).start(start);
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// Products of those experts that the layer's list says are here, for tokens that were grouped.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: usize,
    ) -> Result<(), Error> {
        const OP: &str = "products of experts";
        let list = self.check(OP, layer, tokens)?;
        let (
            blob,
            Shape {
                width, ff, routing, ..
            },
        ) = (layer.blob, self.shape);
        let Routing { experts, used, .. } = routing;
        let (many, pairs) = (self.many(OP)?, tokens * used);
        let pad = Pad::of(pairs, experts);
        let blocks = pad.blocks(pairs, experts);
        let places = blocks * pad.0;
        let product = |ty,
                       at: usize,
                       columns: &Columns,
                       y: &Buffer<f32>,
                       n: usize,
                       k: usize,
                       passes: usize| {
            let (wide, per) = pad.columns(passes);
            let kernel = self.format(OP, ty)?.of_columns(wide)?;
            let args = [
                &[
                    Arg::from(&many.experts),
                    (&many.count).into(),
                    (per as i32).into(),
                    list.into(),
                    (at as u32).into(),
                ][..],
                &columns.read(act_block(ty).unwrap_or(BLOCK256), places * passes, k)[..],
                &[
                    y.into(),
                    (n as i32).into(),
                    (k as i32).into(),
                    ((places * passes) as i32).into(),
                    (passes as i32).into(),
                ],
            ]
            .concat();
            let grid = [n.div_ceil(128) as u32, (blocks * per) as u32, 1];
            let launch = Launch::grid(grid, [384, 1, 1])
                .shared(cut::many_shared_bytes(ty, wide))
                .start(start);
            // SAFETY: the arguments are those of `many_*`; the work space has room for all places, and the list holds addresses of whole blobs.
            unsafe { kernel.launch(stream, launch, &args) }
        };
        product(blob.inputs, 0, &many.inputs, &many.gated, 2 * ff, width, 1)?;
        let passes = down_passes(blob.down).count();
        let [gate_bias, up_bias, _] = blob.biases_at.unwrap_or_default();
        let args = [
            &[
                Arg::from(&many.pair),
                (&many.count).into(),
                (pad.0 as i32).into(),
                (&many.experts).into(),
                list.into(),
                (gate_bias as u32).into(),
                (up_bias as u32).into(),
                (&many.gated).into(),
                self.gate(),
            ][..],
            &many
                .activations
                .write(act_block(blob.down).unwrap_or(BLOCK256)),
            &[(ff as i32).into(), ((places * passes) as i32).into()],
        ]
        .concat();
        let (kernel, threads) = match act_block(blob.down) {
            Some(BLOCK256) => (&self.common.gated_256, ff / 256 * 32),
            _ => (&self.common.gated_32, ff / 4),
        };
        let grid = [threads.div_ceil(GATED_THREADS) as u32, places as u32, 1];
        length(
            OP,
            "places over the limit",
            places.saturating_sub(GRID_Y_MAX),
            0,
        )?;
        let launch = Launch::grid(grid, [GATED_THREADS as u32, 1, 1]).start(start);
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch, &args) }?;
        product(
            blob.down,
            blob.down_at,
            &many.activations,
            &many.outputs,
            width,
            ff,
            passes,
        )
    }

    /// Puts outputs of tokens that were grouped to their places: `rows` `[n, D]` with their biases, computed elsewhere, of `pairs` `token * used + j`.
    /// Whoever works in another stream waits for the group, and has the sum wait for this.
    pub fn adopt(
        &self,
        stream: &Stream,
        start: Start,
        pairs: &Pinned<u32>,
        rows: &Pinned<f32>,
        n: usize,
    ) -> Result<(), Error> {
        const OP: &str = "outputs from elsewhere";
        let (many, width) = (self.many(OP)?, self.shape.width);
        let known = many.place.len() as u32;
        let short =
            |what, found: usize, wanted: usize| length(OP, what, wanted.saturating_sub(found), 0);
        short("rows that are missing", rows.len(), n * width)?;
        short("pairs that are missing", pairs.len(), n)?;
        length(OP, "rows over the limit", n.saturating_sub(GRID_Y_MAX), 0)?;
        let foreign = pairs[..n].iter().filter(|&&pair| pair >= known).count();
        length(OP, "pairs that are none", foreign, 0)?;
        if n == 0 {
            return Ok(());
        }
        let args = [
            Arg::from(pairs.address()),
            rows.address().into(),
            (&many.place).into(),
            (&many.outputs).into(),
            (width as i32).into(),
        ];
        let grid = [(width / 4).div_ceil(THREADS) as u32, n as u32, 1];
        let launch = Launch::grid(grid, [THREADS as u32, 1, 1]).start(start);
        // SAFETY: the arguments are those of `adopt`; lengths are checked, and places lie in the work space.
        unsafe { self.common.adopt.launch(stream, launch, &args) }
    }

    /// What the experts of tokens that were grouped and multiplied give, weighted and summed.
    pub fn combine(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: usize,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "sum of experts";
        let list = self.check(OP, layer, tokens)?;
        let (many, width) = (self.many(OP)?, self.shape.width);
        let short = (tokens * width).saturating_sub(y.len());
        length(OP, "values of y that are missing", short, 0)?;
        let [is_shared, taken] = shared_args(OP, shared, tokens)?;
        let [.., bias] = layer.blob.biases_at.unwrap_or_default();
        let args = [
            Arg::from(&self.ids),
            (&self.weights).into(),
            (&many.place).into(),
            (self.shape.routing.used as i32).into(),
            list.into(),
            (bias as u32).into(),
            (&many.outputs).into(),
            taken,
            is_shared,
            y.into(),
            (width as i32).into(),
        ];
        let grid = [(width / 4).div_ceil(THREADS) as u32, tokens as u32, 1];
        let launch = Launch::grid(grid, [THREADS as u32, 1, 1]).start(start);
        // SAFETY: the arguments are those of `combine`; lengths are checked.
        unsafe { self.common.combine.launch(stream, launch, &args) }
    }
}
