//! NVIDIA's command line tools: runs them and parses their output.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use planner::GpuKind;
use planner::apply::SliceLocation;

/// Resetting a GPU for MIG takes tens of seconds.
const TOOL_TIMEOUT: Duration = Duration::from_secs(180);

/// The tools, found on PATH.
pub(crate) struct NvidiaTools;

/// A GPU as `nvidia-smi` reports it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GpuInfo {
    pub(crate) index: u32,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) memory_mib: u64,
    /// `Enabled`, `Disabled`, or `[N/A]` without MIG.
    pub(crate) mig_mode: String,
    /// Identifiers of its MIG devices.
    pub(crate) mig_devices: Vec<String>,
}

/// A process that computes on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GpuProcess {
    pub(crate) uuid: String,
    pub(crate) pid: String,
    pub(crate) name: String,
}

/// The machine before anything is changed.
pub(crate) struct MachineState {
    pub(crate) gpus: Vec<GpuInfo>,
    pub(crate) running: Vec<GpuProcess>,
    /// Identifiers of the slices created since, by location.
    pub(crate) uuids: BTreeMap<String, String>,
}

impl MachineState {
    fn gpu(&self, index: u32) -> Option<&GpuInfo> {
        self.gpus.iter().find(|gpu| gpu.index == index)
    }

    pub(crate) fn mig_on(&self, index: u32) -> bool {
        self.gpu(index).is_some_and(|gpu| gpu.mig_mode == "Enabled")
    }

    /// Whether a GPU is of the plan's kind; otherwise why not.
    pub(crate) fn is_of_kind(&self, index: u32, kind: &GpuKind) -> Result<(), String> {
        let gpu = self.gpu(index).ok_or_else(|| format!("nvidia-smi knows no gpu {index}"))?;
        let GpuInfo { name, memory_mib, .. } = gpu;
        match kind.is_device(name, *memory_mib) {
            true => Ok(()),
            false => Err(format!(
                "gpu {index} is a {name} with {memory_mib} MiB; the plan is for {}",
                kind.name
            )),
        }
    }

    /// Whether a GPU is of the plan's kind and idle; otherwise why not.
    pub(crate) fn may_touch(&self, index: u32, kind: &GpuKind, mig: bool) -> Result<(), String> {
        self.is_of_kind(index, kind)?;
        let gpu = self.gpu(index).ok_or_else(|| format!("nvidia-smi knows no gpu {index}"))?;
        let here = |one: &&GpuProcess| one.uuid == gpu.uuid || gpu.mig_devices.contains(&one.uuid);
        if let Some(one) = self.running.iter().find(here) {
            let GpuProcess { pid, name, .. } = one;
            return Err(format!("gpu {index} has running work: process {pid} ({name})"));
        }
        match gpu.mig_mode.as_str() {
            "Enabled" | "Disabled" => {}
            other if mig => return Err(format!("gpu {index} has no MIG (its mode is {other})")),
            _ => {}
        }
        if let Some(device) = gpu.mig_devices.first() {
            return Err(format!(
                "gpu {index} is cut into MIG devices already ({device}); destroy them first: \
                 nvidia-smi mig -i {index} -dci && nvidia-smi mig -i {index} -dgi"
            ));
        }
        if !mig && gpu.mig_mode == "Enabled" {
            return Err(format!(
                "gpu {index} has MIG on; turn it off: nvidia-smi -i {index} -mig 0"
            ));
        }
        Ok(())
    }

    /// The identifier of a GPU or slice, for starting processes on it.
    pub(crate) fn uuid_of(&self, location: SliceLocation) -> Result<String, String> {
        let found = match location.start {
            Some(_) => self.uuids.get(&location.to_string()).cloned(),
            None => self.gpu(location.gpu).map(|gpu| gpu.uuid.clone()),
        };
        found.ok_or_else(|| format!("{location} has no identifier"))
    }
}

impl NvidiaTools {
    pub(crate) fn inspect(&self) -> Result<MachineState, String> {
        let query = "--query-gpu=index,uuid,name,memory.total,mig.mode.current";
        let mut gpus = parse_gpus(&smi(&[query, "--format=csv,noheader,nounits"])?)?;
        let listed = parse_list(&smi(&["-L"])?);
        for gpu in &mut gpus {
            gpu.mig_devices = listed.get(&gpu.index).cloned().unwrap_or_default();
        }
        let query = "--query-compute-apps=gpu_uuid,pid,process_name";
        let running = parse_running(&smi(&[query, "--format=csv,noheader"])?)?;
        Ok(MachineState { gpus, running, uuids: BTreeMap::new() })
    }

    /// Enables MIG and checks that it is enabled: some GPUs need a reset first.
    pub(crate) fn enable_mig(&self, gpu: u32) -> Result<(), String> {
        let index = gpu.to_string();
        let output = smi(&["-i", &index, "-mig", "1"])?;
        let mode = smi(&["-i", &index, "--query-gpu=mig.mode.current", "--format=csv,noheader"])?;
        if mode.trim() == "Enabled" {
            return Ok(());
        }
        // Reverts the pending mode.
        let back = self.disable_mig(gpu).err();
        let back = back.map(|error| format!("; {error}")).unwrap_or_default();
        Err(format!(
            "gpu {gpu}: MIG mode is '{}' after turning it on; nvidia-smi printed: {}{back}",
            mode.trim(),
            output.trim()
        ))
    }

    pub(crate) fn disable_mig(&self, gpu: u32) -> Result<(), String> {
        smi(&["-i", &gpu.to_string(), "-mig", "0"]).map(drop)
    }

    /// Creates a GPU instance with its compute instance; returns its number and the identifier of
    /// the MIG device.
    pub(crate) fn create_slice(
        &self,
        gpu: u32,
        profile_id: u8,
        start: u8,
    ) -> Result<(u32, String), String> {
        let before = parse_list(&smi(&["-L"])?).remove(&gpu).unwrap_or_default();
        let (index, place) = (gpu.to_string(), format!("{profile_id}:{start}"));
        let output = smi(&["mig", "-i", &index, "-cgi", &place, "-C"])?;
        let instance = parse_created(&output).ok_or_else(|| {
            format!(
                "gpu {gpu}: cannot read the output of nvidia-smi for {place}: {}",
                output.trim()
            )
        })?;
        let found = smi(&["-L"]).and_then(|list| {
            let after = parse_list(&list).remove(&gpu).unwrap_or_default();
            let mut fresh = after.into_iter().filter(|uuid| !before.contains(uuid));
            match (fresh.next(), fresh.next()) {
                (Some(uuid), None) => Ok(uuid),
                _ => Err(format!("gpu {gpu}: no single new MIG device after {place}")),
            }
        });
        match found {
            Ok(uuid) => Ok((instance, uuid)),
            Err(error) => {
                let back = self.destroy_slice(gpu, instance).err();
                Err(back.map_or(error.clone(), |back| format!("{error}; {back}")))
            }
        }
    }

    pub(crate) fn destroy_slice(&self, gpu: u32, instance: u32) -> Result<(), String> {
        let (gpu, instance) = (gpu.to_string(), instance.to_string());
        smi(&["mig", "-i", &gpu, "-dci", "-gi", &instance])?;
        smi(&["mig", "-i", &gpu, "-dgi", "-gi", &instance]).map(drop)
    }

    /// Starts an MPS daemon for one device, and checks that it replies.
    pub(crate) fn start_daemon(&self, uuid: &str, folder: &Path) -> Result<(), String> {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        if folder.join("control").exists() {
            return Err(format!("{} has the pipe of another daemon", folder.display()));
        }
        let mut command = Command::new(MPS);
        command.arg("-d").env("CUDA_VISIBLE_DEVICES", uuid);
        output(mps_folders(&mut command, folder), None)?;
        if let Err(error) = self.send_to_daemon(folder, "get_server_list") {
            let back = self.stop_daemon(folder).err();
            return Err(back.map_or(error.clone(), |back| format!("{error}; {back}")));
        }
        Ok(())
    }

    pub(crate) fn stop_daemon(&self, folder: &Path) -> Result<(), String> {
        self.send_to_daemon(folder, "quit")?;
        // The daemon removes its pipe; if it could not, the pipe is unused.
        match std::fs::remove_file(folder.join("control")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", folder.display()))
            }
            _ => Ok(()),
        }
    }

    fn send_to_daemon(&self, folder: &Path, what: &'static str) -> Result<(), String> {
        output(mps_folders(&mut Command::new(MPS), folder), Some(what)).map(drop)
    }
}

const MPS: &str = "nvidia-cuda-mps-control";

fn mps_folders<'c>(command: &'c mut Command, folder: &Path) -> &'c mut Command {
    command.env("CUDA_MPS_PIPE_DIRECTORY", folder).env("CUDA_MPS_LOG_DIRECTORY", folder)
}

/// Whether an MPS daemon replies where this process's environment names one; children inherit that.
pub(crate) fn daemon_replies() -> Result<(), String> {
    output(&mut Command::new(MPS), Some("get_server_list")).map(drop)
}

/// Memory in use on a GPU, given by number or identifier.
pub(crate) fn memory_used_mib(gpu: &str) -> Result<u64, String> {
    let output = smi(&["-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"])?;
    output.trim().parse().map_err(|_| format!("cannot read nvidia-smi's '{}'", output.trim()))
}

/// Name and memory in MiB of a GPU, given by number or identifier.
pub(crate) fn name_and_memory(gpu: &str) -> Result<(String, u64), String> {
    let output =
        smi(&["-i", gpu, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])?;
    let parsed = output
        .trim()
        .rsplit_once(',')
        .and_then(|(name, memory)| Some((name.trim().to_string(), memory.trim().parse().ok()?)));
    parsed.ok_or_else(|| format!("cannot read nvidia-smi's '{}'", output.trim()))
}

fn smi(arguments: &[&str]) -> Result<String, String> {
    output(Command::new("nvidia-smi").args(arguments), None)
}

/// Runs a tool with a timeout and returns its output.
fn output(command: &mut Command, input: Option<&'static str>) -> Result<String, String> {
    let arguments: Vec<_> = command.get_args().map(|one| one.to_string_lossy()).collect();
    let name = command.get_program().to_string_lossy().into_owned();
    let what = format!("{name} {}", arguments.join(" ")).trim().to_string();
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C ends the command that uses the tool after this change, and not the tool within it.
    let spawned = command.process_group(0).spawn();
    let mut child = spawned.map_err(|error| format!("{name} cannot be run: {error}"))?;
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        if let (Some(text), Some(mut pipe)) = (input, child.stdin.take()) {
            // A tool that does not read its input still replies.
            let _ = writeln!(pipe, "{text}");
        }
        let _ = sender.send(child.wait_with_output());
    });
    let result = receiver.recv_timeout(TOOL_TIMEOUT);
    let result = result.map_err(|_| format!("'{what}' did not end within {TOOL_TIMEOUT:?}"))?;
    let Output { status, stdout, stderr } = result.map_err(|error| format!("{what}: {error}"))?;
    let text = String::from_utf8_lossy(&stdout).into_owned();
    if status.success() {
        return Ok(text);
    }
    let error = String::from_utf8_lossy(&stderr);
    let output = [text.trim(), error.trim()].join(" ");
    Err(format!("'{what}' failed ({status}): {}", output.trim()))
}

fn parse_gpus(text: &str) -> Result<Vec<GpuInfo>, String> {
    let gpu = |line: &str| {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [index, uuid, name, memory, mode] = cells[..] else { return None };
        Some(GpuInfo {
            index: index.parse().ok()?,
            uuid: uuid.to_string(),
            name: name.to_string(),
            memory_mib: memory.parse().ok()?,
            mig_mode: mode.to_string(),
            mig_devices: Vec::new(),
        })
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| gpu(line).ok_or_else(|| format!("cannot read nvidia-smi's line '{line}'")))
        .collect()
}

/// MIG devices of each GPU in `nvidia-smi -L`: lines `GPU 0: NAME (UUID: GPU-...)`, and under each
/// lines `  MIG 3g.40gb     Device  0: (UUID: MIG-...)`.
fn parse_list(text: &str) -> BTreeMap<u32, Vec<String>> {
    let mut devices: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    let mut now = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("GPU ") {
            now = rest.split(':').next().and_then(|index| index.trim().parse().ok());
        } else if line.starts_with("MIG ")
            && let (Some(gpu), Some((_, uuid))) = (now, line.split_once("UUID: "))
        {
            devices.entry(gpu).or_default().push(uuid.trim_end_matches(')').to_string());
        }
    }
    devices
}

fn parse_running(text: &str) -> Result<Vec<GpuProcess>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let running = |line: &str| {
        let mut cells = line.splitn(3, ',').map(|cell| cell.trim().to_string());
        let (Some(uuid), Some(pid), Some(name)) = (cells.next(), cells.next(), cells.next()) else {
            return Err(format!("cannot read nvidia-smi's line '{line}'"));
        };
        Ok(GpuProcess { uuid, pid, name })
    };
    lines.map(running).collect()
}

/// The number in `Successfully created GPU instance ID  1 on GPU  0 using profile ...`.
fn parse_created(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("created GPU instance ID")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_output_is_parsed() {
        let text = "0, GPU-aa, NVIDIA A100-SXM4-80GB, 81920, Disabled\n1, GPU-bb, NVIDIA H200, \
            143771, [N/A]\n";
        let gpus = parse_gpus(text).unwrap();
        assert_eq!((gpus.len(), gpus[1].memory_mib), (2, 143_771));
        let of =
            |gpu: &GpuInfo| GpuKind::of_device(&gpu.name, gpu.memory_mib).map(|kind| kind.name);
        assert_eq!((of(&gpus[0]), of(&gpus[1])), (Some("a100-80gb"), Some("h200-141gb")));
        assert!(parse_gpus("No devices were found\n").unwrap_err().contains("No devices"));
        let list = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa)\n  MIG 3g.40gb     Device  0: \
            (UUID: MIG-11)\n\
                    GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bb)\n";
        assert_eq!(parse_list(list), BTreeMap::from([(0, vec!["MIG-11".to_string()])]));
        let created = "Successfully created GPU instance ID  2 on GPU  0 using profile MIG \
            3g.40gb (ID  9)\n\
                       Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 \
                       using profile MIG 3g.40gb (ID  2)\n";
        assert_eq!(parse_created(created), Some(2));
        assert_eq!(parse_created("Unable to create a GPU instance"), None);
    }
}
