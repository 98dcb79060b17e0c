//! Programs in sections, and their tasks.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use base::{Bytes, Nanos};
use model::{Dim, LaunchPlan, Tensor, ValueId};

use super::residency::{JointResidency, SectionWeights};
use super::section::{Section, Side, sizes_of};
use crate::batch::{HostStagedInputs, join, rows_of};
use crate::residency::Residency;
use crate::{
    Device, DeviceError, Program, RecordedStep, StagedInputs, Task, TuningProgress, check_inputs,
};

/// Sets of sizes of which it is remembered that all sections are ready.
const MAX_READY: usize = 256;

/// Sizes of a plan's symbols, in the order inputs name them.
type Sizes = Vec<(String, usize)>;

/// A program whose sections run alternately on an accelerator and on the host.
pub struct HybridProgram {
    state: Arc<ProgramState>,
}

/// What a program shares with its tasks.
pub(super) struct ProgramState {
    plan: Arc<LaunchPlan>,
    sections: Vec<LoadedSection>,
    host: Arc<dyn Device>,
    /// Sizes for which the sections of the accelerator are ready.
    ready: Mutex<Vec<Sizes>>,
}

/// A section with its program.
pub(super) struct LoadedSection {
    pub(super) section: Section,
    program: Arc<dyn Program>,
    /// Its weights, where the accelerator loads and evicts them.
    weights: Option<Arc<SectionWeights>>,
    /// Values of the plan that no later section reads.
    last_uses: Vec<ValueId>,
    /// The same section on the host, for sizes that the accelerator refuses.
    fallback: OnceLock<Result<Arc<dyn Program>, DeviceError>>,
    /// Shapes of the inputs of the last task whose times were recorded.
    shapes: Mutex<Vec<Vec<usize>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HybridProgram {
    /// Loads the sections of `plan`.
    pub(super) fn load(
        accelerator: &dyn Device,
        host: &Arc<dyn Device>,
        plan: Arc<LaunchPlan>,
        sections: Vec<Section>,
    ) -> Result<HybridProgram, DeviceError> {
        let mut last_uses = last_uses(&plan, &sections);
        let mut loaded = Vec::with_capacity(sections.len());
        for section in sections {
            let program = match section.side {
                Side::Accelerator => accelerator.load(section.plan.clone())?,
                Side::Host => host.load(section.plan.clone())?,
            };
            let weights = program.residency().filter(|_| section.side == Side::Accelerator);
            loaded.push(LoadedSection {
                weights: weights.map(|weights| Arc::new(SectionWeights::new(weights))),
                last_uses: std::mem::take(&mut last_uses[loaded.len()]),
                section,
                program,
                fallback: OnceLock::new(),
                shapes: Mutex::default(),
            });
        }
        let (host, ready) = (host.clone(), Mutex::default());
        let state = ProgramState { plan, sections: loaded, host, ready };
        Ok(HybridProgram { state: Arc::new(state) })
    }

    /// The sections in the order they run.
    pub fn sections(&self) -> impl Iterator<Item = &Section> {
        self.state.sections.iter().map(|loaded| &loaded.section)
    }

    /// The shapes of the inputs of section `index` in the last task whose times were recorded.
    pub fn recorded_shapes(&self, index: usize) -> Vec<Vec<usize>> {
        self.state.sections.get(index).map_or_else(Vec::new, |loaded| lock(&loaded.shapes).clone())
    }

    fn accelerated(&self) -> impl Iterator<Item = &LoadedSection> {
        let is_own = |loaded: &&LoadedSection| loaded.section.side == Side::Accelerator;
        self.state.sections.iter().filter(is_own)
    }

    /// The sections of the accelerator whose rows are those of the plan's batch: it prepares them
    /// for a batch as it would the whole plan.
    fn batched(&self) -> Vec<&LoadedSection> {
        let Some(batch) = leading_symbol(&self.state.plan) else { return Vec::new() };
        let known = symbols(&self.state.plan);
        let follows = |loaded: &&LoadedSection| {
            let plan = &loaded.section.plan;
            leading_symbol(plan) == Some(batch) && symbols(plan).iter().all(|s| known.contains(s))
        };
        self.accelerated().filter(follows).collect()
    }

    fn task(&self, inputs: Vec<Tensor>, rows: Option<PaddedRows>) -> HybridTask {
        let state = &self.state;
        let mut values: Vec<Option<Tensor>> = vec![None; state.plan.values.len()];
        for (id, tensor) in state.plan.inputs.iter().zip(inputs) {
            values[id.index()] = Some(tensor);
        }
        let (next_section, running, step_times) = (0, None, None);
        HybridTask { program: state.clone(), values, next_section, running, rows, step_times }
    }
}

/// For every section the values that no later one reads and that are no outputs.
fn last_uses(plan: &LaunchPlan, sections: &[Section]) -> Vec<Vec<ValueId>> {
    let mut last: Vec<Option<usize>> = vec![None; plan.values.len()];
    for (number, section) in sections.iter().enumerate() {
        for id in section.inputs.iter().chain(&section.outputs) {
            last[id.index()] = Some(number);
        }
    }
    plan.outputs.iter().for_each(|id| last[id.index()] = None);
    let mut uses = vec![Vec::new(); sections.len()];
    for (value, number) in last.into_iter().enumerate() {
        if let Some(number) = number {
            uses[number].push(ValueId(value as u32));
        }
    }
    uses
}

/// The symbol that all inputs have as their first dimension.
fn leading_symbol(plan: &LaunchPlan) -> Option<&str> {
    let first = |id: &ValueId| match plan.value(*id).shape.as_ref()?.first()? {
        Dim::Symbol(symbol) => Some(symbol.as_str()),
        _ => None,
    };
    let symbol = first(plan.inputs.first()?)?;
    plan.inputs.iter().all(|id| first(id) == Some(symbol)).then_some(symbol)
}

fn symbols(plan: &LaunchPlan) -> Vec<&str> {
    let dims = plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten();
    dims.filter_map(|dim| match dim {
        Dim::Symbol(symbol) => Some(symbol.as_str()),
        _ => None,
    })
    .collect()
}

impl ProgramState {
    /// Whether all sections of the accelerator are ready whose sizes follow from `shapes`.
    fn is_ready<'a>(&self, shapes: impl Iterator<Item = &'a [usize]>) -> bool {
        let is_own = |loaded: &LoadedSection| loaded.section.side == Side::Accelerator;
        !self.sections.iter().any(is_own)
            || lock(&self.ready).contains(&bound_sizes(&self.plan, shapes))
    }

    /// Makes all sections of the accelerator ready whose sizes follow from `shapes`, those of the
    /// inputs: the thread that runs the sections must not wait for it.
    fn make_ready<'a>(&self, shapes: impl Iterator<Item = &'a [usize]>) -> Result<(), DeviceError> {
        let sizes = bound_sizes(&self.plan, shapes);
        if lock(&self.ready).contains(&sizes) {
            return Ok(());
        }
        for loaded in &self.sections {
            let section = &loaded.section;
            let shape = |id: &ValueId| sizes_of(self.plan.value(*id).shape.as_ref()?, &sizes);
            let shapes: Option<Vec<Vec<usize>>> = section.inputs.iter().map(shape).collect();
            if let Some(shapes) = shapes.filter(|_| section.side == Side::Accelerator) {
                match loaded.program.specialize(&shapes) {
                    Err(err) if is_refusal(&err) => {}
                    other => other?,
                }
            }
        }
        let mut ready = lock(&self.ready);
        let over = (ready.len() + 1).saturating_sub(MAX_READY);
        ready.drain(..over);
        ready.push(sizes);
        Ok(())
    }
}

/// Sizes that `shapes` give to the symbols of the inputs.
fn bound_sizes<'a>(plan: &LaunchPlan, shapes: impl Iterator<Item = &'a [usize]>) -> Sizes {
    let mut sizes = Sizes::new();
    for (id, shape) in plan.inputs.iter().zip(shapes) {
        for (dim, size) in plan.value(*id).shape.iter().flatten().zip(shape) {
            if let Dim::Symbol(symbol) = dim
                && !sizes.iter().any(|(known, _)| known == symbol)
            {
                sizes.push((symbol.clone(), *size));
            }
        }
    }
    sizes
}

/// Whether the accelerator has no kernels for these sizes: the host runs the section then. A plan
/// that is broken at some sizes fails on the host too, and there the step that fails is named.
pub(super) fn is_refusal(err: &DeviceError) -> bool {
    matches!(err, DeviceError::Unsupported { .. } | DeviceError::BadPlan(_))
}

impl LoadedSection {
    /// A task of this section, and where it runs: on the host where the accelerator refuses the
    /// sizes. The same in a task that `runs` if the sizes need weights that are not there yet: they
    /// are loaded before the next request starts.
    fn prepare(
        &self,
        host: &Arc<dyn Device>,
        inputs: Vec<Tensor>,
        runs: bool,
    ) -> Result<(Side, Box<dyn Task>), DeviceError> {
        let side = self.section.side;
        let refusal = match self.program.prepare(inputs.clone()) {
            Ok(task) => match &self.weights {
                Some(weights) if runs && weights.have_grown() => {
                    DeviceError::BadPlan("weights for new sizes are not loaded yet".to_string())
                }
                _ => return Ok((side, task)),
            },
            Err(err) if side == Side::Accelerator && is_refusal(&err) => err,
            Err(err) => return Err(err),
        };
        let load = || {
            let first = self.section.plan.steps.first().map_or("", |step| &step.name);
            tracing::warn!(%refusal, section = first, "a section runs on the host at some sizes");
            host.load(self.section.plan.clone())
        };
        let fallback = self.fallback.get_or_init(load).clone()?;
        Ok((Side::Host, fallback.prepare(inputs)?))
    }
}

impl Program for HybridProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.state.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(self.accelerated().map(|loaded| loaded.program.resident().0).sum())
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        check_inputs(&self.state.plan, &inputs)?;
        self.state.make_ready(inputs.iter().map(Tensor::shape))?;
        let mut task = self.task(inputs, None);
        task.start_section(false)?;
        Ok(Box::new(task))
    }

    /// The steps of its tasks are the sections.
    fn recorded_steps(&self, _: &[Vec<usize>]) -> Vec<RecordedStep> {
        let facts = |section: &Section| {
            let steps = &section.plan.steps;
            let side = match section.side {
                Side::Accelerator => "on the device",
                Side::Host => "on the host",
            };
            let op = match &steps[..] {
                [step] => format!("{} {side}", step.op.name()),
                steps => format!("{} steps {side}", steps.len()),
            };
            let name = match (steps.first(), steps.last()) {
                (Some(first), Some(last)) if steps.len() > 1 => {
                    format!("{} to {}", first.name, last.name)
                }
                (first, _) => first.map(|step| step.name.clone()).unwrap_or_default(),
            };
            RecordedStep::named(&name, op)
        };
        self.sections().map(facts).collect()
    }

    fn tuning(&self) -> Option<TuningProgress> {
        let tuned: Vec<TuningProgress> =
            self.accelerated().filter_map(|loaded| loaded.program.tuning()).collect();
        (!tuned.is_empty()).then(|| tuned.into_iter().sum())
    }

    /// Sections whose sizes depend on data are prepared when they run, on the queue's thread.
    fn is_prepared(&self, inputs: &[Tensor]) -> bool {
        // What is refused needs no preparation.
        check_inputs(&self.state.plan, inputs).is_err()
            || self.state.is_ready(inputs.iter().map(Tensor::shape))
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        self.state.make_ready(shapes.iter().map(Vec::as_slice))
    }

    /// Joins the rows and makes the batch as large as the next one that is prepared. Sections are
    /// prepared when they run: this is called where other models wait.
    fn gather(&self, staged: Vec<Box<dyn StagedInputs>>) -> Result<Box<dyn Task>, DeviceError> {
        let mut inputs = join(staged)?;
        check_inputs(&self.state.plan, &inputs)?;
        let rows = rows_of(&inputs);
        let batch = leading_symbol(&self.state.plan).filter(|_| rows > 0);
        let prepared = batch.and_then(|batch| {
            let others = crate::batch::other_sizes(&self.state.plan, batch, &inputs);
            self.prepared_batches(&others)?.into_iter().find(|prepared| *prepared >= rows)
        });
        let mut padded = None;
        if let Some(all) = prepared.filter(|all| *all > rows) {
            inputs = inputs
                .iter()
                .map(|tensor| repeated(tensor, rows, all))
                .collect::<Result<_, _>>()?;
            padded = Some(PaddedRows { all, rows });
        }
        Ok(Box::new(self.task(inputs, padded)))
    }

    fn stage(
        &self,
        inputs: Vec<Tensor>,
        _copy: model::config::CopyTime,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn StagedInputs>, DeviceError> {
        check_inputs(&self.state.plan, &inputs)?;
        // Ready since `specialize`, unless other sizes have taken their place since.
        self.state.make_ready(inputs.iter().map(Tensor::shape))?;
        notify();
        Ok(Box::new(HostStagedInputs::new(inputs)))
    }

    fn prepared_batches(&self, sizes: &[(String, usize)]) -> Option<Vec<usize>> {
        let lists = self.batched().into_iter();
        let mut lists = lists.filter_map(|loaded| loaded.program.prepared_batches(sizes));
        let first = lists.next()?;
        let mut common = lists.fold(first, |common, list| {
            common.into_iter().filter(|batch| list.contains(batch)).collect()
        });
        common.sort_unstable();
        Some(common)
    }

    fn prepare_batches(
        &self,
        sizes: &[(String, usize)],
        batches: &[usize],
    ) -> Result<(), DeviceError> {
        for loaded in self.batched() {
            match loaded.program.prepare_batches(sizes, batches) {
                Err(err) if is_refusal(&err) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn residency(&self) -> Option<Arc<dyn Residency>> {
        let own =
            |loaded: &LoadedSection| loaded.weights.clone().map(|one| one as Arc<dyn Residency>);
        let all: Vec<Arc<dyn Residency>> = self.accelerated().filter_map(own).collect();
        (!all.is_empty()).then(|| Arc::new(JointResidency(all)) as Arc<dyn Residency>)
    }
}

/// `tensor` of `rows` rows with its last row repeated until there are `all`.
fn repeated(tensor: &Tensor, rows: usize, all: usize) -> Result<Tensor, DeviceError> {
    let last = tensor.rows(rows - 1..rows);
    let joined = last.and_then(|last| {
        let mut parts = vec![tensor];
        parts.extend(std::iter::repeat_n(&last, all - rows));
        Tensor::of_rows(&parts)
    });
    joined.ok_or_else(|| DeviceError::BadInput("an input has too few rows".to_string()))
}

/// Rows of a batch that was made larger.
#[derive(Clone, Copy)]
struct PaddedRows {
    all: usize,
    rows: usize,
}

/// One execution of a program in sections. Its steps are the sections.
pub(super) struct HybridTask {
    pub(super) program: Arc<ProgramState>,
    /// Values that are on the host, by their number in the plan.
    values: Vec<Option<Tensor>>,
    next_section: usize,
    /// The task of the next section, if it is prepared, and where it runs.
    running: Option<(Side, Box<dyn Task>)>,
    rows: Option<PaddedRows>,
    step_times: Option<StepTimes>,
}

#[derive(Default)]
struct StepTimes {
    done: Vec<Nanos>,
    /// Time spent on the next section by segments that were preempted.
    unfinished: Nanos,
}

impl HybridTask {
    /// Prepares the next section unless it is prepared; `runs` says whether the task was launched.
    /// May take long where its sizes depend on data.
    pub(super) fn start_section(&mut self, runs: bool) -> Result<(), DeviceError> {
        if self.running.is_some() {
            return Ok(());
        }
        let Some(loaded) = self.program.sections.get(self.next_section) else { return Ok(()) };
        let missing = |id: &ValueId| DeviceError::BadPlan(format!("value {} is missing", id.0));
        let inputs = loaded
            .section
            .inputs
            .iter()
            .map(|id| self.values[id.index()].clone().ok_or_else(|| missing(id)));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        if self.step_times.is_some() {
            *lock(&loaded.shapes) = inputs.iter().map(|x| x.shape().to_vec()).collect();
        }
        let prepared = loaded.prepare(&self.program.host, inputs, runs);
        self.running = Some(prepared.map_err(|err| failed(loaded, err))?);
        Ok(())
    }

    /// Takes the task of the prepared section, to run it.
    pub(super) fn take_running(&mut self) -> Option<(Side, Box<dyn Task>)> {
        self.running.take()
    }

    /// Puts back the task of a section that was preempted.
    pub(super) fn put_back(&mut self, side: Side, task: Box<dyn Task>, busy: Nanos) {
        self.running = Some((side, task));
        if let Some(times) = &mut self.step_times {
            times.unfinished += busy;
        }
    }

    /// Takes the outputs of the section that has ended.
    pub(super) fn finish_section(
        &mut self,
        task: Box<dyn Task>,
        busy: Nanos,
    ) -> Result<(), DeviceError> {
        let outputs = task.into_outputs()?;
        let Some(loaded) = self.program.sections.get(self.next_section) else { return Ok(()) };
        for (id, tensor) in loaded.section.outputs.iter().zip(outputs) {
            self.values[id.index()] = Some(tensor);
        }
        for id in &loaded.last_uses {
            self.values[id.index()] = None;
        }
        self.next_section += 1;
        if let Some(times) = &mut self.step_times {
            let unfinished = std::mem::replace(&mut times.unfinished, Nanos::ZERO);
            times.done.push(unfinished + busy);
        }
        Ok(())
    }

    fn output(&self, id: ValueId) -> Option<Tensor> {
        let constant = || {
            let found = self.program.plan.constants.iter().find(|(other, _)| *other == id);
            found.map(|(_, tensor)| tensor.clone())
        };
        let tensor = self.values[id.index()].clone().or_else(constant)?;
        match self.rows {
            Some(PaddedRows { all, rows }) if tensor.shape().first() == Some(&all) => {
                tensor.rows(0..rows)
            }
            _ => Some(tensor),
        }
    }
}

/// Names the section of an error that does not name a step.
fn failed(loaded: &LoadedSection, err: DeviceError) -> DeviceError {
    match err {
        // The request's inputs were right.
        DeviceError::BadInput(reason) => {
            let step = loaded.section.plan.steps.first();
            let (name, op) =
                step.map(|step| (step.name.clone(), step.op.name())).unwrap_or_default();
            DeviceError::StepFailed { step: name, op, reason }
        }
        err => err,
    }
}

impl Task for HybridTask {
    fn step_count(&self) -> usize {
        self.program.sections.len()
    }

    fn next_step(&self) -> usize {
        self.next_section
    }

    fn record_step_times(&mut self) {
        self.step_times = Some(StepTimes::default());
        if let (Some(loaded), 0) = (self.program.sections.first(), self.next_section) {
            let shape = |id: &ValueId| self.values[id.index()].as_ref().map(|x| x.shape().to_vec());
            let shapes = loaded.section.inputs.iter().filter_map(shape).collect();
            *lock(&loaded.shapes) = shapes;
        }
    }

    fn step_times(&self) -> Option<&[Nanos]> {
        self.step_times.as_ref().map(|times| times.done.as_slice())
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        if self.next_section < self.step_count() {
            return Err(DeviceError::BadPlan(
                "outputs were requested before the last section".to_string(),
            ));
        }
        let missing = |id: &ValueId| DeviceError::BadPlan(format!("output {} is missing", id.0));
        let ids = &self.program.plan.outputs;
        ids.iter().map(|id| self.output(*id).ok_or_else(|| missing(id))).collect()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
