//! Flags that say who may connect, and what they may do.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use assembly::Failure;
use clap::Args;
use cluster::tls::ClientTls;
use model::config::Class;
use server::{
    AccessOptions, ConnectionLimits, JwtOptions, ServerOptions, TelemetryOptions, TlsIdentity,
    TlsOptions, tls,
};

use crate::plan_command::plan_service::plan_fn;

/// Name of the file of tokens in a data folder.
pub(crate) const TOKENS: &str = "tokens";

fn class(text: &str) -> Result<Class, String> {
    Class::parse(text).ok_or_else(|| "classes are rt and be".to_string())
}

/// Who may connect, and what they may do.
#[derive(Clone, Debug, Args)]
pub(crate) struct SecurityArgs {
    /// Listen without TLS on addresses that other machines can reach
    #[arg(long, env = "ATOLL_INSECURE", help_heading = "Security")]
    pub(crate) insecure: bool,

    /// Certificate of the server and of its issuers (PEM); read again when it changes
    #[arg(
        long,
        env = "ATOLL_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key",
        help_heading = "Security"
    )]
    tls_cert: Option<PathBuf>,

    /// Private key of the certificate (PEM)
    #[arg(
        long,
        env = "ATOLL_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert",
        help_heading = "Security"
    )]
    tls_key: Option<PathBuf>,

    /// Authorities (PEM): clients need a certificate of one of them
    #[arg(long, env = "ATOLL_TLS_CLIENT_CA", value_name = "FILE", help_heading = "Security")]
    tls_client_ca: Option<PathBuf>,

    /// Use a certificate made at start that nobody can verify, for trying
    #[arg(
        long,
        env = "ATOLL_TLS_SELF_SIGNED",
        conflicts_with = "tls_cert",
        help_heading = "Security"
    )]
    tls_self_signed: bool,

    /// File of tokens (atoll token create); requests need one of them [default: 'tokens' in the
    /// data folder, if it exists]
    #[arg(long, env = "ATOLL_TOKENS", value_name = "FILE", help_heading = "Security")]
    tokens: Option<PathBuf>,

    /// Key set (JWKS) of an issuer of JSON Web Tokens; requests need one of its tokens
    #[arg(
        long,
        env = "ATOLL_JWT_KEYS",
        value_name = "FILE",
        requires = "jwt_issuer",
        requires = "jwt_audience",
        help_heading = "Security"
    )]
    jwt_keys: Option<PathBuf>,

    /// Issuer that these tokens must name
    #[arg(long, env = "ATOLL_JWT_ISSUER", requires = "jwt_keys", help_heading = "Security")]
    jwt_issuer: Option<String>,

    /// Audience that these tokens must name
    #[arg(long, env = "ATOLL_JWT_AUDIENCE", requires = "jwt_keys", help_heading = "Security")]
    jwt_audience: Option<String>,

    /// Host name that requests may be for, '*' for any [default: localhost and addresses if only
    /// this machine can connect, else any]
    #[arg(long, env = "ATOLL_ALLOW_HOST", value_delimiter = ',', help_heading = "Security")]
    allow_host: Vec<String>,

    /// Origin of web pages that may send requests, such as `https://example.org`
    #[arg(long, env = "ATOLL_ALLOW_ORIGIN", value_delimiter = ',', help_heading = "Security")]
    allow_origin: Vec<String>,

    /// Classes that requests without token may choose: rt, be [default: both if only this machine
    /// can connect, else be]
    #[arg(
        long,
        env = "ATOLL_ALLOW_CLASS",
        value_delimiter = ',',
        value_parser = class,
        help_heading = "Security"
    )]
    allow_class: Vec<Class>,

    /// Highest priority that requests without token may choose; 1 is the highest
    #[arg(
        long,
        env = "ATOLL_MAX_PRIORITY",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Security"
    )]
    max_priority: Option<u32>,

    /// Refuse to load, unload or register models and to change queries
    #[arg(long, env = "ATOLL_READ_ONLY", help_heading = "Security")]
    read_only: bool,

    /// File to which every change and refusal is appended [default: the log]
    #[arg(long, env = "ATOLL_AUDIT_LOG", value_name = "FILE", help_heading = "Security")]
    audit_log: Option<PathBuf>,

    #[command(flatten)]
    limits: LimitArgs,
}

/// Limits on what clients hold.
#[derive(Clone, Debug, Args)]
pub(crate) struct LimitArgs {
    /// Max open connections, for each of REST and gRPC
    #[arg(
        long,
        env = "ATOLL_MAX_CONNECTIONS",
        default_value_t = 8192,
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Limits"
    )]
    max_connections: u32,

    /// Max open connections of one address (of a /64 network with IPv6)
    #[arg(
        long,
        env = "ATOLL_MAX_CONNECTIONS_PER_ADDRESS",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Limits"
    )]
    max_connections_per_address: u32,

    /// Max concurrent streams of an HTTP/2 connection
    #[arg(
        long,
        env = "ATOLL_MAX_STREAMS",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Limits"
    )]
    max_streams: u32,

    /// Seconds for a TLS handshake, and for a request head
    #[arg(
        long,
        env = "ATOLL_HEAD_TIMEOUT_SECS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400),
        help_heading = "Limits"
    )]
    head_timeout_secs: u64,

    /// Seconds in which a client sends nothing of a body that it began
    #[arg(
        long,
        env = "ATOLL_BODY_TIMEOUT_SECS",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..=86_400),
        help_heading = "Limits"
    )]
    body_timeout_secs: u64,

    /// Seconds in which a client takes nothing of a response
    #[arg(
        long,
        env = "ATOLL_WRITE_TIMEOUT_SECS",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..=86_400),
        help_heading = "Limits"
    )]
    write_timeout_secs: u64,

    /// Seconds between two requests of a connection
    #[arg(
        long,
        env = "ATOLL_IDLE_TIMEOUT_SECS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=86_400),
        help_heading = "Limits"
    )]
    idle_timeout_secs: u64,

    /// Max seconds of one execution, waiting included; 0 for unlimited
    #[arg(long, env = "ATOLL_MAX_EXECUTION_SECS", default_value_t = 300, help_heading = "Limits")]
    max_execution_secs: u64,
}

impl LimitArgs {
    fn connections(&self) -> ConnectionLimits {
        ConnectionLimits {
            max_connections: self.max_connections as usize,
            max_per_address: self.max_connections_per_address as usize,
            max_streams: self.max_streams,
            head_timeout: Duration::from_secs(self.head_timeout_secs),
            body_timeout: Duration::from_secs(self.body_timeout_secs),
            write_timeout: Duration::from_secs(self.write_timeout_secs),
            idle_timeout: Duration::from_secs(self.idle_timeout_secs),
            ..ConnectionLimits::default()
        }
    }
}

/// Where a server listens.
pub(crate) struct Ports {
    pub(crate) host: IpAddr,
    pub(crate) http: u16,
    pub(crate) grpc: u16,
    pub(crate) metrics: u16,
}

impl SecurityArgs {
    /// The options of a server on `ports`; `folder` may hold its tokens.
    pub(crate) fn options(
        &self,
        ports: &Ports,
        folder: Option<&Path>,
        max_body_bytes: usize,
    ) -> Result<ServerOptions, Failure> {
        let address = |port| Some(SocketAddr::new(ports.host, port));
        let limit = self.limits.max_execution_secs;
        Ok(ServerOptions {
            http: address(ports.http),
            grpc: address(ports.grpc),
            metrics: address(ports.metrics),
            max_body_bytes,
            connections: self.limits.connections(),
            access: self.access(folder),
            tls: self.tls(ports.host)?,
            insecure: self.insecure,
            max_execution: (limit > 0).then(|| Duration::from_secs(limit)),
            planner: Some(plan_fn()),
            telemetry: TelemetryOptions::from_env(|name| std::env::var(name).ok())
                .map_err(Failure::usage)?,
            ..ServerOptions::default()
        })
    }

    fn access(&self, folder: Option<&Path>) -> AccessOptions {
        let found = folder.map(|folder| folder.join(TOKENS)).filter(|path| path.exists());
        let jwt = match (&self.jwt_keys, &self.jwt_issuer, &self.jwt_audience) {
            (Some(keys), Some(issuer), Some(audience)) => Some(JwtOptions {
                keys: keys.clone(),
                issuer: issuer.clone(),
                audience: audience.clone(),
            }),
            _ => None,
        };
        AccessOptions {
            tokens: self.tokens.clone().or(found),
            jwt,
            allow_hosts: self.allow_host.clone(),
            allow_origins: self.allow_origin.clone(),
            read_only: self.read_only,
            classes: self.allow_class.clone(),
            max_priority: self.max_priority,
            audit_log: self.audit_log.clone(),
        }
    }

    fn tls(&self, host: IpAddr) -> Result<Option<TlsOptions>, Failure> {
        let identity = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => {
                TlsIdentity::Files { certificate: certificate.clone(), key: key.clone() }
            }
            _ if self.tls_self_signed => TlsIdentity::SelfSigned(tls::self_signed_names(host)),
            _ if self.tls_client_ca.is_some() => {
                return Err(Failure::usage("--tls-client-ca needs --tls-cert and --tls-key"));
            }
            _ => return Ok(None),
        };
        Ok(Some(TlsOptions { identity, client_ca: self.tls_client_ca.clone() }))
    }

    /// The same for a backend: its clients are frontends, which have checked class and priority.
    pub(crate) fn backend_options(
        &self,
        ports: &Ports,
        max_body_bytes: usize,
    ) -> Result<ServerOptions, Failure> {
        let mut options = self.options(ports, None, max_body_bytes)?;
        if options.access.classes.is_empty() {
            options.access.classes = vec![Class::RealTime, Class::BestEffort];
        }
        Ok(options)
    }
}

/// TLS of a frontend's connections to backends.
#[derive(Clone, Debug, Args)]
pub(crate) struct BackendTlsArgs {
    /// Authorities (PEM) that sign the certificates of backends: connect to them over TLS
    #[arg(long, env = "ATOLL_BACKEND_CA", value_name = "FILE", help_heading = "Security")]
    backend_ca: Option<PathBuf>,

    /// Certificate (PEM) of this frontend for backends
    #[arg(
        long,
        env = "ATOLL_BACKEND_CERT",
        value_name = "FILE",
        requires = "backend_key",
        requires = "backend_ca",
        help_heading = "Security"
    )]
    backend_cert: Option<PathBuf>,

    /// Private key (PEM) of that certificate
    #[arg(
        long,
        env = "ATOLL_BACKEND_KEY",
        value_name = "FILE",
        requires = "backend_cert",
        help_heading = "Security"
    )]
    backend_key: Option<PathBuf>,

    /// Name in the certificates of backends [default: the host they advertise]
    #[arg(
        long,
        env = "ATOLL_BACKEND_TLS_NAME",
        requires = "backend_ca",
        help_heading = "Security"
    )]
    backend_tls_name: Option<String>,
}

/// The TLS of connections, from its flags.
pub(crate) fn client_tls(
    ca: Option<&PathBuf>,
    certificate: Option<&PathBuf>,
    key: Option<&PathBuf>,
    name: Option<&String>,
) -> Result<Option<ClientTls>, Failure> {
    let Some(ca) = ca else { return Ok(None) };
    let tls = ClientTls {
        ca: ca.clone(),
        identity: certificate.cloned().zip(key.cloned()),
        name: name.cloned(),
    };
    tls.check().map_err(Failure::usage)?;
    Ok(Some(tls))
}

impl BackendTlsArgs {
    pub(crate) fn tls(&self) -> Result<Option<ClientTls>, Failure> {
        let (certificate, key) = (self.backend_cert.as_ref(), self.backend_key.as_ref());
        client_tls(self.backend_ca.as_ref(), certificate, key, self.backend_tls_name.as_ref())
    }
}
