//! `atoll bench server` with a real server on the CPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/digits.onnx")
}

fn bench(model: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_atoll"));
    command.env("ATOLL_LOG", "warn").args(["bench", "server", "--threads", "1", "--model"]);
    command
        .arg(model)
        .args(["--clients", "6", "--connections", "2", "--engine-threads", "1"])
        .args(more);
    command
}

fn output_text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn engine_and_server_are_measured_alternately() {
    let short = ["--seconds", "0.5", "--rounds", "3", "--warm-secs", "0", "--json"];
    let output = bench(&model(), &short).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["inputs"], serde_json::json!(["FP32[1, 1, 8, 8]"]));
    let rounds = report["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 3);
    // A machine that stalls may reply nothing in one round, but not in all of them.
    let mut replied = [0u32; 3];
    for round in rounds {
        let servers = round["servers"].as_array().unwrap();
        for (one, replied) in servers.iter().chain([&round["engine"]]).zip(&mut replied) {
            assert_eq!(one["wrong"], 0, "{one}");
            assert!(one["mean_batch"].as_f64().is_none_or(|batch| batch >= 1.0), "{one}");
            let checked = one["checked"].as_u64().unwrap();
            *replied += u32::from(one["rps"].as_f64().unwrap() > 0.0 && checked > 0);
        }
        // Ten numbers are the reply to 64, plus their description.
        let bytes = |wire: usize, field: &str| servers[wire][field].as_u64().unwrap();
        for wire in [0, 1] {
            assert!((256..1024).contains(&bytes(wire, "request_bytes")), "{round}");
            assert!((40..1024).contains(&bytes(wire, "answer_bytes")), "{round}");
        }
    }
    assert!(replied.iter().all(|rounds| *rounds > 0), "{report}");
    let names: Vec<_> =
        report["summaries"].as_array().unwrap().iter().map(|s| &s["name"]).collect();
    assert_eq!(names, ["engine", "gRPC", "REST"]);
}

#[test]
fn numbers_of_viewers_are_measured_alternately() {
    let short = ["--seconds", "0.5", "--rounds", "2", "--warm-secs", "0", "--protocols", "rest"];
    let viewers = ["--viewers", "0,1,5", "--json"];
    let output = bench(&model(), &[&short[..], &viewers].concat()).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let summaries = report["summaries"].as_array().unwrap();
    let names: Vec<_> = summaries.iter().map(|s| &s["name"]).collect();
    assert_eq!(names, ["engine", "REST, 0 viewers", "REST, 1 viewer", "REST, 5 viewers"]);
    assert!(summaries[1].get("of_first_pct").is_none(), "{report}");
    for one in &summaries[2..] {
        for share in ["of_first_pct", "p99_of_first_pct"] {
            assert!(one[share].as_f64().is_some_and(|share| share > 0.0), "{one}");
        }
    }
    for round in report["rounds"].as_array().unwrap() {
        let bytes = |index: usize| round["servers"][index]["viewer_bytes"].as_u64();
        assert_eq!(bytes(0), None, "{round}");
        // Each of them read frames while requests were sent.
        assert!([1, 2].iter().all(|index| bytes(*index).is_some_and(|bytes| bytes > 0)), "{round}");
    }
    let many = bench(&model(), &["--viewers", "17"]).output().unwrap();
    assert_eq!(many.status.code(), Some(2), "{}", output_text(&many));
}

#[test]
fn impossible_measurements_are_refused() {
    let missing = bench(Path::new("missing.onnx"), &[]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2), "{}", output_text(&missing));
    assert!(output_text(&missing).contains("missing.onnx"), "{}", output_text(&missing));
    let cluster = bench(&model(), &["--", "--cluster"]).output().unwrap();
    assert!(output_text(&cluster).contains("without --cluster"), "{}", output_text(&cluster));
    // A server that does not start is no hang: its error is reported.
    let fails = bench(&model(), &["--", "--http-port", "99999"]).output().unwrap();
    assert_eq!(fails.status.code(), Some(2), "{}", output_text(&fails));
}

#[test]
fn real_time_is_measured_beside_strangers() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["digits", "other"] {
        std::fs::copy(model(), folder.path().join(format!("{name}.onnx"))).unwrap();
    }
    let strangers = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_atoll"));
        command.env("ATOLL_LOG", "warn").args(["bench", "strangers", "--threads", "1", "--models"]);
        command.arg(folder.path()).args(more).output().unwrap()
    };
    let short = ["--seconds", "2", "--alone-seconds", "0.5", "--rate", "20", "--strangers", "2"];
    let output = strangers(&[&["--rt", "digits", "--json"], &short[..]].concat());
    assert!(output.status.success(), "{}", output_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["real_time_failed"], 0, "{report}");
    assert_eq!(report["strangers_failed"], 0, "{report}");
    assert_eq!(report["beside"]["count"], 40, "every request that was due is timed");
    assert_eq!(report["alone"]["count"], 20, "{report}");
    assert!(report["actions"]["requests"].as_u64().unwrap() > 0, "{report}");
    let unknown = strangers(&["--rt", "nothing"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", output_text(&unknown));
    let nobody = strangers(&["--rt", "digits,other"]);
    assert!(output_text(&nobody).contains("--be"), "{}", output_text(&nobody));
}

#[test]
fn the_server_ends_with_its_parent() {
    let long = ["--seconds", "60", "--warm-secs", "0", "--protocols", "grpc"];
    let mut owner =
        bench(&model(), &long).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let child = loop {
        if let Some(child) = child_of(owner.id()) {
            break child;
        }
        assert!(Instant::now() < until, "no server was started");
        std::thread::sleep(Duration::from_millis(10));
    };
    // After a kill it cannot clean up.
    owner.kill().unwrap();
    owner.wait().unwrap();
    while is_alive(child) {
        assert!(Instant::now() < until, "the server is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// State and parent of a process, if there is one.
fn state_of(pid: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_string(), fields.next()?.parse().ok()?))
}

fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|(state, _)| state != "Z")
}

fn child_of(owner: u32) -> Option<u32> {
    let all = std::fs::read_dir("/proc").ok()?;
    let pids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().find(|pid| state_of(*pid).is_some_and(|(_, parent)| parent == owner))
}
