//! Broken and malicious files: an error or a graph within bounded time, never a panic.

use std::path::PathBuf;
use std::time::Duration;

use graph::{ExternalData, Limits, import, import_file, optimize};

use crate::models::{floats, longs, node, picture, seeds};

/// Mutations of each seed.
const ROUNDS: usize = 4_000;

/// The maximum CPU time for a small file.
const PATIENCE: Duration = Duration::from_secs(2);

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit.max(1)
    }
}

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/onnx")
}

/// CPU time of this thread: independent of the load of the machine.
fn time_of_thread() -> Duration {
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(spent.split_whitespace().next().unwrap().parse().unwrap())
}

/// Imports and optimises; every resulting graph must be valid.
fn digest(bytes: &[u8], what: &str) -> bool {
    let start = time_of_thread();
    let outcome = import(bytes, &ExternalData::none());
    let good = outcome.is_ok();
    if let Ok(mut graph) = outcome {
        optimize(&mut graph, None);
        graph.infer_all().unwrap_or_else(|(node, error)| panic!("{what}: {node}: {error}"));
        let _ = graph.to_string();
    }
    let took = time_of_thread() - start;
    assert!(took < PATIENCE, "{what} took {took:?}");
    good
}

/// What the fuzzers found, and what covers more than other inputs.
#[test]
fn the_whole_corpus_is_digested() {
    let files = std::fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().path());
    let digested =
        files.map(|path| digest(&std::fs::read(&path).unwrap(), &path.to_string_lossy()));
    assert!(digested.filter(|good| *good).count() >= seeds().len());
}

/// The seeds in the fuzzer's corpus are the ones the tests use. `ATOLL_BLESS=1` writes them.
#[test]
fn the_corpus_is_current_and_imports() {
    for (name, bytes) in seeds() {
        let path = corpus().join(format!("{name}.onnx"));
        if std::env::var_os("ATOLL_BLESS").is_some() {
            std::fs::write(&path, &bytes).unwrap();
        }
        let stored = std::fs::read(&path).unwrap_or_default();
        assert!(stored == bytes, "{} is stale: run with ATOLL_BLESS=1", path.display());
        assert!(digest(&stored, name), "{name} does not import");
    }
    for entry in std::fs::read_dir(corpus()).unwrap().flatten() {
        digest(&std::fs::read(entry.path()).unwrap(), &entry.path().display().to_string());
    }
}

#[test]
fn mutated_models_never_panic() {
    let seeds = seeds();
    let mut survivors = 0;
    for (name, seed) in &seeds {
        let mut random = Random(0x5eed_0000 + seed.len() as u64);
        for round in 0..ROUNDS {
            let mut bytes = seed.clone();
            for _ in 0..=random.below(4) {
                mutate(&mut bytes, &seeds[random.below(seeds.len())].1, &mut random);
            }
            survivors += usize::from(digest(&bytes, &format!("{name}, round {round}")));
        }
    }
    // Mutations that only hit weights or names give valid models: the passes must see some.
    assert!(survivors > 100, "{survivors} mutants were valid");
}

fn mutate(bytes: &mut Vec<u8>, donor: &[u8], random: &mut Random) {
    if bytes.is_empty() {
        return;
    }
    let at = random.below(bytes.len());
    match random.below(6) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.below(256) as u8,
        2 => bytes.truncate(at),
        // A length or a dimension becomes huge or negative.
        3 => bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x0f]).for_each(drop),
        4 => {
            let from = random.below(donor.len());
            let to = (from + random.below(64)).min(donor.len());
            bytes.splice(at..at, donor[from..to].iter().copied()).for_each(drop);
        }
        _ => {
            let to = (at + random.below(32)).min(bytes.len());
            bytes.drain(at..to).for_each(drop);
        }
    }
}

#[test]
fn every_truncation_is_an_error_or_a_model() {
    for (name, seed) in seeds() {
        for length in 0..seed.len() {
            digest(&seed[..length], &format!("{name} cut at {length}"));
        }
    }
}

#[test]
fn huge_lengths_in_small_files_allocate_nothing() {
    let range = vec![node("ConstantOfShape", &["big"], &["c"]), node("Add", &["x", "c"], &["y"])];
    let huge = longs("big", &[i64::MAX, i64::MAX]);
    assert!(!digest(&picture(17, range.clone(), vec![huge]), "overflowing shape"));
    let large = longs("big", &[1 << 20, 1 << 19]);
    digest(&picture(17, range, vec![large]), "large shape");
    let mut weight = floats("w", &[1 << 32], &[0.0]);
    weight.name = Some("w".to_string());
    let message = import(
        &picture(17, vec![node("Mul", &["x", "w"], &["y"])], vec![weight]),
        &ExternalData::none(),
    )
    .unwrap_err()
    .to_string();
    assert!(message.contains("tensor 'w'"), "{message}");
}

#[test]
fn long_chains_and_wide_graphs_take_linear_time() {
    let chain: Vec<_> = (0..20_000)
        .map(|i| {
            let from = if i == 0 { "x".to_string() } else { format!("v{i}") };
            let to = if i == 19_999 { "y".to_string() } else { format!("v{}", i + 1) };
            node("Abs", &[&from], &[&to])
        })
        .collect();
    assert!(digest(&picture(17, chain, vec![]), "chain"));
    let many: Vec<&str> = vec!["x"; 20_000];
    assert!(digest(&picture(17, vec![node("Sum", &many, &["y"])], vec![]), "fan"));
}

#[test]
fn limits_are_enforced() {
    let path = corpus().join("convolutional.onnx");
    let limits = Limits { file_bytes: 100, ..Limits::default() };
    let message = import_file(&path, &limits).unwrap_err().to_string();
    assert!(message.contains("at most 100 are allowed"), "{message}");
    let limits = Limits { nodes: 3, ..Limits::default() };
    let message = import_file(&path, &limits).unwrap_err().to_string();
    assert!(message.contains("nodes, at most 3"), "{message}");
}

/// Computes zeros, and counts the bytes that it was asked for.
#[derive(Default)]
struct CountingEvaluator(std::cell::Cell<usize>);

impl graph::Evaluator for CountingEvaluator {
    fn evaluate(
        &self,
        op: &model::op::Op,
        inputs: &[Option<model::Tensor>],
        _: usize,
    ) -> Option<Vec<model::Tensor>> {
        if matches!(op, model::op::Op::Reduce(_)) {
            return None;
        }
        let shape: Vec<usize> = match inputs.first()?.as_ref()?.to_vec::<i64>() {
            Some(shape) => shape.iter().map(|&dim| dim as usize).collect(),
            None => inputs.first()?.as_ref()?.shape().to_vec(),
        };
        let count: usize = shape.iter().product();
        self.0.set(self.0.get() + count * 4);
        let zeros = bytes::Bytes::from(vec![0; count * 4]);
        Some(vec![model::Tensor::from_raw(model::DataType::F32, shape, zeros).ok()?])
    }
}

#[test]
fn folding_has_a_budget() {
    // 300 chains, each of a constant of 32 MiB and a result of as much: 19 GiB in a few kilobytes.
    let mut nodes = Vec::new();
    let mut sum = vec!["x".to_string()];
    for index in 0..300 {
        let (constant, result) = (format!("c{index}"), format!("r{index}"));
        nodes.push(node("ConstantOfShape", &["big"], &[&constant]));
        nodes.push(node("Exp", &[&constant], &[&result]));
        sum.push(format!("m{index}"));
        nodes.push(node("ReduceMax", &[&result], &[&format!("m{index}")]));
    }
    let sum: Vec<&str> = sum.iter().map(String::as_str).collect();
    nodes.push(node("Sum", &sum, &["y"]));
    let bytes = picture(17, nodes, vec![longs("big", &[1 << 23])]);
    assert!(bytes.len() < 64 << 10, "{}", bytes.len());
    let mut graph = import(&bytes, &ExternalData::none()).unwrap();
    let evaluator = CountingEvaluator::default();
    optimize(&mut graph, Some(&evaluator));
    let held: usize = graph.constants.iter().map(|(_, tensor)| tensor.size_bytes()).sum();
    assert!(evaluator.0.get() > 0, "something is folded");
    assert!(evaluator.0.get() <= 257 << 20, "{} bytes were computed", evaluator.0.get());
    assert!(held <= 257 << 20, "{held} bytes are held");
}
