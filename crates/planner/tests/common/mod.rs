//! Shared by test files: the measured profiles, if they are next to the checkout.
#![allow(dead_code)]

use std::path::PathBuf;

use planner::{GpuKind, PlanRules, Problem, Profiles, Service};

/// A file of the shared data; prints a message and returns `None` if the folder is absent.
pub fn shared(path: &str) -> Option<String> {
    let folder = std::env::var_os("ATOLL_SHARED_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let file = folder.join(path);
    match std::fs::read_to_string(&file) {
        Ok(text) => Some(text),
        Err(error) => {
            eprintln!("SKIPPED: {}: {error}; set ATOLL_SHARED_DATA", file.display());
            None
        }
    }
}

/// ParvaGPU's measured profiles.
pub fn profiles() -> Option<Profiles> {
    shared("parvagpu/profiles_a100_80gb.csv").map(|text| Profiles::from_csv(&text).unwrap())
}

/// A problem on A100-80GB.
pub fn problem(services: Vec<Service>, rules: PlanRules) -> Option<Problem> {
    let gpu = GpuKind::find("a100-80gb").unwrap();
    Some(Problem { gpu, services, profiles: profiles()?, rules })
}
