//! Bytes of narrow types: which operators take them, and what their results are.

use model::DataType;
use model::op::{Encode, Op};

use super::{Fact, Inferred, Operands, fail};

/// The first operand that `op` moves elements of without looking at them.
fn moved_operand(op: &Op) -> Option<usize> {
    match op {
        Op::Where => Some(1),
        Op::Identity
        | Op::Reshape { .. }
        | Op::Flatten { .. }
        | Op::Squeeze
        | Op::Unsqueeze
        | Op::Transpose { .. }
        | Op::Expand
        | Op::Tile
        | Op::Concat { .. }
        | Op::Split { .. }
        | Op::Slice
        | Op::Gather { .. }
        | Op::GatherElements { .. }
        | Op::GatherNd { .. }
        | Op::DepthToSpace { .. }
        | Op::SpaceToDepth { .. }
        | Op::ReverseSequence { .. }
        | Op::Compress { .. } => Some(0),
        _ => None,
    }
}

/// Marks the results of operators that move elements, and refuses codes elsewhere.
pub fn mark(op: &Op, x: &Operands, facts: &mut [Fact]) -> Inferred<()> {
    let narrow = |index: usize| x.id(index).and_then(|id| x.graph.value(id).narrow);
    let mut operands = (0..x.count()).filter_map(narrow);
    if let Some(moved) = moved_operand(op) {
        let first = narrow(moved);
        let all = matches!(op, Op::Concat { .. });
        if all && (0..x.count()).any(|index| narrow(index) != first) {
            return fail(format!("operands of different types: {}", x.describe()));
        }
        facts.iter_mut().for_each(|fact| fact.narrow = first);
        return Ok(());
    }
    let reads_bytes = matches!(
        op,
        Op::Decode { .. } | Op::BitCast { .. } | Op::Shape { .. } | Op::Size | Op::Draw(_)
    );
    match operands.find(|narrow| narrow.is_float() && !reads_bytes) {
        Some(narrow) => fail(format!("{} does not take {}", op.name(), narrow.name())),
        None => Ok(()),
    }
}

pub fn decode(x: &Operands) -> Inferred<Fact> {
    match x.dtype(0)? {
        DataType::U8 | DataType::I8 => Ok(Fact::new(DataType::F32, x.owned_shape(0))),
        other => fail(format!("{other} are not bytes")),
    }
}

pub fn encode(encode: &Encode, x: &Operands) -> Inferred<Fact> {
    let expected = if encode.to.is_float() { DataType::F32 } else { DataType::I64 };
    match x.dtype(0)? {
        dtype if dtype == expected => {
            let fact = Fact::new(encode.to.storage(), x.owned_shape(0));
            Ok(Fact { narrow: Some(encode.to), ..fact })
        }
        other => fail(format!("{} are made of {expected}, not {other}", encode.to.name())),
    }
}

pub fn bit_cast(to: DataType, x: &Operands) -> Inferred<Fact> {
    let from = x.dtype(0)?;
    if from.size_bytes().is_none() || from.size_bytes() != to.size_bytes() {
        return fail(format!("{from} and {to} have different sizes"));
    }
    Ok(Fact::new(to, x.owned_shape(0)))
}
