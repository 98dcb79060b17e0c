//! The interface of the pinned host pool: memory that a device copies inputs from without staging,
//! given out to the code that reads requests from the network.

use bytes::Bytes;

use crate::Tensor;

/// A buffer of the pool. Dropping it returns the memory.
pub trait HostPoolBuffer: AsRef<[u8]> + AsMut<[u8]> + Send + Sync {}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Send + Sync> HostPoolBuffer for T {}

/// A pool of host memory.
pub trait HostPool: Send + Sync {
    /// A buffer of `bytes` bytes with arbitrary content; `None` when no memory is free. Never
    /// blocks.
    fn allocate(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>>;
}

/// A buffer of the pool that is only read from now on.
struct ReadOnlyBuffer(Box<dyn HostPoolBuffer>);

impl AsRef<[u8]> for ReadOnlyBuffer {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl Tensor {
    /// A copy of the tensor in memory of `host_pool`; `None` when the pool has no memory for it,
    /// and for strings.
    pub fn copied_to(&self, host_pool: &dyn HostPool) -> Option<Tensor> {
        let raw = self.raw()?;
        let mut buffer = host_pool.allocate(raw.len())?;
        (*buffer).as_mut().get_mut(..raw.len())?.copy_from_slice(raw);
        let raw = Bytes::from_owner(ReadOnlyBuffer(buffer)).slice(..raw.len());
        Tensor::from_raw(self.dtype(), self.shape().to_vec(), raw).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Gives out a fixed number of buffers and counts those in use.
    struct LimitedPool {
        limit: usize,
        out: Arc<AtomicUsize>,
    }

    struct CountedBuffer(Vec<u8>, Arc<AtomicUsize>);

    impl AsRef<[u8]> for CountedBuffer {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl AsMut<[u8]> for CountedBuffer {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl Drop for CountedBuffer {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl HostPool for LimitedPool {
        fn allocate(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>> {
            if self.out.load(Ordering::Relaxed) == self.limit {
                return None;
            }
            self.out.fetch_add(1, Ordering::Relaxed);
            Some(Box::new(CountedBuffer(vec![7; bytes + 5], self.out.clone())))
        }
    }

    #[test]
    fn a_copy_in_the_pool_is_equal_and_returns_its_memory() {
        let host_pool = LimitedPool { limit: 1, out: Arc::default() };
        let tensor = Tensor::from_vec(vec![2, 2], vec![1.0f32, 2.0, 3.0, 4.0]).unwrap();
        let copy = tensor.copied_to(&host_pool).unwrap();
        assert_eq!(copy, tensor);
        assert!(tensor.copied_to(&host_pool).is_none(), "the pool is exhausted");
        let part = copy.rows(1..2);
        drop(copy);
        assert_eq!(host_pool.out.load(Ordering::Relaxed), 1, "a part is still held");
        drop(part);
        assert_eq!(host_pool.out.load(Ordering::Relaxed), 0);
        let text = Tensor::from_strings(vec![1], vec!["text".into()]).unwrap();
        assert!(text.copied_to(&host_pool).is_none());
    }
}
