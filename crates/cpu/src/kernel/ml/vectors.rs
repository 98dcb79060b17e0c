//! Support vector machines.

use model::op::{Svm, SvmKernel};

use crate::buffer::Buffer;
use crate::kernel::operand::{Element, integer_list, output_len, sizes};
use crate::kernel::wide::{from_singles, singles};
use crate::kernel::{Inputs, Kernel, KernelError, KernelResult, Outputs, StepFacts, invalid};
use crate::yield_point;

/// The most classes: their pairs are compared.
const MAX_CLASSES: usize = 4096;

/// Steps towards the probabilities of several classes, and when they are close enough.
const MAX_STEPS: usize = 100;
const CLOSE: f64 = 0.005;

pub(super) fn build(_: &StepFacts, svm: Svm) -> Result<Kernel, KernelError> {
    Ok(Kernel::new(move |_, inputs| run(&inputs, svm)))
}

fn compared(kernel: SvmKernel, a: &[f32], b: &[f32]) -> f64 {
    let pairs = || a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let dot = || pairs().map(|(a, b)| a * b).sum::<f64>();
    match kernel {
        SvmKernel::Linear => dot(),
        SvmKernel::Polynomial { gamma, offset, degree } => {
            (f64::from(gamma) * dot() + f64::from(offset)).powf(f64::from(degree))
        }
        SvmKernel::Radial { gamma } => {
            (-f64::from(gamma) * pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>()).exp()
        }
        SvmKernel::Sigmoid { gamma, offset } => {
            (f64::from(gamma) * dot() + f64::from(offset)).tanh()
        }
    }
}

fn run(inputs: &Inputs, svm: Svm) -> KernelResult {
    let value = inputs.get(0)?;
    let (rows, columns) = super::table(value)?;
    let (vectors, width) = super::table(inputs.get(1)?)?;
    if width != columns {
        return Err(invalid!("{columns} features for support vectors of {width}"));
    }
    let (x, support) = (singles(value)?, singles(inputs.get(1)?)?);
    let (coefficients, rho) = (singles(inputs.get(2)?)?, singles(inputs.get(3)?)?);
    let machine = Machine::new(inputs, svm, vectors, &coefficients, &rho)?;
    let outputs = machine.outputs();
    let mut out: Buffer<f32> = Buffer::with_capacity(output_len(&[rows, outputs])?)?;
    let mut products = Buffer::filled(vectors, 0f64)?;
    let mut votes = Buffer::filled(output_len(&[rows, svm.classes])?, 0f32)?;
    let mut ballots = votes.chunks_mut(svm.classes.max(1));
    for row in x.chunks_exact(columns.max(1)).take(rows) {
        yield_point::did_work(vectors * columns);
        for (slot, vector) in products.iter_mut().zip(support.chunks_exact(columns.max(1))) {
            *slot = compared(svm.kernel, row, vector);
        }
        machine.row(&products, &mut out, ballots.next().unwrap_or_default())?;
    }
    let scores = from_singles(&[rows, outputs], out, value.dtype())?;
    Ok(Outputs::from_iter([scores, f32::wrap(&[rows, svm.classes], votes)]))
}

/// What is known of a machine beside its vectors.
struct Machine<'a> {
    svm: Svm,
    coefficients: &'a [f32],
    rho: &'a [f32],
    /// First vector of each class, and the end.
    starts: Vec<usize>,
    vectors: usize,
    probability: Option<(Buffer<f32>, Buffer<f32>)>,
}

impl Machine<'_> {
    fn new<'a>(
        inputs: &Inputs,
        svm: Svm,
        vectors: usize,
        coefficients: &'a [f32],
        rho: &'a [f32],
    ) -> Result<Machine<'a>, KernelError> {
        let classes = svm.classes;
        let mut starts = vec![0usize];
        let mut probability = None;
        let pairs = classes * classes.saturating_sub(1) / 2;
        if classes > 0 {
            for size in sizes(&integer_list(inputs, 6)?)? {
                starts.push(starts[starts.len() - 1].saturating_add(size));
            }
            if let (Some(a), Some(b)) = (inputs.optional(4), inputs.optional(5)) {
                probability = Some((singles(a)?, singles(b)?));
            }
        }
        let fits = match classes {
            0 => coefficients.len() == vectors && !rho.is_empty(),
            _ => {
                classes <= MAX_CLASSES
                    && starts.len() == classes + 1
                    && starts[classes] == vectors
                    && coefficients.len() == (classes - 1) * vectors
                    && rho.len() >= pairs
                    && probability
                        .as_ref()
                        .is_none_or(|(a, b)| a.len() >= pairs && b.len() >= pairs)
            }
        };
        match fits {
            true => Ok(Machine { svm, coefficients, rho, starts, vectors, probability }),
            false => Err("the lists of a support vector machine do not fit each other".into()),
        }
    }

    fn outputs(&self) -> usize {
        match (self.svm.classes, &self.probability) {
            (0, _) => 1,
            (classes, Some(_)) => classes,
            (classes, None) => classes * (classes - 1) / 2,
        }
    }

    /// Appends the scores of a row, given its products with all vectors, and counts its votes.
    fn row(
        &self,
        products: &[f64],
        out: &mut Buffer<f32>,
        votes: &mut [f32],
    ) -> Result<(), KernelError> {
        let classes = self.svm.classes;
        if classes == 0 {
            let pairs = products.iter().zip(self.coefficients);
            let sum = pairs.map(|(x, weight)| x * f64::from(*weight)).sum::<f64>();
            let score = sum + f64::from(self.rho[0]);
            let sign = if score > 0.0 { 1.0 } else { -1.0 };
            out.extend([if self.svm.one_class { sign } else { score as f32 }]);
            return Ok(());
        }
        let pairs = classes * (classes - 1) / 2;
        let mut scores = Buffer::with_capacity(pairs)?;
        for first in 0..classes {
            for second in first + 1..classes {
                let score = self.pair(products, first, second, scores.len());
                votes[if score > 0.0 { first } else { second }] += 1.0;
                scores.push(score)?;
            }
        }
        match &self.probability {
            None => out.extend(scores.iter().map(|x| *x as f32)),
            Some((a, b)) => out.extend(self.coupled(&scores, a, b)?.iter().map(|x| *x as f32)),
        }
        Ok(())
    }

    /// How much a row is of the first class rather than of the second.
    fn pair(&self, products: &[f64], first: usize, second: usize, pair: usize) -> f64 {
        let sum = |class: usize, line: usize| -> f64 {
            let range = self.starts[class]..self.starts[class + 1];
            let weights = &self.coefficients[line * self.vectors..][range.clone()];
            products[range].iter().zip(weights).map(|(x, weight)| x * f64::from(*weight)).sum()
        };
        sum(first, second - 1) + sum(second, first) + f64::from(self.rho[pair])
    }

    /// The probabilities of all classes from those of every pair, by the method of Wu, Lin and
    /// Weng that LIBSVM uses.
    fn coupled(&self, scores: &[f64], a: &[f32], b: &[f32]) -> Result<Buffer<f64>, KernelError> {
        let classes = self.svm.classes;
        let mut against = Buffer::filled(classes * classes, 0.0)?;
        let mut pair = 0;
        for first in 0..classes {
            for second in first + 1..classes {
                let inner = scores[pair] * f64::from(a[pair]) + f64::from(b[pair]);
                let chance = 1.0 / (1.0 + inner.exp());
                let chance = chance.clamp(1e-7, 1.0 - 1e-7);
                against[first * classes + second] = chance;
                against[second * classes + first] = 1.0 - chance;
                pair += 1;
            }
        }
        let mut q = Buffer::filled(classes * classes, 0.0)?;
        for row in 0..classes {
            for column in (0..classes).filter(|column| *column != row) {
                let back = against[column * classes + row];
                q[row * classes + row] += back * back;
                q[row * classes + column] = -back * against[row * classes + column];
            }
        }
        let mut p = Buffer::filled(classes, 1.0 / classes as f64)?;
        for _ in 0..MAX_STEPS.max(classes) {
            let mut product: Vec<f64> = q
                .chunks_exact(classes)
                .map(|row| row.iter().zip(&p).map(|(q, p)| q * p).sum())
                .collect();
            let mut total: f64 = p.iter().zip(&product).map(|(p, x)| p * x).sum();
            let error = product.iter().map(|x| (x - total).abs()).fold(0.0, f64::max);
            if error < CLOSE / classes as f64 {
                break;
            }
            for class in 0..classes {
                let own = q[class * classes + class];
                let change = (total - product[class]) / own;
                p[class] += change;
                let scale = 1.0 + change;
                total = (total + change * (change * own + 2.0 * product[class])) / scale / scale;
                for other in 0..classes {
                    product[other] = (product[other] + change * q[class * classes + other]) / scale;
                    p[other] /= scale;
                }
            }
        }
        Ok(p)
    }
}
