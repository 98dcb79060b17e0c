//! Measures a model's latency by batch size on the node that runs it, as best effort.

use api::error::ApiResult;
use api::{
    ApiError, InferOptions, InferRequest, InferenceService, Inputs, ModelRef, NamedTensor,
    RequestContext, TensorMetadata,
};
use base::{Clock, Random};
use model::DataType;
use model::config::Class;
use model::sample::random_tensor;

/// Batch sizes that are measured.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Runs of each size. The shortest counts, because other requests may slow down a run.
const RUNS: usize = 3;
/// Batches that take longer are never planned.
const LONGEST_MS: f64 = 2000.0;

/// Sizes tried for symbolic dimensions, one after another until the model runs: for images, and for
/// other inputs. Requests may have other sizes; a model is measured at one.
const OPEN_PICTURE: [usize; 5] = [320, 224, 64, 32, 1];
const OPEN: [usize; 5] = [128, 64, 32, 8, 1];

/// Milliseconds by batch size, up to the first that takes longer than `limit_ms`. Models whose
/// first dimension is not a batch are measured as they are.
pub async fn measure(
    service: &dyn InferenceService,
    clock: &dyn Clock,
    model: &str,
    limit_ms: f64,
) -> ApiResult<Vec<(u32, f64)>> {
    let reference = ModelRef { name: model, version: None };
    let metadata = service.model_metadata(reference).await?;
    let config = service.model_config(reference).await?;
    let max_batch = u32::try_from(config.max_batch_size).unwrap_or(0).max(1);
    let mut random = Random::new(1);
    let mut curve: Vec<(u32, f64)> = Vec::new();
    let size = runnable_size(service, reference, &metadata.inputs, &mut random).await;
    for batch in BATCHES.into_iter().filter(|batch| *batch <= max_batch) {
        let inputs = metadata.inputs.iter().map(|input| tensor(input, batch, size, &mut random));
        let inputs = inputs.collect::<ApiResult<Vec<NamedTensor>>>()?;
        let mut best_ms = f64::INFINITY;
        for _ in 0..=RUNS {
            let start = clock.now();
            match run(service, reference, inputs.clone()).await {
                Ok(_) => best_ms = best_ms.min((clock.now() - start).0 as f64 / 1e6),
                // Larger batches may not fit; the curve so far counts.
                Err(_) if !curve.is_empty() => return Ok(curve),
                Err(error) => return Err(error),
            }
            if best_ms > LONGEST_MS {
                break;
            }
        }
        // A larger batch never takes less time.
        let level = curve.last().map_or(best_ms, |(_, ms)| ms.max(best_ms));
        curve.push((batch, (level * 1e4).round() / 1e4));
        if level > limit_ms.min(LONGEST_MS) {
            break;
        }
    }
    Ok(curve)
}

async fn run(
    service: &dyn InferenceService,
    model: ModelRef<'_>,
    inputs: Vec<NamedTensor>,
) -> ApiResult<()> {
    let request = InferRequest {
        id: String::new(),
        options: InferOptions { class: Some(Class::BestEffort), ..Default::default() },
        inputs: Inputs::Named(inputs),
        outputs: Vec::new(),
    };
    service.infer(model, request, RequestContext::default()).await.map(|_| ())
}

/// Index of the first size for symbolic dimensions with which the model runs; the last index where
/// no size is needed or none works.
async fn runnable_size(
    service: &dyn InferenceService,
    model: ModelRef<'_>,
    inputs: &[TensorMetadata],
    random: &mut Random,
) -> usize {
    let open = |input: &TensorMetadata| input.shape.iter().skip(1).any(|dim| *dim < 0);
    let last = OPEN.len() - 1;
    if !inputs.iter().any(open) {
        return last;
    }
    for size in 0..last {
        let tensors = inputs.iter().map(|input| tensor(input, 1, size, random));
        if let Ok(tensors) = tensors.collect::<ApiResult<Vec<NamedTensor>>>()
            && run(service, model, tensors).await.is_ok()
        {
            return size;
        }
    }
    last
}

/// Random values for an input. Of symbolic dimensions the first one is the batch, the others have
/// the size at index `size`.
fn tensor(
    input: &TensorMetadata,
    batch: u32,
    size: usize,
    random: &mut Random,
) -> ApiResult<NamedTensor> {
    let dtype = DataType::from_wire_name(&input.datatype)
        .ok_or_else(|| ApiError::internal("a model has an unknown type"))?;
    let sizes = if input.shape.len() == 4 { OPEN_PICTURE } else { OPEN };
    let open = |index: usize| if index == 0 { batch as usize } else { sizes[size] };
    let dims = input.shape.iter().enumerate();
    let shape: Vec<usize> =
        dims.map(|(index, &dim)| usize::try_from(dim).unwrap_or(open(index))).collect();
    let tensor = random_tensor(dtype, shape, random)?;
    Ok(NamedTensor { name: input.name.as_str().into(), tensor })
}
