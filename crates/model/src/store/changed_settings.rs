//! Settings that were changed while their model was served.
//!
//! Those of a registered model are in its record. Those of a model in a repository are kept here,
//! because its files belong to the user, beside what these said: a later change of the files wins.

use redb::TableDefinition;
use serde::{Deserialize, Serialize};

use super::{MODELS, Store, StoreError, database, to_json};
use crate::ModelConfig;

/// Path of a repository's model to the JSON of its [`ChangedSettings`]. The path, because servers
/// with other repositories may use the same registry one after the other.
pub(super) const CHANGED: TableDefinition<&str, &str> = TableDefinition::new("changed_settings");

/// Settings of a repository's model that replace those of its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangedSettings {
    /// What its files said at that time.
    pub files: ModelConfig,
    /// What replaces it.
    pub config: ModelConfig,
}

impl Store {
    /// Changes the settings of a registered version. Durable when it returns; `false` if there is
    /// no such version.
    ///
    /// # Errors
    /// When files or database cannot be written.
    pub fn set_config(
        &self,
        name: &str,
        version: u64,
        config: ModelConfig,
    ) -> Result<bool, StoreError> {
        let _changing = self.lock();
        let Some(old) = self.find(name, Some(version))? else { return Ok(false) };
        let manifest = super::Manifest { config, ..old };
        let json = to_json(&manifest)?;
        self.update(|transaction| {
            let mut models = transaction.open_table(MODELS).map_err(database)?;
            models.insert((name, version), json.as_str()).map_err(database)?;
            Ok(())
        })?;
        // The next start completes the copy if this fails.
        self.files.put_record(&manifest, &json)?;
        Ok(true)
    }

    /// The changed settings of the repository's model at `path`.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn changed_settings(&self, path: &str) -> Result<Option<ChangedSettings>, StoreError> {
        self.query(|transaction| {
            let table = transaction.open_table(CHANGED).map_err(database)?;
            let Some(text) = table.get(path).map_err(database)? else { return Ok(None) };
            let changed = serde_json::from_str(text.value()).map_err(|err| {
                let (name, reason) = (path.to_string(), format!("changed settings: {err}"));
                StoreError::BadRecord { name, version: 0, reason }
            })?;
            Ok(Some(changed))
        })
    }

    /// Sets the changed settings of the repository's model at `path`, or forgets them. Durable when
    /// it returns.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn set_changed_settings(
        &self,
        path: &str,
        changed: Option<&ChangedSettings>,
    ) -> Result<(), StoreError> {
        let _changing = self.lock();
        let json = changed.map(serde_json::to_string).transpose().map_err(|err| {
            let (name, reason) = (path.to_string(), err.to_string());
            StoreError::BadRecord { name, version: 0, reason }
        })?;
        self.update(|transaction| {
            let mut table = transaction.open_table(CHANGED).map_err(database)?;
            match &json {
                Some(json) => drop(table.insert(path, json.as_str()).map_err(database)?),
                None => drop(table.remove(path).map_err(database)?),
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Class;

    #[test]
    fn changed_settings_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let changed = ModelConfig { class: Class::RealTime, priority: 3, ..ModelConfig::default() };
        let of_files = ChangedSettings { files: ModelConfig::default(), config: changed.clone() };
        {
            let store = Store::open(folder.path()).unwrap();
            store.register("m", b"one", ModelConfig::default()).unwrap();
            store.register("m", b"two", ModelConfig::default()).unwrap();
            assert!(store.set_config("m", 1, changed.clone()).unwrap());
            assert!(!store.set_config("m", 3, changed.clone()).unwrap());
            assert!(!store.set_config("n", 1, changed.clone()).unwrap());
            store.set_changed_settings("/models/r", Some(&of_files)).unwrap();
        }
        let store = Store::open(folder.path()).unwrap();
        assert!(store.notes().is_empty(), "{:?}", store.notes());
        assert_eq!(store.find("m", Some(1)).unwrap().unwrap().config, changed);
        // The other version keeps its own, and stays in force.
        let newest = store.find("m", None).unwrap().unwrap();
        assert_eq!((newest.version, newest.config), (2, ModelConfig::default()));
        assert_eq!(store.changed_settings("/models/r").unwrap(), Some(of_files));
        assert_eq!(store.changed_settings("/models/m").unwrap(), None);
        store.set_changed_settings("/models/r", None).unwrap();
        assert_eq!(store.changed_settings("/models/r").unwrap(), None);
    }
}
