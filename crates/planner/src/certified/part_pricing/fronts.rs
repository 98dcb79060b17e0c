//! The least cost of parts for a rate, by the sums of ends that no other sum dominates.
//!
//! A sum dominates another if it has at least its rate and at most its cost. Ends are added one
//! after the other, each as often as it helps, and dominated sums are dropped. Where too many
//! remain, neighbours become one sum with the higher rate and the lower cost, so that the result
//! stays a lower bound.

use super::{LARGE, Priced, SLACK, ends, search};

/// Most sums that are kept, and that are looked at before the best cost per request alone counts.
const SUMS_MAX: usize = 1024;
const LOOKED_AT_MAX: usize = 1_000_000;

/// Ends that were added, or a sum that is no dearer.
#[derive(Clone, Copy)]
struct Sum {
    rate: f64,
    cost: f64,
}

/// The least cost, or up to the share `close` less.
pub(super) fn least_cost(part_options: &[Priced], rate: f64, close: f64) -> f64 {
    let at_most = |one: &Priced| one.cost(one.part_option.max_rate()) / one.part_option.max_rate();
    let ratio = part_options.iter().map(at_most).fold(f64::INFINITY, f64::min);
    let ends = ends(part_options, true, ratio);
    let Some(largest) = ends.iter().map(|end| end.rate).reduce(f64::max) else {
        return f64::INFINITY;
    };
    if rate > largest * LARGE {
        return ratio * rate * (1.0 - SLACK);
    }
    let (known, _) = search(part_options, rate, 1.0, true);
    // What is not below this does not matter.
    let close = known * (1.0 - close);
    let part_min = part_options.iter().map(|one| one.cost(0.0)).fold(f64::INFINITY, f64::min);
    let mut left_out = close;
    let mut kept = |sum: &Sum| {
        let reach = sum.cost + (ratio * (rate - sum.rate)).max(part_min);
        sum.rate < rate && reach < close
    };
    let mut front = vec![Sum { rate: 0.0, cost: 0.0 }];
    let mut looked_at = 0;
    for end in &ends {
        let mut last = front.clone();
        while !last.is_empty() {
            looked_at += front.len() + last.len();
            if looked_at > LOOKED_AT_MAX {
                return ratio * rate * (1.0 - SLACK);
            }
            let more = |sum: &Sum| Sum { rate: sum.rate + end.rate, cost: sum.cost + end.cost };
            let new: Vec<Sum> = last.iter().map(more).filter(&mut kept).collect();
            (front, last) = merged(&front, &new);
            if front.len() > SUMS_MAX {
                front = halved(&front);
            }
        }
    }
    for sum in &front {
        let rest = rate - sum.rate;
        let last = part_options.iter().filter(|one| one.gives(rest)).map(|one| one.cost(rest));
        left_out = left_out.min(sum.cost + last.fold(f64::INFINITY, f64::min));
    }
    left_out.max(ratio * rate) * (1.0 - SLACK)
}

/// The sums of both, by falling rate and cost, without those that are dominated; and those of the
/// second that remain.
fn merged(front: &[Sum], new: &[Sum]) -> (Vec<Sum>, Vec<Sum>) {
    let (mut all, mut remaining) = (Vec::with_capacity(front.len() + new.len()), Vec::new());
    let (mut at, mut new_at, mut least) = (0, 0, f64::INFINITY);
    while at < front.len() || new_at < new.len() {
        let first = match (front.get(at), new.get(new_at)) {
            (Some(one), Some(two)) => {
                one.rate > two.rate || (one.rate == two.rate && one.cost <= two.cost)
            }
            (one, _) => one.is_some(),
        };
        let sum = if first { front[at] } else { new[new_at] };
        if sum.cost < least {
            least = sum.cost;
            all.push(sum);
            if !first {
                remaining.push(sum);
            }
        }
        if first {
            at += 1
        } else {
            new_at += 1
        };
    }
    (all, remaining)
}

/// Half as many sums: of two neighbours, the higher rate and the lower cost.
fn halved(front: &[Sum]) -> Vec<Sum> {
    let both = |pair: &[Sum]| Sum { rate: pair[0].rate, cost: pair[pair.len() - 1].cost };
    // The sum of nothing stays as it is.
    let (some, nothing) = front.split_at(front.len() - 1);
    some.chunks(2).map(both).chain(nothing.iter().copied()).collect()
}
