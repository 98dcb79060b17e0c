//! The protobuf wire format, read from a slice that is already in memory.
//!
//! A length is compared with the remaining bytes before anything is allocated, so a false length in
//! a small file never allocates. No message is read recursively.

use bytes::Bytes;
use thiserror::Error;

/// Why bytes are not a protobuf message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// A field is longer than the remaining bytes.
    #[error("the file ends inside field {field}")]
    Truncated {
        /// Number of the field; 0 when its tag is incomplete.
        field: u64,
    },
    /// A variable-length integer is longer than 64 bits.
    #[error("field {field} holds an overlong integer")]
    Overlong {
        /// Number of the field.
        field: u64,
    },
    /// Groups and reserved wire types.
    #[error("field {field} has wire type {wire_type}, which is not used by ONNX")]
    WireType {
        /// Number of the field.
        field: u64,
        /// The wire type.
        wire_type: u8,
    },
    /// A field is encoded as another type than the schema's.
    #[error("field {field} of {message} is not encoded as {expected}")]
    Mismatch {
        /// The message type.
        message: &'static str,
        /// Number of the field.
        field: u64,
        /// The type in the schema.
        expected: &'static str,
    },
    /// A string is not UTF-8.
    #[error("field {field} of {message} is not utf-8")]
    Utf8 {
        /// The message type.
        message: &'static str,
        /// Number of the field.
        field: u64,
    },
    /// A repeated field has more entries than allowed.
    #[error("{message} has more than {limit} entries in field {field}")]
    TooMany {
        /// The message type.
        message: &'static str,
        /// Number of the field.
        field: u64,
        /// The limit.
        limit: usize,
    },
}

/// A field's payload.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(Bytes),
    Fixed32([u8; 4]),
}

/// One field of a message.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub message: &'static str,
    pub number: u64,
    pub payload: Payload,
}

/// Reads the fields of one message in order.
pub(crate) struct Fields {
    message: &'static str,
    bytes: Bytes,
    position: usize,
}

impl Fields {
    pub fn new(message: &'static str, bytes: Bytes) -> Fields {
        Fields { message, bytes, position: 0 }
    }

    pub fn next(&mut self) -> Result<Option<Field>, WireError> {
        if self.position == self.bytes.len() {
            return Ok(None);
        }
        let tag = self.varint(0)?;
        let number = tag >> 3;
        let payload = match (tag & 7) as u8 {
            0 => Payload::Varint(self.varint(number)?),
            1 => Payload::Fixed64(self.array(number)?),
            2 => {
                let length = self.varint(number)?;
                Payload::Bytes(self.take(number, length)?)
            }
            5 => Payload::Fixed32(self.array(number)?),
            wire_type => return Err(WireError::WireType { field: number, wire_type }),
        };
        Ok(Some(Field { message: self.message, number, payload }))
    }

    fn varint(&mut self, field: u64) -> Result<u64, WireError> {
        let (value, length) = varint(&self.bytes[self.position..], field)?;
        self.position += length;
        Ok(value)
    }

    fn take(&mut self, field: u64, length: u64) -> Result<Bytes, WireError> {
        let length = usize::try_from(length).map_err(|_| WireError::Truncated { field })?;
        if length > self.bytes.len() - self.position {
            return Err(WireError::Truncated { field });
        }
        let start = self.position;
        self.position += length;
        Ok(self.bytes.slice(start..start + length))
    }

    fn array<const N: usize>(&mut self, field: u64) -> Result<[u8; N], WireError> {
        let bytes = self.bytes.get(self.position..self.position + N);
        let array = bytes.and_then(|bytes| bytes.try_into().ok());
        self.position += N.min(self.bytes.len() - self.position);
        array.ok_or(WireError::Truncated { field })
    }
}

fn varint(bytes: &[u8], field: u64) -> Result<(u64, usize), WireError> {
    let mut value = 0u64;
    for (index, &byte) in bytes.iter().enumerate().take(10) {
        let bits = u64::from(byte & 0x7f);
        if index == 9 && bits > 1 {
            return Err(WireError::Overlong { field });
        }
        value |= bits << (7 * index);
        if byte < 0x80 {
            return Ok((value, index + 1));
        }
    }
    Err(if bytes.len() < 10 {
        WireError::Truncated { field }
    } else {
        WireError::Overlong { field }
    })
}

impl Field {
    fn mismatch(&self, expected: &'static str) -> WireError {
        WireError::Mismatch { message: self.message, field: self.number, expected }
    }

    pub fn bytes(self) -> Result<Bytes, WireError> {
        match self.payload {
            Payload::Bytes(bytes) => Ok(bytes),
            _ => Err(self.mismatch("bytes")),
        }
    }

    pub fn string(self) -> Result<String, WireError> {
        let (message, field) = (self.message, self.number);
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| WireError::Utf8 { message, field })
    }

    pub fn int(&self) -> Result<i64, WireError> {
        match self.payload {
            Payload::Varint(value) => Ok(value as i64),
            _ => Err(self.mismatch("an integer")),
        }
    }

    pub fn float(&self) -> Result<f32, WireError> {
        match self.payload {
            Payload::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.mismatch("a float")),
        }
    }

    /// Appends the integers of a repeated field, packed or not.
    pub fn ints(&self, out: &mut Vec<i64>) -> Result<(), WireError> {
        match &self.payload {
            Payload::Varint(value) => out.push(*value as i64),
            Payload::Bytes(bytes) => {
                let mut position = 0;
                while position < bytes.len() {
                    let (value, length) = varint(&bytes[position..], self.number)?;
                    out.push(value as i64);
                    position += length;
                }
            }
            _ => return Err(self.mismatch("integers")),
        }
        Ok(())
    }

    /// Appends the floats of a repeated field, packed or not.
    pub fn floats(&self, out: &mut Vec<f32>) -> Result<(), WireError> {
        match &self.payload {
            Payload::Fixed32(bytes) => out.push(f32::from_le_bytes(*bytes)),
            Payload::Bytes(bytes) => {
                let (values, rest) = bytes.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(self.mismatch("floats"));
                }
                out.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
            }
            _ => return Err(self.mismatch("floats")),
        }
        Ok(())
    }

    /// Appends the doubles of a repeated field, packed or not.
    pub fn doubles(&self, out: &mut Vec<f64>) -> Result<(), WireError> {
        match &self.payload {
            Payload::Fixed64(bytes) => out.push(f64::from_le_bytes(*bytes)),
            Payload::Bytes(bytes) => {
                let (values, rest) = bytes.as_chunks::<8>();
                if !rest.is_empty() {
                    return Err(self.mismatch("doubles"));
                }
                out.extend(values.iter().map(|value| f64::from_le_bytes(*value)));
            }
            _ => return Err(self.mismatch("doubles")),
        }
        Ok(())
    }
}

/// Appends `item`, unless there are `limit` already.
pub(crate) fn push_limited<T>(
    list: &mut Vec<T>,
    item: T,
    limit: usize,
    message: &'static str,
    field: u64,
) -> Result<(), WireError> {
    if list.len() >= limit {
        return Err(WireError::TooMany { message, field, limit });
    }
    list.push(item);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(bytes: &'static [u8]) -> Fields {
        Fields::new("Test", Bytes::from_static(bytes))
    }

    #[test]
    fn lengths_beyond_the_file_are_refused() {
        // Field 1, length 2^31 - 1, no payload.
        let mut hostile = fields(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x07]);
        assert_eq!(hostile.next().unwrap_err(), WireError::Truncated { field: 1 });
        let mut wrapping =
            fields(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
        assert_eq!(wrapping.next().unwrap_err(), WireError::Truncated { field: 1 });
        assert_eq!(fields(&[0x0d, 1, 2]).next().unwrap_err(), WireError::Truncated { field: 1 });
    }

    #[test]
    fn endless_integers_are_refused() {
        assert_eq!(fields(&[0xff; 32]).next().unwrap_err(), WireError::Overlong { field: 0 });
        assert_eq!(fields(&[0xff; 3]).next().unwrap_err(), WireError::Truncated { field: 0 });
    }

    #[test]
    fn groups_are_refused() {
        let error = fields(&[0x0b]).next().unwrap_err();
        assert_eq!(error, WireError::WireType { field: 1, wire_type: 3 });
    }

    #[test]
    fn packed_and_plain_integers_are_equal() {
        let mut out = Vec::new();
        let mut both = fields(&[0x0a, 2, 5, 6, 0x08, 7]);
        while let Some(field) = both.next().unwrap() {
            field.ints(&mut out).unwrap();
        }
        assert_eq!(out, vec![5, 6, 7]);
    }
}
