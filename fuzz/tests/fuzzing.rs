//! Every target for seconds, and requests whose large allocations fail.

use std::process::Command;

fn driver(arguments: &[&str]) -> std::process::Output {
    let output = Command::new(env!("CARGO_BIN_EXE_fuzz_driver")).args(arguments).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The same inputs in every run, so that a change is judged by what it changes. Other inputs are
/// for `cargo xtask fuzz`.
const SEED: &str = "1";

#[test]
fn targets_hold_for_seconds() {
    let output = driver(&["run", "--seconds", "1.5", "--jobs", "2", "--seed", SEED]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let ran = text.lines().filter(|line| line.contains(" inputs, "));
    assert_eq!(ran.count(), fuzz::targets::TARGETS.len(), "{text}");
}

/// The tensors and the model have more than 1 MiB: what is this large has its size from outside.
#[test]
fn large_allocations_may_fail() {
    let min = fuzz::allocations::LARGE.to_string();
    let output = driver(&["allocations", "--min", &min]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    // Every case allocates what can fail.
    let cases = text.lines().filter(|line| line.contains(" bytes or more; "));
    let none = cases.clone().filter(|line| line.contains(": 0 allocations"));
    assert_eq!((cases.count(), none.count()), (fuzz::allocations::CASES.len(), 0), "{text}");
}
