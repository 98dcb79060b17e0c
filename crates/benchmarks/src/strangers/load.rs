//! The clients: real time at a fixed rate, and strangers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use assembly::sample_inputs;
use base::Random;
use model::{LaunchPlan, Tensor};

use super::stalls::SlowRequest;
use crate::rest_client::{Connection, HttpReply, inference, plain};

/// How far a reply may differ from that of the same inputs, relative to its largest value: other
/// batches use other kernels.
const TOLERANCE: f32 = 0.05;

/// Reported failures, at most.
const MAX_FAILURES: usize = 10;

/// Before a request is due, a client polls for this long instead of sleeping.
const POLLED: Duration = Duration::from_micros(200);

/// A network with its file.
pub(super) struct Network {
    pub(super) name: String,
    pub(super) file: PathBuf,
    pub(super) plan: LaunchPlan,
}

/// What a client saw.
#[derive(Default)]
pub(super) struct ClientRecord {
    /// Of real time, in milliseconds.
    pub(super) latencies_ms: Vec<f64>,
    /// Counts by what was done.
    pub(super) actions: BTreeMap<&'static str, u64>,
    /// Replies that were not as they must be.
    pub(super) failed: u64,
    pub(super) failures: Vec<String>,
}

impl ClientRecord {
    fn count(&mut self, action: &'static str) {
        *self.actions.entry(action).or_default() += 1;
    }

    fn fail(&mut self, why: String) {
        self.failed += 1;
        if self.failures.len() < MAX_FAILURES {
            self.failures.push(why);
        }
    }

    pub(super) fn add(&mut self, other: ClientRecord) {
        self.latencies_ms.extend(other.latencies_ms);
        for (action, count) in other.actions {
            *self.actions.entry(action).or_default() += count;
        }
        self.failed += other.failed;
        let room = MAX_FAILURES.saturating_sub(self.failures.len());
        self.failures.extend(other.failures.into_iter().take(room));
    }
}

/// Whether two replies have the same outputs.
fn agree(a: &HttpReply, b: &HttpReply) -> bool {
    let (Some((head, left)), Some((other, right))) = (a.parts(), b.parts()) else { return false };
    let floats = |head: &serde_json::Value| {
        let outputs = head["outputs"].as_array().cloned().unwrap_or_default();
        outputs.iter().all(|output| output["datatype"] == "FP32")
    };
    if left.len() != right.len() || !floats(&head) || !floats(&other) {
        return left == right;
    }
    let number = |four: &[u8]| f32::from_le_bytes(four.try_into().unwrap_or_default());
    let pairs = || left.chunks_exact(4).map(number).zip(right.chunks_exact(4).map(number));
    let largest = pairs().fold(1e-6, |largest: f32, (a, _)| largest.max(a.abs()));
    pairs().all(|(a, b)| a.to_bits() == b.to_bits() || (a - b).abs() <= TOLERANCE * largest)
}

/// What a real-time client does.
pub(super) struct RealTimeLoad {
    /// Requests a second.
    pub(super) rate: f64,
    pub(super) span: Duration,
    pub(super) seed: u64,
    /// Who looks into requests that take longer than so many milliseconds.
    pub(super) slow: Option<(f64, Sender<SlowRequest>)>,
}

/// A real-time client: requests due at a fixed rate, timed from when they are due.
pub(super) fn real_time(
    address: SocketAddr,
    network: &Network,
    load: &RealTimeLoad,
) -> Result<ClientRecord, String> {
    let RealTimeLoad { rate, span, seed, slow } = load;
    let mut random = Random::new(*seed);
    let bindings = sample_inputs::Bindings::default();
    let inputs = sample_inputs::random_inputs(&network.plan, &bindings, &mut random)?;
    let message = inference(&network.name, &network.plan, &inputs, "rt")?;
    let mut connection = Connection::new(address);
    let expected = connection.exchange(&message)?;
    if expected.status != 200 {
        return Err(format!("{}: {}", network.name, expected.text()));
    }
    for _ in 0..20 {
        connection.exchange(&message)?;
    }
    let mut record = ClientRecord::default();
    let began = Instant::now();
    for number in 0.. {
        let due = began + Duration::from_secs_f64(f64::from(number) / rate);
        if due.duration_since(began) >= *span {
            break;
        }
        wait_until(due);
        let reply = connection.exchange(&message);
        let latency_ms = due.elapsed().as_secs_f64() * 1e3;
        record.latencies_ms.push(latency_ms);
        if let Some((from_ms, watch)) = slow
            && latency_ms > *from_ms
        {
            // Nobody looks any more when the measurement ends.
            let _ = watch.send(SlowRequest { at: Instant::now(), latency_ms });
        }
        match reply {
            Ok(reply) if reply.status == 200 && agree(&expected, &reply) => {}
            Ok(reply) if reply.status == 200 => {
                record.fail(format!("{}: a wrong reply", network.name));
            }
            Ok(reply) => record.fail(format!("{}: {}", network.name, reply.text())),
            Err(why) => record.fail(format!("{}: {why}", network.name)),
        }
    }
    Ok(record)
}

fn wait_until(due: Instant) {
    let left = due.saturating_duration_since(Instant::now());
    if left > POLLED {
        std::thread::sleep(left - POLLED);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}

/// A client with a best-effort model of its own.
pub(super) struct Stranger<'a> {
    connection: Connection,
    /// The network it is a copy of.
    network: &'a Network,
    /// The name of its own model, and its folder in the repository.
    name: String,
    folder: PathBuf,
    version: u32,
    random: Random,
    record: ClientRecord,
}

impl<'a> Stranger<'a> {
    /// Stranger `number`, whose model is a copy of `network`.
    pub(super) fn new(
        address: SocketAddr,
        repository: &Path,
        network: &'a Network,
        (number, seed): (usize, u64),
    ) -> Stranger<'a> {
        let name = format!("stranger{number}_{}", network.name);
        Stranger {
            connection: Connection::new(address),
            network,
            folder: repository.join(&name),
            name,
            version: 0,
            random: Random::new(seed.wrapping_mul(1_000).wrapping_add(number as u64)),
            record: ClientRecord::default(),
        }
    }

    /// Acts until `end` is set.
    pub(super) fn run(mut self, end: &AtomicBool) -> ClientRecord {
        self.update();
        while !end.load(Ordering::Relaxed) {
            match self.random.below(100) {
                0..78 => self.infer(),
                78..86 => self.cancel(),
                86..90 => self.reload(),
                90..93 => self.update(),
                93..97 => self.send_wrong(),
                _ => {
                    self.record.count("pauses");
                    let pause = 100 + self.random.below(400);
                    std::thread::sleep(Duration::from_millis(pause));
                }
            }
        }
        self.record
    }

    /// Inputs of sizes that nobody asked for.
    fn inputs(&mut self) -> Result<Vec<Tensor>, String> {
        let plan = &self.network.plan;
        let batch = sample_inputs::batch_symbol(plan);
        let text = plan.inputs.iter().all(|id| !plan.value(*id).dtype.is_float());
        let mut bindings = sample_inputs::Bindings::default();
        for symbol in sample_inputs::symbols(plan) {
            let size = match () {
                () if batch.as_deref() == Some(symbol) => batch_size(&mut self.random),
                () if text => tokens(&mut self.random),
                () => 32 * (3 + self.random.below(10) as usize),
            };
            bindings.insert(symbol.to_string(), size);
        }
        sample_inputs::random_inputs(plan, &bindings, &mut self.random)
    }

    fn message(&mut self) -> Result<Vec<u8>, String> {
        let inputs = self.inputs()?;
        inference(&self.name, &self.network.plan, &inputs, "be")
    }

    /// One request; one in ten is sent twice, and both replies must agree.
    fn infer(&mut self) {
        self.record.count("requests");
        let twice = self.random.below(10) == 0;
        let answered = self.message().and_then(|message| {
            let reply = self.connection.exchange(&message)?;
            if reply.status != 200 {
                return Err(reply.text());
            }
            if twice && !agree(&reply, &self.connection.exchange(&message)?) {
                return Err("two replies to one request differ".to_string());
            }
            Ok(())
        });
        if let Err(why) = answered {
            self.record.fail(format!("{}: {why}", self.name));
        }
    }

    /// Closes the connection before the reply.
    fn cancel(&mut self) {
        self.record.count("cancelled");
        let sent = self.message().and_then(|message| self.connection.send(&message));
        if let Err(why) = sent {
            self.record.fail(format!("{}: {why}", self.name));
        }
        std::thread::sleep(Duration::from_micros(self.random.below(2_000)));
        self.connection.close();
    }

    fn control(&mut self, what: &'static str) {
        let path = format!("/v2/repository/models/{}/{what}", self.name);
        match self.connection.exchange(&plain("POST", &path)) {
            Ok(reply) if reply.status == 200 => {}
            Ok(reply) => self.record.fail(format!("{}: {what}: {}", self.name, reply.text())),
            Err(why) => self.record.fail(format!("{}: {what}: {why}", self.name)),
        }
    }

    fn reload(&mut self) {
        self.record.count("reloads");
        self.control("unload");
        let pause = self.random.below(200);
        std::thread::sleep(Duration::from_millis(pause));
        self.control("load");
    }

    /// Adds a version of its model and loads it.
    fn update(&mut self) {
        self.record.count("updates");
        self.version += 1;
        let folder = self.folder.join(self.version.to_string());
        let made = std::fs::create_dir_all(&folder).and_then(|()| {
            std::os::unix::fs::symlink(&self.network.file, folder.join("model.onnx"))
        });
        match made {
            Ok(()) => self.control("load"),
            Err(err) => self.record.fail(format!("{}: {err}", folder.display())),
        }
    }

    /// A request that must be refused: an input is missing.
    fn send_wrong(&mut self) {
        self.record.count("wrong_requests");
        let body = r#"{"inputs":[{"name":"no such","shape":[1],"datatype":"FP32","data":[1]}]}"#;
        let head = format!(
            "POST /v2/models/{}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
            self.name,
            body.len()
        );
        match self.connection.exchange(format!("{head}{body}").as_bytes()) {
            Ok(reply) if reply.status == 400 => {}
            Ok(reply) => self.record.fail(format!("{}: not refused: {}", self.name, reply.text())),
            Err(why) => self.record.fail(format!("{}: {why}", self.name)),
        }
    }
}

fn batch_size(random: &mut Random) -> usize {
    match random.below(10) {
        0..6 => 1,
        6..9 => 2 + random.below(3) as usize,
        _ => 5 + random.below(4) as usize,
    }
}

/// Tokens of a sentence: log-normal with a median of 14 and a sigma of 0.75, from 3 to 200.
fn tokens(random: &mut Random) -> usize {
    // A normal number from two uniform ones (Box and Muller).
    let (radius, angle) = ((1.0 - random.unit_f64()).max(1e-12), random.unit_f64());
    let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
    (14.0 * (0.75 * normal).exp()).round().clamp(3.0, 200.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_as_long_as_the_help_says() {
        let mut random = Random::new(3);
        let mut lengths: Vec<usize> = (0..20_000).map(|_| tokens(&mut random)).collect();
        lengths.sort_unstable();
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
        assert!((17.5..19.5).contains(&mean), "{mean}");
        assert!((13..=15).contains(&lengths[10_000]), "{}", lengths[10_000]);
        assert!(lengths[0] >= 3 && lengths[19_999] <= 200);
        let ones = (0..10_000).filter(|_| batch_size(&mut random) == 1).count();
        assert!((5_700..6_300).contains(&ones), "{ones}");
    }
}
