//! What is fuzzed: one function for each parser, and one for the whole way of a model.

mod cluster;
mod files;
mod onnx;
mod picture;
mod protocol;
mod server;
mod whole_way;

use std::path::PathBuf;
use std::time::Duration;

use base::Random;

use crate::allocator;
use crate::generate;
use crate::mutate::Format;

pub use server::{RestHarness, frame, http_request};
pub use whole_way::ModelHarness;

/// Something that takes bytes from outside.
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Runs it on one input. Panics where a rule is broken.
    pub run: fn(&[u8]),
    /// Makes an input from nothing.
    pub generate: Option<fn(&mut Random) -> Vec<u8>>,
    /// How its inputs are edited.
    pub format: Format,
    /// Words that its parser knows.
    pub words: &'static [&'static str],
    /// Longest input.
    pub max_len: usize,
    /// Most memory that one input may take.
    pub memory: usize,
    /// Most processor time that one input may take.
    pub time: Duration,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// A parser of small inputs.
const PARSER: Target = Target {
    name: "",
    run: |_| {},
    generate: None,
    format: Format::Bytes,
    words: &[],
    max_len: 2 * KIB,
    memory: 4 * MIB,
    time: SECOND,
};

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "json",
        run: protocol::json,
        generate: Some(generate::json_request),
        format: Format::Text,
        words: protocol::WORDS,
        ..PARSER
    },
    Target {
        name: "binary",
        run: protocol::binary,
        generate: Some(generate::binary_request),
        words: protocol::WORDS,
        ..PARSER
    },
    Target {
        name: "grpc",
        run: protocol::grpc,
        generate: Some(generate::infer_message),
        format: Format::Protobuf(0),
        words: protocol::WORDS,
        ..PARSER
    },
    Target {
        name: "grpc_call",
        run: server::grpc_call,
        generate: Some(server::generate_call),
        format: Format::Protobuf(server::CALL_HEAD),
        words: protocol::WORDS,
        memory: 96 * MIB,
        ..PARSER
    },
    Target {
        name: "rest",
        run: server::rest,
        format: Format::Text,
        words: protocol::WORDS,
        memory: 96 * MIB,
        ..PARSER
    },
    Target {
        name: "multipart",
        run: server::multipart,
        format: Format::Text,
        words: server::FORM_WORDS,
        memory: 96 * MIB,
        ..PARSER
    },
    Target {
        name: "headers",
        run: server::headers,
        format: Format::Text,
        words: server::HEADER_WORDS,
        memory: 96 * MIB,
        max_len: KIB,
        ..PARSER
    },
    Target { name: "picture", run: picture::run, memory: 96 * MIB, max_len: 4 * KIB, ..PARSER },
    Target {
        name: "pbtxt",
        run: files::pbtxt,
        format: Format::Text,
        words: files::PBTXT_WORDS,
        ..PARSER
    },
    Target {
        name: "settings",
        run: files::settings,
        format: Format::Text,
        words: files::SETTINGS_WORDS,
        ..PARSER
    },
    Target {
        name: "settings_change",
        run: files::settings_change,
        format: Format::Text,
        words: files::SETTINGS_WORDS,
        ..PARSER
    },
    Target {
        name: "query",
        run: files::query,
        format: Format::Text,
        words: files::QUERY_WORDS,
        ..PARSER
    },
    Target {
        name: "plan",
        run: files::plan,
        format: Format::Text,
        words: files::PLAN_WORDS,
        memory: 96 * MIB,
        ..PARSER
    },
    Target {
        name: "profiles",
        run: files::profiles,
        format: Format::Text,
        words: files::PLAN_WORDS,
        ..PARSER
    },
    Target {
        name: "records",
        run: cluster::records,
        max_len: 4 * KIB,
        format: Format::Text,
        words: cluster::WORDS,
        ..PARSER
    },
    Target {
        name: "scheduler",
        run: cluster::scheduler,
        max_len: 4 * KIB,
        format: Format::Text,
        words: cluster::WORDS,
        memory: 96 * MIB,
        ..PARSER
    },
    Target {
        name: "onnx",
        run: onnx::import,
        generate: Some(generate::model),
        format: Format::Protobuf(0),
        words: onnx::WORDS,
        memory: 256 * MIB,
        ..PARSER
    },
    Target {
        name: "compile",
        run: onnx::compile,
        generate: Some(generate::model),
        format: Format::Protobuf(0),
        words: onnx::WORDS,
        memory: 512 * MIB,
        time: onnx::COMPILE_TIME,
        ..PARSER
    },
    Target {
        name: "way",
        run: whole_way::run,
        generate: Some(generate::model_for_registration),
        format: Format::Protobuf(1),
        words: onnx::WORDS,
        memory: whole_way::MEMORY,
        time: whole_way::TIME,
        ..PARSER
    },
];

/// The target of this name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// The folder of its corpus.
    pub fn corpus_folder(&self) -> PathBuf {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus")).join(self.name)
    }

    /// The inputs of its corpus, in the order of their names.
    pub fn corpus(&self) -> Vec<Vec<u8>> {
        let Ok(folder) = std::fs::read_dir(self.corpus_folder()) else { return Vec::new() };
        let mut paths: Vec<PathBuf> = folder.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
    }
}

/// Runs `target` on one input and returns the memory that it took. Panics where a rule is broken,
/// also the one about memory.
pub fn execute(target: &Target, data: &[u8]) -> usize {
    let before = allocator::reset_peak();
    (target.run)(data);
    let taken = allocator::peak().saturating_sub(before);
    assert!(
        taken <= target.memory,
        "an input of {} bytes took {taken} bytes of memory, the limit is {}",
        data.len(),
        target.memory
    );
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_corpus_and_a_program_for_libfuzzer() {
        let manifest = include_str!("../Cargo.toml");
        for target in TARGETS {
            assert!(!target.corpus().is_empty(), "{} has no corpus", target.name);
            let program = format!("path = \"fuzz_targets/{}.rs\"", target.name);
            assert!(manifest.contains(&program), "{} is not in Cargo.toml", target.name);
            let path = format!("{}/fuzz_targets/{}.rs", env!("CARGO_MANIFEST_DIR"), target.name);
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.contains(&format!("under_libfuzzer!(\"{}\")", target.name)));
        }
        assert_eq!(manifest.matches("path = \"fuzz_targets/").count(), TARGETS.len());
    }

    #[test]
    fn the_corpus_is_small() {
        let inputs = || TARGETS.iter().flat_map(Target::corpus);
        let bytes: usize = inputs().map(|input| input.len()).sum();
        assert!(bytes <= 1 << 20, "the corpus has {bytes} bytes");
    }
}
