//! Every kernel against the definition, bit for bit, on random weights and activations.

use super::*;
use crate::acts::Acts;
use crate::pool::Pinning;
use gguf::TensorType;
use quant::act::{ActRow, Passes};
use quant::product::act_block;
use quant::tile::{Layout, permute_tile};

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
}

/// Random blocks, with scales kept finite unless `wild`.
fn weights(ty: TensorType, n: usize, k: usize, rng: &mut Rng, wild: bool) -> Vec<u8> {
    weights_of(ty, n, k, || rng.next() as u8, wild)
}

/// Blocks of any bytes, with scales kept finite unless `wild`.
fn weights_of(
    ty: TensorType,
    n: usize,
    k: usize,
    mut byte: impl FnMut() -> u8,
    wild: bool,
) -> Vec<u8> {
    let layout = Layout::of(ty).unwrap();
    let (len, bytes) = (layout.block_len(), layout.block_bytes());
    let row_bytes = k / len * bytes;
    let mut file: Vec<u8> = (0..n * row_bytes).map(|_| byte()).collect();
    if !wild {
        // Halves: clear the top exponent bit wherever one can stand, which every format survives.
        for block in file.chunks_exact_mut(bytes) {
            match ty {
                TensorType::F32 => block[3] &= 0xbf,
                TensorType::MXFP4 => block[0] = 100 + block[0] % 40,
                TensorType::Q2_K => {
                    block[81] &= 0xbf;
                    block[83] &= 0xbf;
                }
                TensorType::Q3_K => block[109] &= 0xbf,
                TensorType::Q6_K => block[209] &= 0xbf,
                TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => {
                    block[1] &= 0xbf;
                    block[3] &= 0xbf;
                }
                _ => block[1] &= 0xbf,
            }
        }
    }
    let mut data = vec![0; file.len()];
    for (rows, tile) in file
        .chunks(ROWS * row_bytes)
        .zip(data.chunks_mut(ROWS * row_bytes))
    {
        permute_tile(layout, rows.len() / row_bytes, rows, tile);
    }
    data
}

fn check(ty: TensorType, n: usize, k: usize, tokens: usize, rng: &mut Rng, wild: bool) {
    let data = weights(ty, n, k, rng, wild);
    let scale = if wild { 1e30 } else { 3.0 };
    let mut x: Vec<f32> = (0..tokens * k).map(|_| rng.unit() * scale).collect();
    if wild {
        x[k / 2] = f32::NAN;
        x[k - 1] = 1e-42;
    }
    compare(&TileMatrix::new(ty, n, k, &data), &x, wild);
}

/// Every instruction set's results against the definition's.
fn compare(w: &TileMatrix<'_>, x: &[f32], wild: bool) {
    let (w, ty, n, k) = (*w, w.ty(), w.n(), w.k());
    let tokens = x.len() / k;
    let want: Vec<f32> = (0..tokens)
        .flat_map(|t| {
            let x = &x[t * k..(t + 1) * k];
            let row = act_block(ty).map(|block| ActRow::new(x, block));
            (0..n)
                .map(|r| {
                    row.as_ref()
                        .map_or_else(|| dot_float(&w, r, x), |a| dot_quantised(&w, r, a))
                })
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(
        wild || want.iter().all(|v| v.is_finite()),
        "{} gives finite results",
        ty.name()
    );
    for isa in Isa::available() {
        let pool = Pool::new(2, Pinning::Free).unwrap();
        let acts = act_block(ty).map(|block| {
            let mut acts = Acts::new(tokens, k).unwrap();
            acts.quantise(&pool, isa, x, tokens, block, Passes::One);
            acts
        });
        let of = |block| acts.as_ref().map(Acts::view).filter(|a| a.block() == block);
        let operand = Operand {
            x,
            tokens,
            k,
            acts32: of(32),
            acts256: of(256),
        };
        let mut out = vec![f32::INFINITY; tokens * n];
        products(&pool, isa, &operand, &mut [Task { w, out: &mut out }]);
        for (i, (got, want)) in out.iter().zip(&want).enumerate() {
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{} {isa} n {n} k {k} tokens {tokens}: token {} row {}: {got} against {want}",
                ty.name(),
                i / n,
                i % n
            );
        }
    }
}

#[test]
fn every_format_shape_and_isa_equals_the_definition() {
    let mut rng = Rng(7);
    for &ty in quant::formats::supported() {
        let len = Layout::of(ty).unwrap().block_len();
        for (n, blocks, tokens) in [
            (16usize, 1usize, 1usize),
            (5, 3, 2),
            (40, 19, 3),
            (33, 17, 16),
            (16, 33, 17),
            (32, 4, 4),
            (17, 3, 5),
            (24, 18, 7),
            (40, 20, 8),
            (48, 2, 35),
            (64, 5, 9),
            (20, 36, 15),
        ] {
            // Few super-blocks are many values; few float "blocks" are one value each.
            let k = match len {
                1 => blocks * 37,
                32 => blocks * 32,
                _ => blocks.div_ceil(4) * 256,
            };
            check(ty, n, k, tokens, &mut rng, false);
        }
    }
}

/// A thread's rows, or the tokens, are more than kernels sum side by side, in several chunks.
#[test]
fn more_than_is_summed_at_once() {
    let mut rng = Rng(5);
    for ty in [
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q4_K,
        TensorType::Q6_K,
    ] {
        let k = if act_block(ty) == Some(32) { 544 } else { 768 };
        check(ty, 1165, k, 21, &mut rng, false);
        check(ty, 21, k, 523, &mut rng, false);
    }
}

#[test]
fn extreme_scales_and_faults_too() {
    let mut rng = Rng(11);
    for &ty in quant::formats::supported() {
        for tokens in [1, 6, 18] {
            check(ty, 20, 768, tokens, &mut rng, true);
        }
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_overflow() {
    let signs: [fn(usize) -> bool; 4] =
        [|_| false, |_| true, |i| i % 4 < 2, |i| i.is_multiple_of(2)];
    for &ty in quant::formats::supported() {
        let Some(block) = act_block(ty) else {
            continue;
        };
        let (n, k) = (16, 2 * block);
        for fill in [0x00, 0xff, 0x80, 0x7f, 0xf0, 0x0f] {
            let data = weights_of(ty, n, k, || fill, false);
            for tokens in [4, 8, 20] {
                let x: Vec<f32> = (0..tokens * k)
                    .map(|i| if signs[i / k % 4](i) { -1.0 } else { 1.0 })
                    .collect();
                compare(&TileMatrix::new(ty, n, k, &data), &x, false);
            }
        }
    }
}

#[test]
fn a_group_of_products_shares_one_fork() {
    let mut rng = Rng(3);
    let (k, tokens) = (512, 20);
    let x: Vec<f32> = (0..tokens * k).map(|_| rng.unit()).collect();
    let pool = Pool::new(2, Pinning::Free).unwrap();
    let isa = Isa::best();
    let (mut a32, mut a256) = (Acts::new(tokens, k).unwrap(), Acts::new(tokens, k).unwrap());
    a32.quantise(&pool, isa, &x, tokens, 32, Passes::One);
    a256.quantise(&pool, isa, &x, tokens, 256, Passes::One);
    let operand = Operand {
        x: &x,
        tokens,
        k,
        acts32: Some(a32.view()),
        acts256: Some(a256.view()),
    };
    let shapes = [
        (TensorType::Q5_0, 48),
        (TensorType::Q6_K, 16),
        (TensorType::F16, 7),
        (TensorType::Q8_0, 100),
    ];
    let data: Vec<_> = shapes
        .iter()
        .map(|&(ty, n)| weights(ty, n, k, &mut rng, false))
        .collect();
    let w: Vec<_> = shapes
        .iter()
        .zip(&data)
        .map(|(&(ty, n), data)| TileMatrix::new(ty, n, k, data))
        .collect();
    let mut alone: Vec<Vec<f32>> = w.iter().map(|w| vec![0.0; tokens * w.n()]).collect();
    for (w, out) in w.iter().zip(&mut alone) {
        products(&pool, Isa::Scalar, &operand, &mut [Task { w: *w, out }]);
    }
    let mut together: Vec<Vec<f32>> = w.iter().map(|w| vec![0.0; tokens * w.n()]).collect();
    let mut tasks: Vec<_> = w
        .iter()
        .zip(&mut together)
        .map(|(w, out)| Task { w: *w, out })
        .collect();
    products(&pool, isa, &operand, &mut tasks);
    assert_eq!(together, alone);
}
