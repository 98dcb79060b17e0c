//! Scores of characters over places, read as text: the best character of each place, repeats and blanks left out.

use api::ApiError;
use api::error::ApiResult;
use bytes::Bytes;
use model::{DataType, Tensor};

/// The text and its mean score, of every row of `scores` (rows x places x characters). The first label stands for no
/// character.
pub fn read(name: &str, scores: &Tensor, labels: &[String]) -> ApiResult<(Tensor, Tensor)> {
    let (&[rows, places, characters], DataType::F32) = (scores.shape(), scores.dtype()) else {
        return Err(ApiError::invalid(format!(
            "output '{name}' is {}{:?}; text is read from FP32 of rows x places x characters",
            scores.dtype().wire_name(),
            scores.shape()
        )));
    };
    if characters != labels.len() {
        return Err(ApiError::invalid(format!(
            "output '{name}' tells {characters} characters apart, the model's settings have {} labels",
            labels.len()
        )));
    }
    let values = scores.to_vec::<f32>().unwrap_or_default();
    let (mut texts, mut means) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    for row in values.chunks_exact((places * characters).max(1)).take(rows) {
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
    for place in row.chunks_exact(characters.max(1)) {
        let best =
            place.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (index, &score)| {
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
    fn repeats_count_once_unless_a_blank_parts_them() {
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
