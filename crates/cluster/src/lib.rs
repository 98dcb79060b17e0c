//! Many machines as one server: frontends that take requests, backends that run models, and a scheduler
//! that plans in epochs. State lives in a [`store`]; nothing here agrees on anything by itself.

pub mod election;
pub mod lease;
pub mod record;
pub mod scheduler;
pub mod store;
pub mod view;
