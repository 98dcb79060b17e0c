//! `atoll models`: lists the models of repositories and of the registry.

use std::path::Path;

use assembly::Failure;
use base::Bytes;
use model::config::Class;
use model::repository::Repository;
use serde::Serialize;

use crate::args::ModelsArgs;
use crate::registry_command::open_existing;

#[derive(Debug, Serialize)]
struct ModelRow {
    name: String,
    version: u64,
    source: &'static str,
    size_bytes: u64,
    class: Option<Class>,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &ModelsArgs) -> Result<(), Failure> {
    if args.model_repository.is_empty() && args.data_dir.is_none() {
        return Err(Failure::usage("name a --model-repository or a --data-dir"));
    }
    if let (Some(target), Some(folder)) = (&args.remove, &args.data_dir) {
        return remove(target, folder);
    }
    let mut rows = Vec::new();
    for path in &args.model_repository {
        rows.extend(repository_rows(path)?);
    }
    if let Some(folder) = &args.data_dir {
        rows.extend(registry_rows(folder)?);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows).map_err(Failure::failed)?);
    } else {
        print(&rows);
    }
    Ok(())
}

fn repository_rows(path: &Path) -> Result<Vec<ModelRow>, Failure> {
    let entries = Repository::open(path).and_then(|r| r.list()).map_err(Failure::failed)?;
    let row = |entry: model::repository::RepositoryEntry| {
        let config = entry.config();
        ModelRow {
            size_bytes: std::fs::metadata(&entry.path).map_or(0, |metadata| metadata.len()),
            source: "repository",
            class: config.as_ref().ok().map(|config| config.class),
            problem: config.err().map(|err| err.to_string()),
            path: entry.path.display().to_string(),
            name: entry.name,
            version: entry.version,
        }
    };
    Ok(entries.into_iter().map(row).collect())
}

fn registry_rows(folder: &Path) -> Result<Vec<ModelRow>, Failure> {
    let store = open_existing(folder)?;
    let manifests = store.list().map_err(Failure::failed)?;
    let row = |manifest: model::store::Manifest| ModelRow {
        path: store.path_of(&manifest).display().to_string(),
        source: "registry",
        size_bytes: manifest.size_bytes,
        class: Some(manifest.config.class),
        problem: None,
        name: manifest.name,
        version: manifest.version,
    };
    Ok(manifests.into_iter().map(row).collect())
}

fn remove(target: &str, folder: &Path) -> Result<(), Failure> {
    let parsed = target.rsplit_once(':').and_then(|(name, v)| Some((name, v.parse::<u64>().ok()?)));
    let (name, version) = parsed
        .ok_or_else(|| Failure::usage(format!("'{target}' is not of the form NAME:VERSION")))?;
    if open_existing(folder)?.remove(name, version).map_err(Failure::failed)? {
        println!("removed {name} version {version}");
        return Ok(());
    }
    Err(Failure::failed(format!("{name} version {version} is not registered")))
}

fn print(rows: &[ModelRow]) {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(5);
    println!("{:<width$}  version  class  {:>10}  source", "model", "size");
    for row in rows {
        let class = row.class.map_or("-", Class::as_str);
        let size = Bytes(row.size_bytes).to_string();
        println!("{:<width$}  {:<7}  {class:<5}  {size:>10}  {}", row.name, row.version, row.path);
        if let Some(problem) = &row.problem {
            println!("{:<width$}  {problem}", "");
        }
    }
}
