//! Models with experts: what they compute, against plain `f64`, and that nothing but the tokens decides the bits.

mod common;
#[path = "common/mixtures.rs"]
mod small;

use std::collections::HashMap;
use std::ops::ControlFlow;

use cpu::Isa;
use engine::model::{ComputeDevice, LoadOptions, Model};
use engine::session::{Gating, KvType, Placing, Session, SessionOptions, Wanted};
use engine::synth::Generator;
use gguf::{GgufFile, TensorType};
use half::f16;
use small::{HEAD, HEADS, HEADS_KV, Kind, LAYERS, Sizes, VOCAB, WINDOW};

const FLOATS: Sizes = Sizes {
    width: 48,
    ff: 96,
    expert_ff: 40,
    shared_ff: 72,
    experts: 12,
    used: 4,
};

/// Whole blocks of every format.
const BLOCKS: Sizes = Sizes {
    width: 256,
    ff: 512,
    expert_ff: 256,
    shared_ff: 512,
    experts: 12,
    used: 4,
};

fn load(file: &GgufFile, isa: Isa, threads: usize) -> Model {
    let options = LoadOptions {
        threads: Some(threads),
        isa: Some(isa),
        contents: small::contents(),
        ..LoadOptions::default()
    };
    Model::from_file(file, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))
}

fn tokens(n: usize) -> Vec<u32> {
    let token = |i: usize| (i * i * 7 + i * 13) as u32 % VOCAB as u32;
    (0..n).map(token).collect()
}

/// Logits of all positions: a prompt `ubatch` tokens at a time; `None`: token by token.
fn logits(model: &Model, tokens: &[u32], ubatch: Option<usize>, placing: Placing) -> Vec<f32> {
    let options = SessionOptions {
        ubatch: ubatch.unwrap_or(512),
        n_ctx: 2048,
        placing,
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(model, &options).unwrap();
    let mut all = Vec::new();
    if ubatch.is_none() {
        for &token in tokens {
            session.decode(token).unwrap();
            all.extend_from_slice(session.logits());
        }
        return all;
    }
    let mut each = |_, logits: &[f32]| {
        all.extend_from_slice(logits);
        ControlFlow::Continue(())
    };
    session.prefill(tokens, Wanted::All(&mut each)).unwrap();
    all
}

/// A model in `f64`, one token after the other, every weight as it is stored.
struct Reference<'a> {
    kind: Kind,
    sizes: Sizes,
    weights: HashMap<&'a str, Vec<f64>>,
    /// K and V of the tokens so far, layer by layer.
    cells: Vec<Vec<[Vec<f64>; 2]>>,
}

fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len())
        .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

fn norm(x: &[f64], w: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(1e-5_f32)).sqrt();
    x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn sum_to(y: &mut [f64], w: f64, x: &[f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
}

/// As the cache stores it.
fn stored(x: Vec<f64>) -> Vec<f64> {
    x.into_iter().map(|x| f16::from_f64(x).to_f64()).collect()
}

impl<'a> Reference<'a> {
    fn new(kind: Kind, sizes: Sizes, file: &'a GgufFile) -> Self {
        let generator = Generator::new(small::recipe(), file.tensors()).unwrap();
        let values = |t: &'a gguf::TensorInfo| {
            let mut bytes = vec![0; t.n_bytes() as usize];
            generator.fill(t, 0, &mut bytes);
            let mut values = vec![0.0; t.n_elements() as usize];
            quant::formats::decode_row(t.ty, &bytes, &mut values).unwrap();
            (t.name.as_str(), values.into_iter().map(f64::from).collect())
        };
        Self {
            kind,
            sizes,
            weights: file.tensors().iter().map(values).collect(),
            cells: vec![Vec::new(); LAYERS],
        }
    }

    fn has(&self, layer: usize, part: &str) -> bool {
        self.weights.contains_key(&*format!("blk.{layer}.{part}"))
    }

    fn of(&self, layer: usize, part: &str) -> &[f64] {
        &self.weights[&*format!("blk.{layer}.{part}")]
    }

    fn linear(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        let mut y = product(self.of(layer, &format!("{part}.weight")), x);
        let bias = format!("{part}.bias");
        if self.has(layer, &bias) {
            sum_to(&mut y, 1.0, self.of(layer, &bias));
        }
        y
    }

    fn gate(&self, gate: f64, up: f64) -> f64 {
        if self.kind == Kind::GptOss {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate * sigmoid(1.702 * gate) * (up + 1.0)
        } else {
            gate * sigmoid(gate) * up
        }
    }

    fn feed_forward(&self, layer: usize, suffix: &str, x: &[f64]) -> Vec<f64> {
        let of = |part: &str, x: &[f64]| self.linear(layer, &format!("ffn_{part}{suffix}"), x);
        let pairs = of("gate", x).into_iter().zip(of("up", x));
        let gated: Vec<f64> = pairs.map(|(gate, up)| self.gate(gate, up)).collect();
        of("down", &gated)
    }

    fn expert(&self, layer: usize, e: usize, x: &[f64]) -> Vec<f64> {
        let of = |part: &str, x: &[f64], n: usize| {
            let stack = self.of(layer, &format!("ffn_{part}_exps.weight"));
            let size = x.len() * n;
            let mut y = product(&stack[e * size..][..size], x);
            let bias = format!("ffn_{part}_exps.bias");
            if self.has(layer, &bias) {
                sum_to(&mut y, 1.0, &self.of(layer, &bias)[e * n..][..n]);
            }
            y
        };
        let ff = self.sizes.expert_ff as usize;
        let pairs = of("gate", x, ff).into_iter().zip(of("up", x, ff));
        let gated: Vec<f64> = pairs.map(|(gate, up)| self.gate(gate, up)).collect();
        of("down", &gated, x.len())
    }

    /// Ids and weights, as the models' papers and first implementations have them.
    fn route(&self, z: &[f64]) -> Vec<(usize, f64)> {
        let used = self.sizes.used as usize;
        let all: f64 = z.iter().map(|z| z.exp()).sum();
        let scores: Vec<f64> = match self.kind {
            Kind::Grouped => z.iter().map(|&z| sigmoid(z)).collect(),
            _ => z.iter().map(|z| z.exp() / all).collect(),
        };
        let mut ids: Vec<usize> = (0..z.len()).collect();
        if self.kind == Kind::Grouped {
            let size = z.len() / 3;
            let score = |group: usize| {
                let mut s = scores[group * size..][..size].to_vec();
                s.sort_by(|a, b| b.total_cmp(a));
                s[0] + s[1]
            };
            let worst = (0..3).min_by(|&a, &b| score(a).total_cmp(&score(b)));
            ids.retain(|id| id / size != worst.unwrap());
        }
        ids.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        ids.truncate(used);
        let chosen: f64 = ids.iter().map(|&id| scores[id]).sum();
        let factor = match self.kind {
            Kind::Qwen2Moe | Kind::Olmoe => 1.0,
            Kind::Grouped => 2.5 / chosen,
            Kind::Llama | Kind::Qwen3Moe | Kind::GptOss => 1.0 / chosen,
        };
        ids.into_iter()
            .map(|id| (id, scores[id] * factor))
            .collect()
    }

    fn mixture(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        if !self.has(layer, "ffn_gate_inp.weight") {
            return self.feed_forward(layer, "", x);
        }
        let mut y = vec![0.0; x.len()];
        for (id, w) in self.route(&self.linear(layer, "ffn_gate_inp", x)) {
            sum_to(&mut y, w, &self.expert(layer, id, x));
        }
        if self.has(layer, "ffn_up_shexp.weight") {
            let gate = self.linear(layer, "ffn_gate_inp_shexp", x)[0];
            let shared = self.feed_forward(layer, "_shexp", x);
            sum_to(&mut y, sigmoid(gate), &shared);
        }
        y
    }

    fn turn(&self, position: usize, heads: &mut [f64]) {
        let n = HEAD as usize;
        for head in heads.chunks_mut(n) {
            for i in 0..n / 2 {
                let (a, b) = match self.kind {
                    Kind::Llama => (2 * i, 2 * i + 1),
                    _ => (i, i + n / 2),
                };
                let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / n as f64);
                let (sin, cos) = angle.sin_cos();
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
            }
        }
    }

    fn attention(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let (head, shared_by) = (HEAD as usize, (HEADS / HEADS_KV) as usize);
        let position = self.cells[layer].len();
        let mut qk = ["attn_q", "attn_k"].map(|part| {
            let mut x = self.linear(layer, part, x);
            let name = format!("{part}_norm.weight");
            if self.has(layer, &name) {
                let w = self.of(layer, &name);
                x = x.chunks(w.len()).flat_map(|x| norm(x, w)).collect();
            }
            self.turn(position, &mut x);
            x
        });
        let v = stored(self.linear(layer, "attn_v", x));
        let k = stored(std::mem::take(&mut qk[1]));
        self.cells[layer].push([k, v]);
        let first = match self.kind {
            Kind::GptOss if layer.is_multiple_of(2) => {
                (position + 1).saturating_sub(WINDOW as usize)
            }
            _ => 0,
        };
        let cells = &self.cells[layer][first..];
        let attended = qk[0].chunks(head).enumerate().flat_map(|(h, q)| {
            let of = h / shared_by * head..(h / shared_by + 1) * head;
            let score = |[k, _]: &[Vec<f64>; 2]| {
                let dot: f64 = q.iter().zip(&k[of.clone()]).map(|(q, k)| q * k).sum();
                (dot / (head as f64).sqrt()).exp()
            };
            let scores: Vec<f64> = cells.iter().map(score).collect();
            let mut sum: f64 = scores.iter().sum();
            if self.kind == Kind::GptOss {
                sum += self.of(layer, "attn_sinks.weight")[h].exp();
            }
            let mut out = vec![0.0; head];
            for (s, [_, v]) in scores.iter().zip(cells) {
                sum_to(&mut out, s / sum, &v[of.clone()]);
            }
            out
        });
        let attended: Vec<f64> = attended.collect();
        self.linear(layer, "attn_output", &attended)
    }

    fn logits(&mut self, token: u32) -> Vec<f64> {
        let width = self.sizes.width as usize;
        let mut x = self.weights["token_embd.weight"][token as usize * width..][..width].to_vec();
        let ffn_norm = match self.kind {
            Kind::GptOss => "post_attention_norm.weight",
            _ => "ffn_norm.weight",
        };
        for layer in 0..LAYERS {
            let normed = norm(&x, self.of(layer, "attn_norm.weight"));
            let attended = self.attention(layer, &normed);
            sum_to(&mut x, 1.0, &attended);
            let normed = norm(&x, self.of(layer, ffn_norm));
            let mixed = self.mixture(layer, &normed);
            sum_to(&mut x, 1.0, &mixed);
        }
        let normed = norm(&x, &self.weights["output_norm.weight"]);
        product(&self.weights["output.weight"], &normed)
    }
}

/// Nothing is rounded to 8 bits where all weights are single floats, so that little separates the logits from exact ones.
#[test]
fn every_architecture_computes_what_plain_f64_does() {
    let tokens = tokens(60);
    for kind in Kind::ALL {
        let file = small::header(kind, FLOATS, &[TensorType::F32], false);
        let model = load(&file, Isa::best(), 2);
        let ours = logits(&model, &tokens, Some(512), Placing::RESIDENT);
        let mut reference = Reference::new(kind, FLOATS, &file);
        let mut largest = 0f64;
        for (&token, ours) in tokens.iter().zip(ours.chunks(VOCAB as usize)) {
            for (theirs, &ours) in reference.logits(token).into_iter().zip(ours) {
                largest = largest.max((theirs - f64::from(ours)).abs());
            }
        }
        println!("{kind:?}: logits differ by {largest:.1e} at most");
        // Logits have a deviation of 3; a value that is stored as the next half differs by 5e-4 of itself.
        assert!(largest < 5e-3, "{kind:?}: {largest}");
    }
}

/// Chunks, generated tokens, threads, instruction sets, and where cells lie.
#[test]
fn bits_do_not_depend_on_how_tokens_are_computed() {
    let types: Vec<TensorType> = quant::formats::supported().to_vec();
    let tokens = tokens(70);
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        // Other formats for each, so that experts have all of them.
        let types: Vec<_> = types
            .iter()
            .copied()
            .cycle()
            .skip(3 * i)
            .take(types.len())
            .collect();
        let is_plain = i % 2 == 0;
        let file = small::header(kind, BLOCKS, &types, true);
        let all = load(&file, Isa::best(), 2);
        let expected = logits(&all, &tokens, Some(512), Placing::RESIDENT);
        assert!(expected.iter().all(|x| x.is_finite()), "{kind:?}");
        for isa in Isa::available() {
            let is_scalar = isa == Isa::Scalar;
            if is_scalar && !is_plain {
                continue;
            }
            for threads in [1, 3] {
                let model = load(&file, isa, threads);
                assert_eq!(model.fingerprint(), all.fingerprint());
                let cuts: &[Option<usize>] = match (is_scalar, threads) {
                    (true, 1) => &[],
                    (true, _) => &[Some(64)],
                    _ => &[Some(512), Some(64), Some(8), Some(1), None],
                };
                for &cut in cuts {
                    // The plain definition is slow.
                    let n = if is_scalar { 20 } else { tokens.len() };
                    let found = logits(&model, &tokens[..n], cut, Placing::RESIDENT);
                    assert!(
                        found == expected[..found.len()],
                        "{kind:?} {isa}, {threads} threads, {cut:?}"
                    );
                }
            }
        }
    }
}

/// Sinks count once, whoever attends which cells.
#[test]
fn sinks_and_windows_are_the_same_where_cells_are_streamed() {
    let file = small::header(
        Kind::GptOss,
        BLOCKS,
        &[TensorType::MXFP4, TensorType::Q8_0],
        true,
    );
    let model = load(&file, Isa::best(), 2);
    let tokens = tokens(1400);
    let resident = logits(&model, &tokens, Some(256), Placing::RESIDENT);
    for (kv_share, cut) in [(0.0, Some(256)), (0.5, Some(100)), (1.0, Some(512))] {
        let placing = Placing {
            window_blocks: Some(2),
            tail_blocks: 8,
            staging_slots: 2,
            kv_share,
            gating: Gating::Off,
        };
        let found = logits(&model, &tokens, cut, placing);
        assert!(found == resident, "share {kv_share}, {cut:?}");
    }
    let options = SessionOptions {
        type_k: KvType::Q8_0,
        type_v: KvType::Q4_0,
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(&model, &options).unwrap();
    session.prefill(&tokens[..300], Wanted::Last).unwrap();
    assert!(session.logits().iter().all(|x| x.is_finite()));
}

/// More pairs of tokens and experts than are computed at a time.
#[test]
fn a_long_chunk_is_the_same_as_short_ones() {
    let file = small::header(
        Kind::Qwen3Moe,
        BLOCKS,
        &[TensorType::Q4_K, TensorType::Q6_K],
        false,
    );
    let model = load(&file, Isa::best(), 2);
    let tokens = tokens(700);
    let expected = logits(&model, &tokens, Some(700), Placing::RESIDENT);
    for cut in [512, 65] {
        let found = logits(&model, &tokens, Some(cut), Placing::RESIDENT);
        assert!(found == expected, "{cut}");
    }
}

#[test]
fn devices_refuse_experts_they_cannot_compute_before_they_are_loaded() {
    let file = small::header(Kind::Olmoe, FLOATS, &[TensorType::F32], false);
    let options = LoadOptions {
        device: ComputeDevice::Cuda(0),
        contents: small::contents(),
        ..LoadOptions::default()
    };
    let mut was_told = false;
    let refused = Model::from_file(&file, &options, &mut |_| was_told = true);
    let message = refused.expect_err("it is refused").to_string();
    assert!(
        message.contains("experts of F32 weights") && message.contains("--device cpu"),
        "{message}"
    );
    assert!(!was_told);
}
