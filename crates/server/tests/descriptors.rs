//! A server without free file descriptors. Alone in its process, because it takes all of them.
#![allow(missing_docs, dead_code)]

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use server::{Server, ServerOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

mod support;

/// Processor time that this process has used, from its open `/proc/self/stat`.
fn processor_time(stat: &File) -> Duration {
    let mut text = vec![0; 4096];
    let length = stat.read_at(&mut text, 0).unwrap();
    let stat = String::from_utf8_lossy(&text[..length]).into_owned();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_descriptors_the_acceptor_waits_and_then_serves() {
    let limit = Rlimit { current: Some(200), maximum: Some(200) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let options = ServerOptions { http: any, grpc: any, metrics: None, ..Default::default() };
    let server = Server::start(options, Arc::new(support::Echo::default())).await.unwrap();
    let addresses = [server.http_addr.unwrap(), server.grpc_addr.unwrap()];
    let sockets: Vec<_> = addresses.iter().map(|_| TcpSocket::new_v4().unwrap()).collect();
    let stat = File::open("/proc/self/stat").unwrap();
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    let before = processor_time(&stat);
    let mut streams = Vec::new();
    for (socket, address) in sockets.into_iter().zip(addresses) {
        // The kernel accepts it; the process cannot.
        streams.push(socket.connect(address).await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let used = processor_time(&stat) - before;
    assert!(used < Duration::from_millis(500), "{used:?} of processor time in 2 s: it spins");
    taken.clear();
    let request = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    streams[0].write_all(request).await.unwrap();
    let mut reply = String::new();
    let begun = Instant::now();
    let read = tokio::time::timeout(Duration::from_secs(5), streams[0].read_to_string(&mut reply));
    read.await.expect("it does not serve again").unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply} after {:?}", begun.elapsed());
}
