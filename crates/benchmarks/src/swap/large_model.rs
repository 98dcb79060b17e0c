//! A model that is large enough that loading it takes a while.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use assembly::progress;
use assembly::{Failure, PrecisionArg};
use base::Random;
use device::residency::{LoadProgress, Residency};
use device::{Device, Program};
use model::config::ModelConfig;
use model::op::{MatMul, Op};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};
use runtime::Node;

use super::args::SwapArgs;
use super::device::SwappingDevice;

/// Max time of a load.
const LIMIT: Duration = Duration::from_secs(60);

/// Width of the matrix products of a model of random numbers.
const WIDTH: usize = 4_096;

/// One round of loading it.
pub(crate) type LargeModelRound<'a> = dyn Fn(&Node) -> Result<u64, String> + Sync + 'a;

/// A large model on a device that loads and evicts weights.
pub(crate) struct LargeModel {
    pub(crate) name: String,
    /// Bytes of its weights on the device.
    pub(crate) bytes: u64,
    device: Arc<dyn Device>,
    plan: Arc<LaunchPlan>,
    /// Keeps the program alive for `weights`.
    _program: Arc<dyn Program>,
    weights: Arc<dyn Residency>,
}

impl LargeModel {
    /// The model in `file`, or one of random numbers.
    pub(crate) fn open(
        args: &SwapArgs,
        opened: &SwappingDevice,
        file: Option<&Path>,
    ) -> Result<LargeModel, Failure> {
        let (name, plan) = match file {
            Some(path) => {
                let failed = |err| Failure::failed(format!("{}: {err}", path.display()));
                let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
                (stem.unwrap_or_default(), assembly::compile_file(path).map_err(failed)?)
            }
            None => {
                let whole = !args.device.starts_with("cuda")
                    || matches!(args.settings.precision, PrecisionArg::F32 | PrecisionArg::Tf32);
                let value_bytes = if whole { 4 } else { 2 };
                let plan = random_model(args.large_model_mb * 1_000_000 / value_bytes, args.seed)?;
                (format!("a model of {} MB", args.large_model_mb), plan)
            }
        };
        let (device, plan) = (opened.device.clone(), Arc::new(plan));
        let program = device.load(plan.clone()).map_err(Failure::failed)?;
        let fixed = || Failure::failed(format!("the weights of {name} are never evicted"));
        let weights = program.residency().ok_or_else(fixed)?;
        let bytes = weights.bytes().0;
        if file.is_none() && bytes < args.large_model_mb * 1_000_000 {
            let requested = args.large_model_mb;
            return Err(Failure::failed(format!("{bytes} bytes of weights, not {requested} MB")));
        }
        progress::note(&format!("{name}: {:.2} GB of weights on the device", bytes as f64 / 1e9));
        Ok(LargeModel { name, bytes, device, plan, _program: program, weights })
    }

    /// Loads its weights, which are packed on the host, and evicts them; returns their bytes.
    pub(crate) fn load_weights(&self) -> Result<u64, String> {
        let (sender, receiver) = mpsc::channel();
        self.weights.load(
            false,
            Box::new(move |progress| {
                // The receiver may have timed out.
                let _ = sender.send(progress);
            }),
        );
        let until = Instant::now() + LIMIT;
        loop {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(LoadProgress::Runnable) => {}
                Ok(LoadProgress::Loaded) => break,
                Ok(LoadProgress::Failed(why)) => return Err(why.to_string()),
                Err(_) => return Err("the weights were not loaded within a minute".to_string()),
            }
        }
        self.weights.evict();
        Ok(self.bytes)
    }

    /// Loads another program of its plan with its weights, and removes it.
    pub(crate) fn load(&self, node: &Node) -> Result<u64, String> {
        let program = self.device.load(self.plan.clone()).map_err(|err| err.to_string())?;
        let key = node.add_model(program, &ModelConfig::default());
        node.preload(key);
        let since = Instant::now();
        let loaded = loop {
            if node.is_resident(key) {
                break true;
            }
            if since.elapsed() > LIMIT {
                break false;
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        node.remove_model(key);
        let freed = node.wait_discarded(LIMIT);
        match (loaded, freed) {
            (true, true) => Ok(self.bytes),
            (false, _) => Err("the model was not loaded in a minute".to_string()),
            (_, false) => Err("the model was not freed within a minute".to_string()),
        }
    }
}

/// A chain of matrix products with at least `numbers` weights.
fn random_model(numbers: u64, seed: u64) -> Result<LaunchPlan, Failure> {
    let width = WIDTH.min((numbers as f64).sqrt().ceil() as usize).max(1);
    let products = numbers.div_ceil((width * width) as u64).max(1);
    let info = |name: String, shape: Vec<usize>| ValueInfo {
        name,
        dtype: DataType::F32,
        shape: Some(shape.into_iter().map(Dim::Fixed).collect()),
    };
    let mut plan = LaunchPlan {
        values: vec![info("x".to_string(), vec![1, width])],
        inputs: vec![ValueId(0)],
        ..LaunchPlan::default()
    };
    let mut random = Random::new(seed);
    let scale = 1.7 / (width as f32).sqrt();
    let mut last = ValueId(0);
    for number in 0..products {
        let weight = ValueId(plan.values.len() as u32);
        plan.values.push(info(format!("w{number}"), vec![width, width]));
        let values = (0..width * width).map(|_| random.symmetric_f32() * scale).collect();
        let values = Tensor::from_vec::<f32>(vec![width, width], values);
        plan.constants.push((weight, values.map_err(Failure::failed)?));
        let output = ValueId(plan.values.len() as u32);
        plan.values.push(info(format!("y{number}"), vec![1, width]));
        plan.steps.push(Step {
            name: format!("product {number}"),
            op: Op::MatMul(MatMul::default()),
            inputs: vec![Some(last), Some(weight)],
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        last = output;
    }
    plan.outputs = vec![last];
    plan.plan_lifetimes();
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_model_has_the_requested_size() {
        for numbers in [1, 100, 40_000_000] {
            let plan = random_model(numbers, 1).unwrap_or_else(|err| panic!("{}", err.message()));
            plan.check().expect("a sound plan");
            let count = |tensor: &Tensor| tensor.shape().iter().product::<usize>() as u64;
            let have: u64 = plan.constants.iter().map(|(_, tensor)| count(tensor)).sum();
            assert!(have >= numbers && have <= numbers + (WIDTH * WIDTH) as u64, "{have}");
        }
    }
}
