//! Measured operating points of models: slice, batch and processes to latency, throughput and
//! memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::gpu::GpuKind;

/// One measured operating point of a model on a slice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperatingPoint {
    /// Compute slices of the slice it was measured on.
    pub gpcs: u8,
    /// Batch size of a process.
    pub batch: u32,
    /// Number of processes.
    pub processes: u32,
    /// Requests per second of all processes together.
    pub throughput: f64,
    /// Latency of a batch in milliseconds, with all processes busy.
    pub latency_ms: f64,
    /// Memory of all processes together, where it was measured.
    #[serde(default)]
    pub memory_mib: Option<u64>,
}

impl OperatingPoint {
    /// Time in milliseconds after which every process has finished one batch: the larger of the
    /// measured latency and what the throughput implies, for latencies may have been rounded down.
    pub fn turn_ms(&self) -> f64 {
        let implied = f64::from(self.batch * self.processes) / self.throughput * 1000.0;
        self.latency_ms.max(implied)
    }

    /// Requests finished in one turn.
    pub fn requests(&self) -> f64 {
        f64::from(self.batch * self.processes)
    }
}

/// Largest batch, and number of processes, of a point: their product is a whole number.
const COUNT_MAX: u32 = u16::MAX as u32;
/// Largest throughput and latency of a point; solvers compare sums of them exactly.
const FIGURE_MAX: f64 = 1e9;
/// Most memory of a point.
const MEMORY_MAX_MIB: u64 = 1 << 30;

impl OperatingPoint {
    /// What solvers rely on, whatever file a point comes from.
    fn check(&self) -> Result<(), String> {
        if self.gpcs == 0 || self.batch == 0 || self.processes == 0 {
            return Err("slice, batch and processes are at least 1".to_string());
        }
        if self.batch > COUNT_MAX || self.processes > COUNT_MAX {
            return Err(format!("batch and processes are at most {COUNT_MAX}"));
        }
        let figures = [self.throughput, self.latency_ms];
        if !figures.iter().all(|figure| *figure > 0.0 && *figure <= FIGURE_MAX) {
            return Err(format!("throughput and latency are above 0 and at most {FIGURE_MAX:e}"));
        }
        if self.memory_mib.is_some_and(|memory| memory > MEMORY_MAX_MIB) {
            return Err(format!("memory is at most {MEMORY_MAX_MIB} MiB"));
        }
        Ok(())
    }
}

/// The points of every model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ProfilesFile")]
pub struct Profiles {
    models: BTreeMap<String, Vec<OperatingPoint>>,
}

/// Profiles in JSON, before their points are checked.
#[derive(Deserialize)]
struct ProfilesFile {
    models: BTreeMap<String, Vec<OperatingPoint>>,
}

impl TryFrom<ProfilesFile> for Profiles {
    type Error = String;

    fn try_from(file: ProfilesFile) -> Result<Profiles, String> {
        for (model, points) in &file.models {
            for (index, point) in points.iter().enumerate() {
                point.check().map_err(|why| format!("point {index} of '{model}': {why}"))?;
            }
        }
        Ok(Profiles { models: file.models })
    }
}

/// Maximum number of models named in a message.
const NAMED_MAX: usize = 12;

const COLUMNS: [&str; 6] =
    ["model", "mig_gpcs", "batch", "procs", "throughput_total_rps", "latency_ms"];

impl Profiles {
    /// Reads comma-separated text with a header. Required columns are `model, mig_gpcs, batch,
    /// procs, throughput_total_rps, latency_ms`; `memory_mib` and `status` are optional. Rows whose
    /// status is not `ok` are points that did not run.
    pub fn from_csv(text: &str) -> Result<Profiles, PlanError> {
        let bad = |line: usize, what: String| PlanError::BadProfile { line, what };
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let (_, header) = lines.next().ok_or_else(|| bad(1, "the file is empty".to_string()))?;
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let find = |name: &str| names.iter().position(|column| *column == name);
        let mut at = [0; COLUMNS.len()];
        for (slot, name) in at.iter_mut().zip(COLUMNS) {
            *slot = find(name).ok_or_else(|| bad(1, format!("there is no column '{name}'")))?;
        }
        let (status, memory) = (find("status"), find("memory_mib"));
        let mut profiles = Profiles::default();
        for (index, line) in lines {
            let cells: Vec<&str> = line.split(',').map(str::trim).collect();
            let line = index + 1;
            if cells.len() != names.len() {
                return Err(bad(line, format!("{} cells, not {}", cells.len(), names.len())));
            }
            if status.is_some_and(|column| cells[column] != "ok") {
                continue;
            }
            let number = |column: usize| {
                cells[column]
                    .parse::<f64>()
                    .ok()
                    .filter(|value| value.is_finite() && *value >= 0.0)
                    .ok_or_else(|| {
                        let name = names[column];
                        bad(line, format!("{name} '{}' is not a number", cells[column]))
                    })
            };
            let point = OperatingPoint {
                gpcs: number(at[1])? as u8,
                batch: number(at[2])? as u32,
                processes: number(at[3])? as u32,
                throughput: number(at[4])?,
                latency_ms: number(at[5])?,
                memory_mib: match memory {
                    Some(column) if !cells[column].is_empty() => Some(number(column)? as u64),
                    _ => None,
                },
            };
            profiles
                .push(cells[at[0]], point)
                .map_err(|what| PlanError::BadProfile { line, what })?;
        }
        Ok(profiles)
    }

    /// Adds a point to a model.
    pub fn push(&mut self, model: &str, point: OperatingPoint) -> Result<(), String> {
        point.check()?;
        self.models.entry(model.to_string()).or_default().push(point);
        Ok(())
    }

    /// The points of a model; `None` if it is unknown.
    pub fn points(&self, model: &str) -> Option<&[OperatingPoint]> {
        self.models.get(model).map(Vec::as_slice)
    }

    /// The models, by name.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    /// The models' names for a message; the first few where there are many.
    pub(crate) fn names(&self) -> String {
        let few: Vec<&str> = self.models().take(NAMED_MAX).collect();
        match self.models.len().saturating_sub(NAMED_MAX) {
            _ if few.is_empty() => "none".to_string(),
            0 => few.join(", "),
            more => format!("{} and {more} more", few.join(", ")),
        }
    }

    /// An upper limit of a point's memory in MiB. Where memory was not measured, the limit follows
    /// from what ran: if `p` processes of this batch or a larger one fitted a slice, each of them
    /// takes at most that slice over `p`.
    pub fn memory_limit_mib(&self, gpu: &GpuKind, model: &str, point: &OperatingPoint) -> u64 {
        if let Some(memory) = point.memory_mib {
            return memory;
        }
        let slice_mib = |gpcs: u8| {
            gpu.kind_of_size(gpcs).map_or(u64::MAX, |kind| gpu.slices[kind].memory_mib())
        };
        let per_process = self
            .points(model)
            .unwrap_or_default()
            .iter()
            .filter(|other| other.batch >= point.batch)
            .map(|other| match other.memory_mib {
                Some(memory) => memory.div_ceil(u64::from(other.processes)),
                None => slice_mib(other.gpcs) / u64::from(other.processes),
            })
            .min()
            .unwrap_or(u64::MAX);
        per_process.saturating_mul(u64::from(point.processes)).min(slice_mib(point.gpcs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms,status\n";

    #[test]
    fn rows_that_did_not_run_are_left_out() {
        let text = format!("{HEADER}a,1,1,1,100,10,ok\na,1,2,1,0,0,oom\n");
        let profiles = Profiles::from_csv(&text).unwrap();
        assert_eq!(profiles.points("a").unwrap().len(), 1);
    }

    #[test]
    fn errors_name_line_and_column() {
        let error = |rows: &str| Profiles::from_csv(rows).unwrap_err().to_string();
        assert!(error("").contains("empty"));
        assert!(error("model,batch\n").contains("'mig_gpcs'"));
        let bad = error(&format!("{HEADER}a,1,x,1,100,10,ok\n"));
        assert!(bad.contains("line 2") && bad.contains("batch"), "{bad}");
        assert!(error(&format!("{HEADER}a,1,1,1,0,10,ok\n")).contains("above 0"));
        assert!(error(&format!("{HEADER}a,1,1\n")).contains("3 cells"));
    }

    #[test]
    fn points_that_no_solver_can_use_are_refused() {
        let error = |rows: &str| Profiles::from_csv(rows).unwrap_err().to_string();
        // A planner took all memory for it.
        assert!(error(&format!("{HEADER}a,1,1,1,1e308,10,ok\n")).contains("at most 1e9"));
        // The product overflowed.
        assert!(error(&format!("{HEADER}a,1,100000,100000,1,10,ok\n")).contains("at most 65535"));
        // The same holds in JSON, where a planner divided by no processes.
        let point = |processes: u32| OperatingPoint {
            gpcs: 1,
            batch: 1,
            processes,
            throughput: 10.0,
            latency_ms: 90.0,
            memory_mib: None,
        };
        let file = |processes| ProfilesFile {
            models: BTreeMap::from([("a".to_string(), vec![point(processes)])]),
        };
        assert!(Profiles::try_from(file(1)).is_ok());
        let error = Profiles::try_from(file(0)).unwrap_err();
        assert!(error.contains("point 0 of 'a'"), "{error}");
    }

    #[test]
    fn unmeasured_memory_is_limited_by_what_ran() {
        let text = format!("{HEADER}a,1,8,1,100,10,ok\na,1,8,5,300,20,ok\na,7,16,2,300,20,ok\n");
        let profiles = Profiles::from_csv(&text).unwrap();
        let gpu = GpuKind::find("a100-80gb").unwrap();
        let points = profiles.points("a").unwrap();
        assert_eq!(profiles.memory_limit_mib(gpu, "a", &points[0]), 2048);
        assert_eq!(profiles.memory_limit_mib(gpu, "a", &points[2]), 80 * 1024);
    }
}
