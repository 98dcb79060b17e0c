//! Argument structs of kernels, byte for byte as the CUDA compiler lays them out.

use model::gpu::{MemoryLocation, TensorMap};

use super::view::BufferId;

/// An address in a launch's arguments, before memory is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// Byte offset into a buffer.
    Buffer(BufferId, u64),
    /// A location that needs no planning.
    Fixed(MemoryLocation),
    /// No address: a null pointer.
    Null,
}

/// Fields in declaration order, each aligned to its own size, as in C.
#[derive(Clone, Debug, Default)]
pub struct ArgsWriter {
    bytes: Vec<u8>,
    addresses: Vec<(u32, Address)>,
    align: usize,
}

impl ArgsWriter {
    /// An empty struct.
    pub fn new() -> ArgsWriter {
        ArgsWriter::default()
    }

    fn field(&mut self, bytes: &[u8]) {
        let align = bytes.len();
        self.align = self.align.max(align);
        self.bytes.resize(self.bytes.len().next_multiple_of(align), 0);
        self.bytes.extend_from_slice(bytes);
    }

    /// A pointer.
    pub fn address(&mut self, address: Address) -> &mut Self {
        self.field(&[0; 8]);
        if address != Address::Null {
            self.addresses.push((self.bytes.len() as u32 - 8, address));
        }
        self
    }

    /// An `int`. Sizes beyond its range are refused earlier.
    pub fn int(&mut self, value: usize) -> &mut Self {
        self.field(&(value as i32).to_le_bytes());
        self
    }

    /// A signed `int`.
    pub fn signed(&mut self, value: i32) -> &mut Self {
        self.field(&value.to_le_bytes());
        self
    }

    /// A `float`.
    pub fn float(&mut self, value: f32) -> &mut Self {
        self.field(&value.to_le_bytes());
        self
    }

    /// A `FastDiv` (see `kernels/base.cuh`): quotients of 31-bit numbers by one multiplication.
    pub fn fast_div(&mut self, divisor: usize) -> &mut Self {
        let divisor = divisor.max(1) as u64;
        let log = divisor.next_power_of_two().trailing_zeros();
        let multiplier = if divisor == 1 { 0 } else { (1u64 << (31 + log)).div_ceil(divisor) };
        self.field(&(divisor as u32).to_le_bytes());
        self.field(&(multiplier as u32).to_le_bytes());
        self.field(&log.saturating_sub(1).to_le_bytes());
        self
    }

    /// Space for a tensor map (`TensorMap` in `kernels/wgmma.cuh`); returns its offset.
    pub fn map(&mut self) -> u32 {
        self.nested(ArgsWriter {
            bytes: vec![0; TensorMap::BYTES],
            align: TensorMap::BYTES,
            ..Self::default()
        })
    }

    /// Makes every pointer so far a null pointer.
    pub fn forget_addresses(&mut self) {
        self.addresses.clear();
    }

    /// A struct within the struct; returns its offset.
    pub fn nested(&mut self, inner: ArgsWriter) -> u32 {
        let align = inner.align.max(1);
        let (bytes, addresses) = inner.finish();
        self.align = self.align.max(align);
        self.bytes.resize(self.bytes.len().next_multiple_of(align), 0);
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(&bytes);
        self.addresses.extend(addresses.into_iter().map(|(at, to)| (start + at, to)));
        start
    }

    /// The struct's bytes, padded to its alignment, and its addresses.
    pub fn finish(mut self) -> (Vec<u8>, Vec<(u32, Address)>) {
        self.bytes.resize(self.bytes.len().next_multiple_of(self.align.max(1)), 0);
        (self.bytes, self.addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_aligned_as_in_c() {
        let mut args = ArgsWriter::new();
        args.int(1).address(Address::Buffer(BufferId(3), 16)).float(1.0).address(Address::Null);
        let (bytes, addresses) = args.finish();
        assert_eq!(bytes.len(), 32);
        assert_eq!(addresses, [(8, Address::Buffer(BufferId(3), 16))]);
    }

    #[test]
    fn nested_structs_keep_their_alignment_and_addresses() {
        let mut inner = ArgsWriter::new();
        inner.address(Address::Buffer(BufferId(1), 0)).int(7);
        let mut args = ArgsWriter::new();
        args.int(1);
        assert_eq!((args.map(), args.nested(inner)), (128, 256));
        args.int(2);
        let (bytes, addresses) = args.finish();
        assert_eq!(bytes.len(), 384);
        assert_eq!((bytes[264], bytes[272]), (7, 2));
        assert_eq!(addresses, [(256, Address::Buffer(BufferId(1), 0))]);
    }

    #[test]
    fn divisions_by_multiplication_are_exact() {
        for divisor in [1usize, 2, 3, 7, 49, 64, 1000, 3136, 50176, 1 << 30, (1 << 31) - 1] {
            let mut args = ArgsWriter::new();
            args.fast_div(divisor);
            let (bytes, _) = args.finish();
            let word = |i: usize| u32::from_le_bytes(bytes[i * 4..i * 4 + 4].try_into().unwrap());
            let (multiplier, shift) = (word(1) as u64, word(2));
            for n in [0usize, 1, divisor - 1, divisor, divisor + 1, 123_456_789, (1 << 31) - 1] {
                let n = n.min((1 << 31) - 1);
                let quotient = if word(0) == 1 {
                    n
                } else {
                    ((n as u64 * multiplier) >> 32 >> shift) as usize
                };
                assert_eq!(quotient, n / divisor, "{n} / {divisor}");
            }
        }
    }
}
