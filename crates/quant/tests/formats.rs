//! The block formats against the reference values of `tests/data` (see `make_fixtures.py` there), and against
//! themselves.

use gguf::TensorType;
use proptest::prelude::*;
use quant::formats::{
    Block32, Block256, Class, Error, class, decode_row, encodable, encode_row, require, supported,
    unpack32, unpack256,
};

/// Takes a file of fixtures apart.
struct Fixture<'a>(&'a [u8]);

impl<'a> Fixture<'a> {
    fn take(&mut self, bytes: usize) -> &'a [u8] {
        self.0.split_off(..bytes).expect("the fixture is complete")
    }

    fn ty(&mut self) -> TensorType {
        let name = self.take(8);
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        let name = std::str::from_utf8(&name[..end]).expect("names are ASCII");
        TensorType::from_name(name).expect("a known type")
    }

    fn u32(&mut self) -> usize {
        u32::from_le_bytes(self.take(4).try_into().unwrap()) as usize
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        let chunks = self.take(4 * n).as_chunks::<4>().0;
        chunks.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

fn decode(ty: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / ty.block_bytes() * ty.block_len()];
    decode_row(ty, bytes, &mut values).unwrap();
    values
}

fn encode(ty: TensorType, values: &[f32]) -> Vec<u8> {
    // Not zero, so that a bit that an encoder forgets to clear shows.
    let mut bytes = vec![0xA5; values.len() / ty.block_len() * ty.block_bytes()];
    encode_row(ty, values, &mut bytes).unwrap();
    bytes
}

#[test]
fn decoding_equals_the_reference_bit_for_bit() {
    let mut fixture = Fixture(include_bytes!("data/decode.bin"));
    let mut seen = Vec::new();
    while !fixture.0.is_empty() {
        let ty = fixture.ty();
        let (n, bytes) = (fixture.u32(), fixture.u32());
        let blocks = fixture.take(bytes);
        let expected = fixture.values(n);
        let actual = decode(ty, blocks);
        assert_eq!(actual.len(), n, "{ty}");
        for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
            let block = i / ty.block_len();
            assert_eq!(
                a.to_bits(),
                e.to_bits(),
                "{ty}, value {i} (block {block}): {a:e} for {e:e}"
            );
        }
        seen.push(ty);
    }
    for ty in supported() {
        assert!(seen.contains(ty), "no fixture for {ty}");
    }
}

#[test]
fn encoding_equals_the_reference_byte_for_byte() {
    let mut fixture = Fixture(include_bytes!("data/encode.bin"));
    let n = fixture.u32();
    let values = fixture.values(n);
    let mut records = 0;
    while !fixture.0.is_empty() {
        let ty = fixture.ty();
        let bytes = fixture.u32();
        let expected = fixture.take(bytes);
        let actual = encode(ty, &values);
        for (i, (a, e)) in actual
            .chunks(ty.block_bytes())
            .zip(expected.chunks(ty.block_bytes()))
            .enumerate()
        {
            assert_eq!(a, e, "{ty}, block {i}");
        }
        assert_eq!(actual.len(), expected.len());
        records += 1;
    }
    assert_eq!(records, 8);
}

#[test]
fn every_half_decodes_to_its_value() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let values = decode(TensorType::F16, &bytes);
    for (bits, value) in (0..=u16::MAX).zip(values) {
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let magnitude = match exponent {
            0 => mantissa * 2f64.powi(-24),
            31 if mantissa == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        if magnitude.is_nan() {
            assert!(value.is_nan());
        } else {
            let expected = if bits >> 15 == 1 {
                -magnitude
            } else {
                magnitude
            } as f32;
            assert_eq!(value.to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }
}

/// The values of one block from its integers, in `f64`.
fn evaluate(ty: TensorType, bytes: &[u8]) -> Vec<f64> {
    match class(ty).unwrap() {
        Class::Float => unreachable!("has no blocks"),
        Class::Block32 => {
            let mut b = Block32::ZERO;
            unpack32(ty, bytes, &mut b);
            b.q.iter()
                .map(|q| f64::from(b.d) * f64::from(*q) + f64::from(b.m))
                .collect()
        }
        Class::Block256 => {
            let mut b = Block256::ZERO;
            unpack256(ty, bytes, &mut b);
            let value = |(i, q): (usize, &i8)| {
                f64::from(b.d) * f64::from(b.scale[i / 16]) * f64::from(*q)
                    - f64::from(b.dmin) * f64::from(b.min[i / 16])
            };
            b.q.iter().enumerate().map(value).collect()
        }
    }
}

fn block_formats() -> impl Strategy<Value = TensorType> {
    let types: Vec<_> = supported()
        .iter()
        .copied()
        .filter(|ty| class(*ty) != Some(Class::Float))
        .collect();
    prop::sample::select(types)
}

fn block_of_any_bytes() -> impl Strategy<Value = (TensorType, Vec<u8>)> {
    block_formats().prop_flat_map(|ty| {
        (
            Just(ty),
            prop::collection::vec(any::<u8>(), ty.block_bytes()),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn unpacked_integers_give_the_decoded_values((ty, bytes) in block_of_any_bytes()) {
        let decoded = decode(ty, &bytes);
        for (i, (value, exact)) in decoded.iter().zip(evaluate(ty, &bytes)).enumerate() {
            if exact.is_nan() {
                prop_assert!(value.is_nan(), "{ty} value {i}: {value} for NaN");
                continue;
            }
            // One rounding; the f64 sum may have been rounded too, so allow the neighbour of the nearest.
            let nearest = exact as f32;
            let near = *value == nearest || *value == nearest.next_up() || *value == nearest.next_down();
            prop_assert!(near, "{ty} value {i}: {value:e} for {exact:e}");
        }
    }

    /// The documented ranges, on which the products' integer widths rest.
    #[test]
    fn integers_stay_in_their_ranges((ty, bytes) in block_of_any_bytes()) {
        use TensorType as T;
        let (q_range, scale_range, min_max) = match ty {
            T::Q4_0 => (-8..=7, 0..=0, 0),
            T::Q4_1 => (0..=15, 0..=0, 0),
            T::Q5_0 => (-16..=15, 0..=0, 0),
            T::Q5_1 => (0..=31, 0..=0, 0),
            T::Q8_0 => (-128..=127, 0..=0, 0),
            T::IQ4_NL => (-127..=113, 0..=0, 0),
            T::MXFP4 => (-12..=12, 0..=0, 0),
            T::Q2_K => (0..=3, 0..=15, 15),
            T::Q3_K => (-4..=3, -32..=31, 0),
            T::Q4_K => (0..=15, 0..=63, 63),
            T::Q5_K => (0..=31, 0..=63, 63),
            T::Q6_K => (-32..=31, -128..=127, 0),
            T::IQ4_XS => (-127..=113, -32..=31, 0),
            T::IQ2_XXS | T::IQ2_XS | T::IQ2_S => (-43..=43, 1..=31, 0),
            T::IQ3_XXS => (-62..=62, 1..=31, 0),
            T::IQ3_S => (-15..=15, 1..=31, 0),
            other => panic!("no ranges for {other}"),
        };
        if class(ty) == Some(Class::Block32) {
            let mut b = Block32::ZERO;
            unpack32(ty, &bytes, &mut b);
            prop_assert!(b.q.iter().all(|q| q_range.contains(q)), "{ty}: {:?}", b.q);
        } else {
            let mut b = Block256::ZERO;
            unpack256(ty, &bytes, &mut b);
            prop_assert!(b.q.iter().all(|q| q_range.contains(q)), "{ty}: {:?}", b.q);
            prop_assert!(b.scale.iter().all(|s| scale_range.contains(s)), "{ty}: {:?}", b.scale);
            prop_assert!(b.min.iter().all(|m| *m <= min_max), "{ty}: {:?}", b.min);
        }
    }

    /// What comes back is near what went in.
    #[test]
    fn encoded_values_come_back(
        ty in prop::sample::select(encodable()),
        unit in prop::collection::vec(-1f32..1.0, 256),
        scale in prop::sample::select(&[1e-30f32, 0.02, 1.0, 1e3][..]),
    ) {
        let values: Vec<f32> = unit.iter().map(|x| x * scale).collect();
        let decoded = decode(ty, &encode(ty, &values));
        // The factor of small values is a subnormal half, off by up to 2^-25, times a scale and integer of up to 2^12.
        let bound = scale * worst_error(ty) + 2f32.powi(-13);
        for (i, (x, y)) in values.iter().zip(decoded).enumerate() {
            prop_assert!((x - y).abs() <= bound, "{ty} value {i}: {y} for {x}, bound {bound}");
        }
    }

    #[test]
    fn any_finite_row_is_encoded_or_refused(
        ty in prop::sample::select(encodable()),
        values in prop::collection::vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 256),
    ) {
        let mut bytes = vec![0; 256 / ty.block_len() * ty.block_bytes()];
        match encode_row(ty, &values, &mut bytes) {
            Ok(()) => if class(ty) != Some(Class::Float) {
                prop_assert!(decode(ty, &bytes).iter().all(|x| x.is_finite()), "{ty}");
            },
            Err(e) => prop_assert!(matches!(e, Error::ScaleRange { .. }), "{ty}: {e}"),
        }
    }
}

/// A bound for the error of one value relative to the largest magnitude that its block may hold.
fn worst_error(ty: TensorType) -> f32 {
    use TensorType as T;
    match ty {
        T::F32 => 0.0,
        T::F16 => 2f32.powi(-11),
        T::BF16 => 2f32.powi(-8),
        // One step: the side opposite to the largest magnitude reaches one step less far.
        T::Q4_0 => 0.126,
        T::Q5_0 => 0.063,
        // Half a step of the range of two.
        T::Q4_1 => 0.068,
        T::Q5_1 => 0.034,
        T::Q8_0 => 0.0045,
        // (127 - 113) / 127 on the short side, and the refitted scale.
        T::IQ4_NL => 0.16,
        // Values between 6 and 8 times the scale, where the largest may be 4.
        T::MXFP4 => 0.26,
        // Half a step (a third of the range), and the roundings of scale and minimum.
        T::Q2_K => 0.46,
        // The short side of both the integers (3 of 4) and the scales (31 of 32).
        T::Q3_K => 0.28,
        T::Q4_K => 0.1,
        T::Q5_K => 0.06,
        T::Q6_K => 0.042,
        // 113 of 127, 31 of 32.
        T::IQ4_XS => 0.145,
        other => panic!("no bound for {other}"),
    }
}

/// Root mean square error on bell-shaped values, relative to their root mean square: catches an encoder that is sound at
/// its extremes and careless in between.
#[test]
fn encoders_are_about_as_good_as_their_bits_allow() {
    use TensorType as T;
    // Sums of 8 uniform numbers from a linear congruential generator.
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let values: Vec<f32> = (0..16384)
        .map(|_| (0..8).map(|_| uniform()).sum())
        .collect();
    let square: f32 = values.iter().map(|x| x * x).sum();
    for (ty, bound) in [
        (T::Q2_K, 0.33),
        (T::Q3_K, 0.18),
        (T::Q4_0, 0.1),
        (T::Q4_K, 0.08),
        (T::IQ4_NL, 0.08),
        (T::IQ4_XS, 0.08),
        (T::MXFP4, 0.13),
        (T::Q5_K, 0.04),
        (T::Q6_K, 0.02),
        (T::Q8_0, 0.006),
    ] {
        let decoded = decode(ty, &encode(ty, &values));
        let error: f32 = values
            .iter()
            .zip(decoded)
            .map(|(x, y)| (x - y) * (x - y))
            .sum();
        let relative = (error / square).sqrt();
        println!("{ty}: relative RMS error {relative:.4}");
        assert!(relative < bound, "{ty}: {relative}");
    }
}

#[test]
fn zeros_stay_zero() {
    for &ty in encodable() {
        assert!(
            decode(ty, &encode(ty, &[0.0; 512]))
                .iter()
                .all(|x| *x == 0.0),
            "{ty}"
        );
    }
}

#[test]
fn the_lists_agree_with_the_file_format() {
    for &ty in TensorType::ALL {
        assert_eq!(class(ty).is_some(), supported().contains(&ty), "{ty}");
        let block_len = match class(ty) {
            Some(Class::Float) => 1,
            Some(Class::Block32) => 32,
            Some(Class::Block256) => 256,
            None => continue,
        };
        assert_eq!(ty.block_len(), block_len, "{ty}");
    }
    assert!(encodable().iter().all(|ty| supported().contains(ty)));
}

#[test]
fn an_unsupported_type_is_named_with_those_supported() {
    let error = require(TensorType::TQ1_0).unwrap_err();
    assert_eq!(
        error,
        Error::Unsupported {
            ty: TensorType::TQ1_0
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("TQ1_0") && text.contains("Q4_K, Q5_K") && text.contains("MXFP4"),
        "{text}"
    );
    assert_eq!(
        decode_row(TensorType::IQ1_S, &[], &mut []).unwrap_err(),
        Error::Unsupported {
            ty: TensorType::IQ1_S
        }
    );
    assert_eq!(require(TensorType::Q6_K), Ok(Class::Block256));
}

#[test]
fn wrong_lengths_are_refused_with_the_numbers() {
    let ty = TensorType::Q4_K;
    let error = decode_row(ty, &[0; 144], &mut [0.0; 255]).unwrap_err();
    assert_eq!(
        error,
        Error::RowLength {
            ty,
            values: 255,
            block_values: 256
        }
    );
    for bytes in [0, 143, 145, 288] {
        let error = decode_row(ty, &vec![0; bytes], &mut [0.0; 256]).unwrap_err();
        let expected = Error::ByteLength {
            ty,
            values: 256,
            expected_bytes: 144,
            actual_bytes: bytes,
        };
        assert_eq!(error, expected);
        assert_eq!(
            encode_row(ty, &[0.0; 256], &mut vec![0; bytes]).unwrap_err(),
            expected
        );
    }
    assert_eq!(decode_row(ty, &[], &mut []), Ok(()));
}

#[test]
fn what_cannot_be_encoded_is_refused_with_the_reason() {
    let ty = TensorType::IQ2_S;
    let error = encode_row(ty, &[0.0; 256], &mut [0; 82]).unwrap_err();
    assert_eq!(error, Error::NoEncoder { ty });

    for &ty in encodable()
        .iter()
        .filter(|ty| class(**ty) != Some(Class::Float))
    {
        let mut bytes = vec![0; 512 / ty.block_len() * ty.block_bytes()];
        let mut values = [1.0; 512];
        values[300] = f32::NEG_INFINITY;
        let error = encode_row(ty, &values, &mut bytes).unwrap_err();
        assert_eq!(
            error,
            Error::NotFinite {
                ty,
                index: 300,
                value: f32::NEG_INFINITY
            }
        );

        values[300] = 1e30;
        let index = 300 / ty.block_len() * ty.block_len();
        let result = encode_row(ty, &values, &mut bytes);
        if ty == TensorType::MXFP4 {
            assert_eq!(result, Ok(()), "its scale has the range of f32");
        } else {
            assert_eq!(
                result,
                Err(Error::ScaleRange {
                    ty,
                    index,
                    absmax: 1e30
                })
            );
        }
    }
}

#[test]
#[should_panic(expected = "Q8_0 has no blocks of 256")]
fn unpacking_the_wrong_class_panics() {
    unpack256(TensorType::Q8_0, &[0; 34], &mut { Block256::ZERO });
}

#[test]
#[should_panic(expected = "a Q8_0 block has 34 bytes, not 33")]
fn unpacking_part_of_a_block_panics() {
    unpack32(TensorType::Q8_0, &[0; 33], &mut { Block32::ZERO });
}
