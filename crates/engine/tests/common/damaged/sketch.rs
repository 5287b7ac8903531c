//! A small made-up model: complete, deterministic, and easily made wrong.

use std::path::Path;

use gguf::{StringArray, TensorType, Value, write::Writer};

/// Tokens of the vocabulary. The embedding has a row more, as padding.
pub const TOKENS: usize = 300;
const ROWS: u64 = TOKENS as u64 + 1;
/// Tokens of one byte come first, merged ones follow, the last two are special.
const BYTES: usize = 256;
const SPECIALS: [&str; 2] = ["<|begin|>", "<|end|>"];

const LAYERS: usize = 2;
const WIDTH: u64 = 64;
/// A block of the K formats.
const FF: u64 = 256;
const HEADS: u32 = 4;
const HEADS_KV: u32 = 2;
const HEAD: u32 = 32;

/// Keys and tensors of a model that is still to be written.
#[derive(Clone)]
pub struct Sketch {
    pub keys: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
}

/// A tensor of a sketch; its bytes follow from its name, type and dimensions.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub ty: TensorType,
    pub dims: Vec<u64>,
}

impl Sketch {
    /// A `llama` model of two layers with a byte-level tokenizer and a chat template. Nothing is wrong with it.
    pub fn sound() -> Self {
        let mut sketch = Self {
            keys: Vec::new(),
            tensors: Vec::new(),
        };
        sketch.set("general.architecture", "llama");
        sketch.set("general.name", "made up");
        for (key, n) in [
            ("block_count", LAYERS as u32),
            ("context_length", 512),
            ("embedding_length", WIDTH as u32),
            ("feed_forward_length", FF as u32),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", HEADS_KV),
            ("attention.key_length", HEAD),
            ("attention.value_length", HEAD),
            ("rope.dimension_count", HEAD),
        ] {
            sketch.set(&format!("llama.{key}"), n);
        }
        sketch.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
        sketch.set("llama.rope.freq_base", 10_000f32);
        sketch.tokenizer();
        let (q, kv) = (u64::from(HEADS * HEAD), u64::from(HEADS_KV * HEAD));
        sketch.tensor("token_embd.weight", TensorType::Q8_0, &[WIDTH, ROWS]);
        for i in 0..LAYERS {
            let k_format = [TensorType::Q4_K, TensorType::Q6_K][i % 2];
            for (part, ty, dims) in [
                ("attn_norm", TensorType::F32, &[WIDTH][..]),
                ("attn_q", TensorType::Q4_0, &[WIDTH, q]),
                ("attn_k", TensorType::F16, &[WIDTH, kv]),
                ("attn_v", TensorType::Q5_1, &[WIDTH, kv]),
                ("attn_output", TensorType::BF16, &[q, WIDTH]),
                ("ffn_norm", TensorType::F32, &[WIDTH]),
                ("ffn_gate", TensorType::Q4_1, &[WIDTH, FF]),
                ("ffn_up", TensorType::F32, &[WIDTH, FF]),
                ("ffn_down", k_format, &[FF, WIDTH]),
            ] {
                sketch.tensor(&format!("blk.{i}.{part}.weight"), ty, dims);
            }
        }
        sketch.tensor("output_norm.weight", TensorType::F32, &[WIDTH]);
        sketch
    }

    /// The same with experts in the second layer: 8 of them, of which a token uses 2.
    pub fn mixture() -> Self {
        const EXPERTS: u64 = 8;
        const EXPERT_FF: u64 = 128;
        let mut sketch = Self::sound();
        for (key, n) in [
            ("expert_count", EXPERTS as u32),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", EXPERT_FF as u32),
            ("leading_dense_block_count", 1),
        ] {
            sketch.set(&format!("llama.{key}"), n);
        }
        for part in ["ffn_gate", "ffn_up", "ffn_down"] {
            sketch.remove_tensor(&format!("blk.1.{part}.weight"));
        }
        for (part, ty, dims) in [
            ("ffn_gate_inp", TensorType::F32, &[WIDTH, EXPERTS][..]),
            (
                "ffn_gate_exps",
                TensorType::Q4_1,
                &[WIDTH, EXPERT_FF, EXPERTS],
            ),
            (
                "ffn_up_exps",
                TensorType::Q4_0,
                &[WIDTH, EXPERT_FF, EXPERTS],
            ),
            (
                "ffn_down_exps",
                TensorType::Q8_0,
                &[EXPERT_FF, WIDTH, EXPERTS],
            ),
        ] {
            sketch.tensor(&format!("blk.1.{part}.weight"), ty, dims);
        }
        sketch
    }

    fn tokenizer(&mut self) {
        let mut tokens: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
        let mut merges = Vec::new();
        for i in 0..TOKENS - BYTES - SPECIALS.len() {
            let letter = |n: usize| char::from(b'a' + (n % 26) as u8);
            let (left, right) = (letter(i), letter(i * 7 + i / 26 + 3));
            merges.push(format!("{left} {right}"));
            tokens.push(format!("{left}{right}"));
        }
        tokens.extend(SPECIALS.map(str::to_owned));
        assert_eq!(tokens.len(), TOKENS);
        let control = |i| if i < TOKENS - SPECIALS.len() { 1 } else { 3 };
        let types: Box<[i32]> = (0..TOKENS).map(control).collect();
        self.set("tokenizer.ggml.model", "gpt2");
        self.set("tokenizer.ggml.pre", "gpt-2");
        self.set(
            "tokenizer.ggml.tokens",
            tokens.iter().collect::<StringArray>(),
        );
        self.set("tokenizer.ggml.token_type", types);
        self.set(
            "tokenizer.ggml.merges",
            merges.iter().collect::<StringArray>(),
        );
        self.set("tokenizer.ggml.bos_token_id", TOKENS as u32 - 2);
        self.set("tokenizer.ggml.eos_token_id", TOKENS as u32 - 1);
        self.set("tokenizer.ggml.add_bos_token", false);
        self.set(
            "tokenizer.chat_template",
            "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
        );
    }

    /// Sets a key: in its place, or as the last one.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        let value = value.into();
        match self.keys.iter_mut().find(|(k, _)| k == key) {
            Some(entry) => entry.1 = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    /// Takes a key out, which must be there.
    pub fn remove(&mut self, key: &str) {
        let n = self.keys.len();
        self.keys.retain(|(k, _)| k != key);
        assert_eq!(self.keys.len(), n - 1, "there is no key {key}");
    }

    /// Adds a tensor, in the place of one of that name if there is one.
    pub fn tensor(&mut self, name: &str, ty: TensorType, dims: &[u64]) {
        let tensor = Tensor {
            name: name.to_owned(),
            ty,
            dims: dims.to_vec(),
        };
        match self.tensors.iter_mut().find(|t| t.name == name) {
            Some(old) => *old = tensor,
            None => self.tensors.push(tensor),
        }
    }

    /// Takes a tensor out, which must be there.
    pub fn remove_tensor(&mut self, name: &str) {
        let n = self.tensors.len();
        self.tensors.retain(|t| t.name != name);
        assert_eq!(self.tensors.len(), n - 1, "there is no tensor {name}");
    }

    /// For a file or for parts.
    pub fn writer(&self) -> Writer<'static> {
        let mut writer = Writer::new(32).expect("32 is an alignment");
        for (key, value) in &self.keys {
            writer.set(key, value.clone()).expect("a good key");
        }
        for t in &self.tensors {
            writer
                .tensor(&t.name, t.ty, &t.dims, t.bytes())
                .unwrap_or_else(|e| panic!("{e}"));
        }
        writer
    }

    /// The file in memory.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let written = self.writer().write_to(&mut bytes);
        written.expect("the writer takes it");
        bytes
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).expect("it can be written");
    }
}

impl Tensor {
    /// Noise, with scales that keep the numbers small.
    fn bytes(&self) -> Vec<u8> {
        let elements: u64 = self.dims.iter().product();
        let blocks = elements as usize / self.ty.block_len();
        let mut state = 0xCBF2_9CE4_8422_2325_u64;
        for byte in self.name.bytes() {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
        let mut noise = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        };
        let mut bytes = Vec::with_capacity(blocks * self.ty.block_bytes());
        for _ in 0..blocks {
            let start = bytes.len();
            bytes.extend((0..self.ty.block_bytes()).map(|_| noise()));
            let block = &mut bytes[start..];
            match self.ty {
                // Sign and mantissa are noise; the exponent makes it a sixteenth to an eighth.
                TensorType::F16 => block[1] = block[1] & 0x83 | 0x2C,
                TensorType::BF16 => {
                    (block[0], block[1]) = (block[0] & 0x7F | 0x80, block[1] & 0x80 | 0x3D)
                }
                // Norms among them: a half to one, positive.
                TensorType::F32 => (block[2], block[3]) = (block[2] & 0x7F, 0x3F),
                ty => {
                    let (scale, places) = scales(ty);
                    for &at in places {
                        block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
            }
        }
        bytes
    }
}

/// A small half-precision scale for a block of a type, and where its scales are.
fn scales(ty: TensorType) -> (u16, &'static [usize]) {
    const TWO_TO_MINUS_8: u16 = 0x1C00;
    const TWO_TO_MINUS_14: u16 = 0x0400;
    match ty {
        TensorType::Q8_0 | TensorType::Q4_0 => (TWO_TO_MINUS_8, &[0]),
        TensorType::Q4_1 | TensorType::Q5_1 => (TWO_TO_MINUS_8, &[0, 2]),
        TensorType::Q4_K => (TWO_TO_MINUS_14, &[0, 2]),
        TensorType::Q6_K => (TWO_TO_MINUS_14, &[208]),
        // Only ever refused.
        _ => (0, &[]),
    }
}

/// The character that stands for a byte in byte-level vocabularies.
fn byte_char(byte: u8) -> char {
    let shown = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if shown(byte) {
        return char::from(byte);
    }
    let hidden_before = (0..byte).filter(|&b| !shown(b)).count() as u32;
    char::from_u32(256 + hidden_before).expect("far below the surrogates")
}
