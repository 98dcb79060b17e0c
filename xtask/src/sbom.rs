//! The bill of materials of the `atoll` binary: CycloneDX in JSON, from `cargo metadata` and the
//! hashes in Cargo.lock. The same sources give the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand, Package, PackageId};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The crate whose binary is described.
const BINARY_CRATE: &str = "cli";
/// What is built and released.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The bill of materials of the workspace in `root`.
pub(crate) fn make(root: &Path) -> Result<Value, String> {
    let metadata = metadata(root)?;
    let lock = root.join("Cargo.lock");
    let lock =
        std::fs::read_to_string(&lock).map_err(|err| format!("{}: {err}", lock.display()))?;
    describe(&metadata, &checksums(&lock))
}

fn metadata(root: &Path) -> Result<Metadata, String> {
    let manifest = root.join("Cargo.toml");
    let options = ["--locked", "--filter-platform", TARGET].map(str::to_string);
    MetadataCommand::new()
        .manifest_path(&manifest)
        .features(CargoOpt::SomeFeatures(Vec::new()))
        .other_options(options)
        .exec()
        .map_err(|err| format!("{}: {err}", manifest.display()))
}

/// SHA-256 of each package from a registry, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_start_matches(" = ").trim_matches('"').to_string())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (field("name"), field("version"), field("checksum"))
        {
            found.insert((name, version), sum);
        }
    }
    found
}

/// Packages that are linked into the binary, or run while it is built.
fn reachable<'a>(
    metadata: &'a Metadata,
    start: &'a PackageId,
) -> Result<BTreeMap<&'a PackageId, BTreeSet<&'a PackageId>>, String> {
    let resolve = metadata.resolve.as_ref().ok_or("cargo metadata resolved nothing")?;
    let nodes: BTreeMap<_, _> = resolve.nodes.iter().map(|node| (&node.id, node)).collect();
    let (mut edges, mut open) = (BTreeMap::new(), vec![start]);
    while let Some(id) = open.pop() {
        if edges.contains_key(id) {
            continue;
        }
        let node = nodes.get(id).ok_or_else(|| format!("{id} is not resolved"))?;
        let used = node.deps.iter().filter(|dependency| {
            dependency.dep_kinds.iter().any(|info| info.kind != DependencyKind::Development)
        });
        let used: BTreeSet<&PackageId> = used.map(|dependency| &dependency.pkg).collect();
        open.extend(used.iter().copied());
        edges.insert(id, used);
    }
    Ok(edges)
}

fn reference(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

fn component(package: &Package, checksums: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": reference(package),
        "name": package.name.to_string(),
        "version": package.version.to_string(),
        "purl": reference(package),
    });
    let license = package.license.as_ref().map(|license| license.replace('/', " OR "));
    if let Some(license) = license {
        component["licenses"] = json!([{ "expression": license }]);
    }
    let key = (package.name.to_string(), package.version.to_string());
    if let Some(sum) = checksums.get(&key) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    if let Some(url) = &package.repository {
        component["externalReferences"] = json!([{ "type": "vcs", "url": url }]);
    }
    component
}

fn describe(
    metadata: &Metadata,
    checksums: &BTreeMap<(String, String), String>,
) -> Result<Value, String> {
    let packages: BTreeMap<&PackageId, &Package> =
        metadata.packages.iter().map(|package| (&package.id, package)).collect();
    let members = metadata.workspace_packages();
    let binary = members.iter().find(|package| package.name == BINARY_CRATE);
    let binary = binary.ok_or_else(|| format!("there is no crate {BINARY_CRATE}"))?;
    let edges = reachable(metadata, &binary.id)?;
    let package =
        |id: &PackageId| packages.get(id).copied().ok_or_else(|| format!("{id} is not described"));
    let (mut components, mut dependencies) = (BTreeMap::new(), BTreeMap::new());
    for (id, used) in &edges {
        let one = package(id)?;
        let used: Result<BTreeSet<String>, String> =
            used.iter().map(|id| package(id).map(reference)).collect();
        dependencies.insert(reference(one), json!({ "ref": reference(one), "dependsOn": used? }));
        if *id != &binary.id {
            components.insert(reference(one), component(one, checksums));
        }
    }
    let mut main = component(binary, checksums);
    main["type"] = json!("application");
    let components: Vec<Value> = components.into_values().collect();
    let dependencies: Vec<Value> = dependencies.into_values().collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": serial_number(&components),
        "version": 1,
        "metadata": { "component": main },
        "components": components,
        "dependencies": dependencies,
    }))
}

/// A UUID that depends on nothing but the components.
fn serial_number(components: &[Value]) -> String {
    let mut hash: [u8; 32] = Sha256::digest(Value::from(components.to_vec()).to_string()).into();
    // Version 8: the bits are the application's own.
    hash[6] = (hash[6] & 0x0f) | 0x80;
    hash[8] = (hash[8] & 0x3f) | 0x80;
    let mut text = "urn:uuid:".to_string();
    for (index, byte) in hash[..16].iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bill_of_materials_is_complete() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let bill = make(&root).unwrap();
        let components = bill["components"].as_array().unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let mut known: BTreeSet<String> =
            components.iter().map(|component| text(&component["bom-ref"])).collect();
        known.insert(text(&bill["metadata"]["component"]["bom-ref"]));
        let names: BTreeSet<String> = components.iter().map(|one| text(&one["name"])).collect();
        for expected in ["tokio", "rustls", "ring", "hyper", "server", "model", "prost"] {
            assert!(names.contains(expected), "{expected} is missing");
        }
        // Neither tools nor what only tests use.
        for other in ["xtask", "cargo_metadata", "proptest"] {
            assert!(!names.contains(other), "{other} is not in the binary");
        }
        for component in components {
            let name = &component["name"];
            assert!(component["licenses"][0]["expression"].is_string(), "{name} has no licence");
            let own = component["hashes"].is_null();
            let hash = text(&component["hashes"][0]["content"]);
            assert!(own || hash.len() == 64, "{name} has the hash '{hash}'");
        }
        let unhashed = components.iter().filter(|one| one["hashes"].is_null());
        // The crates of this workspace; everything else comes from a registry.
        assert!((10..20).contains(&unhashed.count()));
        for dependency in bill["dependencies"].as_array().unwrap() {
            assert!(known.contains(&text(&dependency["ref"])));
            for used in dependency["dependsOn"].as_array().unwrap() {
                assert!(known.contains(&text(used)), "{used} is not described");
            }
        }
        assert_eq!(bill, make(&root).unwrap());
    }

    #[test]
    fn hashes_are_read_from_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\
                    source = \"registry\"\nchecksum = \"ff\"\n\n[[package]]\nname = \"own\"\n\
                    version = \"0.1.0\"\n";
        let found = checksums(lock);
        assert_eq!(found.len(), 1);
        assert_eq!(found[&("a".to_string(), "1.0.0".to_string())], "ff");
    }
}
