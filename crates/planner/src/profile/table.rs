//! Files of operating points, which may be of several GPUs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::{OperatingPoint, Profiles};
use crate::error::PlanError;
use crate::gpu::GpuKind;
use crate::json_file::{JsonStep, line_of, without_mark};

/// Operating points as a file has them: with the GPU that each was measured on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileTable {
    rows: Vec<TableRow>,
}

#[derive(Clone, Debug, PartialEq)]
struct TableRow {
    /// Name of the GPU; empty if the file does not say.
    gpu: String,
    model: String,
    point: OperatingPoint,
    /// Its line in the file.
    line: usize,
}

/// Longest name of a model or GPU.
const NAME_LENGTH_MAX: usize = 256;

const COLUMNS: [&str; 6] =
    ["model", "mig_gpcs", "batch", "procs", "throughput_total_rps", "latency_ms"];

/// Profiles in JSON: the points of each model, and the GPU they were measured on.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProfilesFile {
    #[serde(default)]
    gpu: String,
    #[serde(deserialize_with = "each_model_once")]
    models: BTreeMap<String, Vec<PointFile>>,
}

/// Reads a map of models. Of a model that is there twice, a map would keep the last.
fn each_model_once<'de, D: Deserializer<'de>>(
    reader: D,
) -> Result<BTreeMap<String, Vec<PointFile>>, D::Error> {
    struct Models;
    impl<'de> Visitor<'de> for Models {
        type Value = BTreeMap<String, Vec<PointFile>>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("models with their points")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut models = BTreeMap::new();
            while let Some(model) = map.next_key::<String>()? {
                if models.contains_key(&model) {
                    return Err(A::Error::custom(format!("model {model:?} is there twice")));
                }
                models.insert(model, map.next_value()?);
            }
            Ok(models)
        }
    }
    reader.deserialize_map(Models)
}

/// A point in JSON, before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PointFile {
    gpcs: u8,
    batch: u32,
    processes: u32,
    throughput: f64,
    latency_ms: f64,
    #[serde(default)]
    memory_mib: Option<u64>,
}

impl From<PointFile> for OperatingPoint {
    fn from(file: PointFile) -> OperatingPoint {
        let PointFile { gpcs, batch, processes, throughput, latency_ms, memory_mib } = file;
        OperatingPoint { gpcs, batch, processes, throughput, latency_ms, memory_mib }
    }
}

/// Profiles inside another file, whose reader adds the line.
impl TryFrom<ProfilesFile> for Profiles {
    type Error = String;

    fn try_from(file: ProfilesFile) -> Result<Profiles, String> {
        let mut profiles = Profiles::default();
        for (model, points) in file.models {
            if let Some(what) = bad_name(&model) {
                return Err(what);
            }
            for (index, point) in points.into_iter().enumerate() {
                let pushed = profiles.push(&model, point.into());
                pushed.map_err(|what| format!("point {index} of '{model}': {what}"))?;
            }
        }
        Ok(profiles)
    }
}

impl ProfileTable {
    /// Reads comma-separated text with a header. Required columns are `model, mig_gpcs, batch,
    /// procs, throughput_total_rps, latency_ms`; `gpu`, `memory_mib` and `status` are optional.
    /// Rows whose status is not `ok` are points that did not run.
    pub fn from_csv(text: &str) -> Result<ProfileTable, PlanError> {
        let bad = |line: usize, what: String| PlanError::BadProfile { line, what };
        let lines = without_mark(text).lines().enumerate();
        let mut lines = lines.filter(|(_, line)| !line.trim().is_empty());
        let (first, header) =
            lines.next().ok_or_else(|| bad(1, "the file is empty".to_string()))?;
        let columns = Columns::of(header).map_err(|what| bad(first + 1, what))?;
        let mut table = ProfileTable::default();
        for (index, line) in lines {
            let row = columns.row(line, index + 1).map_err(|what| bad(index + 1, what))?;
            table.rows.extend(row);
        }
        check_distinct(table.rows.iter(), |row| &row.gpu)?;
        Ok(table)
    }

    /// Reads JSON: `{"gpu": NAME, "models": {MODEL: [POINT, ...]}}`. Points have the fields of
    /// [`OperatingPoint`]; the GPU may be left out.
    pub fn from_json(text: &str) -> Result<ProfileTable, PlanError> {
        let text = without_mark(text);
        let file: ProfilesFile = serde_json::from_str(text).map_err(|error| {
            // The reader adds the place to its message.
            let (line, text) = (error.line(), error.to_string());
            let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
            PlanError::BadProfile { line, what: what.to_string() }
        })?;
        let names = file.models.keys().chain([&file.gpu]);
        if let Some(what) = names.filter(|name| !name.is_empty()).find_map(|name| bad_name(name)) {
            return Err(PlanError::BadProfile { line: 1, what });
        }
        let mut rows = Vec::new();
        for (model, points) in file.models {
            let mut seen = BTreeMap::new();
            for (index, point) in points.into_iter().enumerate() {
                let point = OperatingPoint::from(point);
                let line = |index| {
                    let steps = [JsonStep::Key("models"), JsonStep::Key(&model)];
                    line_of(text, &[&steps[..], &[JsonStep::Index(index)]].concat())
                };
                let bad = |what: String| PlanError::BadProfile { line: line(index), what };
                point.check().map_err(|what| bad(format!("point {index} of '{model}': {what}")))?;
                let key = (point.gpcs, point.batch, point.processes);
                if let Some(first) = seen.insert(key, index) {
                    return Err(bad(twice(&model, &point, line(first))));
                }
                let (gpu, model) = (file.gpu.clone(), model.clone());
                // All rows are of one GPU, so nobody finds another one of the same point later.
                rows.push(TableRow { gpu, model, point, line: 1 });
            }
        }
        Ok(ProfileTable { rows })
    }

    /// The GPUs that its rows name, sorted.
    pub fn gpus(&self) -> Vec<&str> {
        let named = self.rows.iter().map(|row| row.gpu.as_str()).filter(|gpu| !gpu.is_empty());
        named.collect::<BTreeSet<&str>>().into_iter().collect()
    }

    /// The points that were measured on a GPU of this kind, and those of rows that name no GPU.
    /// With `foreign`, points of other GPUs stand in where the table has none of the kind's own.
    pub fn of_kind(&self, kind: &GpuKind, foreign: bool) -> Result<Profiles, PlanError> {
        let own = |row: &&TableRow| row.gpu.is_empty() || kind.is_named(&row.gpu);
        let gpus = self.gpus();
        if !self.rows.iter().any(|row| own(&row)) && !gpus.is_empty() {
            if !foreign {
                let (found, gpu) = (gpus.join(", "), kind.name.to_string());
                return Err(PlanError::ForeignProfiles { found, gpu });
            }
            return self.of_one_gpu();
        }
        profiles_of(self.rows.iter().filter(own))
    }

    /// All points, which are of one GPU.
    pub fn of_one_gpu(&self) -> Result<Profiles, PlanError> {
        match self.gpus().as_slice() {
            [] | [_] => profiles_of(self.rows.iter()),
            several => {
                let what = format!("points of several gpus: {}", several.join(", "));
                Err(PlanError::BadProfile { line: 1, what })
            }
        }
    }
}

/// Refuses a point that a GPU has twice: which of the figures hold cannot be known.
fn check_distinct<'t>(
    rows: impl Iterator<Item = &'t TableRow>,
    gpu: impl Fn(&'t TableRow) -> &'t str,
) -> Result<(), PlanError> {
    let mut seen = BTreeMap::new();
    for row in rows {
        let OperatingPoint { gpcs, batch, processes, .. } = row.point;
        let key = (gpu(row), row.model.as_str(), gpcs, batch, processes);
        if let Some(first) = seen.insert(key, row.line) {
            let what = twice(&row.model, &row.point, first);
            return Err(PlanError::BadProfile { line: row.line, what });
        }
    }
    Ok(())
}

fn twice(model: &str, point: &OperatingPoint, first: usize) -> String {
    let OperatingPoint { gpcs, batch, processes, .. } = point;
    format!(
        "the point of '{model}' on {gpcs} compute slices with batch {batch} and {processes} \
         processes is there twice, in line {first} too"
    )
}

/// The points of a GPU, which rows may name in several ways.
fn profiles_of<'t>(
    rows: impl Iterator<Item = &'t TableRow> + Clone,
) -> Result<Profiles, PlanError> {
    check_distinct(rows.clone(), |_| "")?;
    let mut profiles = Profiles::default();
    for row in rows {
        profiles.models.entry(row.model.clone()).or_default().push(row.point.clone());
    }
    Ok(profiles)
}

/// Where a table's columns are.
struct Columns<'t> {
    names: Vec<&'t str>,
    required: [usize; COLUMNS.len()],
    gpu: Option<usize>,
    status: Option<usize>,
    memory: Option<usize>,
}

impl<'t> Columns<'t> {
    fn of(header: &'t str) -> Result<Columns<'t>, String> {
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let find = |name: &str| names.iter().position(|column| *column == name);
        let again = names.iter().enumerate().find(|(at, name)| find(name) != Some(*at));
        if let Some((_, name)) = again.filter(|(_, name)| !name.is_empty()) {
            return Err(format!("the column '{name}' is there twice"));
        }
        let mut required = [0; COLUMNS.len()];
        for (slot, name) in required.iter_mut().zip(COLUMNS) {
            *slot = find(name).ok_or_else(|| format!("there is no column '{name}'"))?;
        }
        let (gpu, status, memory) = (find("gpu"), find("status"), find("memory_mib"));
        Ok(Columns { names, required, gpu, status, memory })
    }

    /// A line as a row; `None` for a point that did not run.
    fn row(&self, line: &str, number: usize) -> Result<Option<TableRow>, String> {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != self.names.len() {
            return Err(format!("{} cells, not {}", cells.len(), self.names.len()));
        }
        if self.status.is_some_and(|column| cells[column] != "ok") {
            return Ok(None);
        }
        let wrong = |column: usize, expected: &str| {
            format!("{} '{}' is not {expected}", self.names[column], cells[column])
        };
        let figure = |column: usize| {
            let value = cells[column].parse::<f64>().ok().filter(|value| value.is_finite());
            value.ok_or_else(|| wrong(column, "a number"))
        };
        let count = |column: usize, max: u64| {
            let value = figure(column)?;
            let fits = value.fract() == 0.0 && (0.0..=max as f64).contains(&value);
            match fits {
                true => Ok(value as u64),
                false => Err(wrong(column, &format!("a whole number from 0 to {max}"))),
            }
        };
        let [model, gpcs, batch, processes, throughput, latency] = self.required;
        if cells[model].is_empty() {
            return Err("model is empty".to_string());
        }
        let gpu = self.gpu.map_or("", |column| cells[column]);
        let names = [gpu, cells[model]].into_iter().filter(|name| !name.is_empty());
        if let Some(what) = names.filter_map(bad_name).next() {
            return Err(what);
        }
        let point = OperatingPoint {
            gpcs: count(gpcs, u64::from(u8::MAX))? as u8,
            batch: count(batch, u64::from(u32::MAX))? as u32,
            processes: count(processes, u64::from(u32::MAX))? as u32,
            throughput: figure(throughput)?,
            latency_ms: figure(latency)?,
            memory_mib: match self.memory {
                Some(column) if !cells[column].is_empty() => Some(count(column, 1 << 40)?),
                _ => None,
            },
        };
        point.check()?;
        let (gpu, model) = (gpu.to_string(), cells[model].to_string());
        Ok(Some(TableRow { gpu, model, point, line: number }))
    }
}

/// What is wrong with a name; names are printed, so they have no control characters.
fn bad_name(name: &str) -> Option<String> {
    if name.chars().any(char::is_control) {
        return Some(format!("the name {name:?} has control characters"));
    }
    (name.len() > NAME_LENGTH_MAX).then(|| format!("a name has {} bytes", name.len()))
}
