//! The project's own tools: `cargo xtask tidy` checks that the house is as `docs/ARCHITECTURE.md` says.

mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask COMMAND

commands:
  tidy    check crate edges, unsafe code, clocks, file lengths and documented dependencies
  help    print this text";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => report(&tidy::check(&root())),
        Some("help" | "--help" | "-h") => {
            println!("{HELP}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{HELP}");
            ExitCode::from(2)
        }
    }
}

/// The workspace this program was built in.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn report(problems: &[String]) -> ExitCode {
    problems.iter().for_each(|problem| eprintln!("tidy: {problem}"));
    if problems.is_empty() {
        println!("tidy: the house is in order");
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}
