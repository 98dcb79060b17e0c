//! Random numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use base::Random;
use model::DataType;
use model::op::{Distribution, Draw};

use super::operand::{dtype_of, integer_list, one, output_len, sizes};
use super::wide::{from_reals, reals};
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::yield_point;

/// Seeds of runs whose operator has none: every run gets another.
static RUNS: AtomicU64 = AtomicU64::new(1);

pub(crate) fn build(facts: &StepFacts, draw: Draw) -> Result<Kernel, KernelError> {
    if dtype_of(facts, 0)? == DataType::String || draw.dtype == DataType::String {
        return Err(no_kernel(facts));
    }
    Ok(Kernel::new(move |_, inputs| {
        let seed = match draw.seed {
            Some(seed) => u64::from(seed),
            None => RUNS.fetch_add(1, Ordering::Relaxed) << 32,
        };
        run(&inputs, draw, Random::new(seed))
    }))
}

fn run(inputs: &Inputs, draw: Draw, mut random: Random) -> KernelResult {
    match draw.distribution {
        Distribution::Uniform { low, high } => {
            let (low, high) = (f64::from(low), f64::from(high));
            filled(inputs, draw.dtype, || low + (high - low) * random.unit_f64())
        }
        Distribution::Normal { mean, scale } => {
            let (mean, scale) = (f64::from(mean), f64::from(scale));
            filled(inputs, draw.dtype, || mean + scale * normal(&mut random))
        }
        Distribution::Bernoulli => {
            let value = inputs.get(0)?;
            let mut data = reals(value)?;
            yield_point::did_work(data.len() * 4);
            for x in data.iter_mut() {
                *x = f64::from(u8::from(random.unit_f64() < *x));
            }
            one(from_reals(value.shape(), data, draw.dtype)?)
        }
        Distribution::Multinomial { count } => multinomial(inputs, draw.dtype, count, &mut random),
    }
}

/// A number of a normal distribution, by the transform of Box and Muller.
fn normal(random: &mut Random) -> f64 {
    let radius = (-2.0 * (1.0 - random.unit_f64()).ln()).sqrt();
    radius * (2.0 * std::f64::consts::PI * random.unit_f64()).cos()
}

fn filled(inputs: &Inputs, dtype: DataType, mut next: impl FnMut() -> f64) -> KernelResult {
    let shape = sizes(&integer_list(inputs, 0)?)?;
    let mut data = Buffer::filled(output_len(&shape)?, 0f64)?;
    for part in data.chunks_mut(4096) {
        yield_point::did_work(part.len() * 20);
        part.iter_mut().for_each(|slot| *slot = next());
    }
    one(from_reals(&shape, data, dtype)?)
}

fn multinomial(
    inputs: &Inputs,
    dtype: DataType,
    count: usize,
    random: &mut Random,
) -> KernelResult {
    let value = inputs.get(0)?;
    let &[rows, columns] = value.shape() else {
        return Err(invalid!("weights of shape {:?}", value.shape()));
    };
    if columns == 0 && rows * count > 0 {
        return Err("no columns to draw from".into());
    }
    let logarithms = reals(value)?;
    let mut data: Buffer<f64> = Buffer::with_capacity(output_len(&[rows, count])?)?;
    let mut sums = Buffer::filled(columns, 0f64)?;
    for row in logarithms.chunks(columns.max(1)) {
        let highest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut total = 0.0;
        for (sum, x) in sums.iter_mut().zip(row) {
            total += (x - highest).exp();
            *sum = total;
        }
        yield_point::did_work(columns * 10 + count * 20);
        for _ in 0..count {
            let at = random.unit_f64() * total;
            let column = sums.partition_point(|sum| *sum <= at).min(columns - 1);
            data.extend([column as f64]);
        }
    }
    one(from_reals(&[rows, count], data, dtype)?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::run;
    use super::super::testing::*;
    use super::*;
    use model::op::Op;

    fn drawn(distribution: Distribution, seed: Option<u32>, x: model::Tensor) -> Vec<f32> {
        values(&run(Op::Draw(Draw { distribution, dtype: DataType::F32, seed }), &[x])[0])
    }

    #[test]
    fn seeds_repeat_and_runs_without_one_differ() {
        let normal = Distribution::Normal { mean: 3.0, scale: 2.0 };
        let of = |seed| drawn(normal, seed, integers(&[1], &[10_000]));
        assert_eq!(of(Some(1)), of(Some(1)));
        assert_ne!(of(Some(1)), of(Some(2)));
        assert_ne!(of(None), of(None));
        let data = of(Some(7));
        let mean = data.iter().sum::<f32>() / 1e4;
        let spread = (data.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 1e4).sqrt();
        assert!((mean - 3.0).abs() < 0.1 && (spread - 2.0).abs() < 0.1, "{mean} {spread}");
    }

    #[test]
    fn probabilities_are_respected() {
        let x = floats(&[1000], &[0.2; 1000]);
        let ones = drawn(Distribution::Bernoulli, Some(1), x).iter().sum::<f32>();
        assert!((130.0..270.0).contains(&ones), "{ones}");
        let x = floats(&[1, 3], &[f32::NEG_INFINITY, 0.0, 3f32.ln()]);
        let columns = drawn(Distribution::Multinomial { count: 1000 }, Some(3), x);
        let twos = columns.iter().filter(|x| **x == 2.0).count();
        assert!(!columns.contains(&0.0) && (650..850).contains(&twos), "{twos}");
        let bad = Op::Draw(Draw {
            distribution: Distribution::Uniform { low: 0.0, high: 1.0 },
            dtype: DataType::F32,
            seed: None,
        });
        assert!(!error(bad, &[integers(&[2], &[i64::MAX, 2])]).is_empty());
    }
}
