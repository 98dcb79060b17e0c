//! Ranges of activations from samples, and the error of what a quantized model computes.

use model::Tensor;

use super::ActivationRange;
use crate::content;

/// Bins of a histogram.
const BINS: usize = 2048;

/// Steps of a byte without its sign.
const LEVELS: usize = 128;

/// How the range of an activation is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RangeMethod {
    /// The least and the largest number.
    Max,
    /// Between them, so that this percentage of all numbers is not saturated.
    Percentile(f64),
    /// As far as the distribution of the bytes differs least from that of the numbers (relative
    /// entropy).
    Entropy,
}

/// Observes the numbers of one activation: all samples once for the extremes, and again for their
/// distribution.
#[derive(Clone, Debug)]
pub struct RangeObserver {
    low: f32,
    high: f32,
    seen: bool,
    /// From the least to the largest number.
    bins: Vec<u64>,
    /// Of magnitudes, from zero.
    magnitudes: Vec<u64>,
}

impl Default for RangeObserver {
    fn default() -> Self {
        let (bins, magnitudes) = (vec![0; BINS], vec![0; BINS]);
        RangeObserver { low: 0.0, high: 0.0, seen: false, bins, magnitudes }
    }
}

impl RangeObserver {
    /// Takes the extremes into account; fails for a number that is not finite.
    pub fn observe(&mut self, values: &[f32]) -> Result<(), String> {
        for value in values {
            if !value.is_finite() {
                return Err(format!("a sample gives {value}"));
            }
            self.low = self.low.min(*value);
            self.high = self.high.max(*value);
        }
        self.seen |= !values.is_empty();
        Ok(())
    }

    /// Counts numbers between the extremes that were observed.
    pub fn count(&mut self, values: &[f32]) {
        let (low, width) = (f64::from(self.low), f64::from(self.high) - f64::from(self.low));
        let most = self.most();
        for value in values {
            let bin = |at: f64| ((at * BINS as f64) as usize).min(BINS - 1);
            if width > 0.0 {
                self.bins[bin((f64::from(*value) - low) / width)] += 1;
                self.magnitudes[bin(f64::from(value.abs()) / most)] += 1;
            }
        }
    }

    fn most(&self) -> f64 {
        f64::from(self.high.max(-self.low))
    }

    /// The range; `None` if no number was observed.
    pub fn range(&self, method: RangeMethod) -> Option<ActivationRange> {
        let whole = ActivationRange { low: self.low, high: self.high };
        if !self.seen || self.high <= self.low {
            return self.seen.then_some(whole);
        }
        Some(match method {
            RangeMethod::Max => whole,
            RangeMethod::Percentile(percent) => self.percentile(percent),
            RangeMethod::Entropy => {
                let most = (self.threshold() * self.most()) as f32;
                ActivationRange { low: self.low.max(-most), high: self.high.min(most) }
            }
        })
    }

    fn percentile(&self, percent: f64) -> ActivationRange {
        let all: u64 = self.bins.iter().sum();
        let cut = (all as f64 * (1.0 - percent / 100.0) / 2.0) as u64;
        let width = (f64::from(self.high) - f64::from(self.low)) / BINS as f64;
        // How many bins at one end hold no more than what is cut.
        let end = |counts: Vec<u64>| {
            let mut before = 0;
            let beyond = |count: &u64| {
                before += count;
                before > cut
            };
            counts.iter().position(beyond).unwrap_or(0)
        };
        let first = end(self.bins.clone());
        let last = end(self.bins.iter().rev().copied().collect());
        let low = f64::from(self.low) + first as f64 * width;
        let high = f64::from(self.high) - last as f64 * width;
        ActivationRange { low: low.min(0.0) as f32, high: high.max(0.0) as f32 }
    }

    /// The share of the largest magnitude beyond which numbers are saturated.
    fn threshold(&self) -> f64 {
        let mut best = (f64::INFINITY, BINS);
        for end in (LEVELS..=BINS).step_by(LEVELS / 8) {
            let distance = relative_entropy(&self.magnitudes, end);
            if distance < best.0 {
                best = (distance, end);
            }
        }
        best.1 as f64 / BINS as f64
    }
}

/// How the numbers up to bin `end`, the others saturated to it, differ from their bytes.
fn relative_entropy(bins: &[u64], end: usize) -> f64 {
    let beyond: u64 = bins[end..].iter().sum();
    let mut numbers: Vec<f64> = bins[..end].iter().map(|count| *count as f64).collect();
    let all = numbers.iter().sum::<f64>() + beyond as f64;
    let kept = numbers.iter().sum::<f64>();
    if kept == 0.0 {
        return f64::INFINITY;
    }
    let mut bytes = vec![0.0; end];
    for level in 0..LEVELS {
        let (first, last) = (level * end / LEVELS, (level + 1) * end / LEVELS);
        let filled = numbers[first..last].iter().filter(|count| **count > 0.0).count();
        let sum: f64 = numbers[first..last].iter().sum();
        for bin in first..last {
            if numbers[bin] > 0.0 {
                bytes[bin] = sum / filled as f64 / kept;
            }
        }
    }
    numbers[end - 1] += beyond as f64;
    let terms = numbers.iter().zip(&bytes).filter(|(number, _)| **number > 0.0);
    // A number without a byte of its own is as far away as the least probable one.
    let least = 1.0 / (2.0 * all);
    terms.map(|(number, byte)| number / all * (number / all / byte.max(least)).ln()).sum()
}

/// How the outputs of two models differ, over all samples.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputError {
    max: f64,
    sum: f64,
    signal: f64,
    noise: f64,
    count: u64,
    rows: u64,
    agreeing: u64,
}

impl OutputError {
    /// Compares the results of one sample; fails if they have other shapes or no numbers.
    pub fn add(&mut self, expected: &Tensor, got: &Tensor) -> Result<(), String> {
        if expected.shape() != got.shape() {
            return Err(format!("shapes {:?} and {:?}", expected.shape(), got.shape()));
        }
        let numbers = |tensor: &Tensor| -> Option<Vec<f64>> {
            if let Some(floats) = content::floats(tensor) {
                return Some(floats.into_iter().map(f64::from).collect());
            }
            Some(content::ints(tensor)?.into_iter().map(|value| value as f64).collect())
        };
        let (Some(expected_numbers), Some(got)) = (numbers(expected), numbers(got)) else {
            return Err("an output is not of numbers".to_string());
        };
        for (want, got) in expected_numbers.iter().zip(&got) {
            let error = (want - got).abs();
            self.max = self.max.max(error);
            self.sum += error;
            self.signal += want * want;
            self.noise += error * error;
        }
        self.count += got.len() as u64;
        let row = expected.shape().last().copied().unwrap_or(1).max(1);
        if row > 1 {
            for (want, got) in expected_numbers.chunks(row).zip(got.chunks(row)) {
                self.rows += 1;
                self.agreeing += u64::from(largest(want) == largest(got));
            }
        }
        Ok(())
    }

    /// The largest difference.
    pub fn max(&self) -> f64 {
        self.max
    }

    /// The mean of all differences.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// Signal to noise in decibels; `None` without noise.
    pub fn signal_to_noise_db(&self) -> Option<f64> {
        (self.noise > 0.0).then(|| 10.0 * (self.signal / self.noise).log10())
    }

    /// The share of rows (along the last dimension) whose largest number is at the same place;
    /// `None` where rows have one number.
    pub fn top1_agreement(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.agreeing as f64 / self.rows as f64)
    }
}

fn largest(row: &[f64]) -> usize {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(values: &[f32]) -> RangeObserver {
        let mut observer = RangeObserver::default();
        observer.observe(values).unwrap();
        observer.count(values);
        observer
    }

    /// A bell of many numbers, and one far away.
    fn bell() -> Vec<f32> {
        let mut values: Vec<f32> = (0..20_000)
            .map(|i| {
                let uniform = |k: u32| {
                    let mixed = (i as u32 * 12 + k).wrapping_mul(2_654_435_761);
                    (mixed ^ mixed >> 15).wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32
                };
                (0..12).map(uniform).sum::<f32>() - 6.0
            })
            .collect();
        values.push(100.0);
        values
    }

    #[test]
    fn ranges_leave_out_what_is_rare() {
        let observer = observed(&bell());
        let max = observer.range(RangeMethod::Max).unwrap();
        assert_eq!(max.high, 100.0);
        for method in [RangeMethod::Percentile(99.9), RangeMethod::Entropy] {
            let range = observer.range(method).unwrap();
            assert!(range.high > 2.0 && range.high < 20.0, "{method:?} {range:?}");
            assert!(range.low < -2.0 && range.low >= max.low, "{method:?} {range:?}");
        }
    }

    #[test]
    fn ranges_of_few_numbers_contain_zero() {
        for method in [RangeMethod::Max, RangeMethod::Percentile(99.0), RangeMethod::Entropy] {
            assert_eq!(RangeObserver::default().range(method), None);
            let flat = observed(&[0.0, 0.0]).range(method).unwrap();
            assert_eq!((flat.low, flat.high), (0.0, 0.0));
            let positive = observed(&[3.0, 4.0]).range(method).unwrap();
            assert!(positive.low == 0.0 && positive.high > 0.0, "{positive:?}");
        }
        assert!(RangeObserver::default().observe(&[f32::NAN]).is_err());
    }

    #[test]
    fn errors_are_counted_over_all_samples() {
        let tensor = |values: &[f32]| Tensor::from_vec(vec![1, 3], values.to_vec()).unwrap();
        let mut error = OutputError::default();
        error.add(&tensor(&[1.0, 2.0, 3.0]), &tensor(&[1.0, 2.5, 3.0])).unwrap();
        error.add(&tensor(&[1.0, 2.0, 3.0]), &tensor(&[4.0, 2.0, 3.0])).unwrap();
        assert_eq!((error.max(), error.top1_agreement()), (3.0, Some(0.5)));
        assert!((error.mean() - 3.5 / 6.0).abs() < 1e-9);
        assert!(
            error
                .add(&tensor(&[1.0; 3]), &Tensor::from_vec(vec![3], vec![1f32; 3]).unwrap())
                .is_err()
        );
    }
}
