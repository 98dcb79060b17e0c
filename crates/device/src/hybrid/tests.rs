//! Cuts of random plans, and joint loads.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::{Bytes, Random};
use model::op::{Binary, Op, Unary};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

use super::HybridDevice;
use super::residency::{JointResidency, SectionWeights};
use super::section::{Section, Side, cut};
use crate::residency::{LoadCallback, LoadProgress, Residency};
use crate::{
    CompletionSink, Device, DeviceError, DeviceInfo, PreemptionLevel, Program, Queue, QueueOptions,
    Task,
};

/// A plan of random steps on one symbolic dimension, a constant, and a size that depends on data.
fn random_plan(random: &mut Random, steps: usize) -> LaunchPlan {
    let mut plan = LaunchPlan::default();
    let value = |plan: &mut LaunchPlan, dims: Vec<Dim>| {
        let id = ValueId(plan.values.len() as u32);
        let (name, dtype) = (format!("v{}", id.0), DataType::F32);
        plan.values.push(ValueInfo { name, dtype, shape: Some(dims) });
        id
    };
    let rows = || vec![Dim::symbol("n"), Dim::Fixed(3)];
    let mut ready: Vec<ValueId> = (0..2).map(|_| value(&mut plan, rows())).collect();
    plan.inputs.clone_from(&ready);
    let constant = value(&mut plan, vec![Dim::Fixed(3)]);
    let tensor = Tensor::from_vec(vec![3], vec![1.0f32, 2.0, 3.0]).expect("three numbers");
    plan.constants.push((constant, tensor));
    ready.push(constant);
    for index in 0..steps {
        let pick = |random: &mut Random| ready[random.below(ready.len() as u64) as usize];
        let first = pick(random);
        let (op, inputs) = match random.below(3) {
            0 => (Op::Unary(Unary::Relu), vec![Some(first)]),
            _ => (Op::Binary(Binary::Add), vec![Some(first), Some(pick(random))]),
        };
        let dims = match random.below(4) {
            0 => vec![Dim::Unknown, Dim::Fixed(3)],
            _ => rows(),
        };
        let output = value(&mut plan, dims);
        let (name, outputs) = ("same".to_string(), vec![Some(output)]);
        plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
        ready.push(output);
        if index + 1 == steps || random.below(5) == 0 {
            plan.outputs.push(output);
        }
    }
    plan.plan_lifetimes();
    plan.check().expect("a sound plan");
    plan
}

fn check(plan: &LaunchPlan, on_host: &[bool], sections: &[Section]) {
    let mut all: Vec<usize> = sections.iter().flat_map(|section| section.steps.clone()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..plan.steps.len()).collect::<Vec<_>>(), "every step once");
    let mut there: HashSet<ValueId> = plan.inputs.iter().copied().collect();
    for section in sections {
        let is_host = section.side == Side::Host;
        assert!(section.steps.iter().all(|step| on_host[*step] == is_host), "the wrong side");
        assert!(section.inputs.iter().all(|id| there.contains(id)), "an input is not there yet");
        section.plan.check().expect("a sound section");
        assert_eq!(section.plan.inputs.len(), section.inputs.len());
        assert_eq!(section.plan.outputs.len(), section.outputs.len());
        assert_eq!(section.plan.steps.len(), section.steps.len());
        for (own, index) in section.plan.steps.iter().zip(&section.steps) {
            assert_eq!(own.op, plan.steps[*index].op);
        }
        for id in &section.plan.inputs {
            let dims = section.plan.value(*id).shape.as_ref().expect("a rank");
            assert!(!dims.contains(&Dim::Unknown), "a size that tensors do not bind");
        }
        there.extend(&section.outputs);
    }
    let constants = plan.constants.iter().map(|(id, _)| id);
    there.extend(constants.copied().collect::<Vec<_>>());
    assert!(plan.outputs.iter().all(|id| there.contains(id)), "an output is not given");
    let alternate = sections.windows(2).all(|pair| pair[0].side != pair[1].side);
    assert!(alternate, "two sections of one side could be one");
}

#[test]
fn sections_are_the_whole_plan() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let steps = 1 + random.below(40) as usize;
        let plan = random_plan(&mut random, steps);
        let rarity = 1 + random.below(6);
        let on_host: Vec<bool> = plan.steps.iter().map(|_| random.below(1 + rarity) == 0).collect();
        check(&plan, &on_host, &cut(&plan, &on_host));
    }
}

#[test]
fn independent_steps_do_not_add_sections() {
    // Two chains, accelerator to host to accelerator, that do not touch: three sections, not six.
    let mut random = Random::new(1);
    let mut plan = random_plan(&mut random, 1);
    plan.steps.clear();
    plan.values.truncate(3);
    plan.outputs.clear();
    let mut on_host = Vec::new();
    for input in [ValueId(0), ValueId(1)] {
        let mut last = input;
        for host in [false, true, false] {
            let output = ValueId(plan.values.len() as u32);
            let value = plan.value(input).clone();
            plan.values.push(value);
            plan.steps.push(Step {
                name: String::new(),
                op: Op::Unary(Unary::Relu),
                inputs: vec![Some(last)],
                outputs: vec![Some(output)],
                last_uses: vec![],
            });
            on_host.push(host);
            last = output;
        }
        plan.outputs.push(last);
    }
    plan.plan_lifetimes();
    let sections = cut(&plan, &on_host);
    check(&plan, &on_host, &sections);
    assert_eq!(sections.len(), 3);
    // A plan that begins on the host has no empty section before it.
    let on_host: Vec<bool> = on_host.iter().map(|host| !host).collect();
    assert_eq!(cut(&plan, &on_host).len(), 3);
}

/// Weights whose loads end when the test says so.
#[derive(Default)]
struct ManualWeights {
    added: AtomicU64,
    reports: Mutex<Vec<LoadCallback>>,
    evicted: Mutex<usize>,
}

impl ManualWeights {
    fn report(&self, progress: LoadProgress) {
        self.reports.lock().expect("no panic")[0](progress);
    }
}

impl Residency for ManualWeights {
    fn bytes(&self) -> Bytes {
        Bytes(10 + self.added.load(Ordering::SeqCst))
    }

    fn load(&self, _: bool, report: LoadCallback) {
        self.reports.lock().expect("no panic").push(report);
    }

    fn evict(&self) {
        *self.evicted.lock().expect("no panic") += 1;
    }
}

type Seen = Arc<Mutex<Vec<LoadProgress>>>;

fn joint_load() -> ([Arc<ManualWeights>; 2], JointResidency, Seen) {
    let parts = [Arc::new(ManualWeights::default()), Arc::new(ManualWeights::default())];
    let joint =
        JointResidency(parts.iter().map(|part| part.clone() as Arc<dyn Residency>).collect());
    let seen = Seen::default();
    let to = seen.clone();
    joint.load(true, Box::new(move |progress| to.lock().expect("no panic").push(progress)));
    (parts, joint, seen)
}

#[test]
fn weights_of_all_sections_are_one_load() {
    let ([a, b], joint, seen) = joint_load();
    let all = || seen.lock().expect("no panic").clone();
    assert_eq!(joint.bytes(), Bytes(20));
    a.report(LoadProgress::Runnable);
    a.report(LoadProgress::Loaded);
    assert!(all().is_empty());
    b.report(LoadProgress::Runnable);
    assert_eq!(all(), [LoadProgress::Runnable]);
    b.report(LoadProgress::Loaded);
    assert_eq!(all(), [LoadProgress::Runnable, LoadProgress::Loaded]);
    joint.evict();
    assert_eq!((*a.evicted.lock().unwrap(), *b.evicted.lock().unwrap()), (1, 1));
}

#[test]
fn a_load_that_fails_in_one_section_leaves_none() {
    for first_fails in [true, false] {
        let ([a, b], _, seen) = joint_load();
        let err = DeviceError::BadPlan("no memory".to_string());
        let (good, bad) = if first_fails { (&b, &a) } else { (&a, &b) };
        let end = |part: &Arc<ManualWeights>| match Arc::ptr_eq(part, bad) {
            true => part.report(LoadProgress::Failed(err.clone())),
            false => part.report(LoadProgress::Loaded),
        };
        end(&a);
        end(&b);
        assert_eq!(*seen.lock().unwrap(), [LoadProgress::Failed(err.clone())]);
        assert_eq!((*good.evicted.lock().unwrap(), *bad.evicted.lock().unwrap()), (1, 0));
    }
}

#[test]
fn weights_that_grew_since_their_load_are_noticed() {
    let manual = Arc::new(ManualWeights::default());
    let weights = SectionWeights::new(manual.clone());
    assert!(weights.have_grown(), "nothing is loaded");
    weights.load(true, Box::new(|_| {}));
    assert!(!weights.have_grown());
    manual.added.store(5, Ordering::SeqCst);
    assert!(weights.have_grown());
    weights.load(true, Box::new(|_| {}));
    assert!(!weights.have_grown());
    weights.evict();
    assert!(weights.have_grown());
    assert_eq!(weights.bytes(), Bytes(15));
}

/// Shapes that programs were specialised for.
type Specialized = Arc<Mutex<Vec<Vec<Vec<usize>>>>>;

/// A device that has no kernel for `refused`, and whose programs only remember what they are
/// specialised for.
struct Remembering {
    info: DeviceInfo,
    refused: Option<Op>,
    specialized: Specialized,
}

struct RememberingProgram(Arc<LaunchPlan>, Specialized);

impl Remembering {
    fn new(refused: Option<Op>) -> Remembering {
        let info = DeviceInfo {
            name: "remembering".to_string(),
            description: String::new(),
            preemption: PreemptionLevel::None,
            memory: Bytes(0),
            queues: 1,
            rounding: 0.0,
        };
        Remembering { info, refused, specialized: Specialized::default() }
    }
}

impl Device for Remembering {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        let refused = plan.steps.iter().filter(|step| Some(&step.op) == self.refused.as_ref());
        let why = |step: &Step| DeviceError::Unsupported {
            step: step.name.clone(),
            op: step.op.name(),
            reason: "no kernel".to_string(),
        };
        refused.map(why).collect()
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        match self.unsupported_steps(&plan).pop() {
            Some(err) => Err(err),
            None => Ok(Arc::new(RememberingProgram(plan, self.specialized.clone()))),
        }
    }

    fn open_queue(
        &self,
        _: QueueOptions,
        _: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        Err(DeviceError::BadPlan("it runs nothing".to_string()))
    }
}

impl Program for RememberingProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.0
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn prepare(&self, _: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        Err(DeviceError::BadPlan("it runs nothing".to_string()))
    }

    fn copies_on_caller(&self, _: &[Tensor]) -> bool {
        false
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        self.1.lock().expect("no panic").push(shapes.to_vec());
        Ok(())
    }
}

/// Too many for the last step to be cheap on the host.
const COLUMNS: usize = 1024;

/// `x [n, 1024] -> Neg -> Relu -> Neg`.
fn three_steps() -> LaunchPlan {
    let shape = Some(vec![Dim::symbol("n"), Dim::Fixed(COLUMNS)]);
    let value =
        |index| ValueInfo { name: format!("v{index}"), dtype: DataType::F32, shape: shape.clone() };
    let ops = [Unary::Neg, Unary::Relu, Unary::Neg].into_iter().enumerate();
    let step = |(index, op): (usize, Unary)| Step {
        name: format!("s{index}"),
        op: Op::Unary(op),
        inputs: vec![Some(ValueId(index as u32))],
        outputs: vec![Some(ValueId(index as u32 + 1))],
        last_uses: vec![],
    };
    let mut plan = LaunchPlan {
        values: (0..4).map(value).collect(),
        inputs: vec![ValueId(0)],
        outputs: vec![ValueId(3)],
        steps: ops.map(step).collect(),
        ..LaunchPlan::default()
    };
    plan.plan_lifetimes();
    plan
}

fn rows(count: usize) -> Vec<Tensor> {
    vec![Tensor::from_vec(vec![count, COLUMNS], vec![0f32; count * COLUMNS]).expect("a tensor")]
}

#[test]
fn sizes_that_sections_are_not_prepared_for_are_prepared_before_the_request() {
    let accelerator = Arc::new(Remembering::new(Some(Op::Unary(Unary::Relu))));
    let hybrid = HybridDevice::new(accelerator.clone(), Arc::new(Remembering::new(None)));
    let program = hybrid.load(Arc::new(three_steps())).expect("a program");
    let specialized = || accelerator.specialized.lock().expect("no panic").clone();
    assert!(!program.is_prepared(&rows(2)));
    assert!(specialized().is_empty(), "asking prepares nothing");
    program.specialize(&[vec![2, COLUMNS]]).expect("it is accepted");
    // Both sections of the accelerator.
    assert_eq!(specialized(), [[[2, COLUMNS]], [[2, COLUMNS]]]);
    assert!(program.is_prepared(&rows(2)));
    assert!(!program.is_prepared(&rows(5)), "other sizes");
    // Staging prepares nothing more.
    let copy = model::config::CopyTime::default();
    program.stage(rows(2), copy, &mut || {}).expect("staged");
    assert_eq!(specialized().len(), 2);
    // What is refused anyway waits for nothing.
    let wrong = Tensor::from_vec(vec![2, 4], vec![0f32; 8]).expect("a tensor");
    assert!(program.is_prepared(&[wrong]));
}

#[test]
fn a_program_without_sections_of_the_accelerator_is_always_prepared() {
    let host: Arc<dyn Device> = Arc::new(Remembering::new(None));
    let program = super::whole::on_host(&host, &Arc::new(three_steps())).expect("a program");
    assert!(program.is_prepared(&rows(2)));
}

#[test]
fn only_a_program_in_sections_copies_what_the_accelerator_would_not() {
    let of = |refused: Option<Op>| {
        let host = Arc::new(Remembering::new(None));
        let hybrid = HybridDevice::new(Arc::new(Remembering::new(refused)), host);
        hybrid.load(Arc::new(three_steps())).expect("a program").copies_on_caller(&rows(2))
    };
    assert!(!of(None), "the accelerator runs it whole");
    assert!(of(Some(Op::Unary(Unary::Relu))));
}
