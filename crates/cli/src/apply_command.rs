//! `atoll apply`: applies a plan to this machine's GPUs, or prints what it would do.

mod addresses;
mod interrupt;
mod journal;
mod model_files;
mod plan_part;
mod probe;
mod replacement;
mod servers;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use assembly::Failure;
use planner::GpuKind;
use planner::apply::part::OtherPart;
use planner::apply::{Change, Partition, changes, check_changes};

use self::interrupt::{Interrupt, interrupted};
use self::journal::{AppliedChange, Journal};
use self::probe::Probe;
use self::servers::{PlannedBatches, ServerLaunch, start_server, stop_server};
use crate::apply_args::ApplyArgs;
use crate::nvidia::{MachineState, NvidiaTools};

/// Runs the command.
pub(crate) fn run(args: &ApplyArgs) -> Result<(), Failure> {
    let state = std::path::absolute(&args.state).map_err(Failure::failed)?;
    if args.undo {
        check_undo_flags(args)?;
        return undo(args, &state);
    }
    // Servers would take it from the environment, and nobody could verify them.
    if std::env::var_os("ATOLL_TLS_SELF_SIGNED").is_some_and(|value| value != "false") {
        return Err(Failure::usage(
            "ATOLL_TLS_SELF_SIGNED is set, and a plan's servers are verified: use --tls-cert",
        ));
    }
    let probe = Probe::new(args)?;
    let PlannedChanges { kind, list, elsewhere } = planned(args)?;
    if args.model_repository.is_empty() && !args.dry_run {
        return Err(Failure::usage("name the --model-repository the servers load from"));
    }
    if !args.model_repository.is_empty() {
        model_files::check(args, &list)?;
    }
    if args.replace {
        return replacement::run(args, &state, kind, &list, probe);
    }
    if args.dry_run {
        return dry_run(args, &state, &PlannedChanges { kind, list, elsewhere });
    }
    let mig = list.iter().any(|change| matches!(change, Change::EnableMig { .. }));
    if mig && !args.allow_mig_changes {
        return Err(Failure::usage(
            "this creates and destroys MIG instances; see --dry-run, then add --allow-mig-changes",
        ));
    }
    let tools = NvidiaTools;
    let machine = inspect(args, &tools, kind, &list)?;
    let interrupt = Interrupt::install()?;
    let mut journal = Journal::create(&state)?;
    let used = BTreeSet::new();
    let mut executor = PlanExecutor { args, tools, machine, state: &state, used, probe, interrupt };
    for change in &list {
        if executor.interrupt.is_set() {
            return Err(stopped(&journal, &state, list.len()));
        }
        let done = journal.begin(change).and_then(|()| executor.apply(change));
        match done {
            Ok(done) => journal.finish(done)?,
            // Only a server that is not ready yet is given up.
            Err(_) if executor.interrupt.is_set() => {
                return Err(stopped(&journal, &state, list.len()));
            }
            Err(failure) => {
                tracing::error!("{}; undoing what was done", failure.message());
                undo_all(&executor.tools, &state, journal)?;
                return Err(failure);
            }
        }
    }
    addresses::write(args, &state, journal.done().iter())?;
    report(args, &journal)?;
    if !args.json {
        elsewhere.iter().for_each(|part| println!("not for this machine: {part}"));
    }
    Ok(())
}

/// Flags beside `--undo` that say nothing to it.
fn check_undo_flags(args: &ApplyArgs) -> Result<(), Failure> {
    const TAKEN: [&str; 4] = ["undo", "state", "dry_run", "json"];
    match args.given.iter().find(|name| !TAKEN.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let flag = name.replace('_', "-");
            Err(Failure::usage(format!(
                "--{flag} does nothing with --undo, which needs --state only"
            )))
        }
    }
}

/// The failure of a call that was asked to end, with the ways on and back.
fn stopped(journal: &Journal, state: &Path, all: usize) -> Failure {
    let (done, path, state) = (journal.done().len(), journal.path().display(), state.display());
    interrupted(format!(
        "interrupted after {done} of {all} changes, which are in {path}: the same command with \
         --replace goes on, and atoll apply --undo --state {state} goes back"
    ))
}

/// What this call applies.
struct PlannedChanges {
    kind: &'static GpuKind,
    list: Vec<Change>,
    /// What other machines apply.
    elsewhere: Vec<OtherPart>,
}

/// The changes of the plan's part for this machine, checked.
fn planned(args: &ApplyArgs) -> Result<PlannedChanges, Failure> {
    let path = args.plan.as_ref().ok_or_else(|| Failure::usage("name the plan to apply"))?;
    let named =
        |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", path.display()));
    let (kind, part) = plan_part::read(args, path)?;
    let mps = args.partition == "mps" || !kind.has_mig();
    let partition = if mps { Partition::Mps } else { Partition::Mig };
    let list = changes(kind, &part.plan, &args.gpus, partition).map_err(|error| named(&error))?;
    if let Some(wrong) = check_changes(kind, &part.plan, partition, &list).first() {
        return Err(Failure::failed(format!("the checker rejects the changes: {wrong}")));
    }
    check_ports(args, &list)?;
    Ok(PlannedChanges { kind, list, elsewhere: part.elsewhere })
}

/// Refuses a plan with more servers than there are ports from the first one on.
fn check_ports(args: &ApplyArgs, list: &[Change]) -> Result<(), Failure> {
    let servers = list.iter().filter(|change| matches!(change, Change::StartServer(_))).count();
    let room = usize::from(u16::MAX - args.first_port + 1) / usize::from(SERVER_PORTS);
    match servers <= room {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "the plan has {servers} servers, and from --first-port {} on there are ports for \
             {room}",
            args.first_port
        ))),
    }
}

/// The machine as it is, or why it must not be changed.
fn inspect(
    args: &ApplyArgs,
    tools: &NvidiaTools,
    kind: &GpuKind,
    list: &[Change],
) -> Result<MachineState, Failure> {
    let machine = tools.inspect().map_err(Failure::failed)?;
    let used: Vec<u32> = (args.gpus.iter().copied())
        .filter(|gpu| {
            list.iter().any(|change| match change {
                Change::EnableMig { gpu: other } => other == gpu,
                Change::StartDaemon { place } => place.gpu == *gpu,
                _ => false,
            })
        })
        .collect();
    let mig = list.iter().any(|change| matches!(change, Change::EnableMig { .. }));
    for gpu in used {
        machine.may_touch(gpu, kind, mig).map_err(Failure::failed)?;
    }
    Ok(machine)
}

/// Applies changes one after another.
struct PlanExecutor<'a> {
    args: &'a ApplyArgs,
    tools: NvidiaTools,
    machine: MachineState,
    state: &'a Path,
    /// First ports of the servers.
    used: BTreeSet<u16>,
    probe: Probe,
    interrupt: Interrupt,
}

/// REST, gRPC and metrics.
const SERVER_PORTS: u16 = 3;

/// The first port of a server that starts now.
fn free_port(first: u16, used: &BTreeSet<u16>) -> Result<u16, Failure> {
    let mut ports = (first..=u16::MAX - SERVER_PORTS + 1).step_by(usize::from(SERVER_PORTS));
    ports.find(|port| !used.contains(port)).ok_or_else(|| Failure::failed("no ports left"))
}

impl PlanExecutor<'_> {
    fn apply(&mut self, change: &Change) -> Result<AppliedChange, Failure> {
        let change = change.clone();
        match &change {
            Change::EnableMig { gpu } => {
                let was_on = self.machine.mig_on(*gpu);
                if !was_on {
                    self.tools.enable_mig(*gpu).map_err(Failure::failed)?;
                }
                Ok(AppliedChange { untouched: was_on, ..AppliedChange::new(change) })
            }
            Change::CreateSlice { place, profile_id, start } => {
                let made = self.tools.create_slice(place.gpu, *profile_id, *start);
                let (instance, uuid) = made.map_err(Failure::failed)?;
                self.machine.uuids.insert(place.to_string(), uuid.clone());
                Ok(AppliedChange {
                    instance: Some(instance),
                    uuid: Some(uuid),
                    ..AppliedChange::new(change)
                })
            }
            Change::StartDaemon { place } => {
                let uuid = self.machine.uuid_of(*place).map_err(Failure::failed)?;
                let folder = mps_folder(self.state, &place.to_string());
                self.tools.start_daemon(&uuid, &folder).map_err(Failure::failed)?;
                Ok(AppliedChange { uuid: Some(uuid), ..AppliedChange::new(change) })
            }
            Change::StartServer(spec) => {
                let port = free_port(self.args.first_port, &self.used)?;
                let launch = ServerLaunch {
                    args: self.args,
                    state: self.state,
                    folder: &mps_folder(self.state, &spec.place.to_string()),
                    uuid: &self.machine.uuid_of(spec.place).map_err(Failure::failed)?,
                    port,
                    probe: &self.probe,
                    interrupt: &self.interrupt,
                };
                let pid = start_server(&launch, spec)?;
                self.used.insert(port);
                Ok(AppliedChange {
                    pid: Some(pid),
                    port: Some(port),
                    tls: self.args.tls_cert.is_some(),
                    ..AppliedChange::new(change)
                })
            }
        }
    }
}

/// Pipes and logs of the MPS daemon of a GPU or slice. A short name, because paths of Unix sockets
/// are short.
fn mps_folder(state: &Path, place: &str) -> PathBuf {
    state.join(format!("mps-{place}"))
}

/// Undoes the changes in the journal, from the end; what cannot be undone stays in it.
fn undo_all(tools: &NvidiaTools, state: &Path, mut journal: Journal) -> Result<(), Failure> {
    addresses::remove(state)?;
    undo_to(tools, state, &mut journal, 0, &Interrupt::default())?;
    journal.remove()
}

/// Undoes the changes after the first `kept` in the journal, from the end.
fn undo_to(
    tools: &NvidiaTools,
    state: &Path,
    journal: &mut Journal,
    kept: usize,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    while journal.done().len() > kept {
        if interrupt.is_set() {
            let (left, path) = (journal.done().len() - kept, journal.path().display());
            return Err(interrupted(format!(
                "interrupted; {left} changes are still in effect, and are in {path}: the same \
                 command with --undo goes on"
            )));
        }
        let Some(done) = journal.last().cloned() else { break };
        undo_change(tools, state, &done).map_err(|error| {
            let left = journal.path().display();
            Failure::failed(format!(
                "{error}; the remaining changes are in {left}: repair it and use --undo"
            ))
        })?;
        tracing::info!("undone: {}", journal::line(&done.change));
        journal.forget_last()?;
    }
    Ok(())
}

fn undo_change(tools: &NvidiaTools, state: &Path, done: &AppliedChange) -> Result<(), String> {
    match &done.change {
        _ if done.untouched => Ok(()),
        Change::StartServer(_) => stop_server(state, done.pid),
        Change::StartDaemon { place } => tools.stop_daemon(&mps_folder(state, &place.to_string())),
        Change::CreateSlice { place, .. } => match done.instance {
            Some(instance) => tools.destroy_slice(place.gpu, instance),
            None => Ok(()),
        },
        Change::EnableMig { gpu } => tools.disable_mig(*gpu),
    }
}

fn undo(args: &ApplyArgs, state: &Path) -> Result<(), Failure> {
    let mut journal = Journal::open(state)?;
    let undone: Vec<String> =
        journal.done().iter().rev().map(|done| journal::line(&done.change)).collect();
    if args.dry_run {
        match args.json {
            true => println!("{:#}", serde_json::json!({ "undo": undone })),
            false => undone.iter().for_each(|line| println!("undo {line}")),
        }
        return Ok(());
    }
    let interrupt = Interrupt::install()?;
    addresses::remove(state)?;
    undo_to(&NvidiaTools, state, &mut journal, 0, &interrupt)?;
    journal.remove()?;
    match args.json {
        true => println!("{:#}", serde_json::json!({ "undone": undone })),
        false => println!("{} changes undone", undone.len()),
    }
    Ok(())
}

/// Prints what would be done and, if the tools are installed, whether the GPUs may be changed.
fn dry_run(args: &ApplyArgs, state: &Path, planned: &PlannedChanges) -> Result<(), Failure> {
    let PlannedChanges { kind, list, elsewhere } = planned;
    let refused = inspect(args, &NvidiaTools, kind, list).err();
    if args.json {
        let refused = refused.as_ref().map(Failure::message);
        let report = serde_json::json!({
            "gpu_kind": kind.name, "changes": list, "refused": refused, "elsewhere": elsewhere
        });
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
        return Ok(());
    }
    let mut port = args.first_port;
    for change in list {
        println!("{}", command_line(args, state, change, port));
        if matches!(change, Change::StartServer(_)) {
            port = port.saturating_add(3);
        }
    }
    elsewhere.iter().for_each(|part| println!("# not for this machine: {part}"));
    match refused {
        Some(failure) => println!("# as things are it would be refused: {}", failure.message()),
        None => println!("# {} changes; nothing was done", list.len()),
    }
    Ok(())
}

fn command_line(args: &ApplyArgs, state: &Path, change: &Change, port: u16) -> String {
    match change {
        Change::EnableMig { gpu } => format!("nvidia-smi -i {gpu} -mig 1"),
        Change::CreateSlice { place, profile_id, start } => {
            format!("nvidia-smi mig -i {} -cgi {profile_id}:{start} -C", place.gpu)
        }
        Change::StartDaemon { place } => {
            let folder = mps_folder(state, &place.to_string());
            let folder = folder.display();
            format!(
                "CUDA_VISIBLE_DEVICES=<uuid of {place}> CUDA_MPS_PIPE_DIRECTORY={folder} \
                 CUDA_MPS_LOG_DIRECTORY={folder} nvidia-cuda-mps-control -d"
            )
        }
        Change::StartServer(spec) => {
            let environment = servers::environment(
                &mps_folder(state, &spec.place.to_string()),
                &format!("<uuid of {}>", spec.place),
                spec.percentage,
            );
            let environment: Vec<String> =
                environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let arguments = servers::arguments(args, state, spec, port).join(" ");
            let models = servers::planned_batches(spec).into_iter().map(|(model, planned)| {
                let PlannedBatches { batch, concurrent, cycle_ms } = planned;
                let cycle = cycle_ms.map_or(String::new(), |ms| format!(", cycle {ms:.1} ms"));
                format!("# {model}: batches of {batch}, {concurrent} at a time{cycle}\n")
            });
            format!("{}{} atoll {arguments}", models.collect::<String>(), environment.join(" "))
        }
    }
}

fn report(args: &ApplyArgs, journal: &Journal) -> Result<(), Failure> {
    if args.json {
        let text = serde_json::to_string_pretty(journal.done()).map_err(Failure::failed)?;
        println!("{text}");
        return Ok(());
    }
    for done in journal.done() {
        let Change::StartServer(spec) = &done.change else { continue };
        let (port, pid) = (done.port.unwrap_or(0), done.pid.unwrap_or(0));
        println!(
            "{:<10} {} at {}://{}, process {pid}, {} % of the threads",
            spec.place.to_string(),
            spec.services.join(", "),
            addresses::scheme(done.tls),
            SocketAddr::new(args.host, port),
            spec.percentage
        );
    }
    println!("{} changes applied; --undo reverts them", journal.done().len());
    Ok(())
}
