//! Launch plans to GPU plans, for sizes that are given or guessed.

use bytes::Bytes;
use device::{DeviceError, KernelCompiler, LaunchChoices, LoweringTemplate};
use model::gpu::{GpuPlan, GpuTarget};
use model::{Dim, LaunchPlan, Tensor};

use crate::services::DeviceServices;

/// Sizes of a plan's symbols, in the order inputs name them.
pub(crate) type Sizes = Vec<(String, usize)>;

/// The steps of `plan` that have no kernel.
pub(crate) fn unsupported_steps(services: &DeviceServices, plan: &LaunchPlan) -> Vec<DeviceError> {
    let sizes = &services.device.options().sizes;
    steps_without_kernel(&*services.compile.compiler, services.device.target(), plan, sizes)
}

/// The steps of `plan` that `compiler` has no kernel for; no GPU is needed. Symbols that `sizes`
/// does not name get sizes that the plan accepts.
pub fn steps_without_kernel(
    compiler: &dyn KernelCompiler,
    target: &GpuTarget,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
) -> Vec<DeviceError> {
    example(compiler, target, plan, sizes).err().unwrap_or_default()
}

/// `plan` for `sizes`.
pub(crate) fn lower(
    services: &DeviceServices,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
    choices: LaunchChoices,
) -> Result<GpuPlan, Vec<DeviceError>> {
    check(plan)?;
    let target = services.device.target();
    let gpu = services.compile.compiler.lower_with(plan, sizes, target, choices)?;
    check_border(plan, &gpu).map(|()| gpu)
}

/// The plan of `template`, which is that of `plan`, for `sizes`.
pub(crate) fn lower_by(
    template: &dyn LoweringTemplate,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
    choices: LaunchChoices,
) -> Result<GpuPlan, Vec<DeviceError>> {
    let gpu = template.lower_with(sizes, choices)?;
    check_border(plan, &gpu).map(|()| gpu)
}

fn check(plan: &LaunchPlan) -> Result<(), Vec<DeviceError>> {
    plan.check().map_err(|err| vec![DeviceError::BadPlan(err.to_string())])
}

fn check_border(plan: &LaunchPlan, gpu: &GpuPlan) -> Result<(), Vec<DeviceError>> {
    let (inputs, outputs) = (gpu.inputs.len(), gpu.outputs.len());
    if (inputs, outputs) == (plan.inputs.len(), plan.outputs.len()) {
        return Ok(());
    }
    let why = format!("{inputs} inputs and {outputs} outputs on the device are not the model's");
    Err(vec![DeviceError::BadPlan(why)])
}

/// `plan` lowered for the first sizes that it accepts: configured sizes, and guesses for symbols
/// that are not configured. `None` when no guess is accepted, which does not refuse the model.
pub(crate) fn example(
    compiler: &dyn KernelCompiler,
    target: &GpuTarget,
    plan: &LaunchPlan,
    set: &[(String, usize)],
) -> Result<Option<(Sizes, GpuPlan)>, Vec<DeviceError>> {
    check(plan)?;
    let (candidates, guessed) = example_sizes(plan, set);
    for sizes in candidates {
        match compiler.lower(plan, &sizes, target) {
            Ok(gpu) => return check_border(plan, &gpu).map(|()| Some((sizes, gpu))),
            // A step without a kernel has none at other sizes either; sizes that the plan refuses
            // are only a wrong guess.
            Err(errors) if guessed && are_of_sizes(&errors) => {
                let why = first_of(errors);
                tracing::debug!(?sizes, %why, "guessed sizes refused");
            }
            Err(errors) => return Err(errors),
        }
    }
    Ok(None)
}

fn are_of_sizes(errors: &[DeviceError]) -> bool {
    errors.iter().all(|err| matches!(err, DeviceError::BadPlan(_)))
}

/// The first error of a compiler that refused a plan.
pub(crate) fn first_of(errors: Vec<DeviceError>) -> DeviceError {
    let unknown = || DeviceError::BadPlan("the compiler gave no reason".to_string());
    errors.into_iter().next().unwrap_or_else(unknown)
}

/// Guesses for symbols other than the batch: the minimum, a few tokens, the sides of small and of
/// usual images.
const GUESSES: [usize; 4] = [1, 32, 64, 224];

/// Sizes to try in order, and whether any is guessed. Symbols that are not configured are 1 as the
/// first dimension of an input, which is the batch, and one of the guesses elsewhere.
fn example_sizes(plan: &LaunchPlan, set: &[(String, usize)]) -> (Vec<Sizes>, bool) {
    let mut symbols: Vec<(&String, Option<usize>)> = Vec::new();
    let mut guessed = false;
    for dims in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()) {
        for (axis, dim) in dims.iter().enumerate() {
            let Dim::Symbol(symbol) = dim else { continue };
            if symbols.iter().any(|(known, _)| *known == symbol) {
                continue;
            }
            let given = set.iter().find(|(name, _)| name == symbol).map(|(_, size)| *size);
            guessed |= given.is_none();
            symbols.push((symbol, given.or((axis == 0).then_some(1))));
        }
    }
    let with = |guess: usize| -> Sizes {
        symbols.iter().map(|(name, size)| ((*name).clone(), size.unwrap_or(guess))).collect()
    };
    let mut candidates: Vec<Sizes> = GUESSES.into_iter().map(with).collect();
    candidates.dedup();
    (candidates, guessed)
}

/// The symbols of `plan`'s inputs as `inputs` bind them; `inputs` have been checked against the
/// plan.
pub(crate) fn sizes_of(plan: &LaunchPlan, inputs: &[Tensor]) -> Sizes {
    sizes_of_shapes(plan, inputs.iter().map(Tensor::shape))
}

/// As [`sizes_of`], for inputs of these shapes.
pub(crate) fn sizes_of_shapes<'a>(
    plan: &LaunchPlan,
    shapes: impl Iterator<Item = &'a [usize]>,
) -> Sizes {
    let mut sizes = Sizes::new();
    for (id, shape) in plan.inputs.iter().zip(shapes) {
        for (dim, size) in plan.value(*id).shape.iter().flatten().zip(shape) {
            if let Dim::Symbol(symbol) = dim
                && !sizes.iter().any(|(known, _)| known == symbol)
            {
                sizes.push((symbol.clone(), *size));
            }
        }
    }
    sizes
}

pub(crate) fn raw_bytes(tensor: &Tensor) -> Result<&Bytes, DeviceError> {
    tensor.raw().ok_or_else(|| {
        DeviceError::BadInput("a tensor of strings cannot be copied to a GPU".to_string())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use model::gpu::Precision;
    use model::{DataType, ValueId, ValueInfo};

    #[test]
    fn sizes_are_bound_by_the_first_input_that_names_them() {
        let info = |dims: Vec<Dim>| ValueInfo {
            name: "x".to_string(),
            dtype: DataType::F32,
            shape: Some(dims),
        };
        let symbol = |name: &str| Dim::Symbol(name.to_string());
        let plan = LaunchPlan {
            values: vec![
                info(vec![symbol("batch"), Dim::Fixed(3)]),
                info(vec![symbol("batch"), symbol("tokens")]),
            ],
            inputs: vec![ValueId(0), ValueId(1)],
            ..LaunchPlan::default()
        };
        let tensor = |shape: Vec<usize>| {
            let count = shape.iter().product();
            Tensor::from_vec(shape, vec![0f32; count]).expect("a tensor")
        };
        let sizes = sizes_of(&plan, &[tensor(vec![2, 3]), tensor(vec![2, 7])]);
        assert_eq!(sizes, [("batch".to_string(), 2), ("tokens".to_string(), 7)]);
    }

    /// Accepts plans whose symbol `w` is at least `least`, unless it refuses a step.
    struct MinimumSizeCompiler {
        least: usize,
        refused: bool,
        tried: Mutex<Vec<Sizes>>,
    }

    impl KernelCompiler for MinimumSizeCompiler {
        fn lower_with(
            &self,
            plan: &LaunchPlan,
            sizes: &[(String, usize)],
            _: &GpuTarget,
            _: LaunchChoices,
        ) -> Result<GpuPlan, Vec<DeviceError>> {
            self.tried.lock().expect("no panic before").push(sizes.to_vec());
            if sizes.iter().any(|(name, size)| name == "w" && *size < self.least) {
                return Err(vec![DeviceError::BadPlan("a window over nothing".to_string())]);
            }
            if self.refused {
                let (step, op) = ("s".to_string(), "NonZero".to_string());
                let reason = "no kernel".to_string();
                return Err(vec![DeviceError::Unsupported { step, op, reason }]);
            }
            let slot = crate::program::layout::tests::slot(4);
            Ok(GpuPlan { inputs: vec![slot; plan.inputs.len()], ..GpuPlan::default() })
        }

        fn headers(&self) -> &'static [(&'static str, &'static str)] {
            &[]
        }
    }

    /// The result for images with sides `h` and `w`, and the widths that were tried.
    fn tried(
        least: usize,
        refused: bool,
        set: &[(&str, usize)],
    ) -> (Result<Option<Sizes>, Vec<DeviceError>>, Vec<usize>) {
        let symbol = |name: &str| Dim::Symbol(name.to_string());
        let image = vec![symbol("n"), Dim::Fixed(3), symbol("h"), symbol("w")];
        let value = ValueInfo { name: "x".to_string(), dtype: DataType::F32, shape: Some(image) };
        let plan =
            LaunchPlan { values: vec![value], inputs: vec![ValueId(0)], ..LaunchPlan::default() };
        let compiler = MinimumSizeCompiler { least, refused, tried: Mutex::default() };
        let target = GpuTarget { capability: 90, multiprocessors: 1, precision: Precision::F16 };
        let set: Sizes = set.iter().map(|(name, size)| ((*name).to_string(), *size)).collect();
        let found = example(&compiler, &target, &plan, &set);
        let tried = compiler.tried.into_inner().expect("no panic before");
        (found.map(|found| found.map(|(sizes, _)| sizes)), tried.iter().map(|s| s[2].1).collect())
    }

    fn sizes(n: usize, h: usize, w: usize) -> Sizes {
        vec![("n".to_string(), n), ("h".to_string(), h), ("w".to_string(), w)]
    }

    #[test]
    fn guessed_sizes_do_not_refuse_a_model() {
        assert_eq!(tried(1, false, &[]), (Ok(Some(sizes(1, 1, 1))), vec![1]));
        assert_eq!(tried(48, false, &[]), (Ok(Some(sizes(1, 64, 64))), vec![1, 32, 64]));
        assert_eq!(tried(1000, false, &[]), (Ok(None), vec![1, 32, 64, 224]));
        let set = [("n", 8), ("w", 1000)];
        assert_eq!(tried(1000, false, &set), (Ok(Some(sizes(8, 1, 1000))), vec![1000]));
    }

    #[test]
    fn steps_without_a_kernel_refuse_a_model() {
        let (found, widths) = tried(48, true, &[]);
        let errors = found.expect_err("no kernel");
        assert!(matches!(errors[..], [DeviceError::Unsupported { .. }]));
        assert_eq!(widths, [1, 32, 64], "found at the first sizes that make sense");
        // Configured sizes are no guess.
        let set = [("n", 1), ("h", 8), ("w", 8)];
        let (found, widths) = tried(48, false, &set);
        assert!(matches!(found.expect_err("too small")[..], [DeviceError::BadPlan(_)]));
        assert_eq!(widths, [8]);
    }
}
