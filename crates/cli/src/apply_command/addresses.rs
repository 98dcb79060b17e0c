//! The list of servers of every service, for clients and proxies to read: `servers.json` in the
//! state folder, replaced as a whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assembly::Failure;
use planner::apply::Change;
use serde::Serialize;

use super::journal::AppliedChange;
use crate::apply_args::ApplyArgs;

#[derive(Serialize)]
struct AddressFile<'a> {
    services: BTreeMap<&'a str, Vec<ServerAddress<'a>>>,
}

#[derive(Serialize)]
struct ServerAddress<'a> {
    url: String,
    grpc: String,
    model: &'a str,
}

/// How the servers are spoken to.
pub(super) fn scheme(tls: bool) -> &'static str {
    if tls { "https" } else { "http" }
}

pub(super) fn path(state: &Path) -> PathBuf {
    state.join("servers.json")
}

/// Writes the servers among `applied`.
pub(super) fn write<'a>(
    args: &ApplyArgs,
    state: &Path,
    applied: impl Iterator<Item = &'a AppliedChange>,
) -> Result<(), Failure> {
    let mut services: BTreeMap<&str, Vec<ServerAddress<'_>>> = BTreeMap::new();
    for done in applied {
        let (Change::StartServer(spec), Some(port)) = (&done.change, done.port) else { continue };
        for (service, model) in spec.services.iter().zip(&spec.models) {
            let address = |port: u16| std::net::SocketAddr::new(args.host, port);
            services.entry(service).or_default().push(ServerAddress {
                url: format!("{}://{}", scheme(done.tls), address(port)),
                grpc: address(port.saturating_add(1)).to_string(),
                model,
            });
        }
    }
    let text = serde_json::to_string_pretty(&AddressFile { services }).map_err(Failure::failed)?;
    let (path, fresh) = (path(state), state.join("servers.json.new"));
    let named = |error| Failure::failed(format!("{}: {error}", path.display()));
    std::fs::write(&fresh, text).map_err(named)?;
    std::fs::rename(&fresh, &path).map_err(named)
}

/// Removes the list when the servers end.
pub(super) fn remove(state: &Path) -> Result<(), Failure> {
    let path = path(state);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::failed(format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}
