//! The table: the planner's columns, and other results.

use std::fmt::{self, Write};

use super::member::MemberReport;

/// A point of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridPoint {
    /// Compute slices.
    pub(crate) slice: u8,
    pub(crate) batch: usize,
    pub(crate) processes: u32,
}

impl fmt::Display for GridPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GridPoint { slice, batch, processes } = self;
        write!(f, "slice {slice}, batch {batch}, {processes} processes")
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GridRow {
    point: GridPoint,
    percent: u32,
    ok: bool,
    throughput: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    memory_bytes: u64,
}

impl GridRow {
    /// The combined results of a point's processes. Rates add up; the latency is the mean over all
    /// batches, the median that of the median process, and the 99th percentile that of the worst.
    pub(crate) fn measured(
        point: GridPoint,
        percent: u32,
        reports: &[MemberReport],
        memory_bytes: u64,
    ) -> Result<GridRow, String> {
        let batches: u64 = reports.iter().map(|one| one.batches).sum();
        if reports.len() != point.processes as usize || reports.iter().any(|one| one.seconds <= 0.0)
        {
            return Err(format!("{} of {} processes reported", reports.len(), point.processes));
        }
        let rate = |one: &MemberReport| one.batches as f64 * point.batch as f64 / one.seconds;
        let weighted = |one: &MemberReport| one.mean_us * one.batches as f64;
        let mut medians: Vec<f64> = reports.iter().map(|one| one.p50_us).collect();
        medians.sort_by(f64::total_cmp);
        Ok(GridRow {
            point,
            percent,
            ok: true,
            throughput: reports.iter().map(rate).sum(),
            mean_us: reports.iter().map(weighted).sum::<f64>() / batches as f64,
            p50_us: medians[medians.len() / 2],
            p99_us: reports.iter().map(|one| one.p99_us).fold(0.0, f64::max),
            memory_bytes,
        })
    }

    /// A point that did not run; the planner ignores it.
    pub(crate) fn failed(point: GridPoint, percent: u32) -> GridRow {
        GridRow {
            point,
            percent,
            ok: false,
            throughput: 0.0,
            mean_us: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            memory_bytes: 0,
        }
    }
}

/// The table as text.
pub(crate) struct GridTable {
    model: String,
    gpu: String,
    text: String,
    measured: usize,
}

impl GridTable {
    /// A table of a model on a GPU, by the GPU's name.
    pub(crate) fn new(model: &str, gpu: &str) -> Result<GridTable, String> {
        let bad = |name: &str| name.is_empty() || name.contains([',', '\n', '\r', '"']);
        if bad(model) {
            return Err(format!("'{model}' cannot be a name in a table; use --name"));
        }
        if bad(gpu) {
            return Err(format!("the device's name '{gpu}' cannot be one in a table"));
        }
        let text = "gpu,model,mig_gpcs,batch,procs,throughput_per_proc_rps,throughput_total_rps,\
                    latency_ms,status,memory_mib,memory_bytes,share_percent,\
                    latency_p50_us,latency_p99_us\n";
        let (model, gpu) = (model.to_string(), gpu.to_string());
        Ok(GridTable { model, gpu, text: text.to_string(), measured: 0 })
    }

    pub(crate) fn push(&mut self, row: &GridRow) {
        let GridRow { point, percent, ok, throughput, mean_us, p50_us, p99_us, memory_bytes } = row;
        let GridPoint { slice, batch, processes } = point;
        // Six digits, so that a microsecond is visible.
        let _ = writeln!(
            self.text,
            "{},{},{slice},{batch},{processes},{:.3},{throughput:.3},{:.6},{},{},\
             {memory_bytes},{percent},{p50_us:.3},{p99_us:.3}",
            self.gpu,
            self.model,
            throughput / f64::from(*processes),
            mean_us / 1e3,
            if *ok { "ok" } else { "failed" },
            memory_bytes.div_ceil(1 << 20),
        );
        self.measured += usize::from(*ok);
    }

    /// Number of rows that ran.
    pub(crate) fn measured(&self) -> usize {
        self.measured
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(batches: u64, seconds: f64, mean_us: f64) -> MemberReport {
        let p99_us = mean_us * 2.0;
        MemberReport { batches, seconds, mean_us, p50_us: mean_us, p99_us, peak_bytes: 1 }
    }

    #[test]
    fn rates_add_up_and_the_planner_reads_the_table() {
        let point = GridPoint { slice: 3, batch: 4, processes: 2 };
        let reports = [report(100, 2.0, 10_000.5), report(300, 2.0, 20_000.5)];
        let row = GridRow::measured(point, 42, &reports, (7 << 20) + 1).unwrap();
        let mut table = GridTable::new("m", "h200-141gb").unwrap();
        table.push(&row);
        table.push(&GridRow::failed(GridPoint { batch: 8, ..point }, 42));
        assert_eq!(table.measured(), 1);
        let read = planner::ProfileTable::from_csv(table.text()).unwrap();
        assert_eq!(read.gpus(), ["h200-141gb"]);
        let profiles = read.of_one_gpu().unwrap();
        let expected = planner::OperatingPoint {
            gpcs: 3,
            batch: 4,
            processes: 2,
            throughput: 800.0,
            latency_ms: 17.5005,
            memory_mib: Some(8),
        };
        assert_eq!(profiles.points("m").unwrap(), [expected]);
        assert!(GridRow::measured(point, 42, &reports[..1], 0).is_err());
        assert!(GridTable::new("a,b", "g").is_err() && GridTable::new("a", "").is_err());
    }
}
