//! The changes applied to the machine, on disk after every change, so that they can always be
//! undone.

use std::path::{Path, PathBuf};

use assembly::Failure;
use planner::apply::Change;
use serde::{Deserialize, Serialize};

/// An applied change, and what undoing it needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AppliedChange {
    pub(crate) change: Change,
    /// The machine was in this state before.
    #[serde(default)]
    pub(crate) untouched: bool,
    /// Number of the GPU instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) instance: Option<u32>,
    /// Identifier of the GPU or MIG device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
    /// The server listens with TLS.
    #[serde(default)]
    pub(crate) tls: bool,
}

impl AppliedChange {
    pub(crate) fn new(change: Change) -> AppliedChange {
        AppliedChange {
            change,
            untouched: false,
            instance: None,
            uuid: None,
            pid: None,
            port: None,
            tls: false,
        }
    }
}

/// The list of applied changes.
pub(crate) struct Journal {
    path: PathBuf,
    done: Vec<AppliedChange>,
}

impl Journal {
    /// A new journal; refused if there is one, because its changes are still in effect.
    pub(crate) fn create(state: &Path) -> Result<Journal, Failure> {
        let named = |error| Failure::failed(format!("{}: {error}", state.display()));
        std::fs::create_dir_all(state).map_err(named)?;
        let path = state.join("applied.json");
        if path.exists() {
            return Err(Failure::failed(format!(
                "{} shows that a plan is applied; use --replace, or --undo first",
                path.display()
            )));
        }
        let journal = Journal { path, done: Vec::new() };
        journal.write()?;
        Ok(journal)
    }

    /// The existing journal.
    pub(crate) fn open(state: &Path) -> Result<Journal, Failure> {
        let path = state.join("applied.json");
        if !path.exists() {
            return Err(Failure::failed(format!(
                "no plan is applied: {} is not there",
                path.display()
            )));
        }
        let named =
            |error: &dyn std::fmt::Display| Failure::failed(format!("{}: {error}", path.display()));
        let text = std::fs::read_to_string(&path).map_err(|error| named(&error))?;
        let done = serde_json::from_str(&text).map_err(|error| named(&error))?;
        Ok(Journal { path, done })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn done(&self) -> &[AppliedChange] {
        &self.done
    }

    pub(crate) fn last(&self) -> Option<&AppliedChange> {
        self.done.last()
    }

    /// Logs the change that comes next.
    pub(crate) fn begin(&self, change: &Change) -> Result<(), Failure> {
        tracing::info!("{}", line(change));
        Ok(())
    }

    pub(crate) fn finish(&mut self, done: AppliedChange) -> Result<(), Failure> {
        self.done.push(done);
        self.write()
    }

    /// Leaves out the changes that `is_gone` names; the file follows with the next change.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(&AppliedChange) -> bool) {
        self.done.retain(|done| !is_gone(done));
    }

    pub(crate) fn forget_last(&mut self) -> Result<(), Failure> {
        self.done.pop();
        self.write()
    }

    /// Deletes the journal when nothing is in effect any more.
    pub(crate) fn remove(self) -> Result<(), Failure> {
        std::fs::remove_file(&self.path)
            .map_err(|error| Failure::failed(format!("{}: {error}", self.path.display())))
    }

    /// Replaces the file atomically.
    pub(crate) fn write(&self) -> Result<(), Failure> {
        let named = |error| Failure::failed(format!("{}: {error}", self.path.display()));
        let text = serde_json::to_string_pretty(&self.done).map_err(Failure::failed)?;
        let fresh = self.path.with_extension("json.new");
        std::fs::write(&fresh, text).map_err(named)?;
        std::fs::rename(&fresh, &self.path).map_err(named)
    }
}

/// A change as text.
pub(crate) fn line(change: &Change) -> String {
    match change {
        Change::EnableMig { gpu } => format!("MIG on, gpu {gpu}"),
        Change::CreateSlice { place, profile_id, start } => {
            format!("slice {place}: profile {profile_id} at {start}")
        }
        Change::StartDaemon { place } => format!("MPS daemon of {place}"),
        Change::StartServer(spec) => {
            format!("server {} of {} on {}", spec.process, spec.services.join(", "), spec.place)
        }
    }
}
