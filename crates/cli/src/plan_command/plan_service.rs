//! Plans for the console: services and profiles in, slices, bound and commands out.

use std::sync::Arc;

use api::ApiError;
use api::error::ApiResult;
use base::{Clock, MonotonicClock, Nanos};
use planner::plan::GpuFile;
use planner::{
    Algorithm, GpuKind, PlanError, PlanRules, Problem, ProfileTable, SearchControl, SearchProgress,
    ServiceList, Sharing, check, render,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use server::PlanFn;

/// Maximum time of a search: a person waits for it.
const MAX_SEARCH: Nanos = Nanos::from_millis(5_000);
/// Maximum number of services; more take the command line.
const MAX_SERVICES: usize = 1_000;

/// What the console sends.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanRequest {
    /// Services in TOML, as for `atoll plan --services`.
    services: String,
    /// Profiles in CSV or JSON, as `atoll profile` writes them.
    profiles: String,
    #[serde(default = "default_gpu")]
    gpu: String,
    #[serde(default)]
    headroom: f64,
    /// Whether services may share the time of a slice.
    #[serde(default)]
    share_time: bool,
    /// Plan with profiles of another kind of GPU.
    #[serde(default)]
    foreign_profiles: bool,
    /// All rates are multiplied by it.
    #[serde(default = "default_scale")]
    rate_scale: f64,
    /// All objectives are multiplied by it.
    #[serde(default = "default_scale")]
    slo_scale: f64,
}

fn default_gpu() -> String {
    "a100-80gb".to_string()
}

fn default_scale() -> f64 {
    1.0
}

/// What the console gets.
#[derive(Debug, Serialize)]
struct PlanReply {
    gpu_kind: &'static str,
    has_mig: bool,
    /// Compute slices of a GPU; its memory has at most as many and one.
    gpus: usize,
    lower_bound: usize,
    bound: f64,
    seconds: f64,
    stopped: bool,
    faults: Vec<String>,
    plan: Vec<GpuFile>,
    picture: String,
    commands: String,
    gpu_kinds: Vec<&'static str>,
}

/// The planner of a server.
pub(crate) fn plan_fn() -> PlanFn {
    PlanFn(Arc::new(plan))
}

fn invalid(what: &str) -> impl Fn(PlanError) -> ApiError + '_ {
    move |error| ApiError::invalid(format!("{what}: {error}"))
}

fn plan(request: Value) -> ApiResult<Value> {
    let request: PlanRequest = serde_json::from_value(request)
        .map_err(|error| ApiError::invalid(format!("the request: {error}")))?;
    let (problem, faults) = problem(&request)?;
    let clock = MonotonicClock::new();
    let mut go_on = |_: SearchProgress| clock.now() < MAX_SEARCH;
    let mut control = SearchControl::new(&clock, &mut go_on);
    let answer = planner::run(&problem, Algorithm::Certified, &mut control)
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    let solution = &answer.solution;
    if let Some(violation) = check(&problem, &solution.plan).first() {
        return Err(ApiError::internal(format!("the checker rejects the plan: {violation}")));
    }
    let reply = PlanReply {
        gpu_kind: problem.gpu.name,
        has_mig: problem.gpu.has_mig(),
        gpus: answer.gpus,
        lower_bound: solution.lower_bound,
        bound: solution.bound,
        seconds: solution.seconds,
        stopped: solution.stopped,
        faults,
        plan: solution.plan.to_file(&problem),
        picture: render::picture(&problem, &solution.plan, false),
        commands: render::commands(&problem, &solution.plan),
        gpu_kinds: planner::gpu::GPU_KINDS.iter().map(|kind| kind.name).collect(),
    };
    serde_json::to_value(&reply).map_err(|error| ApiError::internal(error.to_string()))
}

/// The problem, and what is wrong with the services that are left out.
fn problem(request: &PlanRequest) -> ApiResult<(Problem, Vec<String>)> {
    for (name, scale, range) in [
        ("rate_scale", request.rate_scale, 0.01..=100.0),
        ("slo_scale", request.slo_scale, 0.01..=100.0),
        ("headroom", request.headroom, 0.0..=10.0),
    ] {
        if !range.contains(&scale) {
            let (from, to) = (range.start(), range.end());
            return Err(ApiError::invalid(format!("{name} must be from {from} to {to}")));
        }
    }
    let gpu = GpuKind::find(&request.gpu).map_err(invalid("gpu"))?;
    let (mut list, faults) =
        ServiceList::from_toml(&request.services).map_err(invalid("services"))?;
    if list.services.is_empty() {
        let why = faults.first().map_or(String::new(), |fault| format!(": {fault}"));
        let help = "each is a [[service]] table with name, model, rate and slo_ms";
        return Err(ApiError::invalid(format!("there are no services to plan{why}; {help}")));
    }
    if list.services.len() > MAX_SERVICES {
        let message = format!("more than {MAX_SERVICES} services; use atoll plan");
        return Err(ApiError::invalid(message));
    }
    for service in &mut list.services {
        service.rate *= request.rate_scale;
        service.slo_ms *= request.slo_scale;
    }
    let json = request.profiles.trim_start().starts_with(['{', '[']);
    let table = match json {
        true => ProfileTable::from_json(&request.profiles),
        false => ProfileTable::from_csv(&request.profiles),
    };
    let table = table.map_err(invalid("profiles"))?;
    let profiles = table.of_kind(gpu, request.foreign_profiles).map_err(invalid("profiles"))?;
    let rules = PlanRules {
        sharing: if request.share_time { Sharing::Time } else { Sharing::None },
        headroom: request.headroom,
        own_headroom: list.own_headroom.clone(),
        ..PlanRules::default()
    };
    let whole = Problem { gpu, services: list.services, profiles, rules };
    let mut faults: Vec<String> = faults.iter().map(PlanError::to_string).collect();
    let line = |(service, fault): &(usize, PlanError)| {
        format!("line {}: {fault}", list.lines[*service].of(fault))
    };
    faults.extend(whole.faults().iter().map(line));
    match whole.without_faults() {
        Ok((rest, _)) => Ok((rest, faults)),
        Err(_) => Err(ApiError::invalid(format!("services: {}", faults.join("\n")))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SERVICES: &str = "[[service]]\nname = \"search\"\nmodel = \"bert\"\nrate = 400\n\
                            slo_ms = 100\n";
    const PROFILES: &str = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
                            bert,1,8,1,200,40\nbert,7,8,1,1500,6\n";

    #[test]
    fn a_plan_has_slices_a_bound_and_commands() {
        let request = json!({ "services": SERVICES, "profiles": PROFILES });
        let reply = plan(request.clone()).expect("a plan");
        assert_eq!((reply["gpus"].as_u64(), reply["lower_bound"].as_u64()), (Some(1), Some(1)));
        assert_eq!(reply["plan"][0]["slices"][0]["services"][0]["name"], "search");
        assert!(reply["commands"].as_str().is_some_and(|text| text.contains("nvidia-smi")));
        let mut more = request;
        more["rate_scale"] = json!(20.0);
        assert!(plan(more).expect("a larger plan")["gpus"].as_u64() > Some(1));
    }

    #[test]
    fn wrong_inputs_are_refused_with_what_helps() {
        let refused = |request: Value| plan(request).unwrap_err().to_string();
        let error = refused(json!({ "services": "", "profiles": PROFILES }));
        assert!(error.contains("[[service]]"), "{error}");
        let error = refused(json!({ "services": SERVICES, "profiles": "x" }));
        assert!(error.contains("profiles"), "{error}");
        let error =
            refused(json!({ "services": SERVICES, "profiles": PROFILES, "rate_scale": 1e9 }));
        assert!(error.contains("rate_scale"), "{error}");
        assert!(refused(json!({ "services": SERVICES })).contains("profiles"));
        let services = SERVICES.replace("slo_ms = 100", "slo_ms = 1");
        let error = refused(json!({ "services": services, "profiles": PROFILES }));
        assert!(error.contains("services: line 5: service 'search'"), "{error}");
        // Beside one that can be planned it is left out, with the same words.
        let two = SERVICES.replace("search", "two") + &services;
        let reply = plan(json!({ "services": two, "profiles": PROFILES })).expect("a plan");
        assert_eq!(reply["faults"].as_array().map(Vec::len), Some(1));
        assert!(reply["faults"][0].as_str().is_some_and(|text| text.contains("line 10")));
        let twice = format!("{PROFILES}bert,1,8,1,900,4\n");
        let error = refused(json!({ "services": SERVICES, "profiles": twice }));
        assert!(error.contains("profiles: line 4:") && error.contains("line 2"), "{error}");
    }
}
