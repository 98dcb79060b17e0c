//! Connections of one listener: limits, the table of open ones, and what each of them is doing.
//!
//! A client owns a connection only for as long as it makes progress. Every wait for a client has a
//! limit: for the first byte, a request head, more of a body, the next request, and the bytes of a
//! response that it does not take. See ADR 38.

use std::net::IpAddr;
use std::time::Duration;

mod io;
mod read_ahead;
mod request_body;
mod response_body;
mod table;
mod windows;

pub(crate) use io::{GuardedIo, OverSocket};
pub(crate) use read_ahead::ReadAhead;
pub(crate) use request_body::{BodyError, BodyRules, DrainDeadline, RequestBody};
pub(crate) use response_body::TrackedBody;
pub(crate) use table::{CloseReason, Connection, ConnectionTable};
pub(crate) use windows::Windows;

/// Limits on the connections of one listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum number of open connections. A new one closes the connection that is idle for the
    /// longest time; it is refused if none is idle.
    pub max_connections: usize,
    /// The same for one client address: an IPv4 address, or a /64 network of IPv6.
    pub max_per_address: usize,
    /// Time for a TLS handshake, for the first byte, and for a request head from its first byte on.
    pub head_timeout: Duration,
    /// Time without a byte of a request body.
    pub body_timeout: Duration,
    /// Time between requests.
    pub idle_timeout: Duration,
    /// Time in which a client takes no byte of a response.
    pub write_timeout: Duration,
    /// Maximum number of concurrent HTTP/2 streams of one connection.
    pub max_streams: u32,
    /// Interval of HTTP/2 pings; the reply must arrive within the same time.
    pub ping_interval: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits {
            max_connections: 8192,
            max_per_address: 4096,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(300),
            write_timeout: Duration::from_secs(30),
            max_streams: 1024,
            ping_interval: Duration::from_secs(20),
        }
    }
}

impl ConnectionLimits {
    /// Interval in which a connection's waits are checked.
    pub(crate) fn check_interval(&self) -> Duration {
        let shortest = self.head_timeout.min(self.idle_timeout).min(self.write_timeout);
        (shortest / 4).clamp(Duration::from_millis(25), Duration::from_secs(5))
    }
}

/// Minimum rate of bodies, in both directions, in bytes per second: a client that sends one byte
/// before each timeout does not hold a request for ever.
const MIN_BODY_RATE: u64 = 1024;

/// Time that `bytes` take at the minimum rate.
fn slowest(bytes: u64) -> Duration {
    Duration::from_secs(bytes / MIN_BODY_RATE)
}

/// What counts as one address: a host of IPv4, or a network of IPv6, because a host chooses any
/// address of it.
pub(crate) fn address_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[4..].fill(0);
            IpAddr::from(segments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_one_network_share_a_key() {
        let key = |text: &str| address_key(text.parse().unwrap());
        assert_eq!(key("2001:db8:0:1::5"), key("2001:db8:0:1:ffff::9"));
        assert_ne!(key("2001:db8:0:1::5"), key("2001:db8:0:2::5"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
    }
}
