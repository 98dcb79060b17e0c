//! A client of a running server, for commands that read from it or change its models.

use std::path::PathBuf;
use std::time::Duration;

use assembly::{Failure, read_file};
use clap::Args;
use reqwest::{Certificate, Client, Method, Response};

/// Maximum size of a message of the server that is shown.
const MAX_MESSAGE: usize = 500;

#[derive(Clone, Debug, Args)]
pub(crate) struct ServerClientArgs {
    /// The server
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,

    /// File with the token to send, where the server needs one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// Certificate of the authority that signed the server's, where the system does not know it
    #[arg(long, value_name = "FILE.pem")]
    pub(crate) ca: Option<PathBuf>,
}

impl ServerClientArgs {
    /// Sends a GET request and checks that it succeeds. Without `timeout` its body may be endless.
    pub(crate) async fn get(
        &self,
        path: &str,
        timeout: Option<Duration>,
    ) -> Result<Response, Failure> {
        self.send(Method::GET, path, timeout, None).await
    }

    /// Sends a POST request without a body and checks that it succeeds.
    pub(crate) async fn post(&self, path: &str, timeout: Duration) -> Result<Response, Failure> {
        self.send(Method::POST, path, Some(timeout), None).await
    }

    /// Sends a POST request with a JSON body and checks that it succeeds.
    pub(crate) async fn post_json(
        &self,
        path: &str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<Response, Failure> {
        self.send(Method::POST, path, Some(timeout), Some(body.to_string())).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        timeout: Option<Duration>,
        body: Option<String>,
    ) -> Result<Response, Failure> {
        cluster::tls::choose();
        let mut client = Client::builder().connect_timeout(Duration::from_secs(5)).no_proxy();
        if let Some(timeout) = timeout {
            client = client.timeout(timeout);
        }
        if let Some(path) = &self.ca {
            let certificate = Certificate::from_pem(read_file(path)?.as_bytes());
            let certificate = certificate
                .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
            client = client.tls_certs_merge([certificate]);
        }
        let client = client.build().map_err(Failure::failed)?;
        let url = format!("{}{path}", self.url.trim_end_matches('/'));
        let mut request = client.request(method, url);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        if let Some(path) = &self.token_file {
            request = request.bearer_auth(read_file(path)?.trim());
        }
        let response = request.send().await.map_err(|error| self.failed(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let message: String =
            response.text().await.unwrap_or_default().chars().take(MAX_MESSAGE).collect();
        Err(Failure::failed(format!("{} answers {status}: {message}", self.url)))
    }

    /// The failure for a connection that broke.
    pub(crate) fn failed(&self, error: &reqwest::Error) -> Failure {
        let mut text = format!("{}: {error}", self.url);
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            text = format!("{text}: {inner}");
            source = inner.source();
        }
        Failure::failed(text)
    }
}
