//! TLS of the listeners: certificates from files, read again when they change.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};
use tokio_rustls::TlsAcceptor;

use crate::auth::watched_file::Stamp;

/// Where a server's certificate comes from.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// The server's own certificate.
    pub identity: TlsIdentity,
    /// Certificates (PEM) of authorities: clients need a certificate of one of them. On the admin
    /// port they need none for health.
    pub client_ca: Option<PathBuf>,
}

/// A server's certificate.
#[derive(Clone, Debug)]
pub enum TlsIdentity {
    /// From files in PEM; read again when they change.
    Files {
        /// The certificate and those of its issuers.
        certificate: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
    /// Made at start for these names, signed by itself: for trying.
    SelfSigned(Vec<String>),
}

/// Which protocols a listener offers, and whether clients need a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsUse {
    Rest,
    Grpc,
    Admin,
}

struct Configs {
    rest: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
    admin: Arc<ServerConfig>,
}

/// The TLS of a server.
pub(crate) struct Tls {
    options: TlsOptions,
    configs: RwLock<Configs>,
    seen: Mutex<Vec<Stamp>>,
}

impl Tls {
    pub(crate) fn open(options: TlsOptions) -> Result<Arc<Tls>, String> {
        let seen = Mutex::new(stamps(&options));
        let configs = RwLock::new(configs(&options)?);
        Ok(Arc::new(Tls { options, configs, seen }))
    }

    /// Reads the files again if they changed; `None` if they did not. Connections that are open
    /// keep their certificate.
    pub(crate) fn reload(&self) -> Option<Result<(), String>> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamps(&self.options);
        if *seen == now {
            return None;
        }
        let read = configs(&self.options);
        // Certificate and key are two files: while they do not match, the next call tries again.
        if read.is_ok() {
            *seen = now;
        }
        Some(read.map(|configs| {
            *self.configs.write().unwrap_or_else(PoisonError::into_inner) = configs;
        }))
    }

    pub(crate) fn acceptor(&self, usage: TlsUse) -> TlsAcceptor {
        let configs = self.configs.read().unwrap_or_else(PoisonError::into_inner);
        TlsAcceptor::from(match usage {
            TlsUse::Rest => configs.rest.clone(),
            TlsUse::Grpc => configs.grpc.clone(),
            TlsUse::Admin => configs.admin.clone(),
        })
    }
}

fn stamps(options: &TlsOptions) -> Vec<Stamp> {
    let mut paths = Vec::new();
    if let TlsIdentity::Files { certificate, key } = &options.identity {
        paths.extend([certificate, key]);
    }
    paths.extend(&options.client_ca);
    paths.into_iter().map(|path| Stamp::of(path)).collect()
}

fn configs(options: &TlsOptions) -> Result<Configs, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let (chain, key) = identity(&options.identity)?;
    let roots = options.client_ca.as_deref().map(read_roots).transpose()?.map(Arc::new);
    let config = |protocols: &[&[u8]], required: bool| {
        let roots = roots.clone();
        server_config(&provider, chain.clone(), key.clone_key(), roots, required, protocols)
    };
    Ok(Configs {
        rest: config(&[b"h2", b"http/1.1"], true)?,
        grpc: config(&[b"h2"], true)?,
        admin: config(&[b"h2", b"http/1.1"], false)?,
    })
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Option<Arc<RootCertStore>>,
    required: bool,
    protocols: &[&[u8]],
) -> Result<Arc<ServerConfig>, String> {
    let failed = |error: rustls::Error| format!("the certificate cannot be used: {error}");
    // Versions before 1.2 do not exist in this library.
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(failed)?;
    let builder = match roots {
        None => builder.with_no_client_auth(),
        Some(roots) => {
            let mut verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
            if !required {
                verifier = verifier.allow_unauthenticated();
            }
            let verifier = verifier.build().map_err(|error| format!("--tls-client-ca: {error}"))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(failed)?;
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(config))
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn identity(identity: &TlsIdentity) -> Result<Identity, String> {
    match identity {
        TlsIdentity::Files { certificate, key } => {
            let failed = |error| format!("{}: {error}", key.display());
            Ok((read_chain(certificate)?, PrivateKeyDer::from_pem_file(key).map_err(failed)?))
        }
        TlsIdentity::SelfSigned(names) => {
            let made = rcgen::generate_simple_self_signed(names.clone())
                .map_err(|error| format!("--tls-self-signed: {error}"))?;
            let chain = vec![made.cert.der().clone()];
            tracing::warn!(
                sha256 = fingerprint(&chain[0]),
                "self-signed certificate: clients cannot verify it, use it only for trying"
            );
            let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
            Ok((chain, key.into()))
        }
    }
}

/// The certificates of a PEM file; at least one.
pub(crate) fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let read = CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))?;
    let chain: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| failed(&error))?;
    match chain.is_empty() {
        true => Err(failed(&"it has no certificate")),
        false => Ok(chain),
    }
}

fn read_roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in read_chain(path)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(roots)
}

/// SHA-256 of a certificate in hexadecimal.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    Sha256::digest(certificate).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a certificate for these names, signed by itself, and its key to `folder`: the paths of
/// `self.crt` and `self.key`, in PEM.
///
/// # Errors
/// When a name is wrong or a file cannot be written.
pub fn write_self_signed(folder: &Path, names: Vec<String>) -> Result<(PathBuf, PathBuf), String> {
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| error.to_string())?;
    let write = |name: &str, kind: &str, der: &[u8]| {
        let path = folder.join(name);
        let lines: Vec<String> = STANDARD
            .encode(der)
            .as_bytes()
            .chunks(64)
            .map(|line| String::from_utf8_lossy(line).into_owned())
            .collect();
        let text = format!("-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n", lines.join("\n"));
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        std::fs::write(&path, text).map_err(failed)?;
        Ok::<_, String>(path)
    };
    let certificate = write("self.crt", "CERTIFICATE", made.cert.der())?;
    let key = write("self.key", "PRIVATE KEY", &made.signing_key.serialize_der())?;
    Ok((certificate, key))
}

/// Names for a self-signed certificate of a server on this address.
pub fn self_signed_names(host: IpAddr) -> Vec<String> {
    let mut names = vec!["localhost".to_string(), "127.0.0.1".to_string(), "::1".to_string()];
    let host = host.to_string();
    if !names.contains(&host) {
        names.push(host);
    }
    names
}
