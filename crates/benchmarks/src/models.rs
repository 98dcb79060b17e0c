//! Loads the models that benchmarks run on real devices, with random inputs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use assembly::progress::{self, Progress};
use assembly::{Failure, sample_inputs};
use base::Random;
use bench::live::LiveModel;
use device::Device;
use model::{LaunchPlan, Tensor};

/// Tokens of a text, as many as DISB's own requests have.
const SEQUENCE: usize = 128;

/// Loads models by name from `folder` to `device`.
pub(crate) fn load(
    folder: Option<&Path>,
    seed: u64,
    device: &dyn Device,
    names: &[&str],
) -> Result<Vec<LiveModel>, Failure> {
    let mut random = Random::new(seed);
    let progress = Progress::new(names.len() as u64, "models");
    let mut one = |name: &&str| {
        progress.describe(&format!("loading {name} "));
        let (plan, inputs) = read(folder, name, &mut random)?;
        let failed = |err| Failure::failed(format!("{name}: {err}"));
        let inputs = sample_inputs::in_host_pool(device.host_pool(), inputs);
        let program = device.load(Arc::new(plan)).map_err(failed)?;
        progress::note(&format!("{name}: loaded, {} on the device", program.resident()));
        progress.advance();
        Ok(LiveModel { name: (*name).to_string(), program, inputs })
    };
    names.iter().map(&mut one).collect()
}

/// Compiles a model by name from `folder`, and makes random inputs for it.
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
    let plan = assembly::compile_file(&path).map_err(|err| failed(err.to_string()))?;
    let inputs = random_inputs(&plan, random).map_err(failed)?;
    Ok((plan, inputs))
}

/// Random inputs for `plan`, one row each; texts have [`SEQUENCE`] tokens.
pub(crate) fn random_inputs(plan: &LaunchPlan, random: &mut Random) -> Result<Vec<Tensor>, String> {
    let mut bindings = sample_inputs::Bindings::new();
    bindings.insert("sequence".to_string(), SEQUENCE);
    sample_inputs::random_inputs(plan, &bindings, random)
}

/// The file of a model. DISB and the model zoo spell one name differently.
fn file(folder: &Path, name: &str) -> Result<PathBuf, Failure> {
    let zoo_name = if name == "inceptionv3" { "inception_v3" } else { name };
    let paths = [name, zoo_name].map(|stem| folder.join(format!("{stem}.onnx")));
    let found = paths.iter().find(|path| path.is_file());
    found.cloned().ok_or_else(|| {
        Failure::usage(format!("there is no {} for the workload's '{name}'", paths[1].display()))
    })
}
