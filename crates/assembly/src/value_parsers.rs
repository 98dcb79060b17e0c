//! Parsers of argument values.

use base::Bytes;

/// Units of memory, and their bytes.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

/// Parses an amount of memory: `8GiB`, `500 MB`, `1.5GiB`, or a number of bytes.
///
/// # Errors
/// When it is none.
pub fn memory(text: &str) -> Result<Bytes, String> {
    let help = || format!("'{text}' is no amount of memory; write it like 8GiB, 500MiB or 2GB");
    let trimmed = text.trim();
    let unit = UNITS.iter().find(|(unit, _)| {
        let at = trimmed.len().checked_sub(unit.len());
        at.and_then(|at| trimmed.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(unit))
    });
    let (number, factor) = match unit {
        Some((unit, factor)) => (&trimmed[..trimmed.len() - unit.len()], *factor),
        None => (trimmed, 1),
    };
    let number: f64 = number.trim().parse().map_err(|_| help())?;
    let bytes = number * factor as f64;
    if !bytes.is_finite() || !(1.0..=1e18).contains(&bytes) {
        return Err(help());
    }
    Ok(Bytes(bytes as u64))
}

/// Parses the share, in percent, by which real time may slow down.
///
/// # Errors
/// When it is no number from 0 to 100.
pub fn max_rt_slowdown(text: &str) -> Result<f64, String> {
    let percent: f64 = text.parse().map_err(|_| "a number of percent".to_string())?;
    match (0.0..=100.0).contains(&percent) {
        true => Ok(percent),
        false => Err("0 to 100 percent".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_parsed_with_units() {
        for (text, bytes) in [
            ("8GiB", 8 << 30),
            ("1.5 GiB", 3 << 29),
            ("500MB", 500_000_000),
            ("2gb", 2_000_000_000),
            ("64 MiB", 64 << 20),
            ("4096", 4096),
            ("7B", 7),
        ] {
            assert_eq!(memory(text), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "0", "lots", "1e30GB", "NaN", "8Gi B"] {
            assert!(memory(text).is_err(), "{text}");
        }
    }
}
