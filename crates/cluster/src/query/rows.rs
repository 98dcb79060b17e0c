//! Concatenates and splits tensors along their first dimension.

use api::ApiError;
use api::error::ApiResult;
use bytes::BytesMut;
use model::Tensor;
use model::tensor::TensorData;

/// Rows of a tensor; one where it has no dimension.
pub fn count(tensor: &Tensor) -> usize {
    tensor.shape().first().copied().unwrap_or(1)
}

/// Concatenates tensors. Types and all dimensions but the first must be equal.
pub fn join(name: &str, tensors: &[&Tensor]) -> ApiResult<Tensor> {
    let [first, rest @ ..] = tensors else {
        return Err(ApiError::internal(format!("'{name}' has no values")));
    };
    if rest.is_empty() {
        return Ok((*first).clone());
    }
    let tail = |tensor: &Tensor| tensor.shape().get(1..).map(<[usize]>::to_vec);
    let same = |other: &&Tensor| other.dtype() == first.dtype() && tail(other) == tail(first);
    let (Some(tail), true) = (tail(first), rest.iter().all(same)) else {
        return Err(ApiError::invalid(format!(
            "values of '{name}' differ in shape and cannot be concatenated"
        )));
    };
    let rows = tensors.iter().map(|tensor| count(tensor)).sum();
    let shape = [vec![rows], tail].concat();
    Ok(match first.data() {
        TensorData::Strings(_) => {
            let strings = tensors.iter().flat_map(|tensor| match tensor.data() {
                TensorData::Strings(strings) => strings.to_vec(),
                TensorData::Raw(_) => Vec::new(),
            });
            Tensor::from_strings(shape, strings.collect())?
        }
        TensorData::Raw(_) => {
            let bytes = tensors.iter().map(|tensor| tensor.size_bytes()).sum();
            let mut joined = BytesMut::with_capacity(bytes);
            tensors.iter().filter_map(|t| t.raw()).for_each(|raw| joined.extend_from_slice(raw));
            Tensor::from_raw(first.dtype(), shape, joined.freeze())?
        }
    })
}

/// Splits a tensor into pieces of so many rows each; raw elements are shared, not copied.
pub fn part(name: &str, tensor: &Tensor, pieces: &[usize]) -> ApiResult<Vec<Tensor>> {
    if pieces.len() == 1 {
        return Ok(vec![tensor.clone()]);
    }
    let rows: usize = pieces.iter().sum();
    if tensor.shape().first() != Some(&rows) {
        return Err(ApiError::invalid(format!(
            "'{name}' has shape {:?} for {rows} requests; a model whose outputs are not by row \
             needs batch = 1",
            tensor.shape()
        )));
    }
    let mut at = 0;
    let mut parts = Vec::with_capacity(pieces.len());
    for &piece in pieces {
        let shape = [vec![piece], tensor.shape()[1..].to_vec()].concat();
        parts.push(match tensor.data() {
            TensorData::Strings(strings) => {
                let size = strings.len() / rows.max(1);
                let own = strings.part(at * size..(at + piece) * size);
                let own = own.ok_or_else(|| ApiError::internal("a row is missing"))?;
                Tensor::from_shared_strings(shape, own)?
            }
            TensorData::Raw(raw) => {
                let size = raw.len() / rows.max(1);
                Tensor::from_raw(tensor.dtype(), shape, raw.slice(at * size..(at + piece) * size))?
            }
        });
        at += piece;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn split_reverts_join() {
        let number = |rows: usize, from: i32| {
            Tensor::from_vec(vec![rows, 2], (from..from + 2 * rows as i32).collect()).unwrap()
        };
        let text = |word: &'static str| {
            Tensor::from_strings(vec![1], vec![Bytes::from_static(word.as_bytes())]).unwrap()
        };
        for parts in [vec![number(1, 0), number(3, 7)], vec![text("a"), text("b")]] {
            let whole = join("x", &parts.iter().collect::<Vec<_>>()).unwrap();
            let pieces: Vec<usize> = parts.iter().map(count).collect();
            assert_eq!(part("x", &whole, &pieces).unwrap(), parts);
        }
        assert!(join("x", &[&number(1, 0), &text("a")]).is_err());
        assert!(part("x", &number(2, 0), &[1, 2]).unwrap_err().message.contains("batch = 1"));
    }
}
