//! A machine with fake NVIDIA tools that record their calls, for `atoll apply`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) const PLAN: &str = r#"{
  "gpu_kind": "a100-80gb", "gpus": 1, "lower_bound": 1, "seconds": 0.0,
  "plan": [{ "slices": [
    { "start": 0, "size": 4, "profile": "4g.40gb", "services": [
      { "name": "numbers", "model": "digits", "batch": 1, "processes": 2, "rate": 10.0 }] },
    { "start": 4, "size": 3, "profile": "3g.40gb", "cycle_ms": 20.0, "services": [
      { "name": "more", "model": "digits", "batch": 1, "processes": 1, "rate": 10.0 },
      { "name": "other", "model": "digits", "batch": 1, "processes": 1, "rate": 10.0 }] }
  ] }]
}"#;

/// A machine of its own for each test.
pub(crate) struct TestMachine {
    pub(crate) root: tempfile::TempDir,
}

impl TestMachine {
    pub(crate) fn new() -> TestMachine {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("fake")).unwrap();
        std::fs::write(root.path().join("plan.json"), PLAN).unwrap();
        TestMachine { root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn command(&self) -> Command {
        let fakes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_tools");
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_atoll"));
        command
            .env("PATH", format!("{}:{path}", fakes.display()))
            .env("FAKE", self.path("fake"))
            .env("ATOLL_LOG", "warn")
            .arg("apply")
            .arg("--state")
            .arg(self.path("state"));
        command
    }

    pub(crate) fn apply(&self, port: u16, more: &[&str]) -> Command {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets");
        let mut command = self.command();
        command.arg(self.path("plan.json")).arg("--model-repository").arg(assets);
        command.args(["--device", "cpu", "--first-port", &port.to_string()]).args(more);
        command
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("fake/calls")).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }

    /// Calls that change something.
    pub(crate) fn changes(&self) -> Vec<String> {
        let reads = ["query", "-L", "get_server_list"];
        self.calls()
            .into_iter()
            .filter(|call| !reads.iter().any(|one| call.contains(one)))
            .collect()
    }
}

pub(crate) fn output_text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Ports of this test: three per server, apart from those of other tests and from ephemeral ports.
pub(crate) fn ports(test: u16) -> u16 {
    10_000 + (std::process::id() % 500) as u16 * 40 + test * 12
}
