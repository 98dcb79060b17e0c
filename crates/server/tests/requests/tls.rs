//! TLS over real sockets: certificates of both sides, their refusal, and their rotation.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use rcgen::{CertificateParams, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use server::{RunningServer, Server, ServerOptions, TlsIdentity, TlsOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::Echo;

struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

struct Identity {
    certificate: CertificateDer<'static>,
    key: Vec<u8>,
}

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    Authority { certificate, issuer: Issuer::new(params, key) }
}

impl Authority {
    fn sign(&self, change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let names = vec!["localhost".to_string(), "127.0.0.1".to_string()];
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().der().clone();
        Identity { certificate, key: key.serialize_der() }
    }
}

fn write_pem(path: &Path, kind: &str, der: &[u8]) {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let mut file = std::fs::File::create(path).unwrap();
    writeln!(file, "-----BEGIN {kind}-----").unwrap();
    for line in text.as_bytes().chunks(64) {
        writeln!(file, "{}", std::str::from_utf8(line).unwrap()).unwrap();
    }
    writeln!(file, "-----END {kind}-----").unwrap();
}

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Files {
        Files { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, identity: &Identity) {
        write_pem(&self.path("cert"), "CERTIFICATE", &identity.certificate);
        write_pem(&self.path("key"), "PRIVATE KEY", &identity.key);
    }

    async fn serve(&self, client_ca: Option<&Authority>) -> RunningServer {
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let client_ca = client_ca.map(|authority| {
            write_pem(&self.path("client-ca"), "CERTIFICATE", &authority.certificate);
            self.path("client-ca")
        });
        let identity = TlsIdentity::Files { certificate: self.path("cert"), key: self.path("key") };
        let options = ServerOptions {
            http: any,
            grpc: any,
            metrics: any,
            tls: Some(TlsOptions { identity, client_ca }),
            ..ServerOptions::default()
        };
        Server::start(options, Arc::new(Echo::default())).await.unwrap()
    }
}

fn client_config(ca: &Authority, identity: Option<&Identity>, alpn: &[&[u8]]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(ca.certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let key = PrivatePkcs8KeyDer::from(identity.key.clone()).into();
            builder.with_client_auth_cert(vec![identity.certificate.clone()], key).unwrap()
        }
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

async fn connect(
    address: SocketAddr,
    config: ClientConfig,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// The status of a request; an error where TLS is refused, which may show only at the first read.
async fn get(stream: &mut TlsStream<TcpStream>, path: &str) -> std::io::Result<String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut reply = vec![0; 1 << 16];
    let length = stream.read(&mut reply).await?;
    let text = String::from_utf8_lossy(&reply[..length]).into_owned();
    text.lines().next().map(str::to_string).ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}

async fn try_get(address: SocketAddr, config: ClientConfig, path: &str) -> std::io::Result<String> {
    get(&mut connect(address, config).await?, path).await
}

const LIVE: &str = "/v2/health/live";
const OK: &str = "HTTP/1.1 200 OK";

#[tokio::test]
async fn every_port_speaks_tls_and_nothing_else() {
    let (authority, files) = (authority(), Files::new());
    files.write(&authority.sign(|_| {}));
    let server = files.serve(None).await;
    for address in [server.http_addr.unwrap(), server.metrics_addr.unwrap()] {
        let reply = try_get(address, client_config(&authority, None, &[b"http/1.1"]), LIVE).await;
        assert_eq!(reply.unwrap(), OK);
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        let _ = plain.read_to_end(&mut reply).await;
        assert!(!reply.starts_with(b"HTTP"), "plain text is answered");
    }
    // A server that the client cannot verify.
    let other = self::authority();
    let config = client_config(&other, None, &[]);
    assert!(connect(server.http_addr.unwrap(), config).await.is_err());
    // gRPC offers HTTP/2 only, REST both.
    type Protocols<'a> = &'a [&'a [u8]];
    let cases: [(SocketAddr, Protocols, &[u8]); 3] = [
        (server.grpc_addr.unwrap(), &[b"h2", b"http/1.1"], b"h2"),
        (server.http_addr.unwrap(), &[b"h2"], b"h2"),
        (server.http_addr.unwrap(), &[b"http/1.1"], b"http/1.1"),
    ];
    for (address, offered, chosen) in cases {
        let stream = connect(address, client_config(&authority, None, offered)).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(chosen));
        let version = stream.get_ref().1.protocol_version();
        assert_eq!(version, Some(rustls::ProtocolVersion::TLSv1_3));
    }
    let only_http1 = client_config(&authority, None, &[b"http/1.1"]);
    assert!(connect(server.grpc_addr.unwrap(), only_http1).await.is_err());
}

#[tokio::test]
async fn client_certificates_are_required_and_checked() {
    let (authority, clients, files) = (authority(), authority(), Files::new());
    files.write(&authority.sign(|_| {}));
    let server = files.serve(Some(&clients)).await;
    let rest = server.http_addr.unwrap();
    let good = clients.sign(|_| {});
    let expired = clients.sign(|params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let foreign = self::authority().sign(|_| {});
    let config = |identity| client_config(&authority, identity, &[b"http/1.1"]);
    assert_eq!(try_get(rest, config(Some(&good)), "/v2").await.unwrap(), OK);
    for identity in [None, Some(&expired), Some(&foreign)] {
        assert!(try_get(rest, config(identity), "/v2").await.is_err());
        let grpc = client_config(&authority, identity, &[b"h2"]);
        assert!(try_get(server.grpc_addr.unwrap(), grpc, "/").await.is_err());
    }
    // Probes have no certificate.
    let admin = server.metrics_addr.unwrap();
    assert_eq!(try_get(admin, config(None), LIVE).await.unwrap(), OK);
    assert!(try_get(admin, config(None), "/metrics").await.unwrap().contains(" 401 "));
    let mut stream = connect(admin, config(Some(&good))).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut page = Vec::new();
    let _ = stream.read_to_end(&mut page).await;
    let page = String::from_utf8_lossy(&page).into_owned();
    let line = "atoll_requests_refused_total{reason=\"certificate\"} ";
    let counted = page.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    assert!(counted.parse::<u64>().unwrap() >= 6, "{counted}");
}

#[tokio::test]
async fn a_new_certificate_is_used_without_a_restart_and_fails_no_request() {
    let (authority, files) = (authority(), Files::new());
    let (first, second) = (authority.sign(|_| {}), authority.sign(|_| {}));
    files.write(&first);
    let server = files.serve(None).await;
    let rest = server.http_addr.unwrap();
    let config = || client_config(&authority, None, &[b"http/1.1"]);
    let mut kept = connect(rest, config()).await.unwrap();
    assert_eq!(kept.get_ref().1.peer_certificates().unwrap()[0], first.certificate);
    // First the certificate alone: it does not fit the key, and the old pair stays.
    write_pem(&files.path("cert"), "CERTIFICATE", &second.certificate);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(try_get(rest, config(), LIVE).await.unwrap(), OK);
    files.write(&second);
    let begun = Instant::now();
    loop {
        let mut stream = connect(rest, config()).await.unwrap();
        assert_eq!(get(&mut stream, LIVE).await.unwrap(), OK);
        if stream.get_ref().1.peer_certificates().unwrap()[0] == second.certificate {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the certificate is not read again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(get(&mut kept, LIVE).await.unwrap(), OK);
}

#[tokio::test]
async fn a_self_signed_certificate_is_made_at_start() {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let names = server::tls::self_signed_names([127, 0, 0, 1].into());
    let identity = TlsIdentity::SelfSigned(names);
    let options = ServerOptions {
        http: any,
        grpc: None,
        metrics: None,
        tls: Some(TlsOptions { identity, client_ca: None }),
        ..ServerOptions::default()
    };
    let server = Server::start(options, Arc::new(Echo::default())).await.unwrap();
    let config = client_config(&authority(), None, &[]);
    let error = connect(server.http_addr.unwrap(), config).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
}

#[tokio::test]
async fn a_wrong_file_is_an_error_at_start() {
    let (authority, files) = (authority(), Files::new());
    files.write(&authority.sign(|_| {}));
    std::fs::write(files.path("key"), "nothing").unwrap();
    let identity = TlsIdentity::Files { certificate: files.path("cert"), key: files.path("key") };
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let tls = Some(TlsOptions { identity, client_ca: None });
    let options = ServerOptions { http: any, grpc: None, metrics: None, tls, ..Default::default() };
    let error = Server::bind(options).await.err().unwrap().to_string();
    assert!(error.contains("key"), "{error}");
}
