//! The limits in a model's settings, for all its clients together.

use std::sync::atomic::Ordering;

use api::InferOptions;
use api::error::ApiResult;

use super::served_model::ServedModel;
use crate::auth::usage::Slot;
use crate::auth::{Reason, Refusal};

/// Admits a request within the limits of its model. The result counts as one of its concurrent
/// requests until it is dropped.
pub(super) fn admit(served: &ServedModel, options: &InferOptions) -> ApiResult<Slot> {
    let admitted = check(served, options);
    admitted.map_err(|refusal| {
        served.counters.limited.fetch_add(1, Ordering::Relaxed);
        refusal.into_error()
    })
}

fn check(served: &ServedModel, options: &InferOptions) -> Result<Slot, Refusal> {
    let limits = &served.config.limits;
    let owner = || format!("model '{}'", served.name);
    let class = options.class.unwrap_or(served.config.class);
    if !limits.classes.is_empty() && !limits.classes.contains(&class) {
        let why = format!("{}: its settings do not allow class {}", owner(), class.as_str());
        return Err(Refusal::new(Reason::Class, why));
    }
    let priority = options.priority.unwrap_or(served.config.priority);
    if let Some(highest) = limits.max_priority
        && priority < highest
    {
        let why = format!("{}: its settings do not allow priority {priority}", owner());
        return Err(Refusal::new(Reason::Priority, format!("{why}; the highest is {highest}")));
    }
    if limits.rate.is_none() && limits.concurrency.is_none() {
        return Ok(Slot::unlimited());
    }
    // A refused request takes nothing off the rate.
    let slot = Slot::take(served.usage.clone(), limits.concurrency, &owner())?;
    served.usage.take(limits.rate, &owner())?;
    Ok(slot)
}
