//! Decodes scores of characters by position as text: the best character of each position, without
//! repeats and blanks.

use api::ApiError;
use api::error::ApiResult;
use bytes::Bytes;
use model::{DataType, Tensor};

/// The text and its mean score, for every row of `scores` (rows x positions x characters). The
/// first label is the blank.
pub fn read(name: &str, scores: &Tensor, labels: &[String]) -> ApiResult<(Tensor, Tensor)> {
    let (&[rows, positions, characters], DataType::F32) = (scores.shape(), scores.dtype()) else {
        return Err(ApiError::invalid(format!(
            "output '{name}' is {}{:?}; text is read from FP32 of rows x positions x characters",
            scores.dtype().wire_name(),
            scores.shape()
        )));
    };
    if characters != labels.len() {
        return Err(ApiError::invalid(format!(
            "output '{name}' has scores of {characters} characters, but the model has {} labels",
            labels.len()
        )));
    }
    let values = scores.to_vec::<f32>().unwrap_or_default();
    let (mut texts, mut means) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    for row in values.chunks_exact((positions * characters).max(1)).take(rows) {
        let (text, score) = read_row(row, characters, labels);
        texts.push(Bytes::from(text));
        means.push(score);
    }
    let count = texts.len();
    Ok((Tensor::from_strings(vec![count], texts)?, Tensor::from_vec(vec![count], means)?))
}

fn read_row(row: &[f32], characters: usize, labels: &[String]) -> (String, f32) {
    let (mut text, mut last) = (String::new(), 0);
    let (mut sum, mut count) = (0.0, 0u32);
    for position in row.chunks_exact(characters.max(1)) {
        let best =
            position.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (index, &score)| {
                if score > best.1 { (index, score) } else { best }
            });
        if best.0 != 0 && best.0 != last {
            text.push_str(&labels[best.0]);
            sum += best.1;
            count += 1;
        }
        last = best.0;
    }
    (text, if count == 0 { 0.0 } else { sum / count as f32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_repeats_unless_separated_by_a_blank() {
        let labels: Vec<String> = ["", "a", "l"].map(str::to_string).to_vec();
        let path = [0usize, 1, 1, 2, 0, 2, 2];
        let one = |best: usize| (0..3).map(move |i| if i == best { 0.5f32 } else { 0.1 });
        let values: Vec<f32> = path.iter().flat_map(|&best| one(best)).collect();
        let scores = Tensor::from_vec(vec![1, 7, 3], values).unwrap();
        let (text, mean) = read("y", &scores, &labels).unwrap();
        assert_eq!(text, Tensor::from_strings(vec![1], vec![Bytes::from("all")]).unwrap());
        assert_eq!(mean.to_vec::<f32>().unwrap(), [0.5]);
        assert!(read("y", &scores, &labels[..2]).unwrap_err().message.contains("2 labels"));
        let flat = Tensor::from_vec(vec![3], vec![0f32; 3]).unwrap();
        assert!(read("y", &flat, &labels).is_err());
    }
}
