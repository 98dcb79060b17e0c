//! Labels as other labels, and as vectors.

use std::collections::HashMap;
use std::hash::Hash;

use crate::buffer::Buffer;
use crate::kernel::operand::{Element, elements, one, output_len};
use crate::kernel::{Inputs, Kernel, KernelError, KernelResult, StepFacts, invalid};
use crate::value::{TypedTensor, Value, with_value};
use crate::yield_point;

/// Something that can be looked up.
pub(super) trait Label: Element + Clone {
    type Key: Hash + Eq + Send + Sync;

    fn key(&self) -> Self::Key;
}

macro_rules! labels {
    ($($rust:ty => $key:ty, $convert:expr);+ $(;)?) => {
        $(impl Label for $rust {
            type Key = $key;

            fn key(&self) -> $key {
                let convert: fn(&$rust) -> $key = $convert;
                convert(self)
            }
        })+
    };
}

/// The bits of a number that equals it: one for all NaN, one for both zeros.
fn float_bits(x: f64) -> u64 {
    if x.is_nan() { f64::NAN.to_bits() } else { (x + 0.0).to_bits() }
}

labels! {
    bool => bool, |x| *x;
    u8 => u8, |x| *x;
    u16 => u16, |x| *x;
    u32 => u32, |x| *x;
    u64 => u64, |x| *x;
    i8 => i8, |x| *x;
    i16 => i16, |x| *x;
    i32 => i32, |x| *x;
    i64 => i64, |x| *x;
    half::f16 => u64, |x| float_bits(x.to_f64());
    half::bf16 => u64, |x| float_bits(x.to_f64());
    f32 => u64, |x| float_bits(f64::from(*x));
    f64 => u64, |x| float_bits(*x);
    bytes::Bytes => bytes::Bytes, |x| x.clone();
}

/// Positions of `keys`; of equal ones the last counts.
fn positions<T: Label>(keys: &TypedTensor<T>) -> HashMap<T::Key, usize> {
    elements(keys).iter().enumerate().map(|(at, key)| (key.key(), at)).collect()
}

/// Where each element of `x` stands among `keys`.
fn found<T: Label>(
    x: &TypedTensor<T>,
    places: &HashMap<T::Key, usize>,
) -> Result<Buffer<Option<usize>>, KernelError> {
    yield_point::did_work(x.len().saturating_mul(30));
    Ok(Buffer::collect(elements(x).iter().map(|x| places.get(&x.key()).copied()))?)
}

/// A function that finds elements among constant keys, built once.
type Finder = Box<dyn Fn(&Value) -> Result<Buffer<Option<usize>>, KernelError> + Send + Sync>;

fn finder(keys: &Value) -> Finder {
    with_value!(keys, tensor => typed_finder(tensor))
}

fn typed_finder<T: Label>(keys: &TypedTensor<T>) -> Finder
where
    T::Key: 'static,
{
    let places = positions(keys);
    Box::new(move |x| match T::get(x) {
        Some(x) => found(x, &places),
        None => Err(invalid!("{} among keys of another type", x.dtype())),
    })
}

/// The finder of a step: of its constant keys, or made for every run.
fn with_finder(
    facts: &StepFacts,
    run: impl Fn(&Inputs, Buffer<Option<usize>>) -> KernelResult + Send + Sync + 'static,
) -> Result<Kernel, KernelError> {
    let constant = facts.constant(1).map(finder);
    Ok(Kernel::new(move |_, inputs| {
        let own;
        let find = match &constant {
            Some(find) => find,
            None => {
                own = finder(inputs.get(1)?);
                &own
            }
        };
        let places = find(inputs.get(0)?)?;
        run(&inputs, places)
    }))
}

pub(super) fn map(facts: &StepFacts) -> Result<Kernel, KernelError> {
    with_finder(facts, |inputs, places| {
        let (values, default) = (inputs.get(2)?, inputs.get(3)?);
        with_value!(values, tensor => picked(tensor, default, &places, inputs.get(0)?.shape()))
    })
}

fn picked<T: Element + Clone>(
    values: &TypedTensor<T>,
    default: &Value,
    places: &[Option<usize>],
    shape: &[usize],
) -> KernelResult {
    let default = T::get(default).and_then(|default| elements(default).first());
    let default = default.ok_or("no default of the values' type")?;
    let values = elements(values);
    let pick = |at: &Option<usize>| at.and_then(|at| values.get(at)).unwrap_or(default).clone();
    one(T::wrap(shape, Buffer::collect(places.iter().map(pick))?))
}

pub(super) fn one_hot(facts: &StepFacts, strict: bool) -> Result<Kernel, KernelError> {
    with_finder(facts, move |inputs, places| {
        let categories: usize = inputs.get(1)?.shape().iter().product();
        let shape = [inputs.get(0)?.shape(), &[categories]].concat();
        let mut out = Buffer::filled(output_len(&shape)?, 0f32)?;
        for (row, place) in out.chunks_mut(categories.max(1)).zip(&places) {
            match place {
                Some(at) => row[*at] = 1.0,
                None if strict => return Err("an element is in no category".into()),
                None => {}
            }
        }
        one(f32::wrap(&shape, out))
    })
}
