//! Where the GPUs of a plan are: in which machine, and in which rack.

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

/// Most GPUs of a machine and of a rack.
const MACHINE_GPUS_MAX: usize = 1024;
const RACK_GPUS_MAX: usize = 65_536;

/// GPUs that fail together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureDomain {
    /// One GPU.
    #[default]
    Gpu,
    /// A machine.
    Machine,
    /// A rack.
    Rack,
}

impl FailureDomain {
    /// Its name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            FailureDomain::Gpu => "gpu",
            FailureDomain::Machine => "machine",
            FailureDomain::Rack => "rack",
        }
    }
}

impl std::str::FromStr for FailureDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<FailureDomain, String> {
        let all = [FailureDomain::Gpu, FailureDomain::Machine, FailureDomain::Rack];
        let found = all.into_iter().find(|domain| domain.name() == text);
        found.ok_or_else(|| format!("'{text}' is not gpu, machine or rack"))
    }
}

/// GPUs of a machine and of a rack. Each kind has machines and racks of its own, which take the
/// GPUs of its plan in order; a position without slices is a GPU that is not used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// GPUs of a machine, if that matters.
    pub machine_gpus: Option<usize>,
    /// GPUs of a rack, if that matters.
    pub rack_gpus: Option<usize>,
}

impl Layout {
    /// GPUs of a failure domain; `None` if nobody said how many.
    pub fn gpus(self, domain: FailureDomain) -> Option<usize> {
        match domain {
            FailureDomain::Gpu => Some(1),
            FailureDomain::Machine => self.machine_gpus,
            FailureDomain::Rack => self.rack_gpus,
        }
    }

    /// Positions from one whole machine or rack to the next.
    pub(super) fn whole(self) -> usize {
        self.rack_gpus.or(self.machine_gpus).unwrap_or(1).max(1)
    }

    /// Whether the figures are in range and a rack has whole machines.
    pub fn check(self) -> Result<(), PlanError> {
        let bad = |what: String| Err(PlanError::BadLayout { what });
        let (machine, rack) = (self.machine_gpus, self.rack_gpus);
        if machine.is_some_and(|gpus| !(1..=MACHINE_GPUS_MAX).contains(&gpus)) {
            return bad(format!("a machine has 1 to {MACHINE_GPUS_MAX} gpus"));
        }
        if rack.is_some_and(|gpus| !(1..=RACK_GPUS_MAX).contains(&gpus)) {
            return bad(format!("a rack has 1 to {RACK_GPUS_MAX} gpus"));
        }
        match (machine, rack) {
            (Some(machine), Some(rack)) if !rack.is_multiple_of(machine) => {
                bad(format!("a rack of {rack} gpus has no whole machines of {machine}"))
            }
            _ => Ok(()),
        }
    }

    /// That the size of `domain` is known, which `who` needs.
    pub(super) fn require(self, domain: FailureDomain, who: &str) -> Result<(), PlanError> {
        let name = domain.name();
        match self.gpus(domain) {
            Some(_) => Ok(()),
            None => Err(PlanError::BadLayout {
                what: format!("{who} by {name}, and --{name}-gpus does not say how many that are"),
            }),
        }
    }
}
