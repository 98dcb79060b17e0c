//! The command line of `atoll cluster`.

use std::path::PathBuf;

use assembly::{DeviceArgs, Failure, value_parsers};
use base::Bytes;
use clap::{Args, Subcommand};
use cluster::scaling::pool_spec::PoolSpec;
use cluster::scheduler::packing::Packer;
use cluster::store::etcd::EtcdAccess;
use cluster::tls::Secret;

use crate::args::ListenArgs;
use crate::registry_args::RegistryQuotaArgs;
use crate::security_args::{BackendTlsArgs, Ports, SecurityArgs, client_tls};
use crate::server_client::ServerClientArgs;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster scheduler --store etcd://etcd:2379
  atoll cluster backend   --store etcd://etcd:2379 --model-repository models --device cuda:0
  atoll cluster frontend  --store etcd://etcd:2379 --host 0.0.0.0 --insecure
  atoll cluster status    --store etcd://etcd:2379
  atoll cluster canary digits --share 5%               a newer version beside the one in force
  atoll serve --cluster --model-repository models      all of it in one process

docs/book/src/clusters.md describes how the roles work together.")]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    pub(crate) role: Role,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Role {
    /// Plan: take part in the leader election, and while leading assign models to backends
    Scheduler(Box<SchedulerArgs>),
    /// Accept requests and route them: REST, gRPC and metrics as of a single server
    Frontend(Box<FrontendArgs>),
    /// Serve the models that the plan assigns to this machine's device
    Backend(Box<BackendArgs>),
    /// Print plan, backends, routes, load and misses
    Status(StatusArgs),
    /// Print the same again and again
    Top(TopArgs),
    /// Put an older version of a model in force, after a backend has loaded it
    Rollback(RollbackArgs),
    /// Serve a version beside the one in force: start, show, promote or abort a canary
    Canary(CanaryArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CanaryAction {
    /// Print the canary, or the last one
    Show,
    /// Put it in force
    Promote,
    /// Give all requests to the version in force
    Abort,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  curl -F name=digits -F model=@new.onnx -F canary=5% -F promote_after=10m \\
      http://frontend:8000/register                        register a version as canary
  atoll cluster canary digits                              how it does
  atoll cluster canary digits --share 25                   give it a larger share
  atoll cluster canary digits promote                      put it in force
  atoll cluster canary digits abort                        end it
  atoll cluster canary digits --version 3 --share 1% --promote-after 1h --max-errors 0.5% \\
      --max-slowdown 10% --url http://frontend:8000        a version that is registered already

The leader compares the canary with the version in force. It rolls the canary back when it clearly
fails more or is slower, and promotes it after --promote-after when it is not.")]
pub(crate) struct CanaryArgs {
    /// The model
    pub(crate) model: String,

    /// What to do; with --share, start a canary or change the running one
    #[arg(value_enum, conflicts_with = "share")]
    pub(crate) action: Option<CanaryAction>,

    /// Share of the requests in percent, 0 to 90; with 0, only requests that ask for it get it
    #[arg(long, value_name = "PERCENT", value_parser = api::canary::parse_percent)]
    pub(crate) share: Option<f64>,

    /// The version [default: the running canary, or the newest after the one in force]
    #[arg(long, value_name = "VERSION", requires = "share")]
    pub(crate) version: Option<u64>,

    /// Time after which it is promoted if it is good [default: an operator promotes it]
    #[arg(
        long,
        value_name = "TIME",
        requires = "share",
        value_parser = api::canary::parse_time_ms
    )]
    pub(crate) promote_after: Option<u64>,

    /// Share of its requests that may fail or be late, beyond those of the version in force
    #[arg(
        long,
        value_name = "PERCENT",
        requires = "share",
        default_value = "1%",
        value_parser = api::canary::parse_percent
    )]
    pub(crate) max_errors: f64,

    /// By how much it may be slower, by median and by 95th percentile
    #[arg(
        long,
        value_name = "PERCENT",
        requires = "share",
        default_value = "20%",
        value_parser = api::canary::parse_percent
    )]
    pub(crate) max_slowdown: f64,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) server: ServerClientArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster rollback digits                    to the version before the one in force
  atoll cluster rollback digits --to 3 --url http://frontend:8000")]
pub(crate) struct RollbackArgs {
    /// The model
    pub(crate) model: String,

    /// The version [default: the newest before the one in force]
    #[arg(long, value_name = "VERSION")]
    pub(crate) to: Option<u64>,

    #[command(flatten)]
    pub(crate) server: ServerClientArgs,
}

/// The store of the cluster.
#[derive(Clone, Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store: etcd://HOST:PORT[,HOST:PORT...]
    #[arg(long, env = "ATOLL_STORE")]
    pub(crate) store: String,

    /// Name of the cluster; several can share a store
    #[arg(long, env = "ATOLL_CLUSTER", default_value = "default")]
    pub(crate) cluster: String,

    /// Name of this process in the cluster [default: host name and process id]
    #[arg(long, env = "ATOLL_NAME")]
    pub(crate) name: Option<String>,

    /// Lease in milliseconds: a process that is silent for longer counts as lost
    #[arg(
        long,
        env = "ATOLL_LEASE_MS",
        default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(2000..=600_000)
    )]
    pub(crate) lease_ms: u64,

    /// Authorities (PEM) that sign etcd's certificate: connect to it over TLS
    #[arg(long, env = "ATOLL_ETCD_CA", value_name = "FILE", help_heading = "Security")]
    etcd_ca: Option<PathBuf>,

    /// Certificate (PEM) of this process for etcd
    #[arg(
        long,
        env = "ATOLL_ETCD_CERT",
        value_name = "FILE",
        requires = "etcd_key",
        requires = "etcd_ca",
        help_heading = "Security"
    )]
    etcd_cert: Option<PathBuf>,

    /// Private key (PEM) of that certificate
    #[arg(
        long,
        env = "ATOLL_ETCD_KEY",
        value_name = "FILE",
        requires = "etcd_cert",
        help_heading = "Security"
    )]
    etcd_key: Option<PathBuf>,

    /// User of etcd; the password comes from --etcd-password-file or ATOLL_ETCD_PASSWORD
    #[arg(long, env = "ATOLL_ETCD_USER", help_heading = "Security")]
    etcd_user: Option<String>,

    /// File with the password of that user
    #[arg(
        long,
        env = "ATOLL_ETCD_PASSWORD_FILE",
        value_name = "FILE",
        requires = "etcd_user",
        help_heading = "Security"
    )]
    etcd_password_file: Option<PathBuf>,
}

impl StoreArgs {
    /// How to connect to etcd. A password on the command line could be read by every user.
    pub(crate) fn access(&self) -> Result<EtcdAccess, Failure> {
        let (certificate, key) = (self.etcd_cert.as_ref(), self.etcd_key.as_ref());
        let tls = client_tls(self.etcd_ca.as_ref(), certificate, key, None)?;
        let Some(user) = &self.etcd_user else { return Ok(EtcdAccess { tls, user: None }) };
        let password = match &self.etcd_password_file {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?,
            None => std::env::var("ATOLL_ETCD_PASSWORD").map_err(|_| {
                Failure::usage("--etcd-user needs --etcd-password-file or ATOLL_ETCD_PASSWORD")
            })?,
        };
        Ok(EtcdAccess { tls, user: Some((user.clone(), Secret::new(&password))) })
    }
}

/// How plans are made.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlanningArgs {
    /// Milliseconds of a plan epoch
    #[arg(
        long,
        env = "ATOLL_EPOCH_MS",
        default_value_t = 30_000,
        value_parser = clap::value_parser!(u64).range(100..)
    )]
    pub(crate) epoch_ms: u64,

    /// Min milliseconds between two plans because of load
    #[arg(long, env = "ATOLL_SPACING_MS", default_value_t = 10_000)]
    pub(crate) spacing_ms: u64,

    /// Capacity beyond the observed load: 0.2 is 20 % more
    #[arg(long, env = "ATOLL_HEADROOM", default_value_t = 0.2)]
    pub(crate) headroom: f64,

    /// Min backends that hold a model, if there are enough
    #[arg(
        long,
        env = "ATOLL_COPIES",
        default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    pub(crate) copies: u16,

    /// Algorithm that packs models onto backends: squishy or certified
    #[arg(long, env = "ATOLL_PACKER", default_value = "squishy")]
    pub(crate) packer: Packer,

    /// Use as few backends as possible, so that others can be released
    #[arg(long, env = "ATOLL_COMPACT")]
    pub(crate) compact: bool,

    /// Do not form backend pools: backends with a single model do not share its requests in turn
    #[arg(long, alias = "apart", env = "ATOLL_NO_BACKEND_POOLS")]
    pub(crate) no_backend_pools: bool,

    /// SLO in milliseconds of models without one in their settings
    #[arg(long, env = "ATOLL_SLO_MS", default_value_t = 1000.0)]
    pub(crate) slo_ms: f64,
}

/// How many backends there are.
#[derive(Clone, Debug, Args)]
pub(crate) struct ScalingArgs {
    /// Scale backends through the Kubernetes API while leading: deployment/NAME or
    /// statefulset/NAME, whose pods' names are the backends'. Given several times, or separated
    /// by ';', the cheapest replicas over all are requested: each with kind=K (as --device-kind
    /// of its backends) and where they differ min=N, max=N, price=P, cooldown=SECS,
    /// zero-after=SECS
    #[arg(
        long,
        env = "ATOLL_KUBERNETES_SCALE",
        value_name = "KIND/NAME[,KEY=VALUE...]",
        value_delimiter = ';'
    )]
    pub(crate) kubernetes_scale: Vec<PoolSpec>,

    /// Their namespace [default: the service account's, or the kubeconfig's]
    #[arg(long, env = "ATOLL_KUBERNETES_NAMESPACE", requires = "kubernetes_scale")]
    pub(crate) kubernetes_namespace: Option<String>,

    /// Min replicas of a workload; with 0 it is scaled to zero when no requests come
    #[arg(
        long,
        env = "ATOLL_REPLICAS_MIN",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(0..=100_000)
    )]
    pub(crate) replicas_min: u32,

    /// Max replicas of a workload
    #[arg(
        long,
        env = "ATOLL_REPLICAS_MAX",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    pub(crate) replicas_max: u32,

    /// Max replicas that one change adds
    #[arg(
        long,
        env = "ATOLL_SCALE_UP_STEP",
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) scale_up_step: u32,

    /// Max replicas that one change removes
    #[arg(
        long,
        env = "ATOLL_SCALE_DOWN_STEP",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) scale_down_step: u32,

    /// Seconds for which a replica must not be needed before it is removed
    #[arg(long, env = "ATOLL_SCALE_DOWN_AFTER_SECS", default_value_t = 300)]
    pub(crate) scale_down_after_secs: u64,

    /// Min seconds between two changes
    #[arg(long, env = "ATOLL_SCALE_COOLDOWN_SECS", default_value_t = 30)]
    pub(crate) scale_cooldown_secs: u64,

    /// Seconds without any request after which the last replicas are removed, where the minimum
    /// is 0
    #[arg(long, env = "ATOLL_SCALE_TO_ZERO_AFTER_SECS", default_value_t = 300)]
    pub(crate) scale_to_zero_after_secs: u64,

    /// Seconds in which none of the missing replicas joins, after which another workload is used
    #[arg(
        long,
        env = "ATOLL_SCALE_PENDING_SECS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) scale_pending_secs: u64,
}

/// The files of models.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelStoreArgs {
    /// Model store: a folder that all machines mount, or s3://BUCKET/PREFIX. POST /register at a
    /// frontend writes to it. S3 is configured by AWS's environment variables: AWS_ACCESS_KEY_ID,
    /// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL
    #[arg(long, env = "ATOLL_MODEL_STORE", value_name = "FOLDER|URL")]
    pub(crate) model_store: Option<String>,

    /// Folder for copies of files from S3; may be cleared at any time [default: atoll/model-cache
    /// in the user's data folder]
    #[arg(long, env = "ATOLL_MODEL_CACHE", value_name = "FOLDER")]
    pub(crate) model_cache: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster scheduler --store etcd://127.0.0.1:2379
  atoll cluster scheduler --store etcd://a:2379,b:2379,c:2379 --lease-ms 3000 --copies 3
  atoll cluster scheduler --store etcd://etcd:2379 --replicas-max 20 \\
                          --kubernetes-scale deployment/atoll-backend
  atoll cluster scheduler --store etcd://etcd:2379 \\
      --kubernetes-scale deployment/atoll-l4,kind=l4,min=0,max=20,price=0.8 \\
      --kubernetes-scale deployment/atoll-a100,kind=a100,min=0,max=8,price=3.2

Start two or more: one leads, and another takes over when its lease expires.")]
pub(crate) struct SchedulerArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) planning: PlanningArgs,

    #[command(flatten)]
    pub(crate) scaling: ScalingArgs,

    /// Seconds of the store's history that the leader keeps; 0 to leave that to others
    #[arg(long, env = "ATOLL_STORE_HISTORY_SECS", default_value_t = 300)]
    pub(crate) store_history_secs: u64,

    /// Quota of the store in MiB, for the alert before it is reached: as etcd's
    /// --quota-backend-bytes
    #[arg(long, env = "ATOLL_STORE_QUOTA_MIB", default_value_t = 2048)]
    pub(crate) store_quota_mib: u64,

    /// Address to listen on
    #[arg(long, env = "ATOLL_HOST", default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,

    /// Admin port, with metrics and health; 0 for any free one
    #[arg(long, visible_alias = "admin-port", env = "ATOLL_METRICS_PORT", default_value_t = 0)]
    pub(crate) metrics_port: u16,

    #[command(flatten)]
    pub(crate) security: SecurityArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster frontend --store etcd://127.0.0.1:2379
  atoll cluster frontend --store etcd://127.0.0.1:2379 --model-store /models
  AWS_ENDPOINT_URL=http://minio:9000 \\
    atoll cluster frontend --store etcd://etcd:2379 --model-store s3://models/atoll
  atoll cluster frontend --store etcd://127.0.0.1:2379 --query scenarios/ocr.toml
  curl -T scenarios/ocr.toml localhost:8000/v2/atoll/queries/ocr            the same, while it runs
  curl --data-binary @page.png -H 'Content-Type: image/png' \\
       localhost:8000/v2/atoll/queries/ocr/infer
  curl localhost:8000/v2/atoll/queries/ocr                                  stages, budgets, times

docs/book/src/clusters.md describes how to write a query.")]
pub(crate) struct FrontendArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) backend_tls: BackendTlsArgs,

    #[command(flatten)]
    pub(crate) listen: ListenArgs,

    #[command(flatten)]
    pub(crate) models: ModelStoreArgs,

    #[command(flatten)]
    pub(crate) quotas: RegistryQuotaArgs,

    /// Folder in which the frontend keeps its last routes, in frontends/NAME: a frontend of the
    /// same --name serves by them until the store can be reached [default: atoll in the user's data
    /// folder]
    #[arg(long, env = "ATOLL_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Query to store: a TOML or JSON file; its name is the query's; may be given several times
    #[arg(long, env = "ATOLL_QUERY", value_name = "FILE", value_delimiter = ':')]
    pub(crate) query: Vec<PathBuf>,

    /// Max requests in flight
    #[arg(
        long,
        env = "ATOLL_MAX_REQUESTS",
        default_value_t = 16384,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_requests: u32,

    /// Max milliseconds that a request waits for a backend that is started, where the scheduler
    /// scales backends; 0 to refuse it at once
    #[arg(
        long,
        env = "ATOLL_COLD_START_WAIT_MS",
        default_value_t = 120_000,
        value_parser = clap::value_parser!(u64).range(0..=3_600_000)
    )]
    pub(crate) cold_start_wait_ms: u64,

    /// Max requests for one model that wait so
    #[arg(long, env = "ATOLL_COLD_START_QUEUE", default_value_t = 256)]
    pub(crate) cold_start_queue: u32,

    /// Max requests that wait so, over all models
    #[arg(long, env = "ATOLL_COLD_START_QUEUE_TOTAL", default_value_t = 4096)]
    pub(crate) cold_start_queue_total: u32,

    /// Max size of a request body in MiB, after decompression
    #[arg(
        long,
        env = "ATOLL_MAX_BODY_MIB",
        default_value_t = 256,
        value_parser = clap::value_parser!(u64).range(1..=65536)
    )]
    pub(crate) max_body_mib: u64,

    /// Seconds that requests in flight may take to finish after SIGTERM or Ctrl-C
    #[arg(long, env = "ATOLL_EXIT_TIMEOUT_SECS", default_value_t = 30)]
    pub(crate) exit_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster backend --store etcd://127.0.0.1:2379 --model-repository models
  atoll cluster backend --store etcd://etcd:2379 --model-store /models --device cuda:0 \\
                        --host 0.0.0.0 --insecure --advertise 10.0.0.7
  atoll cluster backend --store etcd://etcd:2379 --model-store s3://models/atoll \\
                        --model-cache /var/cache/atoll

Models of --model-repository become models of the cluster. Ports are free ones unless given.")]
pub(crate) struct BackendArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Folder of models, or one .onnx file; may be given several times
    #[arg(long, env = "ATOLL_MODEL_REPOSITORY", value_delimiter = ':')]
    pub(crate) model_repository: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) models: ModelStoreArgs,

    #[command(flatten)]
    pub(crate) model_check: crate::registry_args::ModelCheckArgs,

    /// Folder in which the backend keeps its ports and its last assignment, and notes what it
    /// loads, in backends/NAME: one of the same --name serves them again before the store can be
    /// reached, and a model that ends the process is quarantined [default: atoll in the user's data
    /// folder]
    #[arg(long, env = "ATOLL_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// GPU memory for weights on each device, such as 8GiB. Further models stay on the host and are
    /// loaded when requested [default: what is free, less a tenth]
    #[arg(
        long,
        env = "ATOLL_GPU_MEMORY",
        value_name = "SIZE",
        value_parser = value_parsers::memory
    )]
    pub(crate) gpu_memory: Option<Bytes>,

    /// Kind of device, for profiles; backends of one kind are equally fast [default: the device's]
    #[arg(long, env = "ATOLL_DEVICE_KIND")]
    pub(crate) device_kind: Option<String>,

    /// Memory for models in MiB; 0 for unlimited [default: the GPU's; unlimited for a CPU]
    #[arg(long, env = "ATOLL_MODEL_MEMORY_MIB")]
    pub(crate) memory_mib: Option<u64>,

    #[command(flatten)]
    pub(crate) spans: crate::args::SpanArgs,

    /// Address to listen on
    #[arg(long, env = "ATOLL_HOST", default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,

    /// Host under which frontends reach this backend [default: the address it listens on]
    #[arg(long, env = "ATOLL_ADVERTISE")]
    pub(crate) advertise: Option<String>,

    /// Port of REST; 0 for any free one
    #[arg(long, env = "ATOLL_HTTP_PORT", default_value_t = 0)]
    pub(crate) http_port: u16,

    /// Port of gRPC; 0 for any free one
    #[arg(long, env = "ATOLL_GRPC_PORT", default_value_t = 0)]
    pub(crate) grpc_port: u16,

    /// Admin port, with metrics and health; 0 for any free one
    #[arg(long, visible_alias = "admin-port", env = "ATOLL_METRICS_PORT", default_value_t = 0)]
    pub(crate) metrics_port: u16,

    #[command(flatten)]
    pub(crate) security: SecurityArgs,

    /// Max requests in flight
    #[arg(
        long,
        env = "ATOLL_MAX_REQUESTS",
        default_value_t = 16384,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_requests: u32,

    /// Max size of a request body in MiB
    #[arg(
        long,
        env = "ATOLL_MAX_BODY_MIB",
        default_value_t = 256,
        value_parser = clap::value_parser!(u64).range(1..=65536)
    )]
    pub(crate) max_body_mib: u64,

    /// Best-effort share: percent of device time that best effort keeps under saturating real time
    #[arg(
        long,
        env = "ATOLL_BEST_EFFORT_SHARE",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=90)
    )]
    pub(crate) best_effort_share: u32,

    /// Max slowdown of real time, in percent, for best effort that co-runs; 0 preempts all best
    /// effort
    #[arg(
        long,
        alias = "bearable",
        env = "ATOLL_MAX_RT_SLOWDOWN",
        value_name = "PERCENT",
        default_value_t = 1.0,
        value_parser = value_parsers::max_rt_slowdown
    )]
    pub(crate) max_rt_slowdown: f64,

    /// Seconds that requests in flight may take to finish after SIGTERM or Ctrl-C
    #[arg(long, env = "ATOLL_EXIT_TIMEOUT_SECS", default_value_t = 30)]
    pub(crate) exit_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster status --store etcd://127.0.0.1:2379
  atoll cluster status --store etcd://127.0.0.1:2379 --json

Exit code 1 when something is wrong, or the store cannot be reached: what, and what to do, is
printed first.")]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Print every model, also where there are many
    #[arg(long)]
    pub(crate) all: bool,

    /// Exit with 0 whenever there is a leader, whatever else is wrong: for a scheduler's probe
    #[arg(long)]
    pub(crate) leader_only: bool,

    /// Quota of the store in MiB: as etcd's --quota-backend-bytes
    #[arg(long, env = "ATOLL_STORE_QUOTA_MIB", default_value_t = 2048)]
    pub(crate) store_quota_mib: u64,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster top --store etcd://127.0.0.1:2379
  atoll cluster top --store etcd://127.0.0.1:2379 --every-ms 250 --json")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Milliseconds between two updates
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..))]
    pub(crate) every_ms: u64,

    /// Print a line of JSON for each update
    #[arg(long)]
    pub(crate) json: bool,
}

impl BackendArgs {
    pub(crate) fn ports(&self) -> Ports {
        Ports {
            host: self.host,
            http: self.http_port,
            grpc: self.grpc_port,
            metrics: self.metrics_port,
        }
    }
}
