//! Spans of a node, recorded when requests, runs, copies and loads end.

use base::Nanos;
use model::Tensor;
use model::config::Class;

use super::completion::SegmentEnd;
use super::preemptions::QueueJob;
use super::submission::Submission;
use super::{Job, ModelKey, Node, Rejection, ReplyResult, ReplyTarget, Shared, State, Timing};
use crate::core::{End, ModelId};
use crate::spans::ring::SpanRead;
use crate::spans::{CopyKind, CopySpan, EvictionSpan, RequestSpan, RunEnd, RunSpan, Span};

/// Spans that are copied while the lock is held.
const MAX_COPIED: usize = 1_024;

/// Smaller copies take hardly longer than to record them.
const COPY_BYTES_MIN: u64 = 64 << 10;

/// What takes less did not copy so many bytes: they were shared.
const COPY_TIME_MIN: Nanos = Nanos::from_micros(1);

/// Bytes of tensors.
pub(super) fn bytes_of(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.size_bytes() as u64).sum()
}

/// A copy that began.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyTimer {
    began: Nanos,
    bytes: u64,
}

impl Shared {
    /// Begins to time a copy of so many bytes, if it is worth that.
    pub(super) fn time_copy(&self, bytes: u64) -> Option<CopyTimer> {
        (bytes >= COPY_BYTES_MIN).then(|| CopyTimer { began: self.clock.now(), bytes })
    }

    /// A copy of these outputs that began at `began`.
    pub(super) fn timed_outputs(
        &self,
        began: Nanos,
        outputs: &[Tensor],
    ) -> Option<(CopyTimer, Nanos)> {
        let bytes = bytes_of(outputs);
        (bytes >= COPY_BYTES_MIN).then(|| (CopyTimer { began, bytes }, self.clock.now()))
    }
}

impl Node {
    /// Appends at most `limit` of the latest spans, from position `from` on.
    pub fn spans_since(&self, from: u64, limit: usize, spans: &mut Vec<Span>) -> SpanRead {
        let (end, mut remaining) = (spans.len() + limit, limit);
        let mut read = SpanRead { next: from, lost: 0 };
        spans.reserve(remaining.min(MAX_COPIED));
        loop {
            // In pieces: the lock is free for requests in between.
            let before = spans.len();
            let piece = self.shared.lock().spans.read(read.next, remaining.min(MAX_COPIED), spans);
            read = SpanRead { next: piece.next, lost: read.lost + piece.lost };
            remaining = end - spans.len();
            if spans.len() == before || remaining == 0 {
                return read;
            }
        }
    }

    /// Position of the next span.
    pub fn spans_end(&self) -> u64 {
        self.shared.lock().spans.end()
    }
}

/// How a request ended that was not answered.
fn end_of(why: &Rejection) -> End {
    match why {
        Rejection::NoSuchModel => End::NoSuchModel,
        Rejection::QueueFull { .. } => End::QueueFull,
        Rejection::DeadlineExceeded => End::DeadlineExceeded,
        Rejection::Cancelled => End::Cancelled,
        Rejection::ShuttingDown => End::ShuttingDown,
        Rejection::RealTimeOnly | Rejection::Device(_) => End::Failed,
    }
}

impl State {
    /// Records a copy for a request or a job.
    pub(super) fn record_copy(
        &mut self,
        kind: CopyKind,
        (job, model, class): (u64, ModelKey, Class),
        CopyTimer { began, bytes }: CopyTimer,
        ended: Nanos,
    ) {
        if ended - began >= COPY_TIME_MIN {
            let span = CopySpan { job, model, class, kind, began, ended, bytes };
            self.spans.record(Span::Copy(span));
        }
    }

    /// Records a request that ran alone, or never ran.
    pub(super) fn record_request(&mut self, now: Nanos, job: &Job, end: End) {
        let (Some(model), ReplyTarget::Request(_)) = (self.key(job.model), &job.reply_to) else {
            return;
        };
        let timing = &job.timing;
        let span = RequestSpan {
            number: job.number,
            job: if job.launched { job.number } else { 0 },
            model,
            class: job.class,
            priority: job.priority,
            rows: 0,
            arrived: timing.arrived,
            staged: timing.prepared,
            started: timing.started,
            answered: now,
            deadline: job.deadline,
            end,
        };
        self.count_request(&span);
        self.spans.record(Span::Request(span));
    }

    /// Records a batch member; `job` is 0 if its batch was never formed.
    pub(super) fn record_member(
        &mut self,
        submission: &Submission,
        (number, job): (u64, u64),
        timing: &Timing,
        result: &ReplyResult,
    ) {
        let span = RequestSpan {
            number,
            job,
            model: submission.model,
            class: submission.class,
            priority: submission.priority,
            rows: timing.rows as u32,
            arrived: timing.arrived,
            staged: submission.staged,
            started: timing.started,
            answered: timing.finished,
            deadline: submission.deadline,
            end: result.as_ref().err().map_or(End::Done, end_of),
        };
        self.count_request(&span);
        self.spans.record(Span::Request(span));
    }

    /// Records a request that the node refused before it was admitted.
    pub(super) fn record_refusal(&mut self, now: Nanos, submission: &Submission, why: &Rejection) {
        let span = RequestSpan {
            number: self.spans.next_number(),
            job: 0,
            model: submission.model,
            class: submission.class,
            priority: submission.priority,
            rows: 0,
            arrived: submission.arrived,
            staged: submission.staged,
            started: Nanos::ZERO,
            answered: now,
            deadline: submission.deadline,
            end: end_of(why),
        };
        self.count_request(&span);
        self.spans.record(Span::Request(span));
    }

    /// Records that a queue returned a job.
    pub(super) fn record_run(
        &mut self,
        now: Nanos,
        queue: usize,
        on_queue: &QueueJob,
        end: &SegmentEnd,
    ) {
        let Some(job) = self.job(on_queue.request) else { return };
        let Some(model) = self.key(job.model) else { return };
        let preempt = on_queue.preempt_request;
        let span = RunSpan {
            job: job.number,
            model,
            class: job.class,
            queue: queue as u32,
            rows: job.rows as u32,
            first_step: on_queue.first_step as u32,
            next_step: end.next_step as u32,
            step_count: end.step_count as u32,
            began: on_queue.began,
            ended: now,
            preempt_requested: preempt.map_or(Nanos::ZERO, |request| request.at),
            preempted_for: preempt.and_then(|request| request.caused_by),
            end: match (end.finished, end.failed) {
                (true, _) => RunEnd::Done,
                (_, true) => RunEnd::Failed,
                _ => RunEnd::Preempted,
            },
        };
        self.count_run(&span);
        self.spans.record(Span::Run(span));
    }

    pub(super) fn record_eviction(&mut self, at: Nanos, model: ModelId) {
        if let Some(model) = self.key(model) {
            self.spans.record(Span::Eviction(EvictionSpan { model, at }));
        }
    }
}
