//! What `atoll bench faults` reports.

use std::fmt::Write;

use serde::Serialize;

/// Times in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Millis(pub(super) Vec<f64>);

impl Millis {
    /// The median and the maximum; zeros when there are none.
    fn median_and_max(&self) -> (f64, f64) {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
        (median, sorted.last().copied().unwrap_or_default())
    }
}

/// One kind of fault.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct FaultRow {
    pub(super) kind: String,
    pub(super) count: u32,
    /// From the fault until the device was given up.
    pub(super) noticed: Millis,
    /// The longest time in which a network gave no reply, for each fault.
    pub(super) without_service: Millis,
    /// Memory of the process before and after.
    pub(super) host_mib: [Option<u64>; 2],
    /// Memory in use on the device before and after.
    pub(super) device_mib: [Option<u64>; 2],
}

#[derive(Debug, Serialize)]
pub(super) struct FaultReport {
    pub(super) device: String,
    pub(super) driver: Option<String>,
    pub(super) date: String,
    pub(super) command: String,
    pub(super) seed: u64,
    pub(super) networks: Vec<String>,
    pub(super) rows: Vec<FaultRow>,
    pub(super) right: u64,
    pub(super) refused: u64,
    pub(super) wrong: u64,
    pub(super) unanswered: u64,
}

/// The report for people.
pub(super) fn table(report: &FaultReport) -> String {
    let mut text = String::from(
        "                            noticed, ms   without service, ms    host MiB  device MiB\n\
         fault               times  median    max      median        max     change      change\n",
    );
    for row in &report.rows {
        let (noticed, noticed_max) = row.noticed.median_and_max();
        let (gap, gap_max) = row.without_service.median_and_max();
        let change = |mib: [Option<u64>; 2]| match mib {
            [Some(before), Some(after)] => format!("{:+}", after as i64 - before as i64),
            _ => "?".to_string(),
        };
        let _ = writeln!(
            text,
            "{:18} {:6} {noticed:7.0} {noticed_max:6.0} {gap:11.0} {gap_max:10.0} {:>10} {:>11}",
            row.kind,
            row.count,
            change(row.host_mib),
            change(row.device_mib)
        );
    }
    let FaultReport { right, refused, wrong, unanswered, .. } = report;
    let _ = writeln!(
        text,
        "replies: {right} equal to the first, {refused} refused, {wrong} wrong, \
         {unanswered} missing"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_fault() {
        let row = FaultRow {
            kind: "trap".to_string(),
            count: 3,
            noticed: Millis(vec![5.0, 1.0, 3.0]),
            host_mib: [Some(100), Some(103)],
            ..FaultRow::default()
        };
        assert_eq!(row.noticed.median_and_max(), (3.0, 5.0));
        assert_eq!(Millis::default().median_and_max(), (0.0, 0.0));
        let report = FaultReport {
            device: String::new(),
            driver: None,
            date: String::new(),
            command: String::new(),
            seed: 1,
            networks: Vec::new(),
            rows: vec![row],
            right: 7,
            refused: 2,
            wrong: 0,
            unanswered: 0,
        };
        let text = table(&report);
        assert!(text.contains("trap") && text.contains("+3"), "{text}");
    }
}
