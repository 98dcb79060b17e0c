//! Fourier transforms of any length: by small prime factors, or by a convolution.

use crate::buffer::Buffer;
use crate::kernel::KernelError;

/// Lengths with larger prime factors become convolutions.
const MAX_FACTOR: usize = 31;

/// A complex number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Complex {
    pub(super) re: f64,
    pub(super) im: f64,
}

impl Complex {
    fn add(self, other: Complex) -> Complex {
        Complex { re: self.re + other.re, im: self.im + other.im }
    }

    fn mul(self, other: Complex) -> Complex {
        Complex {
            re: self.re * other.re - self.im * other.im,
            im: self.re * other.im + self.im * other.re,
        }
    }

    fn conjugate(self) -> Complex {
        Complex { re: self.re, im: -self.im }
    }

    fn scale(self, by: f64) -> Complex {
        Complex { re: self.re * by, im: self.im * by }
    }
}

/// `exp(-2 pi i k / n)`.
fn root(k: usize, n: usize) -> Complex {
    let angle = -2.0 * std::f64::consts::PI * k as f64 / n as f64;
    Complex { re: angle.cos(), im: angle.sin() }
}

/// A transform of one length.
pub(super) struct Transform {
    length: usize,
    inverse: bool,
    method: Method,
}

enum Method {
    Factors(Factored),
    Convolution(Box<Convolution>),
}

/// A transform by the prime factors of its length.
struct Factored {
    factors: Vec<usize>,
    roots: Buffer<Complex>,
}

/// Bluestein's algorithm: a transform as a convolution of a length that is a power of two.
struct Convolution {
    inner: Factored,
    chirp: Buffer<Complex>,
    filter: Buffer<Complex>,
}

fn factors_of(mut n: usize) -> Vec<usize> {
    let mut factors = Vec::new();
    let mut factor = 2;
    while n > 1 && factor <= MAX_FACTOR {
        while n.is_multiple_of(factor) {
            factors.push(factor);
            n /= factor;
        }
        factor += 1;
    }
    if n > 1 {
        factors.push(n);
    }
    factors
}

impl Factored {
    fn new(length: usize) -> Result<Factored, KernelError> {
        let roots = Buffer::collect((0..length).map(|k| root(k, length)))?;
        Ok(Factored { factors: factors_of(length), roots })
    }

    /// The transform of `input` at steps of `stride`, into `out`; `depth` factors are done.
    fn run(&self, input: &[Complex], stride: usize, depth: usize, out: &mut [Complex]) {
        let n = out.len();
        let Some(&factor) = self.factors.get(depth) else {
            if let (Some(slot), Some(first)) = (out.first_mut(), input.first()) {
                *slot = *first;
            }
            return;
        };
        let part = n / factor;
        for (offset, piece) in out.chunks_exact_mut(part).enumerate() {
            self.run(&input[offset * stride..], stride * factor, depth + 1, piece);
        }
        let step = self.roots.len() / n;
        let mut terms = [Complex::default(); MAX_FACTOR];
        for k in 0..part {
            for (offset, term) in terms[..factor].iter_mut().enumerate() {
                *term = out[offset * part + k].mul(self.roots[offset * k * step]);
            }
            if factor == 2 {
                let (a, b) = (terms[0], terms[1]);
                out[k] = a.add(b);
                out[part + k] = a.add(b.scale(-1.0));
                continue;
            }
            for place in 0..factor {
                let turn = self.roots.len() / factor * place;
                let sum = terms[..factor].iter().enumerate().fold(
                    Complex::default(),
                    |sum, (index, term)| {
                        sum.add(term.mul(self.roots[index * turn % self.roots.len()]))
                    },
                );
                out[place * part + k] = sum;
            }
        }
    }
}

impl Convolution {
    fn new(length: usize) -> Result<Convolution, KernelError> {
        let size = (2 * length - 1).next_power_of_two();
        // The squares are taken modulo twice the length, so that angles stay exact.
        let angle = |k: usize| (k as u128 * k as u128 % (2 * length) as u128) as usize;
        let chirp = Buffer::collect((0..length).map(|k| root(angle(k), 2 * length)))?;
        let mut reversed = Buffer::filled(size, Complex::default())?;
        for k in 0..length {
            reversed[k] = chirp[k].conjugate();
            reversed[(size - k) % size] = chirp[k].conjugate();
        }
        let inner = Factored::new(size)?;
        let mut filter = Buffer::filled(size, Complex::default())?;
        inner.run(&reversed, 1, 0, &mut filter);
        Ok(Convolution { inner, chirp, filter })
    }

    fn run(&self, line: &mut [Complex]) -> Result<(), KernelError> {
        let size = self.filter.len();
        let mut padded = Buffer::filled(size, Complex::default())?;
        let mut spectrum = Buffer::filled(size, Complex::default())?;
        for ((slot, x), chirp) in padded.iter_mut().zip(line.iter()).zip(&self.chirp) {
            *slot = x.mul(*chirp);
        }
        self.inner.run(&padded, 1, 0, &mut spectrum);
        for (slot, filter) in spectrum.iter_mut().zip(&self.filter) {
            *slot = slot.mul(*filter).conjugate();
        }
        self.inner.run(&spectrum, 1, 0, &mut padded);
        for ((slot, x), chirp) in line.iter_mut().zip(&padded).zip(&self.chirp) {
            *slot = x.conjugate().scale(1.0 / size as f64).mul(*chirp);
        }
        Ok(())
    }
}

impl Transform {
    pub(super) fn new(length: usize, inverse: bool) -> Result<Transform, KernelError> {
        let smooth = factors_of(length).iter().all(|factor| *factor <= MAX_FACTOR);
        let method = match smooth {
            true => Method::Factors(Factored::new(length)?),
            false => Method::Convolution(Box::new(Convolution::new(length)?)),
        };
        Ok(Transform { length, inverse, method })
    }

    /// About how long one transform takes.
    pub(super) fn work_ns(&self) -> usize {
        let factor = if matches!(self.method, Method::Convolution(_)) { 12 } else { 3 };
        self.length * (usize::BITS - self.length.leading_zeros()) as usize * factor
    }

    /// Transforms `line`, which has the transform's length.
    pub(super) fn run(&self, line: &mut [Complex]) -> Result<(), KernelError> {
        if self.inverse {
            line.iter_mut().for_each(|x| *x = x.conjugate());
        }
        match &self.method {
            Method::Factors(factored) => {
                let input = Buffer::copy_of(line)?;
                factored.run(&input, 1, 0, line);
            }
            Method::Convolution(convolution) => convolution.run(line)?,
        }
        if self.inverse {
            let by = 1.0 / self.length as f64;
            line.iter_mut().for_each(|x| *x = x.conjugate().scale(by));
        }
        Ok(())
    }
}
