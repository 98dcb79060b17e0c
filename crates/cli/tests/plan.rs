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
        self.plan_with(services, "profiles.csv", more)
    }

    fn plan_with(&self, services: &str, profiles: &str, more: &[&str]) -> Output {
        let named = |name: &str| Path::new(&self.path(name)).display().to_string();
        Command::new(env!("CARGO_BIN_EXE_atoll"))
            .current_dir(self.0.path())
            .args(["plan", "--services", &named(services), "--profiles", &named(profiles)])
            .args(more)
            .output()
            .unwrap()
    }

    /// The exit code and the message.
    fn refused(&self, services: &str, more: &[&str]) -> (i32, String) {
        Folder::message(self.plan(services, more))
    }

    fn message(output: Output) -> (i32, String) {
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
        code == 2
            && message.contains("one.toml: line 5: service 'a'")
            && message.contains("smallest feasible slo")
            && message.contains("--keep-going"),
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
        code == 2
            && message.contains("line 5: service 'a'")
            && message.contains("line 8: service 'b'")
            && message.contains("there are net"),
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

impl Folder {
    /// `atoll plan --verify` of a text, in its own folder: the exit code and what is printed.
    fn verify(&self, plan: &str, more: &[&str]) -> (i32, String) {
        let alone = tempfile::tempdir().unwrap();
        std::fs::write(alone.path().join("plan.json"), plan).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_atoll"))
            .current_dir(alone.path())
            .args(["plan", "--verify", "plan.json"])
            .args(more)
            .output()
            .unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    }

    fn json(&self, more: &[&str]) -> String {
        let output = self.plan("services.toml", &[more, &["--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

fn parsed(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn plans_are_verified_from_their_file_alone() {
    let folder = Folder::new();
    let services = SERVICES.replace("name = \"b\"", "name = \"b\"\nheadroom = 0.5");
    folder.write("services.toml", &services);
    for more in [&["--headroom", "0.1"][..], &["--sharing", "time"]] {
        let plan = folder.json(more);
        let (code, text) = folder.verify(&plan, &[]);
        assert!(code == 0 && text.contains("verified: 1 gpus"), "{text}");
        let (code, text) = folder.verify(&plan, &["--json"]);
        let report = parsed(&text);
        assert!(code == 0 && report["verified"] == true && report["proven_best"] == true, "{text}");
        // A service's own headroom is in the certificate: more of it is not served.
        let mut more = parsed(&plan);
        more["certificate"]["rules"]["own_headroom"]["b"] = 5.0.into();
        let (code, text) = folder.verify(&more.to_string(), &["--json"]);
        let report = parsed(&text);
        assert!(code == 1 && report["verified"] == false, "{text}");
        assert!(report["wrong"][0].as_str().unwrap().contains("'b' gets"), "{text}");
    }
    let (code, _) = folder.verify("{}", &[]);
    assert_eq!(code, 2);
}

const STOCK: &str = "[[offer]]\ngpu = 'a100-80gb'\nprice = 1.8\n[[offer]]\ngpu = 'h100-80gb'\n\
                     price = 3.2\ncount = 4\n[[offer]]\ngpu = 'l4-24gb'\nprice = 0.4\n";

#[test]
fn mixes_survive_a_gpu_and_are_verified_from_their_file_alone() {
    let folder = Folder::new();
    folder.write("stock.toml", STOCK);
    let stock = ["--stock", "stock.toml"];
    let output = folder.plan("services.toml", &stock);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("h100-80gb alone"), "{text}");
    let plain = parsed(&folder.json(&stock));
    let spare = folder.json(&[&stock[..], &["--survive", "gpu"]].concat());
    let plan = parsed(&spare);
    assert!(plan["total"].as_f64() > plain["total"].as_f64(), "{plan}");
    let (code, text) = folder.verify(&spare, &[]);
    assert!(code == 0 && text.contains("also without any one gpu"), "{text}");
    let (code, text) = folder.verify(&spare, &["--json"]);
    assert!(code == 0 && parsed(&text)["survives"] == "gpu", "{text}");
    // The plan without spare capacity does not become one by saying so.
    let mut false_claim = plain;
    false_claim["survives"] = "gpu".into();
    let (code, text) = folder.verify(&false_claim.to_string(), &["--json"]);
    assert!(code == 1 && text.contains("without gpu 0"), "{text}");
    // Racks of two machines, and a group that shares none.
    let racks = ["--survive", "rack", "--machine-gpus", "2", "--rack-gpus", "4"];
    let group = |text: &str| text.replace("slo_ms", "apart = 'g'\napart_by = 'rack'\nslo_ms");
    folder.write("services.toml", &group(SERVICES));
    let plan = folder.json(&[&stock[..], &racks].concat());
    let (code, text) = folder.verify(&plan, &[]);
    assert!(code == 0 && text.contains("also without any one rack of 4 gpus"), "{text}");
    let (code, message) = folder.refused("services.toml", &stock);
    assert!(code == 2 && message.contains("apart by rack, and --rack-gpus"), "{message}");
    folder.write("services.toml", SERVICES);
    let (code, message) =
        folder.refused("services.toml", &[&stock[..], &["--survive", "machine"]].concat());
    assert!(code == 2 && message.contains("--machine-gpus"), "{message}");
    folder.write("stock.toml", &STOCK.replace("price = 0.4", "price = -1"));
    let (code, message) = folder.refused("services.toml", &stock);
    assert!(code == 2 && message.contains("stock.toml: line 10: price -1"), "{message}");
}

/// Inputs of an issue: each was accepted, panicked or never ended.
#[test]
fn json_profiles_that_no_gpu_can_have_are_named() {
    let folder = Folder::new();
    let point = |change: (&str, &str)| {
        let text = "{\"models\": {\"net\": [\n{\"gpcs\": 1, \"batch\": 4, \"processes\": 1, \
                    \"throughput\": 100.0, \"latency_ms\": 40.0}\n]}}";
        text.replace(change.0, change.1)
    };
    for (old, new, what) in [
        ("\"processes\": 1", "\"processes\": 0", "processes 0"),
        ("100.0", "-100.0", "throughput -100"),
        ("40.0", "-40.0", "latency_ms -40"),
    ] {
        folder.write("profiles.json", &point((old, new)));
        let output = folder.plan_with("services.toml", "profiles.json", &[]);
        let (code, message) = Folder::message(output);
        let named = message.contains("profiles.json") && message.contains("line 2");
        assert!(code == 2 && named && message.contains(what), "{code} {message}");
    }
    folder.write("profiles.json", &point(("100.0", "1e-10")));
    let (code, message) = Folder::message(folder.plan_with("services.toml", "profiles.json", &[]));
    assert!(code != 0 && message.contains("service 'a'"), "{message}");
    folder.write("name.toml", &SERVICES.replace("\"a\"", "\"a\\nreboot\""));
    let (code, message) = folder.refused("name.toml", &["--commands"]);
    assert!(code == 2 && message.contains("name.toml: line 2"), "{message}");
}
