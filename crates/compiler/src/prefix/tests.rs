//! Plans with a common prefix give the same outputs split as whole.

use base::Random;
use model::op::{Binary, MatMul, Unary};
use model::{DataType, ValueInfo};

use super::*;

const WIDTH: usize = 6;

/// Builds a plan step by step.
struct Builder {
    plan: LaunchPlan,
    batch: &'static str,
    /// Values that can be read.
    open: Vec<ValueId>,
}

impl Builder {
    fn new(batch: &'static str, inputs: usize) -> Builder {
        let mut builder = Builder { plan: LaunchPlan::default(), batch, open: Vec::new() };
        for _ in 0..inputs {
            let id = builder.value(vec![Dim::Symbol(batch.to_string()), Dim::Fixed(WIDTH)]);
            builder.plan.inputs.push(id);
            builder.open.push(id);
        }
        builder
    }

    fn value(&mut self, shape: Vec<Dim>) -> ValueId {
        let id = ValueId(self.plan.values.len() as u32);
        let name = format!("{}{}", self.batch, id.0);
        self.plan.values.push(ValueInfo { name, dtype: DataType::F32, shape: Some(shape) });
        id
    }

    fn step(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let output = self.value(vec![Dim::Symbol(self.batch.to_string()), Dim::Fixed(WIDTH)]);
        self.plan.steps.push(Step {
            name: format!("{}_step{}", self.batch, self.plan.steps.len()),
            op,
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
            last_uses: Vec::new(),
        });
        self.open.push(output);
        output
    }

    /// A product with random weights, or a cheap operator, of random earlier values.
    fn random_step(&mut self, random: &mut Random) {
        let pick = |builder: &Builder, random: &mut Random| {
            // Prefers recent values: a plan should be deep.
            let back = random.below(builder.open.len().min(3) as u64) as usize;
            builder.open[builder.open.len() - 1 - back]
        };
        let one = pick(self, random);
        match random.below(3) {
            0 => {
                let weights = (0..WIDTH * WIDTH).map(|_| random.symmetric_f32()).collect();
                self.product(one, weights);
            }
            1 => {
                let two = pick(self, random);
                self.step(Op::Binary(Binary::Add), &[one, two]);
            }
            _ => {
                self.step(Op::Unary(Unary::Tanh), &[one]);
            }
        }
    }

    fn product(&mut self, of: ValueId, weights: Vec<f32>) {
        let weight = self.value(vec![Dim::Fixed(WIDTH), Dim::Fixed(WIDTH)]);
        let tensor = Tensor::from_vec(vec![WIDTH, WIDTH], weights).unwrap();
        self.plan.constants.push((weight, tensor));
        self.step(Op::MatMul(MatMul::default()), &[of, weight]);
    }

    /// Every value without a reader is an output.
    fn finish(mut self) -> LaunchPlan {
        let read: BTreeSet<ValueId> =
            self.plan.steps.iter().flat_map(|s| s.inputs.iter().flatten()).copied().collect();
        let written = self.plan.steps.iter().flat_map(|s| s.outputs.iter().flatten());
        self.plan.outputs = written.filter(|id| !read.contains(id)).copied().collect();
        self.plan.plan_lifetimes();
        self.plan.check().unwrap();
        self.plan
    }
}

/// Runs a plan step by step.
fn run(plan: &LaunchPlan, inputs: Vec<Tensor>) -> Vec<Tensor> {
    let mut values: BTreeMap<ValueId, Tensor> = plan.constants.iter().cloned().collect();
    values.extend(plan.inputs.iter().copied().zip(inputs));
    for step in &plan.steps {
        let inputs: Vec<Option<Tensor>> =
            step.inputs.iter().map(|id| id.map(|id| values[&id].clone())).collect();
        let outputs = cpu::evaluate(&step.op, &inputs, step.outputs.len()).unwrap();
        values.extend(step.outputs.iter().flatten().copied().zip(outputs));
    }
    plan.outputs.iter().map(|id| values[id].clone()).collect()
}

fn pair(seed: u64) -> (LaunchPlan, LaunchPlan) {
    let mut random = Random::new(seed);
    let inputs = 1 + random.below(2) as usize;
    let common = 4 + random.below(12);
    let mut plans = ["n", "batch"].map(|batch| {
        let mut builder = Builder::new(batch, inputs);
        let mut alike = Random::new(seed + 1);
        (0..common).for_each(|_| builder.random_step(&mut alike));
        for _ in 0..1 + random.below(4) {
            builder.random_step(&mut random);
        }
        builder.finish()
    });
    let second = std::mem::take(&mut plans[1]);
    (std::mem::take(&mut plans[0]), second)
}

#[test]
fn prefix_and_suffix_compute_the_same_as_the_model() {
    let mut cuts = 0;
    for seed in 0..300 {
        let (a, b) = pair(seed * 10);
        let (of_a, of_b) = (Fingerprint::of(&a), Fingerprint::of(&b));
        let Some(common) = CommonPrefix::between((&a, &of_a), (&b, &of_b)) else { continue };
        cuts += 1;
        let prefix = common.prefix(&a, &of_a).unwrap();
        let mut random = Random::new(seed + 7);
        for (plan, of) in [(&a, &of_a), (&b, &of_b)] {
            let suffix = common.suffix(plan, of).unwrap();
            assert!(suffix.prefix_share >= MIN_PREFIX_SHARE, "seed {seed}");
            assert_eq!(suffix.plan.outputs.len(), plan.outputs.len());
            let inputs: Vec<Tensor> = (0..plan.inputs.len())
                .map(|_| {
                    let data = (0..3 * WIDTH).map(|_| random.symmetric_f32()).collect();
                    Tensor::from_vec(vec![3, WIDTH], data).unwrap()
                })
                .collect();
            let handed = run(&prefix, inputs.clone());
            let sources = suffix.sources.iter().map(|source| match source {
                SuffixInput::Prefix(index) => handed[*index].clone(),
                SuffixInput::Model(index) => inputs[*index].clone(),
            });
            let apart = run(&suffix.plan, sources.collect());
            assert_eq!(apart, run(plan, inputs), "seed {seed}");
        }
    }
    assert!(cuts > 100, "only {cuts} pairs had enough in common");
}

#[test]
fn models_with_different_first_weights_have_no_common_prefix() {
    let plan = |seed: u64| {
        let mut random = Random::new(seed);
        let mut builder = Builder::new("n", 1);
        for _ in 0..6 {
            let weights = (0..WIDTH * WIDTH).map(|_| random.symmetric_f32()).collect();
            builder.product(*builder.open.last().unwrap(), weights);
        }
        builder.finish()
    };
    let (a, b) = (plan(1), plan(2));
    let (of_a, of_b) = (Fingerprint::of(&a), Fingerprint::of(&b));
    assert_eq!(CommonPrefix::between((&a, &of_a), (&b, &of_b)), None);
    // The same model under two names: all but the step that writes the output.
    let common = CommonPrefix::between((&a, &of_a), (&a, &of_a)).unwrap();
    assert_eq!(common.prefix(&a, &of_a).unwrap().steps.len(), 5);
    assert_eq!(common.suffix(&a, &of_a).unwrap().plan.steps.len(), 1);
    assert!(common.suffix(&b, &of_b).is_none());
    // A plan that shares only the beginning of the prefix does not fit it.
    assert_eq!(of_a.marks().len(), 5);
}
