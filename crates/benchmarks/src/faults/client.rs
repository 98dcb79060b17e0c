//! A client that sends without pause and compares every reply.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use assembly::Failure;

use crate::rest_client::{Connection, HttpReply};

/// Pause after a refusal.
const REFUSED_PAUSE: Duration = Duration::from_millis(2);

/// A network of the server with the reply that it must give.
pub(super) struct ServedNetwork {
    pub(super) name: String,
    pub(super) message: Vec<u8>,
    expected: Vec<u8>,
    right: AtomicU64,
    seen: Mutex<Seen>,
}

/// What a client saw since the last fault.
struct Seen {
    last_right: Instant,
    /// The longest time between two right replies.
    gap: Duration,
    /// The first refusal.
    refused: Option<Instant>,
}

impl ServedNetwork {
    /// # Errors
    /// When it gives no reply.
    pub(super) fn new(
        name: String,
        message: Vec<u8>,
        server: SocketAddr,
    ) -> Result<ServedNetwork, Failure> {
        let reply = Connection::new(server).exchange(&message).map_err(Failure::failed)?;
        let Some((_, expected)) = reply.parts().filter(|_| reply.status == 200) else {
            return Err(Failure::failed(format!("{name}: {}", reply.text())));
        };
        let expected = expected.to_vec();
        let seen = Seen { last_right: Instant::now(), gap: Duration::ZERO, refused: None };
        let (right, seen) = (AtomicU64::new(0), Mutex::new(seen));
        Ok(ServedNetwork { name, message, expected, right, seen })
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Right replies so far.
    pub(super) fn right(&self) -> u64 {
        self.right.load(Ordering::SeqCst)
    }

    /// Forgets what was seen before the next fault.
    pub(super) fn reset(&self) {
        let mut seen = self.seen();
        (seen.gap, seen.refused) = (Duration::ZERO, None);
    }

    /// The longest time between two right replies since the last reset.
    pub(super) fn gap(&self) -> Duration {
        self.seen().gap
    }

    /// The first refusal since the last reset.
    pub(super) fn refused(&self) -> Option<Instant> {
        self.seen().refused
    }

    fn count_right(&self) {
        let (mut seen, now) = (self.seen(), Instant::now());
        seen.gap = seen.gap.max(now - seen.last_right);
        seen.last_right = now;
        drop(seen);
        self.right.fetch_add(1, Ordering::SeqCst);
    }

    fn is_right(&self, reply: &HttpReply) -> bool {
        reply.parts().is_some_and(|(_, data)| data == self.expected)
    }
}

/// What became of the requests of a client.
#[derive(Clone, Debug, Default)]
pub(super) struct ClientRecord {
    pub(super) right: u64,
    /// Refused with 503 and the time after which to try again.
    pub(super) refused: u64,
    pub(super) wrong: u64,
    /// Connections that were refused, or closed before the reply to a request.
    pub(super) unanswered: u64,
    /// What was wrong or missing, the first few.
    pub(super) failures: Vec<String>,
}

impl ClientRecord {
    const MAX_FAILURES: usize = 10;

    pub(super) fn add(&mut self, other: ClientRecord) {
        self.right += other.right;
        self.refused += other.refused;
        self.wrong += other.wrong;
        self.unanswered += other.unanswered;
        self.failures.extend(other.failures);
        self.failures.truncate(ClientRecord::MAX_FAILURES);
    }

    fn fail(&mut self, network: &str, why: &str) {
        if self.failures.len() < ClientRecord::MAX_FAILURES {
            self.failures.push(format!("{network}: {why}"));
        }
    }
}

/// Sends one request after another until the end.
pub(super) fn run(
    server: SocketAddr,
    network: &ServedNetwork,
    is_ended: &AtomicBool,
) -> ClientRecord {
    let mut record = ClientRecord::default();
    let mut connection = Connection::new(server);
    while !is_ended.load(Ordering::SeqCst) {
        match connection.exchange(&network.message) {
            Ok(reply) if reply.status == 200 && network.is_right(&reply) => {
                record.right += 1;
                network.count_right();
            }
            Ok(reply) if reply.status == 503 && reply.retry_after => {
                record.refused += 1;
                network.seen().refused.get_or_insert_with(Instant::now);
                std::thread::sleep(REFUSED_PAUSE);
            }
            Ok(reply) => {
                record.wrong += 1;
                record.fail(&network.name, &reply.text());
            }
            Err(why) => {
                record.unanswered += 1;
                record.fail(&network.name, &why);
                std::thread::sleep(REFUSED_PAUSE);
            }
        }
    }
    record
}
