//! Many machines as one server: frontends receive requests, backends run models, and a scheduler
//! plans in epochs. The cluster's state is in a [`store`]; consensus is the store's task.

pub mod backend;
pub mod balance;
pub mod candidate;
pub mod election;
pub mod frontend;
pub mod lease;
pub mod load_reports;
pub mod membership;
pub mod model_store;
pub mod query;
pub mod record;
pub mod record_keeper;
pub mod retention;
pub mod scaling;
pub mod scheduler;
pub mod snapshot;
pub mod state_file;
pub mod status;
pub mod store;
pub mod tls;
