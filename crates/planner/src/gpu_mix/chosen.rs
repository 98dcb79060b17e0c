//! Who is served when not all can be.
//!
//! Services are added in the order of who comes first, as many at once as fit. One that does not
//! fit is passed over, and those behind it are still tried: in the room that is left, and with all
//! services planned again. At the end nobody who was passed over fits beside those who are served.

use super::{Assignment, Mixer};
use crate::error::PlanError;
use crate::problem::Sharing;
use crate::search_control::SearchControl;

/// Most services that are planned on the way, over all attempts: about half a minute.
const WORK_MAX: u64 = 4_000_000;
/// How much longer a service with shared slices takes, and one with spare capacity.
const WORK_SHARED: u64 = 16;
const WORK_SPARE: u64 = 4;

/// The services that are served, and their plan.
struct Served {
    services: Vec<usize>,
    plan: Option<Assignment>,
}

/// A service that did not fit, with what decides whether another one of its model is harder.
struct Refused {
    service: usize,
    rate: f64,
    slo_ms: f64,
}

impl Mixer<'_> {
    pub(super) fn count_work(&self, services: usize) {
        let shared = if self.problem.rules.sharing == Sharing::Time { WORK_SHARED } else { 1 };
        let spare = if self.problem.survive.is_some() { WORK_SPARE } else { 1 };
        self.work.set(self.work.get().saturating_add(services as u64 * shared * spare));
    }

    /// The plan with the services that are served, and these.
    pub(super) fn choose(
        &self,
        control: &mut SearchControl<'_>,
    ) -> Result<(Assignment, Vec<usize>), PlanError> {
        self.work.set(0);
        let mut served = Served { services: Vec::new(), plan: None };
        let mut left = self.order();
        // A service may fit beside more services although it did not fit beside fewer, because
        // plans are not exact. So those who were passed over are tried until nobody is added.
        let mut first = true;
        loop {
            let before = served.services.len();
            left = self.add(&mut served, &left, first, control)?;
            first = false;
            if served.services.len() == before || left.is_empty() || self.is_over(control) {
                break;
            }
        }
        let plan = served.plan.ok_or(PlanError::NoStock)?;
        // Services that were added to a kind may all together be cheaper elsewhere.
        let whole = self.solve(&served.services, control)?;
        let plan = super::cheaper(Some(plan), whole).ok_or(PlanError::NoStock)?;
        Ok((plan, served.services))
    }

    fn is_over(&self, control: &SearchControl<'_>) -> bool {
        control.is_stopped() || self.work.get() > WORK_MAX
    }

    /// Adds those of `order` that fit, one after another; returns the others. With `skip`, services
    /// that are harder than one that did not fit are not tried.
    fn add(
        &self,
        served: &mut Served,
        order: &[usize],
        skip: bool,
        control: &mut SearchControl<'_>,
    ) -> Result<Vec<usize>, PlanError> {
        let (mut left, mut refused) = (Vec::new(), Vec::new());
        let (mut at, mut count) = (0, 1);
        while at < order.len() {
            count = count.min(order.len() - at);
            let next = &order[at..at + count];
            let hopeless = self.is_over(control)
                || !self.may_fit(&served.services, next)
                || (skip && count == 1 && self.is_harder(next[0], &refused));
            let found = if hopeless { None } else { self.with(served, next, control)? };
            match found {
                Some(plan) => {
                    served.plan = Some(plan);
                    served.services.extend(next);
                    at += count;
                    count *= 2;
                }
                None if count > 1 => count /= 2,
                None => {
                    let service = next[0];
                    let one = &self.problem.services[service];
                    refused.push(Refused { service, rate: one.rate, slo_ms: one.slo_ms });
                    left.push(service);
                    at += 1;
                }
            }
        }
        Ok(left)
    }

    /// Whether the least that all these take is below what there is: a proof if it is not.
    fn may_fit(&self, served: &[usize], more: &[usize]) -> bool {
        let kinds = 0..self.problem.kinds.len();
        let stock = kinds.map(|kind| self.problem.stock(kind)).fold(0, usize::saturating_add);
        let most = self.problem.gpus_max.map_or(stock, |max| max.min(stock)) as f64;
        let least = |service: &usize| {
            self.needs[*service].iter().flatten().copied().fold(f64::INFINITY, f64::min)
        };
        served.iter().chain(more).map(least).sum::<f64>() <= most * (1.0 + 1e-9)
    }

    /// Whether a service of this one's model, with the same terms, did not fit with no higher rate
    /// and no tighter SLO.
    fn is_harder(&self, service: usize, refused: &[Refused]) -> bool {
        let one = &self.problem.services[service];
        let rules = &self.problem.rules;
        refused.iter().any(|other| {
            let another = &self.problem.services[other.service];
            let (mine, theirs) = (&self.terms[service], &self.terms[other.service]);
            other.rate <= one.rate
                && other.slo_ms >= one.slo_ms
                && another.model == one.model
                && mine.gpus == theirs.gpus
                && mine.apart.is_empty()
                && theirs.apart.is_empty()
                && mine.together.is_empty()
                && theirs.together.is_empty()
                && rules.headroom_of(&another.name) <= rules.headroom_of(&one.name)
        })
    }

    /// A plan with `more` beside those served: on one kind, or with all planned again.
    fn with(
        &self,
        served: &Served,
        more: &[usize],
        control: &mut SearchControl<'_>,
    ) -> Result<Option<Assignment>, PlanError> {
        if let (Some(plan), [service]) = (&served.plan, more) {
            for kind in 0..self.problem.kinds.len() {
                if self.needs[*service][kind].is_none()
                    || !self.joins_group(&plan.chosen, *service, kind)
                {
                    continue;
                }
                let mut chosen = plan.chosen.clone();
                chosen.push((*service, kind));
                let found = self.plan(chosen, Some((plan, [kind, kind])), control)?;
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        let all: Vec<usize> = served.services.iter().chain(more).copied().collect();
        self.solve(&all, control)
    }
}
