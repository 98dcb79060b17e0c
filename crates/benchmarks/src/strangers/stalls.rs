//! What stalled real time: the server's own words about a slow request, and its threads meanwhile.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::rest_client::{Connection, plain};

/// Stalls that are looked into, at most: each costs the server a trace.
const MAX_STALLS: usize = 40;

/// Time between two looks at the server's threads.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Threads that are reported with a stall.
const THREADS_SHOWN: usize = 5;

/// A real-time request that took long, as its client saw it.
pub(super) struct SlowRequest {
    pub(super) at: Instant,
    pub(super) latency_ms: f64,
}

/// A slow request, looked into.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stall {
    /// Since the strangers began.
    pub(super) at_s: f64,
    /// From when it was due to its reply.
    pub(super) latency_ms: f64,
    /// Of it inside the server, from arrival to reply; the rest is connections and clients.
    pub(super) server_ms: Option<f64>,
    /// The server's explanation.
    pub(super) why: Option<String>,
    /// The server's threads that ran or waited for a core most, in about the last 100 ms.
    pub(super) threads: Vec<ThreadShare>,
}

/// Time of all threads of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ThreadShare {
    pub(super) name: String,
    pub(super) ran_ms: f64,
    /// Ready to run, and without a core.
    pub(super) waited_ms: f64,
}

/// Nanoseconds a thread has run and waited for a core, by its id.
type ThreadTimes = BTreeMap<u64, (String, u64, u64)>;

/// Looks into slow requests until all senders are gone. `process` is the server's.
pub(super) fn watch(
    server: SocketAddr,
    process: u32,
    began: Instant,
    slow: &Receiver<SlowRequest>,
) -> Vec<Stall> {
    let mut connection = Connection::new(server);
    let (mut stalls, mut earlier) = (Vec::new(), thread_times(process));
    loop {
        match slow.recv_timeout(SAMPLE_INTERVAL) {
            Ok(request) if stalls.len() < MAX_STALLS => {
                let now = thread_times(process);
                let (server_ms, why) = explained(&mut connection).unzip();
                stalls.push(Stall {
                    at_s: request.at.duration_since(began).as_secs_f64(),
                    latency_ms: request.latency_ms,
                    server_ms,
                    why,
                    threads: shares(&earlier, &now),
                });
                earlier = now;
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => earlier = thread_times(process),
            Err(RecvTimeoutError::Disconnected) => return stalls,
        }
    }
}

/// The slowest real-time request of the last moments: milliseconds, and why.
fn explained(connection: &mut Connection) -> Option<(f64, String)> {
    let reply = connection.exchange(&plain("GET", "/v2/atoll/trace?seconds=0.25")).ok()?;
    slowest(&serde_json::from_slice(&reply.body).ok()?)
}

fn slowest(trace: &Value) -> Option<(f64, String)> {
    let (mut open, mut slowest) = (BTreeMap::new(), None);
    for event in trace["traceEvents"].as_array()? {
        // Phases of a request have its number and names of their own.
        let (number, name) = (event["id2"]["local"].as_str(), event["name"].as_str());
        let key = (event["pid"].as_u64(), number, name);
        match event["ph"].as_str() {
            Some("b") if event["args"]["class"] == "rt" => {
                open.insert(key, event);
            }
            Some("e") => {
                let Some(begin) = open.remove(&key) else { continue };
                let ms = (event["ts"].as_f64()? - begin["ts"].as_f64()?) / 1e3;
                if slowest.as_ref().is_none_or(|(longest, _)| ms > *longest) {
                    let why = begin["args"]["why"].as_str().unwrap_or_default();
                    slowest = Some((ms, why.to_string()));
                }
            }
            _ => {}
        }
    }
    slowest
}

/// What Linux counts for every thread of a process; empty elsewhere.
fn thread_times(process: u32) -> ThreadTimes {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return ThreadTimes::new();
    };
    let times = tasks.flatten().filter_map(|task| {
        let id = task.file_name().to_str()?.parse().ok()?;
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let counted = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let mut counted = counted.split_whitespace().map_while(|count| count.parse().ok());
        Some((id, (name.trim().to_string(), counted.next()?, counted.next()?)))
    });
    times.collect()
}

/// The threads that ran or waited most between two looks, by name.
fn shares(earlier: &ThreadTimes, now: &ThreadTimes) -> Vec<ThreadShare> {
    let mut by_name: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (id, (name, ran, waited)) in now {
        let (ran_before, waited_before) =
            earlier.get(id).map_or((0, 0), |(_, ran, waited)| (*ran, *waited));
        let sum = by_name.entry(name).or_default();
        sum.0 += ran.saturating_sub(ran_before);
        sum.1 += waited.saturating_sub(waited_before);
    }
    let ms = |nanos: u64| (nanos as f64 / 1e4).round() / 100.0;
    let mut shares: Vec<ThreadShare> = by_name
        .into_iter()
        .map(|(name, (ran, waited))| ThreadShare {
            name: name.to_string(),
            ran_ms: ms(ran),
            waited_ms: ms(waited),
        })
        .filter(|share| share.ran_ms + share.waited_ms > 0.0)
        .collect();
    shares.sort_by(|a, b| (b.ran_ms + b.waited_ms).total_cmp(&(a.ran_ms + a.waited_ms)));
    shares.truncate(THREADS_SHOWN);
    shares
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slowest_real_time_request_is_found() {
        let begin = |id: &str, ts: f64, class: &str, why: &str| {
            json!({"ph": "b", "pid": 1, "id2": {"local": id}, "name": "m", "ts": ts,
                   "args": {"class": class, "why": why}})
        };
        let ends = |id: &str, name: &str, ts: f64| {
            let number = json!({"local": id});
            json!({"ph": "e", "pid": 1, "id2": number, "name": name, "ts": ts})
        };
        let end = |id: &str, ts: f64| ends(id, "m", ts);
        let trace = json!({"traceEvents": [
            begin("0x1", 0.0, "be", "long"), begin("0x2", 10.0, "rt", "slow"),
            begin("0x3", 20.0, "rt", "fast"), ends("0x2", "stage", 21.0),
            end("0x3", 30.0), end("0x2", 3_010.0),
            end("0x1", 9_000.0), begin("0x4", 1.0, "rt", "not ended"),
        ]});
        assert_eq!(slowest(&trace), Some((3.0, "slow".to_string())));
        assert_eq!(slowest(&json!({})), None);
    }

    #[test]
    fn threads_of_one_name_are_added_up() {
        let times = |rows: &[(u64, &str, u64, u64)]| -> ThreadTimes {
            rows.iter()
                .map(|(id, name, ran, waited)| (*id, (name.to_string(), *ran, *waited)))
                .collect()
        };
        let earlier = times(&[(1, "worker", 1_000_000, 0), (2, "worker", 5_000_000, 0)]);
        let now = times(&[
            (1, "worker", 3_000_000, 500_000),
            (2, "worker", 5_000_000, 0),
            (3, "compile", 9_000_000, 0),
            (4, "idle", 0, 0),
        ]);
        let share = |name: &str, ran_ms: f64, waited_ms: f64| ThreadShare {
            name: name.to_string(),
            ran_ms,
            waited_ms,
        };
        let expected = vec![share("compile", 9.0, 0.0), share("worker", 2.0, 0.5)];
        assert_eq!(shares(&earlier, &now), expected);
    }
}
