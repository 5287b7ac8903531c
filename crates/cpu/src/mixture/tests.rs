//! Every instruction set, number of threads and cut of the tokens against the definition, bit for bit.

use super::*;
use crate::pool::Pinning;
use gguf::TensorType;
use proptest::prelude::*;
use quant::tile::{Layout, ROWS, permute_tile};

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32 * 2.0 - 1.0
    }
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Random blocks whose values are about 1.
fn matrix(ty: TensorType, n: usize, k: usize, rng: &mut Rng) -> Vec<u8> {
    let layout = Layout::of(ty).unwrap();
    let (len, bytes) = (layout.block_len(), layout.block_bytes());
    let row_bytes = k / len * bytes;
    let half = |block: &mut [u8], at: usize| {
        // About 1 / 256.
        block[at..at + 2].copy_from_slice(&[0x07, 0x1c]);
    };
    let mut file: Vec<u8> = (0..n * row_bytes).map(|_| rng.next() as u8).collect();
    for block in file.chunks_exact_mut(bytes) {
        match ty {
            TensorType::F32 => block.copy_from_slice(&rng.unit().to_le_bytes()),
            TensorType::F16 => half(block, 0),
            TensorType::MXFP4 => block[0] = 120 + block[0] % 4,
            TensorType::Q6_K => half(block, 208),
            _ => half(block, 0),
        }
        if matches!(ty, TensorType::Q4_1 | TensorType::Q4_K | TensorType::Q5_K) {
            half(block, 2);
        }
    }
    let mut data = vec![0; file.len()];
    let tiles = data.chunks_mut(ROWS * row_bytes);
    for (rows, tile) in file.chunks(ROWS * row_bytes).zip(tiles) {
        permute_tile(layout, rows.len() / row_bytes, rows, tile);
    }
    data
}

/// Inputs, scores, and what outputs are added to.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    x: &'a [f32],
    z: &'a [f32],
    y: &'a [f32],
}

struct Weights {
    shape: Shape,
    types: [TensorType; 3],
    experts: Vec<[Vec<u8>; 3]>,
    biases: Option<Vec<[Vec<u8>; 3]>>,
}

impl Weights {
    fn new(shape: Shape, types: [TensorType; 3], is_biased: bool, rng: &mut Rng) -> Self {
        let Shape { width, ff, .. } = shape;
        let sizes = [(ff, width), (ff, width), (width, ff)];
        let experts = 0..shape.routing.experts;
        let matrices = |_| std::array::from_fn(|i| matrix(types[i], sizes[i].0, sizes[i].1, rng));
        let experts: Vec<_> = experts.map(matrices).collect();
        let mut biases = |_: &_| {
            sizes.map(|(n, _)| rng.values(n).iter().flat_map(|x| x.to_le_bytes()).collect())
        };
        Self {
            shape,
            types,
            biases: is_biased.then(|| experts.iter().map(&mut biases).collect()),
            experts,
        }
    }

    fn expert(&self, e: usize) -> Expert<'_> {
        let Shape { width, ff, .. } = self.shape;
        let view = |i: usize, n, k| TileMatrix::new(self.types[i], n, k, &self.experts[e][i]);
        Expert {
            gate: view(0, ff, width),
            up: view(1, ff, width),
            down: view(2, width, ff),
            biases: self
                .biases
                .as_ref()
                .map(|b| b[e].each_ref().map(|b| &b[..])),
        }
    }

    /// By the definition.
    fn defined(&self, f: Gate, Tokens { x, z, y }: Tokens<'_>) -> Vec<f32> {
        let Shape { width, routing, .. } = self.shape;
        let mut all = y.to_vec();
        let tokens = x.chunks(width).zip(z.chunks(routing.experts));
        for ((x, z), y) in tokens.zip(all.chunks_mut(width)) {
            let chosen = definition::choose(&routing, z).into_iter();
            let chosen: Vec<_> = chosen.map(|(e, w)| (e, self.expert(e), w)).collect();
            definition::add(f, &chosen, x, y);
        }
        all
    }

    /// As many tokens at a time.
    fn mixed(
        &self,
        pool: &Pool,
        isa: Isa,
        f: Gate,
        Tokens { x, z, y }: Tokens<'_>,
        at_once: usize,
    ) -> Vec<f32> {
        let Shape { width, routing, .. } = self.shape;
        let mut y = y.to_vec();
        let mut mixer = Mixer::new(self.shape, at_once).unwrap();
        let acts = || Acts::new(at_once, width).unwrap();
        let (mut acts32, mut acts256) = (acts(), acts());
        let tokens = x
            .chunks(at_once * width)
            .zip(z.chunks(at_once * routing.experts));
        for ((x, z), y) in tokens.zip(y.chunks_mut(at_once * width)) {
            let tokens = x.len() / width;
            let fill =
                |acts: &mut Acts, block| acts.quantise(pool, isa, x, tokens, block, Passes::One);
            let [has32, has256] = [BLOCK32, BLOCK256].map(|block| width.is_multiple_of(block));
            if has32 {
                fill(&mut acts32, BLOCK32);
            }
            if has256 {
                fill(&mut acts256, BLOCK256);
            }
            let operand = Operand {
                x,
                tokens,
                k: width,
                acts32: has32.then(|| acts32.view()),
                acts256: has256.then(|| acts256.view()),
            };
            mixer.route(pool, isa, z);
            if at_once.is_multiple_of(2) {
                let mut source = InMemory::new(|e| self.expert(e as usize));
                mixer.add(pool.into(), isa, f, &operand, &mut source, y);
            } else {
                let pools = Pools {
                    device: pool,
                    host: &Pool::new(2, Pinning::Free).unwrap(),
                };
                let mut source = Few {
                    weights: self,
                    ready: Vec::new(),
                };
                mixer.add(pools, isa, f, &operand, &mut source, y);
                let of_host = mixer.used().any(|(e, _)| e.is_multiple_of(3));
                assert_eq!(mixer.host_took().is_zero(), !of_host);
            }
        }
        y
    }
}

/// Never has more than three experts ready, some of them the host's.
struct Few<'a> {
    weights: &'a Weights,
    ready: Vec<u32>,
}

impl Source for Few<'_> {
    fn make_ready(&mut self, experts: &[u32]) -> usize {
        let n = (experts[0] as usize % 3 + 1).min(experts.len());
        self.ready = experts[..n].to_vec();
        n
    }

    fn expert(&self, expert: u32) -> Expert<'_> {
        assert!(self.ready.contains(&expert), "{expert} is not ready");
        self.weights.expert(expert as usize)
    }

    fn side(&self, expert: u32) -> Side {
        match expert % 3 {
            0 => Side::Host,
            _ => Side::Device,
        }
    }
}

fn routing(experts: usize, used: usize, weighing: Weighing) -> Routing {
    Routing {
        experts,
        used,
        weighing,
        scale: 1.0,
        groups: None,
    }
}

fn check(weights: &Weights, f: Gate, tokens: usize, skew: f32, rng: &mut Rng) {
    let Shape { width, routing, .. } = weights.shape;
    let (x, y) = (rng.values(tokens * width), rng.values(tokens * width));
    let z: Vec<f32> = (0..tokens * routing.experts)
        .map(|i| rng.unit() * 3.0 - skew * (i % routing.experts) as f32)
        .collect();
    let all = Tokens {
        x: &x,
        z: &z,
        y: &y,
    };
    let want = weights.defined(f, all);
    assert!(want.iter().all(|y| y.is_finite()));
    for isa in Isa::available() {
        for threads in [1, 3] {
            let pool = Pool::new(threads, Pinning::Free).unwrap();
            // The plain instruction set is slow, and does not choose by the number of tokens.
            let cuts: &[usize] = match (isa, threads) {
                (Isa::Scalar, 1) => &[],
                (Isa::Scalar, _) => &[tokens],
                _ => &[1, 5, 16, 64, tokens],
            };
            for &at_once in cuts {
                let got = weights.mixed(&pool, isa, f, all, at_once);
                assert!(
                    got == want,
                    "{isa}, {threads} threads, {at_once} of {tokens} tokens at once, {:?}, {routing:?}",
                    weights.types
                );
            }
        }
    }
}

#[test]
fn every_isa_cut_and_number_of_threads_equals_the_definition() {
    use TensorType::{F16, F32, MXFP4, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0};
    let mut rng = Rng(5);
    for (types, width, ff, biased, f) in [
        ([Q4_K, Q4_K, Q6_K], 256, 512, false, Gate::Silu),
        ([MXFP4, MXFP4, MXFP4], 96, 160, true, Gate::Clamped),
        ([Q4_0, Q8_0, Q4_K], 64, 256, false, Gate::Gelu),
        ([F32, F16, F32], 40, 24, true, Gate::Silu),
        ([Q4_K, Q4_1, F16], 256, 48, false, Gate::Silu),
    ] {
        for (experts, used, weighing) in [
            (8, 2, Weighing::SoftmaxOfChosen),
            (20, 5, Weighing::Softmax),
        ] {
            let shape = Shape {
                width,
                ff,
                routing: routing(experts, used, weighing),
            };
            let weights = Weights::new(shape, types, biased, &mut rng);
            check(&weights, f, 70, 0.2, &mut rng);
        }
    }
}

/// What a share of somebody else's mixture gives, pair by pair.
#[test]
fn outputs_without_weights_are_those_of_the_definition() {
    use TensorType::{MXFP4, Q4_K, Q6_K};
    let mut rng = Rng(12);
    for (types, width, ff, biased, f) in [
        ([Q4_K, Q4_K, Q6_K], 256, 256, false, Gate::Silu),
        ([MXFP4, MXFP4, MXFP4], 96, 160, true, Gate::Clamped),
    ] {
        let (tokens, used) = (700, 2);
        let shape = Shape {
            width,
            ff,
            routing: routing(5, used, Weighing::Softmax),
        };
        let weights = Weights::new(shape, types, biased, &mut rng);
        let x = rng.values(tokens * width);
        // Expert 2 has none; the last one's do not fit one wave.
        let of = |e: u32| (0..tokens as u32).filter(move |t| e != 2 && (e == 4 || t % 97 == e));
        let pairs: Vec<(u32, u32)> = (0..5).flat_map(|e| of(e).map(move |t| (e, t))).collect();
        for isa in Isa::available() {
            let pool = Pool::new(3, Pinning::Free).unwrap();
            let mut acts = Acts::new(tokens, width).unwrap();
            let block = act_block(types[0]).unwrap();
            acts.quantise(&pool, isa, &x, tokens, block, Passes::One);
            let operand = Operand {
                x: &x,
                tokens,
                k: width,
                acts32: (block == BLOCK32).then(|| acts.view()),
                acts256: (block == BLOCK256).then(|| acts.view()),
            };
            let mut mixer = Mixer::new(shape, tokens).unwrap();
            let mut source = InMemory::new(|e| weights.expert(e as usize));
            let mut given = 0;
            let mut give = |i: usize, row: &[f32]| {
                let (e, t) = pairs[i];
                let x = &x[t as usize * width..][..width];
                let want = definition::expert(f, &weights.expert(e as usize), x);
                assert!(row == want, "{isa}, {types:?}, expert {e}, token {t}");
                assert_eq!(i, given);
                given += 1;
            };
            let pools = Pools::from(&pool);
            mixer.outputs(pools, isa, f, &operand, &mut source, &pairs, &mut give);
            assert_eq!(given, pairs.len());
        }
    }
}

/// More rows than a wave has room for, and experts with none, one, and all tokens.
#[test]
fn waves_do_not_matter() {
    let mut rng = Rng(8);
    let types = [TensorType::Q4_0, TensorType::Q4_0, TensorType::Q8_0];
    let shape = Shape {
        width: 32,
        ff: 32,
        routing: routing(24, 4, Weighing::SoftmaxOfChosen),
    };
    let tokens = 600;
    assert!(tokens * 4 > 2 * shape.rows(tokens));
    let weights = Weights::new(shape, types, false, &mut rng);
    check(&weights, Gate::Silu, tokens, 0.0, &mut rng);
    check(&weights, Gate::Silu, tokens, 1.0, &mut rng);
}

fn score() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => -9f32..9.0,
        // Ties.
        10 => (-3i8..3).prop_map(f32::from),
        1 => Just(-0.0),
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
        1 => Just(f32::NEG_INFINITY),
        1 => -200f32..200.0,
    ]
}

proptest! {
    #[test]
    fn every_isa_routes_as_defined(
        z in proptest::collection::vec(score(), 48),
        (experts, groups) in prop_oneof![Just((48, None)), Just((37, None)), Just((48, Some((6, 3)))), Just((48, Some((48, 12)))), Just((1, None))],
        used in 1usize..12,
        weighing in prop_oneof![
            Just(Weighing::Softmax), Just(Weighing::SoftmaxOfChosen), Just(Weighing::Sigmoid), Just(Weighing::SigmoidOfChosen)
        ],
        scale in prop_oneof![Just(1.0f32), Just(2.5)],
    ) {
        let routing = Routing {
            scale,
            groups: groups.map(|(total, used)| Groups { total, used }),
            ..routing(experts, used.min(experts), weighing)
        };
        routing.check().unwrap();
        let z = &z[..experts];
        let want = definition::choose(&routing, z);
        for isa in Isa::available() {
            let (mut ids, mut weights) = (vec![0; routing.used], vec![0.0; routing.used]);
            route(isa, &routing, z, &mut ids, &mut weights);
            for ((id, w), (want_id, want_w)) in ids.into_iter().zip(weights).zip(&want) {
                prop_assert_eq!(id as usize, *want_id, "{}", isa);
                prop_assert!(w.to_bits() == want_w.to_bits() || w.is_nan() && want_w.is_nan(), "{}: {} {}", isa, w, want_w);
            }
        }
    }
}

#[test]
fn known_choices() {
    let choose = |routing: Routing, z: &[f32]| definition::choose(&routing, z);
    let z = [1.0, 3.0, 2.0, 3.0, f32::NAN, 3.0];
    let chosen = choose(routing(6, 2, Weighing::SoftmaxOfChosen), &z);
    assert_eq!(chosen, [(1, 0.5), (3, 0.5)], "of equals the lower ids");
    let chosen = choose(routing(6, 6, Weighing::Sigmoid), &z);
    assert!(chosen[4].1.is_nan() && chosen.len() == 6);
    assert!((chosen[0].1 - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
    let z = [0.0, 1.0, 0.5, 0.2];
    let all: f32 = z.iter().map(|z: &f32| z.exp()).sum();
    let chosen = choose(
        Routing {
            scale: 3.0,
            ..routing(4, 2, Weighing::Softmax)
        },
        &z,
    );
    assert_eq!((chosen[0].0, chosen[1].0), (1, 2));
    assert!((chosen[0].1 - 3.0 * 1f32.exp() / all).abs() < 1e-6);
    // The second group's two are more together, though the first has the best one.
    let grouped = Routing {
        groups: Some(Groups { total: 2, used: 1 }),
        ..routing(4, 1, Weighing::SigmoidOfChosen)
    };
    assert_eq!(choose(grouped, &[2.0, -9.0, 1.0, 1.5]), [(3, 1.0)]);
}

#[test]
fn routing_that_makes_no_sense_is_refused() {
    let sound = Routing {
        groups: Some(Groups { total: 4, used: 2 }),
        ..routing(16, 8, Weighing::Softmax)
    };
    assert_eq!(sound.check(), Ok(()));
    let groups = |total, used| Some(Groups { total, used });
    for bad in [
        routing(0, 0, Weighing::Softmax),
        routing(EXPERTS_MAX + 1, 1, Weighing::Softmax),
        routing(4, 0, Weighing::Softmax),
        routing(4, 5, Weighing::Softmax),
        Routing {
            groups: groups(0, 0),
            ..sound
        },
        Routing {
            groups: groups(3, 3),
            ..sound
        },
        Routing {
            groups: groups(4, 5),
            ..sound
        },
        Routing {
            groups: groups(4, 1),
            ..sound
        },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
}
