//! Reads and writes NumPy's `.npy` files.

use std::path::Path;

use bytes::Bytes;
use model::{DataType, Tensor};

const MAGIC: &[u8] = b"\x93NUMPY";

/// Types with a NumPy name. BF16 has none; strings have a width in theirs.
const TYPES: [(&str, DataType); 12] = [
    ("|b1", DataType::Bool),
    ("|u1", DataType::U8),
    ("<u2", DataType::U16),
    ("<u4", DataType::U32),
    ("<u8", DataType::U64),
    ("|i1", DataType::I8),
    ("<i2", DataType::I16),
    ("<i4", DataType::I32),
    ("<i8", DataType::I64),
    ("<f2", DataType::F16),
    ("<f4", DataType::F32),
    ("<f8", DataType::F64),
];

/// Reads the tensor in `path`.
pub(crate) fn read(path: &Path) -> Result<Tensor, String> {
    let bytes = std::fs::read(path).map_err(|err| format!("{}: {err}", path.display()))?;
    decode(bytes.into()).map_err(|reason| format!("{}: {reason}", path.display()))
}

/// Writes `tensor` to `path`.
pub(crate) fn write(path: &Path, tensor: &Tensor) -> Result<(), String> {
    let bytes = encode(tensor)?;
    std::fs::write(path, bytes).map_err(|err| format!("{}: {err}", path.display()))
}

/// The tensor in the bytes of a `.npy` file.
pub(crate) fn decode(bytes: Bytes) -> Result<Tensor, String> {
    let not_npy = || "not a .npy file".to_string();
    let prefix = bytes.get(..10).filter(|prefix| prefix.starts_with(MAGIC)).ok_or_else(not_npy)?;
    let (start, length): (usize, usize) = match prefix[6] {
        1 => (10, usize::from(u16::from_le_bytes([prefix[8], prefix[9]]))),
        2 | 3 => {
            let length = bytes.get(8..12).ok_or_else(not_npy)?;
            (12, u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize)
        }
        version => return Err(format!("version {version} of the format is not known")),
    };
    let header = start.checked_add(length).and_then(|end| bytes.get(start..end));
    let header = std::str::from_utf8(header.ok_or_else(not_npy)?).map_err(|_| not_npy())?;
    if !header.contains("'fortran_order': False") {
        return Err("column-major order is not supported; save it with np.ascontiguousarray".into());
    }
    let descr = field(header, "'descr':").ok_or_else(not_npy)?.trim_matches('\'');
    let shape = shape(header).ok_or_else(not_npy)?;
    if let Some(width) = descr.strip_prefix("<U").and_then(|width| width.parse().ok()) {
        return decode_strings(shape, width, &bytes[start + length..]);
    }
    let dtype = TYPES.iter().find(|(name, _)| *name == descr).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| format!("element type {descr} is not supported"))?;
    Tensor::from_raw(dtype, shape, bytes.slice(start + length..)).map_err(|err| err.to_string())
}

/// Strings of at most `width` characters of four bytes, filled up with zeros.
fn decode_strings(shape: Vec<usize>, width: usize, bytes: &[u8]) -> Result<Tensor, String> {
    let count = model::tensor::element_count(&shape).map_err(|err| err.to_string())?;
    let size = width.checked_mul(4).filter(|size| size.checked_mul(count) == Some(bytes.len()));
    let size = size.ok_or("the strings have another size than the header says")?;
    let string = |index: usize| {
        let characters = bytes[index * size..(index + 1) * size].chunks_exact(4);
        let codes = characters.map(|code| u32::from_le_bytes([code[0], code[1], code[2], code[3]]));
        let text: Option<String> =
            codes.take_while(|code| *code != 0).map(char::from_u32).collect();
        text.map(Bytes::from).ok_or("a string has a character that is not Unicode".to_string())
    };
    let strings = (0..count).map(string).collect::<Result<Vec<_>, _>>()?;
    Tensor::from_strings(shape, strings).map_err(|err| err.to_string())
}

/// The width of the longest string and the bytes of all of them.
fn encode_strings(strings: &[Bytes]) -> Result<(usize, Vec<u8>), String> {
    let text = |bytes: &Bytes| -> Result<Vec<char>, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "a string is not UTF-8")?;
        Ok(text.chars().collect())
    };
    let texts = strings.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let width = texts.iter().map(Vec::len).max().unwrap_or(0);
    let padded = |text: &Vec<char>| {
        let codes = text.iter().map(|c| u32::from(*c)).chain(std::iter::repeat(0));
        codes.take(width).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
    };
    Ok((width, texts.iter().flat_map(padded).collect()))
}

fn field<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let rest = header.split(key).nth(1)?.trim_start();
    rest.split([',', '}']).next().map(str::trim)
}

fn shape(header: &str) -> Option<Vec<usize>> {
    let inside = header.split("'shape':").nth(1)?.split('(').nth(1)?.split(')').next()?;
    inside
        .split(',')
        .map(str::trim)
        .filter(|dim| !dim.is_empty())
        .map(|dim| dim.parse().ok())
        .collect()
}

/// The bytes of a `.npy` file.
pub(crate) fn encode(tensor: &Tensor) -> Result<Vec<u8>, String> {
    if let model::TensorData::Strings(strings) = tensor.data() {
        let (width, raw) = encode_strings(strings)?;
        return with_header(&format!("<U{width}"), tensor.shape(), &raw);
    }
    let name = TYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype()).map(|(name, _)| *name);
    let name = name.ok_or_else(|| format!("{} has no .npy form", tensor.dtype()))?;
    with_header(name, tensor.shape(), tensor.raw().ok_or("strings have no .npy form")?)
}

fn with_header(name: &str, shape: &[usize], raw: &[u8]) -> Result<Vec<u8>, String> {
    let dims: String = shape.iter().map(|dim| format!("{dim},")).collect();
    let mut header = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({dims}), }}");
    // The format requires that data starts at a multiple of 64.
    let padding = 63 - (MAGIC.len() + 4 + header.len()) % 64;
    header.push_str(&" ".repeat(padding));
    header.push('\n');
    let mut bytes = Vec::with_capacity(10 + header.len() + raw.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(
        &u16::try_from(header.len()).map_err(|_| "too many dimensions")?.to_le_bytes(),
    );
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(raw);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_round_trip() {
        for tensor in [
            Tensor::from_vec(vec![2, 3], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap(),
            Tensor::from_vec(vec![], vec![7i64]).unwrap(),
            Tensor::from_vec(vec![0, 4], Vec::<u8>::new()).unwrap(),
        ] {
            let bytes = encode(&tensor).unwrap();
            assert_eq!((bytes.len() - tensor.size_bytes()) % 64, 0);
            assert_eq!(decode(bytes.into()).unwrap(), tensor);
        }
    }

    #[test]
    fn strings_round_trip() {
        let strings = ["", "über", "longer text"].map(|text| Bytes::from(text.as_bytes().to_vec()));
        let tensor = Tensor::from_strings(vec![3, 1], strings.to_vec()).unwrap();
        let bytes = encode(&tensor).unwrap();
        assert_eq!(decode(bytes.clone().into()).unwrap(), tensor);
        assert!(decode(bytes[..bytes.len() - 4].to_vec().into()).is_err());
    }

    #[test]
    fn broken_files_are_refused() {
        let good = encode(&Tensor::from_vec(vec![2], vec![1f32, 2.0]).unwrap()).unwrap();
        for length in 0..good.len() {
            assert!(decode(good[..length].to_vec().into()).is_err(), "cut at {length}");
        }
    }
}
