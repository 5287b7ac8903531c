//! A model's weights on a device.

use crate::model::{Matrix, Model, Vector};
use cuda::product::Target;
use cuda::{Buffer, Product, Stream, Weights};

/// Weights, and the kernels of their formats.
#[derive(Debug)]
pub(super) struct OnDevice {
    matrices: Vec<Weights>,
    /// Which of the products multiplies each.
    product_of: Vec<usize>,
    products: Vec<Product>,
    /// By number; empty where no operation reads one.
    vectors: Vec<Option<Buffer<f32>>>,
}

impl OnDevice {
    pub(super) fn new(model: &Model, stream: &Stream) -> Result<Self, cuda::Error> {
        let mut on_device = Self {
            matrices: Vec::new(),
            product_of: Vec::new(),
            products: Vec::new(),
            vectors: Vec::new(),
        };
        for matrix in model.matrices() {
            let ty = matrix.ty();
            let known = on_device.products.iter().position(|p| p.ty() == ty);
            let product = match known {
                Some(product) => product,
                None => {
                    let product = Product::new(stream.device(), ty, Target::Best)?;
                    on_device.products.push(product);
                    on_device.products.len() - 1
                }
            };
            let view = matrix.view(&model.weights);
            debug_assert_eq!(matrix.index(), on_device.matrices.len());
            on_device.matrices.push(Weights::upload(stream, &view)?);
            on_device.product_of.push(product);
        }
        for vector in model.vectors() {
            let room = on_device.vectors.len().max(vector.index() + 1);
            on_device.vectors.resize_with(room, || None);
            on_device.vectors[vector.index()] = Some(Buffer::from_slice(stream, vector)?);
        }
        Ok(on_device)
    }

    pub(super) fn matrix(&self, matrix: &Matrix) -> (&Weights, &Product) {
        let index = matrix.index();
        (
            &self.matrices[index],
            &self.products[self.product_of[index]],
        )
    }

    pub(super) fn vector(&self, vector: &Vector) -> &Buffer<f32> {
        let found = self.vectors[vector.index()].as_ref();
        found.expect("vectors that operations read were copied")
    }
}
