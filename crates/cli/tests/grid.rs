//! `atoll profile --grid` with real processes on the CPU, and the planner with its table.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/digits.onnx")
}

fn profile(more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_atoll"));
    command.env("ATOLL_LOG", "warn").arg("profile").arg(model()).arg("--grid").args(more);
    command.output().unwrap()
}

fn output_text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn the_planner_plans_from_a_measured_grid() {
    let root = tempfile::tempdir().unwrap();
    let file = |name: &str| root.path().join(name).display().to_string();
    let table = file("profiles.csv");
    let grid = ["--batches", "1,4", "--processes", "1,3", "--slices", "1,3,7", "--seconds", "0.03"];
    let output = profile(&[&grid[..], &["--output", &table]].concat());
    assert!(output.status.success(), "{}", output_text(&output));
    let text = std::fs::read_to_string(&table).unwrap();
    let profiles = planner::Profiles::from_csv(&text).unwrap();
    let points = profiles.points("digits").unwrap();
    let mut expected = Vec::new();
    for gpcs in [1u8, 3, 7] {
        for batch in [1u32, 4] {
            expected.extend([1u32, 3].map(|processes| (gpcs, batch, processes)));
        }
    }
    let found: Vec<_> = points.iter().map(|one| (one.gpcs, one.batch, one.processes)).collect();
    assert_eq!(found, expected, "{text}");
    for one in points {
        assert!(one.throughput > 0.0 && one.latency_ms > 0.0, "{one:?}");
        // The batches of one process do not overlap, so their times sum up to at most the measured
        // time. With several processes this does not hold: each has its own time, and the mean is
        // over all batches.
        let busy = one.throughput * one.latency_ms / 1e3 / f64::from(one.batch);
        assert!(one.processes > 1 || busy < 1.01, "{one:?}");
        assert!(one.memory_mib.is_some_and(|mib| mib > u64::from(one.processes)), "{one:?}");
    }

    let services = file("services.toml");
    let service = "[[service]]\nname = \"numbers\"\nmodel = \"digits\"\nrate = 5\nslo_ms = 5000\n";
    std::fs::write(&services, service).unwrap();
    let plan = Command::new(env!("CARGO_BIN_EXE_atoll"))
        // The table says that it was measured on a CPU.
        .args([
            "plan",
            "--services",
            &services,
            "--profiles",
            &table,
            "--foreign-profiles",
            "--json",
        ])
        .output()
        .unwrap();
    assert!(plan.status.success(), "{}", output_text(&plan));
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!((plan["gpus"].as_u64(), plan["lower_bound"].as_u64()), (Some(1), Some(1)));
    let share = &plan["plan"][0]["slices"][0]["services"][0];
    assert_eq!(
        (share["name"].as_str(), share["model"].as_str()),
        (Some("numbers"), Some("digits"))
    );
}

#[test]
fn points_that_do_not_run_are_marked_and_none_at_all_is_an_error() {
    let output =
        profile(&["--processes", "1", "--slices", "7", "--bind", "nothing=3", "--seconds", "0.01"]);
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no point could be measured") && text.contains("'nothing'"), "{text}");
}

#[test]
fn shares_of_a_gpu_are_refused_without_a_daemon() {
    let root = tempfile::tempdir().unwrap();
    let fakes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_tools");
    let path = format!("{}:{}", fakes.display(), std::env::var("PATH").unwrap());
    let output = Command::new(env!("CARGO_BIN_EXE_atoll"))
        .env("PATH", path)
        .env("FAKE", root.path())
        .env_remove("CUDA_MPS_PIPE_DIRECTORY")
        .arg("profile")
        .arg(model())
        .args(["--grid", "--device", "cuda:0"])
        .output()
        .unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("need an MPS daemon") && text.contains("nvidia-cuda-mps-control -d"),
        "{text}"
    );
    let bad = profile(&["--slices", "7", "--compute-slices", "4"]);
    assert!(output_text(&bad).contains("more than the device's 4"), "{}", output_text(&bad));
}
