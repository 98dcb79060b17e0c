//! Decides whether a model may be loaded: not if it ended the process before, and not unchecked if
//! it may have.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use graph::ExternalData;
use model::ModelConfig;
use model::store::{LoadMarker, LoadMarkers, LoadStage, MarkedModel, Suspect};
use server::LoadError;

use crate::model_check::ModelChecker;

/// Processes that ended while they were busy with a model before it is quarantined, even though it
/// passes its check.
const DEATHS_MAX: u32 = 2;

/// Checks and marks of a loader.
pub(crate) struct LoadChecks {
    /// Checks models in a process of their own; `None` where models are trusted.
    pub(crate) checker: Option<Arc<ModelChecker>>,
    /// Whether models of repositories are checked, too.
    pub(crate) repositories: bool,
    markers: Option<LoadMarkers>,
    /// Work that starts now is cut off by the end of the process, which is no model's fault.
    stopping: AtomicBool,
}

impl LoadChecks {
    /// With `markers`, where there is a folder for them. Names the models that the last process was
    /// busy with when it ended.
    pub(crate) fn new(
        markers: Option<LoadMarkers>,
        checker: Option<Arc<ModelChecker>>,
        repositories: bool,
    ) -> LoadChecks {
        for (model, suspect) in markers.iter().flat_map(|m| m.count_deaths().unwrap_or_default()) {
            tracing::warn!(
                model = model.name,
                version = model.version,
                stage = suspect.stage.as_str(),
                deaths = suspect.deaths,
                "the last process ended while it was busy with this model"
            );
        }
        for quarantined in markers.iter().flat_map(|m| m.list().unwrap_or_default()) {
            let (model, reason) = (quarantined.model, quarantined.reason);
            tracing::warn!(model = model.name, version = model.version, reason, "quarantined");
        }
        LoadChecks { checker, repositories, markers, stopping: AtomicBool::new(false) }
    }

    /// Ends checks, and forgets marks of work that goes on.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        if let Some(checker) = &self.checker {
            checker.stop();
        }
        if let Some(Err(err)) = self.markers.as_ref().map(LoadMarkers::end_all) {
            tracing::warn!("marks of models that are being loaded cannot be removed: {err}");
        }
    }

    /// Why `model` is quarantined, if it is.
    pub(crate) fn quarantined(&self, model: &MarkedModel) -> Option<String> {
        self.markers.as_ref().and_then(|markers| markers.quarantined(model))
    }

    /// Marks work with `model`. Without a disk to write to there is no mark.
    pub(crate) fn begin(&self, model: &MarkedModel, stage: LoadStage) -> Option<LoadMarker> {
        let markers = self.markers.as_ref().filter(|_| !self.stopping.load(Ordering::SeqCst))?;
        match markers.begin(model, stage) {
            Ok(mark) => Some(mark),
            Err(err) => {
                tracing::warn!(model = model.name, "not marked as being loaded: {err}");
                None
            }
        }
    }

    /// Decides whether `model` may be loaded, and marks that it is. Checks it first if `check` asks
    /// for it, or if the last process ended while it was busy with it.
    pub(crate) fn admit(
        &self,
        model: &MarkedModel,
        config: &ModelConfig,
        check: bool,
        read: impl Fn() -> Result<Vec<u8>, LoadError>,
        cancelled: &AtomicBool,
    ) -> Result<Option<LoadMarker>, LoadError> {
        if let Some(reason) = self.quarantined(model) {
            return Err(refusal(model, &reason));
        }
        let suspect = self.markers.as_ref().and_then(|markers| markers.suspect(model));
        let result = match (&suspect, &self.checker) {
            (Some(suspect), None) => Err(LoadError::Invalid(ended(suspect))),
            (Some(suspect), _) if suspect.deaths >= DEATHS_MAX => {
                Err(LoadError::Invalid(ended(suspect)))
            }
            (None, _) if !check => Ok(()),
            (_, None) => Ok(()),
            (_, Some(checker)) => checker.check(&read()?, config, cancelled),
        };
        match result {
            // The process without rights cannot read them. Only repositories have such models.
            Err(LoadError::Invalid(why)) if why.contains(ExternalData::NO_FOLDER) => {
                tracing::warn!(model = model.name, "not checked: its weights are in other files");
                Ok(self.begin(model, LoadStage::Load))
            }
            Ok(()) => Ok(self.begin(model, LoadStage::Load)),
            // Only what is held against the model itself.
            Err(LoadError::Invalid(why)) if suspect.is_some() => Err(self.quarantine(model, &why)),
            Err(other) => Err(other),
        }
    }

    fn quarantine(&self, model: &MarkedModel, reason: &str) -> LoadError {
        if let Some(Err(err)) = self.markers.as_ref().map(|m| m.quarantine(model, reason)) {
            tracing::warn!(model = model.name, "cannot be quarantined: {err}");
        }
        refusal(model, reason)
    }
}

fn ended(suspect: &Suspect) -> String {
    let doing = match suspect.stage {
        LoadStage::Load => "loaded",
        LoadStage::Measure => "measured",
    };
    match suspect.deaths {
        1 => format!("the process ended while it {doing} the model"),
        deaths => format!("{deaths} processes in a row ended while they {doing} the model"),
    }
}

fn refusal(model: &MarkedModel, reason: &str) -> LoadError {
    LoadError::Invalid(format!(
        "it is quarantined: {reason}; 'atoll registry release {}:{}' with the --data-dir of the \
         server or backend ends that",
        model.name, model.version
    ))
}

#[cfg(test)]
mod tests {
    use model::store::Store;

    use super::*;

    /// A load that nobody cancels.
    static GO: AtomicBool = AtomicBool::new(false);

    fn model() -> MarkedModel {
        MarkedModel { name: "m".to_string(), version: 1, content: "c".to_string() }
    }

    fn no_file() -> Result<Vec<u8>, LoadError> {
        Err(LoadError::Internal("it must not be read".to_string()))
    }

    #[test]
    fn a_model_that_ended_the_process_is_quarantined_until_it_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let config = ModelConfig::default();
        let checks = LoadChecks::new(Some(store.load_markers()), None, false);
        let mark = checks.admit(&model(), &config, false, no_file, &GO).unwrap();
        assert!(mark.is_some());
        // The process ends here.
        std::mem::forget(mark);
        let checks = LoadChecks::new(Some(store.load_markers()), None, false);
        for _ in 0..2 {
            let refused = checks.admit(&model(), &config, false, no_file, &GO).unwrap_err();
            assert!(refused.to_string().contains("atoll registry release m:1"), "{refused}");
        }
        let other = MarkedModel { content: "another file".to_string(), ..model() };
        assert!(checks.admit(&other, &config, false, no_file, &GO).is_ok());
        let checks = LoadChecks::new(Some(store.load_markers()), None, false);
        assert!(checks.quarantined(&model()).is_some());
        assert!(store.load_markers().release("m", 1).unwrap());
        assert!(checks.admit(&model(), &config, false, no_file, &GO).is_ok());
    }

    #[test]
    fn an_ordered_stop_blames_no_model() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let checks = LoadChecks::new(Some(store.load_markers()), None, false);
        let mark = checks.admit(&model(), &ModelConfig::default(), false, no_file, &GO).unwrap();
        checks.stop();
        std::mem::forget(mark);
        let checks = LoadChecks::new(Some(store.load_markers()), None, false);
        assert!(checks.admit(&model(), &ModelConfig::default(), false, no_file, &GO).is_ok());
    }
}
