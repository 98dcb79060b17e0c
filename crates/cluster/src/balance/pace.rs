//! How far a backend is with its turns, as far as one who sends to it can tell from what was sent and what came back.

use base::Nanos;

/// A backend that does nothing but one model, seen from a frontend: some requests run, the others gather for the next turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    running: usize,
    gathered: usize,
    /// When what runs began.
    began: Nanos,
}

/// A turn as it is planned, as far as one frontend fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Requests it takes at most.
    pub batch: usize,
    /// Requests that let it begin before the first of them has to.
    pub least: usize,
    /// How long a full one runs.
    pub full: Nanos,
}

impl Pace {
    /// A request was sent: it waits for others, or completes what a turn begins with.
    pub fn sent(&mut self, now: Nanos, turn: Turn) {
        self.gathered += 1;
        self.begin(now, turn);
    }

    fn begin(&mut self, now: Nanos, turn: Turn) {
        if self.running == 0 && self.gathered >= turn.least.max(1) {
            self.running = self.gathered.min(turn.batch.max(1));
            self.gathered -= self.running;
            self.began = now;
        }
    }

    /// A request was answered. The last one of a turn lets the next begin with what has gathered. An answer from one that
    /// seemed to wait means that the first request there could not wait any longer.
    pub fn answered(&mut self, now: Nanos, turn: Turn) {
        if self.running == 0 {
            self.running = std::mem::take(&mut self.gathered);
        }
        self.running = self.running.saturating_sub(1);
        self.begin(now, turn);
    }

    /// A request was given up before its turn.
    pub fn dropped(&mut self, now: Nanos, turn: Turn) {
        match self.gathered {
            0 => self.answered(now, turn),
            _ => self.gathered -= 1,
        }
    }

    /// Requests for the next turn.
    pub fn gathered(&self) -> usize {
        self.gathered
    }

    /// When the next turn is expected to begin. About half of a full turn's time is taken by a batch of any size.
    pub fn opens(&self, now: Nanos, turn: Turn) -> Nanos {
        if self.running == 0 {
            return now;
        }
        let batch = turn.batch.max(1) as u64;
        let part = batch + (self.running as u64).min(batch);
        now.max(self.began + Nanos(turn.full.0 / (2 * batch) * part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Turn = Turn { batch: 4, least: 1, full: Nanos(80) };

    #[test]
    fn turns_follow_from_what_is_sent_and_answered() {
        let mut pace = Pace::default();
        pace.sent(Nanos(10), TURN);
        assert_eq!((pace.gathered(), pace.opens(Nanos(11), TURN)), (0, Nanos(60)));
        (0..5).for_each(|_| pace.sent(Nanos(20), TURN));
        assert_eq!(pace.gathered(), 5);
        pace.answered(Nanos(55), TURN);
        assert_eq!((pace.gathered(), pace.opens(Nanos(56), TURN)), (1, Nanos(135)));
        pace.dropped(Nanos(60), TURN);
        (0..4).for_each(|_| pace.answered(Nanos(135), TURN));
        assert_eq!((pace.gathered(), pace.opens(Nanos(140), TURN)), (0, Nanos(140)));
        pace.dropped(Nanos(150), TURN);
        assert_eq!((pace.running, pace.gathered), (0, 0));
    }

    #[test]
    fn a_turn_waits_for_what_it_begins_with_and_for_no_longer_than_it_can() {
        let turn = Turn { least: 3, ..TURN };
        let mut pace = Pace::default();
        (0..2).for_each(|_| pace.sent(Nanos(5), turn));
        assert_eq!((pace.gathered(), pace.opens(Nanos(6), turn)), (2, Nanos(6)));
        pace.sent(Nanos(7), turn);
        assert_eq!((pace.gathered(), pace.opens(Nanos(8), turn)), (0, Nanos(77)));
        (0..3).for_each(|_| pace.answered(Nanos(77), turn));
        // Two more went without a third, when the first had to.
        (0..2).for_each(|_| pace.sent(Nanos(80), turn));
        pace.answered(Nanos(150), turn);
        assert_eq!((pace.running, pace.gathered), (1, 0));
    }
}
