//! The project's own tools: `cargo xtask tidy` checks the rules of the workspace, `cargo xtask
//! evidence` that measured figures belong to the sources, `cargo xtask book` builds the book,
//! `cargo xtask sbom` writes the bill of materials, `cargo xtask fuzz` fuzzes for hours.

mod book;
mod evidence;
mod fuzz;
mod sbom;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask COMMAND

commands:
  tidy      check crate edges, banned words, public names, import cycles, unsafe code, clocks,
            line and file lengths and documented dependencies
  evidence  say whether the figures in evidence/ belong to the sources that are there now;
            --table prints the book's table of GPU latencies; --bind FILE [SOURCE...] notes that
            a text in evidence/ was measured with these sources, or those of before, as they are
  book      check the links of all documents and build the book into target/book
  sbom      write the binary's bill of materials (CycloneDX) to target/atoll.cdx.json, or to FILE
  fuzz      fuzz for hours, and write the figures to evidence/fuzz.md; without arguments it
            prints what it takes
  help      print this text";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => report(&tidy::check(&root())),
        Some("evidence") if std::env::args().any(|argument| argument == "--table") => print_table(),
        Some("evidence") if std::env::args().nth(2).as_deref() == Some("--bind") => bind_evidence(),
        Some("evidence") => report_evidence(),
        Some("book") => build_book(),
        Some("sbom") => write_sbom(std::env::args().nth(2).map(PathBuf::from)),
        Some("fuzz") => run_fuzz(),
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
        println!("tidy: no problem found");
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}

fn build_book() -> ExitCode {
    match book::build(&root()) {
        Ok(page) => {
            println!("book: {}", page.display());
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("book: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn write_sbom(file: Option<PathBuf>) -> ExitCode {
    let path = file.unwrap_or_else(|| root().join("target/atoll.cdx.json"));
    let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let written = sbom::make(&root()).and_then(|bill| {
        let text = format!("{bill:#}\n");
        folder.and_then(|()| std::fs::write(&path, text)).map_err(|err| err.to_string())?;
        Ok(bill["components"].as_array().map_or(0, Vec::len))
    });
    match written {
        Ok(count) => {
            println!("sbom: {count} components in {}", path.display());
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("sbom: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run_fuzz() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(2).collect();
    match fuzz::run(&root(), &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("fuzz: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn print_table() -> ExitCode {
    match evidence::latency_table(&root()) {
        Ok(table) => {
            print!("{table}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("evidence: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn bind_evidence() -> ExitCode {
    let mut arguments = std::env::args().skip(3);
    let file = arguments.next().unwrap_or_default();
    match evidence::bind(&root(), &file, &arguments.collect::<Vec<String>>()) {
        Ok(count) => {
            println!("evidence: {file} belongs to {count} sources as they are now");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("evidence: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn report_evidence() -> ExitCode {
    let evidence = match evidence::check(&root()) {
        Ok(evidence) => evidence,
        Err(problem) => {
            eprintln!("evidence: {problem}");
            return ExitCode::FAILURE;
        }
    };
    let known = match evidence::known_stale(&root()) {
        Ok(known) => known,
        Err(problem) => {
            eprintln!("evidence: {problem}");
            return ExitCode::FAILURE;
        }
    };
    for (name, stale) in &evidence {
        match (stale.is_empty(), known.contains(name)) {
            (true, _) => println!("{name}: fresh"),
            (false, true) => println!("{name}: stale, as listed ({})", stale.join(", ")),
            (false, false) => println!("{name}: stale ({})", stale.join(", ")),
        }
    }
    let admitted = |(name, stale): &(String, Vec<String>)| stale.is_empty() || known.contains(name);
    if evidence.iter().all(admitted) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
