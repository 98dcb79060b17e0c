//! Spans: what became of requests, runs and loads, and when.
//!
//! A node records them when they end ([`ring`]). [`explanation`] says from them why a request took
//! as long as it did, [`trace_events`] writes them for trace viewers, and [`core_recorder`] makes
//! them from the events and actions of a core, for simulations.

pub mod core_recorder;
pub mod explanation;
pub mod ring;
pub mod trace_events;

use base::Nanos;
use model::config::Class;

use crate::core::End;
use crate::node::ModelKey;

/// Something that happened on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// A request, from arrival to reply.
    Request(RequestSpan),
    /// A segment of a job on a queue of the device.
    Run(RunSpan),
    /// Weights that were copied to the device.
    Load(LoadSpan),
    /// Weights that were evicted.
    Eviction(EvictionSpan),
    /// Inputs or outputs that were copied.
    Copy(CopySpan),
}

impl Span {
    /// When it began.
    pub fn began(&self) -> Nanos {
        match self {
            Span::Request(span) => span.arrived,
            Span::Run(span) => span.began,
            Span::Load(span) => span.began,
            Span::Eviction(span) => span.at,
            Span::Copy(span) => span.began,
        }
    }

    /// When it ended.
    pub fn ended(&self) -> Nanos {
        match self {
            Span::Request(span) => span.answered,
            Span::Run(span) => span.ended,
            Span::Load(span) => span.ended,
            Span::Eviction(span) => span.at,
            Span::Copy(span) => span.ended,
        }
    }
}

/// A request, from arrival to reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpan {
    /// Its number on the node, from 1.
    pub number: u64,
    /// The number of the job that ran it; 0 if none did. A request that runs alone is its own job.
    pub job: u64,
    /// Its model.
    pub model: ModelKey,
    /// Its class.
    pub class: Class,
    /// 1 is the highest.
    pub priority: u32,
    /// Rows of the batch it was a member of; 0 if it ran alone.
    pub rows: u32,
    /// When it arrived.
    pub arrived: Nanos,
    /// When its inputs were staged and it was admitted.
    pub staged: Nanos,
    /// When its first step started; [`Nanos::ZERO`] if none did.
    pub started: Nanos,
    /// When its reply was made.
    pub answered: Nanos,
    /// After this time its reply is of no use; [`Nanos::MAX`] without a deadline.
    pub deadline: Nanos,
    /// How it ended.
    pub end: End,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All steps have run.
    Done,
    /// It was preempted; the job resumes with another run, unless it was given up.
    Preempted,
    /// The device failed.
    Failed,
}

/// A segment of a job on a queue of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunSpan {
    /// The number of its job.
    pub job: u64,
    /// Its model.
    pub model: ModelKey,
    /// Its class.
    pub class: Class,
    /// The queue it ran on.
    pub queue: u32,
    /// Rows of its batch; 0 without a batch.
    pub rows: u32,
    /// The first step it ran.
    pub first_step: u32,
    /// The step at which the job resumes, or its number of steps.
    pub next_step: u32,
    /// Number of steps of the job.
    pub step_count: u32,
    /// When it was given to the device.
    pub began: Nanos,
    /// When the device returned it.
    pub ended: Nanos,
    /// When its preemption was requested; [`Nanos::ZERO`] if it never was.
    pub preempt_requested: Nanos,
    /// The real-time model it was preempted for.
    pub preempted_for: Option<ModelKey>,
    /// How it ended.
    pub end: RunEnd,
}

/// Weights that were copied to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadSpan {
    /// Whose.
    pub model: ModelKey,
    /// When the load was requested.
    pub began: Nanos,
    /// When all weights had arrived, or the load failed.
    pub ended: Nanos,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Whether real time waited for it.
    pub urgent: bool,
    /// Whether it failed.
    pub failed: bool,
}

/// Weights that were evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictionSpan {
    /// Whose.
    pub model: ModelKey,
    /// When.
    pub at: Nanos,
}

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// The inputs of a request, to where the device takes them from: pinned memory of a GPU, or
    /// memory of the CPU device.
    Stage,
    /// The staged inputs of a batch's members, to one batch.
    Gather,
    /// Inputs, to the memory of a simulated device.
    ToDevice,
    /// The outputs of a job, to where its replies are made of.
    Outputs,
}

impl CopyKind {
    /// What it does, in a few words.
    pub const fn name(self) -> &'static str {
        match self {
            CopyKind::Stage => "stage inputs",
            CopyKind::Gather => "gather batch",
            CopyKind::ToDevice => "copy to device",
            CopyKind::Outputs => "copy outputs",
        }
    }
}

/// Inputs or outputs that were copied. Copies of a GPU's own are parts of its runs: to time them
/// takes calls of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySpan {
    /// The number of the request, or of the job of a batch.
    pub job: u64,
    /// Its model.
    pub model: ModelKey,
    /// Its class.
    pub class: Class,
    /// What was copied.
    pub kind: CopyKind,
    /// When it began.
    pub began: Nanos,
    /// When it ended.
    pub ended: Nanos,
    /// Bytes; 0 where they are not known.
    pub bytes: u64,
}

/// A short word for how a request ended.
pub fn end_name(end: End) -> &'static str {
    match end {
        End::Done => "done",
        End::Failed => "failed",
        End::DeadlineExceeded => "deadline",
        End::Cancelled => "cancelled",
        End::QueueFull => "queue full",
        End::NoSuchModel => "not loaded",
        End::ShuttingDown => "shutting down",
    }
}
