//! What a measurement is shaped by: the matrices and heads of the model that is to be planned.

use cpu::attention::{CELLS, KvShape};
use gguf::{GgufFile, Metadata, TensorInfo, TensorType};
use place::bytes::KvType;
use quant::act::{BLOCK256, Passes};
use quant::formats::{self, Class};
use quant::product::act_block;
use std::collections::HashMap;
use std::path::PathBuf;

/// Rows longer than this are left out: no model has them, and a file may claim anything.
const K_MAX: u64 = 1 << 20;

/// Bytes of one format's weights that are measured, about: a large model's first layers stand for the others.
const BYTES_A_FORMAT: usize = 256 << 20;

/// The largest matrix measured whole; of longer ones the first rows are.
const MATRIX_BYTES_MAX: usize = 32 << 20;

/// Cells of a context of ordinary length.
const CELLS_ORDINARY: usize = 2048;

/// The width of an ordinary model.
const WIDTH_ORDINARY: usize = 4096;

/// Tokens of a vocabulary at most.
const VOCABULARY_MAX: usize = 1 << 20;

/// Heads and head sizes beyond this are not measured.
const HEADS_MAX: u64 = 1024;

/// Products of one token that share their input, as a session computes them: in one fork.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fork {
    pub(super) ty: TensorType,
    pub(super) k: usize,
    /// Rows of each matrix.
    pub(super) rows: Vec<usize>,
    /// How often the token's activations are passed.
    pub(super) passes: Passes,
}

impl Fork {
    /// Bytes of a matrix of `n` rows.
    pub(super) fn matrix_bytes(&self, n: usize) -> usize {
        n.saturating_mul((self.k / self.ty.block_len()) * self.ty.block_bytes())
    }

    /// Bytes of all; of a hostile file's this may be more than there can be.
    pub(super) fn bytes(&self) -> usize {
        let matrices = self.rows.iter().map(|&n| self.matrix_bytes(n));
        matrices.fold(0, usize::saturating_add)
    }
}

/// Heads of a model's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) heads_kv: usize,
    pub(super) head_k: usize,
    pub(super) head_v: usize,
}

/// The model that measurements stand for, or an ordinary one.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Products of a token, format by format.
    pub(super) forks: Vec<Fork>,
    /// `None` if the model has none that a kernel computes.
    pub(super) heads: Option<Heads>,
    pub(super) layers: usize,
    /// Bytes of weights that a token passes.
    pub(super) active_bytes: u64,
    /// Tokens of the vocabulary.
    pub(super) vocabulary: usize,
    /// Its file.
    pub(super) file: Option<PathBuf>,
}

impl Subject {
    /// A model's, from its file's header.
    ///
    /// Nothing here decides whether the model can be run: what cannot be measured is left out.
    pub fn of_file(file: &GgufFile) -> Self {
        let largest = file.parts().max_by_key(|(_, bytes)| *bytes);
        let mut subject = Self::of_header(file.metadata(), file.tensors());
        // A model that was made here has a name alone.
        let path = largest.map(|(path, _)| path.to_owned());
        subject.file = path.filter(|path| path.is_file());
        subject
    }

    fn of_header(meta: &Metadata, tensors: &[TensorInfo]) -> Self {
        let arch = meta.str("general.architecture").ok().flatten();
        let number = |key: &str| {
            let value = meta.get(&format!("{}.{key}", arch?))?;
            // Where each layer has its own number, the first that is not zero stands for all.
            let of_layers = || {
                let key = format!("{}.{key}", arch?);
                let all = meta.ints(&key).ok()??;
                all.into_iter().find(|n| *n > 0).map(i128::from)
            };
            let n = value.as_integer().or_else(of_layers)?;
            usize::try_from(n)
                .ok()
                .filter(|n| (1..=HEADS_MAX as usize).contains(n))
        };
        let heads = || {
            let heads = number("attention.head_count")?;
            let width = meta
                .u64(&format!("{}.embedding_length", arch?))
                .ok()
                .flatten();
            let each = width.map(|d| d as usize / heads);
            let heads = Heads {
                heads,
                heads_kv: number("attention.head_count_kv").unwrap_or(heads),
                head_k: number("attention.key_length").or(each)?,
                head_v: number("attention.value_length").or(each)?,
            };
            heads.shape(KvType::F16)?;
            Some(heads)
        };
        let forks = forks(tensors, number("expert_used_count").unwrap_or(1));
        Self {
            active_bytes: forks
                .iter()
                .fold(0, |sum, f| sum.saturating_add(f.bytes() as u64)),
            heads: heads(),
            layers: number("block_count").unwrap_or(1),
            vocabulary: vocabulary(tensors),
            forks,
            file: None,
        }
    }

    /// An ordinary model of 8 billion weights, all in one of the formats.
    pub fn ordinary() -> Self {
        Self {
            forks: ordinary_forks(TensorType::Q4_K),
            heads: Some(Heads {
                heads: 32,
                heads_kv: 8,
                head_k: 128,
                head_v: 128,
            }),
            layers: 32,
            active_bytes: 4 << 30,
            vocabulary: 128_256,
            file: None,
        }
    }

    /// The width of the model, and of the widest input: of most the feed-forward's.
    pub(super) fn widths(&self) -> [usize; 2] {
        let inputs = || self.forks.iter().map(|f| f.k);
        let most = inputs().max().unwrap_or(WIDTH_ORDINARY);
        // What is listed first, embedding, output or the first layer's, reads rows of the model's width.
        [inputs().next().unwrap_or(most), most]
    }

    /// Bytes that pass between two visits of the same weights: all of them, and the cells of a context of ordinary length.
    /// What is less than the last cache holds is read from there, so it matters for small models.
    pub(super) fn passing_bytes(&self) -> u64 {
        let shape = self.heads.and_then(|h| h.shape(KvType::F16));
        let block = shape.map_or(0, |s| s.block_bytes() as u64);
        let cells = self.layers as u64 * block * (CELLS_ORDINARY / CELLS) as u64;
        self.active_bytes.saturating_add(cells)
    }

    /// Formats, in the order of their number.
    pub(super) fn formats(&self) -> Vec<TensorType> {
        let mut formats: Vec<TensorType> = self.forks.iter().map(|f| f.ty).collect();
        formats.sort_unstable_by_key(|ty| ty.id());
        formats.dedup();
        formats
    }

    /// The forks that a format is measured with: the model's own, cut to a size that can be; else an ordinary model's.
    pub(super) fn forks_of(&self, ty: TensorType) -> Vec<Fork> {
        self.forks_within(ty, MATRIX_BYTES_MAX, BYTES_A_FORMAT)
    }

    /// The same with other bounds of a matrix, and of all together.
    pub(super) fn forks_within(
        &self,
        ty: TensorType,
        matrix_bytes_max: usize,
        bytes_max: usize,
    ) -> Vec<Fork> {
        let mut forks: Vec<Fork> = self.forks.iter().filter(|f| f.ty == ty).cloned().collect();
        if forks.is_empty() {
            forks = ordinary_forks(ty);
        }
        let mut bytes = 0;
        forks.retain_mut(|fork| {
            let room = bytes < bytes_max;
            for n in &mut fork.rows {
                let row_bytes = (fork.k / fork.ty.block_len()) * fork.ty.block_bytes();
                *n = (*n).min((matrix_bytes_max / row_bytes).max(1));
            }
            bytes += if room { fork.bytes() } else { 0 };
            room
        });
        forks
    }
}

impl Heads {
    /// A layer's cache with both types alike; `None` if the type cannot store such heads.
    pub(super) fn shape(&self, ty: KvType) -> Option<KvShape> {
        self.shape_of(ty, ty)
    }

    pub(super) fn shape_of(&self, type_k: KvType, type_v: KvType) -> Option<KvShape> {
        let Self {
            heads,
            heads_kv,
            head_k,
            head_v,
        } = *self;
        let most = HEADS_MAX as usize;
        let in_range = [heads, heads_kv, head_k, head_v]
            .into_iter()
            .all(|n| (1..=most).contains(&n));
        if !in_range || heads % heads_kv != 0 {
            return None;
        }
        let ty = |ty: KvType| ty.to_string().parse().ok();
        KvShape::new(heads_kv, head_k, head_v, ty(type_k)?, ty(type_v)?).ok()
    }
}

/// Rows of the embedding, as many as any model has at most.
fn vocabulary(tensors: &[TensorInfo]) -> usize {
    let embedding = tensors.iter().find(|t| t.name == "token_embd.weight");
    let rows = embedding.map_or(1, |t| t.ne(1));
    usize::try_from(rows)
        .unwrap_or(usize::MAX)
        .clamp(1, VOCABULARY_MAX)
}

/// Products of one token in the file's order: those that share an input together, one list for each format.
fn forks(tensors: &[TensorInfo], experts_used: usize) -> Vec<Fork> {
    let tied = !tensors.iter().any(|t| t.name == "output.weight");
    let mut forks: Vec<Fork> = Vec::new();
    let mut places: HashMap<(&str, &str, TensorType, usize), usize> = HashMap::new();
    for t in tensors {
        let Some((layer, part)) = part(&t.name, tied) else {
            continue;
        };
        let (k, n) = (t.ne(0), t.ne(1));
        let Some(class) = formats::class(t.ty).filter(|_| k <= K_MAX && t.dims.rank() > 1) else {
            continue;
        };
        let (Ok(k), Ok(n)) = (usize::try_from(k), usize::try_from(n)) else {
            continue;
        };
        let group = match part {
            "attn_q" | "attn_k" | "attn_v" => "qkv",
            "ffn_gate" | "ffn_up" => "gate_up",
            "ffn_gate_exps" | "ffn_up_exps" => "gate_up_exps",
            other => other,
        };
        let second = match part {
            "output" => class != Class::Float,
            "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" => act_block(t.ty) == Some(BLOCK256),
            _ => false,
        };
        let copies = if t.dims.rank() > 2 { experts_used } else { 1 };
        let place = *places.entry((layer, group, t.ty, k)).or_insert_with(|| {
            forks.push(Fork {
                ty: t.ty,
                k,
                rows: Vec::new(),
                passes: if second { Passes::Two } else { Passes::One },
            });
            forks.len() - 1
        });
        forks[place].rows.extend(std::iter::repeat_n(n, copies));
    }
    forks
}

/// Layer and part of a tensor that a token is multiplied with; `None` for the others.
fn part(name: &str, tied: bool) -> Option<(&str, &str)> {
    let name = name.strip_suffix(".weight")?;
    match name {
        "output" => Some(("", "output")),
        "token_embd" => tied.then_some(("", "output")),
        _ => {
            let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
            // Norms may be stored as matrices; embeddings of layers are looked up.
            let is_product = !part.ends_with("norm") && !part.ends_with("embd");
            is_product.then_some((layer, part))
        }
    }
}

/// Layers of a model of 8 billion weights.
fn ordinary_forks(ty: TensorType) -> Vec<Fork> {
    let fork = |k, rows: &[usize], passes| Fork {
        ty,
        k,
        rows: rows.to_vec(),
        passes,
    };
    let down = if act_block(ty) == Some(BLOCK256) {
        Passes::Two
    } else {
        Passes::One
    };
    (0..4)
        .flat_map(|_| {
            [
                fork(4096, &[4096, 1024, 1024], Passes::One),
                fork(4096, &[4096], Passes::One),
                fork(4096, &[14_336, 14_336], Passes::One),
                fork(14_336, &[4096], down),
            ]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::Array;

    fn tensor(name: &str, ty: TensorType, dims: &[u64]) -> TensorInfo {
        TensorInfo::new(name, ty, dims).unwrap()
    }

    fn small() -> Subject {
        let mut meta = Metadata::new();
        meta.set("general.architecture", "llama");
        meta.set("llama.embedding_length", 256_u32);
        meta.set("llama.attention.head_count", 4_u32);
        meta.set("llama.attention.head_count_kv", 2_u32);
        meta.set("llama.block_count", 2_u32);
        use TensorType as T;
        let tensors = [
            tensor("token_embd.weight", T::Q8_0, &[256, 1000]),
            tensor("blk.0.attn_norm.weight", T::F32, &[256]),
            tensor("blk.0.attn_q.weight", T::Q4_K, &[256, 256]),
            tensor("blk.0.attn_k.weight", T::Q4_K, &[256, 128]),
            tensor("blk.0.attn_v.weight", T::Q6_K, &[256, 128]),
            tensor("blk.0.ffn_down.weight", T::Q6_K, &[512, 256]),
            tensor("blk.1.attn_q.weight", T::Q4_K, &[256, 256]),
            tensor("blk.1.ffn_gate_exps.weight", T::MXFP4, &[256, 64, 8]),
        ];
        Subject::of_header(&meta, &tensors)
    }

    #[test]
    fn products_that_share_an_input_are_one_fork() {
        let subject = small();
        let fork = |ty, k, rows: &[usize], passes| Fork {
            ty,
            k,
            rows: rows.to_vec(),
            passes,
        };
        use TensorType as T;
        let expected = [
            fork(T::Q8_0, 256, &[1000], Passes::Two),
            fork(T::Q4_K, 256, &[256, 128], Passes::One),
            fork(T::Q6_K, 256, &[128], Passes::One),
            fork(T::Q6_K, 512, &[256], Passes::Two),
            fork(T::Q4_K, 256, &[256], Passes::One),
            fork(T::MXFP4, 256, &[64], Passes::One),
        ];
        assert_eq!(subject.forks, expected);
        assert_eq!(subject.formats(), [T::Q8_0, T::Q4_K, T::Q6_K, T::MXFP4]);
        let bytes = 1000 * 272 + (256 + 128 + 256) * 144 + 128 * 210 + 256 * 420 + 64 * 136;
        assert_eq!(subject.active_bytes, bytes);
        assert_eq!(subject.forks_of(T::Q6_K), expected[2..4]);
        let others = subject.forks_of(T::Q4_0);
        assert_eq!(others, ordinary_forks(T::Q4_0)[..others.len()]);
        let heads = subject.heads.unwrap();
        assert_eq!((heads.heads, heads.heads_kv, heads.head_k), (4, 2, 64));
        assert_eq!(subject.layers, 2);
        let cells = 2 * 2048 * 2 * (64 + 64) * 2;
        assert_eq!(subject.passing_bytes(), bytes + cells);
    }

    #[test]
    fn an_output_of_its_own_is_multiplied_and_the_embedding_is_not() {
        assert_eq!(part("output.weight", false), Some(("", "output")));
        assert_eq!(part("token_embd.weight", false), None);
        assert_eq!(part("blk.7.ssm_in.weight", false), Some(("7", "ssm_in")));
        assert_eq!(part("blk.7.attn_q_norm.weight", false), None);
        assert_eq!(part("blk.7.attn_q.bias", false), None);
    }

    #[test]
    fn what_a_file_claims_is_bounded() {
        let mut meta = Metadata::new();
        meta.set("general.architecture", "x");
        meta.set("x.embedding_length", u64::MAX);
        meta.set("x.attention.head_count", u64::MAX);
        meta.set("x.attention.key_length", 1_u32 << 31);
        let huge = [
            tensor("output.weight", TensorType::F16, &[1 << 40, 8]),
            tensor("blk.0.a.weight", TensorType::F16, &[1 << 20, 1 << 30]),
        ];
        let subject = Subject::of_header(&meta, &huge);
        assert_eq!(subject.heads, None);
        assert_eq!(subject.forks.len(), 1);
        let cut = subject.forks_of(TensorType::F16);
        assert_eq!(cut[0].rows, [16], "32 MiB of rows of 2 MiB");
        // A number for each layer, the first of which caches nothing.
        meta.set("x.attention.head_count", 8_u32);
        meta.set("x.attention.key_length", 64_u32);
        meta.set("x.attention.value_length", 64_u32);
        meta.set(
            "x.attention.head_count_kv",
            gguf::Value::Array(Array::I32([0, 4, 4].into())),
        );
        let heads = Subject::of_header(&meta, &[]).heads.unwrap();
        assert_eq!(heads.heads_kv, 4);
        meta.set("x.attention.head_count_kv", 3_u32);
        assert_eq!(Subject::of_header(&meta, &[]).heads, None, "3 of 8");
    }

    #[test]
    fn a_large_model_is_measured_by_its_first_layers() {
        let forks = Subject::ordinary().forks_of(TensorType::F32);
        let bytes: usize = forks.iter().map(Fork::bytes).sum();
        assert!((BYTES_A_FORMAT..BYTES_A_FORMAT + 2 * MATRIX_BYTES_MAX).contains(&bytes));
    }
}
