//! A backend's health, judged by its replies: a lease only says that the process renews it.
//!
//! Pure, with time as a parameter. A backend is ejected when its replies stop, fail or take far
//! longer than those of its peers. After a pause that grows with every ejection one request probes
//! it, and a good reply brings it back with a small share of the load at first.

use base::Nanos;

use super::BackendCandidate;

/// First and longest pause of an ejected backend.
const PAUSE_MIN: Nanos = Nanos::from_millis(1000);
const PAUSE_MAX: Nanos = Nanos::from_millis(30_000);
/// The same where it could not be reached: to try again costs nothing.
const LOST_PAUSE_MIN: Nanos = Nanos::from_millis(250);
const LOST_PAUSE_MAX: Nanos = Nanos::from_millis(2000);
/// Time in service after which an ejection is forgotten, one for each such time.
const FORGIVE: Nanos = Nanos::from_millis(20_000);
/// Failures in a row that eject a backend whose connections stay open.
const FAILURES_MAX: u32 = 5;
/// Replies before a backend's latency is compared with its peers'.
const SAMPLES_MIN: u32 = 8;
/// Ratio to the median of its peers from which a latency is an outlier.
const OUTLIER_RATIO: f64 = 3.0;
/// A backend whose replies take less is no outlier, whatever its peers take.
const OUTLIER_MIN: Nanos = Nanos::from_millis(50);
/// Weight of one reply in the average of latencies.
const SMOOTHING: f64 = 0.2;
/// How long a newcomer, and a backend that returns, gets less than its share.
const SLOW_START: Nanos = Nanos::from_millis(3000);
/// Share that it begins with.
const SLOW_START_SHARE: f64 = 0.1;

/// Why a backend was ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EjectionReason {
    /// It replied to nothing for longer than a request should take.
    Silent,
    /// Its replies take far longer than those of its peers.
    Slow,
    /// Its replies, or attempts to reach it, failed.
    Failing,
}

impl EjectionReason {
    /// All of them, in the order of their numbers.
    pub const ALL: [EjectionReason; 3] =
        [EjectionReason::Silent, EjectionReason::Slow, EjectionReason::Failing];

    /// Its name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            EjectionReason::Silent => "silent",
            EjectionReason::Slow => "slow",
            EjectionReason::Failing => "failing",
        }
    }

    /// What it means, in a sentence about the backend.
    pub fn sentence(self) -> &'static str {
        match self {
            EjectionReason::Silent => "it replied to nothing for longer than a request should take",
            EjectionReason::Slow => "its replies take far longer than those of its peers",
            EjectionReason::Failing => "its replies, or attempts to reach it, failed",
        }
    }
}

/// Whether a backend takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It does.
    Serving,
    /// It is ejected.
    Ejected,
    /// Its pause is over: one request may probe it.
    ProbeDue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving {
        since: Nanos,
    },
    Ejected {
        since: Nanos,
        until: Nanos,
    },
    /// The request that was sent then decides.
    Probing {
        sent: Nanos,
    },
}

/// The health of one backend, as one frontend sees it.
#[derive(Clone, Debug)]
pub struct BackendHealth {
    state: State,
    /// Ejections that are not forgotten.
    level: u32,
    last_reply: Nanos,
    failures: u32,
    /// Whether the last request failed because the connection did.
    lost: bool,
    ejections: [u64; EjectionReason::ALL.len()],
    /// Of the last ejection.
    reason: Option<EjectionReason>,
}

impl BackendHealth {
    /// A backend that is new at `now`.
    pub fn new(now: Nanos) -> BackendHealth {
        BackendHealth {
            state: State::Serving { since: now },
            level: 0,
            last_reply: Nanos::ZERO,
            failures: 0,
            lost: false,
            ejections: Default::default(),
            reason: None,
        }
    }

    /// Whether it takes requests at `now`.
    pub fn availability(&self, now: Nanos) -> Availability {
        match self.state {
            State::Serving { .. } => Availability::Serving,
            State::Ejected { until, .. } if until <= now => Availability::ProbeDue,
            State::Ejected { .. } | State::Probing { .. } => Availability::Ejected,
        }
    }

    /// Share of its weight that counts at `now`: it grows while the backend is new or has just
    /// returned.
    pub fn share(&self, now: Nanos) -> f64 {
        let State::Serving { since } = self.state else { return SLOW_START_SHARE };
        let part = (now - since).0 as f64 / SLOW_START.0 as f64;
        part.clamp(SLOW_START_SHARE, 1.0)
    }

    /// Ejections so far, for each reason.
    pub fn ejections(&self) -> [u64; EjectionReason::ALL.len()] {
        self.ejections
    }

    /// Why it does not serve now, if it does not.
    pub fn ejected_for(&self) -> Option<EjectionReason> {
        self.reason.filter(|_| !matches!(self.state, State::Serving { .. }))
    }

    /// How many ejections are not forgotten: the worst backends have most.
    pub fn level(&self) -> u32 {
        self.level
    }

    /// Whether it is ejected because it could not be reached.
    pub fn is_lost(&self) -> bool {
        self.lost && !matches!(self.state, State::Serving { .. })
    }

    /// Claims the probe: `true` for one request after each pause.
    pub fn begin_probe(&mut self, now: Nanos) -> bool {
        let due = self.availability(now) == Availability::ProbeDue;
        if due {
            self.state = State::Probing { sent: now };
        }
        due
    }

    /// The request sent at `sent` ended without a verdict: its client went away. If it was the
    /// probe, the next request probes.
    pub fn abandon_probe(&mut self, now: Nanos, sent: Nanos) {
        if self.state == (State::Probing { sent }) {
            self.state = State::Ejected { since: now, until: now };
        }
    }

    /// A request sent at `sent` was answered. Only the probe brings an ejected backend back: other
    /// replies are to requests that waited there while it was silent. One that could not be reached
    /// is back with the first request that reaches it.
    pub fn replied(&mut self, now: Nanos, sent: Nanos) {
        self.last_reply = self.last_reply.max(now);
        let lost = std::mem::take(&mut self.lost);
        self.failures = 0;
        match self.state {
            State::Probing { sent: probe } if probe == sent => {
                self.state = State::Serving { since: now };
            }
            State::Ejected { since, .. } if lost && since < sent => {
                self.state = State::Serving { since: now };
            }
            State::Serving { since } if self.level > 0 && now - since > FORGIVE => {
                self.level -= 1;
                // A whole period for the next one; slow start is long over and stays over.
                self.state = State::Serving { since: Nanos(now.0.saturating_sub(SLOW_START.0)) };
            }
            _ => {}
        }
    }

    /// A request sent at `sent` has waited longer than it should. Returns whether the backend is
    /// silent: since then it has replied to no request at all. A silent one is ejected.
    pub fn overdue(&mut self, now: Nanos, sent: Nanos) -> bool {
        let silent = self.last_reply <= sent;
        match self.state {
            State::Probing { sent: probe } if probe == sent => {
                self.eject(now, EjectionReason::Silent);
            }
            State::Serving { since } if silent && since <= sent => {
                self.eject(now, EjectionReason::Silent);
            }
            _ => {}
        }
        silent
    }

    /// A request sent at `sent` failed. With `lost`, the connection did.
    pub fn failed(&mut self, now: Nanos, sent: Nanos, lost: bool) {
        self.failures += 1;
        self.lost = lost;
        let ejects = match self.state {
            State::Serving { since } => (lost && since <= sent) || self.failures >= FAILURES_MAX,
            State::Probing { sent: probe } => probe == sent,
            State::Ejected { .. } => false,
        };
        if ejects {
            self.eject(now, EjectionReason::Failing);
        }
    }

    /// Its latency is an outlier.
    pub fn slow(&mut self, now: Nanos) {
        if matches!(self.state, State::Serving { .. }) {
            self.eject(now, EjectionReason::Slow);
        }
    }

    fn eject(&mut self, now: Nanos, reason: EjectionReason) {
        let (first, longest) = match self.lost && reason == EjectionReason::Failing {
            true => (LOST_PAUSE_MIN, LOST_PAUSE_MAX),
            false => (PAUSE_MIN, PAUSE_MAX),
        };
        let pause = Nanos(first.0 << self.level.min(16)).min(longest);
        self.state = State::Ejected { since: now, until: now + pause };
        self.level = (self.level + 1).min(16);
        self.failures = 0;
        self.ejections[reason as usize] += 1;
        self.reason = Some(reason);
    }
}

/// Latency of one model's replies from one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplyLatency {
    average_ns: f64,
    samples: u32,
}

impl ReplyLatency {
    /// Adds a reply.
    pub fn record(&mut self, latency: Nanos) {
        let part = if self.samples == 0 { 1.0 } else { SMOOTHING };
        self.average_ns += (latency.0 as f64 - self.average_ns) * part;
        self.samples = self.samples.saturating_add(1);
    }

    /// The average, once it says something.
    pub fn average(&self) -> Option<Nanos> {
        (self.samples >= SAMPLES_MIN).then_some(Nanos(self.average_ns as u64))
    }
}

/// Whether a backend's latency is an outlier: a multiple of the median of its peers, and a
/// substantial part of the model's objective where it has one.
pub fn is_outlier(own: ReplyLatency, peers: &[ReplyLatency], objective: Option<Nanos>) -> bool {
    let Some(own) = own.average() else { return false };
    let mut peers: Vec<Nanos> = peers.iter().filter_map(ReplyLatency::average).collect();
    if peers.is_empty() {
        return false;
    }
    peers.sort_unstable();
    let median = peers[peers.len() / 2];
    let least = objective.map_or(OUTLIER_MIN, |objective| OUTLIER_MIN.min(Nanos(objective.0 / 2)));
    own > least && own.0 as f64 > median.0 as f64 * OUTLIER_RATIO
}

/// Lets ejected candidates serve again where more than half of all would be missing: a pool in
/// which everything looks ill is not to be given up. `level` returns how ill a candidate is, and
/// `None` for one that cannot be reached, which stays away.
pub fn limit_ejections(candidates: &mut [BackendCandidate], level: impl Fn(usize) -> Option<u32>) {
    let down = candidates.iter().filter(|candidate| candidate.down).count();
    let excess = down.saturating_sub(candidates.len() / 2);
    if excess > 0 {
        let ejected = (0..candidates.len()).filter(|&index| candidates[index].down);
        let mut ejected: Vec<(u32, usize)> =
            ejected.filter_map(|index| Some((level(index)?, index))).collect();
        ejected.sort_unstable();
        ejected.into_iter().take(excess).for_each(|(_, index)| candidates[index].down = false);
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    const MS: u64 = 1_000_000;

    fn at(ms: u64) -> Nanos {
        Nanos(ms * MS)
    }

    #[test]
    fn a_silent_backend_is_ejected_and_one_probe_decides() {
        let mut health = BackendHealth::new(at(0));
        health.replied(at(10), at(9));
        // Another request was answered after this one was sent: busy, but not silent.
        assert!(!health.overdue(at(60), at(8)));
        assert_eq!(health.availability(at(60)), Availability::Serving);
        assert!(health.overdue(at(100), at(50)));
        assert_eq!(health.availability(at(100)), Availability::Ejected);
        // A late reply does not bring it back.
        health.replied(at(400), at(50));
        assert_eq!(health.availability(at(1099)), Availability::Ejected);
        assert_eq!(health.availability(at(1100)), Availability::ProbeDue);
        assert!(health.begin_probe(at(1100)));
        assert!(!health.begin_probe(at(1100)), "one probe");
        assert_eq!(health.ejected_for(), Some(EjectionReason::Silent));
        health.replied(at(1101), at(1100));
        assert_eq!(health.availability(at(1101)), Availability::Serving);
        assert_eq!(health.ejected_for(), None);
        assert_eq!(health.share(at(1101)), SLOW_START_SHARE);
        assert_eq!(health.share(at(9000)), 1.0);
    }

    #[test]
    fn pauses_grow_and_are_forgotten() {
        let mut health = BackendHealth::new(at(0));
        let (mut now, mut pauses) = (at(0), Vec::new());
        for _ in 0..8 {
            let sent = now;
            assert!(health.overdue(now + at(50), sent));
            now += at(50);
            let ejected = now;
            while health.availability(now) == Availability::Ejected {
                now += at(10);
            }
            pauses.push((now - ejected).0 / MS);
            assert!(health.begin_probe(now));
            health.replied(now + at(1), now);
            now += at(2);
        }
        assert_eq!(pauses, [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]);
        for second in 0..400 {
            health.replied(now + at(second * 1000), now);
        }
        assert_eq!(health.level(), 0);
    }

    #[test]
    fn an_abandoned_probe_is_repeated_and_a_failed_one_ejects() {
        let mut health = BackendHealth::new(at(0));
        health.slow(at(1));
        assert!(health.begin_probe(at(1001)));
        health.abandon_probe(at(1002), at(1000));
        assert!(!health.begin_probe(at(1002)), "another request was abandoned");
        health.abandon_probe(at(1002), at(1001));
        assert!(health.begin_probe(at(1003)));
        health.failed(at(1004), at(900), false);
        assert_eq!(health.availability(at(1004)), Availability::Ejected, "not the probe's");
        health.failed(at(1005), at(1003), false);
        assert_eq!(health.availability(at(3004)), Availability::Ejected);
        assert_eq!(health.availability(at(3005)), Availability::ProbeDue);
        assert_eq!(health.ejections(), [0, 1, 1]);
    }

    #[test]
    fn a_lost_backend_is_back_with_the_first_request_that_reaches_it() {
        let mut health = BackendHealth::new(at(0));
        health.failed(at(5), at(4), true);
        assert!(health.is_lost());
        health.replied(at(6), at(3));
        assert_eq!(health.availability(at(6)), Availability::Ejected, "sent before it was lost");
        health.failed(at(7), at(6), true);
        health.replied(at(9), at(8));
        assert_eq!(health.availability(at(9)), Availability::Serving);
        health.failed(at(20), at(19), true);
        assert_eq!(health.availability(at(20 + 500)), Availability::ProbeDue);
    }

    #[test]
    fn failures_in_a_row_eject() {
        let mut health = BackendHealth::new(at(0));
        for failure in 0..u64::from(FAILURES_MAX) {
            assert_eq!(health.availability(at(failure)), Availability::Serving);
            health.failed(at(failure), at(failure), false);
        }
        assert_eq!(health.availability(at(9)), Availability::Ejected);
        let mut health = BackendHealth::new(at(0));
        for failure in 0..100 {
            health.failed(at(failure), at(failure), false);
            health.replied(at(failure), at(failure));
        }
        assert_eq!(health.availability(at(200)), Availability::Serving);
    }

    #[test]
    fn an_outlier_is_far_from_its_peers_and_from_the_objective() {
        let latency = |ms: u64| {
            let mut latency = ReplyLatency::default();
            (0..SAMPLES_MIN).for_each(|_| latency.record(at(ms)));
            latency
        };
        let peers = [latency(20), latency(30), latency(25)];
        assert!(is_outlier(latency(100), &peers, None));
        assert!(!is_outlier(latency(60), &peers, None), "less than three times the median");
        assert!(!is_outlier(latency(40), &[latency(1)], None), "fast enough for anybody");
        assert!(is_outlier(latency(40), &[latency(1)], Some(at(60))), "most of the objective");
        assert!(!is_outlier(latency(900), &[], None), "no peer");
        assert!(!is_outlier(ReplyLatency::default(), &peers, None), "no sample");
    }

    /// Whatever happens to the backends of a pool, at most half of them are avoided.
    #[test]
    fn at_most_half_of_a_pool_is_ejected() {
        let mut random = Random::new(26);
        for count in 1..12usize {
            let mut healths = vec![BackendHealth::new(at(0)); count];
            for step in 0..2000u64 {
                let (now, sent) = (at(step * 20), at(step * 20 - (step * 20).min(60)));
                for health in &mut healths {
                    match random.below(8) {
                        0 => health.replied(now, sent),
                        1 => drop(health.overdue(now, sent)),
                        2 => health.failed(now, sent, true),
                        3 => health.slow(now),
                        4 => drop(health.begin_probe(now)),
                        5 => health.abandon_probe(now, now),
                        _ => {}
                    }
                }
                let down =
                    |health: &BackendHealth| health.availability(now) != Availability::Serving;
                let mut candidates: Vec<BackendCandidate> = healths
                    .iter()
                    .map(|health| BackendCandidate {
                        weight: 1.0,
                        outstanding: 0,
                        depth: 4,
                        down: down(health),
                        progress: None,
                    })
                    .collect();
                let level = |index: usize| {
                    let health: &BackendHealth = &healths[index];
                    (!health.is_lost()).then_some(health.level())
                };
                limit_ejections(&mut candidates, level);
                let avoided = candidates.iter().filter(|candidate| candidate.down).count();
                let ill = healths.iter().filter(|health| down(health)).count();
                let lost = healths.iter().filter(|health| health.is_lost()).count();
                assert_eq!(avoided, ill.min(lost.max(count / 2)), "{ill} of {count}");
            }
        }
    }
}
