//! `atoll apply` when it is interrupted, when models are missing, and with servers that need TLS
//! and tokens.

#[path = "support/test_machine.rs"]
mod test_machine;

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::test_machine::{PLAN, TestMachine, output_text, ports};

const INTERRUPTED: Option<i32> = Some(130);

impl TestMachine {
    /// Starts a call in a process group of its own, as a shell does, with a slow tool.
    fn start(&self, mut command: Command, slow: &str) -> Child {
        let command = command.env("FAKE_SLOW", slow).process_group(0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn wait_for(&self, what: &str, is_there: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_there() {
            assert!(Instant::now() < until, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for_call(&self, call: &str) {
        self.wait_for(call, || self.calls().iter().any(|one| one.contains(call)));
    }

    /// The list of changes in effect: their kinds, and the processes among them.
    fn journal(&self) -> (Vec<String>, Vec<u64>) {
        let text = std::fs::read_to_string(self.path("state/applied.json")).unwrap();
        let list: Value = serde_json::from_str(&text).unwrap();
        let list = list.as_array().unwrap();
        let kind =
            |done: &Value| done["change"].as_object().unwrap().keys().next().unwrap().clone();
        (list.iter().map(kind).collect(), list.iter().filter_map(|d| d["pid"].as_u64()).collect())
    }

    /// Servers of this machine that run.
    fn servers(&self) -> Vec<u64> {
        let registry = self.path("state").join("registry-").display().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&registry) {
                found.push(pid);
            }
        }
        found.sort_unstable();
        found
    }

    fn undo(&self) -> Output {
        self.command().arg("--undo").output().unwrap()
    }

    fn assert_untouched(&self) {
        assert!(!self.path("state/applied.json").exists() && self.servers().is_empty());
        assert!(!self.path("fake/mig0").exists());
    }
}

fn signal(child: &Child, name: &str, group: bool) {
    let target = format!("{}{}", if group { "-" } else { "" }, child.id());
    let sent = Command::new("kill").args([name, "--", &target]).status().unwrap();
    assert!(sent.success());
}

fn json(path: std::path::PathBuf) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn an_interrupted_call_can_go_on_or_back() {
    let bench = TestMachine::new();
    let port = ports(0);
    let allow = ["--allow-mig-changes"];
    // Ctrl-C reaches the whole group; the tool under way must not end by it.
    let child = bench.start(bench.apply(port, &allow), "-cgi 9:4");
    bench.wait_for_call("-cgi 9:4");
    signal(&child, "-INT", true);
    let output = child.wait_with_output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), INTERRUPTED, "{text}");
    assert!(text.contains("3 of 8 changes") && text.contains("--replace goes on"), "{text}");
    assert!(text.contains("--undo --state"), "{text}");
    assert_eq!(bench.journal().0, ["enable_mig", "create_slice", "create_slice"]);
    assert!(bench.servers().is_empty() && !bench.path("state/servers.json").exists());

    let again = bench.apply(port, &["--allow-mig-changes", "--replace"]).output().unwrap();
    assert!(again.status.success(), "{}", output_text(&again));
    let (kinds, pids) = bench.journal();
    assert_eq!((kinds.len(), pids.len()), (8, 3));
    assert!(json(bench.path("state/servers.json"))["services"]["other"][0]["url"].is_string());
    // Each slice was made once.
    assert_eq!(bench.changes().iter().filter(|call| call.contains("-cgi")).count(), 2);

    // The way back is interrupted, too.
    let mut undo = bench.command();
    undo.arg("--undo");
    let child = bench.start(undo, "-dgi -gi 2");
    bench.wait_for_call("-dgi -gi 2");
    signal(&child, "-TERM", false);
    let output = child.wait_with_output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), INTERRUPTED, "{text}");
    assert!(text.contains("2 changes are still in effect") && text.contains("--undo"), "{text}");
    assert_eq!(bench.journal().0, ["enable_mig", "create_slice"]);
    let undone = bench.undo();
    assert!(undone.status.success(), "{}", output_text(&undone));
    bench.assert_untouched();
    assert_eq!(bench.changes().last().unwrap(), "nvidia-smi -i 0 -mig 0");
}

#[test]
fn servers_that_start_when_a_call_is_interrupted_are_listed_or_gone() {
    let bench = TestMachine::new();
    let port = ports(1);
    let more = ["--partition", "mps"];
    let child = bench.start(bench.apply(port, &more), "");
    bench.wait_for("a server", || !bench.servers().is_empty());
    signal(&child, "-TERM", false);
    let output = child.wait_with_output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), INTERRUPTED, "{text}");
    let (_, mut pids) = bench.journal();
    pids.sort_unstable();
    assert_eq!(bench.servers(), pids, "{text}");
    let again = bench.apply(port, &["--partition", "mps", "--replace"]).output().unwrap();
    assert!(again.status.success(), "{}", output_text(&again));
    assert_eq!(bench.servers().len(), 3);

    // A replacement that is interrupted before the switch leaves the plan before in effect.
    let before = (bench.journal(), json(bench.path("state/servers.json")));
    let other = PLAN.replace("\"batch\": 1, \"processes\": 2", "\"batch\": 4, \"processes\": 2");
    std::fs::write(bench.path("plan.json"), other).unwrap();
    let replace = ["--partition", "mps", "--replace", "--switch-wait-ms", "60000"];
    let child = bench.start(bench.apply(port, &replace), "");
    bench.wait_for("a new server", || bench.servers().len() > 3);
    signal(&child, "-INT", true);
    let output = child.wait_with_output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), INTERRUPTED, "{text}");
    assert!(text.contains("the plan before stays"), "{text}");
    assert_eq!((bench.journal(), json(bench.path("state/servers.json"))), before);
    assert_eq!(bench.servers().len(), 3);
    let undone = bench.undo();
    assert!(undone.status.success(), "{}", output_text(&undone));
    bench.assert_untouched();
}

#[test]
fn models_are_checked_before_anything_changes() {
    let bench = TestMachine::new();
    let refused = |plan: &str, models: &str, named: &[&str]| {
        std::fs::write(bench.path("plan.json"), plan).unwrap();
        for more in [&["--allow-mig-changes"][..], &["--dry-run"], &["--replace", "--dry-run"]] {
            let mut command = bench.command();
            command.arg(bench.path("plan.json")).arg("--model-repository").arg(bench.path(models));
            let output = command.args(["--device", "cpu"]).args(more).output().unwrap();
            let text = output_text(&output);
            assert_eq!(output.status.code(), Some(2), "{text}");
            named.iter().for_each(|part| assert!(text.contains(part), "{part}: {text}"));
        }
        assert_eq!(bench.changes(), Vec::<String>::new());
        bench.assert_untouched();
    };
    let assets = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets");
    std::fs::create_dir(bench.path("models")).unwrap();
    let missing = PLAN.replacen("\"digits\"", "\"absent\"", 1);
    std::fs::copy(assets.join("digits.onnx"), bench.path("models/digits.onnx")).unwrap();
    // MIG was changed and slices were made before the first server did not find it.
    refused(&missing, "models", &["model 'absent'", "nothing was changed"]);
    std::fs::write(bench.path("models/absent.onnx"), "no model").unwrap();
    refused(&missing, "models", &["model 'absent'", "absent.onnx"]);
    std::fs::write(bench.path("models/digits.toml"), "slo_ms = -1\n").unwrap();
    refused(PLAN, "models", &["model 'digits'", "digits.toml"]);
    refused(PLAN, "nowhere", &["model 'digits'", "nowhere"]);
}

#[test]
fn servers_with_tls_and_tokens_are_asked_as_clients_ask_them() {
    let bench = TestMachine::new();
    for (folder, name) in [("server", "planned.test"), ("client", "apply"), ("other", "other")] {
        std::fs::create_dir(bench.path(folder)).unwrap();
        server::tls::write_self_signed(&bench.path(folder), vec![name.to_string()]).unwrap();
    }
    let path = |name: &str| bench.path(name).display().to_string();
    let token = |scope: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_atoll"))
            .args(["token", "create", "--scope", scope, "--tokens", &path("tokens")])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    std::fs::write(bench.path("token"), token("infer")).unwrap();
    std::fs::write(bench.path("wrong"), "0123456789abcdef").unwrap();
    let names = [
        ("--tls-cert", "server/self.crt"),
        ("--tls-key", "server/self.key"),
        ("--tls-client-ca", "client/self.crt"),
        ("--client-cert", "client/self.crt"),
        ("--client-key", "client/self.key"),
        ("--tokens", "tokens"),
    ];
    let flags: Vec<String> =
        names.iter().flat_map(|(flag, file)| [flag.to_string(), path(file)]).collect();
    let call = |more: &[&str]| {
        let mut all: Vec<&str> = flags.iter().map(String::as_str).collect();
        all.extend(["--partition", "mps"]);
        all.extend(more);
        bench.apply(ports(2), &all).output().unwrap()
    };
    let (token, wrong) = (path("token"), path("wrong"));
    let named = ["--tls-name", "planned.test", "--token-file", &token];
    let output = call(&named);
    let text = output_text(&output);
    assert!(output.status.success() && text.contains("numbers at https://127.0.0.1:"), "{text}");
    let list = json(bench.path("state/servers.json"));
    assert!(list["services"]["more"][0]["url"].as_str().unwrap().starts_with("https://"), "{list}");
    // Servers without TLS do not take the place of those with it.
    let plain = bench.apply(ports(2), &["--partition", "mps", "--replace"]).output().unwrap();
    let text = output_text(&plain);
    assert!(plain.status.code() == Some(2) && text.contains("with TLS"), "{text}");
    assert!(bench.undo().status.success());

    let other = path("other/self.crt");
    for (more, what) in [
        (&["--tls-name", "planned.test", "--token-file", &wrong][..], "refuses the token"),
        (&["--tls-name", "another.test", "--start-timeout-secs", "2"], "certificate not valid"),
        (
            &["--tls-name", "planned.test", "--ca", &other, "--start-timeout-secs", "2"],
            "invalid peer certificate",
        ),
    ] {
        let output = call(more);
        let text = output_text(&output);
        assert!(!output.status.success() && text.contains(what), "{more:?}: {text}");
        bench.assert_untouched();
    }
    // What cannot be read is found before anything starts.
    for (more, what) in [
        (&["--ca", &path("absent")][..], "absent"),
        (&["--token-file", &path("absent")], "absent"),
        (&["--ca", &token], "no certificate"),
    ] {
        let calls = bench.changes().len();
        let output = call(more);
        let text = output_text(&output);
        assert!(output.status.code() == Some(2) && text.contains(what), "{more:?}: {text}");
        assert_eq!(bench.changes().len(), calls);
    }
}

#[test]
fn flags_beside_undo_are_refused() {
    let bench = TestMachine::new();
    for flag in [&["--allow-mig-changes"][..], &["--partition", "mps"], &["--gpus", "1"]] {
        let output = bench.command().arg("--undo").args(flag).output().unwrap();
        let text = output_text(&output);
        assert!(output.status.code() == Some(2) && text.contains("with --undo"), "{text}");
    }
    // Ports beyond the last one were found out after MIG was changed.
    for more in ["--allow-mig-changes", "--dry-run"] {
        let output = bench.apply(65_530, &[more]).output().unwrap();
        let text = output_text(&output);
        assert!(output.status.code() == Some(2) && text.contains("ports for 2"), "{text}");
    }
    assert_eq!(bench.changes(), Vec::<String>::new());
    let output = bench.apply(9000, &["--switch-wait-ms", "5", "--dry-run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", output_text(&output));
}
