//! Constant masks that need not be read: all keys, or a causal mask.

use model::Tensor;

use super::numbers;

/// From here on, a number that is added to a score excludes it: its exponential is zero beside any
/// other.
const EXCLUDED: f32 = -1e4;

/// Which keys the queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visible {
    /// Every query sees all keys.
    All,
    /// Query `i` sees the keys up to `i` plus this.
    Causal(usize),
    /// Another mask.
    Unknown,
}

/// The pattern of a mask that broadcasts to `[.., queries, keys]`.
pub fn visible(mask: &Tensor, queries: usize, keys: usize) -> Visible {
    let shape = mask.shape();
    let columns = shape.last().copied().unwrap_or(1);
    let rows = shape.len().checked_sub(2).map_or(1, |axis| shape[axis]);
    let one_matrix = rows * columns == mask.len();
    let Some(numbers) = numbers(mask).filter(|_| !mask.is_empty()) else {
        return Visible::Unknown;
    };
    if numbers.iter().all(|number| *number == 0.0) {
        return Visible::All;
    }
    if !one_matrix || columns != keys || (rows != queries && rows != 1) {
        return Visible::Unknown;
    }
    let row = |i: usize| &numbers[i * keys..][..keys];
    let Some(offset) = row(0).iter().take_while(|number| **number == 0.0).count().checked_sub(1)
    else {
        return Visible::Unknown;
    };
    // One row for several queries is no causal mask, unless the others see no more keys.
    let causal = (rows == queries)
        && (0..rows).all(|i| {
            let seen = (i + offset + 1).min(keys);
            row(i)[..seen].iter().all(|number| *number == 0.0)
                && row(i)[seen..].iter().all(|number| *number <= EXCLUDED)
        });
    if causal { Visible::Causal(offset) } else { Visible::Unknown }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn triangle(queries: usize, keys: usize, offset: usize, hidden: f32) -> Tensor {
        let at = |n: usize| if n % keys <= n / keys + offset { 0.0 } else { hidden };
        let numbers: Vec<f32> = (0..queries * keys).map(at).collect();
        Tensor::from_vec(vec![1, 1, queries, keys], numbers).unwrap()
    }

    #[test]
    fn causal_masks_are_found_by_their_numbers() {
        for (queries, keys, offset) in [(5, 5, 0), (3, 7, 4), (3, 7, 2), (1, 4, 1), (7, 3, 0)] {
            for hidden in [f32::NEG_INFINITY, f32::MIN, -65504.0, -1e4] {
                let mask = triangle(queries, keys, offset, hidden);
                assert_eq!(visible(&mask, queries, keys), Visible::Causal(offset));
            }
        }
        assert_eq!(visible(&triangle(1, 4, 3, -1e9), 1, 4), Visible::All);
    }

    #[test]
    fn other_masks_are_read() {
        assert_eq!(visible(&triangle(5, 5, 0, -100.0), 5, 5), Visible::Unknown);
        let mut numbers = triangle(4, 4, 0, f32::MIN).to_vec::<f32>().unwrap();
        numbers[3 * 4] = f32::MIN;
        let window = Tensor::from_vec(vec![4, 4], numbers).unwrap();
        assert_eq!(visible(&window, 4, 4), Visible::Unknown);
        let row = Tensor::from_vec(vec![1, 4], vec![0.0, 0.0, f32::MIN, f32::MIN]).unwrap();
        assert_eq!(visible(&row, 4, 4), Visible::Unknown);
        let heads = Tensor::from_vec(vec![2, 1, 2], vec![0.0, -1e9, 0.0, 0.0]).unwrap();
        assert_eq!(visible(&heads, 1, 2), Visible::Unknown);
        let seen = Tensor::from_vec(vec![2, 1, 1], vec![0.0f32; 2]).unwrap();
        assert_eq!(visible(&seen, 3, 2), Visible::All);
    }
}
