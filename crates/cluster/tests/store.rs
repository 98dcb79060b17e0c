//! Conformance of every store; that of a cluster against a real etcd.
#![allow(missing_docs)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base::MonotonicClock;
use cluster::store::etcd::{EtcdAccess, EtcdStore};
use cluster::store::memory::MemoryStore;
use cluster::store::{Store, StoreError, StoreHealth, conformance, mirror};
use cluster::tls::{ClientTls, Secret};
use rcgen::{CertificateParams, Issuer, KeyPair};

/// A free port below the ephemeral range: it must still be free when etcd binds it, and again when
/// etcd restarts.
fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let of_this_process = std::process::id().wrapping_mul(97);
    loop {
        let next = of_this_process.wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + u16::try_from(next % 20_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

struct Etcd {
    process: Child,
    folder: tempfile::TempDir,
    port: u16,
    peer: u16,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(folder: &Path, port: u16, peer: u16) -> std::io::Result<Child> {
    spawn_with(folder, port, peer, "http", &[])
}

fn spawn_with(
    folder: &Path,
    port: u16,
    peer: u16,
    scheme: &str,
    flags: &[String],
) -> std::io::Result<Child> {
    let client = format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer}");
    Command::new("etcd")
        .args(flags)
        // Nothing here has to survive a crash, and the disk is not tested.
        .env("ETCD_UNSAFE_NO_FSYNC", "true")
        .args(["--name", "test", "--data-dir"])
        .arg(folder)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// A new etcd; `None` where it is not installed, unless the environment requires it.
fn start_etcd() -> Option<Etcd> {
    start_etcd_with(tempfile::tempdir().unwrap(), "http", &[])
}

fn start_etcd_with(folder: tempfile::TempDir, scheme: &str, flags: &[String]) -> Option<Etcd> {
    let (port, peer) = (free_port(), free_port());
    match spawn_with(&folder.path().join("data"), port, peer, scheme, flags) {
        Ok(process) => Some(Etcd { process, folder, port, peer }),
        Err(error) => {
            assert!(
                std::env::var_os("ATOLL_REQUIRE_ETCD").is_none(),
                "etcd does not start: {error}"
            );
            eprintln!("skipped: etcd is not installed");
            None
        }
    }
}

fn connect(etcd: &Etcd) -> EtcdStore {
    let address = format!("127.0.0.1:{}", etcd.port);
    EtcdStore::new(&address, EtcdAccess::default()).unwrap()
}

async fn reachable(store: &dyn Store) {
    for _ in 0..1200 {
        if store.get("anything").await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("etcd does not answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_store_conforms() {
    let store = MemoryStore::start(Arc::new(MonotonicClock::new()));
    conformance::run(store, "/test/").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_store_conforms() {
    let Some(etcd) = start_etcd() else { return };
    let store = Arc::new(connect(&etcd));
    reachable(&*store).await;
    conformance::run(store, "/test/").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_survives_a_restart_of_etcd() {
    let Some(mut etcd) = start_etcd() else { return };
    let store: Arc<dyn Store> = Arc::new(connect(&etcd));
    reachable(&*store).await;
    store.put("/m/a", "1", None).await.unwrap();
    let mut entries = mirror::follow(store.clone(), "/m/").await.unwrap();
    etcd.process.kill().unwrap();
    etcd.process.wait().unwrap();
    assert!(store.put("/m/b", "2", None).await.is_err());
    assert_eq!(entries.borrow().len(), 1);
    etcd.process = spawn(&etcd.folder.path().join("data"), etcd.port, etcd.peer).unwrap();
    reachable(&*store).await;
    store.put("/m/b", "2", None).await.unwrap();
    let wait = entries.wait_for(|map| map.len() == 2);
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap().unwrap();
}

fn write_pem(path: &Path, kind: &str, der: &[u8]) {
    use base64::Engine;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    let pem = format!("-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n", lines.join("\n"));
    std::fs::write(path, pem).unwrap();
}

/// Writes an authority `NAME-ca` and a certificate `NAME` with its key, signed by it.
fn write_identity(folder: &Path, name: &str) -> ClientTls {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let path = |ending: &str| -> PathBuf { folder.join(format!("{name}{ending}")) };
    write_pem(&path("-ca"), "CERTIFICATE", params.self_signed(&key).unwrap().der());
    let issuer = Issuer::new(params, key);
    let leaf = CertificateParams::new(vec!["127.0.0.1".to_string()]).unwrap();
    let key = KeyPair::generate().unwrap();
    write_pem(&path(""), "CERTIFICATE", leaf.signed_by(&key, &issuer).unwrap().der());
    write_pem(&path("-key"), "PRIVATE KEY", &key.serialize_der());
    ClientTls { ca: path("-ca"), identity: Some((path(""), path("-key"))), name: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_reached_over_mutual_tls() {
    let folder = tempfile::tempdir().unwrap();
    let good = write_identity(folder.path(), "good");
    let other = write_identity(folder.path(), "other");
    let (certificate, key) = good.identity.clone().unwrap();
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let flags = [
        flag("cert-file", &certificate),
        flag("key-file", &key),
        flag("trusted-ca-file", &good.ca),
        "--client-cert-auth=true".to_string(),
    ];
    let Some(etcd) = start_etcd_with(folder, "https", &flags) else { return };
    let open = |tls: Option<ClientTls>| {
        let address = format!("127.0.0.1:{}", etcd.port);
        EtcdStore::new(&address, EtcdAccess { tls, user: None }).unwrap()
    };
    let store = Arc::new(open(Some(good.clone())));
    reachable(&*store).await;
    conformance::run(store, "/test/").await.unwrap();
    let refused = [
        None,
        // Without a certificate, with one of another authority, with trust in another one.
        Some(ClientTls { identity: None, ..good.clone() }),
        Some(ClientTls { ca: good.ca.clone(), ..other.clone() }),
        Some(ClientTls { ca: other.ca, ..good }),
    ];
    for tls in refused {
        assert!(open(tls.clone()).get("key").await.is_err(), "{tls:?}");
    }
}

/// Calls etcd's JSON gateway.
fn post(port: u16, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n\
         {body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{path}: {reply}");
    reply
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_users_need_their_password() {
    // Tokens that expire within the test: the client gets new ones.
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--auth-token-ttl=1".to_string()];
    let Some(etcd) = start_etcd_with(folder, "http", &flags) else { return };
    reachable(&connect(&etcd)).await;
    let port = etcd.port;
    tokio::task::spawn_blocking(move || {
        post(port, "/v3/auth/user/add", r#"{"name":"root","password":"right"}"#);
        post(port, "/v3/auth/role/add", r#"{"name":"root"}"#);
        post(port, "/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#);
        post(port, "/v3/auth/enable", "{}");
    })
    .await
    .unwrap();
    let open = |user: Option<&str>| {
        let user = user.map(|password| ("root".to_string(), Secret::new(password)));
        let address = format!("127.0.0.1:{port}");
        EtcdStore::new(&address, EtcdAccess { tls: None, user }).unwrap()
    };
    // Files end with a line break.
    let store = Arc::new(open(Some("right\n")));
    conformance::run(store.clone(), "/test/").await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(store.get("key").await.is_ok(), "the token is not renewed");
    for user in [None, Some("wrong")] {
        let error = open(user).get("key").await.unwrap_err();
        assert!(matches!(error, StoreError::Refused(_)), "{user:?}: {error}");
        assert!(!error.to_string().contains("wrong"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_etcd_keeps_leases_and_gets_its_space_back() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quota-backend-bytes=4194304".to_string()];
    let Some(etcd) = start_etcd_with(folder, "http", &flags) else { return };
    let store: Arc<dyn Store> = Arc::new(connect(&etcd));
    reachable(&*store).await;
    let lease = store.grant(Duration::from_secs(600)).await.unwrap();
    let mut error = None;
    for _ in 0..500 {
        // History alone fills it: the key has one value.
        if let Err(why) = store.put("/f/load", "x".repeat(100_000), Some(lease)).await {
            error = Some(why);
            break;
        }
    }
    assert!(matches!(error, Some(StoreError::Full(_))), "{error:?}");
    assert!(store.health().full && !store.health().unreachable);
    // What is there can be read, and stays.
    store.renew(lease).await.unwrap();
    let listing = store.list("/f/").await.unwrap();
    assert_eq!(listing.entries[0].lease, Some(lease));
    let before = store.space().await.unwrap();
    assert!(before.full && before.bytes > 3 << 20, "{before:?}");
    store.compact(listing.revision).await.unwrap();
    store.compact(listing.revision).await.unwrap();
    store.reclaim().await.unwrap();
    let after = store.space().await.unwrap();
    assert!(!after.full && after.bytes < before.bytes / 2, "{before:?} {after:?}");
    store.put("/f/load", "small", Some(lease)).await.unwrap();
    assert_eq!(store.health(), StoreHealth::default());
}
