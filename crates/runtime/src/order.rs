//! Execution orders: which waiting real-time request of a priority starts first.
//!
//! An order is one file with one type. It maps a request to a sort key; the core computes the key
//! when the request enters its queue and compares only keys afterwards. To add an order, write a
//! file beside the others and add it to [`ORDERS`].
//!
//! ```
//! use base::Nanos;
//! use runtime::order::{self, OrderedRequest};
//!
//! let request = |deadline_us, run_us| OrderedRequest {
//!     deadline: Nanos::from_micros(deadline_us),
//!     remaining: Some(Nanos::from_micros(run_us)),
//! };
//! let (short, long) = (request(900, 50), request(1_000, 700));
//!
//! let edf = order::by_name("edf").expect("a known order");
//! assert!(edf.key(&short) < edf.key(&long));
//! let least_laxity = order::by_name("least_laxity").expect("a known order");
//! assert!(least_laxity.key(&long) < least_laxity.key(&short));
//! ```

mod edf;
mod fifo;
mod least_laxity;

use std::fmt::Debug;

use base::Nanos;

pub use self::edf::Edf;
pub use self::fifo::Fifo;
pub use self::least_laxity::LeastLaxity;

/// A real-time request as an order sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedRequest {
    /// When its reply is of no more use; `Nanos::MAX` without a deadline.
    pub deadline: Nanos,
    /// Device time it still needs; `None` while the core does not know.
    pub remaining: Option<Nanos>,
}

/// The order in which waiting real-time requests of one priority start.
pub trait ExecutionOrder: Debug + Send + Sync {
    /// The name users select it by.
    fn name(&self) -> &'static str;

    /// The sort key of a request that enters the queue: the smallest starts first, and of equal
    /// ones the one that arrived first.
    fn key(&self, request: &OrderedRequest) -> u64;
}

/// Every order, the default first.
pub const ORDERS: [&dyn ExecutionOrder; 3] = [&Edf, &Fifo, &LeastLaxity];

/// The order of that name.
pub fn by_name(name: &str) -> Option<&'static dyn ExecutionOrder> {
    ORDERS.into_iter().find(|order| order.name() == name)
}

/// The names of all orders, for messages.
pub fn names() -> String {
    ORDERS.map(ExecutionOrder::name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_order_by_its_name() {
        for order in ORDERS {
            assert_eq!(by_name(order.name()).map(ExecutionOrder::name), Some(order.name()));
        }
        assert!(by_name("random").is_none());
    }
}
