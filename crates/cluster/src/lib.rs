//! Many machines as one server: frontends that take requests, backends that run models, and a scheduler
//! that plans in epochs. State lives in a [`store`]; nothing here agrees on anything by itself.

pub mod backend;
pub mod balance;
pub mod election;
pub mod frontend;
pub mod lease;
pub mod membership;
pub mod model_store;
pub mod query;
pub mod record;
pub mod scaling;
pub mod scheduler;
pub mod snapshot;
pub mod status;
pub mod store;
mod tls;
