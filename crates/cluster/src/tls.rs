//! TLS of connections that this process opens: to backends and to etcd.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Installs the cryptography provider for this process. A provider that is installed already stays.
pub fn choose() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// How this process verifies the other side, and proves who it is itself. The files are read for
/// every connection, so that new certificates are used without a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Certificates (PEM) of the authorities that sign the other side's certificate.
    pub ca: PathBuf,
    /// This process's certificate and key (PEM), where the other side requires one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Name in the other side's certificate, if it is not the host that is connected to.
    pub name: Option<String>,
}

impl ClientTls {
    /// Checks that the files can be used.
    pub fn check(&self) -> Result<(), String> {
        self.config(&[]).map(|_| ())
    }

    fn config(&self, protocols: &[&[u8]]) -> Result<ClientConfig, String> {
        let mut roots = RootCertStore::empty();
        for certificate in read_chain(&self.ca)? {
            roots.add(certificate).map_err(|error| format!("{}: {error}", self.ca.display()))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let failed = |why: String| format!("{}: {why}", key.display());
                let secret = PrivateKeyDer::from_pem_file(key);
                let secret = secret.map_err(|error| failed(error.to_string()))?;
                let chain = read_chain(certificate)?;
                builder
                    .with_client_auth_cert(chain, secret)
                    .map_err(|error| failed(error.to_string()))?
            }
        };
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Ok(config)
    }

    /// Speaks TLS over a connection to `address`, `HOST:PORT`.
    ///
    /// # Errors
    /// When the files cannot be used, or the other side is not who it should be.
    pub async fn connect(
        &self,
        stream: TcpStream,
        address: &str,
        protocol: &[u8],
    ) -> Result<TlsStream<TcpStream>, String> {
        let config = Arc::new(self.config(&[protocol])?);
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.name.as_deref().unwrap_or(host).to_string();
        let name = ServerName::try_from(name).map_err(|error| error.to_string())?;
        let connected = TlsConnector::from(config).connect(name, stream).await;
        connected.map_err(|error| error.to_string())
    }
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let read = CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))?;
    let chain: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| failed(&error))?;
    match chain.is_empty() {
        true => Err(failed(&"it has no certificate")),
        false => Ok(chain),
    }
}

/// A password; it is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The secret `text`, without the line break that files end with.
    pub fn new(text: &str) -> Secret {
        Secret(text.trim_end_matches(['\r', '\n']).to_string())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(...)")
    }
}
