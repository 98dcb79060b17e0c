//! Budgets of further attempts: a share of the requests, so that attempts never multiply a load
//! that the backends already fail to serve. Pure.

/// Attempts that may be made beyond the first ones.
#[derive(Clone, Debug)]
pub struct AttemptBudget {
    share: f64,
    max: f64,
    tokens: f64,
}

impl AttemptBudget {
    /// A budget of `share` attempts for each request. Up to `max` that were not used are kept, and
    /// there are that many at the start.
    pub fn new(share: f64, max: f64) -> AttemptBudget {
        AttemptBudget { share, max, tokens: max }
    }

    /// Records requests.
    pub fn earn(&mut self, requests: u64) {
        self.tokens = (self.tokens + self.share * requests as f64).min(self.max);
    }

    /// Takes one attempt, if there is one.
    pub fn take(&mut self) -> bool {
        let enough = self.tokens >= 1.0;
        if enough {
            self.tokens -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    #[test]
    fn attempts_never_exceed_their_share() {
        let mut random = Random::new(5);
        for (share, max) in [(0.05, 10.0), (0.2, 100.0), (0.0, 1.0)] {
            let mut budget = AttemptBudget::new(share, max);
            let (mut requests, mut attempts) = (0u64, 0u64);
            for _ in 0..20_000 {
                let count = random.below(3);
                budget.earn(count);
                requests += count;
                for _ in 0..random.below(4) {
                    attempts += u64::from(budget.take());
                }
                let allowed = max + share * requests as f64;
                assert!(attempts as f64 <= allowed, "{attempts} of {allowed}");
            }
            assert!(attempts as f64 >= share * requests as f64, "{attempts} of {requests}");
        }
    }

    #[test]
    fn unused_attempts_are_kept_up_to_a_limit() {
        let mut budget = AttemptBudget::new(0.1, 3.0);
        budget.earn(1_000_000);
        assert_eq!((0..10).filter(|_| budget.take()).count(), 3);
    }
}
