//! Where the report of a benchmark goes: a table for people, JSON for machines.

use std::path::PathBuf;

use assembly::{Failure, write_file};
use serde::Serialize;

/// Prints `table`, unless `json` asks for JSON instead; where it names a file, JSON goes there.
pub(crate) fn print_report(
    json: Option<&Option<PathBuf>>,
    report: &impl Serialize,
    table: &str,
) -> Result<(), Failure> {
    let text = || serde_json::to_string_pretty(report).map_err(Failure::failed);
    match json {
        Some(None) => println!("{}", text()?),
        Some(Some(path)) => {
            write_file(path, &(text()? + "\n"))?;
            print!("{table}");
        }
        None => print!("{table}"),
    }
    Ok(())
}
