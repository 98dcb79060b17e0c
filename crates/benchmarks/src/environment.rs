//! Where and when a benchmark runs, for its report.

use std::time::{SystemTime, UNIX_EPOCH};

/// The version of the GPU's driver, if its kernel module reports one.
pub(crate) fn driver(device: &str) -> Option<String> {
    if !device.starts_with("cuda") {
        return None;
    }
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let numbered =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(numbered).map(str::to_string)
}

/// Resident memory of this process, if the system reports it.
pub(crate) fn process_bytes() -> Option<u64> {
    resident_bytes(None)
}

/// Resident memory of a process, of this one when none is named.
pub(crate) fn resident_bytes(pid: Option<u32>) -> Option<u64> {
    let process = pid.map_or("self".to_string(), |pid| pid.to_string());
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// The command line, without the binary's folder.
pub(crate) fn command() -> String {
    ["atoll".to_string()].into_iter().chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ")
}

/// Today in UTC, as YYYY-MM-DD.
pub(crate) fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = civil((now.as_secs() / 86_400) as i64);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The date `days` days after 1970-01-01 (Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_converted_to_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }
}
