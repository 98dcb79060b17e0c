//! Measured operating points of models: slice, batch and processes to latency, throughput and
//! memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::gpu::{GpuKind, SLOTS_MAX};

mod table;

pub use self::table::ProfileTable;

/// One measured operating point of a model on a slice.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
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
    /// What solvers rely on, whatever file a point comes from; an error names the field.
    fn check(&self) -> Result<(), String> {
        if self.gpcs == 0 || self.gpcs > SLOTS_MAX {
            return Err(format!("gpcs {} is not from 1 to {SLOTS_MAX}", self.gpcs));
        }
        for (field, count) in [("batch", self.batch), ("processes", self.processes)] {
            if count == 0 || count > COUNT_MAX {
                return Err(format!("{field} {count} is not at least 1 and at most {COUNT_MAX}"));
            }
        }
        for (field, figure) in [("throughput", self.throughput), ("latency_ms", self.latency_ms)] {
            if !(figure > 0.0 && figure <= FIGURE_MAX) {
                return Err(format!("{field} {figure} is not above 0 and at most {FIGURE_MAX:e}"));
            }
        }
        match self.memory_mib {
            Some(mib) if mib > MEMORY_MAX_MIB => {
                Err(format!("memory_mib {mib} is not at most {MEMORY_MAX_MIB}"))
            }
            _ => Ok(()),
        }
    }
}

/// The points of every model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "table::ProfilesFile")]
pub struct Profiles {
    models: BTreeMap<String, Vec<OperatingPoint>>,
}

/// Maximum number of models named in a message.
const NAMED_MAX: usize = 12;

impl Profiles {
    /// Reads comma-separated text of one GPU; see [`ProfileTable::from_csv`].
    pub fn from_csv(text: &str) -> Result<Profiles, PlanError> {
        ProfileTable::from_csv(text)?.of_one_gpu()
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

    /// The points of one model alone.
    pub fn of_model(&self, model: &str) -> Profiles {
        let points = self.models.get(model).cloned();
        Profiles { models: points.map(|points| (model.to_string(), points)).into_iter().collect() }
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
        // Halves and sizes beyond a GPU were cut to whole numbers.
        let bad = error(&format!("{HEADER}a,1,1.5,1,100,10,ok\n"));
        assert!(bad.contains("line 2") && bad.contains("batch '1.5'"), "{bad}");
        let bad = error(&format!("{HEADER}a,300,1,1,100,10,ok\n"));
        assert!(bad.contains("line 2") && bad.contains("mig_gpcs '300'"), "{bad}");
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
    }

    #[test]
    fn json_points_are_checked_and_the_line_is_named() {
        let json = |point: &str| {
            // Two good points come before it, one of another model whose name is a trap.
            let good = "{\"gpcs\":1,\"batch\":1,\"processes\":1,\"throughput\":9,\"latency_ms\":9}";
            let text = format!(
                "{{\n\"models\": {{\"[\\\"{{\": [{good}],\n \"a\": [{good},\n{{{point}}}\n]}}}}"
            );
            ProfileTable::from_json(&text).map(drop).map_err(|error| error.to_string())
        };
        let point = |processes: &str, throughput: &str, latency_ms: &str| {
            format!(
                "\"gpcs\": 1, \"batch\": 2, \"processes\": {processes}, \
                 \"throughput\": {throughput}, \"latency_ms\": {latency_ms}"
            )
        };
        assert_eq!(json(&point("1", "10", "90")), Ok(()));
        // The first two ended a planner, the third got a plan "proven best".
        for (bad, field) in [
            (point("0", "10", "90"), "processes 0"),
            (point("1", "-10", "90"), "throughput -10"),
            (point("1", "10", "-90"), "latency_ms -90"),
            (point("1", "10", "90") + ", \"memory_mb\": 3", "memory_mb"),
        ] {
            let error = json(&bad).unwrap_err();
            assert!(error.contains("line 4") && error.contains(field), "{error}");
        }
    }

    #[test]
    fn a_table_of_another_gpu_is_refused_unless_allowed() {
        let header = HEADER.replace("model,", "gpu,model,");
        let (a100, a30) = (GpuKind::find("a100-80gb").unwrap(), GpuKind::find("a30-24gb").unwrap());
        let row = "NVIDIA A100-SXM4-80GB,a,1,1,1,100,10,ok\n";
        let table = ProfileTable::from_csv(&format!("{header}{row}")).unwrap();
        assert!(table.of_kind(a100, false).unwrap().points("a").is_some());
        // An A30 was planned with it.
        let error = table.of_kind(a30, false).unwrap_err().to_string();
        assert!(error.contains("NVIDIA A100-SXM4-80GB") && error.contains("a30-24gb"), "{error}");
        assert!(table.of_kind(a30, true).unwrap().points("a").is_some());
        // A table of several GPUs gives each kind its own rows; rows without name are anyone's.
        let more = format!("{header}{row}a30-24gb,a,2,1,1,50,20,ok\n,b,1,1,1,9,9,ok\n");
        let table = ProfileTable::from_csv(&more).unwrap();
        let sizes = |gpu, model| {
            let profiles = table.of_kind(gpu, false).unwrap();
            profiles.points(model).unwrap().iter().map(|p| p.gpcs).collect::<Vec<_>>()
        };
        assert_eq!(
            (sizes(a100, "a"), sizes(a30, "a"), sizes(a30, "b")),
            (vec![1], vec![2], vec![1])
        );
        let error = Profiles::from_csv(&more).unwrap_err().to_string();
        assert!(error.contains("several gpus"), "{error}");
        let json = "{\"gpu\": \"h200-141gb\", \"models\": {\"a\": [{\"gpcs\": 1, \"batch\": 1, \
                    \"processes\": 1, \"throughput\": 9, \"latency_ms\": 9}]}}";
        assert_eq!(ProfileTable::from_json(json).unwrap().gpus(), ["h200-141gb"]);
    }

    #[test]
    fn a_point_is_there_once() {
        let error = |text: &str| ProfileTable::from_csv(text).unwrap_err().to_string();
        let row = "a,1,4,1,100,10,ok\n";
        // Planners took the better one of two measurements.
        let again = error(&format!("{HEADER}{row}b,1,4,1,9,9,ok\n\na,1,4,1,300,5,ok\n"));
        assert!(again.contains("line 5: the point of 'a'") && again.contains("line 2"), "{again}");
        // A point that did not run is none.
        let oom = format!("{HEADER}{row}a,1,4,1,0,0,oom\n");
        assert!(ProfileTable::from_csv(&oom).is_ok());
        // Of two GPUs each has its own, unless both names are of one.
        let header = HEADER.replace("model,", "gpu,model,");
        let two = |other: &str| format!("{header}NVIDIA A100-SXM4-80GB,{row}{other},{row}");
        let a100 = GpuKind::find("a100-80gb").unwrap();
        let of_a100 = |text: &str| ProfileTable::from_csv(text).unwrap().of_kind(a100, false);
        assert!(of_a100(&two("h100-80gb")).is_ok());
        for other in ["a100-80gb", ""] {
            let again = of_a100(&two(other)).unwrap_err().to_string();
            assert!(again.contains("line 3: the point of 'a'"), "{again}");
        }
        let columns = error(&HEADER.replace("status", "batch"));
        assert!(columns.contains("line 1: the column 'batch' is there twice"), "{columns}");
        let point = "{\"gpcs\":1,\"batch\":1,\"processes\":1,\"throughput\":9,\"latency_ms\":9}";
        let json = |text: String| ProfileTable::from_json(&text).unwrap_err().to_string();
        let again = json(format!("{{\"models\": {{\"a\": [\n{point},\n{point}\n]}}}}"));
        assert!(again.contains("line 3: the point of 'a'") && again.contains("line 2"), "{again}");
        // A map kept the last.
        let again = json(format!("{{\"models\": {{\"a\": [],\n\"a\": [{point}]}}}}"));
        assert!(again.contains("line 2: model \"a\" is there twice"), "{again}");
    }

    #[test]
    fn a_mark_at_the_start_is_no_part_of_a_table() {
        let text = format!("\u{feff}{HEADER}a,1,1,1,100,10,ok\n");
        assert!(Profiles::from_csv(&text).unwrap().points("a").is_some());
        assert!(ProfileTable::from_json("\u{feff}{\"models\": {}}").is_ok());
    }

    #[test]
    fn unmeasured_memory_is_limited_by_what_ran() {
        let text = format!("{HEADER}a,1,8,1,100,10,ok\na,1,8,5,300,20,ok\na,7,16,2,300,20,ok\n");
        let profiles = Profiles::from_csv(&text).unwrap();
        let gpu = GpuKind::find("a100-80gb").unwrap();
        let points = profiles.points("a").unwrap();
        assert_eq!(profiles.memory_limit_mib(gpu, "a", &points[0]), 1945);
        assert_eq!(profiles.memory_limit_mib(gpu, "a", &points[2]), 79 * 1024);
    }
}
