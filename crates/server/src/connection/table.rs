//! The open connections of a listener, with what each of them waits for.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use super::{ConnectionLimits, address_key, slowest};

/// Why the server closed or refused a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// No complete request head in time.
    Head,
    /// No request for a long time.
    Idle,
    /// The client does not take its response.
    Write,
    /// It was idle, and a new connection needed its place.
    Displaced,
    /// The listener is full, and no connection is idle.
    Full,
    /// The client's address has too many connections, and none of them is idle.
    Address,
    /// The TLS handshake failed.
    Handshake,
    /// It was still open when the server stopped.
    Stopped,
}

impl CloseReason {
    pub(crate) const ALL: [CloseReason; 8] = [
        CloseReason::Head,
        CloseReason::Idle,
        CloseReason::Write,
        CloseReason::Displaced,
        CloseReason::Full,
        CloseReason::Address,
        CloseReason::Handshake,
        CloseReason::Stopped,
    ];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            CloseReason::Head => "head_timeout",
            CloseReason::Idle => "idle_timeout",
            CloseReason::Write => "write_timeout",
            CloseReason::Displaced => "displaced",
            CloseReason::Full => "full",
            CloseReason::Address => "address_full",
            CloseReason::Handshake => "handshake",
            CloseReason::Stopped => "stopped",
        }
    }
}

/// The open connections of a listener.
pub(crate) struct ConnectionTable {
    /// Name of the listener in logs and metrics.
    pub(crate) listener: &'static str,
    pub(crate) limits: ConnectionLimits,
    open: Mutex<OpenConnections>,
    closed: [AtomicU64; CloseReason::ALL.len()],
    accept_failures: AtomicU64,
    started: Instant,
}

#[derive(Default)]
struct OpenConnections {
    next: u64,
    connections: HashMap<u64, Arc<Connection>>,
    per_address: HashMap<IpAddr, usize>,
}

impl OpenConnections {
    fn remove(&mut self, id: u64) -> Option<Arc<Connection>> {
        let connection = self.connections.remove(&id)?;
        if let Some(count) = self.per_address.get_mut(&connection.address) {
            *count -= 1;
            if *count == 0 {
                self.per_address.remove(&connection.address);
            }
        }
        Some(connection)
    }

    /// The connections that are idle for the longest time, at most `count`, of the address with
    /// the most idle ones: a client that opens many closes its own first.
    fn longest_idle(&self, only: Option<IpAddr>, count: usize) -> Vec<u64> {
        let mut idle: HashMap<IpAddr, Vec<(u64, u64)>> = HashMap::new();
        for (id, connection) in &self.connections {
            if connection.is_idle() && only.is_none_or(|only| only == connection.address) {
                let since = connection.idle_since.load(Relaxed);
                idle.entry(connection.address).or_default().push((since, *id));
            }
        }
        let most = idle.into_values().max_by_key(Vec::len).unwrap_or_default();
        let mut most = most;
        most.sort_unstable();
        most.into_iter().take(count).map(|(_, id)| id).collect()
    }
}

impl ConnectionTable {
    pub(crate) fn new(listener: &'static str, limits: ConnectionLimits) -> Arc<ConnectionTable> {
        Arc::new(ConnectionTable {
            listener,
            limits,
            open: Mutex::default(),
            closed: Default::default(),
            accept_failures: AtomicU64::new(0),
            started: Instant::now(),
        })
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds since the table was made, never 0.
    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64 + 1
    }

    /// Adds a connection from `peer`. Where a limit is reached, idle ones are closed for it.
    pub(crate) fn admit(self: &Arc<Self>, peer: SocketAddr) -> Result<OpenConnection, CloseReason> {
        let address = address_key(peer.ip());
        let mut open = self.open();
        let of_address = open.per_address.get(&address).copied().unwrap_or(0);
        if of_address >= self.limits.max_per_address {
            self.displace(&mut open, Some(address), 1).ok_or(CloseReason::Address)?;
        } else if open.connections.len() >= self.limits.max_connections {
            // Several at once: finding them reads the whole table.
            let count = (self.limits.max_connections / 64).max(1);
            self.displace(&mut open, None, count).ok_or(CloseReason::Full)?;
        }
        let id = open.next;
        open.next += 1;
        let now = self.now();
        let connection = Arc::new(Connection {
            table: self.clone(),
            id,
            peer,
            address,
            opened: now,
            in_flight: AtomicUsize::new(0),
            endless: AtomicUsize::new(0),
            idle_since: AtomicU64::new(now),
            head_since: AtomicU64::new(0),
            preface: AtomicU8::new(0),
            silent: AtomicBool::new(true),
            closing: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            undelivered: Mutex::default(),
            close: Notify::new(),
        });
        open.connections.insert(id, connection.clone());
        *open.per_address.entry(address).or_default() += 1;
        Ok(OpenConnection(connection))
    }

    fn displace(
        &self,
        open: &mut OpenConnections,
        only: Option<IpAddr>,
        count: usize,
    ) -> Option<()> {
        let victims = open.longest_idle(only, count);
        for id in &victims {
            if let Some(connection) = open.remove(*id) {
                connection.close.notify_one();
                self.count(CloseReason::Displaced);
            }
        }
        (!victims.is_empty()).then_some(())
    }

    /// Closes the longest idle connection, to free a file descriptor.
    pub(crate) fn free_descriptor(&self) -> bool {
        self.accept_failures.fetch_add(1, Relaxed);
        self.displace(&mut self.open(), None, 1).is_some()
    }

    pub(crate) fn count(&self, reason: CloseReason) {
        self.closed[reason as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn closed(&self, reason: CloseReason) -> u64 {
        self.closed[reason as usize].load(Relaxed)
    }

    pub(crate) fn accept_failures(&self) -> u64 {
        self.accept_failures.load(Relaxed)
    }

    pub(crate) fn len(&self) -> usize {
        self.open().connections.len()
    }
}

/// A connection in its table; dropping it removes it.
pub(crate) struct OpenConnection(pub(crate) Arc<Connection>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.table.open().remove(self.0.id);
    }
}

/// What one connection is doing.
pub(crate) struct Connection {
    table: Arc<ConnectionTable>,
    id: u64,
    pub(crate) peer: SocketAddr,
    address: IpAddr,
    opened: u64,
    in_flight: AtomicUsize,
    /// Those whose responses have no end of their own.
    endless: AtomicUsize,
    idle_since: AtomicU64,
    /// When the first byte of a request head arrived; 0 for none.
    head_since: AtomicU64,
    /// How many bytes of HTTP/2's preface began the connection; `NOT_HTTP2` for others.
    preface: AtomicU8,
    /// No byte has arrived.
    silent: AtomicBool,
    /// The server wants to close it, unless something has arrived that was not read.
    closing: AtomicBool,
    unread: AtomicBool,
    /// Deadlines of response data that the client has not taken.
    undelivered: Mutex<Vec<(u64, Instant)>>,
    pub(crate) close: Notify,
}

/// The first bytes of HTTP/2; no method of HTTP/1 begins like this.
const PREFACE: &[u8] = b"PRI";
const NOT_HTTP2: u8 = u8::MAX;

impl Connection {
    pub(crate) fn limits(&self) -> &ConnectionLimits {
        &self.table.limits
    }

    /// Records bytes that arrived.
    pub(crate) fn received(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.silent.store(false, Relaxed);
        let matched = self.preface.load(Relaxed);
        if usize::from(matched) < PREFACE.len() {
            let rest = &PREFACE[usize::from(matched)..];
            let length = rest.len().min(bytes.len());
            let next = match rest[..length] == bytes[..length] {
                true => matched + length as u8,
                false => NOT_HTTP2,
            };
            self.preface.store(next, Relaxed);
        }
        if self.in_flight.load(Relaxed) == 0 && self.head_since.load(Relaxed) == 0 {
            self.head_since.store(self.table.now(), Relaxed);
        }
    }

    pub(crate) fn is_http2(&self) -> bool {
        usize::from(self.preface.load(Relaxed)) == PREFACE.len()
    }

    /// Whether it is known not to be HTTP/2.
    pub(crate) fn is_http1(&self) -> bool {
        self.preface.load(Relaxed) == NOT_HTTP2
    }

    /// Records that a request's head is complete.
    pub(crate) fn begin(self: &Arc<Self>) -> RequestInFlight {
        self.in_flight.fetch_add(1, Relaxed);
        self.head_since.store(0, Relaxed);
        RequestInFlight(self.clone())
    }

    /// Records that a response has no end of its own.
    pub(crate) fn begin_endless(self: &Arc<Self>) -> EndlessResponse {
        self.endless.fetch_add(1, Relaxed);
        EndlessResponse(self.clone())
    }

    /// Records that `bytes` of a response were handed over for sending.
    pub(crate) fn sending(self: &Arc<Self>, bytes: u64) -> Undelivered {
        let deadline = Instant::now() + self.limits().write_timeout + slowest(bytes);
        let mut undelivered = self.undelivered.lock().unwrap_or_else(PoisonError::into_inner);
        let id = undelivered.last().map_or(0, |(id, _)| id + 1);
        undelivered.push((id, deadline));
        // Data that is still to be sent keeps the connection in use, as its request did.
        self.in_flight.fetch_add(1, Relaxed);
        Undelivered { request: RequestInFlight(self.clone()), id }
    }

    /// Whether no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.load(Relaxed) == 0
    }

    /// Whether a server that stops may close it: all that is in flight has no end of its own.
    pub(crate) fn is_finished(&self) -> bool {
        self.in_flight.load(Relaxed) <= self.endless.load(Relaxed)
    }

    /// Whether its client waits for nothing and has begun nothing: HTTP/1 between two requests.
    pub(crate) fn is_between_requests(&self) -> bool {
        let is_begun = self.silent.load(Relaxed) || self.head_since.load(Relaxed) != 0;
        self.is_idle() && !is_begun && !self.is_http2()
    }

    /// Looks for what has arrived at the next read.
    pub(crate) fn begin_closing(&self) {
        self.unread.store(false, Relaxed);
        self.closing.store(true, Relaxed);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    pub(crate) fn note_unread(&self, unread: bool) {
        self.unread.store(unread, Relaxed);
    }

    /// Whether something had arrived at the last read that was not read.
    pub(crate) fn has_unread(&self) -> bool {
        self.unread.load(Relaxed)
    }

    /// Why the connection must be closed now, if so.
    pub(crate) fn overdue(&self) -> Option<CloseReason> {
        let (limits, now) = (self.limits(), self.table.now());
        let late = |since: u64, limit: std::time::Duration| {
            u128::from(now.saturating_sub(since)) > limit.as_millis()
        };
        let undelivered = self.undelivered.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = undelivered.iter().map(|(_, deadline)| *deadline).min();
        if earliest.is_some_and(|earliest| earliest < Instant::now()) {
            return Some(CloseReason::Write);
        }
        if self.in_flight.load(Relaxed) > 0 {
            return None;
        }
        let head_since = self.head_since.load(Relaxed);
        let partial = head_since != 0 && !self.is_http2() && late(head_since, limits.head_timeout);
        let silent = self.silent.load(Relaxed) && late(self.opened, limits.head_timeout);
        if partial || silent {
            return Some(CloseReason::Head);
        }
        late(self.idle_since.load(Relaxed), limits.idle_timeout).then_some(CloseReason::Idle)
    }
}

/// A request of a connection, until its response is sent.
pub(crate) struct RequestInFlight(pub(crate) Arc<Connection>);

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        self.0.idle_since.store(self.0.table.now(), Relaxed);
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// A response that goes on until its client or the server ends it.
pub(crate) struct EndlessResponse(Arc<Connection>);

impl Drop for EndlessResponse {
    fn drop(&mut self) {
        self.0.endless.fetch_sub(1, Relaxed);
    }
}

/// Data of a response that the client has not taken yet.
pub(crate) struct Undelivered {
    request: RequestInFlight,
    id: u64,
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        let undelivered = &self.request.0.undelivered;
        let mut undelivered = undelivered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(at) = undelivered.binary_search_by_key(&self.id, |(id, _)| *id) {
            undelivered.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn peer(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn table(max_connections: usize, max_per_address: usize) -> Arc<ConnectionTable> {
        let limits = ConnectionLimits {
            max_connections,
            max_per_address,
            head_timeout: Duration::ZERO,
            ..ConnectionLimits::default()
        };
        ConnectionTable::new("test", limits)
    }

    #[test]
    fn a_full_table_closes_idle_connections_of_the_largest_address() {
        let table = table(4, 4);
        let small = table.admit(peer("10.0.0.1:1")).ok().unwrap();
        let many: Vec<_> = (0..3).filter_map(|_| table.admit(peer("10.0.0.2:1")).ok()).collect();
        let busy = many[0].0.begin();
        let next = table.admit(peer("10.0.0.3:1")).ok().unwrap();
        assert_eq!((table.len(), table.closed(CloseReason::Displaced)), (4, 1));
        assert!(table.open().connections.contains_key(&small.0.id));
        assert!(table.open().connections.contains_key(&many[0].0.id));
        drop((busy, many));
        // Those that were closed for another one are not counted twice.
        assert_eq!(table.len(), 2);
        drop((small, next));
        assert!(table.open().per_address.is_empty());
    }

    #[test]
    fn busy_connections_stay_and_new_ones_are_refused() {
        let table = table(2, 1);
        let first = table.admit(peer("10.0.0.1:1")).ok().unwrap();
        let _busy = first.0.begin();
        let refused = table.admit(peer("10.0.0.1:2")).err();
        assert_eq!(refused, Some(CloseReason::Address));
        let second = table.admit(peer("10.0.0.2:1")).ok().unwrap();
        let _also = second.0.begin();
        assert_eq!(table.admit(peer("10.0.0.3:1")).err(), Some(CloseReason::Full));
    }

    #[test]
    fn silent_and_partial_connections_are_overdue_and_http2_is_not() {
        let table = table(9, 9);
        let open = || table.admit(peer("10.0.0.1:1")).ok().unwrap();
        let (silent, partial, http2, slow) = (open(), open(), open(), open());
        partial.0.received(b"POST /");
        http2.0.received(b"P");
        http2.0.received(b"RI * HTTP/2.0");
        slow.0.received(b"PRO");
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(silent.0.overdue(), Some(CloseReason::Head));
        assert_eq!(partial.0.overdue(), Some(CloseReason::Head));
        assert_eq!(slow.0.overdue(), Some(CloseReason::Head));
        assert!(http2.0.is_http2() && http2.0.overdue().is_none());
        let _request = partial.0.begin();
        assert_eq!(partial.0.overdue(), None);
    }
}
