//! Why a request took as long as it did: its time split into parts, and a sentence.

use base::Nanos;
use model::config::Class;

use super::{RequestSpan, RunEnd, RunSpan, Span};
use crate::core::End;
use crate::node::ModelKey;

/// What a part of a request's time went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PartKind {
    /// Its inputs were checked and copied.
    Staging,
    /// It waited for the weights of its model.
    Load,
    /// It waited until a preempted run had left the device.
    Leaving,
    /// It waited behind real-time runs.
    RealTime,
    /// It waited behind best-effort runs.
    BestEffort,
    /// It waited, and nothing recorded ran: for its batch, or for the scheduler.
    Idle,
    /// Its steps ran.
    Computing,
    /// Outputs and reply were made.
    Reply,
}

impl PartKind {
    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            PartKind::Staging => "staging",
            PartKind::Load => "load",
            PartKind::Leaving => "leaving",
            PartKind::RealTime => "behind real time",
            PartKind::BestEffort => "behind best effort",
            PartKind::Idle => "waiting",
            PartKind::Computing => "computing",
            PartKind::Reply => "reply",
        }
    }
}

/// A part of a request's time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it went to.
    pub kind: PartKind,
    /// How long.
    pub time: Nanos,
    /// The same in words.
    pub text: String,
}

/// Why a request took as long as it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// From arrival to reply; the sum of all parts.
    pub total: Nanos,
    /// Its parts, in the order of [`PartKind`].
    pub parts: Vec<Part>,
    /// Other requests of its batch.
    pub members: Vec<u64>,
    /// Jobs that were preempted for its model while it waited.
    pub preempted: Vec<u64>,
    /// Its own runs.
    pub runs: Vec<RunSpan>,
    /// The sentence.
    pub sentence: String,
}

/// Something that kept a request waiting.
struct Cause {
    kind: PartKind,
    model: ModelKey,
    from: Nanos,
    to: Nanos,
}

/// A cause with the time that it took from a request.
struct Share {
    kind: PartKind,
    model: ModelKey,
    time: Nanos,
    count: usize,
}

/// Explains `request` from the spans of its node, in any order. `name` gives the name of a model.
pub fn explain(
    request: &RequestSpan,
    spans: &[Span],
    name: &dyn Fn(ModelKey) -> String,
) -> Explanation {
    let (from, to) = (request.arrived, request.answered);
    let near = || spans.iter().filter(move |span| span.ended() >= from && span.began() <= to);
    let mut runs: Vec<RunSpan> = near().filter_map(|span| own_run(request, span)).collect();
    runs.sort_by_key(|run| run.began);
    let staged = request.staged.clamp(from, to);
    let started = if request.started == Nanos::ZERO { to } else { request.started.clamp(from, to) };
    // Where runs are no longer recorded, it computed from its start to its end.
    let own: Vec<(Nanos, Nanos)> = match (runs.is_empty(), request.started == Nanos::ZERO) {
        (false, _) => runs.iter().map(|run| (run.began.max(staged), run.ended.min(to))).collect(),
        (true, false) => vec![(started, to)],
        (true, true) => Vec::new(),
    };
    let causes: Vec<Cause> = near().filter_map(|span| cause(request, span)).collect();
    let mut shares: Vec<Share> = Vec::new();
    let mut at = staged;
    for (began, ended) in &own {
        split_wait(at, *began, &causes, request.model, &mut shares);
        at = at.max(*ended);
    }
    let computing = own.iter().map(|(began, ended)| *ended - *began).sum_nanos();
    // Without a run it waited for one, and so it did when it was given up while preempted.
    let never_resumed = request.end != End::Done
        && runs.last().is_some_and(|run| run.end == RunEnd::Preempted && !is_stopped(request, run));
    let replied = if own.is_empty() || never_resumed {
        split_wait(at, to, &causes, request.model, &mut shares);
        Nanos::ZERO
    } else {
        to - at
    };
    let members = members(request, spans);
    let preempted = preempted(request, &runs, started, spans);
    let mut parts = parts(request, staged - from, &shares, name);
    if computing > Nanos::ZERO {
        let text = computing_text(request, &runs, members.len());
        parts.push(Part { kind: PartKind::Computing, time: computing, text });
    }
    if replied > Nanos::ZERO {
        let text = "until its reply".to_string();
        parts.push(Part { kind: PartKind::Reply, time: replied, text });
    }
    let total = to - from;
    let sentence = sentence(request, total, &parts, &runs, name);
    Explanation { total, parts, members, preempted, runs, sentence }
}

trait SumNanos {
    fn sum_nanos(self) -> Nanos;
}

impl<I: Iterator<Item = Nanos>> SumNanos for I {
    fn sum_nanos(self) -> Nanos {
        self.fold(Nanos::ZERO, |sum, span| sum + span)
    }
}

fn own_run(request: &RequestSpan, span: &Span) -> Option<RunSpan> {
    match span {
        Span::Run(run) if request.job != 0 && run.job == request.job => Some(*run),
        _ => None,
    }
}

/// What of a span kept `request` waiting, if it did.
fn cause(request: &RequestSpan, span: &Span) -> Option<Cause> {
    match span {
        Span::Load(load) if load.model == request.model => Some(Cause {
            kind: PartKind::Load,
            model: load.model,
            from: load.began,
            to: load.ended,
        }),
        Span::Run(run) if request.job == 0 || run.job != request.job => {
            let kind = match run.class {
                Class::RealTime => PartKind::RealTime,
                Class::BestEffort if run.preempted_for == Some(request.model) => PartKind::Leaving,
                Class::BestEffort => PartKind::BestEffort,
            };
            let from = match kind {
                PartKind::Leaving => run.preempt_requested,
                _ => run.began,
            };
            Some(Cause { kind, model: run.model, from, to: run.ended })
        }
        _ => None,
    }
}

/// Splits a wait: each moment belongs to the first cause in the order of [`PartKind`].
fn split_wait(from: Nanos, to: Nanos, causes: &[Cause], own: ModelKey, shares: &mut Vec<Share>) {
    if to <= from {
        return;
    }
    let inside: Vec<&Cause> =
        causes.iter().filter(|cause| cause.from < to && cause.to > from).collect();
    let mut cuts: Vec<Nanos> = inside.iter().flat_map(|cause| [cause.from, cause.to]).collect();
    cuts.extend([from, to]);
    cuts.retain(|cut| (from..=to).contains(cut));
    cuts.sort_unstable();
    cuts.dedup();
    let mut counted = vec![false; inside.len()];
    for pair in cuts.windows(2) {
        let covers = |cause: &&Cause| cause.from <= pair[0] && cause.to >= pair[1];
        let first = inside
            .iter()
            .enumerate()
            .filter(|(_, cause)| covers(cause))
            .min_by_key(|(_, cause)| cause.kind);
        let (kind, model, new) = match first {
            Some((index, cause)) => {
                (cause.kind, cause.model, !std::mem::replace(&mut counted[index], true))
            }
            None => (PartKind::Idle, own, false),
        };
        let same = |share: &&mut Share| share.kind == kind && share.model == model;
        match shares.iter_mut().find(same) {
            Some(share) => {
                share.time += pair[1] - pair[0];
                share.count += usize::from(new);
            }
            None => {
                let time = pair[1] - pair[0];
                shares.push(Share { kind, model, time, count: usize::from(new) });
            }
        }
    }
}

/// The parts before and between its runs.
fn parts(
    request: &RequestSpan,
    staging: Nanos,
    shares: &[Share],
    name: &dyn Fn(ModelKey) -> String,
) -> Vec<Part> {
    let mut parts = Vec::new();
    if staging > Nanos::ZERO {
        let text = "staging its inputs".to_string();
        parts.push(Part { kind: PartKind::Staging, time: staging, text });
    }
    let mut ordered: Vec<&Share> = shares.iter().collect();
    ordered.sort_by_key(|share| (share.kind, std::cmp::Reverse(share.time)));
    for share in ordered {
        let (count, model) = (share.count, name(share.model));
        let runs = if count == 1 { "run" } else { "runs" };
        let text = match share.kind {
            PartKind::Load => "loading its weights".to_string(),
            PartKind::Leaving => format!("until best effort of '{model}' had left the device"),
            PartKind::RealTime => format!("behind {count} real-time {runs} of '{model}'"),
            PartKind::BestEffort => format!("behind {count} best-effort {runs} of '{model}'"),
            _ if request.rows > 0 => "waiting for its batch".to_string(),
            _ => "waiting to be started".to_string(),
        };
        parts.push(Part { kind: share.kind, time: share.time, text });
    }
    parts
}

fn computing_text(request: &RequestSpan, runs: &[RunSpan], members: usize) -> String {
    let mut text = "computing".to_string();
    if request.rows > 0 {
        let rows = request.rows;
        let rows = if rows == 1 { "1 row".to_string() } else { format!("{rows} rows") };
        let others = match members {
            0 => "alone".to_string(),
            1 => "with 1 other request".to_string(),
            more => format!("with {more} other requests"),
        };
        text = format!("computing in a batch of {rows} {others}");
    }
    if runs.len() > 1 {
        text.push_str(&format!(" in {} parts", runs.len()));
    }
    text
}

fn members(request: &RequestSpan, spans: &[Span]) -> Vec<u64> {
    let other = |span: &Span| match span {
        Span::Request(other)
            if request.rows > 0
                && request.job != 0
                && other.job == request.job
                && other.number != request.number =>
        {
            Some(other.number)
        }
        _ => None,
    };
    spans.iter().filter_map(other).collect()
}

/// Jobs that were preempted for the model of a real-time request before it started.
fn preempted(request: &RequestSpan, runs: &[RunSpan], started: Nanos, spans: &[Span]) -> Vec<u64> {
    if request.class != Class::RealTime {
        return Vec::new();
    }
    let until = runs.first().map_or(started, |run| run.began);
    let job = |span: &Span| match span {
        Span::Run(run)
            if run.preempted_for == Some(request.model)
                && run.preempt_requested >= request.arrived
                && run.preempt_requested <= until =>
        {
            Some(run.job)
        }
        _ => None,
    };
    spans.iter().filter_map(job).collect()
}

/// A time with three digits, as a person reads it.
fn words(time: Nanos) -> String {
    let (value, unit) = match time.0 {
        0..1_000 => return format!("{} ns", time.0),
        1_000..1_000_000 => (time.0 as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (time.0 as f64 / 1e6, "ms"),
        _ => (time.0 as f64 / 1e9, "s"),
    };
    match value {
        value if value < 10.0 => format!("{value:.2} {unit}"),
        value if value < 100.0 => format!("{value:.1} {unit}"),
        value => format!("{value:.0} {unit}"),
    }
}

fn percent(part: Nanos, total: Nanos) -> u64 {
    (part.0 * 100 + total.0 / 2).checked_div(total.0).unwrap_or(0)
}

fn sentence(
    request: &RequestSpan,
    total: Nanos,
    parts: &[Part],
    runs: &[RunSpan],
    name: &dyn Fn(ModelKey) -> String,
) -> String {
    let mut text = opening(request, total);
    let Some(largest) = parts.iter().max_by_key(|part| part.time) else {
        text.push('.');
        return text;
    };
    let share = percent(largest.time, total);
    text.push_str(&format!(", {} of it ({share} %) {}", words(largest.time), largest.text));
    let rest: Vec<String> = parts
        .iter()
        .filter(|part| !std::ptr::eq(*part, largest))
        .map(|part| format!("{} {}", words(part.time), part.text))
        .collect();
    if let Some((last, first)) = rest.split_last() {
        text.push_str("; the rest: ");
        text.push_str(&first.join(", "));
        text.push_str(if first.is_empty() { last } else { " and " });
        if !first.is_empty() {
            text.push_str(last);
        }
    }
    text.push('.');
    text.push_str(&preemptions_text(request, runs, name));
    text
}

fn opening(request: &RequestSpan, total: Nanos) -> String {
    let total = words(total);
    match request.end {
        End::Done if request.answered > request.deadline => {
            let late = words(request.answered - request.deadline);
            format!("It took {total}, {late} too long")
        }
        End::Done => format!("It took {total}"),
        End::Failed => format!("It failed on the device after {total}"),
        End::DeadlineExceeded => format!("Its deadline passed after {total}"),
        End::Cancelled => format!("Its client gave it up after {total}"),
        End::QueueFull => format!("It was refused after {total}: the queue was full"),
        End::NoSuchModel => format!("It was refused after {total}: the model is not loaded"),
        End::ShuttingDown => format!("It was refused after {total}: the server shuts down"),
    }
}

/// Whether it was preempted because it was given up, and not for real time.
fn is_stopped(request: &RequestSpan, run: &RunSpan) -> bool {
    run.end == RunEnd::Preempted && run.preempted_for.is_none() && request.end != End::Done
}

/// By whom its runs were preempted, how long leaving took, and whether it went on.
fn preemptions_text(
    request: &RequestSpan,
    runs: &[RunSpan],
    name: &dyn Fn(ModelKey) -> String,
) -> String {
    let (stopped, runs_before) = match runs.split_last() {
        Some((last, before)) if is_stopped(request, last) => (Some(last), before),
        _ => (None, runs),
    };
    let mut text = String::new();
    let cut: Vec<&RunSpan> = runs_before.iter().filter(|r| r.end == RunEnd::Preempted).collect();
    if let Some(last) = cut.last() {
        // The run after it may no longer be recorded: what was answered has resumed.
        let resumed = request.end == End::Done || runs.iter().any(|run| run.began >= last.ended);
        text.push_str(&cut_text(&cut, last, resumed, name));
    }
    if let Some(run) = stopped {
        let left = words(run.ended - run.preempt_requested);
        let step = format!("step {} of {}", run.next_step, run.step_count);
        text.push_str(&format!(" It was stopped at {step}, and left the device after {left}."));
    }
    text
}

fn cut_text(
    cut: &[&RunSpan],
    last: &RunSpan,
    resumed: bool,
    name: &dyn Fn(ModelKey) -> String,
) -> String {
    let times = match cut.len() {
        1 => "once".to_string(),
        count => format!("{count} times"),
    };
    let mut causers: Vec<String> =
        cut.iter().filter_map(|run| run.preempted_for).map(name).collect();
    causers.sort_unstable();
    causers.dedup();
    let causers: Vec<String> = causers.iter().map(|name| format!("'{name}'")).collect();
    let for_whom = match causers.is_empty() {
        true => String::new(),
        false => format!(" for {}", causers.join(" and ")),
    };
    let longest = cut.iter().map(|run| run.ended - run.preempt_requested).max();
    let longest = words(longest.unwrap_or_default());
    let leaving = match cut.len() {
        1 => format!("it left the device after {longest}"),
        _ => format!("it left the device after {longest} at most"),
    };
    let step = format!("step {} of {}", last.next_step, last.step_count);
    let then = match (resumed, cut.len()) {
        (true, _) => format!(", and resumed last at {step}"),
        (false, 1) => format!(" at {step}, and did not resume"),
        (false, _) => format!(", last at {step}, and did not resume there"),
    };
    format!(" It was preempted {times}{for_whom}; {leaving}{then}.")
}

#[cfg(test)]
mod tests;
