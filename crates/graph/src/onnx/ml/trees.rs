//! Trees: from the lists of a file to the arrays of a plan.

use std::collections::HashMap;

use bytes::Bytes;
use model::op::{
    Binary, ClassRule, Classify, Ml, Op, PostTransform, SecondScore, TreeAggregate, TreeMode, Trees,
};
use model::{DataType, Tensor, ValueId};

use super::super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::super::narrow::as_type;
use super::super::tensor::to_tensor;
use super::{class_labels, classified, floats, post_transform, transformed, vector};

/// The columns of a node in a plan.
const COLUMNS: usize = 7;

/// The arrays of a plan.
#[derive(Default)]
struct Arrays {
    nodes: Vec<i64>,
    thresholds: Vec<f64>,
    leaves: Vec<i64>,
    targets: Vec<i64>,
    weights: Vec<f64>,
    roots: Vec<i64>,
    members: Vec<f64>,
}

fn ints<'a>(cx: &Context<'a>, name: &str) -> &'a [i64] {
    cx.attributes.ints(name).unwrap_or_default()
}

/// Numbers in an attribute, or in the tensor that may replace it.
fn numbers(cx: &Context, name: &str) -> Result<Vec<f64>, MapError> {
    if let Some(tensor) = tensor_numbers(cx, &format!("{name}_as_tensor"))? {
        return Ok(tensor);
    }
    Ok(floats(cx, name).iter().map(|x| f64::from(*x)).collect())
}

fn tensor_numbers(cx: &Context, name: &str) -> Result<Option<Vec<f64>>, MapError> {
    let Some(proto) = cx.attributes.tensor(name)? else { return Ok(None) };
    let tensor = match to_tensor(proto, cx.external) {
        Ok(tensor) => tensor,
        Err(error) => return invalid(error.to_string()),
    };
    let wide = tensor.to_vec::<f64>();
    let single = || crate::content::floats(&tensor);
    match wide.or_else(|| Some(single()?.into_iter().map(f64::from).collect())) {
        Some(numbers) => Ok(Some(numbers)),
        None => invalid(format!("attribute '{name}' is not of numbers")),
    }
}

fn mode_of(name: &Bytes) -> Option<TreeMode> {
    Some(match &name[..] {
        b"BRANCH_LEQ" => TreeMode::LessOrEqual,
        b"BRANCH_LT" => TreeMode::Less,
        b"BRANCH_GTE" => TreeMode::GreaterOrEqual,
        b"BRANCH_GT" => TreeMode::Greater,
        b"BRANCH_EQ" => TreeMode::Equal,
        b"BRANCH_NEQ" => TreeMode::NotEqual,
        _ => return None,
    })
}

fn number_of(mode: TreeMode) -> i64 {
    TreeMode::ALL.iter().position(|other| *other == mode).unwrap_or(0) as i64
}

/// The trees of the older operators: nodes and leaves in one list, named by tree and number.
fn listed(cx: &Context, what: &str) -> Result<Arrays, MapError> {
    let (trees, ids) = (ints(cx, "nodes_treeids"), ints(cx, "nodes_nodeids"));
    let features = ints(cx, "nodes_featureids");
    let modes = cx.attributes.strings("nodes_modes").unwrap_or_default();
    let thresholds = numbers(cx, "nodes_values")?;
    let (yes, no) = (ints(cx, "nodes_truenodeids"), ints(cx, "nodes_falsenodeids"));
    let missing = ints(cx, "nodes_missing_value_tracks_true");
    cx.attributes.ignore(&["nodes_hitrates", "nodes_hitrates_as_tensor"]);
    let count = ids.len();
    let lengths = [trees.len(), features.len(), modes.len(), thresholds.len(), yes.len(), no.len()];
    if lengths.iter().any(|length| *length != count) || count == 0 {
        return invalid(format!("lists of nodes of lengths {count} and {lengths:?}"));
    }
    let mut arrays = Arrays::default();
    // Where each node of the file went: a node from 0 on, a leaf below.
    let mut places: HashMap<(i64, i64), i64> = HashMap::with_capacity(count);
    let (mut nodes, mut leaves) = (0, 0);
    for (index, mode) in modes.iter().enumerate() {
        let place = match mode_of(mode) {
            Some(_) => nodes,
            None if mode == "LEAF" => -1 - leaves,
            None => {
                return unsupported(format!("a node of mode '{}'", String::from_utf8_lossy(mode)));
            }
        };
        if place >= 0 {
            nodes += 1;
        } else {
            leaves += 1;
        }
        if places.insert((trees[index], ids[index]), place).is_some() {
            return invalid(format!("node {} of tree {} twice", ids[index], trees[index]));
        }
        if index == 0 || trees[index] != trees[index - 1] {
            arrays.roots.push(place);
        }
    }
    for (index, mode) in modes.iter().enumerate() {
        let Some(mode) = mode_of(mode) else { continue };
        let child = |id: i64| places.get(&(trees[index], id)).copied();
        let (Some(yes), Some(no)) = (child(yes[index]), child(no[index])) else {
            return invalid(format!(
                "node {} of tree {} has no children",
                ids[index], trees[index]
            ));
        };
        let missing = i64::from(missing.get(index).is_some_and(|flag| *flag != 0));
        arrays.nodes.extend([features[index], number_of(mode), yes, no, missing, 0, 0]);
        arrays.thresholds.push(thresholds[index]);
    }
    contributions(cx, what, &places, leaves as usize, &mut arrays)?;
    Ok(arrays)
}

/// What the leaves of the older operators add to which target.
fn contributions(
    cx: &Context,
    what: &str,
    places: &HashMap<(i64, i64), i64>,
    leaves: usize,
    arrays: &mut Arrays,
) -> Result<(), MapError> {
    let list = |name: &str| ints(cx, &format!("{what}_{name}"));
    let (trees, nodes, targets) = (list("treeids"), list("nodeids"), list("ids"));
    let weights = numbers(cx, &format!("{what}_weights"))?;
    if [nodes.len(), targets.len(), weights.len()] != [trees.len(); 3] {
        return invalid(format!("lists of leaves of lengths {} and others", trees.len()));
    }
    let mut entries: Vec<(usize, usize)> = Vec::with_capacity(trees.len());
    for index in 0..trees.len() {
        // Weights of inner nodes have no effect.
        if let Some(leaf) = places.get(&(trees[index], nodes[index])).filter(|place| **place < 0) {
            entries.push(((-1 - leaf) as usize, index));
        }
    }
    entries.sort_unstable();
    let mut next = entries.into_iter().peekable();
    for leaf in 0..leaves {
        let start = arrays.targets.len();
        while let Some((_, index)) = next.next_if(|(of, _)| *of == leaf) {
            arrays.targets.push(targets[index]);
            arrays.weights.push(weights[index]);
        }
        arrays.leaves.extend([start as i64, (arrays.targets.len() - start) as i64]);
    }
    Ok(())
}

/// Adds the arrays as constants, and the trees.
fn emit_trees(
    cx: &mut Context,
    arrays: &Arrays,
    trees: Trees,
    double: bool,
) -> Result<ValueId, MapError> {
    let x = cx.input(0)?;
    cx.at_most(1)?;
    let dtype = if double { DataType::F64 } else { DataType::F32 };
    let x = as_type(cx, x, dtype)?;
    let table = |cx: &mut Context, data: &[i64], columns: usize| match Tensor::from_vec(
        vec![data.len() / columns, columns],
        data.to_vec(),
    ) {
        Ok(tensor) => Ok(cx.constant(tensor)),
        Err(error) => invalid(error.to_string()),
    };
    let reals = |cx: &mut Context, data: &[f64]| match double {
        true => vector(cx, data),
        false => vector(cx, &data.iter().map(|x| *x as f32).collect::<Vec<f32>>()),
    };
    let mut inputs = vec![
        Some(x),
        Some(table(cx, &arrays.nodes, COLUMNS)?),
        Some(reals(cx, &arrays.thresholds)?),
        Some(table(cx, &arrays.leaves, 2)?),
        Some(vector(cx, &arrays.targets)?),
        Some(reals(cx, &arrays.weights)?),
        Some(vector(cx, &arrays.roots)?),
    ];
    if !arrays.members.is_empty() {
        inputs.push(Some(reals(cx, &arrays.members)?));
    }
    Ok(cx.parts(Op::Ml(Ml::Trees(trees)), inputs, 1)?[0])
}

/// Whether a file means double precision.
fn is_double(cx: &Context) -> Result<bool, MapError> {
    Ok(cx.dtype(cx.input(0)?) == DataType::F64)
}

fn with_base(
    cx: &mut Context,
    scores: ValueId,
    base: &[f64],
    targets: usize,
) -> Result<ValueId, MapError> {
    if base.is_empty() {
        return Ok(scores);
    }
    if base.len() != targets && base.len() != 1 {
        return invalid(format!("{} base values for {targets} targets", base.len()));
    }
    let base = vector(cx, base)?;
    let base = as_type(cx, base, cx.dtype(scores))?;
    cx.part(Op::Binary(Binary::Add), &[scores, base])
}

pub(super) fn regressor(cx: &mut Context) -> Mapped {
    let targets = cx.attributes.size_or("n_targets", 1)?;
    let aggregate = match cx.attributes.string("aggregate_function")?.as_deref() {
        None | Some("SUM") => TreeAggregate::Sum,
        Some("AVERAGE") => TreeAggregate::Average,
        Some("MIN") => TreeAggregate::Min,
        Some("MAX") => TreeAggregate::Max,
        Some(other) => return unsupported(format!("aggregate_function '{other}'")),
    };
    let transform = post_transform(cx)?;
    let base = numbers(cx, "base_values")?;
    let arrays = listed(cx, "target")?;
    let double = is_double(cx)?;
    let y = emit_trees(cx, &arrays, Trees { targets, aggregate }, double)?;
    let y = with_base(cx, y, &base, targets)?;
    let y = as_type(cx, y, DataType::F32)?;
    let y = transformed(cx, y, transform)?;
    cx.emit_identity(0, y)
}

pub(super) fn classifier(cx: &mut Context) -> Mapped {
    let (labels, count) = class_labels(cx, ["classlabels_int64s", "classlabels_strings"])?;
    let transform = post_transform(cx)?;
    let base = numbers(cx, "base_values")?;
    let mut arrays = listed(cx, "class")?;
    let double = is_double(cx)?;
    let first = arrays.targets.first().copied().unwrap_or(0);
    let single = count == 2 && arrays.targets.iter().all(|target| *target == first);
    let positive = arrays.weights.iter().all(|weight| *weight >= 0.0);
    let threshold = if positive { 0.5 } else { 0.0 };
    let second = if positive { SecondScore::Complement } else { SecondScore::Negated };
    // One column of two classes: the score of the second one, wherever it stands.
    let lone = single && first == 0 && base.len() < 2;
    let targets = if lone { 1 } else { count };
    if lone {
        arrays.targets.iter_mut().for_each(|target| *target = 0);
    }
    let rule = match single {
        true => ClassRule::Above { column: usize::from(first == 1 && !lone), threshold },
        false => ClassRule::Largest,
    };
    let aggregate = TreeAggregate::Sum;
    let y = emit_trees(cx, &arrays, Trees { targets, aggregate }, double)?;
    let y = with_base(cx, y, &base, targets)?;
    let y = as_type(cx, y, DataType::F32)?;
    classified(cx, Classify { transform, rule, second }, y, labels)
}

/// The operator that replaces the two others: nodes and leaves in lists of their own.
pub(super) fn ensemble(cx: &mut Context) -> Mapped {
    let targets = cx.attributes.size_or("n_targets", 1)?;
    let aggregate = match cx.attributes.int_or("aggregate_function", 1)? {
        0 => TreeAggregate::Average,
        1 => TreeAggregate::Sum,
        2 => TreeAggregate::Min,
        3 => TreeAggregate::Max,
        other => return invalid(format!("aggregate_function {other}")),
    };
    let transform = match cx.attributes.int_or("post_transform", 0)? {
        0 => PostTransform::None,
        1 => PostTransform::Softmax,
        2 => PostTransform::Logistic,
        3 => PostTransform::SoftmaxZero,
        4 => PostTransform::Probit,
        other => return invalid(format!("post_transform {other}")),
    };
    let arrays = separate(cx)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let y = emit_trees(cx, &arrays, Trees { targets, aggregate }, dtype == DataType::F64)?;
    let y = transformed(cx, y, transform)?;
    let y = as_type(cx, y, dtype)?;
    cx.emit_identity(0, y)
}

fn separate(cx: &Context) -> Result<Arrays, MapError> {
    cx.attributes.ignore(&["nodes_hitrates"]);
    let features = ints(cx, "nodes_featureids");
    let modes = tensor_modes(cx)?;
    let thresholds = tensor_numbers(cx, "nodes_splits")?.unwrap_or_default();
    let sides =
        [("nodes_truenodeids", "nodes_trueleafs"), ("nodes_falsenodeids", "nodes_falseleafs")];
    let [yes, no] = sides.map(|(nodes, leaves)| (ints(cx, nodes), ints(cx, leaves)));
    let missing = ints(cx, "nodes_missing_value_tracks_true");
    let count = features.len();
    let lengths = [modes.len(), thresholds.len(), yes.0.len(), yes.1.len(), no.0.len(), no.1.len()];
    if lengths.iter().any(|length| *length != count) {
        return invalid(format!("lists of nodes of lengths {count} and {lengths:?}"));
    }
    let mut arrays = Arrays { roots: ints(cx, "tree_roots").to_vec(), ..Arrays::default() };
    // The sets of all nodes, each ended by NaN.
    let sets = tensor_numbers(cx, "membership_values")?.unwrap_or_default();
    let mut sets = sets.split(|value| value.is_nan());
    let child = |(ids, leaves): (&[i64], &[i64]), at: usize| match leaves[at] {
        0 => ids[at],
        _ => -1 - ids[at],
    };
    for index in 0..count {
        let mode = usize::try_from(modes[index]).ok().and_then(|mode| TreeMode::ALL.get(mode));
        let Some(mode) = mode else { return invalid(format!("a node of mode {}", modes[index])) };
        let missing = i64::from(missing.get(index).is_some_and(|flag| *flag != 0));
        let first = arrays.members.len();
        if *mode == TreeMode::Member {
            let Some(set) = sets.next() else { return invalid("a node without a set") };
            arrays.members.extend(set);
        }
        let held = arrays.members.len() - first;
        let (yes, no) = (child(yes, index), child(no, index));
        let number = number_of(*mode);
        let row = [features[index], number, yes, no, missing, first as i64, held as i64];
        arrays.nodes.extend(row);
        arrays.thresholds.push(thresholds[index]);
    }
    arrays.targets = ints(cx, "leaf_targetids").to_vec();
    arrays.weights = tensor_numbers(cx, "leaf_weights")?.unwrap_or_default();
    if arrays.targets.len() != arrays.weights.len() {
        return invalid("targets and weights of leaves differ in number");
    }
    arrays.leaves = (0..arrays.targets.len() as i64).flat_map(|leaf| [leaf, 1]).collect();
    Ok(arrays)
}

fn tensor_modes(cx: &Context) -> Result<Vec<i64>, MapError> {
    let Some(proto) = cx.attributes.tensor("nodes_modes")? else { return Ok(Vec::new()) };
    let tensor = match to_tensor(proto, cx.external) {
        Ok(tensor) => tensor,
        Err(error) => return invalid(error.to_string()),
    };
    match crate::content::ints(&tensor) {
        Some(modes) => Ok(modes),
        None => invalid("attribute 'nodes_modes' is not of integers"),
    }
}
