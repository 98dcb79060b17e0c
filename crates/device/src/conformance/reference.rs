//! Operators in the simplest form, in double precision.

/// Numbers in row-major order with their shape.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<f64>,
}

impl Grid {
    /// Fills a grid from the index of each element.
    pub(super) fn fill(shape: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> Grid {
        let count: usize = shape.iter().product();
        let mut data = Vec::with_capacity(count);
        let mut index = vec![0; shape.len()];
        for position in 0..count {
            let mut rest = position;
            for axis in (0..shape.len()).rev() {
                index[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            data.push(f(&index));
        }
        Grid { shape: shape.to_vec(), data }
    }

    pub(super) fn new(tensor: &model::Tensor) -> Grid {
        let data = tensor.to_vec::<f32>().unwrap_or_default();
        Grid { shape: tensor.shape().to_vec(), data: data.into_iter().map(f64::from).collect() }
    }

    pub(super) fn at(&self, index: &[usize]) -> f64 {
        let offset = index.iter().zip(&self.shape).fold(0, |offset, (&i, &size)| offset * size + i);
        self.data[offset]
    }

    pub(super) fn map(&self, f: impl Fn(f64) -> f64) -> Grid {
        Grid { shape: self.shape.clone(), data: self.data.iter().map(|&x| f(x)).collect() }
    }
}

/// `a @ b` for matrices, or one matrix `b` for a batch of `a`.
pub(super) fn matmul(a: &Grid, b: &Grid) -> Grid {
    let (depth, columns) = (b.shape[0], b.shape[1]);
    let mut shape = a.shape.clone();
    let last = shape.len() - 1;
    shape[last] = columns;
    Grid::fill(&shape, |index| {
        let mut at = index.to_vec();
        (0..depth)
            .map(|k| {
                at[last] = k;
                a.at(&at) * b.at(&[k, index[last]])
            })
            .sum()
    })
}

/// A 2-D convolution with equal strides and borders in both dimensions.
pub(super) fn conv(
    x: &Grid,
    weight: &Grid,
    bias: &Grid,
    stride: usize,
    pad: usize,
    groups: usize,
) -> Grid {
    let (h, w) = (x.shape[2], x.shape[3]);
    let (kh, kw) = (weight.shape[2], weight.shape[3]);
    let extent = |size: usize, kernel: usize| (size + 2 * pad - kernel) / stride + 1;
    let shape = [x.shape[0], weight.shape[0], extent(h, kh), extent(w, kw)];
    let per_group = weight.shape[0] / groups;
    Grid::fill(&shape, |index| {
        let mut sum = bias.at(&[index[1]]);
        for c in 0..weight.shape[1] {
            for (dy, dx) in (0..kh).flat_map(|dy| (0..kw).map(move |dx| (dy, dx))) {
                let (y, z) = (index[2] * stride + dy, index[3] * stride + dx);
                if (pad..h + pad).contains(&y) && (pad..w + pad).contains(&z) {
                    let channel = index[1] / per_group * weight.shape[1] + c;
                    let pixel = x.at(&[index[0], channel, y - pad, z - pad]);
                    sum += pixel * weight.at(&[index[1], c, dy, dx]);
                }
            }
        }
        sum
    })
}

/// A 2-D pooling with equal kernels, strides and borders in both dimensions; `fold` gets the pixels
/// inside the image.
pub(super) fn pool(
    x: &Grid,
    kernel: usize,
    stride: usize,
    pad: usize,
    fold: impl Fn(&[f64]) -> f64,
) -> Grid {
    let (h, w) = (x.shape[2], x.shape[3]);
    let extent = |size: usize| (size + 2 * pad - kernel) / stride + 1;
    Grid::fill(&[x.shape[0], x.shape[1], extent(h), extent(w)], |index| {
        let mut pixels = Vec::new();
        for (dy, dx) in (0..kernel).flat_map(|dy| (0..kernel).map(move |dx| (dy, dx))) {
            let (y, z) = (index[2] * stride + dy, index[3] * stride + dx);
            if (pad..h + pad).contains(&y) && (pad..w + pad).contains(&z) {
                pixels.push(x.at(&[index[0], index[1], y - pad, z - pad]));
            }
        }
        fold(&pixels)
    })
}

/// Applies `f` to every innermost row.
pub(super) fn rows(x: &Grid, f: impl Fn(&[f64]) -> Vec<f64>) -> Grid {
    let width = x.shape[x.shape.len() - 1];
    Grid { shape: x.shape.clone(), data: x.data.chunks(width).flat_map(f).collect() }
}
