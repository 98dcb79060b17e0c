//! Spans from the events and actions of a core that no node drives: a simulation's.

use std::collections::BTreeMap;

use base::Nanos;

use super::{CopyKind, CopySpan, EvictionSpan, LoadSpan, RequestSpan, RunEnd, RunSpan, Span};
use crate::core::{Action, End, Event, ModelId, RequestId, SimEvent};
use crate::node::ModelKey;

/// Makes spans of what a core consumes and emits.
#[derive(Debug, Default)]
pub struct CoreRecorder {
    spans: Vec<Span>,
    limit: usize,
    lost: u64,
    /// By the order of their id.
    requests: BTreeMap<u64, RequestSpan>,
    /// By queue.
    running: Vec<Option<RunSpan>>,
    /// By model: start, and whether real time waits.
    loads: BTreeMap<u32, (Nanos, bool)>,
    steps: BTreeMap<u32, usize>,
    weights: BTreeMap<u32, u64>,
}

/// The key of a model of a core without a node.
pub fn key(model: ModelId) -> ModelKey {
    ModelKey::new(model.0, 0)
}

impl CoreRecorder {
    /// Records at most `limit` spans, the first ones.
    pub fn new(limit: usize) -> CoreRecorder {
        CoreRecorder { limit, ..CoreRecorder::default() }
    }

    /// The spans that ended, and how many there were beyond the limit.
    pub fn into_spans(self) -> (Vec<Span>, u64) {
        (self.spans, self.lost)
    }

    fn record(&mut self, span: Span) {
        if self.spans.len() < self.limit {
            self.spans.push(span);
        } else {
            self.lost += 1;
        }
    }

    /// Records an event that the core consumes.
    pub fn event(&mut self, now: Nanos, event: &Event) {
        match *event {
            Event::ModelAdded { model, steps, .. } => {
                self.steps.insert(model.0, steps);
            }
            Event::ModelWeights { model, bytes, .. } => {
                self.weights.insert(model.0, bytes);
            }
            Event::Sim(SimEvent::ModelProfiled { model, weight_bytes, .. }) => {
                self.weights.insert(model.0, weight_bytes);
            }
            Event::Arrival { request, model, class, priority, deadline } => {
                let number = request.order();
                let span = RequestSpan {
                    number,
                    job: number,
                    model: key(model),
                    class,
                    priority,
                    rows: 0,
                    arrived: now,
                    staged: now,
                    started: Nanos::ZERO,
                    answered: now,
                    deadline,
                    end: End::Done,
                };
                self.requests.insert(request.order(), span);
            }
            Event::BatchFormed { request, rows, .. } => {
                if let Some(span) = self.requests.get_mut(&request.order()) {
                    span.rows = rows as u32;
                }
            }
            Event::Sim(SimEvent::InputReady { request }) => {
                let span = self.requests.get_mut(&request.order());
                if let Some(span) = span.filter(|span| span.started == Nanos::ZERO) {
                    span.staged = now;
                    let copy = CopySpan {
                        job: span.job,
                        model: span.model,
                        class: span.class,
                        kind: CopyKind::ToDevice,
                        began: span.arrived,
                        ended: now,
                        bytes: 0,
                    };
                    self.record(Span::Copy(copy));
                }
            }
            Event::SegmentDone { queue, .. } => self.run_ended(now, queue, None, RunEnd::Done),
            Event::SegmentPreempted { queue, point, .. } => {
                self.run_ended(now, queue, Some(point.step), RunEnd::Preempted);
            }
            Event::SegmentFailed { queue, .. } => {
                self.run_ended(now, queue, None, RunEnd::Failed);
            }
            Event::DeviceLost => {
                for queue in 0..self.running.len() {
                    self.run_ended(now, queue, None, RunEnd::Failed);
                }
            }
            Event::LoadDone { model } => self.load_ended(now, model, false),
            Event::LoadFailed { model } => self.load_ended(now, model, true),
            _ => {}
        }
    }

    /// Records an action that the core emits.
    pub fn action(&mut self, now: Nanos, action: &Action) {
        match action {
            Action::Launch { queue, request, steps, .. } => {
                self.launched(now, *queue, *request, steps.start);
            }
            Action::Preempt { queue, .. } => {
                let cause = self.waiting_real_time();
                if let Some(Some(run)) = self.running.get_mut(*queue) {
                    run.preempt_requested = now;
                    run.preempted_for = cause;
                }
            }
            Action::Load { model, urgent } => {
                self.loads.insert(model.0, (now, *urgent));
            }
            Action::Evict { model } => {
                self.record(Span::Eviction(EvictionSpan { model: key(*model), at: now }));
            }
            Action::End { request, end } => {
                if let Some(span) = self.requests.remove(&request.order()) {
                    let job = if span.started == Nanos::ZERO { 0 } else { span.job };
                    self.record(Span::Request(RequestSpan {
                        answered: now,
                        end: *end,
                        job,
                        ..span
                    }));
                }
            }
            _ => {}
        }
    }

    /// The model of the latest real-time request that waits: preemptions follow its arrival.
    fn waiting_real_time(&self) -> Option<ModelKey> {
        let waits = |span: &&RequestSpan| {
            span.class == model::config::Class::RealTime && span.started == Nanos::ZERO
        };
        self.requests.values().rev().find(waits).map(|span| span.model)
    }

    fn launched(&mut self, now: Nanos, queue: usize, request: RequestId, first_step: usize) {
        let Some(span) = self.requests.get_mut(&request.order()) else { return };
        if span.started == Nanos::ZERO {
            span.started = now;
        }
        let step_count = self.steps.get(&span.model.slot()).copied().unwrap_or(0) as u32;
        let run = RunSpan {
            job: span.job,
            model: span.model,
            class: span.class,
            queue: queue as u32,
            rows: span.rows,
            first_step: first_step as u32,
            next_step: step_count,
            step_count,
            began: now,
            ended: now,
            preempt_requested: Nanos::ZERO,
            preempted_for: None,
            end: RunEnd::Done,
        };
        if self.running.len() <= queue {
            self.running.resize(queue + 1, None);
        }
        self.running[queue] = Some(run);
    }

    fn run_ended(&mut self, now: Nanos, queue: usize, step: Option<usize>, end: RunEnd) {
        let Some(run) = self.running.get_mut(queue).and_then(Option::take) else { return };
        let next_step = step.map_or(run.next_step, |step| step as u32);
        self.record(Span::Run(RunSpan { ended: now, end, next_step, ..run }));
    }

    fn load_ended(&mut self, now: Nanos, model: ModelId, failed: bool) {
        let Some((began, urgent)) = self.loads.remove(&model.0) else { return };
        let bytes = self.weights.get(&model.0).copied().unwrap_or(0);
        let model = key(model);
        self.record(Span::Load(LoadSpan { model, began, ended: now, bytes, urgent, failed }));
    }
}

#[cfg(test)]
mod tests {
    use model::config::Class;

    use super::*;
    use crate::core::{Core, CoreOptions, QueueLayout};
    use crate::policy::PreemptionPoint;

    #[test]
    fn a_preempted_request_has_two_runs() {
        let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 1, yielding: 0 };
        let mut core = Core::new(CoreOptions { queues, ..CoreOptions::default() });
        let mut recorder = CoreRecorder::new(100);
        let mut feed = |core: &mut Core, at: u64, event: Event| {
            recorder.event(Nanos(at), &event);
            let mut actions = Vec::new();
            core.step(Nanos(at), event, &mut actions);
            actions.iter().for_each(|action| recorder.action(Nanos(at), action));
        };
        let arrival = |core: &mut Core, model: u32, class: Class| {
            let request = core.next_request_id().expect("below the limit");
            let (model, deadline) = (ModelId(model), Nanos::MAX);
            Event::Arrival { request, model, class, priority: 1, deadline }
        };
        for model in [ModelId(0), ModelId(1)] {
            feed(&mut core, 0, Event::ModelAdded { model, steps: 4, queue_capacity: 16 });
        }
        let best_effort = arrival(&mut core, 0, Class::BestEffort);
        feed(&mut core, 10, best_effort);
        let real_time = arrival(&mut core, 1, Class::RealTime);
        feed(&mut core, 20, real_time);
        let point = PreemptionPoint::before(2);
        let preempted = Event::SegmentPreempted { queue: 1, point, busy: Nanos(15) };
        feed(&mut core, 25, preempted);
        feed(&mut core, 40, Event::SegmentDone { queue: 0, busy: Nanos(20) });
        feed(&mut core, 60, Event::SegmentDone { queue: 1, busy: Nanos(20) });
        let (spans, lost) = recorder.into_spans();
        assert_eq!(lost, 0);
        let runs: Vec<(u64, u64, u64, RunEnd)> = spans
            .iter()
            .filter_map(|span| match span {
                Span::Run(run) => Some((run.job, run.began.0, run.ended.0, run.end)),
                _ => None,
            })
            .collect();
        assert_eq!(
            runs,
            [(1, 10, 25, RunEnd::Preempted), (2, 20, 40, RunEnd::Done), (1, 40, 60, RunEnd::Done)]
        );
        let Span::Run(cut) = spans[0] else { panic!("a run is first: {spans:?}") };
        assert_eq!((cut.preempt_requested, cut.preempted_for), (Nanos(20), Some(key(ModelId(1)))));
        let requests = spans.iter().filter(|span| matches!(span, Span::Request(_)));
        assert_eq!(requests.map(|span| span.ended().0).collect::<Vec<_>>(), [40, 60]);
    }
}
