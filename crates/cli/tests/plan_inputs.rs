//! `atoll plan` by its binary: every bad input ends with exit code 2 and names its place, and no
//! flag is ignored.

use std::process::{Command, Output};

const PROFILES: &str = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                        net,1,4,1,100,40\nnet,2,4,1,210,19\nnet,7,4,1,700,6\n";
const SERVICES: &str = "[[service]]\nname = \"a\"\nmodel = \"net\"\nrate = 150\nslo_ms = 200\n\
     [[service]]\nname = \"b\"\nmodel = \"net\"\nrate = 90\nslo_ms = 300\n";
const STOCK: &str = "[[offer]]\ngpu = 'a100-80gb'\nprice = 1.8\n[[offer]]\ngpu = 'h100-80gb'\n\
                     price = 3.2\ncount = 4\n";
const TRAFFIC: &str = "time,a,b\n0,10,20\n43200,2000,5\n64800,90,40\n";

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        for (name, text) in [
            ("profiles.csv", PROFILES),
            ("services.toml", SERVICES),
            ("stock.toml", STOCK),
            ("rates.csv", TRAFFIC),
        ] {
            folder.write(name, text);
        }
        folder
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).unwrap()
    }

    fn atoll(&self, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_atoll"))
            .current_dir(self.0.path())
            .args(line.split(' '))
            .output()
            .unwrap()
    }

    /// `atoll plan` of the folder's services and profiles with further flags.
    fn plan(&self, more: &str) -> Output {
        let line = format!("plan --services services.toml --profiles profiles.csv {more}");
        self.atoll(line.trim())
    }

    /// What is printed by a call that succeeds.
    fn printed(&self, more: &str) -> String {
        let output = self.plan(more);
        assert!(output.status.success(), "{more}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The message of a call that ends with exit code 2.
    fn refused(&self, more: &str) -> String {
        let output = self.plan(more);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{more}: {message}");
        assert!(output.stdout.is_empty(), "{more}");
        message
    }
}

/// File, text, further flags, and what the message has to name.
type BadInput<'t> = (&'t str, String, &'t str, &'t [&'t str]);

#[test]
fn every_bad_input_names_its_file_and_line() {
    let profiles_json = "{\"models\": {\"net\": [\n{\"gpcs\": 1, \"batch\": 4, \"processes\": 1, \
                         \"throughput\": 100.0, \"latency_ms\": \"x\"}]}}";
    let rates = |more: &str| format!("{TRAFFIC}{more}\n");
    let cases: &[BadInput<'_>] = &[
        (
            "services.toml",
            SERVICES.replace("\"net\"\nrate = 90", "\"nets\"\nrate = 90"),
            "",
            &["line 8: service 'b'", "'nets'"],
        ),
        (
            "services.toml",
            SERVICES.replace("slo_ms = 300", "slo_ms = 1"),
            "",
            &["line 10: service 'b'", "smallest feasible slo"],
        ),
        (
            "services.toml",
            SERVICES.replace("rate = 90", "rate = 1e9"),
            "",
            &["line 9: service 'b'", "slices"],
        ),
        (
            "services.toml",
            SERVICES.replace("\"b\"", "\"a\""),
            "",
            &["line 7: service 'a' is given twice"],
        ),
        (
            "services.toml",
            SERVICES.replace("\"b\"", &format!("\"{}\"", "b".repeat(300))),
            "",
            &["line 7", "256"],
        ),
        ("services.toml", SERVICES.replace("rate = 90", "rate = '90'"), "", &["line 9: rate"]),
        (
            "profiles.csv",
            format!("{PROFILES}net,1,4,1,300,9\n"),
            "",
            &["line 5", "twice", "line 2"],
        ),
        ("profiles.csv", PROFILES.replace("net,2", "net,9"), "", &["line 3", "gpcs 9"]),
        ("profiles.csv", PROFILES.replace("procs", "batch"), "", &["line 1", "'batch'"]),
        (
            "profiles.json",
            profiles_json.to_string(),
            "--profiles profiles.json",
            &["line 2", "string"],
        ),
        ("profiles.json", "[]".to_string(), "--profiles profiles.json", &["line 1"]),
        (
            "rates.csv",
            rates("2026-02-30T10:00:00,1,1"),
            "--traffic rates.csv",
            &["line 5", "2026-02-30"],
        ),
        ("rates.csv", rates("64801,1"), "--traffic rates.csv", &["line 5", "2 cells"]),
        ("rates.csv", rates("64801,1,1e10"), "--traffic rates.csv", &["line 5", "rate '1e10'"]),
        // More slices than anybody has, in one window only.
        (
            "rates.csv",
            rates("64801,1,1e9"),
            "--traffic rates.csv",
            &["window from 18:00", "service 'b'"],
        ),
        ("stock.toml", STOCK.replace("3.2", "'x'"), "--stock stock.toml", &["line 6: price"]),
        (
            "stock.toml",
            STOCK.to_string(),
            "--stock stock.toml --objective energy",
            &["line 1", "no watts"],
        ),
        (
            "gpus.toml",
            "[[gpu]]\nname = 'x'\nsms = 3\nmemory_gib = 4.0\n".to_string(),
            "--gpu-table gpus.toml",
            &["line 3: sms 3"],
        ),
        ("now.json", "{\n\"plan\": 7\n}".to_string(), "--from now.json", &["line 2"]),
    ];
    for (name, text, more, named) in cases {
        let folder = Folder::new();
        folder.write(name, text);
        let more = match *name {
            // The flag is there already.
            "profiles.json" => {
                folder.write("profiles.csv", text);
                let line = "plan --services services.toml --profiles profiles.json";
                let output = folder.atoll(line);
                let message = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(2), "{message}");
                assert!(message.contains(name), "{message}");
                named.iter().for_each(|part| assert!(message.contains(part), "{part}: {message}"));
                continue;
            }
            _ => more,
        };
        let message = folder.refused(more);
        assert!(message.contains(name), "{name}: {message}");
        named.iter().for_each(|part| assert!(message.contains(part), "{part}: {message}"));
    }
}

#[test]
fn files_that_are_no_text_or_not_there_are_refused() {
    let folder = Folder::new();
    let message = folder.refused("--traffic absent.csv");
    assert!(message.contains("absent.csv"), "{message}");
    folder.write("rates.csv", b"time,a\n1,2\n3,\xff\n");
    let message = folder.refused("--traffic rates.csv");
    assert!(message.contains("rates.csv: line 3: this is not text"), "{message}");
    folder.write("services.toml", b"\xff");
    assert!(folder.refused("").contains("services.toml: line 1"));
    let missing = folder.atoll("plan --verify absent.json");
    assert_eq!(missing.status.code(), Some(2));
    // Spreadsheets and editors of Windows put a mark at the start.
    for (name, text) in
        [("services.toml", SERVICES), ("profiles.csv", PROFILES), ("rates.csv", TRAFFIC)]
    {
        folder.write(name, format!("\u{feff}{}", text.replace('\n', "\r\n")));
    }
    assert!(folder.printed("--traffic rates.csv --window-s 43200").contains("12:00"));
}

#[test]
fn a_slice_that_cannot_be_there_is_named_with_its_line() {
    let folder = Folder::new();
    let plan = folder.printed("--json");
    let start = plan.lines().position(|line| line.contains("\"start\"")).unwrap();
    let mut lines: Vec<&str> = plan.lines().collect();
    lines[start] = "\"start\": 7,";
    folder.write("now.json", lines.join("\n"));
    let message = folder.refused("--from now.json");
    let line = format!("now.json: line {start}: current plan: gpu 0, slice at 7");
    assert!(message.contains(&line), "{message}");
}

#[test]
fn what_a_file_says_beside_its_plan_is_verified() {
    let folder = Folder::new();
    let plan: serde_json::Value = serde_json::from_str(&folder.printed("--json")).unwrap();
    for (pointer, value, what) in [
        // Both were verified.
        ("/bound", 99.0.into(), "the file says 99"),
        ("/plan/0/slices/0/profile", "9g.99gb".into(), "no profile '9g.99gb'"),
        ("/plan/0/slices/0/size", 5.into(), "of size 5"),
    ] {
        let mut changed = plan.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        folder.write("plan.json", changed.to_string());
        let output = folder.atoll("plan --verify plan.json");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && message.contains(what), "{message}");
    }
    let output = folder.plan("--sweep slo=0.001..0.01:2");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("smallest feasible slo"));
}

#[test]
fn no_flag_is_ignored() {
    let folder = Folder::new();
    folder.write("now.json", folder.printed("--json"));
    for (flags, named) in [
        ("--window-s 600", "--window-s does nothing with a new plan; it is for --traffic"),
        ("--prometheus-timeout-secs 9", "--prometheus"),
        ("--prometheus-token-file services.toml", "--prometheus"),
        ("--sweep rate=1..2 --explain a", "--explain does nothing with --sweep"),
        ("--sweep rate=1..2 --commands", "--commands does nothing with --sweep"),
        ("--sweep rate=1..2 --mig-parted m.yaml", "--mig-parted"),
        ("--sweep rate=1..2 --window-s 600", "--window-s"),
        ("--traffic rates.csv --algorithm parvagpu", "--algorithm does nothing with --traffic"),
        ("--traffic rates.csv --svg x.svg", "--svg"),
        ("--traffic rates.csv --explain a", "--explain"),
        ("--traffic rates.csv --commands", "--commands"),
        ("--stock stock.toml --gpu h100-80gb", "--gpu does nothing with --stock"),
        ("--stock stock.toml --svg x.svg", "--svg"),
        ("--stock stock.toml --algorithm parvagpu", "--algorithm"),
        ("--stock stock.toml --window-s 600", "--window-s"),
        ("--stock stock.toml --serve-first revenue", "no service has it"),
        ("--from now.json --window-s 600", "--window-s"),
        ("--from now.json --algorithm parvagpu", "--algorithm"),
        ("--algorithm parvagpu --sharing time", "--sharing time does nothing"),
        ("--algorithm squishy --sharing none", "--sharing none does nothing"),
        ("--algorithm igniter-like --svg x.svg", "only counts gpus"),
        ("--algorithm gpulet-like --explain a", "only counts gpus"),
        ("--traffic rates.csv --window-s 7", "--window-s 7 is not a whole part of a day"),
        ("--traffic rates.csv --percentile 101", "--percentile 101"),
        ("--traffic rates.csv --percentile nan", "--percentile NaN"),
        ("--explain a --json", "leave --json out"),
        ("--explain a --commands", "leave --commands out"),
        ("--commands --json", "leave --json out"),
    ] {
        let message = folder.refused(flags);
        assert!(message.contains(named), "{flags}: {message}");
    }
    for flags in ["--services services.toml", "--gpu h100-80gb", "--svg x.svg", "--sharing time"] {
        let output = folder.atoll(&format!("plan --verify now.json {flags}"));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && message.contains("with --verify"), "{message}");
    }
    // What the environment says is for the calls that take it.
    let verified = Command::new(env!("CARGO_BIN_EXE_atoll"))
        .current_dir(folder.0.path())
        .env("ATOLL_PLAN_SERVICES", "services.toml")
        .env("ATOLL_PLAN_GPU", "h100-80gb")
        .args(["plan", "--verify", "now.json"])
        .output()
        .unwrap();
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
}

#[test]
fn a_mix_without_one_service_is_planned_on_request() {
    let folder = Folder::new();
    folder.write(
        "services.toml",
        SERVICES.replace("slo_ms = 300", "slo_ms = 300\ngpus = ['l4-24gb']"),
    );
    let message = folder.refused("--stock stock.toml");
    assert!(message.contains("services.toml: line 7: service 'b'"), "{message}");
    assert!(message.contains("--keep-going"), "{message}");
    // It ended with the same error.
    let plan = folder.printed("--stock stock.toml --keep-going --json");
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["services"].as_array().unwrap().len(), 1, "{plan}");
}

#[test]
fn every_window_has_a_plan_that_is_verified_and_applied() {
    let folder = Folder::new();
    for sharing in ["none", "time"] {
        let flags =
            format!("--traffic rates.csv --window-s 21600 --sharing {sharing} --plans {sharing}");
        let printed = folder.printed(&format!("{flags} --json"));
        let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
        let windows = printed["windows"].as_array().unwrap();
        assert_eq!(windows.len(), 3, "{printed}");
        for window in windows {
            let file = format!("{sharing}/{}", window["file"].as_str().unwrap());
            let verified = folder.atoll(&format!("plan --verify {file} --json"));
            let report: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
            assert_eq!((&report["verified"], &report["gpus"]), (&true.into(), &window["gpus"]));
            let plan: serde_json::Value = serde_json::from_str(&folder.read(&file)).unwrap();
            let created = plan["steps"].as_array().map_or(0, |steps| {
                let create = |step: &&serde_json::Value| step.as_str().unwrap().contains("create");
                steps.iter().filter(create).count() as u64
            });
            // The first window has no plan before it; shadows are not counted.
            assert!(window["start_s"] == 0 || created >= window["created"].as_u64().unwrap());
            let gpus: Vec<String> =
                (0..window["gpus"].as_u64().unwrap()).map(|n| n.to_string()).collect();
            let dry = folder.atoll(&format!("apply {file} --dry-run --gpus {}", gpus.join(",")));
            let text = String::from_utf8_lossy(&dry.stdout).into_owned();
            assert!(dry.status.success() && text.contains("atoll serve"), "{text}");
        }
        // The plans of an earlier call stay as they are.
        assert!(folder.refused(&flags).contains("is not empty"));
    }
    assert!(folder.refused("--plans more").contains("--traffic"));
}
