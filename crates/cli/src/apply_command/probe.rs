//! Requests to the servers of a plan: are they ready, and do they take this call's token?

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use assembly::Failure;
use cluster::tls::ClientTls;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::apply_args::ApplyArgs;
use crate::plan_command::read_input;
use crate::security_args::client_tls;

/// Max time of one request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// `HTTP/1.1 200`.
const STATUS_LINE_BYTES: usize = 12;

/// How servers are asked.
pub(super) struct Probe {
    runtime: Runtime,
    host: IpAddr,
    tls: Option<ClientTls>,
    /// Sent with every request, if there is one.
    token: Option<String>,
}

impl Probe {
    /// Reads certificates and token, so that a mistake is found before anything changes.
    pub(super) fn new(args: &ApplyArgs) -> Result<Probe, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let token = args.token_file.as_deref().map(read_input).transpose()?;
        let token = token.map(|text| text.trim().to_string());
        if let (Some(path), Some(token)) = (&args.token_file, &token)
            && (token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return Err(Failure::usage(format!("{}: this is no token", path.display())));
        }
        // A certificate may be its own authority, as those made for trying are.
        let ca = args.tls_cert.as_ref().map(|own| args.ca.as_ref().unwrap_or(own));
        let (certificate, key) = (args.client_cert.as_ref(), args.client_key.as_ref());
        let tls = client_tls(ca, certificate, key, args.tls_name.as_ref())?;
        Ok(Probe { runtime: runtime.map_err(Failure::failed)?, host: args.host, tls, token })
    }

    /// The status of a GET request.
    pub(super) fn status(&self, port: u16, path: &str) -> io::Result<u16> {
        let address = SocketAddr::new(self.host, port);
        self.runtime.block_on(async {
            let exchange = self.exchange(address, path);
            tokio::time::timeout(TIMEOUT, exchange).await.unwrap_or_else(|late| Err(late.into()))
        })
    }

    async fn exchange(&self, address: SocketAddr, path: &str) -> io::Result<u16> {
        let stream = TcpStream::connect(address).await?;
        match &self.tls {
            None => self.ask(stream, path).await,
            Some(tls) => {
                let secured = tls.connect(stream, &address.to_string(), b"http/1.1").await;
                self.ask(secured.map_err(io::Error::other)?, path).await
            }
        }
    }

    async fn ask(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        path: &str,
    ) -> io::Result<u16> {
        let token = self.token.as_ref();
        let token =
            token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        let head =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{token}Connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut line = [0; STATUS_LINE_BYTES];
        stream.read_exact(&mut line).await?;
        let status = std::str::from_utf8(&line[STATUS_LINE_BYTES - 3..]).ok();
        let status = status.and_then(|text| text.parse().ok());
        status.ok_or_else(|| io::Error::other("this is no answer of HTTP"))
    }

    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }
}
