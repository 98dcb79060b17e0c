//! Strings of a tensor.

use std::ops::{Deref, Range};
use std::sync::Arc;

use bytes::Bytes;

use crate::Reservation;

/// String elements in row-major order. Clones and parts share them: a million strings are not
/// copied where nobody has reserved memory for a copy.
#[derive(Clone, Debug)]
pub struct Strings {
    shared: Arc<Shared>,
    range: Range<usize>,
}

#[derive(Debug)]
struct Shared {
    elements: Vec<Bytes>,
    /// Of the handles. Contents hold reservations of their own.
    _reservation: Option<Reservation>,
}

impl Strings {
    /// Elements, and the reservation of the memory of their handles.
    pub fn reserved(elements: Vec<Bytes>, reservation: Reservation) -> Strings {
        Strings::new(elements, Some(reservation))
    }

    fn new(elements: Vec<Bytes>, reservation: Option<Reservation>) -> Strings {
        let range = 0..elements.len();
        Strings { shared: Arc::new(Shared { elements, _reservation: reservation }), range }
    }

    /// The elements `range` of these; `None` when they do not exist.
    pub fn part(&self, range: Range<usize>) -> Option<Strings> {
        self.get(range.clone())?;
        let start = self.range.start;
        let range = start + range.start..start + range.end;
        Some(Strings { shared: self.shared.clone(), range })
    }
}

impl From<Vec<Bytes>> for Strings {
    fn from(elements: Vec<Bytes>) -> Strings {
        Strings::new(elements, None)
    }
}

impl Deref for Strings {
    type Target = [Bytes];
    fn deref(&self) -> &[Bytes] {
        &self.shared.elements[self.range.clone()]
    }
}

impl PartialEq for Strings {
    fn eq(&self, other: &Strings) -> bool {
        **self == **other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostMemory;

    #[test]
    fn handles_are_reserved_until_the_last_part_is_gone() {
        let memory = HostMemory::leaked(1 << 20);
        let words: Vec<Bytes> = ["a", "b", "c"].map(Bytes::from).to_vec();
        let all = Strings::reserved(words.clone(), memory.reserve(96).unwrap());
        let part = all.part(1..3).unwrap().part(1..2).unwrap();
        assert_eq!((&*part, &*all), (&words[2..], &words[..]));
        assert!(part.part(0..2).is_none() && part == Strings::from(words[2..].to_vec()));
        drop(all);
        assert_eq!(memory.used(), 96);
        drop(part);
        assert_eq!(memory.used(), 0);
    }
}
