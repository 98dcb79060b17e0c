//! Settings of a model that change while it is served.

use std::sync::Arc;

use api::error::ApiResult;
use api::{ApiError, ModelRef};
use model::config::{ModelConfig, SettingsChange};
use serde_json::{Value, json};

use super::loader::KeptSettings;
use super::prefix_batching::concerns_prefix;
use super::served_model::ServedModel;
use super::{Inner, blocking};

/// The settings of a model as its details and changes of them show them: without what belongs to
/// the model's file.
pub(super) fn settings_json(config: &ModelConfig) -> Value {
    let mut settings = serde_json::to_value(config).unwrap_or_default();
    if let Some(settings) = settings.as_object_mut() {
        settings.remove("labels");
        settings.remove("preprocessing");
    }
    settings
}

/// The settings of a model that is loaded: those of its file, or `changed` with what belongs to the
/// file.
pub(super) fn of_file(file: ModelConfig, changed: Option<ModelConfig>) -> ModelConfig {
    match changed {
        Some(changed) => {
            let ModelConfig { labels, preprocessing, .. } = file;
            ModelConfig { labels, preprocessing, ..changed }
        }
        None => file,
    }
}

impl Inner {
    /// Changes the settings of a model without losing a request: those in flight end by the old
    /// ones, those that follow have the new ones.
    pub(super) async fn change_settings(
        self: Arc<Inner>,
        name: String,
        version: Option<u64>,
        change: SettingsChange,
    ) -> ApiResult<Value> {
        let lock = self.models.lock(&name).await;
        let served = self.models.find(ModelRef { name: &name, version })?;
        let version = served.version;
        let (loader, model) = (self.loader.clone(), name.clone());
        let base = blocking(move || loader.settings(&model, version)).await?;
        let old = served.config.clone();
        let config = change.apply(&old, &base).map_err(ApiError::invalid)?;
        self.check_pinned(&served, &config)?;
        let kept = self.keep(&name, version, &config).await?;
        let leaves_prefix = served.is_split() && concerns_prefix(&old, &config);
        if leaves_prefix {
            // Only whole it can have settings of its own.
            drop((served, lock));
            if let Err(error) = self.clone().load_with(name.clone(), config.clone()).await {
                self.keep(&name, version, &old).await?;
                return Err(error);
            }
        } else {
            self.apply(&served, &config);
            drop((served, lock));
        }
        self.follow(&name, &old, &config);
        tracing::info!(model = name, settings = %settings_json(&config), "settings changed");
        Ok(changed_json(&name, version, &config, &kept))
    }

    async fn keep(
        &self,
        name: &str,
        version: u64,
        config: &ModelConfig,
    ) -> ApiResult<KeptSettings> {
        let (loader, name, config) = (self.loader.clone(), name.to_string(), config.clone());
        blocking(move || loader.keep_settings(&name, version, &config)).await
    }

    fn check_pinned(&self, served: &ServedModel, config: &ModelConfig) -> ApiResult<()> {
        let pins = config.pinned && !served.config.pinned;
        let keys = [Some(served.key), served.split.as_ref().map(|split| split.prefix.key)];
        match pins && !keys.into_iter().flatten().all(|key| self.device_group.can_pin(key)) {
            false => Ok(()),
            true => Err(ApiError::invalid(format!(
                "'pinned': the weights of '{}' do not fit beside those that are pinned already",
                served.name
            ))),
        }
    }

    fn apply(&self, served: &Arc<ServedModel>, config: &ModelConfig) {
        let changed = served.with_settings(config.clone());
        // Held under the model's lock: nothing else has replaced it.
        self.models.replace(served, changed);
    }

    /// What a load does after it put a model in service, as far as the change makes it necessary.
    fn follow(self: &Arc<Inner>, name: &str, old: &ModelConfig, new: &ModelConfig) {
        let Ok(served) = self.models.find(ModelRef { name, version: None }) else { return };
        if new.slo_ms.is_some() && self.device_group.profile_of(served.key).is_empty() {
            self.profile(name.to_string());
        }
        if old.batching != new.batching {
            self.check_padding(name.to_string());
        }
        if !served.is_split() && concerns_prefix(old, new) {
            let inner = self.clone();
            tokio::spawn(async move {
                inner.prefix_batching.join(&inner.device_group, &inner.models, served).await;
            });
        }
    }
}

/// The reply to a change.
fn changed_json(name: &str, version: u64, config: &ModelConfig, kept: &KeptSettings) -> Value {
    let (kept, note) = match kept {
        KeptSettings::InRegistry => ("registry", "kept with the registered version".to_string()),
        KeptSettings::InDataFolder => (
            "data_folder",
            "kept in the data folder until the settings in the model's repository change; the \
             files of the repository stay as they are"
                .to_string(),
        ),
        KeptSettings::UntilLoad(why) => {
            ("until_load", format!("lost when the model is loaded again: {why}"))
        }
    };
    json!({
        "name": name,
        "version": version.to_string(),
        "settings": settings_json(config),
        "kept": kept,
        "note": note,
    })
}
