//! Non-maximum suppression of boxes.

use crate::buffer::Buffer;
use crate::kernel::operand::{Element, elements, integers, one};
use crate::kernel::{Inputs, KernelResult};
use crate::kernel::{KernelError, invalid};

/// A box by its corners, `low <= high`.
#[derive(Clone, Copy)]
struct Corners {
    low: [f32; 2],
    high: [f32; 2],
}

impl Corners {
    fn new(raw: &[f32], center_point: bool) -> Corners {
        if center_point {
            let (half_width, half_height) = (raw[2] / 2.0, raw[3] / 2.0);
            return Corners {
                low: [raw[0] - half_width, raw[1] - half_height],
                high: [raw[0] + half_width, raw[1] + half_height],
            };
        }
        Corners {
            low: [raw[0].min(raw[2]), raw[1].min(raw[3])],
            high: [raw[0].max(raw[2]), raw[1].max(raw[3])],
        }
    }

    fn area(&self) -> f32 {
        (self.high[0] - self.low[0]) * (self.high[1] - self.low[1])
    }

    /// Intersection over union.
    fn overlap(&self, other: &Corners) -> f32 {
        let side = |axis: usize| {
            (self.high[axis].min(other.high[axis]) - self.low[axis].max(other.low[axis])).max(0.0)
        };
        let shared = side(0) * side(1);
        let union = self.area() + other.area() - shared;
        if shared <= 0.0 || union <= 0.0 { 0.0 } else { shared / union }
    }
}

/// The only element of optional float operand `index`.
fn threshold(inputs: &Inputs, index: usize) -> Result<Option<f32>, KernelError> {
    match inputs.optional_typed::<f32>(index)? {
        None => Ok(None),
        Some(tensor) => match elements(tensor) {
            [only] => Ok(Some(*only)),
            many => Err(invalid!("operand {index} must be one number, has {}", many.len())),
        },
    }
}

pub(super) fn suppress(inputs: &Inputs, center_point: bool) -> KernelResult {
    let (boxes, scores) = (inputs.typed::<f32>(0)?, inputs.typed::<f32>(1)?);
    let &[batch, count, 4] = boxes.shape() else {
        return Err(invalid!("boxes have shape {:?} and not [batch, boxes, 4]", boxes.shape()));
    };
    let &[score_batch, classes, score_count] = scores.shape() else {
        return Err(invalid!("scores have shape {:?}", scores.shape()));
    };
    if (score_batch, score_count) != (batch, count) {
        return Err(invalid!("{:?} scores for {:?} boxes", scores.shape(), boxes.shape()));
    }
    let max_boxes = match inputs.optional(2) {
        None => 0,
        Some(value) => integers(value)?.first().copied().unwrap_or(0).max(0) as usize,
    };
    let max_overlap = threshold(inputs, 3)?.unwrap_or(0.0);
    let min_score = threshold(inputs, 4)?;
    let (boxes, scores) = (elements(boxes), elements(scores));
    let mut chosen: Buffer<i64> = Buffer::default();
    for image in 0..batch {
        let raw = boxes[image * count * 4..][..count * 4].chunks_exact(4);
        let corners = Buffer::collect(raw.map(|raw| Corners::new(raw, center_point)))?;
        for class in 0..classes {
            let scores = &scores[(image * classes + class) * count..][..count];
            let best = best_boxes(&corners, scores, max_boxes, max_overlap, min_score)?;
            for &index in &best {
                for part in [image, class, index] {
                    chosen.push(part as i64)?;
                }
            }
        }
    }
    one(i64::wrap(&[chosen.len() / 3, 3], chosen))
}

/// The boxes of one class by descending score, without those that overlap a better one too much.
fn best_boxes(
    corners: &[Corners],
    scores: &[f32],
    max_boxes: usize,
    max_overlap: f32,
    min_score: Option<f32>,
) -> Result<Buffer<usize>, KernelError> {
    let enough = |&index: &usize| min_score.is_none_or(|min| scores[index] > min);
    let mut order = Buffer::with_capacity(scores.len())?;
    order.extend((0..scores.len()).filter(enough));
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let mut chosen: Buffer<usize> = Buffer::default();
    for &index in &order {
        if chosen.len() >= max_boxes {
            break;
        }
        let free = chosen.iter().all(|&best| corners[best].overlap(&corners[index]) <= max_overlap);
        if free {
            chosen.push(index)?;
        }
    }
    Ok(chosen)
}
