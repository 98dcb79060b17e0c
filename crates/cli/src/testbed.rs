//! What benchmarks on real devices need: the models of DISB, and words on where and when they ran.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base::Random;
use bench::live::LiveModel;
use device::Device;
use model::{LaunchPlan, Tensor};

use crate::failure::Failure;
use crate::{binding, engine};

/// Tokens of a text where nothing else is said; as many as the benchmark's own requests have.
const SEQUENCE: usize = 128;

/// The models of these names from the folder that was given.
pub(crate) fn load(
    folder: Option<&Path>,
    seed: u64,
    device: &dyn Device,
    names: &[&str],
) -> Result<Vec<LiveModel>, Failure> {
    let mut random = Random::new(seed);
    let mut one = |name: &&str| {
        let (plan, inputs) = read(folder, name, &mut random)?;
        let failed = |err| Failure::failed(format!("{name}: {err}"));
        let inputs = binding::settled(device.host_pool(), inputs);
        let program = device.load(Arc::new(plan)).map_err(failed)?;
        eprintln!("{name}: loaded, {} on the device", program.resident());
        Ok(LiveModel { name: (*name).to_string(), program, inputs })
    };
    names.iter().map(&mut one).collect()
}

/// The launch plan of the model of this name from the folder that was given, and inputs made up for it.
pub(crate) fn read(
    folder: Option<&Path>,
    name: &str,
    random: &mut Random,
) -> Result<(LaunchPlan, Vec<Tensor>), Failure> {
    let folder = folder.ok_or_else(|| {
        Failure::usage("a real device runs real models: name their folder with --models")
    })?;
    let path = file(folder, name)?;
    let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
    let plan = engine::compile_file(&path).map_err(|err| failed(err.to_string()))?;
    let mut bindings = binding::Bindings::new();
    bindings.insert("sequence".to_string(), SEQUENCE);
    let inputs = binding::random_inputs(&plan, &bindings, random).map_err(failed)?;
    Ok((plan, inputs))
}

/// The benchmark and the model zoo spell one name differently.
fn file(folder: &Path, name: &str) -> Result<PathBuf, Failure> {
    let spelled = if name == "inceptionv3" { "inception_v3" } else { name };
    let paths = [name, spelled].map(|stem| folder.join(format!("{stem}.onnx")));
    let found = paths.iter().find(|path| path.is_file());
    found.cloned().ok_or_else(|| {
        Failure::usage(format!("there is no {} for the workload's '{name}'", paths[1].display()))
    })
}

/// The version of the GPU's driver, where its kernel module tells.
pub(crate) fn driver(device: &str) -> Option<String> {
    if !device.starts_with("cuda") {
        return None;
    }
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let numbered =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(numbered).map(str::to_string)
}

/// Memory of this process, where the system tells.
pub(crate) fn process_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// The command line, wherever the binary lies.
pub(crate) fn command() -> String {
    ["atoll".to_string()].into_iter().chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ")
}

/// Today in Greenwich, as YYYY-MM-DD.
pub(crate) fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = civil((now.as_secs() / 86_400) as i64);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The date of a day counted from 1970-01-01 (Hinnant's `civil_from_days`, for days after it).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }
}
