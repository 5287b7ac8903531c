//! Embeddings: one vector for a text, of what the last norm gives for its tokens.

use gguf::Metadata;

/// Which of the tokens' outputs `[T, D]` the vector is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last one's.
    Last,
}

impl Pooling {
    /// What a model was made for, as its file says; `None`: for no embeddings, or in a way that is not known here.
    ///
    /// # Errors
    /// If the file's keys are not what they should be.
    pub fn of(metadata: &Metadata) -> Result<Option<Self>, gguf::Error> {
        let arch = metadata.require_str("general.architecture")?;
        // The numbers of the format.
        Ok(match metadata.u32(&format!("{arch}.pooling_type"))? {
            Some(1) => Some(Self::Mean),
            Some(3) => Some(Self::Last),
            _ => None,
        })
    }
}

/// An embedding in the making.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    pooling: Pooling,
    /// Of all outputs so far, or the last one.
    sum: Vec<f64>,
}

impl Pool {
    /// Of vectors of `width` values.
    pub fn new(pooling: Pooling, width: usize) -> Self {
        Self {
            pooling,
            sum: vec![0.0; width],
        }
    }

    /// Values of an output.
    pub fn width(&self) -> usize {
        self.sum.len()
    }

    /// Whether every token's output is wanted, not the last one's alone.
    pub fn wants_all(&self) -> bool {
        self.pooling == Pooling::Mean
    }

    /// Forgets all outputs.
    pub fn clear(&mut self) {
        self.sum.fill(0.0);
    }

    /// Takes the outputs `[T, D]` of the tokens that come next. In which pieces they come does not matter.
    pub fn take(&mut self, outputs: &[f32]) {
        for output in outputs.chunks_exact(self.sum.len()) {
            if self.pooling == Pooling::Last {
                self.clear();
            }
            for (sum, &x) in self.sum.iter_mut().zip(output) {
                *sum += f64::from(x);
            }
        }
    }

    /// The vector, of length 1: its first `dimensions` values, which are all unless a model was trained for fewer. A mean needs no division then.
    pub fn vector(&self, dimensions: usize) -> Vec<f32> {
        let values = &self.sum[..dimensions.min(self.sum.len())];
        let length = values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let factor = if length > 0.0 { 1.0 / length } else { 0.0 };
        values.iter().map(|x| (x * factor) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_of_length_one_whatever_the_pieces() {
        let outputs = [3.0, 0.0, 9.0, 1.0, 4.0, 5.0];
        for (pooling, wanted, first_two) in [
            (Pooling::Mean, [4.0, 4.0, 14.0], [4.0, 4.0]),
            (Pooling::Last, [1.0, 4.0, 5.0], [1.0, 4.0]),
        ] {
            for cut in [0, 3, 6] {
                let mut pool = Pool::new(pooling, 3);
                pool.take(&[7.0; 3]);
                pool.clear();
                pool.take(&outputs[..cut]);
                pool.take(&outputs[cut..]);
                let of_length_one = |values: &[f32]| -> Vec<f32> {
                    let length = values.iter().map(|x| x * x).sum::<f32>().sqrt();
                    values.iter().map(|x| x / length).collect()
                };
                let near = |a: &[f32], b: &[f32]| {
                    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6)
                };
                assert!(near(&pool.vector(3), &of_length_one(&wanted)), "{pool:?}");
                assert!(near(&pool.vector(2), &of_length_one(&first_two)));
            }
        }
        assert_eq!(Pool::new(Pooling::Mean, 2).vector(2), [0.0, 0.0]);
    }

    #[test]
    fn files_say_what_a_model_is_for() {
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", "qwen3");
        assert_eq!(Pooling::of(&metadata).unwrap(), None);
        for (number, pooling) in [
            (0u32, None),
            (1, Some(Pooling::Mean)),
            (2, None),
            (3, Some(Pooling::Last)),
        ] {
            metadata.set("qwen3.pooling_type", number);
            assert_eq!(Pooling::of(&metadata).unwrap(), pooling, "{number}");
        }
    }
}
