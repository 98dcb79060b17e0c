//! Protobuf messages as trees: edits of fields that keep the lengths around them right.

use base::Random;

use crate::mutate::{NUMBERS, one_in, pick};

/// Deeper bytes are not looked into.
const DEPTH_MAX: usize = 12;

/// One field of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    /// An integer.
    Varint(u64, u64),
    /// Eight bytes.
    Fixed64(u64, [u8; 8]),
    /// Four bytes.
    Fixed32(u64, [u8; 4]),
    /// Text or packed numbers.
    Bytes(u64, Vec<u8>),
    /// Bytes that are a message themselves, as far as one can tell.
    Message(u64, Vec<Field>),
}

/// Appends an integer in base 128.
pub fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take_varint(data: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = data.split_first()?;
        *data = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn take<'a>(data: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, rest) = data.split_at_checked(count)?;
    *data = rest;
    Some(head)
}

/// The fields of a message; `None` if it is none.
pub fn parse(mut data: &[u8], depth: usize) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !data.is_empty() {
        let key = take_varint(&mut data)?;
        let number = key >> 3;
        if number == 0 || number > 1 << 20 {
            return None;
        }
        fields.push(match key & 7 {
            0 => Field::Varint(number, take_varint(&mut data)?),
            1 => Field::Fixed64(number, take(&mut data, 8)?.try_into().ok()?),
            5 => Field::Fixed32(number, take(&mut data, 4)?.try_into().ok()?),
            2 => {
                let length = usize::try_from(take_varint(&mut data)?).ok()?;
                let bytes = take(&mut data, length)?;
                match (depth < DEPTH_MAX).then(|| parse(bytes, depth + 1)).flatten() {
                    Some(inner) if !inner.is_empty() => Field::Message(number, inner),
                    _ => Field::Bytes(number, bytes.to_vec()),
                }
            }
            _ => return None,
        });
    }
    Some(fields)
}

/// Appends `fields`.
pub fn write(fields: &[Field], out: &mut Vec<u8>) {
    let key = |number: u64, kind: u64, out: &mut Vec<u8>| put_varint(number << 3 | kind, out);
    for field in fields {
        match field {
            Field::Varint(number, value) => {
                key(*number, 0, out);
                put_varint(*value, out);
            }
            Field::Fixed64(number, bytes) => {
                key(*number, 1, out);
                out.extend_from_slice(bytes);
            }
            Field::Fixed32(number, bytes) => {
                key(*number, 5, out);
                out.extend_from_slice(bytes);
            }
            Field::Bytes(number, bytes) => {
                key(*number, 2, out);
                put_varint(bytes.len() as u64, out);
                out.extend_from_slice(bytes);
            }
            Field::Message(number, inner) => {
                let mut bytes = Vec::new();
                write(inner, &mut bytes);
                key(*number, 2, out);
                put_varint(bytes.len() as u64, out);
                out.extend_from_slice(&bytes);
            }
        }
    }
}

/// Edits the message in `data` after its first `skip` bytes; bytes that are no message stay.
pub fn edit(
    random: &mut Random,
    skip: usize,
    other: Option<&[u8]>,
    words: &[&str],
    data: &mut Vec<u8>,
) {
    let Some(mut fields) = parse(&data[skip..], 0) else {
        // Broken by an earlier edit: cut where it breaks.
        data.pop();
        return;
    };
    let other = other.and_then(|other| parse(other, 0));
    edit_fields(random, &mut fields, other.as_deref().unwrap_or_default(), words);
    data.truncate(skip);
    write(&fields, data);
}

/// Edits one field, here or deeper. `others` are fields of another message at the same depth.
fn edit_fields(random: &mut Random, fields: &mut Vec<Field>, others: &[Field], words: &[&str]) {
    if fields.is_empty() || one_in(random, 16) {
        if !others.is_empty() {
            let place = random.below(fields.len() as u64 + 1) as usize;
            fields.insert(place, pick(random, others).clone());
        }
        return;
    }
    let place = random.below(fields.len() as u64) as usize;
    if let Field::Message(number, inner) = &mut fields[place]
        && !one_in(random, 8)
    {
        let same = others.iter().filter_map(|other| match other {
            Field::Message(other, inner) if other == number => Some(inner.as_slice()),
            _ => None,
        });
        let same: Vec<&[Field]> = same.collect();
        let deeper = if same.is_empty() { &[] } else { *pick(random, &same) };
        return edit_fields(random, inner, deeper, words);
    }
    match random.below(8) {
        0 => drop(fields.remove(place)),
        1 => {
            let copy = fields[place].clone();
            fields.insert(random.below(fields.len() as u64 + 1) as usize, copy);
        }
        2 => {
            let with = random.below(fields.len() as u64) as usize;
            fields.swap(place, with);
        }
        3 if !others.is_empty() => fields[place] = pick(random, others).clone(),
        4 => renumber(random, &mut fields[place]),
        _ => change(random, &mut fields[place], words),
    }
}

fn renumber(random: &mut Random, field: &mut Field) {
    let next = 1 + random.below(24);
    match field {
        Field::Varint(number, _)
        | Field::Fixed64(number, _)
        | Field::Fixed32(number, _)
        | Field::Bytes(number, _)
        | Field::Message(number, _) => *number = next,
    }
}

/// Changes the value of a field.
fn change(random: &mut Random, field: &mut Field, words: &[&str]) {
    match field {
        Field::Varint(_, value) => {
            *value = match random.below(3) {
                0 => *pick(random, &NUMBERS),
                1 => value.wrapping_add(random.below(9)).wrapping_sub(4),
                _ => random.below(24),
            }
        }
        Field::Fixed64(_, bytes) => *bytes = pick(random, &NUMBERS).to_le_bytes(),
        Field::Fixed32(_, bytes) => {
            let value = [0.0, -1.0, f32::NAN, f32::INFINITY, 1e30, f32::MIN_POSITIVE, 0.5];
            *bytes = pick(random, &value).to_le_bytes();
        }
        Field::Bytes(_, bytes) => match random.below(5) {
            0 if !words.is_empty() => *bytes = pick(random, words).as_bytes().to_vec(),
            1 => bytes.clear(),
            2 => {
                // Packed numbers, as dimensions and axes are.
                let count = random.below(6);
                bytes.clear();
                (0..count).for_each(|_| put_varint(*pick(random, &NUMBERS), bytes));
            }
            3 => {
                let length = *pick(random, &[1usize, 4, 8, 64, 1000]);
                bytes.resize(length, random.next_u64() as u8);
            }
            _ if !bytes.is_empty() => {
                let place = random.below(bytes.len() as u64) as usize;
                bytes[place] = random.next_u64() as u8;
            }
            _ => bytes.push(b'a'),
        },
        Field::Message(number, inner) => {
            let mut bytes = Vec::new();
            write(inner, &mut bytes);
            bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
            *field = Field::Bytes(*number, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_bytes() {
        let inner = vec![Field::Varint(1, 300), Field::Bytes(2, b"\xffab".to_vec())];
        let fields = vec![
            Field::Message(7, inner),
            Field::Fixed32(3, [1, 2, 3, 4]),
            Field::Fixed64(4, [9; 8]),
        ];
        let mut bytes = Vec::new();
        write(&fields, &mut bytes);
        assert_eq!(parse(&bytes, 0), Some(fields));
        assert_eq!(parse(b"\x0a\x05a", 0), None);
    }

    #[test]
    fn edited_messages_are_messages() {
        let mut random = Random::new(1);
        let seed = include_bytes!("../corpus/onnx/shapes.onnx");
        let mut whole = 0;
        for _ in 0..1000 {
            let mut data = seed.to_vec();
            edit(&mut random, 0, Some(seed), &["Relu"], &mut data);
            whole += usize::from(parse(&data, 0).is_some());
        }
        assert!(whole > 990, "{whole}");
    }
}
