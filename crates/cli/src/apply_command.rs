//! `atoll apply`: applies a plan to this machine's GPUs, or prints what it would do.

mod addresses;
mod journal;
mod plan_part;
mod replacement;
mod servers;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use assembly::Failure;
use planner::GpuKind;
use planner::apply::part::OtherPart;
use planner::apply::{Change, Partition, changes, check_changes};

use self::journal::{AppliedChange, Journal};
use self::servers::{PlannedBatches, ServerLaunch, start_server, stop_server};
use crate::args::ApplyArgs;
use crate::nvidia::{MachineState, NvidiaTools};

/// Runs the command.
pub(crate) fn run(args: &ApplyArgs) -> Result<(), Failure> {
    let state = std::path::absolute(&args.state).map_err(Failure::failed)?;
    if args.undo {
        return undo(args, &state);
    }
    let PlannedChanges { kind, list, elsewhere } = planned(args)?;
    if args.model_repository.is_empty() && !args.dry_run {
        return Err(Failure::usage("name the --model-repository the servers load from"));
    }
    if args.replace {
        return replacement::run(args, &state, kind, &list);
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
    let mut journal = Journal::create(&state)?;
    let mut executor = PlanExecutor { args, tools, machine, state: &state, used: BTreeSet::new() };
    for change in &list {
        let done = journal.begin(change).and_then(|()| executor.apply(change));
        match done {
            Ok(done) => journal.finish(done)?,
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
    Ok(PlannedChanges { kind, list, elsewhere: part.elsewhere })
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
}

/// REST, gRPC and metrics.
const SERVER_PORTS: u16 = 3;

/// The first port of a server that starts now.
fn free_port(first: u16, used: &BTreeSet<u16>) -> Result<u16, Failure> {
    let mut ports = (first..=u16::MAX - SERVER_PORTS).step_by(usize::from(SERVER_PORTS));
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
                };
                let pid = start_server(&launch, spec)?;
                self.used.insert(port);
                Ok(AppliedChange { pid: Some(pid), port: Some(port), ..AppliedChange::new(change) })
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
    undo_to(tools, state, &mut journal, 0)?;
    journal.remove()
}

/// Undoes the changes after the first `kept` in the journal, from the end.
fn undo_to(
    tools: &NvidiaTools,
    state: &Path,
    journal: &mut Journal,
    kept: usize,
) -> Result<(), Failure> {
    while journal.done().len() > kept {
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
    let journal = Journal::open(state)?;
    if args.dry_run {
        for done in journal.done().iter().rev() {
            println!("undo {}", journal::line(&done.change));
        }
        return Ok(());
    }
    undo_all(&NvidiaTools, state, journal)
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
            "{:<10} {} at http://{}:{port}, process {pid}, {} % of the threads",
            spec.place.to_string(),
            spec.services.join(", "),
            args.host,
            spec.percentage
        );
    }
    println!("{} changes applied; --undo reverts them", journal.done().len());
    Ok(())
}
