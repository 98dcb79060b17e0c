//! Latency split of graphs that series and parallel reductions do not reduce to one subgraph.
//!
//! Every remaining point gets a time, counted in pieces: zero at the root, the whole SLO at the
//! exit. A subgraph may take the time between its two points. Points are visited in order. Of the
//! visited ones, only points with subgraphs to unvisited points matter, so choices that agree on
//! these are merged and the cheapest is kept. That is exact.
//!
//! If that would take too long, times are multiples of several pieces. That gives a split, and a
//! bound: rounding every subgraph of the best split up to such a multiple makes no path longer than
//! the SLO plus one multiple per subgraph, so the best split of that longer SLO costs at most as
//! much as the best split.

use std::collections::HashMap;

use super::SubGraph;

/// Points whose times matter at once.
const WIDTH_MAX: usize = 6;

/// Times of the points that matter; the others are zero.
type Times = [u16; WIDTH_MAX];

/// The subgraphs between points in topological order.
pub(super) struct LatencyGraph<'a> {
    parts: &'a [SubGraph],
    points: Vec<usize>,
}

/// Pieces of every subgraph, and their cost.
pub(super) struct Choice {
    pub(super) pieces: Vec<usize>,
    pub(super) cost: f64,
}

struct State {
    times: Times,
    cost: f64,
    from: usize,
    /// The time of the point this layer is about.
    time: u16,
}

impl<'a> LatencyGraph<'a> {
    pub(super) fn new(parts: &'a [SubGraph]) -> LatencyGraph<'a> {
        let mut points: Vec<usize> = parts.iter().flat_map(|part| [part.from, part.to]).collect();
        points.sort_unstable();
        points.dedup();
        let mut order = Vec::new();
        while order.len() < points.len() {
            let ready = |point: &&usize| {
                let mut into = parts.iter().filter(|part| part.to == **point);
                !order.contains(*point) && into.all(|part| order.contains(&part.from))
            };
            // Cycles have been refused before.
            let Some(&next) = points.iter().find(ready) else { break };
            order.push(next);
        }
        LatencyGraph { parts, points: order }
    }

    /// Points before the one at `at` with subgraphs to it or beyond.
    fn open(&self, at: usize) -> Vec<usize> {
        let (behind, ahead) = self.points.split_at(at);
        let goes_on = |point: &&usize| {
            self.parts.iter().any(|part| part.from == **point && ahead.contains(&part.to))
        };
        behind.iter().filter(goes_on).copied().collect()
    }

    /// Steps of a search with so many pieces; `None` if too many points matter at once.
    pub(super) fn steps(&self, pieces: usize) -> Option<f64> {
        let mut steps = 0.0;
        for at in 1..self.points.len() {
            let free = self.open(at).iter().filter(|&&point| point != self.points[0]).count();
            if self.open(at).len() > WIDTH_MAX {
                return None;
            }
            steps += (pieces as f64 + 1.0).powi(free as i32 + 1);
        }
        Some(steps)
    }

    /// Number of subgraphs on the longest path.
    pub(super) fn length(&self) -> usize {
        let mut length: HashMap<usize, usize> = HashMap::new();
        for &point in &self.points {
            let into = self.parts.iter().filter(|part| part.to == point);
            let before = into.filter_map(|part| length.get(&part.from)).max();
            length.insert(point, before.map_or(0, |before| before + 1));
        }
        length.into_values().max().unwrap_or(0)
    }

    /// The cheapest choice where the whole is `horizon` multiples of `multiple` pieces; no subgraph
    /// gets more pieces than it has costs for.
    pub(super) fn cheapest(&self, horizon: usize, multiple: usize) -> Option<Choice> {
        let mut layers = vec![vec![State { times: [0; WIDTH_MAX], cost: 0.0, from: 0, time: 0 }]];
        for at in 1..self.points.len() {
            let layer = self.extend(layers.last()?, at, horizon, multiple);
            layers.push(layer);
        }
        let last = layers.last()?;
        let best = (0..last.len()).min_by(|&a, &b| last[a].cost.total_cmp(&last[b].cost))?;
        let cost = last[best].cost;
        let (mut times, mut index) = (HashMap::new(), best);
        for (layer, point) in layers.iter().zip(&self.points).rev() {
            times.insert(*point, usize::from(layer[index].time));
            index = layer[index].from;
        }
        let pieces = |part: &SubGraph| {
            ((times[&part.to] - times[&part.from]) * multiple).min(part.costs.len() - 1)
        };
        Some(Choice { pieces: self.parts.iter().map(pieces).collect(), cost })
    }

    fn extend(&self, states: &[State], at: usize, horizon: usize, multiple: usize) -> Vec<State> {
        let (open, next) = (self.open(at), self.open(at + 1));
        let point = self.points[at];
        let place = |point: usize| open.iter().position(|&other| other == point);
        let into: Vec<(usize, &SubGraph)> = self
            .parts
            .iter()
            .filter(|part| part.to == point)
            .filter_map(|part| Some((place(part.from)?, part)))
            .collect();
        let keep: Vec<Option<usize>> = next.iter().map(|&point| place(point)).collect();
        let mut layer: Vec<State> = Vec::new();
        let mut known: HashMap<Times, usize> = HashMap::new();
        for (from, state) in states.iter().enumerate() {
            let earliest = into.iter().map(|(place, _)| state.times[*place]).max().unwrap_or(0);
            let last = at + 1 == self.points.len();
            let first = if last { horizon as u16 } else { earliest };
            for time in first..=horizon as u16 {
                let cost = |(place, part): &(usize, &SubGraph)| {
                    let pieces = usize::from(time - state.times[*place]) * multiple;
                    part.costs[pieces.min(part.costs.len() - 1)]
                };
                let cost = state.cost + into.iter().map(cost).sum::<f64>();
                if cost.is_infinite() {
                    continue;
                }
                let mut times = [0; WIDTH_MAX];
                for (slot, place) in times.iter_mut().zip(&keep) {
                    *slot = place.map_or(time, |place| state.times[place]);
                }
                let new = State { times, cost, from, time };
                match known.get(&times) {
                    Some(&at) if layer[at].cost <= cost => {}
                    Some(&at) => layer[at] = new,
                    None => {
                        known.insert(times, layer.len());
                        layer.push(new);
                    }
                }
            }
        }
        layer
    }
}
