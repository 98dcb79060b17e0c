//! Attention of any width, as products and a softmax.

use model::gpu::GpuTarget;
use model::op::{MatMul, Softmax, SoftmaxKind};

use super::super::draft::StepDraft;
use super::super::elementwise::{self, Expr};
use super::super::reduce::softmax;
use super::super::view::{Element, View};
use super::matmul;

/// `y = softmax(scale * q @ k^T + mask) @ v`, as three or four steps.
///
/// `scratch` are two buffers for the scores, `[.., queries, keys]` with the output's batch; in
/// single precision they lose nothing against a fused kernel. A boolean `mask` excludes scores
/// where it is false, a numeric one is added; it broadcasts to the scores.
pub fn attention(
    target: &GpuTarget,
    scale: f32,
    (q, k, v): (&View, &View, &View),
    mask: Option<&View>,
    scratch: (&View, &View),
    y: &View,
) -> Result<Vec<StepDraft>, String> {
    let (scores, weights) = scratch;
    let spec = MatMul { transpose_b: true, alpha: scale, ..MatMul::default() };
    let choice = mask.filter(|mask| mask.element == Element::Bool);
    let added = mask.filter(|mask| mask.element != Element::Bool);
    let mut works = vec![matmul(target, &spec, (q, k), (added, None), scores)?];
    let (from, to) = match choice {
        Some(mask) => {
            let lowest = Box::new(Expr::Float(f32::NEG_INFINITY));
            let masked = Expr::Where(Box::new(Expr::Input(1)), Box::new(Expr::Input(0)), lowest);
            works.push(elementwise::work(&masked, &[scores.clone(), mask.clone()], weights)?);
            (weights, scores)
        }
        None => (scores, weights),
    };
    let along_keys = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    works.push(softmax(&along_keys, from, to)?);
    works.push(matmul(target, &MatMul::default(), (to, v), (None, None), y)?);
    Ok(works)
}
