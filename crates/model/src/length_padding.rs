//! Length padding: requests of different lengths share a batch where the model has a mask.
//!
//! A text model takes `[batch, length]` tokens and a mask that says which of them count. Rows of
//! different lengths are padded to a common one, their masks with zeros, and outputs are cut back.
//! Whether a model really ignores what its mask excludes cannot be seen from its inputs: a node
//! checks it with a run.

use bytes::Bytes;

use crate::config::Batching;
use crate::tensor::TensorError;
use crate::{DataType, Dim, LaunchPlan, Tensor, ValueId};

/// The longest length that is padded.
pub const LENGTH_MAX: usize = 4096;

/// The length that requests of `length` are padded to. A padded request is at most 7 longer, or
/// an eighth of the next power of two.
pub fn padded_length(length: usize) -> usize {
    let step = (length.next_power_of_two() / 8).max(8);
    length.div_ceil(step) * step
}

/// Which dimensions of inputs and outputs are the length, and which input is the mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LengthPadding {
    symbol: String,
    mask: usize,
    /// The dimension that is the length, by input.
    inputs: Vec<Option<usize>>,
    /// The same by output.
    outputs: Vec<Option<usize>>,
}

impl LengthPadding {
    /// How to pad requests of `plan`, whose batch dimension is `batch`.
    ///
    /// # Errors
    /// Why they cannot be padded.
    pub fn of(
        plan: &LaunchPlan,
        batch: &str,
        settings: &Batching,
    ) -> Result<LengthPadding, String> {
        if !settings.mix_lengths {
            return Err("batching.mix_lengths is false".to_string());
        }
        let mask = find_mask(plan, settings.mask.as_deref())?;
        let info = plan.value(plan.inputs[mask]);
        let symbol = match info.shape.as_deref() {
            Some([_, Dim::Symbol(symbol)]) if symbol != batch => symbol.clone(),
            _ => return Err(format!("the mask '{}' is not of batch and length", info.name)),
        };
        if info.dtype == DataType::String {
            return Err(format!("the mask '{}' is a text", info.name));
        }
        let axes = |ids: &[ValueId]| -> Result<Vec<Option<usize>>, String> {
            ids.iter().map(|id| axis(plan, *id, &symbol)).collect()
        };
        let (inputs, outputs) = (axes(&plan.inputs)?, axes(&plan.outputs)?);
        Ok(LengthPadding { symbol, mask, inputs, outputs })
    }

    /// The symbol of the length.
    pub fn symbol(&self) -> &str {
        &self.symbol
    }

    /// The index of the mask among the inputs.
    pub fn mask(&self) -> usize {
        self.mask
    }

    /// The length of a request; `None` when its inputs do not agree about it.
    pub fn length(&self, inputs: &[Tensor]) -> Option<usize> {
        if inputs.len() != self.inputs.len() {
            return None;
        }
        let mut lengths = inputs.iter().zip(&self.inputs).filter_map(|(input, axis)| {
            let axis = (*axis)?;
            Some(input.shape().get(axis).copied())
        });
        let first = lengths.next()??;
        lengths.all(|length| length == Some(first)).then_some(first)
    }

    /// `inputs` with `length`, which is not less than theirs. What is added is zero; in the mask
    /// that means that it does not count.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn pad(&self, inputs: Vec<Tensor>, length: usize) -> Result<Vec<Tensor>, TensorError> {
        let one = |(input, axis): (Tensor, &Option<usize>)| match axis {
            Some(axis) if input.shape().get(*axis).is_some_and(|own| *own < length) => {
                resize(&input, *axis, length)
            }
            _ => Ok(input),
        };
        inputs.into_iter().zip(&self.inputs).map(one).collect()
    }

    /// `inputs` as they are at a smaller `length`.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn cut_inputs(&self, inputs: &[Tensor], length: usize) -> Result<Vec<Tensor>, TensorError> {
        let one = |(input, axis): (&Tensor, &Option<usize>)| match axis {
            Some(axis) => resize(input, *axis, length),
            None => Ok(input.clone()),
        };
        inputs.iter().zip(&self.inputs).map(one).collect()
    }

    /// Input `index` with the values of `front` at its beginning, and those of `behind` after it.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn overwrite(
        &self,
        index: usize,
        behind: &Tensor,
        front: &Tensor,
    ) -> Result<Tensor, TensorError> {
        let Some(axis) = self.inputs.get(index).copied().flatten() else {
            return Ok(front.clone());
        };
        let (shape, own) = (behind.shape().to_vec(), front.shape()[axis]);
        let too_large = || TensorError::TooLarge { shape: shape.clone() };
        let (Some(raw), Some(first)) = (behind.raw(), front.raw()) else { return Err(too_large()) };
        let element = behind.dtype().size_bytes().ok_or_else(too_large)?;
        let outer: usize = shape[..axis].iter().product();
        let inner = shape[axis + 1..].iter().product::<usize>() * element;
        let mut bytes = raw.to_vec();
        for row in 0..outer {
            let at = row * shape[axis] * inner;
            bytes[at..at + own * inner]
                .copy_from_slice(&first[row * own * inner..(row + 1) * own * inner]);
        }
        Tensor::from_raw(behind.dtype(), shape, Bytes::from(bytes))
    }

    /// `outputs` of a padded request as they are at its own `length`.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn cut(&self, outputs: Vec<Tensor>, length: usize) -> Result<Vec<Tensor>, TensorError> {
        let one = |(output, axis): (Tensor, &Option<usize>)| match axis {
            Some(axis) if output.shape().get(*axis).is_some_and(|own| *own > length) => {
                resize(&output, *axis, length)
            }
            _ => Ok(output),
        };
        outputs.into_iter().zip(&self.outputs).map(one).collect()
    }
}

/// The input that is the mask: the named one, or the only one whose name says so.
fn find_mask(plan: &LaunchPlan, named: Option<&str>) -> Result<usize, String> {
    let name = |index: &usize| plan.value(plan.inputs[*index]).name.as_str();
    let all = 0..plan.inputs.len();
    if let Some(named) = named {
        let found = all.clone().find(|index| name(index) == named);
        return found.ok_or_else(|| format!("batching.mask: there is no input '{named}'"));
    }
    let is_mask = |index: &usize| {
        let name = name(index).to_ascii_lowercase();
        name.contains("attention_mask") || name == "input_mask" || name == "mask"
    };
    let mut masks = all.filter(is_mask);
    match (masks.next(), masks.next()) {
        (Some(mask), None) => Ok(mask),
        (None, _) => Err("no input is an attention mask".to_string()),
        _ => Err("several inputs are attention masks".to_string()),
    }
}

/// The only dimension of a value that is `symbol`.
fn axis(plan: &LaunchPlan, id: ValueId, symbol: &str) -> Result<Option<usize>, String> {
    let info = plan.value(id);
    let Some(dims) = info.shape.as_deref() else {
        return Err(format!("the shape of '{}' is not known", info.name));
    };
    let mut found = None;
    for (index, dim) in dims.iter().enumerate() {
        match dim {
            Dim::Symbol(name) if name == symbol && found.is_none() => found = Some(index),
            Dim::Unknown => return Err(format!("a size of '{}' depends on data", info.name)),
            dim if dim.has_symbol(symbol) => {
                return Err(format!("a size of '{}' is computed from the length", info.name));
            }
            _ => {}
        }
    }
    match found {
        Some(0) => Err(format!("'{}' begins with the length", info.name)),
        found => Ok(found),
    }
}

/// A tensor with another size of one dimension: cut, or filled with zeros.
fn resize(tensor: &Tensor, axis: usize, size: usize) -> Result<Tensor, TensorError> {
    let mut shape = tensor.shape().to_vec();
    let (outer, own): (usize, usize) = (shape[..axis].iter().product(), shape[axis]);
    let inner: usize = shape[axis + 1..].iter().product();
    shape[axis] = size;
    let (Some(raw), Some(element)) = (tensor.raw(), tensor.dtype().size_bytes()) else {
        return Err(TensorError::TooLarge { shape });
    };
    let (from, to) = (own * inner * element, size * inner * element);
    if outer == 1 && size <= own {
        return Tensor::from_raw(tensor.dtype(), shape, raw.slice(..to));
    }
    let mut bytes = Vec::new();
    let total = outer.checked_mul(to).ok_or_else(|| TensorError::TooLarge { shape: shape.clone() });
    let total = total?;
    if bytes.try_reserve_exact(total).is_err() {
        return Err(TensorError::TooLarge { shape });
    }
    for row in 0..outer {
        bytes.extend_from_slice(&raw[row * from..row * from + from.min(to)]);
        bytes.resize((row + 1) * to, 0);
    }
    Tensor::from_raw(tensor.dtype(), shape, Bytes::from(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ValueInfo;

    fn symbol(name: &str) -> Dim {
        Dim::symbol(name)
    }

    /// A plan with these inputs and outputs, and no steps.
    fn plan(inputs: &[(&str, Vec<Dim>)], outputs: &[(&str, Vec<Dim>)]) -> LaunchPlan {
        let value = |(name, shape): &(&str, Vec<Dim>)| ValueInfo {
            name: (*name).to_string(),
            dtype: DataType::I64,
            shape: Some(shape.clone()),
        };
        let ids = |range: std::ops::Range<usize>| range.map(|id| ValueId(id as u32)).collect();
        LaunchPlan {
            values: inputs.iter().chain(outputs).map(value).collect(),
            inputs: ids(0..inputs.len()),
            outputs: ids(inputs.len()..inputs.len() + outputs.len()),
            ..LaunchPlan::default()
        }
    }

    fn text_model() -> LaunchPlan {
        let tokens = || vec![symbol("batch"), symbol("length")];
        plan(
            &[("input_ids", tokens()), ("attention_mask", tokens())],
            &[
                ("hidden", vec![symbol("batch"), symbol("length"), Dim::Fixed(2)]),
                ("pooled", vec![symbol("batch"), Dim::Fixed(2)]),
            ],
        )
    }

    fn numbers(shape: &[usize]) -> Tensor {
        let count: usize = shape.iter().product();
        Tensor::from_vec(shape.to_vec(), (1..=count as i64).collect()).unwrap()
    }

    #[test]
    fn lengths_have_few_classes_and_little_waste() {
        let mut classes = std::collections::BTreeSet::new();
        for length in 1..=LENGTH_MAX {
            let padded = padded_length(length);
            assert!(padded >= length && padded_length(padded) == padded, "{length}");
            assert!(padded - length < 8.max(length / 4 + 1), "{length} to {padded}");
            classes.insert(padded);
        }
        assert!(classes.len() <= 40, "{}", classes.len());
    }

    #[test]
    fn outputs_of_padded_requests_are_cut_back() {
        let padding = LengthPadding::of(&text_model(), "batch", &Batching::default()).unwrap();
        assert_eq!((padding.symbol(), padding.mask()), ("length", 1));
        let inputs = vec![numbers(&[2, 3]), numbers(&[2, 3])];
        assert_eq!(padding.length(&inputs), Some(3));
        let padded = padding.pad(inputs, 5).unwrap();
        assert_eq!(padded[0].shape(), [2, 5]);
        assert_eq!(padded[0].to_vec::<i64>().unwrap(), [1, 2, 3, 0, 0, 4, 5, 6, 0, 0]);
        let outputs = vec![numbers(&[2, 5, 2]), numbers(&[2, 2])];
        let cut = padding.cut(outputs, 3).unwrap();
        assert_eq!(cut[0].shape(), [2, 3, 2]);
        let expected = [1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16];
        assert_eq!(cut[0].to_vec::<i64>().unwrap(), expected);
        assert_eq!(cut[1], numbers(&[2, 2]));
        // One row is cut without a copy.
        let one = padding.cut(vec![numbers(&[1, 5, 2]), numbers(&[1, 2])], 2).unwrap();
        assert_eq!(one[0].to_vec::<i64>().unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn inputs_that_disagree_have_no_length() {
        let padding = LengthPadding::of(&text_model(), "batch", &Batching::default()).unwrap();
        assert_eq!(padding.length(&[numbers(&[1, 3]), numbers(&[1, 4])]), None);
        assert_eq!(padding.length(&[numbers(&[3]), numbers(&[3])]), None);
        assert_eq!(padding.length(&[numbers(&[1, 3])]), None);
    }

    #[test]
    fn models_that_cannot_be_padded_say_why() {
        let refused = |plan: &LaunchPlan, settings: &Batching| {
            LengthPadding::of(plan, "batch", settings).expect_err("it cannot be padded")
        };
        let tokens = || vec![symbol("batch"), symbol("length")];
        let plain = Batching::default();
        let no_mask = plan(&[("ids", tokens())], &[("y", tokens())]);
        assert!(refused(&no_mask, &plain).contains("no input is"));
        let off = Batching { mix_lengths: false, ..Batching::default() };
        assert!(refused(&text_model(), &off).contains("mix_lengths"));
        let named = Batching { mask: Some("other".to_string()), ..Batching::default() };
        assert!(refused(&text_model(), &named).contains("no input 'other'"));
        let unknown = plan(&[("mask", tokens())], &[("y", vec![symbol("batch"), Dim::Unknown])]);
        assert!(refused(&unknown, &plain).contains("depends on data"));
        let twice = vec![symbol("batch"), symbol("length"), symbol("length")];
        let square = plan(&[("mask", tokens())], &[("y", twice)]);
        assert!(refused(&square, &plain).contains("computed from the length"));
        let fixed = plan(&[("mask", vec![symbol("batch"), Dim::Fixed(8)])], &[("y", tokens())]);
        assert!(refused(&fixed, &plain).contains("not of batch and length"));
    }

    #[test]
    fn random_lengths_survive_padding_and_cutting() {
        let tokens = || vec![symbol("batch"), symbol("length")];
        let same = plan(&[("mask", tokens())], &[("y", tokens())]);
        let padding = LengthPadding::of(&same, "batch", &Batching::default()).unwrap();
        let mut random = base::Random::new(5);
        for _ in 0..200 {
            let (rows, length) = (1 + random.below(4) as usize, 1 + random.below(300) as usize);
            let input = numbers(&[rows, length]);
            let padded = padding.pad(vec![input.clone()], padded_length(length)).unwrap();
            assert_eq!(padding.cut(padded, length).unwrap(), [input]);
        }
    }
}
