//! The audit log: one JSON line for each change and each refusal.
//!
//! Lines are written by a thread of their own: no request waits for the disk. They hold no token,
//! no body and no header but the request's id.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Lines that wait to be written; further ones are counted and left out.
const QUEUE: usize = 4096;
/// Refusals written per second: a client that sends wrong tokens must not fill the disk.
const REFUSALS_PER_SECOND: u64 = 200;
/// Maximum length of a path in a line.
const MAX_PATH: usize = 256;

/// A change that a client requested.
#[derive(Serialize)]
pub(crate) struct Changed<'a> {
    pub(crate) change: &'a str,
    pub(crate) status: u16,
    pub(crate) peer: SocketAddr,
    pub(crate) subject: Option<&'a str>,
    pub(crate) request_id: &'a str,
    pub(crate) path: &'a str,
}

/// A request that was refused.
#[derive(Serialize)]
pub(crate) struct Refused<'a> {
    pub(crate) reason: &'a str,
    pub(crate) status: u16,
    pub(crate) peer: SocketAddr,
    pub(crate) subject: Option<&'a str>,
    pub(crate) request_id: &'a str,
    pub(crate) path: &'a str,
}

#[derive(Serialize)]
struct Line<'a, T> {
    time: String,
    event: &'a str,
    #[serde(flatten)]
    content: &'a T,
    /// Lines that were left out since the line before.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The audit log of a server.
pub(crate) struct AuditLog {
    lines: Option<SyncSender<String>>,
    left_out: AtomicU64,
    /// The second in which refusals were written, and how many.
    second: AtomicU64,
    in_second: AtomicU64,
}

impl AuditLog {
    /// Appends to the file at `path`, which only its owner may read; without one, lines go to the
    /// log under the target `audit`.
    pub(crate) fn open(path: Option<&Path>) -> Result<AuditLog, String> {
        let lines = path.map(|path| {
            let mut options = OpenOptions::new();
            let file = options.append(true).create(true).mode(0o600).open(path);
            let file = file.map_err(|error| format!("--audit-log {}: {error}", path.display()))?;
            let (sender, receiver) = sync_channel(QUEUE);
            let writer = move || write_lines(&receiver, file);
            let thread = std::thread::Builder::new().name("audit".to_string()).spawn(writer);
            thread.map_err(|error| format!("--audit-log: {error}"))?;
            Ok::<_, String>(sender)
        });
        Ok(AuditLog {
            lines: lines.transpose()?,
            left_out: AtomicU64::new(0),
            second: AtomicU64::new(0),
            in_second: AtomicU64::new(0),
        })
    }

    pub(crate) fn change(&self, change: &Changed<'_>) {
        self.write("change", &Changed { path: shorten(change.path), ..*change });
    }

    pub(crate) fn refusal(&self, refused: &Refused<'_>) {
        let second = super::unix_seconds();
        if self.second.swap(second, Relaxed) != second {
            self.in_second.store(0, Relaxed);
        }
        if self.in_second.fetch_add(1, Relaxed) >= REFUSALS_PER_SECOND {
            self.left_out.fetch_add(1, Relaxed);
            return;
        }
        self.write("refusal", &Refused { path: shorten(refused.path), ..*refused });
    }

    /// A file of credentials or certificates was read again.
    pub(crate) fn reloaded(&self, what: &str) {
        #[derive(Serialize)]
        struct Reloaded<'a> {
            reloaded: &'a str,
        }
        self.write("reload", &Reloaded { reloaded: what });
    }

    fn write(&self, event: &str, content: &impl Serialize) {
        let left_out = self.left_out.swap(0, Relaxed);
        let line = Line { time: timestamp(SystemTime::now()), event, content, left_out };
        let Ok(line) = serde_json::to_string(&line) else { return };
        match &self.lines {
            None => tracing::info!(target: "audit", "{line}"),
            Some(lines) => {
                if lines.try_send(line).is_err() {
                    self.left_out.fetch_add(left_out + 1, Relaxed);
                }
            }
        }
    }
}

fn shorten(path: &str) -> &str {
    let end = path.floor_char_boundary(MAX_PATH);
    &path[..end]
}

fn write_lines(lines: &Receiver<String>, mut file: std::fs::File) {
    let mut warned = false;
    for line in lines {
        let written = file.write_all(format!("{line}\n").as_bytes());
        if let Err(error) = written
            && !std::mem::replace(&mut warned, true)
        {
            tracing::error!(%error, "the audit log cannot be written");
        }
    }
}

/// A time as RFC 3339 writes it, in UTC with milliseconds.
pub(crate) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days in eras of 400 years that begin on 1 March, so that leap days come last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (1_735_689_600, "2025-01-01T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_flood_of_refusals_is_cut_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let log = AuditLog::open(Some(&path)).unwrap();
        let refused = Refused {
            reason: "host",
            status: 403,
            peer: "127.0.0.1:1".parse().unwrap(),
            subject: Some("token:a"),
            request_id: "x\n\"",
            path: &"é".repeat(1000),
        };
        (0..2000).for_each(|_| log.refusal(&refused));
        let changed = Changed {
            change: "load",
            status: 200,
            peer: refused.peer,
            subject: None,
            request_id: "7",
            path: "/v2",
        };
        log.change(&changed);
        drop(log);
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let lines = loop {
            let text = std::fs::read_to_string(&path).unwrap();
            if text.contains("\"load\"") || std::time::Instant::now() > deadline {
                break text;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let count = lines.lines().count();
        assert!((201..=601).contains(&count), "{count}");
        for line in lines.lines() {
            assert!(line.len() < 1000);
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
        let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert!(last["left_out"].as_u64().unwrap() >= 1000, "{last}");
    }
}
