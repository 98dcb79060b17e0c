//! `BYTES` tensors on the wire: each element is a little-endian u32 length and that many bytes.

use bytes::{BufMut, Bytes};

use crate::error::{ApiError, ApiResult};
use crate::fallible::with_room;

/// Splits `bytes` into exactly `count` elements, which share it.
pub fn decode(bytes: Bytes, count: usize) -> ApiResult<Vec<Bytes>> {
    // Each element takes at least 4 bytes, so a false shape is refused before memory is allocated.
    if count > bytes.len() / 4 {
        return Err(ApiError::invalid(format!(
            "{count} elements do not fit in {} bytes of BYTES data",
            bytes.len()
        )));
    }
    let mut elements = with_room(count)?;
    let mut at = 0;
    while let Some(prefix) = bytes[at..].first_chunk::<4>() {
        let length = u32::from_le_bytes(*prefix) as usize;
        let start = at + 4;
        if length > bytes.len() - start {
            return Err(ApiError::invalid(format!(
                "BYTES element {} claims {length} bytes, {} are left",
                elements.len(),
                bytes.len() - start
            )));
        }
        if elements.len() == count {
            break;
        }
        elements.push(bytes.slice(start..start + length));
        at = start + length;
    }
    if at != bytes.len() || elements.len() != count {
        return Err(ApiError::invalid(format!(
            "the shape needs {count} BYTES elements, the data holds another number"
        )));
    }
    Ok(elements)
}

/// Bytes that [`encode`] writes.
pub fn encoded_len(strings: &[Bytes]) -> usize {
    strings.iter().map(|string| 4 + string.len()).sum()
}

/// Writes `strings` one after the other. An element longer than `u32::MAX` is truncated.
pub fn encode(strings: &[Bytes], out: &mut Vec<u8>) {
    for string in strings {
        let length = u32::try_from(string.len()).unwrap_or(u32::MAX);
        out.put_u32_le(length);
        out.extend_from_slice(&string[..length as usize]);
    }
}
