//! Errors of planning.

/// Why no plan can be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The GPU kind is unknown.
    #[error("unknown gpu kind '{name}'; known are {known}")]
    UnknownGpu {
        /// The requested name.
        name: String,
        /// Known names.
        known: String,
    },
    /// No profile of the service's model.
    #[error("service '{service}': there is no profile of model '{model}'; there are {known}")]
    NoProfile {
        /// The service.
        service: String,
        /// Its model.
        model: String,
        /// Models with a profile.
        known: String,
    },
    /// The model's profile has no point that a slice of this GPU has the size and memory for.
    #[error("service '{service}': no profile point of model '{model}' is for a slice of {gpu}")]
    NoPoint {
        /// The service.
        service: String,
        /// Its model.
        model: String,
        /// The GPU kind.
        gpu: &'static str,
    },
    /// All profiles were measured on other GPUs.
    #[error(
        "the profiles were measured on {found}, not on {gpu}; name the gpu they are of, or measure \
         this one (atoll profile --grid)"
    )]
    ForeignProfiles {
        /// GPUs of the profiles.
        found: String,
        /// The GPU kind to plan for.
        gpu: String,
    },
    /// No GPU kind that it may run on has a slice for it.
    #[error("service '{service}': it may run on none of the gpu kinds")]
    NoKind {
        /// The service.
        service: String,
    },
    /// Machines or racks that are not known or not possible.
    #[error("{what}")]
    BadLayout {
        /// What is wrong.
        what: String,
    },
    /// Energy is the objective, and nobody said what an offer takes.
    #[error("the offer '{offer}' of {gpu} has no watts, and energy is what the plan keeps small")]
    NoWatts {
        /// The offer.
        offer: String,
        /// Its kind.
        gpu: &'static str,
    },
    /// Not even one service fits the GPUs.
    #[error("the gpus do not suffice for a single service")]
    NoStock,
    /// A name that is empty or has control characters; names are printed in commands.
    #[error(
        "service {name:?}: a name has at least one character, at most 256, and none of control"
    )]
    BadName {
        /// The name given.
        name: String,
    },
    /// A headroom that is negative, not a number or too large.
    #[error("service '{service}': headroom {headroom} is not from 0 to 10")]
    BadHeadroom {
        /// The service.
        service: String,
        /// The headroom given.
        headroom: f64,
    },
    /// A rate that is zero, negative, not a number or too large.
    #[error("service '{service}': rate {rate} is not between 0.001 and 1e9 requests a second")]
    BadRate {
        /// The service.
        service: String,
        /// The rate given.
        rate: f64,
    },
    /// An SLO that is zero, negative or not a number.
    #[error("service '{service}': slo of {slo_ms} ms is not between 0.001 and 1e9 ms")]
    BadSlo {
        /// The service.
        service: String,
        /// The SLO given.
        slo_ms: f64,
    },
    /// No slice meets the SLO.
    #[error(
        "service '{service}': no slice meets its slo of {slo_ms} ms; the smallest feasible slo is \
         {nearest_ms:.1} ms"
    )]
    Infeasible {
        /// The service.
        service: String,
        /// The SLO given.
        slo_ms: f64,
        /// The smallest SLO, in steps of a tenth of a millisecond, that some slice meets.
        nearest_ms: f64,
    },
    /// A plan has a line for each slice, and nobody has as many.
    #[error("service '{service}' needs {slices:.0} slices at its rate; at most {max} are planned")]
    TooManySlices {
        /// The service.
        service: String,
        /// Slices it needs.
        slices: f64,
        /// The maximum.
        max: u32,
    },
    /// Two services of one name.
    #[error("service '{service}' is given twice")]
    Duplicate {
        /// The service.
        service: String,
    },
    /// There is nothing to plan.
    #[error("there are no services to plan")]
    NoServices,
    /// A profile file that cannot be read.
    #[error("line {line}: {what}")]
    BadProfile {
        /// Line number, from one.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A file of services, GPUs or traffic that cannot be read.
    #[error("line {line}: {what}")]
    BadFile {
        /// Line number, from one.
        line: usize,
        /// What is wrong with it, with the field's name.
        what: String,
    },
    /// A slice of a plan that cannot be there.
    #[error("current plan: gpu {gpu}, slice at {start}: {what}")]
    BadSlice {
        /// Number of its GPU.
        gpu: usize,
        /// Its place in the GPU's list.
        place: usize,
        /// Its first memory slice.
        start: u8,
        /// What is wrong with it.
        what: String,
    },
    /// A plan with a reference to something unknown, or with overlapping slices.
    #[error("current plan: {what}")]
    BadPlan {
        /// What is wrong with it.
        what: String,
    },
    /// The algorithm cannot plan this, by its own definition.
    #[error("{algorithm} cannot plan this: {what}")]
    Unsupported {
        /// The algorithm.
        algorithm: &'static str,
        /// Why.
        what: String,
    },
    /// A query that is not a graph from a root.
    #[error("query: {what}")]
    BadQuery {
        /// What is wrong with it.
        what: String,
    },
}
