//! Inputs from inputs: random edits of bytes, of words of a text, and of fields of a message.

use base::Random;

use crate::protobuf;

/// How the inputs of a target are edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Bytes without a structure we know.
    Bytes,
    /// Words, numbers and punctuation.
    Text,
    /// Protobuf after this many bytes.
    Protobuf(usize),
}

/// Numbers at which counts and sizes overflow or change their encoding.
pub const NUMBERS: [u64; 22] = [
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    127,
    128,
    255,
    256,
    1023,
    1024,
    65_535,
    65_536,
    1 << 20,
    i32::MAX as u64,
    1 << 32,
    1 << 40,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// The same for texts, and what parsers of numbers stumble over.
const TEXTS: [&str; 32] = [
    "0",
    "-1",
    "1",
    "2",
    "255",
    "256",
    "65536",
    "2147483648",
    "4294967296",
    "1e308",
    "1e-400",
    "1e400",
    "-0.0",
    "NaN",
    "inf",
    "-inf",
    "0x10",
    "1_000",
    "9223372036854775807",
    "18446744073709551616",
    "null",
    "true",
    "false",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "{\"a\":",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "\u{1F600}",
];

/// A random element.
pub fn pick<'a, T>(random: &mut Random, all: &'a [T]) -> &'a T {
    &all[random.below(all.len() as u64) as usize]
}

/// Whether one of `times` draws hits.
pub fn one_in(random: &mut Random, times: u64) -> bool {
    random.below(times) == 0
}

fn at(random: &mut Random, length: usize) -> usize {
    random.below(length as u64) as usize
}

/// Edits `data` once or several times; `others` are inputs whose parts may be copied.
pub fn mutate(
    random: &mut Random,
    format: Format,
    words: &[&str],
    others: &[Vec<u8>],
    max: usize,
    data: &mut Vec<u8>,
) {
    // Mostly few edits: each makes it more likely that an early check refuses the input.
    let most = 1 << random.below(4);
    let edits = 1 + random.below(most);
    for _ in 0..edits {
        match format {
            Format::Text if !one_in(random, 3) => edit_text(random, words, others, data),
            Format::Protobuf(skip) if !one_in(random, 4) && data.len() > skip => {
                let other = others.get(at(random, others.len())).filter(|other| other.len() > skip);
                protobuf::edit(random, skip, other.map(|other| &other[skip..]), words, data);
            }
            _ => edit_bytes(random, words, others, data),
        }
    }
    data.truncate(max);
}

/// A range of `data`, mostly short.
fn span(random: &mut Random, length: usize) -> std::ops::Range<usize> {
    let start = at(random, length + 1);
    let longest = (length - start).min(1 << random.below(9));
    start..start + at(random, longest + 1)
}

fn edit_bytes(random: &mut Random, words: &[&str], others: &[Vec<u8>], data: &mut Vec<u8>) {
    let length = data.len();
    match random.below(10) {
        0 if length > 0 => data[at(random, length)] ^= 1 << random.below(8),
        1 if length > 0 => data[at(random, length)] = random.next_u64() as u8,
        2 => drop(data.drain(span(random, length))),
        3 => {
            let copied = data[span(random, length)].to_vec();
            insert(random, &copied, data);
        }
        4 if !others.is_empty() => {
            let other = pick(random, others);
            let copied = &other[span(random, other.len())];
            insert(random, copied, data);
        }
        5 if !words.is_empty() => {
            let word = *pick(random, words);
            insert(random, word.as_bytes(), data);
        }
        6 => write_number(random, data),
        7 if length > 0 => {
            let byte = &mut data[at(random, length)];
            *byte = byte.wrapping_add(random.below(9) as u8).wrapping_sub(4);
        }
        8 => data.truncate(at(random, length + 1)),
        _ => {
            let bytes = random.next_u64().to_le_bytes();
            let count = 1 + at(random, 8);
            insert(random, &bytes[..count], data);
        }
    }
}

fn insert(random: &mut Random, bytes: &[u8], data: &mut Vec<u8>) {
    let place = at(random, data.len() + 1);
    data.splice(place..place, bytes.iter().copied());
}

/// Overwrites bytes with a number of 1 to 8 bytes, in either order.
fn write_number(random: &mut Random, data: &mut [u8]) {
    let number = *pick(random, &NUMBERS);
    let size = (1 << random.below(4)).min(data.len());
    let place = at(random, data.len() - size + 1);
    let little = number.to_le_bytes();
    let mut bytes = little[..size].to_vec();
    if one_in(random, 2) {
        bytes.reverse();
    }
    data[place..place + size].copy_from_slice(&bytes);
}

/// The word, number or punctuation around `place`.
fn token(data: &[u8], place: usize) -> std::ops::Range<usize> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    if !is_word(&data[place]) {
        return place..place + 1;
    }
    let start = data[..place].iter().rposition(|byte| !is_word(byte)).map_or(0, |at| at + 1);
    let end =
        data[place..].iter().position(|byte| !is_word(byte)).map_or(data.len(), |n| place + n);
    start..end
}

fn edit_text(random: &mut Random, words: &[&str], others: &[Vec<u8>], data: &mut Vec<u8>) {
    if data.is_empty() {
        return data.extend_from_slice(pick(random, &TEXTS).as_bytes());
    }
    let place = token(data, at(random, data.len()));
    match random.below(8) {
        0 => drop(data.drain(place)),
        1 | 2 => drop(data.splice(place, pick(random, &TEXTS).bytes())),
        3 if !words.is_empty() => drop(data.splice(place, pick(random, words).bytes())),
        4 => {
            let copied = data[token(data, at(random, data.len()))].to_vec();
            drop(data.splice(place, copied));
        }
        5 => copy_line(random, others, data),
        6 => {
            let lines = line(data, place.start);
            drop(data.drain(lines));
        }
        _ => {
            let mark = *pick(random, b"\"'{}[]():,;=#\\\n \t.-+/*<>\0");
            data.insert(place.start, mark);
        }
    }
}

/// The line around `place`, with its end.
fn line(data: &[u8], place: usize) -> std::ops::Range<usize> {
    let start = data[..place].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let end = data[place..].iter().position(|&byte| byte == b'\n');
    start..end.map_or(data.len(), |end| place + end + 1)
}

/// Inserts a line of this or another input before a line of this one.
fn copy_line(random: &mut Random, others: &[Vec<u8>], data: &mut Vec<u8>) {
    let other = match others.is_empty() {
        true => data.clone(),
        false => pick(random, others).clone(),
    };
    if other.is_empty() {
        return;
    }
    let copied = other[line(&other, at(random, other.len()))].to_vec();
    let place = line(data, at(random, data.len())).start;
    data.splice(place..place, copied);
}
