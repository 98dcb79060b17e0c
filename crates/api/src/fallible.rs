//! Vectors whose length comes from outside: their growth may fail, and ends a request, not the
//! process.

use std::collections::TryReserveError;

use bytes::Bytes;

use crate::error::{ApiError, ApiResult};

/// The text of the error, by which decoders recognise it.
pub(crate) const OUT_OF_MEMORY: &str = "the server has not enough memory for this request";

/// The error of a request for which there is no memory now.
pub fn out_of_memory(_: TryReserveError) -> ApiError {
    ApiError::unavailable(OUT_OF_MEMORY).retry_after(1)
}

/// An empty vector with room for `count` elements.
///
/// # Errors
/// When there is not enough memory.
pub fn with_room<T>(count: usize) -> ApiResult<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(out_of_memory)?;
    Ok(values)
}

/// Appends `value`.
///
/// # Errors
/// When there is not enough memory.
pub fn push<T>(values: &mut Vec<T>, value: T) -> Result<(), TryReserveError> {
    if values.len() == values.capacity() {
        // Twice as much as before.
        values.try_reserve(1)?;
    }
    values.push(value);
    Ok(())
}

/// A copy of `bytes`.
///
/// # Errors
/// When there is not enough memory.
pub fn copied(bytes: &[u8]) -> Result<Bytes, TryReserveError> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy.into())
}

/// The values as `convert` makes them.
///
/// # Errors
/// When there is not enough memory, or the first error of `convert`.
pub fn converted<V, T>(
    values: impl ExactSizeIterator<Item = V>,
    convert: impl Fn(V) -> ApiResult<T>,
) -> ApiResult<Vec<T>> {
    let mut all = with_room(values.len())?;
    for value in values {
        all.push(convert(value)?);
    }
    Ok(all)
}

/// Bytes that are written to; a write fails when there is not enough memory.
#[derive(Debug, Default)]
pub struct FallibleBytes(pub Vec<u8>);

impl std::io::Write for FallibleBytes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.try_reserve(bytes.len()).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_memory_is_an_error() {
        let error = with_room::<u64>(usize::MAX / 16).unwrap_err();
        assert_eq!(error.kind, crate::ErrorKind::Unavailable);
        assert_eq!(error.retry_after, Some(1));
    }

    #[test]
    fn values_are_converted_until_one_does_not_fit() {
        let fits = |value: i32| match u8::try_from(value) {
            Ok(value) => Ok(value),
            Err(_) => Err(ApiError::invalid("no")),
        };
        assert_eq!(converted([1, 2].into_iter(), fits).unwrap(), [1u8, 2]);
        assert!(converted([1, 256].into_iter(), fits).is_err());
        let mut values = vec![1];
        (0..100).for_each(|value| push(&mut values, value).unwrap());
        assert_eq!(values.len(), 101);
    }
}
