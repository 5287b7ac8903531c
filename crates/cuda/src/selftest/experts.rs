//! Mixtures of experts against `cpu::mixture::definition`: who is chosen, and what the chosen give.

use cpu::isa::Isa;
use cpu::mem;
use cpu::mixture::definition::{add, choose};
use cpu::mixture::{Expert, Groups, Routing, Weighing};
use cpu::ops::{self, Gate, scale_by_sigmoid};
use gguf::TensorType;
use quant::act::Passes;
use quant::product::act_block;
use quant::tile::TileMatrix;
use std::sync::Arc;

use super::acts::compare_acts;
use super::data::{self, Random};
use super::{Failure, Options, Row, START};
use crate::acts::{Acts, Quantiser, Shape as ActsShape};
use crate::experts::{
    Arena, Blob, Blobs, FEW_MAX, Foreign, Layer, Mixer, Scores, Shape, Shared, Slots, Tokens,
};
use crate::memory::{Buffer, Pinned};
use crate::ops::Normed;
use crate::product::{Before, Target};
use crate::stream::Stream;
use crate::weights::Weights;

/// What a format is tested in.
#[derive(Debug, Clone, Copy)]
struct Case {
    types: [TensorType; 2],
    width: usize,
    ff: usize,
    experts: usize,
    has_biases: bool,
    gate: Gate,
}

/// Experts of random weights, on the host and on the device.
struct Experts {
    case: Case,
    blob: Blob,
    /// Gate, up and down of each, and their biases.
    matrices: Vec<[Vec<u8>; 3]>,
    biases: Vec<[Vec<u8>; 3]>,
    arena: Arena,
}

impl Experts {
    fn new(stream: &Stream, case: Case, random: &mut Random) -> Result<Self, Failure> {
        let Case {
            types: [inputs, down],
            width,
            ff,
            ..
        } = case;
        let blob = Blob::new([inputs, inputs, down], width, ff, case.has_biases)?;
        let (mut matrices, mut biases) = (Vec::new(), Vec::new());
        let mut memory = Buffer::new(stream.device(), case.experts * blob.bytes())?;
        // Blobs lie in another order than their numbers.
        let at = |e: usize| (case.experts - 1 - e) * blob.bytes();
        for e in 0..case.experts {
            let own = [(inputs, ff, width), (inputs, ff, width), (down, width, ff)]
                .map(|(ty, n, k)| data::plain_weights(random, ty, n, k));
            let own_biases = [ff, ff, width].map(|n| {
                let values = data::activations(random, 1, n);
                values
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect::<Vec<u8>>()
            });
            let bytes = blob_of(&own, case.has_biases.then_some(&own_biases));
            memory.upload_at(stream, at(e), &bytes)?;
            matrices.push(own);
            biases.push(own_biases);
        }
        let mut arena = Arena::new(stream, Arc::new(memory), case.experts)?;
        for e in 0..case.experts {
            arena.place(e, &blob, Some(at(e)))?;
        }
        arena.publish(stream)?;
        Ok(Self {
            case,
            blob,
            matrices,
            biases,
            arena,
        })
    }

    /// Slots for all of them, beside their blobs in host memory, in the order of their numbers.
    fn slots(&self, stream: &Stream) -> Result<Slots, Failure> {
        let bytes = self.case.experts * self.blob.bytes();
        let memory = mem::Buffer::new(bytes)?;
        let mut blobs = Blobs::new(stream.device(), memory, &[], bytes)?;
        for e in 0..self.case.experts {
            let own = self.bytes(e);
            blobs.bytes_mut()[e * self.blob.bytes()..][..own.len()].copy_from_slice(&own);
        }
        Ok(Slots::new(
            stream,
            Arc::new(blobs),
            bytes,
            [1, self.case.experts],
            1,
        )?)
    }

    /// An expert's blob, without what it is filled up with.
    fn bytes(&self, e: usize) -> Vec<u8> {
        blob_of(
            &self.matrices[e],
            self.case.has_biases.then_some(&self.biases[e]),
        )
    }

    fn view(&self, e: usize) -> Expert<'_> {
        let Case {
            types, width, ff, ..
        } = self.case;
        let [gate, up, down] = &self.matrices[e];
        Expert {
            gate: TileMatrix::new(types[0], ff, width, gate),
            up: TileMatrix::new(types[0], ff, width, up),
            down: TileMatrix::new(types[1], width, ff, down),
            biases: self
                .case
                .has_biases
                .then(|| self.biases[e].each_ref().map(|b| &b[..])),
        }
    }

    fn layer(&self) -> Layer<'_> {
        self.arena.layer(&self.blob, 0..self.case.experts)
    }
}

/// Matrices one behind the other, then their biases, as [`Blob`] has them.
fn blob_of(matrices: &[Vec<u8>; 3], biases: Option<&[Vec<u8>; 3]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in matrices.iter().chain(biases.into_iter().flatten()) {
        bytes.resize(bytes.len().next_multiple_of(cpu::mem::ALIGN), 0x55);
        bytes.extend_from_slice(part);
    }
    bytes
}

/// Scores with ties, and some that are no numbers.
fn scores(random: &mut Random, tokens: usize, experts: usize) -> Vec<f32> {
    let mut z: Vec<f32> = (0..tokens * experts).map(|_| random.unit() * 6.0).collect();
    for (t, z) in z.chunks_exact_mut(experts).enumerate() {
        match t % 6 {
            1 => z.iter_mut().for_each(|z| *z = (*z / 3.0).round()),
            2 => z[random.below(experts)] = f32::NAN,
            3 => z[random.below(experts)] = f32::INFINITY,
            4 => z
                .iter_mut()
                .for_each(|z| *z = if *z > 0.0 { 0.0 } else { -0.0 }),
            5 => z[random.below(experts)] = f32::NEG_INFINITY,
            _ => {}
        }
    }
    z
}

/// Every way to choose.
pub(super) fn routes(
    stream: &Stream,
    target: Target,
    report: &mut impl FnMut(Row),
) -> Result<(), Failure> {
    let mut random = Random::new(11);
    let groups = |total, used| Some(Groups { total, used });
    for (weighing, experts, used, scale, groups) in [
        (Weighing::Softmax, 60, 4, 1.0, None),
        (Weighing::Softmax, 64, 64, 1.0, None),
        (Weighing::SoftmaxOfChosen, 128, 8, 1.0, None),
        (Weighing::SoftmaxOfChosen, 8, 2, 1.0, None),
        (Weighing::Sigmoid, 5, 1, 2.5, None),
        (Weighing::SigmoidOfChosen, 256, 8, 2.5, groups(8, 4)),
        (Weighing::SoftmaxOfChosen, 160, 6, 16.0, groups(8, 3)),
        (Weighing::Softmax, 1024, 40, 1.0, groups(512, 21)),
        (Weighing::Softmax, 33, 3, 1.0, groups(33, 5)),
    ] {
        let routing = Routing {
            experts,
            used,
            weighing,
            scale,
            groups,
        };
        routing.check()?;
        // More tokens than are computed pair by pair, so that `route` chooses.
        let tokens = FEW_MAX + 30;
        let z = scores(&mut random, tokens, experts);
        let case = Case {
            types: [TensorType::Q8_0; 2],
            width: 64,
            ff: 64,
            experts,
            has_biases: false,
            gate: Gate::Silu,
        };
        let mut row = Row::new(
            "experts, route",
            format!("{weighing:?}"),
            format!("{used} of {experts}, T 1, {tokens}"),
        );
        let mut owner = Experts::new(stream, case, &mut random)?;
        let shape = shape(&case, routing);
        let mut mixer = Mixer::new(stream, target, shape, &[owner.blob], tokens)?;
        for tokens in [1, tokens] {
            let found = mix(
                stream,
                &mut mixer,
                &mut owner,
                shape,
                &z,
                tokens,
                Sharing::None,
                None,
                &mut random,
            )?;
            for (t, z) in z.chunks_exact(experts).take(tokens).enumerate() {
                for (j, (id, weight)) in choose(&routing, z).into_iter().enumerate() {
                    let at = t * used + j;
                    row.compare_int(found.ids[at] as i32, id as i32, || {
                        format!("token {t} of {tokens}, expert {j}")
                    });
                    row.compare(found.weights[at], weight, || {
                        format!("token {t} of {tokens}, weight {j}")
                    });
                }
            }
        }
        report(row);
    }
    scored(stream, target, &mut random, report)
}

/// Products of routers, whose parts are added where they are read.
fn scored(
    stream: &Stream,
    target: Target,
    random: &mut Random,
    report: &mut impl FnMut(Row),
) -> Result<(), Failure> {
    for (ty, width, experts, with_bias) in [
        (TensorType::F32, 2048, 128, false),
        (TensorType::F32, 1088, 37, true),
        (TensorType::F16, 544, 64, true),
        (TensorType::BF16, 96, 5, false),
    ] {
        let case = Case {
            types: [TensorType::Q8_0; 2],
            width,
            ff: 64,
            experts,
            has_biases: false,
            gate: Gate::Silu,
        };
        let routing = Routing {
            experts,
            used: 4,
            weighing: Weighing::SoftmaxOfChosen,
            scale: 1.0,
            groups: None,
        };
        let sizes = format!("{experts} x {width}, T 1, 7, 16, and behind a norm");
        let mut row = Row::new("experts, scores", ty.name(), sizes);
        let owner = Experts::new(stream, case, random)?;
        let bytes = data::plain_weights(random, ty, experts, width);
        let router = TileMatrix::new(ty, experts, width, &bytes);
        let router_there = Weights::upload(stream, &router)?;
        let bias = with_bias.then(|| data::activations(random, 1, experts));
        let bias_there = bias.as_ref().map(|bias| Buffer::from_slice(stream, bias));
        let bias_there = bias_there.transpose()?;
        let scoring = Scoring {
            routing,
            router,
            bias,
        };
        let shape = shape(&case, routing);
        let mut mixer = Mixer::new(stream, target, shape, &[owner.blob], FEW_MAX)?;
        for tokens in [1, 7, 16] {
            let x = data::activations(random, tokens, width);
            let x_there = Buffer::from_slice(stream, &x)?;
            let mut acts = Acts::new(stream, tokens, width)?;
            let acts_shape = ActsShape {
                tokens,
                k: width,
                block: 32,
                passes: Passes::One,
            };
            let quantiser = Quantiser::new(stream.device())?;
            quantiser.quantise(stream, START, &x_there, acts_shape, &mut acts)?;
            mixer.score(stream, START, &router_there, &x_there, tokens)?;
            let call = Tokens {
                n: tokens,
                scores: Scores::Parts(bias_there.as_ref()),
                acts: &acts,
            };
            let mut y = Buffer::zeroed(stream, tokens * width)?;
            mixer.mix(stream, START, &owner.layer(), &call, Shared::None, &mut y)?;
            compare_chosen(stream, &mixer, &scoring, &x, &mut row)?;
        }
        for with_delta in [false, true] {
            let call = (
                &mut mixer,
                owner.layer(),
                &router_there,
                bias_there.as_ref(),
            );
            normed_scored(stream, call, &scoring, with_delta, random, &mut row)?;
        }
        report(row);
    }
    Ok(())
}

/// How a token's experts follow from it.
struct Scoring<'a> {
    routing: Routing,
    router: TileMatrix<'a>,
    bias: Option<Vec<f32>>,
}

/// Compares what a mixer chose for tokens of `x` with what is defined.
fn compare_chosen(
    stream: &Stream,
    mixer: &Mixer,
    scoring: &Scoring<'_>,
    x: &[f32],
    row: &mut Row,
) -> Result<(), Failure> {
    let Scoring {
        routing,
        router,
        bias,
    } = scoring;
    let (ids, weights) = mixer.chosen();
    let (ids, weights) = (ids.to_vec(stream)?, weights.to_vec(stream)?);
    for (t, x) in x.chunks_exact(router.k()).enumerate() {
        let z = |e: usize| {
            let product = quant::product::dot_float(router, e, x);
            bias.as_ref().map_or(product, |bias| product + bias[e])
        };
        let z: Vec<f32> = (0..routing.experts).map(z).collect();
        for (j, (id, weight)) in choose(routing, &z).into_iter().enumerate() {
            let at = t * routing.used + j;
            row.compare_int(ids[at] as i32, id as i32, || {
                format!("token {t}, expert {j}")
            });
            row.compare(weights[at], weight, || format!("token {t}, weight {j}"));
        }
    }
    Ok(())
}

/// One token, whose norm is made in the launch of the router's product, and kept.
fn normed_scored(
    stream: &Stream,
    (mixer, layer, router, bias): (&mut Mixer, Layer<'_>, &Weights, Option<&Buffer<f32>>),
    scoring: &Scoring<'_>,
    with_delta: bool,
    random: &mut Random,
    row: &mut Row,
) -> Result<(), Failure> {
    let (width, eps) = (router.k(), 1e-6);
    let [x, delta, w] = [(); 3].map(|()| data::activations(random, 1, width));
    let (mut sum, mut wanted) = (x.clone(), vec![0.0; width]);
    if with_delta {
        ops::add(Isa::Scalar, &mut sum, &delta);
    }
    ops::rms_norm(Isa::Scalar, &sum, Some(&w), eps, &mut wanted);
    let up = |v: &[f32]| Buffer::from_slice(stream, v);
    let (x, delta, w) = (up(&x)?, up(&delta)?, up(&w)?);
    let (mut got_sum, mut got) = (up(&vec![f32::NAN; width])?, up(&vec![f32::NAN; width])?);
    let mut acts = [Acts::new(stream, 1, width)?, Acts::new(stream, 1, width)?];
    let [acts32, acts256] = &mut acts;
    let has_256 = width.is_multiple_of(256);
    let before = Before {
        x: &x,
        delta: with_delta.then_some((&delta, &mut got_sum)),
        w: &w,
        eps,
    };
    let out = Normed {
        row: Some(&mut got),
        blocks32: Some((acts32, Passes::One)),
        blocks256: has_256.then_some((acts256, Passes::One)),
    };
    mixer.score_normed(stream, START, router, before, out)?;
    for acts in acts.iter().filter(|acts| acts.shape().tokens > 0) {
        compare_acts(stream, acts, &wanted, row)?;
    }
    let mut same = |what: &str, found: &Buffer<f32>, wanted: &[f32]| -> Result<(), Failure> {
        for (i, (found, wanted)) in found.to_vec(stream)?.iter().zip(wanted).enumerate() {
            row.compare(*found, *wanted, || format!("{what}, value {i}"));
        }
        Ok(())
    };
    same("norm", &got, &wanted)?;
    if with_delta {
        same("sum", &got_sum, &sum)?;
    }
    let call = Tokens {
        n: 1,
        scores: Scores::Parts(bias),
        acts: &acts[0],
    };
    let mut y = Buffer::zeroed(stream, width)?;
    mixer.mix(stream, START, &layer, &call, Shared::None, &mut y)?;
    compare_chosen(stream, mixer, scoring, &wanted, row)
}

fn shape(case: &Case, routing: Routing) -> Shape {
    Shape {
        width: case.width,
        ff: case.ff,
        routing,
        gate: case.gate,
    }
}

/// What the shared expert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    None,
    All,
    Part,
}

struct Found {
    ids: Vec<u32>,
    weights: Vec<f32>,
    y: Vec<f32>,
    wanted: Vec<f32>,
}

/// Runs a mixture of the first `tokens` of `z`, without the expert `absent`, whose outputs the host gives.
#[allow(clippy::too_many_arguments, reason = "all that a test varies")]
fn mix(
    stream: &Stream,
    mixer: &mut Mixer,
    experts: &mut Experts,
    shape: Shape,
    z: &[f32],
    tokens: usize,
    sharing: Sharing,
    absent: Option<usize>,
    random: &mut Random,
) -> Result<Found, Failure> {
    let Shape {
        width,
        routing,
        gate,
        ..
    } = shape;
    let block = act_block(experts.case.types[0]).expect("a quantised format");
    let x = data::activations(random, tokens, width);
    let z = &z[..tokens * routing.experts];
    let (mut acts, on_device) = (
        Acts::new(stream, tokens, width)?,
        Buffer::from_slice(stream, &x)?,
    );
    let acts_shape = ActsShape {
        tokens,
        k: width,
        block,
        passes: Passes::One,
    };
    Quantiser::new(stream.device())?.quantise(stream, START, &on_device, acts_shape, &mut acts)?;
    let scores = Buffer::from_slice(stream, z)?;
    let before = data::activations(random, tokens, width);
    let taken: Vec<f32> = (0..tokens).map(|_| random.unit() * 3.0).collect();
    let taken_there = Buffer::from_slice(stream, &taken)?;
    let mut y = Buffer::from_slice(stream, &before)?;
    let shared = match sharing {
        Sharing::None => Shared::None,
        Sharing::All => Shared::All,
        Sharing::Part => Shared::Part(&taken_there),
    };
    let chosen: Vec<_> = z
        .chunks_exact(routing.experts)
        .map(|z| choose(&routing, z))
        .collect();
    let wanted = each(tokens, width, |t, y| {
        let own = t * width..(t + 1) * width;
        match sharing {
            Sharing::None => y.fill(0.0),
            Sharing::All | Sharing::Part => y.copy_from_slice(&before[own.clone()]),
        }
        if sharing == Sharing::Part {
            scale_by_sigmoid(Isa::Scalar, y, taken[t]);
        }
        let views: Vec<_> = chosen[t]
            .iter()
            .map(|&(e, w)| (e, experts.view(e), w))
            .collect();
        add(gate, &views, &x[own], y);
    });
    let call = Tokens {
        n: tokens,
        scores: Scores::Whole(&scores),
        acts: &acts,
    };
    match absent {
        None => mixer.mix(stream, START, &experts.layer(), &call, shared, &mut y)?,
        Some(e) => {
            // What the host computes of expert `e`.
            let mut rows = vec![0.0; tokens * routing.used * width];
            for (i, (rows, of)) in rows
                .chunks_exact_mut(width)
                .zip(chosen.iter().flatten())
                .enumerate()
            {
                if of.0 == e {
                    let t = i / routing.used;
                    let own = &x[t * width..(t + 1) * width];
                    rows.copy_from_slice(&cpu::mixture::definition::expert(
                        gate,
                        &experts.view(e),
                        own,
                    ));
                }
            }
            if tokens == 1 {
                let slots = experts.slots(stream)?;
                ask(
                    stream, mixer, experts, slots, &call, &on_device, e, &rows, shared, &mut y,
                )?;
            } else {
                let mut foreign = Pinned::new(stream.device(), rows.len())?;
                foreign.copy_from_slice(&rows);
                experts.arena.place(e, &experts.blob, None)?;
                experts.arena.publish(stream)?;
                let layer = experts.layer();
                let foreign = Foreign::Rows(&foreign);
                mixer.gate_up(stream, START, &layer, &call)?;
                mixer.down(stream, START, &layer, &call, foreign, shared, &mut y)?;
            }
        }
    }
    let (ids, weights) = mixer.chosen();
    Ok(Found {
        ids: ids.to_vec(stream)?,
        weights: weights.to_vec(stream)?,
        y: y.to_vec(stream)?,
        wanted,
    })
}

/// One token whose device asks where its experts are: every other one in a slot, in host memory, and `absent` with the host; then one that knows all but `absent` to
/// be in slots.
#[allow(clippy::too_many_arguments, reason = "all that a test varies")]
fn ask(
    stream: &Stream,
    mixer: &mut Mixer,
    experts: &Experts,
    mut slots: Slots,
    call: &Tokens<'_>,
    x: &Buffer<f32>,
    absent: usize,
    rows: &[f32],
    shared: Shared<'_>,
    y: &mut Buffer<f32>,
) -> Result<(), Failure> {
    mixer.tell_host(stream, 3)?;
    let copies = stream.device().stream()?;
    let start_of = |e: usize| e * experts.blob.bytes();
    // Nothing is taken or given back while the device waits: the driver would wait for the device.
    let mut other = Buffer::zeroed(stream, y.len())?;
    // As a layer after another would.
    for number in [1, 2, 3] {
        if number == 3 {
            stream.synchronise()?;
            for e in (0..experts.case.experts).filter(|&e| e != absent) {
                slots.fetch(&copies, start_of(e)..start_of(e + 1), start_of(e))?;
                let place = slots.place(&experts.blob, start_of(e))?;
                slots.hold(0, e, Some(place))?;
            }
            copies.synchronise()?;
            slots.publish_held(stream)?;
        }
        let layer = slots.layer(&experts.blob, 0);
        let held = slots.held(0);
        mixer.ask(stream, START, number, &layer, held, call.scores, x)?;
        mixer.gate_up(stream, START, &layer, call)?;
        // The last one's result counts, and begins from what the others began from.
        if number == 3 {
            mixer.down(
                stream,
                START,
                &layer,
                call,
                Foreign::Asked(number),
                shared,
                y,
            )?;
        } else {
            let foreign = Foreign::Asked(number);
            mixer.down(
                stream,
                START,
                &layer,
                call,
                foreign,
                Shared::None,
                &mut other,
            )?;
        }
        let question = mixer.question(stream, number)?;
        let (ids, waits) = (question.ids.to_vec(), question.waits);
        if waits != (number < 3 || ids.contains(&(absent as u32))) {
            return Err(
                format!("{ids:?} without {absent}, number {number}: waits is {waits}").into(),
            );
        }
        if !waits {
            continue;
        }
        let mut places = Vec::new();
        for &e in &ids {
            let (e, start) = (e as usize, start_of(e as usize));
            places.push(match e {
                _ if e == absent => None,
                _ if e.is_multiple_of(2) => slots.place_in_host(&experts.blob, start)?,
                _ => {
                    slots.fetch(&copies, start..start + experts.blob.bytes(), start)?;
                    Some(slots.place(&experts.blob, start)?)
                }
            });
        }
        copies.synchronise()?;
        mixer.answer(number, &places);
        mixer.question(stream, number)?.rows.copy_from_slice(rows);
        mixer.give(number);
    }
    Ok(stream.synchronise()?)
}

/// `f` of every row of `tokens`, on all processors.
fn each(tokens: usize, width: usize, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let mut out = vec![0.0; tokens * width];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = tokens.div_ceil(threads);
    std::thread::scope(|scope| {
        for (part, out) in out.chunks_mut(share * width).enumerate() {
            let f = &f;
            scope.spawn(move || {
                for (i, row) in out.chunks_exact_mut(width).enumerate() {
                    f(part * share + i, row);
                }
            });
        }
    });
    out
}

/// Mixtures of one format of gates and ups.
pub(super) fn format(
    stream: &Stream,
    options: &Options,
    ty: TensorType,
    report: &mut impl FnMut(Row),
) -> Result<(), Failure> {
    let Some(block) = act_block(ty) else {
        return Ok(());
    };
    let number = formats_before(ty);
    let gate = [Gate::Silu, Gate::Gelu, Gate::Clamped][number % 3];
    // Small ones; some whose K is not whole chunks; with and without biases; a down projection of the other class of blocks.
    let sizes: [(usize, usize, usize, usize); 3] = if block == 32 {
        [(544, 192, 5, 2), (96, 64, 40, 6), (1088, 640, 2, 1)]
    } else {
        [(768, 256, 5, 2), (256, 768, 40, 6), (1280, 512, 2, 1)]
    };
    for (i, (width, ff, experts, used)) in sizes.into_iter().enumerate() {
        let other = if block == 32 {
            TensorType::Q6_K
        } else {
            TensorType::Q5_1
        };
        let down = if i == 1 && ff % 256 == 0 { other } else { ty };
        let case = Case {
            types: [ty, down],
            width,
            ff,
            experts,
            has_biases: (number + i).is_multiple_of(2),
            gate,
        };
        let mut random = Random::new(options.seed + (number * 7 + i) as u64);
        let routing = Routing {
            experts,
            used,
            weighing: [Weighing::SoftmaxOfChosen, Weighing::Softmax][i % 2],
            scale: 1.0,
            groups: None,
        };
        let named = format!("{}, {}", ty.name(), down.name());
        let sized = |tokens: &str| format!("D {width}, F {ff}, {used} of {experts}, T {tokens}");
        let mut few = Row::new("experts, few", named.clone(), sized("to 16"));
        let mut many = Row::new("experts, many", named, sized("over 16"));
        // On both sides of what is few, and of every padding that the last size can have.
        let counts: &[usize] = [&[1, 5, 16, 17][..], &[1, 2, 17], &[1, 60, 200]][i];
        let shape = shape(&case, routing);
        let blob = Blob::new([ty, ty, down], width, ff, case.has_biases)?;
        let most = counts.iter().copied().max().unwrap_or(1);
        let mut mixer = Mixer::new(stream, options.target, shape, &[blob], most)?;
        for (call, &tokens) in counts.iter().enumerate() {
            // Where the device has better kernels, so many are arranged for those.
            if options.target == Target::Portable && tokens > FEW_MAX {
                continue;
            }
            let z = scores(&mut random, tokens, experts);
            let mut owner = Experts::new(stream, case, &mut random)?;
            let sharing = [Sharing::None, Sharing::All, Sharing::Part][(call + i) % 3];
            let absent = [1, 5].contains(&tokens).then_some(1);
            let found = mix(
                stream,
                &mut mixer,
                &mut owner,
                shape,
                &z,
                tokens,
                sharing,
                absent,
                &mut random,
            )?;
            let row = if tokens <= FEW_MAX {
                &mut few
            } else {
                &mut many
            };
            for (at, (y, wanted)) in found.y.iter().zip(&found.wanted).enumerate() {
                row.compare(*y, *wanted, || {
                    format!(
                        "T {tokens}, {sharing:?} shared: token {}, value {}",
                        at / width,
                        at % width
                    )
                });
            }
        }
        report(few);
        report(many);
    }
    Ok(())
}

/// A number for a format, that varies what is tested with it.
fn formats_before(ty: TensorType) -> usize {
    quant::formats::supported()
        .iter()
        .position(|&t| t == ty)
        .unwrap_or(0)
}
