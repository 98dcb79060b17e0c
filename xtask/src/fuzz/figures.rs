//! The figures of all runs: `evidence/fuzz.json`, and the table in `evidence/fuzz.md`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::evidence::source_hash;

const JSON: &str = "evidence/fuzz.json";
const PAGE: &str = "evidence/fuzz.md";

/// The figures belong to these: other targets would have others.
const SOURCES: [&str; 9] = [
    "fuzz/src/targets.rs",
    "fuzz/src/targets/cluster.rs",
    "fuzz/src/targets/files.rs",
    "fuzz/src/targets/onnx.rs",
    "fuzz/src/targets/picture.rs",
    "fuzz/src/targets/protocol.rs",
    "fuzz/src/targets/server.rs",
    "fuzz/src/targets/whole_way.rs",
    "fuzz/src/allocations.rs",
];

/// Lines between which the page's table is.
const BEGIN: &str = "<!-- figures: cargo xtask fuzz --table -->";
const END: &str = "<!-- end of the figures -->";

/// What one target did in one slice of a run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Slice {
    inputs: u64,
    seconds: f64,
    /// Edges of the code that were covered; 0 without counters.
    edges: u64,
    /// Most memory: of one input without coverage, of the process with it.
    peak_mib: u64,
    finds: Vec<String>,
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slice { inputs, seconds, edges, peak_mib, finds } = self;
        write!(f, "{inputs} inputs, {seconds:.0} s, {edges} edges, {peak_mib} MiB")?;
        finds.iter().try_for_each(|find| write!(f, "\n  FOUND {find}"))
    }
}

impl Slice {
    /// Reads the report of `fuzz_driver run --json`: targets and what they did.
    pub(super) fn of_driver(text: &str) -> Result<Vec<(String, Slice)>, String> {
        let list: Vec<Value> = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let slice = |one: &Value| {
            let finds = one["finds"].as_array()?;
            let slice = Slice {
                inputs: one["inputs"].as_u64()?,
                seconds: one["seconds"].as_f64()?,
                edges: 0,
                peak_mib: one["peak"].as_u64()?.div_ceil(1 << 20),
                finds: finds.iter().filter_map(Value::as_str).map(String::from).collect(),
            };
            Some((one["target"].as_str()?.to_string(), slice))
        };
        let all: Option<Vec<_>> = list.iter().map(slice).collect();
        all.ok_or("it is not a report of the driver".to_string())
    }

    /// Reads what libFuzzer prints.
    pub(super) fn of_libfuzzer(text: &str, time: Duration, ended_well: bool) -> Slice {
        let statistic = |name: &str| {
            let line = text.lines().rev().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
        };
        let edges = text.lines().rev().find_map(|line| {
            let (_, rest) = line.split_once(" cov: ")?;
            rest.split_whitespace().next()?.parse().ok()
        });
        let begins = |line: &&str| {
            let signs = ["panicked at", "memory allocation of", "ERROR: libFuzzer", "hangs:"];
            signs.iter().any(|sign| line.contains(sign))
        };
        let what = text.lines().find(begins).unwrap_or("it ended without a reason");
        let detail = text.lines().skip_while(|line| !begins(line)).nth(1).unwrap_or_default();
        let artifact = text.lines().rev().find_map(|line| line.split_once("Test unit written to "));
        let artifact = artifact.map(|(_, path)| path.trim()).unwrap_or_default();
        let find = || format!("{what} {detail} ({artifact})");
        Slice {
            inputs: statistic("stat::number_of_executed_units:"),
            seconds: time.as_secs_f64(),
            edges: edges.unwrap_or(0),
            peak_mib: statistic("stat::peak_rss_mb:"),
            finds: if ended_well { Vec::new() } else { vec![find()] },
        }
    }
}

/// The sums over all runs.
pub(super) struct Figures(Value);

impl Figures {
    /// Reads the file; empty figures where there is none.
    pub(super) fn read(root: &Path) -> Result<Figures, String> {
        match std::fs::read_to_string(root.join(JSON)) {
            Ok(text) => {
                serde_json::from_str(&text).map(Figures).map_err(|e| format!("{JSON}: {e}"))
            }
            Err(_) => Ok(Figures(json!({"targets": {}, "commits": [], "allocations": {}}))),
        }
    }

    /// Adds a slice to the sums of its target.
    pub(super) fn add(&mut self, target: &str, slice: &Slice, commit: &str) {
        let commits = &mut self.0["commits"];
        if !commits.is_array() {
            *commits = json!([]);
        }
        if let Some(commits) = commits.as_array_mut()
            && !commits.iter().any(|known| known == commit)
        {
            commits.push(json!(commit));
        }
        let sums = &mut self.0["targets"][target];
        let number = |sums: &Value, name: &str| sums[name].as_f64().unwrap_or_default();
        let kind = if slice.edges > 0 { "guided" } else { "plain" };
        let inputs = number(sums, kind) as u64 + slice.inputs;
        let seconds = number(sums, "seconds") + slice.seconds;
        let edges = (number(sums, "edges") as u64).max(slice.edges);
        let memory = if slice.edges > 0 { "process_mib" } else { "input_mib" };
        let peak = (number(sums, memory) as u64).max(slice.peak_mib);
        let finds = number(sums, "finds") as u64 + slice.finds.len() as u64;
        sums[kind] = json!(inputs);
        sums["seconds"] = json!(seconds.round());
        sums["edges"] = json!(edges);
        sums[memory] = json!(peak);
        sums["finds"] = json!(finds);
    }

    /// Sets what came of failing allocations of at least `min` bytes.
    pub(super) fn set_allocations(&mut self, min: &str, report: &str) -> Result<(), String> {
        let report: Value = serde_json::from_str(report).map_err(|error| error.to_string())?;
        self.0["allocations"][min] = report;
        Ok(())
    }

    /// Writes file and table, bound to the present targets.
    pub(super) fn write(mut self, root: &Path) -> Result<(), String> {
        let mut hashes = Map::new();
        for source in SOURCES {
            let bytes = std::fs::read(root.join(source)).map_err(|e| format!("{source}: {e}"))?;
            hashes.insert(source.to_string(), json!(source_hash(&bytes)));
        }
        self.0["sha256"] = Value::Object(hashes);
        let text = serde_json::to_string_pretty(&self.0).map_err(|error| error.to_string())?;
        // Renamed, so that a run that is stopped leaves whole figures.
        let part = root.join(format!("{JSON}.part"));
        std::fs::write(&part, text + "\n").map_err(|error| format!("{JSON}: {error}"))?;
        std::fs::rename(&part, root.join(JSON)).map_err(|error| format!("{JSON}: {error}"))?;
        let page = root.join(PAGE);
        let text = std::fs::read_to_string(&page).unwrap_or_else(|_| format!("{BEGIN}\n{END}\n"));
        let text = with_table(&text, &self.tables())?;
        std::fs::write(&page, text).map_err(|error| format!("{PAGE}: {error}"))
    }

    fn tables(&self) -> String {
        let mut text = String::from(
            "| target | inputs | guided by coverage | seconds | inputs/s | edges covered \
             | memory of an input, MiB | memory of the process, MiB | slices ended by a find |\n\
             |---|---|---|---|---|---|---|---|---|\n",
        );
        let mut sums = (0, 0, 0.0, 0);
        let empty = Map::new();
        for (name, of) in self.0["targets"].as_object().unwrap_or(&empty) {
            let number = |name: &str| of[name].as_f64().unwrap_or_default();
            let (guided, plain) = (number("guided") as u64, number("plain") as u64);
            let (inputs, seconds) = (guided + plain, number("seconds"));
            let rate = inputs as f64 / seconds.max(1.0);
            let [edges, input, process] = ["edges", "input_mib", "process_mib"]
                .map(|name| of[name].as_u64().map_or("-".to_string(), |value| value.to_string()));
            let finds = number("finds") as u64;
            text.push_str(&format!(
                "| {name} | {inputs} | {guided} | {seconds:.0} | {rate:.0} | {edges} | {input} \
                 | {process} | {finds} |\n"
            ));
            sums = (sums.0 + inputs, sums.1 + guided, sums.2 + seconds, sums.3 + finds);
        }
        text.push_str(&format!(
            "| all | {} | {} | {:.0} | | | | | {} |\n",
            sums.0, sums.1, sums.2, sums.3
        ));
        let commits: Vec<&str> = self.0["commits"]
            .as_array()
            .map(|commits| commits.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        text.push_str(&format!("\nMeasured on the commits {}.\n", commits.join(", ")));
        text + &self.allocation_table()
    }

    fn allocation_table(&self) -> String {
        let mut text = String::from(
            "\n| request | allocations of at least | of them | error response | served anyway or \
             connection closed | process ended | largest that ends it, bytes |\n\
             |---|---|---|---|---|---|---|\n",
        );
        let empty = Map::new();
        for (min, cases) in self.0["allocations"].as_object().unwrap_or(&empty) {
            for case in cases.as_array().unwrap_or(&Vec::new()) {
                let name = case["case"].as_str().unwrap_or_default();
                let [all, refused, survived, aborts, largest] =
                    ["allocations", "refused", "survived", "aborts", "largest_abort"]
                        .map(|field| case[field].as_u64().unwrap_or_default());
                text.push_str(&format!(
                    "| {name} | {min} | {all} | {refused} | {survived} | {aborts} | {largest} |\n"
                ));
            }
        }
        text
    }
}

/// `page` with `table` between its marks.
fn with_table(page: &str, table: &str) -> Result<String, String> {
    let broken = || format!("{PAGE} lacks the lines '{BEGIN}' and '{END}'");
    let (before, rest) = page.split_once(BEGIN).ok_or_else(broken)?;
    let (_, after) = rest.split_once(END).ok_or_else(broken)?;
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBFUZZER: &str = "\
#2\tINITED cov: 10 ft: 11 corp: 1/1b exec/s: 0 rss: 30Mb
#1000\tNEW    cov: 120 ft: 300 corp: 9/1Kb lim: 4 exec/s: 0 rss: 31Mb L: 3/3 MS: 1 EraseBytes-
thread '<unnamed>' panicked at crates/api/src/codec.rs:7:9:
index out of bounds
artifact_prefix='a/'; Test unit written to a/crash-1
stat::number_of_executed_units: 1234
stat::peak_rss_mb:              77
";

    #[test]
    fn what_libfuzzer_prints_is_read() {
        let slice = Slice::of_libfuzzer(LIBFUZZER, Duration::from_secs(2), false);
        assert_eq!((slice.inputs, slice.edges, slice.peak_mib), (1234, 120, 77));
        assert!(slice.finds[0].contains("codec.rs:7") && slice.finds[0].contains("a/crash-1"));
        let well = Slice::of_libfuzzer(LIBFUZZER, Duration::from_secs(2), true);
        assert!(well.finds.is_empty());
    }

    #[test]
    fn reports_of_the_driver_are_read() {
        let text = r#"[{"target":"json","inputs":5,"seconds":1.5,"peak":2000000,"finds":["x"]}]"#;
        let finds = vec!["x".to_string()];
        let slice = Slice { inputs: 5, seconds: 1.5, edges: 0, peak_mib: 2, finds };
        assert_eq!(Slice::of_driver(text).unwrap(), [("json".to_string(), slice)]);
        assert!(Slice::of_driver("[{}]").is_err());
    }

    #[test]
    fn slices_add_up() {
        let mut figures = Figures(json!({}));
        let guided = Slice { inputs: 5, seconds: 1.0, edges: 7, peak_mib: 30, finds: vec![] };
        let plain = Slice { inputs: 6, finds: vec!["x".into()], ..Slice::default() };
        figures.add("json", &guided, "abc");
        figures.add("json", &guided, "abc");
        figures.add("json", &plain, "def");
        let table = figures.tables();
        assert!(table.contains("| json | 16 | 10 | 2 | 8 | 7 |"), "{table}");
        assert!(table.contains("| all | 16 | 10 | 2 | | | | | 1 |"), "{table}");
        assert!(table.contains("abc, def"), "{table}");
    }

    #[test]
    fn only_the_table_of_the_page_changes() {
        let page = format!("# A\n{BEGIN}\nold\n{END}\nrest\n");
        let written = with_table(&page, "new").unwrap();
        assert_eq!(written, format!("# A\n{BEGIN}\n\nnew\n{END}\nrest\n"));
        assert!(with_table("nothing", "new").is_err());
    }
}
