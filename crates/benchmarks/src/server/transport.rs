//! How clients reach the server under test: plain or over TLS, with or without a token.

use std::net::SocketAddr;
use std::path::Path;

use assembly::Failure;
use cluster::tls::ClientTls;
use server::auth::{GrantRecord, NewToken, Scope, TokenFile};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::args::Security;

/// A connection, encrypted or not.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What the clients of one server need.
#[derive(Clone, Debug, Default)]
pub(crate) struct Transport {
    tls: Option<ClientTls>,
    /// The value of the header `authorization`.
    pub(super) authorization: Option<String>,
}

impl Transport {
    /// Makes certificate and token in `folder`; returns the arguments of their server, too.
    pub(super) fn make(
        security: Security,
        folder: &Path,
    ) -> Result<(Transport, Vec<String>), Failure> {
        let mut transport = Transport::default();
        let mut arguments = Vec::new();
        if security == Security::None {
            return Ok((transport, arguments));
        }
        std::fs::create_dir_all(folder).map_err(Failure::failed)?;
        let names = vec!["localhost".to_string(), "127.0.0.1".to_string()];
        let (certificate, key) =
            server::write_self_signed(folder, names).map_err(Failure::failed)?;
        for (flag, path) in [("--tls-cert", &certificate), ("--tls-key", &key)] {
            arguments.extend([flag.to_string(), path.display().to_string()]);
        }
        transport.tls = Some(ClientTls { ca: certificate, identity: None, name: None });
        if security == Security::TlsToken {
            let path = folder.join("tokens");
            arguments.extend(["--tokens".to_string(), path.display().to_string()]);
            let grant = GrantRecord {
                scopes: vec![Scope::Infer, Scope::Metrics],
                classes: vec!["rt".to_string(), "be".to_string()],
                ..GrantRecord::default()
            };
            let new = NewToken { name: "benchmark".to_string(), grant, lifetime: None };
            let token = TokenFile::new(path).create(new).map_err(Failure::failed)?;
            transport.authorization = Some(format!("Bearer {token}"));
        }
        Ok((transport, arguments))
    }

    /// Connects; over TLS with this application protocol.
    pub(super) async fn connect(
        &self,
        address: SocketAddr,
        protocol: &[u8],
    ) -> Result<Box<dyn Stream>, String> {
        let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some(tls) => Ok(Box::new(tls.connect(stream, &address.to_string(), protocol).await?)),
        }
    }

    /// The scheme of URLs.
    pub(super) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// A request's header with the token, or nothing.
    pub(super) fn header(&self) -> String {
        let line = |value: &String| format!("Authorization: {value}\r\n");
        self.authorization.as_ref().map(line).unwrap_or_default()
    }
}
