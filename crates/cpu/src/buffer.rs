//! Memory of tensors and temporaries. A [`Buffer`] is the only form in which a kernel gets memory
//! whose size depends on a request or a model, and making one can fail.

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};

use model::memory::try_vec;
use model::{DataType, HostMemory, MemoryError, Reservation, Tensor};

use crate::yield_point;

/// Buffers below this size are not counted: a task has a few of them per step.
const MIN_COUNTED: usize = 1024;

thread_local! {
    static CURRENT: Cell<Option<&'static HostMemory>> = const { Cell::new(None) };
}

/// Makes `memory` the budget of the buffers that the calling thread makes from now on.
pub(crate) fn set_memory(memory: &'static HostMemory) {
    CURRENT.set(Some(memory));
}

/// The budget of the buffers that the calling thread makes: that of its device, or else that of
/// the process.
pub(crate) fn memory() -> &'static HostMemory {
    CURRENT.get().unwrap_or_else(|| {
        let memory = HostMemory::process();
        CURRENT.set(Some(memory));
        memory
    })
}

/// Calls `f` with `memory` as the budget of the calling thread.
pub(crate) fn with_memory<T>(memory: &'static HostMemory, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<&'static HostMemory>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _restore = Restore(CURRENT.replace(Some(memory)));
    f()
}

/// A vector that never grows beyond its capacity, and the reservation of its memory.
pub(crate) struct Buffer<T> {
    data: Vec<T>,
    reservation: Option<Reservation>,
}

impl<T> Default for Buffer<T> {
    fn default() -> Buffer<T> {
        Buffer { data: Vec::new(), reservation: None }
    }
}

impl<T> Buffer<T> {
    /// An empty buffer with room for `count` elements.
    pub(crate) fn with_capacity(count: usize) -> Result<Buffer<T>, MemoryError> {
        if count.saturating_mul(size_of::<T>()) < MIN_COUNTED {
            return Ok(Buffer { data: Vec::with_capacity(count), reservation: None });
        }
        let (data, reservation) = try_vec(memory(), count)?;
        Ok(Buffer { data, reservation: Some(reservation) })
    }

    /// Like [`with_capacity`](Buffer::with_capacity), counted however small it is: for what a step
    /// may have any number of.
    pub(crate) fn counted(count: usize) -> Result<Buffer<T>, MemoryError> {
        let (data, reservation) = try_vec(memory(), count)?;
        Ok(Buffer { data, reservation: Some(reservation) })
    }

    /// A buffer of the elements of `iter`.
    pub(crate) fn collect<I>(iter: I) -> Result<Buffer<T>, MemoryError>
    where
        I: IntoIterator<Item = T>,
        I::IntoIter: ExactSizeIterator,
    {
        let iter = iter.into_iter();
        let mut buffer = Buffer::with_capacity(iter.len())?;
        buffer.extend(iter);
        Ok(buffer)
    }

    /// Appends as many elements of `iter` as there is room for.
    pub(crate) fn extend(&mut self, iter: impl IntoIterator<Item = T>) {
        let room = self.data.capacity() - self.data.len();
        self.data.extend(iter.into_iter().take(room));
    }

    /// Appends `value`; makes room for as many elements again when there is none.
    pub(crate) fn push(&mut self, value: T) -> Result<(), MemoryError> {
        if self.data.len() == self.data.capacity() {
            let mut longer = Buffer::with_capacity(self.data.len().max(8).saturating_mul(2))?;
            longer.data.append(&mut self.data);
            *self = longer;
        }
        self.data.push(value);
        Ok(())
    }

    pub(crate) fn capacity(&self) -> usize {
        self.data.capacity()
    }

    pub(crate) fn clear(&mut self) {
        self.data.clear();
    }

    pub(crate) fn truncate(&mut self, count: usize) {
        self.data.truncate(count);
    }

    /// The same memory with elements of another type.
    pub(crate) fn map_vec<U>(self, f: impl FnOnce(Vec<T>) -> Vec<U>) -> Buffer<U> {
        Buffer { data: f(self.data), reservation: self.reservation }
    }

    /// The same memory as bits of another type of the same size.
    pub(crate) fn cast<U>(self) -> Buffer<U>
    where
        T: bytemuck::NoUninit,
        U: bytemuck::AnyBitPattern,
    {
        self.map_vec(bytemuck::cast_vec)
    }

    /// The elements without the reservation, for pieces of a kernel's own work.
    pub(crate) fn into_vec(self) -> Vec<T> {
        self.data
    }

    /// The elements and the reservation of their memory.
    pub(crate) fn into_parts(self) -> (Vec<T>, Reservation) {
        (self.data, self.reservation.unwrap_or_else(|| memory().empty()))
    }

    /// A tensor of the host in this memory.
    pub(crate) fn into_tensor(self, dtype: DataType, shape: &[usize]) -> Result<Tensor, String>
    where
        T: bytemuck::NoUninit + Send,
    {
        let (data, reservation) = self.into_parts();
        Tensor::from_reserved(dtype, shape.to_vec(), data, reservation)
            .map_err(|err| err.to_string())
    }
}

impl<T: Clone> Buffer<T> {
    /// `count` copies of `value`.
    pub(crate) fn filled(count: usize, value: T) -> Result<Buffer<T>, MemoryError> {
        let mut buffer = Buffer::with_capacity(count)?;
        yield_point::resize(&mut buffer.data, count, value);
        Ok(buffer)
    }

    /// A copy of `data`.
    pub(crate) fn copy_of(data: &[T]) -> Result<Buffer<T>, MemoryError> {
        let mut buffer = Buffer::with_capacity(data.len())?;
        buffer.extend_from_slice(data);
        Ok(buffer)
    }

    /// Appends all of `data`; makes room for as many elements again when there is none.
    pub(crate) fn append(&mut self, data: &[T]) -> Result<(), MemoryError> {
        let needed = self.data.len().saturating_add(data.len());
        if needed > self.data.capacity() {
            let mut longer = Buffer::counted(needed.max(self.data.len().saturating_mul(2)))?;
            longer.data.append(&mut self.data);
            *self = longer;
        }
        self.data.extend_from_slice(data);
        Ok(())
    }

    /// Appends as many elements of `data` as there is room for.
    pub(crate) fn extend_from_slice(&mut self, data: &[T]) {
        let room = self.data.capacity() - self.data.len();
        self.data.extend_from_slice(&data[..data.len().min(room)]);
    }

    /// Changes the length to `count`, which must not exceed the capacity.
    pub(crate) fn resize(&mut self, count: usize, value: T) {
        let count = count.min(self.capacity());
        yield_point::resize(&mut self.data, count, value);
    }
}

impl AsRef<[u8]> for Buffer<u8> {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<'a, T> IntoIterator for &'a Buffer<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.data.iter()
    }
}

impl<T: fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.data.fmt(f)
    }
}

/// Elements that a kernel reads: an operand's, or computed ones.
pub(crate) enum Data<'a, T> {
    Borrowed(&'a [T]),
    Owned(Buffer<T>),
}

impl<T> Deref for Data<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Data::Borrowed(data) => data,
            Data::Owned(buffer) => buffer,
        }
    }
}

impl<T: Clone> Data<'_, T> {
    /// The elements in memory of their own.
    pub(crate) fn into_owned(self) -> Result<Buffer<T>, MemoryError> {
        match self {
            Data::Borrowed(data) => Buffer::copy_of(data),
            Data::Owned(buffer) => Ok(buffer),
        }
    }

    /// The elements, copied before they are changed if they are borrowed.
    pub(crate) fn to_mut(&mut self) -> Result<&mut [T], MemoryError> {
        if let Data::Borrowed(data) = self {
            *self = Data::Owned(Buffer::copy_of(data)?);
        }
        match self {
            Data::Owned(buffer) => Ok(buffer),
            Data::Borrowed(_) => Ok(&mut []),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_until_its_last_owner_is_gone() {
        let memory = HostMemory::leaked(100_000);
        with_memory(memory, || {
            let buffer = Buffer::filled(5000, 1f32).unwrap();
            assert_eq!(memory.used(), 20_000);
            let tensor = buffer.into_tensor(DataType::F32, &[50, 100]).unwrap();
            let row = tensor.rows(1..2).unwrap();
            drop(tensor);
            assert_eq!(memory.used(), 20_000, "a row is still held");
            drop(row);
            assert_eq!(memory.used(), 0);
            let error = Buffer::filled(25_001, 1f32).unwrap_err();
            assert_eq!(error, MemoryError::TooLarge { bytes: 100_004, limit: 100_000 });
        });
    }

    #[test]
    fn lists_grow_within_the_budget() {
        let memory = HostMemory::leaked(100_000);
        with_memory(memory, || {
            let mut list = Buffer::default();
            let refused = (0..).find(|&value: &u64| list.push(value).is_err()).unwrap();
            assert!((4_000..12_500).contains(&refused), "{refused}");
            assert!(list.iter().copied().eq(0..refused));
            drop(list);
            assert_eq!(memory.used(), 0);
        });
    }

    #[test]
    fn never_exceeds_its_capacity() {
        let mut buffer = Buffer::with_capacity(3).unwrap();
        let capacity = buffer.capacity();
        buffer.extend(0..100u64);
        buffer.extend_from_slice(&[7; 100]);
        assert_eq!((buffer.len(), buffer.capacity()), (capacity, capacity));
    }
}
