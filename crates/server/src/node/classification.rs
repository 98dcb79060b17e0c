//! Classification: the highest scores of a tensor with their labels.

use api::error::ApiResult;
use api::{ApiError, Prediction};
use bytes::Bytes;
use half::{bf16, f16};
use model::{DataType, Tensor};

/// Tolerance of the sum of probabilities.
const SUM_TOLERANCE: f32 = 1e-2;

/// The elements of a numeric tensor as scores.
pub fn scores(tensor: &Tensor) -> ApiResult<Vec<f32>> {
    let values = match tensor.dtype() {
        DataType::F32 => tensor.to_vec::<f32>(),
        DataType::F64 => tensor.to_vec::<f64>().map(|v| v.iter().map(|&v| v as f32).collect()),
        DataType::F16 => tensor.to_vec::<f16>().map(|v| v.iter().map(|v| v.to_f32()).collect()),
        DataType::BF16 => tensor.to_vec::<bf16>().map(|v| v.iter().map(|v| v.to_f32()).collect()),
        DataType::I32 => tensor.to_vec::<i32>().map(|v| v.iter().map(|&v| v as f32).collect()),
        DataType::I64 => tensor.to_vec::<i64>().map(|v| v.iter().map(|&v| v as f32).collect()),
        DataType::U8 => tensor.to_vec::<u8>().map(|v| v.iter().map(|&v| f32::from(v)).collect()),
        DataType::I8 => tensor.to_vec::<i8>().map(|v| v.iter().map(|&v| f32::from(v)).collect()),
        _ => None,
    };
    values.ok_or_else(|| ApiError::invalid(format!("{} cannot be classified", tensor.dtype())))
}

/// Positions of the `k` largest scores, largest first; ties go to the lower position.
pub fn best(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let by_score = |&a: &usize, &b: &usize| scores[b].total_cmp(&scores[a]).then(a.cmp(&b));
    if k < order.len() {
        order.select_nth_unstable_by(k, by_score);
        order.truncate(k);
    }
    order.sort_unstable_by(by_score);
    order
}

/// The classification extension: `score:index[:label]` of the best `k`, per row of the batch.
pub fn tensor(
    scored: &Tensor,
    labels: &[String],
    k: usize,
    rows: Option<usize>,
) -> ApiResult<Tensor> {
    let scores = scores(scored)?;
    let row_count = rows.unwrap_or(1);
    let width = scores.len().checked_div(row_count).unwrap_or(0);
    let k = k.min(width);
    let mut texts = Vec::with_capacity(row_count * k);
    for row in scores.chunks_exact(width.max(1)) {
        for index in best(row, k) {
            texts.push(Bytes::from(match labels.get(index) {
                Some(label) => format!("{:.6}:{index}:{label}", row[index]),
                None => format!("{:.6}:{index}", row[index]),
            }));
        }
    }
    let shape = match rows {
        Some(rows) => vec![rows, k],
        None => vec![k],
    };
    Ok(Tensor::from_strings(shape, texts)?)
}

/// Scores as probabilities: unchanged if they already are, otherwise through a softmax.
pub fn probabilities(mut scores: Vec<f32>) -> Vec<f32> {
    let sum: f32 = scores.iter().sum();
    let within = scores.iter().all(|score| (0.0..=1.0).contains(score));
    if within && (sum - 1.0).abs() <= SUM_TOLERANCE {
        return scores;
    }
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
    scores
}

/// The best `k` classes of one row of scores.
pub fn predictions(scores: Vec<f32>, labels: &[String], k: usize) -> Vec<Prediction> {
    let scores = probabilities(scores);
    let prediction = |index: usize| Prediction {
        label: labels.get(index).cloned().unwrap_or_else(|| index.to_string()),
        index,
        score: scores[index],
    };
    best(&scores, k).into_iter().map(prediction).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_scores_come_first() {
        assert_eq!(best(&[0.1, 0.9, 0.5, 0.9], 3), vec![1, 3, 2]);
        assert_eq!(best(&[1.0], 5), vec![0]);
        assert_eq!(best(&[], 5), Vec::<usize>::new());
    }

    #[test]
    fn classes_are_text_per_row() {
        let scored = Tensor::from_vec(vec![2, 2], vec![0.25f32, 0.75, 1.0, 0.0]).unwrap();
        let labels = ["cat".to_string()];
        let classes = tensor(&scored, &labels, 1, Some(2)).unwrap();
        assert_eq!(classes.shape(), [2, 1]);
        let expected = ["0.750000:1", "1.000000:0:cat"].map(Bytes::from).to_vec();
        assert_eq!(classes, Tensor::from_strings(vec![2, 1], expected).unwrap());
    }

    #[test]
    fn logits_become_probabilities() {
        assert_eq!(probabilities(vec![0.25, 0.75]), vec![0.25, 0.75]);
        let soft = probabilities(vec![1000.0, 1000.0]);
        assert_eq!(soft, vec![0.5, 0.5]);
    }
}
