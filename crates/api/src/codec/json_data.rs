//! Tensor data as JSON: an array, nested or flat, of numbers, booleans or strings.
//!
//! The element type may be named only after the data, so values are first collected in the
//! narrowest form that holds them all exactly, and converted once the type is known.

use std::fmt;

use bytes::Bytes;
use half::{bf16, f16};
use model::{DataType, Tensor};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};

use super::MAX_RANK;
use crate::error::{ApiError, ApiResult};
use crate::fallible::{OUT_OF_MEMORY, converted, copied, push};

/// The values of one `data` field, flattened in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum JsonData {
    /// No value yet.
    Empty,
    /// Booleans, as 0 and 1.
    Bools(Vec<u8>),
    /// Whole numbers.
    Signed(Vec<i64>),
    /// Whole numbers of which one exceeds `i64`.
    Unsigned(Vec<u64>),
    /// Numbers of which one has a fraction.
    Floats(Vec<f64>),
    /// Text.
    Strings(Vec<Bytes>),
}

impl<'de> Deserialize<'de> for JsonData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut data = JsonData::Empty;
        Collector { data: &mut data, depth: 0 }.deserialize(deserializer)?;
        Ok(data)
    }
}

struct Collector<'a> {
    data: &'a mut JsonData,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Collector<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

const MIXED: &str = "numbers, booleans and strings are mixed in one tensor";

/// Appends `value`; the error of a decoder says when there is not enough memory.
fn append<T, E: Error>(values: &mut Vec<T>, value: T) -> Result<(), E> {
    push(values, value).map_err(|_| E::custom(OUT_OF_MEMORY))
}

/// The values in another form, and `last`.
fn widened<V: Copy, T, E: Error>(
    values: &[V],
    widen: impl Fn(V) -> T,
    last: T,
) -> Result<Vec<T>, E> {
    let mut wide = Vec::new();
    wide.try_reserve(values.len() + 1).map_err(|_| E::custom(OUT_OF_MEMORY))?;
    wide.extend(values.iter().map(|&value| widen(value)));
    wide.push(last);
    Ok(wide)
}

impl<'de> Visitor<'de> for Collector<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers, booleans or strings in arrays")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        if self.depth == MAX_RANK {
            return Err(A::Error::custom(format!("data is nested deeper than {MAX_RANK}")));
        }
        let depth = self.depth + 1;
        while seq.next_element_seed(Collector { data: self.data, depth })?.is_some() {}
        Ok(())
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        match self.data {
            JsonData::Bools(values) => append(values, u8::from(value))?,
            JsonData::Empty => *self.data = JsonData::Bools(vec![u8::from(value)]),
            _ => return Err(E::custom(MIXED)),
        }
        Ok(())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        match self.data {
            JsonData::Signed(values) => append(values, value)?,
            JsonData::Floats(values) => append(values, value as f64)?,
            JsonData::Empty => *self.data = JsonData::Signed(vec![value]),
            JsonData::Unsigned(values) => match u64::try_from(value) {
                Ok(value) => append(values, value)?,
                Err(_) => {
                    let floats = widened(values, |v| v as f64, value as f64)?;
                    *self.data = JsonData::Floats(floats);
                }
            },
            _ => return Err(E::custom(MIXED)),
        }
        Ok(())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        if let Ok(value) = i64::try_from(value) {
            return self.visit_i64(value);
        }
        match self.data {
            JsonData::Unsigned(values) => append(values, value)?,
            JsonData::Floats(values) => append(values, value as f64)?,
            JsonData::Empty => *self.data = JsonData::Unsigned(vec![value]),
            JsonData::Signed(values) if values.iter().all(|&v| v >= 0) => {
                *self.data = JsonData::Unsigned(widened(values, |v| v as u64, value)?);
            }
            JsonData::Signed(_) => return self.visit_f64(value as f64),
            _ => return Err(E::custom(MIXED)),
        }
        Ok(())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        let floats = match self.data {
            JsonData::Floats(values) => return append(values, value),
            JsonData::Empty => vec![value],
            JsonData::Signed(values) => widened(values, |v| v as f64, value)?,
            JsonData::Unsigned(values) => widened(values, |v| v as f64, value)?,
            _ => return Err(E::custom(MIXED)),
        };
        *self.data = JsonData::Floats(floats);
        Ok(())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        let value = copied(value.as_bytes()).map_err(|_| E::custom(OUT_OF_MEMORY))?;
        match self.data {
            JsonData::Strings(values) => append(values, value)?,
            JsonData::Empty => *self.data = JsonData::Strings(vec![value]),
            _ => return Err(E::custom(MIXED)),
        }
        Ok(())
    }
}

impl JsonData {
    /// The values as elements of `dtype` in `shape`. Fails when one does not fit.
    pub fn into_tensor(self, dtype: DataType, shape: Vec<usize>) -> ApiResult<Tensor> {
        let tensor = match dtype {
            DataType::Bool => return self.into_bools(shape),
            DataType::String => return self.into_strings(shape),
            DataType::U8 => Tensor::from_vec(shape, self.integers::<u8>(dtype)?),
            DataType::U16 => Tensor::from_vec(shape, self.integers::<u16>(dtype)?),
            DataType::U32 => Tensor::from_vec(shape, self.integers::<u32>(dtype)?),
            DataType::U64 => Tensor::from_vec(shape, self.integers::<u64>(dtype)?),
            DataType::I8 => Tensor::from_vec(shape, self.integers::<i8>(dtype)?),
            DataType::I16 => Tensor::from_vec(shape, self.integers::<i16>(dtype)?),
            DataType::I32 => Tensor::from_vec(shape, self.integers::<i32>(dtype)?),
            DataType::I64 => Tensor::from_vec(shape, self.integers::<i64>(dtype)?),
            DataType::F16 => {
                Tensor::from_vec(shape, self.floats(dtype, f64::from(f16::MAX), f16::from_f64)?)
            }
            DataType::BF16 => {
                Tensor::from_vec(shape, self.floats(dtype, f64::from(bf16::MAX), bf16::from_f64)?)
            }
            DataType::F32 => {
                Tensor::from_vec(shape, self.floats(dtype, f64::from(f32::MAX), |v| v as f32)?)
            }
            DataType::F64 => Tensor::from_vec(shape, self.floats(dtype, f64::MAX, |v| v)?),
        };
        Ok(tensor?)
    }

    fn kind(&self) -> &'static str {
        match self {
            JsonData::Empty => "nothing",
            JsonData::Bools(_) => "booleans",
            JsonData::Signed(_) | JsonData::Unsigned(_) => "whole numbers",
            JsonData::Floats(_) => "numbers with fractions",
            JsonData::Strings(_) => "strings",
        }
    }

    fn wrong_kind(&self, dtype: DataType) -> ApiError {
        ApiError::invalid(format!("the datatype is {dtype}, but the data are {}", self.kind()))
    }

    fn into_bools(self, shape: Vec<usize>) -> ApiResult<Tensor> {
        let values = match self {
            JsonData::Empty => Vec::new(),
            JsonData::Bools(values) => values,
            JsonData::Signed(values) if values.iter().all(|v| matches!(v, 0 | 1)) => {
                converted(values.into_iter(), |v| Ok(v as u8))?
            }
            other => return Err(other.wrong_kind(DataType::Bool)),
        };
        Ok(Tensor::from_raw(DataType::Bool, shape, values.into())?)
    }

    fn into_strings(self, shape: Vec<usize>) -> ApiResult<Tensor> {
        match self {
            JsonData::Empty => Ok(Tensor::from_strings(shape, Vec::new())?),
            JsonData::Strings(values) => Ok(Tensor::from_strings(shape, values)?),
            other => Err(other.wrong_kind(DataType::String)),
        }
    }

    fn integers<T: TryFrom<i64> + TryFrom<u64>>(self, dtype: DataType) -> ApiResult<Vec<T>> {
        fn convert<T: TryFrom<V>, V: Copy + fmt::Display>(
            values: Vec<V>,
            dtype: DataType,
        ) -> ApiResult<Vec<T>> {
            let fits = |v: V| {
                T::try_from(v).map_err(|_| ApiError::invalid(format!("{v} does not fit {dtype}")))
            };
            converted(values.into_iter(), fits)
        }
        match self {
            JsonData::Empty => Ok(Vec::new()),
            JsonData::Signed(values) => convert(values, dtype),
            JsonData::Unsigned(values) => convert(values, dtype),
            other => Err(other.wrong_kind(dtype)),
        }
    }

    fn floats<T>(self, dtype: DataType, max: f64, convert: fn(f64) -> T) -> ApiResult<Vec<T>> {
        let fits = |v: f64| match v.abs() <= max {
            true => Ok(convert(v)),
            false => Err(ApiError::invalid(format!("{v:e} does not fit {dtype}"))),
        };
        match self {
            JsonData::Empty => Ok(Vec::new()),
            JsonData::Signed(values) => converted(values.into_iter(), |v| fits(v as f64)),
            JsonData::Unsigned(values) => converted(values.into_iter(), |v| fits(v as f64)),
            JsonData::Floats(values) => converted(values.into_iter(), fits),
            other => Err(other.wrong_kind(dtype)),
        }
    }
}
