//! `atoll registry`: checks, repairs, exports and imports the registry.

use std::path::{Path, PathBuf};

use assembly::Failure;
use base::Bytes;
use model::store::{self, LoadMarkers, Store};
use serde::Serialize;

use crate::data_folder::user_data_folder;
use crate::registry_args::{RegistryAction, RegistryCommandArgs};

/// Runs the command.
pub(crate) fn run(args: &RegistryCommandArgs) -> Result<(), Failure> {
    let folder = args.data_dir.clone().or_else(user_data_folder);
    let folder = folder.ok_or_else(|| Failure::usage("name a --data-dir"))?;
    match &args.action {
        RegistryAction::Check => check(&folder, args.json),
        RegistryAction::Repair => repair(&folder, args.json),
        RegistryAction::Export { to, name } => export(&folder, to, name.as_deref()),
        RegistryAction::Import { from } => import(&folder, from, args.json),
        RegistryAction::RollBack { model } => roll_back(&folder, model),
        RegistryAction::Delete { model } => delete(&folder, model),
        RegistryAction::Quarantine => quarantine(&folder, args.json),
        RegistryAction::Release { model } => release(&folder, model),
    }
}

/// Opens a registry that exists, so that a misspelt path is an error.
pub(crate) fn open_existing(folder: &Path) -> Result<Store, Failure> {
    let there = [folder.join(store::DATABASE), folder.join("registry")];
    if !there.iter().any(|path| path.exists()) {
        return Err(Failure::failed(format!("{} holds no registry", folder.display())));
    }
    Store::open(folder).map_err(Failure::failed)
}

fn json(value: &impl Serialize) -> Result<(), Failure> {
    println!("{}", serde_json::to_string_pretty(value).map_err(Failure::failed)?);
    Ok(())
}

/// `NAME` or `NAME:VERSION`.
fn parse(model: &str) -> Result<(&str, Option<u64>), Failure> {
    let Some((name, version)) = model.rsplit_once(':') else { return Ok((model, None)) };
    match version.parse() {
        Ok(version) => Ok((name, Some(version))),
        Err(_) => Err(Failure::usage(format!("'{model}' is not of the form NAME:VERSION"))),
    }
}

fn check(folder: &Path, as_json: bool) -> Result<(), Failure> {
    let report = open_existing(folder)?.check().map_err(Failure::failed)?;
    if as_json {
        json(&report)?;
    } else {
        println!("{} models, {}", report.models, Bytes(report.bytes));
        report.problems.iter().for_each(|problem| println!("{problem}"));
    }
    match report.problems.len() {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} problems"))),
    }
}

fn repair(folder: &Path, as_json: bool) -> Result<(), Failure> {
    let report = store::repair(folder).map_err(Failure::failed)?;
    if as_json {
        json(&report)?;
    } else {
        if let Some(path) = &report.moved_database {
            println!("the damaged database is now {}", path.display());
        }
        report.restored.iter().for_each(|model| println!("restored {model}"));
        let unnamed = |path: &PathBuf| println!("no record names {}", path.display());
        report.unnamed.iter().for_each(unnamed);
        report.problems.iter().for_each(|problem| println!("{problem}"));
    }
    match report.problems.len() {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} problems remain"))),
    }
}

fn export(folder: &Path, to: &Path, name: Option<&str>) -> Result<(), Failure> {
    let count = open_existing(folder)?.export(to, name).map_err(Failure::failed)?;
    match (count, name) {
        (0, Some(name)) => Err(Failure::failed(format!("'{name}' is not registered"))),
        _ => {
            println!("exported {count} models to {}", to.display());
            Ok(())
        }
    }
}

fn import(folder: &Path, from: &Path, as_json: bool) -> Result<(), Failure> {
    let store = Store::open(folder).map_err(Failure::failed)?;
    let report = store.import(from).map_err(Failure::failed)?;
    if as_json {
        return json(&report);
    }
    report.added.iter().for_each(|model| println!("added {model}"));
    report.present.iter().for_each(|model| println!("{model} is there already"));
    Ok(())
}

fn roll_back(folder: &Path, model: &str) -> Result<(), Failure> {
    let (name, version) = parse(model)?;
    match open_existing(folder)?.roll_back(name, version).map_err(Failure::failed)? {
        Some(manifest) => {
            println!("version {} of {name} is in force", manifest.version);
            Ok(())
        }
        None => Err(Failure::failed(format!("there is no such version of '{name}'"))),
    }
}

fn delete(folder: &Path, model: &str) -> Result<(), Failure> {
    let (name, version) = parse(model)?;
    let store = open_existing(folder)?;
    let count = match version {
        Some(version) => usize::from(store.remove(name, version).map_err(Failure::failed)?),
        None => store.remove_all(name).map_err(Failure::failed)?,
    };
    match count {
        0 => Err(Failure::failed(format!("{model} is not registered"))),
        count => {
            println!("deleted {count} versions of {name}");
            Ok(())
        }
    }
}

fn quarantine(folder: &Path, as_json: bool) -> Result<(), Failure> {
    let list = LoadMarkers::in_data_dir(folder).list().map_err(Failure::failed)?;
    if as_json {
        return json(&list);
    }
    for quarantined in list {
        let (model, reason) = (quarantined.model, quarantined.reason);
        println!("{}:{}  {reason}", model.name, model.version);
    }
    Ok(())
}

fn release(folder: &Path, model: &str) -> Result<(), Failure> {
    let (name, version) = parse(model)?;
    let version = version.ok_or_else(|| Failure::usage("name a version, as NAME:VERSION"))?;
    let is_name = model::repository::is_valid_name(name);
    let released = is_name
        && LoadMarkers::in_data_dir(folder).release(name, version).map_err(Failure::failed)?;
    match released {
        true => {
            println!("released {model}; load it with POST /v2/repository/models/{name}/load");
            Ok(())
        }
        false => Err(Failure::failed(format!("{model} is not quarantined"))),
    }
}
