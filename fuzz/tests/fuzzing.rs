//! Every target for seconds, and requests whose large allocations fail.

use std::process::Command;

fn driver(arguments: &[&str]) -> std::process::Output {
    let output = Command::new(env!("CARGO_BIN_EXE_fuzz_driver")).args(arguments).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Other inputs in every run, named by the seed in the output.
fn seed() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    since.as_secs().to_string()
}

#[test]
fn targets_hold_for_seconds() {
    let seed = seed();
    let output = driver(&["run", "--seconds", "1.5", "--jobs", "2", "--seed", &seed]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "seed {seed}:\n{text}");
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
