//! `atoll plan` by its binary: typical mistakes are named, with a remedy.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PROFILES: &str = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                        net,1,4,1,100,40\nnet,2,4,1,210,19\nnet,7,4,1,700,6\n";
const SERVICES: &str = "[[service]]\nname = \"a\"\nmodel = \"net\"\nrate = 150\nslo_ms = 200\n\
     [[service]]\nname = \"b\"\nmodel = \"net\"\nrate = 90\nslo_ms = 300\n";

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write("profiles.csv", PROFILES);
        folder.write("services.toml", SERVICES);
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn plan(&self, services: &str, more: &[&str]) -> Output {
        let named = |name: &str| Path::new(&self.path(name)).display().to_string();
        Command::new(env!("CARGO_BIN_EXE_atoll"))
            .current_dir(self.0.path())
            .args(["plan", "--services", &named(services), "--profiles", &named("profiles.csv")])
            .args(more)
            .output()
            .unwrap()
    }

    /// The exit code and the message.
    fn refused(&self, services: &str, more: &[&str]) -> (i32, String) {
        let output = self.plan(services, more);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn a_plan_says_how_good_it_is() {
    let output = Folder::new().plan("services.toml", &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(text.contains("1 gpu, at least 1 needed") && text.contains("proven best"), "{text}");
}

#[test]
fn slips_in_the_services_file_are_named() {
    let folder = Folder::new();
    folder.write("table.toml", &SERVICES.replace("[[service]]", "[[services]]"));
    let (code, message) = folder.refused("table.toml", &[]);
    assert!(code == 2 && message.contains("line 1: unknown field `services`"), "{message}");
    folder.write("key.toml", &SERVICES.replace("rate = 90", "rate = 90\nslo = 5"));
    let (code, message) = folder.refused("key.toml", &[]);
    assert!(code == 2 && message.contains("line 10: unknown field `slo`"), "{message}");
    folder.write("rate.toml", &SERVICES.replace("rate = 90", "rate = -1"));
    let (code, message) = folder.refused("rate.toml", &[]);
    assert!(code == 2 && message.contains("line 9: service 'b': rate -1"), "{message}");
    assert!(folder.plan("rate.toml", &["--keep-going"]).status.success());
    folder.write("empty.toml", "");
    let (code, message) = folder.refused("empty.toml", &[]);
    assert!(
        code == 2 && message.contains("empty.toml") && message.contains("[[service]]"),
        "{message}"
    );
}

#[test]
fn every_faulty_service_is_named_and_the_others_can_be_planned() {
    let folder = Folder::new();
    let faulty = SERVICES.replace("slo_ms = 200", "slo_ms = 1");
    folder.write("one.toml", &faulty);
    let (code, message) = folder.refused("one.toml", &[]);
    assert!(
        code == 1 && message.contains("smallest feasible slo") && message.contains("--keep-going"),
        "{message}"
    );
    assert!(folder.plan("one.toml", &["--keep-going"]).status.success());
    let (_, message) = folder.refused("one.toml", &["--keep-going", "--explain", "a"]);
    assert!(message.contains("no service 'a' is planned; there are b"), "{message}");
    folder.write(
        "all.toml",
        &faulty.replace("model = \"net\"\nrate = 90", "model = \"x\"\nrate = 90"),
    );
    let (code, message) = folder.refused("all.toml", &["--keep-going"]);
    assert!(
        code == 1 && message.contains("service 'a'") && message.contains("there are net"),
        "{message}"
    );
    assert!(!message.contains("--keep-going"), "{message}");
}

#[test]
fn a_current_plan_must_be_one_and_of_the_same_gpu() {
    let folder = Folder::new();
    let (code, message) = folder.refused("services.toml", &["--from", "services.toml"]);
    assert!(code == 2 && message.contains("is not a plan"), "{message}");
    let current = folder.plan("services.toml", &["--json"]).stdout;
    folder.write("current.json", &String::from_utf8(current).unwrap());
    let from = ["--from", "current.json"];
    assert!(folder.plan("services.toml", &from).status.success());
    let other = ["--from", "current.json", "--gpu", "h100-80gb"];
    let (code, message) = folder.refused("services.toml", &other);
    assert!(code == 2 && message.contains("a100-80gb"), "{message}");
    let greedy = ["--from", "current.json", "--algorithm", "parvagpu"];
    let (code, message) = folder.refused("services.toml", &greedy);
    assert!(code == 2 && message.contains("--algorithm"), "{message}");
}

#[test]
fn profiles_of_another_gpu_are_refused() {
    let folder = Folder::new();
    let named =
        PROFILES.replace("model,", "gpu,model,").replace("net,", "NVIDIA A100-SXM4-80GB,net,");
    folder.write("profiles.csv", &named);
    assert!(folder.plan("services.toml", &[]).status.success());
    let (code, message) = folder.refused("services.toml", &["--gpu", "h200-141gb"]);
    assert!(code == 2 && message.contains("profiles.csv"), "{message}");
    assert!(
        message.contains("A100-SXM4-80GB") && message.contains("--foreign-profiles"),
        "{message}"
    );
    let foreign = ["--gpu", "h200-141gb", "--foreign-profiles"];
    assert!(folder.plan("services.toml", &foreign).status.success());
    folder.write("profiles.csv", &format!("{PROFILES}net,1,x,1,1,1\n"));
    let (code, message) = folder.refused("services.toml", &[]);
    assert!(code == 2 && message.contains("line 5: batch 'x'"), "{message}");
}

#[test]
fn sweeps_and_traffic_are_tables() {
    let folder = Folder::new();
    let sweep = ["--sweep", "rate=1..8:3", "--svg", "sweep.svg"];
    let text = String::from_utf8(folder.plan("services.toml", &sweep).stdout).unwrap();
    assert!(text.lines().count() == 4 && text.contains("8.000"), "{text}");
    assert!(std::fs::read_to_string(folder.path("sweep.svg")).unwrap().contains("<circle"));
    folder.write("rates.csv", "time,a\n0,10\n43200,2000\n");
    let traffic = ["--traffic", "rates.csv", "--window-s", "43200"];
    let text = String::from_utf8(folder.plan("services.toml", &traffic).stdout).unwrap();
    assert!(text.contains("12:00") && text.contains("gpu hours"), "{text}");
    folder.write("rates.csv", "time,a\n0,ten\n");
    let (code, message) = folder.refused("services.toml", &traffic);
    assert!(code == 2 && message.contains("rates.csv: line 2: rate 'ten'"), "{message}");
}
