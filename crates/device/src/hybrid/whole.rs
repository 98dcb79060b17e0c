//! Programs that the accelerator runs whole, with the host for sizes that it refuses.
//!
//! Which steps have kernels is found with sizes that are configured or guessed. A request may bring
//! others, and a step that has no kernel there. Such a request runs on the host.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use base::Bytes;
use model::config::CopyTime;
use model::{LaunchPlan, Tensor};

use super::program::{HybridProgram, is_refusal};
use super::section;
use crate::batch::{join_rows, rows_of};
use crate::residency::Residency;
use crate::{Device, DeviceError, Program, RecordedStep, StagedInputs, Task, TuningProgress};

/// A program of the accelerator.
pub(super) struct WholeProgram {
    inner: Arc<dyn Program>,
    host: Arc<dyn Device>,
    fallback: OnceLock<Result<HybridProgram, DeviceError>>,
}

/// The whole of `plan` as one section of the host.
pub(super) fn on_host(
    host: &Arc<dyn Device>,
    plan: &Arc<LaunchPlan>,
) -> Result<HybridProgram, DeviceError> {
    let sections = section::cut(plan, &vec![true; plan.steps.len()]);
    HybridProgram::load(&**host, host, plan.clone(), sections)
}

/// Staged inputs of the accelerator, or those of a request that runs on the host.
enum WholeStaged {
    Accelerator(Box<dyn StagedInputs>),
    Host(Vec<Tensor>),
}

impl StagedInputs for WholeStaged {
    fn rows(&self) -> usize {
        match self {
            WholeStaged::Accelerator(staged) => staged.rows(),
            WholeStaged::Host(inputs) => rows_of(inputs),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl WholeProgram {
    pub(super) fn new(inner: Arc<dyn Program>, host: Arc<dyn Device>) -> WholeProgram {
        WholeProgram { inner, host, fallback: OnceLock::new() }
    }

    /// The program on the host, for inputs that were refused with `refusal`.
    fn fallback(&self, refusal: &DeviceError) -> Result<&HybridProgram, DeviceError> {
        let load = || {
            tracing::warn!(%refusal, "a model runs on the host at sizes without kernels");
            on_host(&self.host, self.inner.plan())
        };
        self.fallback.get_or_init(load).as_ref().map_err(Clone::clone)
    }
}

impl Program for WholeProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.inner.plan()
    }

    fn resident(&self) -> Bytes {
        self.inner.resident()
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        self.prepare_with_notice(inputs, &mut || {})
    }

    fn prepare_with_notice(
        &self,
        inputs: Vec<Tensor>,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn Task>, DeviceError> {
        match self.inner.prepare_with_notice(inputs.clone(), notify) {
            Err(err) if is_refusal(&err) => {
                self.fallback(&err)?.prepare_with_notice(inputs, notify)
            }
            other => other,
        }
    }

    fn recorded_steps(&self, shapes: &[Vec<usize>]) -> Vec<RecordedStep> {
        self.inner.recorded_steps(shapes)
    }

    fn tuning(&self) -> Option<TuningProgress> {
        self.inner.tuning()
    }

    fn is_prepared(&self, inputs: &[Tensor]) -> bool {
        self.inner.is_prepared(inputs)
    }

    fn copies_on_caller(&self, inputs: &[Tensor]) -> bool {
        self.inner.copies_on_caller(inputs)
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        match self.inner.specialize(shapes) {
            Err(err) if is_refusal(&err) => self.fallback(&err).map(|_| ()),
            other => other,
        }
    }

    fn stage(
        &self,
        inputs: Vec<Tensor>,
        copy: CopyTime,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn StagedInputs>, DeviceError> {
        let staged = match self.inner.stage(inputs.clone(), copy, notify) {
            Ok(staged) => WholeStaged::Accelerator(staged),
            Err(err) if is_refusal(&err) => {
                self.fallback(&err)?;
                notify();
                WholeStaged::Host(inputs)
            }
            Err(err) => return Err(err),
        };
        Ok(Box::new(staged))
    }

    fn gather(&self, staged: Vec<Box<dyn StagedInputs>>) -> Result<Box<dyn Task>, DeviceError> {
        let (mut own, mut host) = (Vec::new(), Vec::new());
        for staged in staged {
            match staged.into_any().downcast::<WholeStaged>().map(|staged| *staged) {
                Ok(WholeStaged::Accelerator(staged)) => own.push(staged),
                Ok(WholeStaged::Host(inputs)) => host.push(inputs),
                Err(_) => {
                    let why = "staged inputs belong to another device".to_string();
                    return Err(DeviceError::BadPlan(why));
                }
            }
        }
        match (own.is_empty(), self.fallback.get()) {
            (true, Some(Ok(fallback))) => fallback.prepare(join_rows(&host)?),
            _ if host.is_empty() => self.inner.gather(own),
            _ => Err(DeviceError::BadInput(
                "one batch of requests with kernels and requests without".to_string(),
            )),
        }
    }

    fn prepared_batches(&self, sizes: &[(String, usize)]) -> Option<Vec<usize>> {
        self.inner.prepared_batches(sizes)
    }

    fn prepare_batches(
        &self,
        sizes: &[(String, usize)],
        batches: &[usize],
    ) -> Result<(), DeviceError> {
        self.inner.prepare_batches(sizes, batches)
    }

    fn residency(&self) -> Option<Arc<dyn Residency>> {
        self.inner.residency()
    }
}
