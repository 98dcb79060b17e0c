//! Imports ONNX models and reports the result.
//!
//! `survey FILE` prints the optimised graph. `survey FOLDER` imports every `model.onnx` below and
//! prints how many succeed, and which operators the others need.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use graph::{ImportError, Limits, import_file, optimize};

fn main() {
    for argument in std::env::args().skip(1) {
        let path = Path::new(&argument);
        if path.is_dir() { survey(path) } else { show(path) }
    }
}

fn show(path: &Path) {
    let mut graph = match import_file(path, &Limits::default()) {
        Ok(graph) => graph,
        Err(error) => return println!("{}: {error}", path.display()),
    };
    let before = graph.nodes.len();
    let report = optimize(&mut graph, None);
    print!("{graph}");
    println!("{before} nodes before, {} after; {:?}", graph.nodes.len(), report.rewrites);
    match compiler::lower(&graph) {
        Ok(plan) => {
            let symbols = graph.symbols();
            let bindings: Vec<(&str, usize)> = symbols.iter().map(|s| (s.as_str(), 1)).collect();
            let peak = compiler::memory::peak_activation_bytes(&plan, &bindings);
            println!("{} steps, peak {peak:?} bytes with every symbol 1", plan.steps.len());
        }
        Err(error) => println!("{error}"),
    }
}

fn models(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            models(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "onnx") {
            found.push(path);
        }
    }
}

fn survey(folder: &Path) {
    let mut found = Vec::new();
    models(folder, &mut found);
    found.sort();
    let (mut good, mut refused, mut broken) = (0, 0, 0);
    let mut operators: BTreeMap<String, usize> = BTreeMap::new();
    for path in &found {
        match import_file(path, &Limits::default()) {
            Ok(mut graph) => {
                optimize(&mut graph, None);
                match compiler::lower(&graph) {
                    Ok(_) => good += 1,
                    Err(error) => {
                        println!("BROKEN {}: {error}", path.display());
                        broken += 1;
                    }
                }
            }
            Err(ImportError::Unsupported(nodes)) => {
                refused += 1;
                let first = &nodes[0];
                let reason = first.reason.as_ref().map_or(String::new(), |r| format!(": {r}"));
                *operators.entry(format!("{}{reason}", first.op_type)).or_default() += 1;
            }
            Err(error) => {
                println!("BROKEN {}: {error}", path.display());
                broken += 1;
            }
        }
    }
    println!("{} models: {good} import, {refused} refused, {broken} broken", found.len());
    let mut rows: Vec<_> = operators.into_iter().collect();
    rows.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    rows.iter().for_each(|(operator, count)| println!("{count:5} {operator}"));
}
