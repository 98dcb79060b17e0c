//! Marks of models that are being loaded or measured, and the quarantine.
//!
//! A mark is on disk before work starts that may end the process, and is removed after it. One that
//! a start finds says which model the process was busy with when it ended. A model found this way
//! too often, or one that also ends the process that checks it, is quarantined: it is not loaded
//! again until it is released.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{key, parse_key};
use crate::durable;

/// What is done with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadStage {
    /// It is compiled and loaded.
    Load,
    /// Its batch times are measured.
    Measure,
}

impl LoadStage {
    const ALL: [LoadStage; 2] = [LoadStage::Load, LoadStage::Measure];

    /// Its name in files and messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            LoadStage::Load => "load",
            LoadStage::Measure => "measure",
        }
    }
}

/// A model, as marks name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedModel {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// Identifies its content: another content under the same name is another model.
    pub content: String,
}

/// A model that the process was busy with when it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// What was done with it.
    pub stage: LoadStage,
    /// Processes that ended so, one after the other.
    pub deaths: u32,
}

/// A model that is not loaded until it is released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    /// The model.
    pub model: MarkedModel,
    /// Why.
    pub reason: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Mark {
    model: MarkedModel,
    /// Whether the work goes on; else the mark only counts.
    running: bool,
    deaths: u32,
}

/// The marks in a data folder.
#[derive(Clone, Debug)]
pub struct LoadMarkers {
    marks: PathBuf,
    quarantine: PathBuf,
}

/// Removes the mark of finished work when it is dropped.
#[derive(Debug)]
pub struct LoadMarker {
    path: PathBuf,
}

impl Drop for LoadMarker {
    fn drop(&mut self) {
        // A panic is caught where work is started, and is an error of the model, not of the
        // process. What cannot be removed is one death too many at the next start.
        let _ = durable::remove(&self.path);
    }
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        durable::create_folder(folder)?;
    }
    durable::write(path, &serde_json::to_vec(value).map_err(io::Error::other)?)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = match fs::read_dir(folder) {
        Ok(entries) => {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?
        }
        Err(err) if err.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(err) => return Err(err),
    };
    paths.sort_unstable();
    Ok(paths)
}

impl LoadMarkers {
    /// The marks in `data_dir`; needs no open registry.
    pub fn in_data_dir(data_dir: &Path) -> LoadMarkers {
        let root = data_dir.join("registry");
        LoadMarkers { marks: root.join("loading"), quarantine: root.join("quarantine") }
    }

    fn mark_path(&self, model: &MarkedModel, stage: LoadStage) -> PathBuf {
        self.marks.join(format!("{}.{}", key(&model.name, model.version), stage.as_str()))
    }

    /// Marks that work starts; on disk when it returns. The mark is removed with the result.
    ///
    /// # Errors
    /// When the mark cannot be written.
    pub fn begin(&self, model: &MarkedModel, stage: LoadStage) -> io::Result<LoadMarker> {
        let path = self.mark_path(model, stage);
        let before: Option<Mark> = read(&path).filter(|mark: &Mark| mark.model == *model);
        let deaths = before.map_or(0, |mark| mark.deaths);
        write(&path, &Mark { model: model.clone(), running: true, deaths })?;
        Ok(LoadMarker { path })
    }

    /// Reads the marks that an ended process left and counts its death; returns the models it was
    /// busy with. To be called once at the start.
    ///
    /// # Errors
    /// When marks cannot be read or written.
    pub fn count_deaths(&self) -> io::Result<Vec<(MarkedModel, Suspect)>> {
        let mut found = Vec::new();
        for path in files(&self.marks)? {
            let stage = LoadStage::ALL
                .into_iter()
                .find(|stage| path.extension().is_some_and(|ending| ending == stage.as_str()));
            let mark: Option<Mark> = read(&path);
            let (Some(stage), Some(mut mark)) = (stage, mark) else { continue };
            if mark.running {
                mark.running = false;
                mark.deaths = mark.deaths.saturating_add(1);
                write(&path, &mark)?;
                found.push((mark.model, Suspect { stage, deaths: mark.deaths }));
            }
        }
        Ok(found)
    }

    /// Whether earlier processes ended while they were busy with `model`.
    pub fn suspect(&self, model: &MarkedModel) -> Option<Suspect> {
        let of = |stage: LoadStage| {
            let mark: Mark = read(&self.mark_path(model, stage))?;
            let counts = mark.model == *model && mark.deaths > 0;
            counts.then_some(Suspect { stage, deaths: mark.deaths })
        };
        LoadStage::ALL.into_iter().filter_map(of).max_by_key(|suspect| suspect.deaths)
    }

    /// Forgets the marks of work that goes on: the process ends because it was told to.
    ///
    /// # Errors
    /// When a mark cannot be removed.
    pub fn end_all(&self) -> io::Result<()> {
        for path in files(&self.marks)? {
            if read::<Mark>(&path).is_some_and(|mark| mark.running) {
                durable::remove(&path)?;
            }
        }
        Ok(())
    }

    fn quarantine_path(&self, name: &str, version: u64) -> PathBuf {
        self.quarantine.join(format!("{}.json", key(name, version)))
    }

    /// Quarantines `model`.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn quarantine(&self, model: &MarkedModel, reason: &str) -> io::Result<()> {
        let path = self.quarantine_path(&model.name, model.version);
        write(&path, &Quarantined { model: model.clone(), reason: reason.to_string() })?;
        self.forget(&model.name, model.version)
    }

    /// Why `model` is quarantined, if it is.
    pub fn quarantined(&self, model: &MarkedModel) -> Option<String> {
        let found: Quarantined = read(&self.quarantine_path(&model.name, model.version))?;
        (found.model == *model).then_some(found.reason)
    }

    /// All quarantined models.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn list(&self) -> io::Result<Vec<Quarantined>> {
        let named = |path: &PathBuf| {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            stem.and_then(parse_key).is_some()
        };
        let paths = files(&self.quarantine)?.into_iter().filter(named);
        Ok(paths.filter_map(|path| read(&path)).collect())
    }

    /// Releases a model from the quarantine, with what was counted; `false` if it is not there.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn release(&self, name: &str, version: u64) -> io::Result<bool> {
        self.forget(name, version)?;
        durable::remove(&self.quarantine_path(name, version))
    }

    fn forget(&self, name: &str, version: u64) -> io::Result<()> {
        for stage in LoadStage::ALL {
            let mark = self.marks.join(format!("{}.{}", key(name, version), stage.as_str()));
            durable::remove(&mark)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(content: &str) -> MarkedModel {
        MarkedModel { name: "m.v2".to_string(), version: 3, content: content.to_string() }
    }

    #[test]
    fn deaths_are_counted_by_stage_until_the_work_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let markers = LoadMarkers::in_data_dir(folder.path());
        assert_eq!(markers.count_deaths().unwrap(), []);
        for deaths in 1..=3 {
            drop(markers.begin(&model("a"), LoadStage::Load).unwrap());
            std::mem::forget(markers.begin(&model("a"), LoadStage::Measure).unwrap());
            let suspect = Suspect { stage: LoadStage::Measure, deaths };
            assert_eq!(markers.count_deaths().unwrap(), [(model("a"), suspect.clone())]);
            assert_eq!(markers.count_deaths().unwrap(), []);
            assert_eq!(markers.suspect(&model("a")), Some(suspect));
        }
        assert_eq!(markers.suspect(&model("another content")), None);
        drop(markers.begin(&model("a"), LoadStage::Measure).unwrap());
        assert_eq!(markers.suspect(&model("a")), None);
    }

    #[test]
    fn an_ordered_end_is_no_death() {
        let folder = tempfile::tempdir().unwrap();
        let markers = LoadMarkers::in_data_dir(folder.path());
        std::mem::forget(markers.begin(&model("a"), LoadStage::Load).unwrap());
        markers.end_all().unwrap();
        assert_eq!(markers.count_deaths().unwrap(), []);
    }

    #[test]
    fn quarantined_models_are_listed_and_released() {
        let folder = tempfile::tempdir().unwrap();
        let markers = LoadMarkers::in_data_dir(folder.path());
        std::mem::forget(markers.begin(&model("a"), LoadStage::Load).unwrap());
        markers.count_deaths().unwrap();
        markers.quarantine(&model("a"), "it ended the process").unwrap();
        assert_eq!(markers.suspect(&model("a")), None);
        assert_eq!(markers.quarantined(&model("a")).unwrap(), "it ended the process");
        assert_eq!(markers.quarantined(&model("b")), None);
        assert_eq!(markers.list().unwrap().len(), 1);
        assert!(markers.release("m.v2", 3).unwrap());
        assert!(!markers.release("m.v2", 3).unwrap());
        assert_eq!(markers.list().unwrap(), []);
    }
}
