//! Takes the models from the last backends, so that they can be removed.
//!
//! First the routes are withdrawn: frontends keep new requests from then on, and report them at
//! once, while the backends still have their models and answer what was sent before. Only when no
//! request came for a while are the models taken. A request in between ends it all, and costs
//! nothing.

use base::Nanos;

use crate::scaling::activity::{Activity, IdleClock};
use crate::snapshot::ClusterSnapshot;

/// Time between the withdrawal of routes and that of models. Frontends follow the store within
/// milliseconds, and report a request within a quarter of a second.
const PAUSE: Nanos = Nanos::from_millis(3000);

/// What is withdrawn now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawal {
    /// The routes.
    Routes,
    /// The models, too.
    Models,
}

/// Whether the last backends are being emptied.
#[derive(Clone, Debug, Default)]
pub struct Emptying {
    idle: IdleClock,
    activity: Activity,
    /// Backends are scaled.
    scaled: bool,
    allowed: bool,
    since: Option<Nanos>,
}

impl Emptying {
    /// Allows it, or not, from the next step on. Called where backends are scaled.
    pub fn allow(&mut self, allowed: bool) {
        (self.scaled, self.allowed) = (true, allowed);
    }

    /// Whether backends are scaled.
    pub fn is_scaled(&self) -> bool {
        self.scaled
    }

    /// The activity as of the last step.
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// What is withdrawn at `now`; nothing while there are requests, or while not all backends are
    /// drained.
    pub fn update(
        &mut self,
        now: Nanos,
        snapshot: &ClusterSnapshot,
        all_drained: bool,
    ) -> Option<Withdrawal> {
        self.activity = self.idle.update(now, snapshot);
        let empties = self.allowed && all_drained && self.activity.idle_for.is_some();
        self.since = empties.then(|| self.since.unwrap_or(now));
        self.since.map(|since| match now - since >= PAUSE {
            true => Withdrawal::Models,
            false => Withdrawal::Routes,
        })
    }
}
