//! The arguments of `atoll apply`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use planner::apply::part::GpuNumbers;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll plan --services services.toml --profiles profiles.csv --json > plan.json
  atoll apply plan.json --model-repository models --dry-run
  atoll apply plan.json --model-repository models --gpus 0,1 --allow-mig-changes
  atoll apply plan.json --model-repository models --partition mps      without MIG: thread shares
  atoll apply mix.json --model-repository models --gpus 0,1 --plan-gpus 4-5  GPUs of several kinds
  atoll apply next.json --model-repository models --replace            no request is lost
  atoll apply --undo                                                    undo everything

A GPU with running work, with MIG devices or of another kind is refused before anything is changed.
When a change fails, those before it are undone. Ctrl-C ends after the change under way; --replace
goes on, --undo goes back. Servers run the plan's batches: each loads its models from a folder of
its own, with the models' settings and the plan's batch, processes and cycle.")]
pub(crate) struct ApplyArgs {
    /// Flags of the command line, by the names of these fields
    #[arg(skip)]
    pub(crate) given: BTreeSet<String>,

    /// The plan, as written by atoll plan --json
    pub(crate) plan: Option<PathBuf>,

    /// Folder of models that the servers load from; may be given several times
    #[arg(long, env = "ATOLL_MODEL_REPOSITORY", value_delimiter = ':')]
    pub(crate) model_repository: Vec<PathBuf>,

    /// GPU kind of the plan, if it does not name one, or which of its kinds; without it that of
    /// the GPUs here
    #[arg(long)]
    pub(crate) gpu: Option<String>,

    /// Numbers of the plan's GPUs that are for this machine, such as 0-3,6; without it all of them
    #[arg(long, value_name = "NUMBERS", requires = "plan")]
    pub(crate) plan_gpus: Option<GpuNumbers>,

    /// TOML file of further GPU kinds, as of atoll plan
    #[arg(long, env = "ATOLL_PLAN_GPU_TABLE", value_name = "GPUS.toml")]
    pub(crate) gpu_table: Option<PathBuf>,

    /// Numbers of this machine's GPUs that are used for the plan's GPUs, in order
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    pub(crate) gpus: Vec<u32>,

    /// How slices are made: MIG instances, or shares of a GPU's threads under MPS
    #[arg(
        long,
        env = "ATOLL_APPLY_PARTITION",
        default_value = "mig",
        value_parser = ["mig", "mps"]
    )]
    pub(crate) partition: String,

    /// Folder for pipes, logs and the list of changes; a short path, because paths of pipes are
    /// short
    #[arg(long, env = "ATOLL_APPLY_STATE", default_value = "/tmp/atoll-apply")]
    pub(crate) state: PathBuf,

    /// Print what would be done, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Allow creating and destroying MIG instances
    #[arg(long)]
    pub(crate) allow_mig_changes: bool,

    /// Undo what an earlier call did
    #[arg(long, conflicts_with = "plan")]
    pub(crate) undo: bool,

    /// Replace the plan in effect: what is equal stays, new servers start before old ones end, and
    /// servers.json in the state folder changes in between
    #[arg(long, requires = "plan", conflicts_with = "undo")]
    pub(crate) replace: bool,

    /// With --replace: milliseconds from the change of servers.json to the end of old servers;
    /// clients must have read it again by then
    #[arg(
        long,
        default_value_t = 1000,
        requires = "replace",
        value_parser = clap::value_parser!(u64).range(..=3_600_000)
    )]
    pub(crate) switch_wait_ms: u64,

    /// Device of the servers, as each of them sees it
    #[arg(long, env = "ATOLL_DEVICE", default_value = "cuda:0")]
    pub(crate) device: String,

    /// Address the servers listen on
    #[arg(long, env = "ATOLL_HOST", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Let the servers listen without TLS on an address that other machines can reach
    #[arg(long, env = "ATOLL_INSECURE")]
    pub(crate) insecure: bool,

    /// Certificate of the servers and of its issuers (PEM): they listen with TLS
    #[arg(
        long,
        env = "ATOLL_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key",
        help_heading = "Security"
    )]
    pub(crate) tls_cert: Option<PathBuf>,

    /// Private key of the certificate (PEM)
    #[arg(
        long,
        env = "ATOLL_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert",
        help_heading = "Security"
    )]
    pub(crate) tls_key: Option<PathBuf>,

    /// Authorities (PEM): clients of the servers need a certificate of one of them
    #[arg(
        long,
        env = "ATOLL_TLS_CLIENT_CA",
        value_name = "FILE",
        requires = "tls_cert",
        requires = "client_cert",
        help_heading = "Security"
    )]
    pub(crate) tls_client_ca: Option<PathBuf>,

    /// File of tokens (atoll token create); the servers take requests with one of them
    #[arg(long, env = "ATOLL_TOKENS", value_name = "FILE", help_heading = "Security")]
    pub(crate) tokens: Option<PathBuf>,

    /// Authorities (PEM) that this call verifies the servers with [default: --tls-cert]
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "Security")]
    pub(crate) ca: Option<PathBuf>,

    /// Certificate (PEM) of this call for the servers
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_cert",
        requires = "client_key",
        help_heading = "Security"
    )]
    pub(crate) client_cert: Option<PathBuf>,

    /// Private key (PEM) of that certificate
    #[arg(long, value_name = "FILE", requires = "client_cert", help_heading = "Security")]
    pub(crate) client_key: Option<PathBuf>,

    /// Name in the servers' certificate [default: --host]
    #[arg(long, value_name = "NAME", requires = "tls_cert", help_heading = "Security")]
    pub(crate) tls_name: Option<String>,

    /// File with a token: a server that does not take it for its models is not ready
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub(crate) token_file: Option<PathBuf>,

    /// REST port of the first server; gRPC and metrics follow, then the next server
    #[arg(long, default_value_t = 9000, value_parser = clap::value_parser!(u16).range(1024..))]
    pub(crate) first_port: u16,

    /// Max seconds until a server is ready
    #[arg(long, default_value_t = 300)]
    pub(crate) start_timeout_secs: u64,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
