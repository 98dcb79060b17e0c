//! Trees: rows walk down several trees, or several rows down one tree, at once.
//!
//! The two children of a node are neighbours, a leaf is its own child, and every comparison is one
//! of the same kind, so that a step is a load, a comparison and an addition without a branch.
//! Several walks beside each other hide how long a load takes.

use model::op::{TreeAggregate, TreeMode, Trees};

use crate::buffer::Buffer;
use crate::kernel::binary::Number;
use crate::kernel::operand::{Element, elements, one, output_len};
use crate::kernel::parallel::{for_each, in_chunks};
use crate::kernel::{Inputs, Kernel, KernelError, KernelResult, StepFacts, invalid};
use crate::value::Value;
use crate::yield_point;

/// Walks beside each other.
const LANES: usize = 8;

/// Rows that go through all trees together.
const BLOCK: usize = 256;

/// The deepest tree: a walk takes as many steps as its tree is deep.
const MAX_DEPTH: usize = 4096;

/// The columns of a node in a plan.
const COLUMNS: usize = 7;

/// Set in a feature: a missing number goes to the true child.
const MISSING_IS_TRUE: u32 = 1 << 31;

/// The element type of features and thresholds.
pub(super) trait Real: Number + Element + Copy + Send + Sync + 'static {
    /// The greatest number below it.
    fn next_down(self) -> Self;
    /// A number that holds `bits`.
    fn from_index(bits: u32) -> Self;
    fn to_index(self) -> u32;
    const INFINITY: Self;
}

impl Real for f32 {
    fn next_down(self) -> f32 {
        f32::next_down(self)
    }
    fn from_index(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    fn to_index(self) -> u32 {
        self.to_bits()
    }
    const INFINITY: f32 = f32::INFINITY;
}

impl Real for f64 {
    fn next_down(self) -> f64 {
        f64::next_down(self)
    }
    fn from_index(bits: u32) -> f64 {
        f64::from_bits(u64::from(bits))
    }
    fn to_index(self) -> u32 {
        self.to_bits() as u32
    }
    const INFINITY: f64 = f64::INFINITY;
}

/// A node: a row goes on at `child` if its feature is at most the threshold, else behind it.
#[derive(Clone, Copy)]
struct Node<T> {
    threshold: T,
    /// Of a leaf: what it adds, or which leaf it is.
    value: T,
    feature: u32,
    child: u32,
}

/// A set of numbers, or one that equals the feature.
#[derive(Clone, Copy)]
struct Test {
    /// The true child is taken if the feature is not among the members.
    inverted: bool,
    start: usize,
    count: usize,
}

/// Trees as they are walked.
struct Forest<T> {
    nodes: Buffer<Node<T>>,
    /// First node and depth of each tree.
    roots: Buffer<(u32, usize)>,
    /// Tests of equality by node, where there are any.
    tests: Vec<Option<Test>>,
    members: Vec<T>,
    /// By leaf: entries of `targets`, unless every leaf adds one number to the only target.
    leaves: Buffer<(usize, usize)>,
    targets: Buffer<(usize, f64)>,
    single: bool,
    features: usize,
    op: Trees,
}

/// The arrays of a plan.
struct Arrays<'a, T> {
    nodes: &'a [i64],
    thresholds: &'a [T],
    leaves: &'a [i64],
    targets: &'a [i64],
    weights: &'a [T],
    roots: &'a [i64],
    members: &'a [T],
}

fn constant<'a, T: Element>(facts: &'a StepFacts, index: usize) -> Result<&'a [T], KernelError> {
    let value = facts.constant(index).and_then(T::get);
    Ok(elements(value.ok_or_else(|| invalid!("operand {index} of trees must be a constant"))?))
}

pub(super) fn build<T: Real>(facts: &StepFacts, op: Trees) -> Result<Kernel, KernelError> {
    let arrays = Arrays::<T> {
        nodes: constant(facts, 1)?,
        thresholds: constant(facts, 2)?,
        leaves: constant(facts, 3)?,
        targets: constant(facts, 4)?,
        weights: constant(facts, 5)?,
        roots: constant(facts, 6)?,
        members: if facts.step.inputs.len() > 7 { constant(facts, 7)? } else { &[] },
    };
    let forest = Forest::new(&arrays, op)?;
    let resident_bytes = forest.nodes.len() * size_of::<Node<T>>();
    let run = move |_: &crate::kernel::Context, inputs: Inputs| forest.run(&inputs);
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs: (1..8).collect() })
}

impl<T: Real> Forest<T> {
    fn new(arrays: &Arrays<T>, op: Trees) -> Result<Forest<T>, KernelError> {
        let count = arrays.thresholds.len();
        if arrays.nodes.len() != count * COLUMNS || arrays.targets.len() != arrays.weights.len() {
            return Err("arrays of trees have different lengths".into());
        }
        let mut leaves = Buffer::with_capacity(arrays.leaves.len() / 2)?;
        for pair in arrays.leaves.chunks_exact(2) {
            let (start, held) = (usize::try_from(pair[0]), usize::try_from(pair[1]));
            let (Ok(start), Ok(held)) = (start, held) else { return Err("a bad leaf".into()) };
            let end = start.checked_add(held).filter(|end| *end <= arrays.targets.len());
            leaves.push((start, end.ok_or("a leaf without weights")?))?;
        }
        let mut targets = Buffer::with_capacity(arrays.targets.len())?;
        for (target, weight) in arrays.targets.iter().zip(arrays.weights) {
            let target = usize::try_from(*target).ok().filter(|target| *target < op.targets);
            let target = target.ok_or_else(|| invalid!("a target outside of {}", op.targets))?;
            targets.push((target, weight.to_f64()))?;
        }
        let single = op.targets == 1
            && matches!(op.aggregate, TreeAggregate::Sum | TreeAggregate::Average)
            && leaves.iter().all(|(start, end)| end - start <= 1);
        let members = arrays.members.to_vec();
        let mut forest = Forest {
            nodes: Buffer::with_capacity(count.saturating_add(leaves.len()))?,
            roots: Buffer::with_capacity(arrays.roots.len())?,
            tests: Vec::new(),
            members,
            leaves,
            targets,
            single,
            features: 0,
            op,
        };
        let mut reached = Buffer::filled(count, false)?;
        for root in arrays.roots {
            forest.add_tree(arrays, *root, &mut reached)?;
        }
        if forest.tests.iter().all(Option::is_none) {
            forest.tests = Vec::new();
        }
        Ok(forest)
    }

    /// Adds a tree breadth first: the children of a node are neighbours.
    fn add_tree(
        &mut self,
        arrays: &Arrays<T>,
        root: i64,
        reached: &mut [bool],
    ) -> Result<(), KernelError> {
        let start = self.nodes.len();
        let mut level = vec![root];
        let mut depth = 0;
        while !level.is_empty() {
            // The next level begins behind this one.
            let first = self.nodes.len() + level.len();
            let mut next = Vec::new();
            for id in &level {
                let child = u32::try_from(first + next.len());
                let child = child.map_err(|_| invalid!("more nodes than trees may have"))?;
                let at = self.nodes.len() as u32;
                match usize::try_from(*id) {
                    Err(_) => self.add_leaf((-1 - *id) as usize, at)?,
                    Ok(index) => {
                        let seen = reached.get_mut(index);
                        let seen =
                            seen.ok_or_else(|| invalid!("a child {index} that is no node"))?;
                        if std::mem::replace(seen, true) {
                            return Err(invalid!("node {index} is reached twice: no tree"));
                        }
                        next.extend(self.add_node(arrays, index, child)?);
                    }
                }
            }
            level = next;
            depth += usize::from(!level.is_empty());
            if depth > MAX_DEPTH {
                return Err(invalid!("a tree deeper than {MAX_DEPTH}"));
            }
        }
        self.roots.push((start as u32, depth))?;
        Ok(())
    }

    fn add_leaf(&mut self, leaf: usize, at: u32) -> Result<(), KernelError> {
        let &(start, end) = self.leaves.get(leaf).ok_or("a child that is no leaf")?;
        let value = match self.single {
            true if start == end => T::default(),
            true => T::from_f64(self.targets[start].1),
            false => T::from_index(leaf as u32),
        };
        // Nothing is above infinity, and a missing number stays as well.
        let feature = MISSING_IS_TRUE;
        self.nodes.push(Node { threshold: T::INFINITY, value, feature, child: at })?;
        self.tests.push(None);
        Ok(())
    }

    /// Adds a node whose children will be at `child`; returns them in order.
    fn add_node(
        &mut self,
        arrays: &Arrays<T>,
        index: usize,
        child: u32,
    ) -> Result<[i64; 2], KernelError> {
        let row = &arrays.nodes[index * COLUMNS..][..COLUMNS];
        let feature = u32::try_from(row[0]).ok().filter(|feature| *feature < MISSING_IS_TRUE);
        let feature = feature.ok_or_else(|| invalid!("feature {}", row[0]))?;
        self.features = self.features.max(feature as usize + 1);
        let mode = usize::try_from(row[1]).ok().and_then(|mode| TreeMode::ALL.get(mode));
        let mode = mode.ok_or_else(|| invalid!("mode {}", row[1]))?;
        let (yes, no, missing_is_true) = (row[2], row[3], row[4] != 0);
        let threshold = arrays.thresholds[index];
        let mut test = None;
        // Every comparison as "at most": greater ones with the children swapped.
        let (threshold, swapped) = match mode {
            TreeMode::LessOrEqual => (threshold, false),
            TreeMode::Less => (threshold.next_down(), false),
            TreeMode::Greater => (threshold, true),
            TreeMode::GreaterOrEqual => (threshold.next_down(), true),
            TreeMode::Equal | TreeMode::NotEqual => {
                let inverted = *mode == TreeMode::NotEqual;
                test = Some(Test { inverted, start: self.members.len(), count: 1 });
                self.members.push(threshold);
                (threshold, false)
            }
            TreeMode::Member => {
                let (start, count) = (row[5].max(0) as usize, row[6].max(0) as usize);
                let end = start.checked_add(count).filter(|end| *end <= arrays.members.len());
                end.ok_or("a set outside of the members")?;
                test = Some(Test { inverted: false, start, count });
                (threshold, false)
            }
        };
        let flag = if missing_is_true != swapped { MISSING_IS_TRUE } else { 0 };
        let feature = feature | flag;
        self.nodes.push(Node { threshold, value: T::default(), feature, child })?;
        self.tests.push(test);
        Ok(if swapped { [no, yes] } else { [yes, no] })
    }

    fn run(&self, inputs: &Inputs) -> KernelResult {
        let value = inputs.get(0)?;
        let (rows, columns) = super::table(value)?;
        let x = T::get(value).map(elements).ok_or("features of another type")?;
        if columns < self.features.max(1) && rows > 0 {
            return Err(invalid!("{columns} features instead of at least {}", self.features));
        }
        let targets = self.op.targets;
        let mut scores = Buffer::filled(output_len(&[rows, targets])?, 0f64)?;
        let threads = rayon::current_num_threads();
        if rows >= LANES {
            let block = rows.div_ceil(threads).clamp(LANES, BLOCK);
            in_chunks(&mut scores, block * targets.max(1), &|index: usize, part: &mut [f64]| {
                let first = index * block;
                let count = part.len() / targets.max(1);
                self.block(&x[first * columns..][..count * columns], columns, part);
            });
        } else {
            for (row, part) in x.chunks_exact(columns.max(1)).zip(scores.chunks_mut(targets.max(1)))
            {
                self.one_row(row, part, threads)?;
            }
        }
        let out = Buffer::collect(scores.iter().map(|x| T::from_f64(*x)))?;
        let result: Value = T::wrap(&[rows, targets], out);
        one(result)
    }

    /// The scores of a few rows: one tree after the other, several rows at once.
    fn block(&self, x: &[T], columns: usize, scores: &mut [f64]) {
        let targets = self.op.targets.max(1);
        let mut sums = Sums::new(self, scores);
        for (root, depth) in &self.roots {
            yield_point::did_work(scores_work(x.len() / columns.max(1), *depth));
            let groups = x.chunks(columns * LANES).enumerate();
            for (group, rows) in groups {
                let count = rows.len() / columns;
                let mut at = [*root; LANES];
                // Missing lanes walk with the first row.
                let lanes: [&[T]; LANES] = std::array::from_fn(|lane| {
                    let row = if lane < count { lane } else { 0 };
                    &rows[row * columns..][..columns]
                });
                self.walk(&mut at, &lanes, *depth);
                for (lane, at) in at.iter().enumerate().take(count) {
                    sums.add(self, &mut scores[(group * LANES + lane) * targets..][..targets], *at);
                }
            }
        }
        sums.finish(self, scores);
    }

    /// The scores of one row: several trees at once.
    fn one_row(&self, row: &[T], scores: &mut [f64], threads: usize) -> Result<(), KernelError> {
        // A few thousand steps are worth another thread.
        let steps = self.roots.len() * self.roots.first().map_or(0, |(_, depth)| *depth);
        let parts = (steps / 2048).clamp(1, threads);
        let share = self.roots.len().div_ceil(parts).max(1);
        let width = scores.len();
        let mut partial = Buffer::filled(width * parts, 0f64)?;
        let jobs = self.roots.chunks(share).zip(partial.chunks_mut(width.max(1)));
        let work = |(roots, part): (&[(u32, usize)], &mut [f64])| {
            let mut sums = Sums::new(self, part);
            for group in roots.chunks(LANES) {
                let mut at = [group[0].0; LANES];
                at.iter_mut().zip(group).for_each(|(at, (root, _))| *at = *root);
                let depth = group.iter().map(|(_, depth)| *depth).max().unwrap_or(0);
                yield_point::did_work(scores_work(LANES, depth));
                self.walk(&mut at, &[row; LANES], depth);
                at.iter().take(group.len()).for_each(|at| sums.add(self, part, *at));
            }
        };
        match parts {
            1 => jobs.for_each(work),
            _ => for_each(jobs, &work),
        }
        let mut sums = Sums::new(self, scores);
        for part in partial.chunks(width.max(1)).take(self.roots.len().div_ceil(share)) {
            sums.join(self, scores, part);
        }
        sums.finish(self, scores);
        Ok(())
    }

    fn walk(&self, at: &mut [u32; LANES], rows: &[&[T]; LANES], depth: usize) {
        if !self.tests.is_empty() {
            return self.walk_tests(at, rows, depth);
        }
        let nodes = &self.nodes[..];
        for _ in 0..depth {
            for (at, row) in at.iter_mut().zip(rows) {
                let node = &nodes[*at as usize];
                let x = row[(node.feature & !MISSING_IS_TRUE) as usize];
                let above = x > node.threshold;
                #[allow(clippy::eq_op)]
                let missing = x != x && node.feature & MISSING_IS_TRUE == 0;
                *at = node.child + u32::from(above | missing);
            }
        }
    }

    /// Like [`walk`](Forest::walk), with tests of equality.
    fn walk_tests(&self, at: &mut [u32; LANES], rows: &[&[T]; LANES], depth: usize) {
        for _ in 0..depth {
            for (at, row) in at.iter_mut().zip(rows) {
                let node = &self.nodes[*at as usize];
                let x = row[(node.feature & !MISSING_IS_TRUE) as usize];
                let missing_is_true = node.feature & MISSING_IS_TRUE != 0;
                #[allow(clippy::eq_op)]
                let is_missing = x != x;
                let no = match self.tests[*at as usize] {
                    _ if is_missing => !missing_is_true,
                    None => x > node.threshold,
                    Some(test) => {
                        let members = &self.members[test.start..][..test.count];
                        members.contains(&x) == test.inverted
                    }
                };
                *at = node.child + u32::from(no);
            }
        }
    }
}

/// About how long `rows` walks of `depth` steps take.
fn scores_work(rows: usize, depth: usize) -> usize {
    rows * depth * 2
}

/// Leaves as they are combined.
struct Sums {
    aggregate: TreeAggregate,
}

impl Sums {
    fn new<T: Real>(forest: &Forest<T>, scores: &mut [f64]) -> Sums {
        let aggregate = forest.op.aggregate;
        let start = match aggregate {
            TreeAggregate::Sum | TreeAggregate::Average => 0.0,
            TreeAggregate::Min => f64::INFINITY,
            TreeAggregate::Max => f64::NEG_INFINITY,
        };
        scores.fill(start);
        Sums { aggregate }
    }

    fn combine(&self, slot: &mut f64, x: f64) {
        *slot = match self.aggregate {
            TreeAggregate::Sum | TreeAggregate::Average => *slot + x,
            TreeAggregate::Min => slot.min(x),
            TreeAggregate::Max => slot.max(x),
        };
    }

    fn add<T: Real>(&mut self, forest: &Forest<T>, row: &mut [f64], at: u32) {
        let value = forest.nodes[at as usize].value;
        if forest.single {
            row[0] += value.to_f64();
            return;
        }
        let (start, end) = forest.leaves[value.to_index() as usize];
        for (target, weight) in &forest.targets[start..end] {
            self.combine(&mut row[*target], *weight);
        }
    }

    fn join<T: Real>(&mut self, _: &Forest<T>, row: &mut [f64], part: &[f64]) {
        row.iter_mut().zip(part).for_each(|(slot, x)| self.combine(slot, *x));
    }

    fn finish<T: Real>(&self, forest: &Forest<T>, scores: &mut [f64]) {
        let trees = forest.roots.len().max(1) as f64;
        match self.aggregate {
            TreeAggregate::Average => scores.iter_mut().for_each(|x| *x /= trees),
            // A target that no leaf reached is zero.
            _ => scores.iter_mut().filter(|x| x.is_infinite()).for_each(|x| *x = 0.0),
        }
    }
}
