//! Which best-effort model may go on beside which real-time model, learned from how long real time takes.
//!
//! Kernels of small batches leave much of a large device idle, and some pairs of models hardly meet. A pair is tried now and
//! then; as long as real time takes no longer with it than after making everything leave, within what is bearable, that one
//! best-effort task stays while the others leave.

use base::Nanos;

use super::ModelId;

/// How much longer real time may take beside a companion, where nothing else is said.
pub(super) const BEARABLE: f64 = 0.01;

/// Runs without a companion before the first is tried.
const KNOWN_ALONE: u32 = 32;

/// Runs with a companion before it is judged to be borne.
const KNOWN_PAIR: u32 = 24;

/// Runs with a companion after which one that is plainly too much is tried no more.
const KNOWN_ENOUGH: u32 = 4;

/// What is plainly too much, beyond what is bearable.
const PLAINLY: f64 = 0.09;

/// Of so many runs one is without a companion, so that what is compared with is of now.
const ALONE_EVERY: u64 = 16;

/// Of so many runs one tries the pair that is known least: so few that what they suffer stays beyond the ninety-ninth of a
/// hundred.
const TRY_EVERY: u64 = 200;

/// The same where companions are held to a corner: hardly any of them is harsh, and what is not known is not used.
const TRY_EVERY_IN_CORNER: u64 = 16;

/// Of so many runs one tries a pair that was not borne again.
const RETRY_EVERY: u64 = 20_000;

/// Runs the mean goes back.
const MEMORY: f64 = 64.0;

/// A mean that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    count: u32,
    ns: f64,
}

impl Mean {
    fn record(&mut self, time: Nanos) {
        self.count = self.count.saturating_add(1);
        let weight = (1.0 / f64::from(self.count)).max(1.0 / MEMORY);
        self.ns += (time.0 as f64 - self.ns) * weight;
    }
}

/// What is known of one real-time model.
#[derive(Clone, Debug, Default)]
struct Known {
    alone: Mean,
    /// By best-effort model.
    with: Vec<Mean>,
    turn: u64,
}

impl Known {
    fn with(&self, companion: ModelId) -> Mean {
        self.with.get(companion.0 as usize).copied().unwrap_or_default()
    }

    /// Whether trying the pair once more could still change what is thought of it.
    fn is_open(&self, companion: ModelId, bearable: f64) -> bool {
        let pair = self.with(companion);
        let too_much = self.alone.ns * (1.0 + bearable + PLAINLY);
        pair.count < KNOWN_PAIR && (pair.count < KNOWN_ENOUGH || pair.ns <= too_much)
    }

    fn bears(&self, companion: ModelId, bearable: f64) -> bool {
        let pair = self.with(companion);
        pair.count >= KNOWN_PAIR && pair.ns <= self.alone.ns * (1.0 + bearable)
    }
}

/// All that is known.
#[derive(Clone, Debug)]
pub(super) struct Companions {
    known: Vec<Known>,
    bearable: f64,
    try_every: u64,
}

impl Companions {
    /// Nothing is known. Real time may take longer by a share of `bearable`.
    pub(super) fn new(bearable: f64, corner: bool) -> Companions {
        let try_every = if corner { TRY_EVERY_IN_CORNER } else { TRY_EVERY };
        Companions { known: Vec::new(), bearable, try_every }
    }

    /// Forgets what a model of that number was like before.
    pub(super) fn forget(&mut self, model: ModelId) {
        let index = model.0 as usize;
        if index >= self.known.len() {
            self.known.resize_with(index + 1, Known::default);
        }
        self.known[index] = Known::default();
        for known in &mut self.known {
            if let Some(pair) = known.with.get_mut(index) {
                *pair = Mean::default();
            }
        }
    }

    /// Books a run of `real_time` that had `companion` beside it.
    pub(super) fn record(&mut self, real_time: ModelId, companion: Option<ModelId>, time: Nanos) {
        let Some(known) = self.known.get_mut(real_time.0 as usize) else { return };
        match companion {
            None => known.alone.record(time),
            Some(companion) => {
                let index = companion.0 as usize;
                if index >= known.with.len() {
                    known.with.resize(index + 1, Mean::default());
                }
                known.with[index].record(time);
            }
        }
    }

    /// How long a run of `real_time` takes with nobody beside it, once that is known.
    pub(super) fn alone(&self, real_time: ModelId) -> Option<Nanos> {
        let alone = self.known.get(real_time.0 as usize)?.alone;
        (alone.count >= KNOWN_ENOUGH).then_some(Nanos(alone.ns as u64))
    }

    /// Who of `candidates` may stay for the next run of `real_time`; rather the `present` one, who would have to leave.
    pub(super) fn choose(
        &mut self,
        real_time: ModelId,
        present: Option<ModelId>,
        candidates: impl Iterator<Item = ModelId> + Clone,
    ) -> Option<ModelId> {
        let bearable = self.bearable;
        let known = self.known.get_mut(real_time.0 as usize)?;
        known.turn += 1;
        let turn = known.turn;
        if bearable <= 0.0 || known.alone.count < KNOWN_ALONE || turn % ALONE_EVERY == 1 {
            return None;
        }
        let count = |model: &ModelId| known.with(*model).count;
        if turn.is_multiple_of(RETRY_EVERY) {
            return candidates.min_by_key(count);
        }
        if turn.is_multiple_of(self.try_every) {
            let open = candidates.clone().filter(|model| known.is_open(*model, bearable));
            if let Some(least) = open.min_by_key(count) {
                return Some(least);
            }
        }
        let borne = candidates.filter(|model| known.bears(*model, bearable));
        if present.is_some_and(|present| borne.clone().any(|model| model == present)) {
            return present;
        }
        borne.min_by(|a, b| known.with(*a).ns.total_cmp(&known.with(*b).ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL_TIME: ModelId = ModelId(0);
    const MILD: ModelId = ModelId(1);
    const HARSH: ModelId = ModelId(2);

    /// Runs of a model that takes 1,000 ns alone, a little more beside one companion and much more beside the other; how
    /// often each was chosen in the second half.
    fn chosen(rounds: usize) -> [usize; 3] {
        let mut companions = Companions::new(BEARABLE, false);
        for model in [REAL_TIME, MILD, HARSH] {
            companions.forget(model);
        }
        let mut counts = [0; 3];
        for round in 0..rounds {
            let companion = companions.choose(REAL_TIME, None, [HARSH, MILD].into_iter());
            let time = match companion {
                None => 1_000,
                Some(MILD) => 1_005,
                Some(_) => 1_400,
            };
            companions.record(REAL_TIME, companion, Nanos(time));
            if round * 2 >= rounds {
                counts[companion.map_or(0, |model| model.0 as usize)] += 1;
            }
        }
        counts
    }

    #[test]
    fn who_is_borne_stays_and_who_is_not_leaves() {
        let [alone, mild, harsh] = chosen(40_000);
        assert!(mild > 18_000, "{mild} of 20000");
        assert!(harsh <= 1, "{harsh} of 20000");
        assert!(alone >= 20_000 / ALONE_EVERY as usize, "{alone}");
    }

    #[test]
    fn a_model_of_the_same_number_is_tried_anew() {
        let mut companions = Companions::new(BEARABLE, false);
        companions.forget(REAL_TIME);
        companions.forget(MILD);
        for _ in 0..KNOWN_ALONE {
            companions.record(REAL_TIME, None, Nanos(100));
        }
        for _ in 0..KNOWN_PAIR {
            companions.record(REAL_TIME, Some(MILD), Nanos(100));
        }
        // The first turn is one without a companion.
        assert_eq!(companions.choose(REAL_TIME, None, [MILD].into_iter()), None);
        assert_eq!(companions.choose(REAL_TIME, None, [MILD].into_iter()), Some(MILD));
        companions.forget(MILD);
        assert_eq!(companions.choose(REAL_TIME, None, [MILD].into_iter()), None);
    }
}
