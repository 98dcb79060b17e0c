//! Flags of the registry and of the check of models, and the arguments of `atoll registry`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use assembly::model_check::{CheckSettings, ModelChecker};
use assembly::value_parsers;
use base::Bytes;
use clap::{Args, Subcommand, ValueEnum};
use model::store::RegistryLimits;

/// How much the registry may hold.
#[derive(Clone, Debug, Args)]
pub(crate) struct RegistryArgs {
    /// Versions of each registered model that are kept; a registration removes older ones
    #[arg(
        long,
        env = "ATOLL_REGISTRY_KEEP",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) registry_keep: u32,

    #[command(flatten)]
    pub(crate) quotas: RegistryQuotaArgs,
}

/// How much may be registered, also in a cluster.
#[derive(Clone, Debug, Args)]
pub(crate) struct RegistryQuotaArgs {
    /// Max registered models
    #[arg(long, env = "ATOLL_REGISTRY_MAX_MODELS", default_value_t = 10_000)]
    pub(crate) registry_max_models: u32,

    /// Max size of all registered models, such as 500GiB
    #[arg(
        long,
        env = "ATOLL_REGISTRY_MAX_SIZE",
        value_name = "SIZE",
        default_value = "1000GiB",
        value_parser = value_parsers::memory
    )]
    pub(crate) registry_max_size: Bytes,

    /// Max size of all versions of one registered model
    #[arg(
        long,
        env = "ATOLL_REGISTRY_MAX_MODEL_SIZE",
        value_name = "SIZE",
        default_value = "250GiB",
        value_parser = value_parsers::memory
    )]
    pub(crate) registry_max_model_size: Bytes,
}

impl RegistryArgs {
    /// As limits.
    pub(crate) fn limits(&self) -> RegistryLimits {
        RegistryLimits { keep_versions: self.registry_keep as usize, ..self.quotas.limits() }
    }
}

impl RegistryQuotaArgs {
    /// As limits.
    pub(crate) fn limits(&self) -> RegistryLimits {
        RegistryLimits {
            max_names: self.registry_max_models as usize,
            max_bytes: self.registry_max_size.0,
            max_name_bytes: self.registry_max_model_size.0,
            ..RegistryLimits::default()
        }
    }
}

/// Which models are checked before they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckedModels {
    /// None: everyone who may register models is trusted
    Off,
    /// Those that are registered
    Registered,
    /// Also those of model repositories
    All,
}

/// The check of models in a process of its own.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelCheckArgs {
    /// Models that are first compiled and run in a process without rights, where they can do no
    /// harm
    #[arg(long, env = "ATOLL_MODEL_CHECK", value_enum, default_value = "registered")]
    pub(crate) model_check: CheckedModels,

    /// Memory of that process, beside eight times the model's size
    #[arg(
        long,
        env = "ATOLL_MODEL_CHECK_MEMORY",
        value_name = "SIZE",
        default_value = "4GiB",
        value_parser = value_parsers::memory
    )]
    pub(crate) model_check_memory: Bytes,

    /// Seconds that a check may take
    #[arg(
        long,
        env = "ATOLL_MODEL_CHECK_SECS",
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub(crate) model_check_secs: u64,
}

impl ModelCheckArgs {
    /// The checker, for a server on `device`; `None` where models are trusted.
    pub(crate) fn checker(&self, device: &str) -> Option<Arc<ModelChecker>> {
        if self.model_check == CheckedModels::Off {
            return None;
        }
        let settings = CheckSettings {
            memory: self.model_check_memory,
            limit: Duration::from_secs(self.model_check_secs),
            // The check computes on the processor.
            run_must_finish: !device.contains("cuda"),
        };
        Some(Arc::new(ModelChecker::new(settings)))
    }

    /// Whether models of repositories are checked.
    pub(crate) fn of_repositories(&self) -> bool {
        self.model_check == CheckedModels::All
    }
}

/// `atoll registry`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll registry check --data-dir /var/lib/atoll        read every file and compare its hash
  atoll registry repair --data-dir /var/lib/atoll       rebuild a lost or damaged database
  atoll registry export /backup/models                  copy all models to a new folder
  atoll registry import /backup/models                  add the models of such a folder
  atoll registry roll-back digits                       serve the version before
  atoll registry quarantine                             models that ended the server
  atoll registry release digits:3                       load such a model again

All but quarantine and release need the server to be stopped; DELETE /v2/atoll/models/NAME and
POST /v2/atoll/models/NAME/rollback work while it runs.")]
pub(crate) struct RegistryCommandArgs {
    #[command(subcommand)]
    pub(crate) action: RegistryAction,

    /// Folder of the registry [default: atoll in the user's data folder]
    #[arg(long, env = "ATOLL_DATA_DIR", global = true)]
    pub(crate) data_dir: Option<PathBuf>,

    /// Print as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What `atoll registry` does.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum RegistryAction {
    /// Read every file and compare it with its record
    Check,
    /// Rebuild a lost or damaged database from the files; removes nothing
    Repair,
    /// Copy models to an empty folder, which is a model repository, too
    Export {
        /// The folder
        to: PathBuf,

        /// Only the model of this name
        #[arg(long)]
        name: Option<String>,
    },
    /// Add the models of an export, or of any model repository
    Import {
        /// The folder
        from: PathBuf,
    },
    /// Put an older version in force: the given one, or the one before
    RollBack {
        /// NAME or NAME:VERSION
        model: String,
    },
    /// Delete a registered model, or one version of it
    Delete {
        /// NAME or NAME:VERSION
        model: String,
    },
    /// List models that are not loaded because they ended the server
    Quarantine,
    /// Let a quarantined model be loaded again
    Release {
        /// NAME:VERSION
        model: String,
    },
}
