//! `atoll apply` with fake NVIDIA tools that record their calls, and with real servers.

#[path = "support/test_machine.rs"]
mod test_machine;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::test_machine::{PLAN, TestMachine, output_text, ports};

#[test]
fn a_plan_is_applied_and_undone() {
    let bench = TestMachine::new();
    let port = ports(0);
    let output = bench.apply(port, &["--allow-mig-changes"]).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(
        bench.changes(),
        [
            "nvidia-smi -i 0 -mig 1",
            "nvidia-smi mig -i 0 -cgi 5:0 -C",
            "nvidia-smi mig -i 0 -cgi 9:4 -C",
            "mps -d MIG-0-1",
            "mps -d MIG-0-2",
        ]
    );
    let text = output_text(&output);
    assert_eq!(text.matches("numbers at http").count(), 2, "{text}");
    assert!(text.contains("more, other at http") && text.contains("50 % of the threads"), "{text}");
    let journal = std::fs::read_to_string(bench.path("state/applied.json")).unwrap();
    let journal: serde_json::Value = serde_json::from_str(&journal).unwrap();
    let pids: Vec<u64> =
        journal.as_array().unwrap().iter().filter_map(|done| done["pid"].as_u64()).collect();
    assert_eq!(pids.len(), 3);
    let environment = std::fs::read(format!("/proc/{}/environ", pids[1])).unwrap();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    for wanted in
        ["CUDA_VISIBLE_DEVICES=MIG-0-1\0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50\0", "mps-gpu0-0\0"]
    {
        assert!(environment.contains(wanted), "{wanted} in {environment}");
    }

    let again = bench.apply(port, &["--allow-mig-changes"]).output().unwrap();
    assert!(
        !again.status.success() && output_text(&again).contains("MIG devices"),
        "{}",
        output_text(&again)
    );

    // Another batch needs other servers, on the slices that are there.
    let replaced = |plan: String| {
        std::fs::write(bench.path("plan.json"), plan).unwrap();
        output_text(&bench.apply(port, &["--replace", "--dry-run"]).output().unwrap())
    };
    let text =
        replaced(PLAN.replace("\"batch\": 1, \"processes\": 2", "\"batch\": 4, \"processes\": 2"));
    assert!(text.contains("servers.json") && !text.contains("-cgi"), "{text}");
    assert_eq!(text.matches("# undo server").count(), 2, "{text}");
    // A slice that takes the place of both leaves their services without a server.
    let text =
        replaced(PLAN.replace(
            "\"size\": 4, \"profile\": \"4g.40gb\"",
            "\"size\": 3, \"profile\": \"3g.40gb\"",
        ));
    assert!(text.contains("'numbers' would have no server"), "{text}");
    assert_eq!(bench.changes().len(), 5);

    let undone = bench.command().arg("--undo").output().unwrap();
    assert!(undone.status.success(), "{}", output_text(&undone));
    assert!(!bench.path("state/servers.json").exists());
    assert_eq!(
        bench.changes()[5..],
        [
            "mps quit",
            "mps quit",
            "nvidia-smi mig -i 0 -dci -gi 2",
            "nvidia-smi mig -i 0 -dgi -gi 2",
            "nvidia-smi mig -i 0 -dci -gi 1",
            "nvidia-smi mig -i 0 -dgi -gi 1",
            "nvidia-smi -i 0 -mig 0",
        ]
    );
    assert!(!bench.path("state/applied.json").exists());
    let alive =
        |pid: &u64| !std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().is_empty();
    assert!(!pids.iter().any(alive));
}

#[test]
fn a_dry_run_and_a_missing_consent_change_nothing() {
    let bench = TestMachine::new();
    let dry = bench.apply(9000, &["--dry-run"]).output().unwrap();
    let text = output_text(&dry);
    assert!(dry.status.success() && text.contains("nvidia-smi mig -i 0 -cgi 9:4 -C"), "{text}");
    assert!(
        text.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50") && text.contains("nothing was done")
    );
    let bare = bench.apply(9000, &[]).output().unwrap();
    assert_eq!(bare.status.code(), Some(2));
    assert!(output_text(&bare).contains("--allow-mig-changes"), "{}", output_text(&bare));
    assert_eq!(bench.changes(), Vec::<String>::new());
}

#[test]
fn a_gpu_with_running_work_or_of_another_kind_is_refused() {
    let bench = TestMachine::new();
    let refused = |more: &[&str], apps: &str| {
        let output = bench.apply(9000, more).env("FAKE_APPS", apps).output().unwrap();
        assert!(!output.status.success(), "{}", output_text(&output));
        output_text(&output)
    };
    let app = "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, 4711, python3";
    let allow = "--allow-mig-changes";
    assert!(refused(&[allow], app).contains("process 4711 (python3)"));
    assert!(refused(&["--partition", "mps"], app).contains("process 4711"));
    assert!(refused(&[allow, "--gpus", "7"], "").contains("no gpu 7"));
    assert!(refused(&[allow, "--gpu", "h100-80gb"], "").contains("plan is for h100-80gb"));
    assert_eq!(bench.changes(), Vec::<String>::new());
    // Work on the other GPU does not matter.
    let other = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd, 4711, python3";
    let dry = bench.apply(9000, &["--dry-run"]).env("FAKE_APPS", other).output().unwrap();
    assert!(output_text(&dry).contains("nothing was done"), "{}", output_text(&dry));
}

#[test]
fn what_was_done_before_a_failure_is_undone() {
    let fails = [
        ("FAKE_FAIL", "-cgi 9:4", "Insufficient Resources"),
        ("FAKE_PENDING", "1", "pending enable state"),
        ("ATOLL_THREADS", "not-a-number", "the server of numbers ended"),
    ];
    for (test, (name, value, message)) in fails.into_iter().enumerate() {
        let bench = TestMachine::new();
        let port = ports(1 + test as u16 % 2);
        let mut command = bench.apply(port, &["--allow-mig-changes"]);
        let output = command.env(name, value).output().unwrap();
        assert!(
            !output.status.success() && output_text(&output).contains(message),
            "{}",
            output_text(&output)
        );
        let left = |gpu: &str| std::fs::read_dir(bench.path(gpu)).map_or(0, Iterator::count);
        assert_eq!(left("fake/gpu0"), 0, "{name}");
        assert!(!bench.path("fake/mig0").exists(), "{name}");
        assert!(!bench.path("state/mps-gpu0-0/control").exists(), "{name}");
        assert!(!bench.path("state/applied.json").exists(), "{name}");
        assert_eq!(bench.changes().last().unwrap(), "nvidia-smi -i 0 -mig 0", "{name}");
    }
}

#[test]
fn without_mig_a_slice_is_a_share_of_threads() {
    let bench = TestMachine::new();
    let output = bench.apply(ports(0) + 24, &["--partition", "mps"]).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let text = output_text(&output);
    assert!(text.contains("28 % of the threads") && text.contains("42 % of the threads"), "{text}");
    assert_eq!(bench.changes(), ["mps -d GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"]);
    let undone = bench.command().arg("--undo").output().unwrap();
    assert!(undone.status.success(), "{}", output_text(&undone));
    assert_eq!(bench.changes().last().unwrap(), "mps quit");
}

/// A plan over three kinds as `atoll plan --stock --json` writes it, for services like those of
/// `PLAN`; `flags` say what may fail.
fn mix(bench: &TestMachine, flags: &[&str]) -> serde_json::Value {
    let profiles = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                    digits,1,1,1,100,10\ndigits,2,1,1,210,5\ndigits,3,1,1,320,4\n\
                    digits,4,1,1,430,3\ndigits,7,1,1,700,2\n";
    let service = |name: &str, rate: u32, gpu: &str| {
        format!(
            "[[service]]\nname = '{name}'\nmodel = 'digits'\nrate = {rate}\nslo_ms = 200\n\
             gpus = ['{gpu}']\n"
        )
    };
    let services = service("numbers", 90, "a100-80gb") + &service("more", 20, "l4-24gb");
    let stock = "[[offer]]\ngpu = 'l4-24gb'\nprice = 0.4\n[[offer]]\ngpu = 'a100-80gb'\n\
                 price = 1.8\n[[offer]]\ngpu = 'h100-80gb'\nprice = 3.2\n";
    for (name, text) in [("p.csv", profiles), ("s.toml", &services), ("stock.toml", stock)] {
        std::fs::write(bench.path(name), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_atoll"))
        .current_dir(bench.root.path())
        .args(["plan", "--services", "s.toml", "--profiles", "p.csv", "--stock", "stock.toml"])
        .args(flags)
        .arg("--json")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    std::fs::write(bench.path("plan.json"), &output.stdout).unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn of_a_mix_the_part_of_this_machine_s_gpus_is_applied() {
    let bench = TestMachine::new();
    let plan = mix(&bench, &["--survive", "gpu"]);
    let gpus = |kind: usize| plan["kinds"][kind]["gpus"].as_u64().unwrap();
    assert_eq!((gpus(0), gpus(1), gpus(2)), (2, 2, 0), "{plan}");
    // The GPUs here are A100s: theirs is the part with "numbers", and no other.
    let whole = bench.apply(9000, &["--dry-run", "--gpus", "0,1"]).output().unwrap();
    let text = output_text(&whole);
    assert!(whole.status.success() && text.contains("nvidia-smi -i 1 -mig 1"), "{text}");
    assert!(text.contains("not for this machine: 2 x l4-24gb (gpus 0-1 of the plan)"), "{text}");
    let json = bench.apply(9000, &["--dry-run", "--json", "--plan-gpus", "1"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["gpu_kind"], "a100-80gb");
    assert_eq!(
        (&json["elsewhere"][0]["gpus"], &json["elsewhere"][1]["count"]),
        (&"0".into(), &2.into())
    );
    let refused = |more: &[&str]| {
        let output = bench.apply(9000, more).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", output_text(&output));
        output_text(&output)
    };
    assert!(refused(&["--dry-run"]).contains("--plan-gpus"));
    assert!(refused(&["--dry-run", "--plan-gpus", "7"]).contains("it uses 0-1"));
    let text = refused(&["--dry-run", "--gpu", "b200-180gb"]);
    assert!(text.contains("not in it") && text.contains("2 x l4-24gb"), "{text}");
    assert_eq!(bench.changes(), Vec::<String>::new());

    let port = ports(0) + 36;
    let flags = ["--allow-mig-changes", "--gpus", "1", "--plan-gpus", "0"];
    let output = bench.apply(port, &flags).output().unwrap();
    let text = output_text(&output);
    assert!(output.status.success() && text.contains("numbers at http"), "{text}");
    assert!(text.contains("not for this machine: 1 x a100-80gb (gpus 1 of the plan)"), "{text}");
    assert_eq!(bench.changes()[0], "nvidia-smi -i 1 -mig 1");
    assert!(bench.path("state/servers.json").exists());
    let undone = bench.command().arg("--undo").output().unwrap();
    assert!(undone.status.success(), "{}", output_text(&undone));
    assert_eq!(bench.changes().last().unwrap(), "nvidia-smi -i 1 -mig 0");
    assert!(!bench.path("state/applied.json").exists());
}

#[test]
fn a_machine_of_a_mix_takes_the_gpus_of_one_planned_machine() {
    let bench = TestMachine::new();
    let plan = mix(&bench, &["--survive", "machine", "--machine-gpus", "2"]);
    // GPU 0 serves and GPU 2 is spare: on one machine they would fail together.
    let used = plan["kinds"][1]["plan"].as_array().unwrap();
    assert_eq!(used.len(), 3, "{plan}");
    let output = bench.apply(9000, &["--dry-run", "--gpus", "0,1"]).output().unwrap();
    let text = output_text(&output);
    assert!(output.status.code() == Some(2) && text.contains("such as 0-1"), "{text}");
    let output = bench.apply(9000, &["--dry-run", "--plan-gpus", "2"]).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
}

/// The services of `PLAN` in other slices, with other batches and processes.
const OTHER_PLAN: &str = r#"{
  "gpu_kind": "a100-80gb", "gpus": 1, "lower_bound": 1, "seconds": 0.0,
  "plan": [{ "slices": [
    { "start": 0, "size": 4, "profile": "4g.40gb", "cycle_ms": 30.0, "services": [
      { "name": "more", "model": "digits", "batch": 4, "processes": 2, "rate": 10.0 },
      { "name": "other", "model": "digits", "batch": 2, "processes": 1, "rate": 10.0 }] },
    { "start": 4, "size": 3, "profile": "3g.40gb", "services": [
      { "name": "numbers", "model": "digits", "batch": 4, "processes": 1, "rate": 10.0 }] }
  ] }]
}"#;

/// A request: when it began, how long it took, and what went wrong.
type Sent = (Instant, Duration, Option<String>);

/// Sends requests of one service until `stop`, each to a server of the list as it is then.
fn send_requests(list: &Path, service: &str, stop: &AtomicBool) -> Vec<Sent> {
    let pixels = vec!["0.5"; 64].join(",");
    let body = format!(
        r#"{{"inputs":[{{"name":"image","shape":[1,1,8,8],"datatype":"FP32","data":[{pixels}]}}]}}"#
    );
    let mut sent = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let fault = send(list, service, sent.len(), &body).err();
        sent.push((begin, begin.elapsed(), fault));
        std::thread::sleep(Duration::from_millis(3));
    }
    sent
}

fn send(list: &Path, service: &str, number: usize, body: &str) -> Result<(), String> {
    let text = std::fs::read_to_string(list).map_err(|error| error.to_string())?;
    let list: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let servers = list["services"][service].as_array().ok_or("no such service")?;
    let server = &servers[number % servers.len()];
    let (url, model) = (server["url"].as_str().unwrap(), server["model"].as_str().unwrap());
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let request = format!("{head}{body}");
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).map_err(|error| error.to_string())?;
    match reply.starts_with("HTTP/1.1 200") && reply.contains("logits") {
        true => Ok(()),
        false => Err(reply),
    }
}

fn percentile_ms(sent: &[&Sent], share: f64) -> f64 {
    let mut times: Vec<Duration> = sent.iter().map(|(_, time, _)| *time).collect();
    times.sort_unstable();
    let index = (times.len() as f64 * share) as usize;
    times.get(index.min(times.len().saturating_sub(1))).map_or(0.0, |t| t.as_secs_f64() * 1e3)
}

/// `ATOLL_TEST_REPLACEMENTS` sets how often; with `--nocapture` the test prints the latencies.
#[test]
fn a_plan_is_replaced_under_load_without_a_lost_request() {
    let count: usize =
        std::env::var("ATOLL_TEST_REPLACEMENTS").map_or(2, |count| count.parse().unwrap());
    let bench = TestMachine::new();
    let port = 30_000 + (std::process::id() % 100) as u16 * 20;
    let more = ["--partition", "mps"];
    let output = bench.apply(port, &more).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let (list, stop) = (bench.path("state/servers.json"), AtomicBool::new(false));
    let mut changes: Vec<(Instant, Instant)> = Vec::new();
    let sent: Vec<Sent> = std::thread::scope(|scope| {
        let (list, stop) = (&list, &stop);
        let clients = ["numbers", "more", "other"]
            .map(|service| scope.spawn(move || send_requests(list, service, stop)));
        for change in 0..count {
            std::thread::sleep(Duration::from_millis(200));
            let plan = if change % 2 == 0 { OTHER_PLAN } else { PLAN };
            std::fs::write(bench.path("plan.json"), plan).unwrap();
            let begin = Instant::now();
            let output = bench
                .apply(port, &[&more[..], &["--replace", "--switch-wait-ms", "150"]].concat())
                .output()
                .unwrap();
            changes.push((begin, Instant::now()));
            if !output.status.success() {
                stop.store(true, Ordering::Relaxed);
                panic!("{}", output_text(&output));
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let undone = bench.command().arg("--undo").output().unwrap();
    assert!(undone.status.success(), "{}", output_text(&undone));
    let lost: Vec<&String> = sent.iter().filter_map(|(_, _, fault)| fault.as_ref()).collect();
    let during = |(begin, time, _): &&Sent| {
        changes.iter().any(|(from, to)| *begin < *to && *begin + *time > *from)
    };
    let (within, between): (Vec<&Sent>, Vec<&Sent>) = sent.iter().partition(during);
    println!(
        "{count} replacements, {} requests, {} lost; p50/p99 during changes {:.1}/{:.1} ms ({} \
         requests), between them {:.1}/{:.1} ms ({})",
        sent.len(),
        lost.len(),
        percentile_ms(&within, 0.5),
        percentile_ms(&within, 0.99),
        within.len(),
        percentile_ms(&between, 0.5),
        percentile_ms(&between, 0.99),
        between.len()
    );
    assert!(lost.is_empty(), "{} of {} lost: {:?}", lost.len(), sent.len(), lost.first());
    assert!(within.len() > 10 * count && !between.is_empty());
    // What is in effect is one plan, not both.
    assert_eq!(bench.changes().iter().filter(|call| call.contains("mps -d")).count(), 1);
}
