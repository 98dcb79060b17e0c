//! Contents of strings that kernels make.
//!
//! A string of a few bytes is no buffer of its own: a million of them would not be counted.

use bytes::Bytes;
use model::MemoryError;

use crate::buffer::Buffer;

/// Strings that are written one after the other into one buffer: their memory is counted, and its
/// allocation may fail. It is freed with the last of them.
pub(crate) struct StringContents {
    text: Buffer<u8>,
    ends: Buffer<usize>,
}

impl StringContents {
    /// No strings yet, with room for `count`, which have `bytes` bytes together.
    pub(crate) fn with_capacity(count: usize, bytes: usize) -> Result<StringContents, MemoryError> {
        Ok(StringContents { text: Buffer::counted(bytes)?, ends: Buffer::counted(count)? })
    }

    /// Adds bytes to the string that is being made.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), MemoryError> {
        self.text.append(bytes)
    }

    /// Ends the string.
    pub(crate) fn end(&mut self) -> Result<(), MemoryError> {
        let end = self.text.len();
        self.ends.append(&[end])
    }

    /// All strings that were ended.
    pub(crate) fn finish(self) -> Result<Buffer<Bytes>, MemoryError> {
        let mut strings = Buffer::with_capacity(self.ends.len())?;
        let (text, mut start) = (Bytes::from_owner(self.text), 0);
        for &end in &self.ends {
            strings.extend([text.slice(start..end)]);
            start = end;
        }
        Ok(strings)
    }
}

#[cfg(test)]
mod tests {
    use model::HostMemory;

    use super::*;
    use crate::buffer;

    #[test]
    fn contents_are_counted_until_the_last_string_is_gone() {
        let memory = HostMemory::leaked(1 << 20);
        buffer::with_memory(memory, || {
            let mut contents = StringContents::with_capacity(2, 0).unwrap();
            contents.write(&[b'a'; 1000]).unwrap();
            contents.end().unwrap();
            contents.write(b"b").unwrap();
            contents.write(b"c").unwrap();
            contents.end().unwrap();
            let strings = contents.finish().unwrap();
            assert_eq!((strings.len(), strings[0].len()), (2, 1000));
            assert_eq!(strings[1], &b"bc"[..]);
            let last = strings[1].clone();
            drop(strings);
            assert!(memory.used() >= 1002, "{}", memory.used());
            drop(last);
            assert_eq!(memory.used(), 0);
            let mut contents = StringContents::with_capacity(0, 0).unwrap();
            let refused = (0..1 << 20).find(|_| contents.write(b"12345678").is_err()).unwrap();
            assert!((1 << 15..1 << 17).contains(&refused), "{refused}");
        });
    }
}
