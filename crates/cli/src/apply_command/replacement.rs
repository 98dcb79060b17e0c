//! `atoll apply --replace`: from the plan in effect to another one, without a lost request.
//!
//! New servers start beside the old ones. When they are ready, the list of addresses changes, and
//! old servers end when nobody sends to them any more.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use assembly::Failure;
use planner::GpuKind;
use planner::apply::Change;
use planner::apply::transition::{TransitionChange, switched_to, transition};

use super::interrupt::{Interrupt, interrupted};
use super::journal::{self, AppliedChange, Journal};
use super::probe::Probe;
use super::{PlanExecutor, addresses, command_line, report, servers, undo_change, undo_to};
use crate::apply_args::ApplyArgs;
use crate::nvidia::{MachineState, NvidiaTools};

/// Replaces the plan in effect by the one with the changes `wanted`.
pub(super) fn run(
    args: &ApplyArgs,
    state: &Path,
    kind: &GpuKind,
    wanted: &[Change],
    probe: Probe,
) -> Result<(), Failure> {
    let mut journal = Journal::open(state)?;
    journal.forget(|done| {
        matches!(done.change, Change::StartServer(_)) && !servers::is_running(state, done.pid)
    });
    let tls = args.tls_cert.is_some();
    let server = |done: &&AppliedChange| matches!(done.change, Change::StartServer(_));
    if journal.done().iter().filter(server).any(|done| done.tls != tls) {
        let (now, then) = if tls { ("without", "with") } else { ("with", "without") };
        return Err(Failure::usage(format!(
            "the servers in effect listen {now} TLS, and these would listen {then}: use --undo \
             first"
        )));
    }
    let now: Vec<Change> = journal.done().iter().map(|done| done.change.clone()).collect();
    let steps = transition(kind, &now, wanted).map_err(Failure::failed)?;
    if args.dry_run {
        return dry_run(args, state, &journal, &steps);
    }
    journal.write()?;
    let divides = |step: &TransitionChange| match step {
        TransitionChange::Apply(change) | TransitionChange::Undo(change) => {
            matches!(change, Change::EnableMig { .. } | Change::CreateSlice { .. })
        }
        TransitionChange::Switch => false,
    };
    if steps.iter().any(divides) && !args.allow_mig_changes {
        return Err(Failure::usage(
            "this creates or destroys MIG instances; see --dry-run, then add --allow-mig-changes",
        ));
    }
    let machine = inspect(kind, &journal, wanted)?;
    let used = journal.done().iter().filter_map(|done| done.port).collect();
    let (tools, interrupt) = (NvidiaTools, Interrupt::install()?);
    let mut executor = PlanExecutor { args, tools, machine, state, used, probe, interrupt };
    carry_out(&mut executor, &mut journal, &steps)?;
    report(args, &journal)
}

/// The machine, with the slices in effect; GPUs that are not in use yet must be idle.
fn inspect(kind: &GpuKind, journal: &Journal, wanted: &[Change]) -> Result<MachineState, Failure> {
    let mut machine = NvidiaTools.inspect().map_err(Failure::failed)?;
    let gpus = |change: &Change| match change {
        Change::EnableMig { gpu } => Some((*gpu, true)),
        Change::StartDaemon { place } if place.start.is_none() => Some((place.gpu, false)),
        _ => None,
    };
    let ours: BTreeSet<u32> =
        journal.done().iter().filter_map(|done| gpus(&done.change)).map(|(gpu, _)| gpu).collect();
    for (gpu, mig) in wanted.iter().filter_map(gpus) {
        let may = match ours.contains(&gpu) {
            true => machine.is_of_kind(gpu, kind),
            false => machine.may_touch(gpu, kind, mig),
        };
        may.map_err(Failure::failed)?;
    }
    for done in journal.done() {
        if let (Change::CreateSlice { place, .. }, Some(uuid)) = (&done.change, &done.uuid) {
            machine.uuids.insert(place.to_string(), uuid.clone());
        }
    }
    Ok(machine)
}

fn carry_out(
    executor: &mut PlanExecutor<'_>,
    journal: &mut Journal,
    steps: &[TransitionChange],
) -> Result<(), Failure> {
    let before = journal.done().len();
    let (mut is_old_whole, mut switched) = (true, false);
    for (at, step) in steps.iter().enumerate() {
        let done = executor.interrupt.check().and_then(|()| match step {
            TransitionChange::Apply(change) => {
                let applied = journal.begin(change).and_then(|()| executor.apply(change));
                applied.and_then(|done| journal.finish(done))
            }
            TransitionChange::Switch => {
                switched = true;
                switch(executor, journal, steps, at)
            }
            TransitionChange::Undo(change) => {
                is_old_whole = false;
                undo(executor, journal, change)
            }
        });
        let Err(failure) = done else { continue };
        if !is_old_whole {
            let path = journal.path().display();
            let way = match executor.interrupt.is_set() {
                true => "the same command goes on, and --undo goes back",
                false => "repair it and use --replace or --undo",
            };
            let message = failure.message();
            return Err(
                failure.renamed(format!("{message}; {path} has what is in effect now: {way}"))
            );
        }
        tracing::error!("{}; the plan before stays", failure.message());
        addresses::write(executor.args, executor.state, journal.done()[..before].iter())?;
        if switched {
            // Clients may have read the new list.
            std::thread::sleep(Duration::from_millis(executor.args.switch_wait_ms));
        }
        undo_to(&executor.tools, executor.state, journal, before, &Interrupt::default())?;
        return Err(match executor.interrupt.is_set() {
            true => interrupted("interrupted; the plan before stays, and the same command goes on"),
            false => failure,
        });
    }
    if steps.is_empty() {
        // A call that was interrupted may have started the last server without listing it.
        addresses::write(executor.args, executor.state, journal.done().iter())?;
    }
    Ok(())
}

/// Sends requests to the servers that stay, and waits until nobody sends to the others.
fn switch(
    executor: &PlanExecutor<'_>,
    journal: &Journal,
    steps: &[TransitionChange],
    at: usize,
) -> Result<(), Failure> {
    let specs = journal.done().iter().filter_map(|done| match &done.change {
        Change::StartServer(spec) => Some(spec),
        _ => None,
    });
    let stay = switched_to(steps, at, specs);
    let stays = journal.done().iter().filter(|done| match &done.change {
        Change::StartServer(spec) => stay.contains(&spec),
        _ => false,
    });
    addresses::write(executor.args, executor.state, stays)?;
    if steps[at..].iter().any(|step| matches!(step, TransitionChange::Undo(_))) {
        executor.interrupt.sleep(Duration::from_millis(executor.args.switch_wait_ms))?;
    }
    Ok(())
}

fn undo(
    executor: &mut PlanExecutor<'_>,
    journal: &mut Journal,
    change: &Change,
) -> Result<(), Failure> {
    let found = journal.done().iter().find(|done| done.change == *change).cloned();
    let Some(done) = found else { return Ok(()) };
    undo_change(&executor.tools, executor.state, &done).map_err(Failure::failed)?;
    if let Some(port) = done.port {
        executor.used.remove(&port);
    }
    tracing::info!("undone: {}", journal::line(change));
    journal.forget(|one| one.change == *change);
    journal.write()
}

fn dry_run(
    args: &ApplyArgs,
    state: &Path,
    journal: &Journal,
    steps: &[TransitionChange],
) -> Result<(), Failure> {
    if args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({ "steps": steps }));
        println!("{}", text.map_err(Failure::failed)?);
        return Ok(());
    }
    let mut used: BTreeSet<u16> = journal.done().iter().filter_map(|done| done.port).collect();
    for step in steps {
        match step {
            TransitionChange::Apply(change) => {
                let mut port = args.first_port;
                if matches!(change, Change::StartServer(_)) {
                    port = super::free_port(args.first_port, &used)?;
                    used.insert(port);
                }
                println!("{}", command_line(args, state, change, port));
            }
            TransitionChange::Switch => {
                println!("# change {}", addresses::path(state).display());
                println!("# wait {} ms", args.switch_wait_ms);
            }
            TransitionChange::Undo(change) => println!("# undo {}", journal::line(change)),
        }
    }
    println!("# {} steps; nothing was done", steps.len());
    Ok(())
}
