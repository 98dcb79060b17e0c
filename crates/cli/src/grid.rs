//! `atoll profile --grid`: measures batch x processes x slice, as the table that `atoll plan`
//! reads.
//!
//! A point is measured with as many processes of this binary as it names. Each prepares itself,
//! reports that it is ready, and waits; when all are ready they start at once, and each reports its
//! results.

mod member;
mod table;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use assembly::progress::Progress;
use assembly::{Failure, sample_inputs};
use planner::GpuKind;

pub(crate) use self::member::run_member;
use self::member::{GO, MemberReport, READY};
use self::table::{GridPoint, GridRow, GridTable};
use crate::args::ProfileArgs;
use crate::nvidia;

/// Max points of one grid.
const POINTS_MAX: usize = 10_000;
/// How long after the measured time a process may take to report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Runs the command.
pub(crate) fn run(args: &ProfileArgs) -> Result<(), Failure> {
    let points = points(args)?;
    let shares = SliceShares::new(args)?;
    let progress = Progress::new(points.len() as u64, "points");
    let name = match &args.name {
        Some(name) => name.clone(),
        None => {
            let stem = args.model.file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        }
    };
    let mut table = GridTable::new(&name, &shares.device_name()?).map_err(Failure::usage)?;
    for point in points {
        let row = match measure(args, &shares, point) {
            Ok(row) => row,
            Err(failure) => {
                tracing::warn!("{point}: {}", failure.message());
                GridRow::failed(point, shares.percent(point.slice))
            }
        };
        table.push(&row);
        progress.advance();
    }
    drop(progress);
    if table.measured() == 0 {
        return Err(Failure::failed("no point could be measured"));
    }
    match &args.output {
        Some(path) => std::fs::write(path, table.text())
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display()))),
        None => {
            print!("{}", table.text());
            Ok(())
        }
    }
}

/// The points of the grid, in the table's order.
fn points(args: &ProfileArgs) -> Result<Vec<GridPoint>, Failure> {
    if !(0.01..=3600.0).contains(&args.seconds) {
        return Err(Failure::usage(format!("--seconds {} is not from 0.01 to 3600", args.seconds)));
    }
    if let Some(slice) = args.slices.iter().find(|slice| **slice > args.compute_slices) {
        let all = args.compute_slices;
        return Err(Failure::usage(format!("--slices {slice} is more than the device's {all}")));
    }
    let plan = assembly::compile_file(&args.model)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    let batches = match sample_inputs::batch_symbol(&plan) {
        Some(_) => args.batches.clone(),
        None => {
            tracing::warn!("the model's batch is fixed; it is taken as one request");
            vec![1]
        }
    };
    if batches.contains(&0) {
        return Err(Failure::usage("--batches are at least 1"));
    }
    let all = args.slices.len() * batches.len() * args.processes.len();
    if all > POINTS_MAX {
        return Err(Failure::usage(format!("{all} points are more than {POINTS_MAX}")));
    }
    let mut points = Vec::with_capacity(all);
    for &slice in &args.slices {
        for &batch in &batches {
            points.extend(args.processes.iter().map(|&processes| GridPoint {
                slice,
                batch,
                processes,
            }));
        }
    }
    Ok(points)
}

/// What a slice means on this device.
enum SliceShares {
    /// Threads for a share of the cores.
    Cores { cores: usize, of: u8 },
    /// A percentage of the GPU's threads, through MPS; `gpu` as nvidia-smi names it.
    Gpu { gpu: String, of: u8, mps: bool },
}

impl SliceShares {
    fn new(args: &ProfileArgs) -> Result<SliceShares, Failure> {
        let of = args.compute_slices;
        let Some(number) = args.device.device.strip_prefix("cuda:") else {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            tracing::info!("on the CPU a slice is its share of {cores} cores, as threads");
            return Ok(SliceShares::Cores { cores, of });
        };
        let alone = args.slices.iter().all(|slice| *slice == of) && args.processes == [1];
        let mps = nvidia::daemon_replies();
        if let Err(error) = &mps
            && !alone
        {
            return Err(Failure::usage(format!(
                "shares of a GPU and concurrent processes need an MPS daemon: {error}\n  start one \
                 with 'nvidia-cuda-mps-control -d', or use --slices {of} --processes 1"
            )));
        }
        // CUDA numbers the visible GPUs, nvidia-smi all of them.
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let place: Option<usize> = number.parse().ok();
        let named = place.and_then(|place| visible.split(',').nth(place)).map(str::trim);
        let gpu = named.filter(|name| !name.is_empty()).unwrap_or(number).to_string();
        nvidia::memory_used_mib(&gpu).map_err(Failure::failed)?;
        Ok(SliceShares::Gpu { gpu, of, mps: mps.is_ok() })
    }

    /// The device's name in the table: that of its GPU kind where the planner knows it.
    fn device_name(&self) -> Result<String, Failure> {
        match self {
            SliceShares::Cores { .. } => Ok("cpu".to_string()),
            SliceShares::Gpu { gpu, .. } => {
                let (name, memory_mib) = nvidia::name_and_memory(gpu).map_err(Failure::failed)?;
                let kind = GpuKind::of_device(&name, memory_mib);
                Ok(kind.map_or(name, |kind| kind.name.to_string()))
            }
        }
    }

    /// Share of the device in percent.
    fn percent(&self, slice: u8) -> u32 {
        let (SliceShares::Cores { of, .. } | SliceShares::Gpu { of, .. }) = self;
        100 * u32::from(slice) / u32::from(*of)
    }

    fn set(&self, command: &mut Command, args: &ProfileArgs, point: GridPoint) {
        match self {
            SliceShares::Cores { cores, of } => {
                let all = cores * usize::from(point.slice) / usize::from(*of);
                let threads = (all / point.processes as usize).max(1);
                command.arg("--threads").arg(threads.to_string());
            }
            SliceShares::Gpu { mps, .. } => {
                if *mps {
                    // All processes of a slice share its threads.
                    let percent = self.percent(point.slice).max(1).to_string();
                    command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent);
                }
                command.arg("--threads").arg(args.device.settings.threads.to_string());
            }
        }
    }

    /// Memory in use before the processes start; on the CPU processes report their own.
    fn memory_before(&self) -> Result<u64, Failure> {
        match self {
            SliceShares::Cores { .. } => Ok(0),
            SliceShares::Gpu { gpu, .. } => nvidia::memory_used_mib(gpu).map_err(Failure::failed),
        }
    }

    fn memory_bytes(&self, before: u64, reports: &[MemberReport]) -> Result<u64, Failure> {
        match self {
            SliceShares::Cores { .. } => Ok(reports.iter().map(|one| one.peak_bytes).sum()),
            SliceShares::Gpu { gpu, .. } => {
                let now = nvidia::memory_used_mib(gpu).map_err(Failure::failed)?;
                Ok(now.saturating_sub(before) * MIB)
            }
        }
    }
}

/// A process of a point.
struct GridProcess {
    child: Child,
    lines: Receiver<String>,
}

impl GridProcess {
    fn start(
        args: &ProfileArgs,
        shares: &SliceShares,
        point: GridPoint,
    ) -> Result<GridProcess, Failure> {
        let program = std::env::current_exe().map_err(Failure::failed)?;
        let mut command = Command::new(program);
        command.args(["--log", "warn", "profile"]).arg(&args.model);
        command.arg("--grid-member").arg(point.batch.to_string());
        command.arg("--seconds").arg(args.seconds.to_string());
        command.arg("--device").arg(&args.device.device);
        for bind in &args.bind {
            command.arg("--bind").arg(bind);
        }
        if let Some(folder) = &args.device.settings.kernel_cache {
            command.arg("--kernel-cache").arg(folder);
        }
        if let Some(folder) = &args.device.settings.cuda_toolkit {
            command.arg("--cuda-toolkit").arg(folder);
        }
        command.arg("--precision").arg(args.device.settings.precision.name());
        shares.set(&mut command, args, point);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(Failure::failed)?;
        let stdout = child.stdout.take().ok_or_else(|| Failure::failed("no standard output"))?;
        let (sender, lines) = sync_channel(8);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(GridProcess { child, lines })
    }

    fn line(&mut self, within: Duration) -> Result<String, Failure> {
        match self.lines.recv_timeout(within) {
            Ok(line) => Ok(line),
            Err(_) => {
                // It ended or hangs. Its messages went to standard error.
                let _ = self.child.kill();
                Err(Failure::failed("a process ended or took too long"))
            }
        }
    }

    fn go(&mut self) -> Result<(), Failure> {
        let stdin =
            self.child.stdin.as_mut().ok_or_else(|| Failure::failed("no standard input"))?;
        writeln!(stdin, "{GO}").and_then(|()| stdin.flush()).map_err(Failure::failed)
    }
}

impl Drop for GridProcess {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure(args: &ProfileArgs, shares: &SliceShares, point: GridPoint) -> Result<GridRow, Failure> {
    let before = shares.memory_before()?;
    let start = |_| GridProcess::start(args, shares, point);
    let mut processes: Vec<GridProcess> =
        (0..point.processes).map(start).collect::<Result<_, _>>()?;
    let ready_within = Duration::from_secs(args.start_timeout_secs);
    for member in &mut processes {
        let line = member.line(ready_within)?;
        if line != READY {
            return Err(Failure::failed(format!("a process wrote '{line}' before it was ready")));
        }
    }
    processes.iter_mut().try_for_each(GridProcess::go)?;
    let within = Duration::from_secs_f64(args.seconds) + REPORT_TIMEOUT;
    let mut reports = Vec::new();
    for member in &mut processes {
        let line = member.line(within)?;
        let report: MemberReport = serde_json::from_str(&line).map_err(Failure::failed)?;
        reports.push(report);
    }
    // The processes wait until they are killed, so their memory is still in use.
    let memory_bytes = shares.memory_bytes(before, &reports)?;
    GridRow::measured(point, shares.percent(point.slice), &reports, memory_bytes)
        .map_err(Failure::failed)
}
