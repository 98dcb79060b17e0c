//! Models that backends hold although the store has no record of them.
//!
//! A model that was deleted has a tombstone. One that has neither record nor tombstone was lost
//! with the store, and a backend is about to write its record again. A leader that plans before
//! that must not take the model from those who serve it.

use std::collections::BTreeMap;

use super::deployment::ModelFacts;
use crate::record::LoadState;
use crate::record::canary::split_served;
use crate::snapshot::ClusterSnapshot;

/// The models without a record, as the backends that serve them report them. The memory they take
/// is not known.
pub(super) fn held_without_record(snapshot: &ClusterSnapshot) -> BTreeMap<String, ModelFacts> {
    let held = snapshot.states.values().flat_map(|state| &state.models);
    held.filter_map(|(served, state)| {
        let LoadState::Ready { version } = state else { return None };
        // A canary whose model has a record without it has ended.
        let model = split_served(served).0;
        let is_lost = !snapshot.models.contains_key(model) && !snapshot.deleted.contains(model);
        is_lost.then(|| (served.clone(), ModelFacts { version: *version, memory_bytes: 0 }))
    })
    .collect()
}
