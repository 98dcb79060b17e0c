//! Conformance of every store; that of a cluster against a real etcd.
#![allow(missing_docs)]

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base::MonotonicClock;
use cluster::store::etcd::{EtcdAccess, EtcdStore};
use cluster::store::memory::MemoryStore;
use cluster::store::{Store, conformance, mirror};

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

fn spawn(folder: &std::path::Path, port: u16, peer: u16) -> std::io::Result<Child> {
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
    Command::new("etcd")
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
    let folder = tempfile::tempdir().unwrap();
    let (port, peer) = (free_port(), free_port());
    match spawn(folder.path(), port, peer) {
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
    etcd.process = spawn(etcd.folder.path(), etcd.port, etcd.peer).unwrap();
    reachable(&*store).await;
    store.put("/m/b", "2", None).await.unwrap();
    let wait = entries.wait_for(|map| map.len() == 2);
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap().unwrap();
}
