//! Batches on a device: staged inputs of requests, joined into one task, and its outputs split.

use std::any::Any;

use model::{Dim, LaunchPlan, Tensor};

use crate::DeviceError;

/// The inputs of one request, checked and staged for a batch. Dropping them cancels the staging.
pub trait StagedInputs: Send {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// For the device to get its own type back.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// Staged inputs in host memory.
pub struct HostStagedInputs {
    inputs: Vec<Tensor>,
    rows: usize,
}

impl HostStagedInputs {
    /// Stages `inputs`, which have been checked against a plan with a batch dimension.
    pub fn new(inputs: Vec<Tensor>) -> HostStagedInputs {
        let rows = rows_of(&inputs);
        HostStagedInputs { inputs, rows }
    }

    /// The staged tensors.
    pub fn into_inputs(self) -> Vec<Tensor> {
        self.inputs
    }
}

impl StagedInputs for HostStagedInputs {
    fn rows(&self) -> usize {
        self.rows
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Rows of `inputs` for a plan with a batch dimension.
pub fn rows_of(inputs: &[Tensor]) -> usize {
    inputs.first().and_then(|tensor| tensor.shape().first()).copied().unwrap_or(0)
}

/// Sizes that `inputs` give to the symbolic dimensions of `plan` other than `batch`. The inputs
/// have been checked.
pub fn other_sizes(plan: &LaunchPlan, batch: &str, inputs: &[Tensor]) -> Vec<(String, usize)> {
    let mut sizes: Vec<(String, usize)> = Vec::new();
    for (id, tensor) in plan.inputs.iter().zip(inputs) {
        for (dim, size) in plan.value(*id).shape.iter().flatten().zip(tensor.shape()) {
            if let Dim::Symbol(symbol) = dim
                && symbol != batch
                && !sizes.iter().any(|(known, _)| known == symbol)
            {
                sizes.push((symbol.clone(), *size));
            }
        }
    }
    sizes
}

/// Concatenates the rows of staged requests, input by input.
pub(crate) fn join(staged: Vec<Box<dyn StagedInputs>>) -> Result<Vec<Tensor>, DeviceError> {
    let mut requests = Vec::with_capacity(staged.len());
    for staged in staged {
        let host = staged.into_any().downcast::<HostStagedInputs>().map_err(|_| {
            DeviceError::BadPlan("staged inputs belong to another device".to_string())
        })?;
        requests.push(host.into_inputs());
    }
    join_rows(&requests)
}

/// Concatenates the rows of `requests`, input by input.
pub fn join_rows(requests: &[Vec<Tensor>]) -> Result<Vec<Tensor>, DeviceError> {
    let inputs = requests.first().map_or(0, Vec::len);
    let join = |index: usize| {
        let parts: Option<Vec<&Tensor>> =
            requests.iter().map(|request| request.get(index)).collect();
        parts.and_then(|parts| Tensor::of_rows(&parts)).ok_or_else(|| {
            DeviceError::BadInput(format!("input {index} differs in shape between requests"))
        })
    };
    (0..inputs).map(join).collect()
}

/// Splits the outputs of a batch into those of its members, which have `rows` each, in this order.
pub fn split(outputs: &[Tensor], rows: &[usize]) -> Result<Vec<Vec<Tensor>>, DeviceError> {
    let total: usize = rows.iter().sum();
    if let Some(odd) = outputs.iter().find(|output| output.shape().first() != Some(&total)) {
        let shape = odd.shape();
        return Err(DeviceError::BadPlan(format!(
            "an output of a batch of {total} has shape {shape:?}: rows are not independent, \
             set batching.policy to 'none'"
        )));
    }
    let mut start = 0;
    let mut each = Vec::with_capacity(rows.len());
    for count in rows {
        let cut = |output: &Tensor| {
            output
                .rows(start..start + count)
                .ok_or_else(|| DeviceError::BadPlan("an output has too few rows".to_string()))
        };
        each.push(outputs.iter().map(cut).collect::<Result<Vec<_>, _>>()?);
        start += count;
    }
    Ok(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(values: &[i32]) -> Tensor {
        Tensor::from_vec(vec![values.len(), 1], values.to_vec()).expect("a column")
    }

    #[test]
    fn splits_what_it_joined() {
        let requests = [vec![column(&[1])], vec![column(&[2, 3])], vec![column(&[4])]];
        let joined = join_rows(&requests).expect("same shapes");
        assert_eq!(joined[0].to_vec(), Some(vec![1, 2, 3, 4]));
        let apart = split(&joined, &[1, 2, 1]).expect("four rows");
        assert_eq!(apart, requests);
        assert!(split(&joined, &[1, 2]).is_err(), "three of four rows");
        let other = Tensor::from_vec(vec![1, 2], vec![5, 6]).expect("a row");
        assert!(join_rows(&[vec![column(&[1])], vec![other]]).is_err());
    }
}
