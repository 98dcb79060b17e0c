//! Moments in recordings: seconds since 1970, or dates with a time of day.

use super::{DAY_S, TIME_S_MAX};

/// Seconds since 1970 of a number, of `2026-01-31T18:00:00` in UTC, or of the same with an offset:
/// `2026-01-31T20:00:00+02:00`. A date that no calendar has is none.
pub fn seconds_of(text: &str) -> Option<u64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return (0.0..=TIME_S_MAX).contains(&seconds).then_some(seconds as u64);
    }
    let (date, rest) = text.split_once(['T', 't', ' '])?;
    let (time, offset_s) = offset(rest)?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let whole = !fraction.is_empty() && fraction.bytes().all(|byte| byte.is_ascii_digit());
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([year, month, day], [hour, minute, rest @ ..]) = (date.as_slice(), time.as_slice()) else {
        return None;
    };
    let second = match rest {
        [] => 0,
        [second] => *second,
        _ => return None,
    };
    let valid = whole
        && (1970..=9999).contains(year)
        && (1..=12).contains(month)
        && (1..=days_of(*year, *month)).contains(day)
        && *hour < 24
        && *minute < 60
        && second <= 60;
    if !valid {
        return None;
    }
    let local = days_since_1970(*year, *month, *day) * DAY_S + hour * 3600 + minute * 60 + second;
    local.checked_add_signed(-offset_s)
}

/// Numbers of digits alone; `parse` takes a sign, too.
fn numbers(text: &str, separator: char) -> Option<Vec<u64>> {
    let number = |part: &str| {
        let digits = part.bytes().all(|byte| byte.is_ascii_digit()) && part.len() <= 4;
        part.parse().ok().filter(|_| digits)
    };
    text.split(separator).map(number).collect()
}

/// The time of day without its offset, and that in seconds: `Z`, `+02`, `+0200`, `-05:30` or none.
fn offset(text: &str) -> Option<(&str, i64)> {
    if let Some(time) = text.strip_suffix(['Z', 'z']) {
        return Some((time.trim_end(), 0));
    }
    let Some(at) = text.find(['+', '-']) else { return Some((text, 0)) };
    let (time, offset) = text.split_at(at);
    let (sign, digits) = offset.split_at(1);
    let (hours, minutes) = match (digits.split_once(':'), digits.len()) {
        (Some(parts), 5) => parts,
        (None, 4) => digits.split_at_checked(2)?,
        (None, 2) => (digits, "0"),
        _ => return None,
    };
    let (hours, minutes) = (*numbers(hours, ':')?.first()?, *numbers(minutes, ':')?.first()?);
    let seconds = i64::try_from(hours * 3600 + minutes * 60).ok()?;
    let seconds = if sign == "-" { -seconds } else { seconds };
    (hours < 24 && minutes < 60).then_some((time.trim_end(), seconds))
}

fn days_of(year: u64, month: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01, after Howard Hinnant's algorithm: years that begin in March put the leap
/// day last.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let of_era = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    era * 146_097 + of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::seconds_of;

    #[test]
    fn moments_have_an_offset() {
        let noon = seconds_of("2026-03-01T12:00:00Z").unwrap();
        assert_eq!(noon, 1_772_366_400);
        for same in [
            "1772366400",
            "1772366400.75",
            "2026-03-01 12:00",
            "2026-03-01T12:00:00.250",
            "2026-03-01T14:00:00+02:00",
            "2026-03-01T14:00+0200",
            "2026-03-01 14:00:00.5 +02",
            "2026-02-28T22:30:00-13:30",
            "2026-03-02T01:00:00+13:00",
        ] {
            assert_eq!(seconds_of(same), Some(noon), "{same}");
        }
    }

    #[test]
    fn what_no_calendar_has_is_no_moment() {
        for bad in [
            // These two were taken for days in March.
            "2026-02-31T00:00:00",
            "2026-02-29T00:00:00",
            "2100-02-29T00:00:00",
            "2026-04-31T00:00:00",
            "2026-00-10T00:00:00",
            "2026-01-00T00:00:00",
            "2026-01-10T24:00:00",
            "2026-01-10T12:60:00",
            "2026-01-10T12:00:61",
            "2026-01-10T12:00:00.x",
            "2026-01-10T12:00:00ZZ",
            "2026-01-10T12:00:00+2",
            "2026-01-10T12:00:00+02:60",
            "2026-01-10T12:00:00+24:00",
            "2026-01-10T12:00:00+02:00:00",
            "2026-+1-10T12:00:00",
            "1970-01-01T00:00:00+01:00",
            "2026-01-10",
            "-5",
            "nan",
            "",
        ] {
            assert_eq!(seconds_of(bad), None, "{bad}");
        }
        assert!(seconds_of("2028-02-29T00:00:00").is_some());
        assert!(seconds_of("2000-02-29T00:00:00").is_some());
    }
}
