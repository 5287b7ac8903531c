//! A model's weights on a device, with the kernels of their formats.

use crate::model::{Matrix, Model, OnDevice as Lying, Vector};
use cuda::product::Target;
use cuda::{Buffer, Product, Stream, Weights};

/// Weights, and the kernels of their formats.
#[derive(Debug)]
pub(super) struct OnDevice<'m> {
    weights: &'m Lying,
    /// Which of the products multiplies each matrix; `None` for those of experts.
    product_of: Vec<Option<usize>>,
    products: Vec<Product>,
}

impl<'m> OnDevice<'m> {
    /// Those of a model that was loaded to the stream's device.
    pub(super) fn new(model: &'m Model, stream: &Stream) -> Result<Self, cuda::Error> {
        let weights = model.weights.on_device();
        let mut products: Vec<Product> = Vec::new();
        let mut product_of = Vec::with_capacity(weights.matrices().len());
        for matrix in weights.matrices() {
            let Some(matrix) = matrix else {
                product_of.push(None);
                continue;
            };
            let ty = matrix.ty();
            let known = products.iter().position(|p| p.ty() == ty);
            product_of.push(Some(match known {
                Some(product) => product,
                None => {
                    products.push(Product::new(stream.device(), ty, Target::Best)?);
                    products.len() - 1
                }
            }));
        }
        Ok(Self {
            weights,
            product_of,
            products,
        })
    }

    pub(super) fn matrix(&self, matrix: &Matrix) -> (&Weights, &Product) {
        let index = matrix.index();
        let weights = self.weights.matrices()[index].as_ref();
        let (weights, product) = weights
            .zip(self.product_of[index])
            .expect("a matrix that is none of an expert");
        (weights, &self.products[product])
    }

    pub(super) fn vector(&self, vector: &Vector) -> &Buffer<f32> {
        self.weights.vector(vector)
    }
}
