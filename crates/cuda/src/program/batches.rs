//! Batches of a loaded model: the specialization they run on, and the input pools they wait in.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use device::batch::{HostStagedInputs, join_rows, other_sizes, rows_of};
use device::{DeviceError, StagedInputs, Task, check_inputs};
use model::config::CopyTime;
use model::{Dim, LaunchPlan, Tensor};

use crate::driver::Priority;
use crate::memory::input_pool::InputPool;
use crate::program::ProgramState;
use crate::program::batch_inputs::{
    BatchInputs, CudaStaged, StagedStorage, StagingLocation, unstage,
};
use crate::program::lowering::{Sizes, raw_bytes};
use crate::program::specialization::Specialization;
use crate::program::task::CudaTask;

/// Lists of row sizes for which a model keeps input pools.
const MAX_POOLS: usize = 8;

/// How long pinning memory waits for a gap in RT activity.
const GAP_WAIT: Duration = Duration::from_millis(5);

/// The symbol that all inputs have as their first dimension.
pub(crate) fn leading_symbol(plan: &LaunchPlan) -> Option<&str> {
    let first = |id: &model::ValueId| plan.value(*id).shape.as_ref()?.first();
    let Some(Dim::Symbol(symbol)) = plan.inputs.first().and_then(first) else { return None };
    let same =
        |id: &model::ValueId| matches!(first(id), Some(Dim::Symbol(other)) if other == symbol);
    plan.inputs.iter().all(same).then_some(symbol)
}

/// Sizes of all symbols of `plan`'s inputs; `None` when one is not given.
fn sizes_with(
    plan: &LaunchPlan,
    batch: &str,
    rows: usize,
    others: &[(String, usize)],
) -> Option<Sizes> {
    let mut sizes = Sizes::new();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        let Dim::Symbol(symbol) = dim else { continue };
        if sizes.iter().any(|(known, _)| known == symbol) {
            continue;
        }
        let other = || others.iter().find(|(name, _)| name == symbol).map(|(_, size)| *size);
        let size = if symbol == batch { Some(rows) } else { other() };
        sizes.push((symbol.clone(), size?));
    }
    Some(sizes)
}

/// The batch of `sizes` when all other sizes are as in `wanted`.
fn rows_if_same(sizes: &Sizes, wanted: &Sizes, batch: &str) -> Option<usize> {
    let same = |((name, size), (other, want)): (&(String, usize), &(String, usize))| {
        name == other && (name == batch || size == want)
    };
    let fits = sizes.len() == wanted.len() && sizes.iter().zip(wanted).all(same);
    sizes.iter().find(|(name, _)| name == batch).filter(|_| fits).map(|(_, rows)| *rows)
}

impl ProgramState {
    /// Batches of all specializations that are ready for these other sizes.
    pub(crate) fn prepared_batches(&self, others: &[(String, usize)]) -> Vec<usize> {
        let Some(batch) = leading_symbol(&self.plan) else { return Vec::new() };
        let Some(wanted) = sizes_with(&self.plan, batch, 0, others) else { return Vec::new() };
        let plans = self.plans();
        let mut rows: Vec<usize> =
            plans.iter().filter_map(|(sizes, _)| rows_if_same(sizes, &wanted, batch)).collect();
        rows.sort_unstable();
        rows
    }

    /// The smallest specialization for at least `rows` rows that is ready, and its number of rows.
    fn ready(
        &self,
        batch: &str,
        rows: usize,
        others: &[(String, usize)],
    ) -> Option<(Arc<Specialization>, usize)> {
        let rows = self.prepared_batches(others).into_iter().find(|ready| *ready >= rows)?;
        let sizes = sizes_with(&self.plan, batch, rows, others)?;
        Some((self.known(&sizes)?, rows))
    }

    /// A specialization for at least `rows` rows, and its number of rows: the smallest that is
    /// ready, or one made now.
    fn fitting(
        &self,
        batch: &str,
        rows: usize,
        others: &[(String, usize)],
    ) -> Result<(Arc<Specialization>, usize), DeviceError> {
        if let Some(ready) = self.ready(batch, rows, others) {
            return Ok(ready);
        }
        let sizes = sizes_with(&self.plan, batch, rows, others).ok_or_else(|| {
            DeviceError::BadInput("a symbol of the model has no size".to_string())
        })?;
        Ok((self.specialization(sizes, &|_, _| {})?, rows))
    }

    /// The input pool for rows of these sizes; `None` when there is none.
    fn pool(&self, row_bytes: &[usize]) -> Option<Arc<InputPool>> {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.iter().find(|(bytes, _)| bytes == row_bytes);
        pool.and_then(|(_, pool)| pool.clone())
    }

    /// The same, made now if it does not exist: pinned memory takes long to allocate.
    fn make_pool(&self, row_bytes: &[usize]) -> Option<Arc<InputPool>> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(bytes, _)| bytes == row_bytes) {
            return pool.clone();
        }
        if pools.len() >= MAX_POOLS {
            return None;
        }
        let rt_activity = &self.services.preemption.rt_activity;
        let wait = || {
            rt_activity.wait_for_gap(GAP_WAIT);
        };
        let made = InputPool::new(&self.services.memory, row_bytes.to_vec(), wait);
        let pool = made.unwrap_or_else(|err| {
            tracing::warn!(%err, "input pool not available");
            None
        });
        let pool = pool.map(Arc::new);
        pools.push((row_bytes.to_vec(), pool.clone()));
        pool
    }

    pub(crate) fn pool_bytes(&self) -> u64 {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().filter_map(|(_, pool)| pool.as_ref()).map(|pool| pool.bytes()).sum()
    }

    pub(crate) fn stage(
        &self,
        inputs: Vec<Tensor>,
        copy: CopyTime,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn StagedInputs>, DeviceError> {
        self.services.device.check_healthy()?;
        check_inputs(&self.plan, &inputs)?;
        let rows = rows_of(&inputs);
        let Some(batch) = leading_symbol(&self.plan).filter(|_| rows > 0) else {
            notify();
            return Ok(Box::new(HostStagedInputs::new(inputs)));
        };
        let sizes = other_sizes(&self.plan, batch, &inputs);
        self.staged.store(true, Ordering::Relaxed);
        // Held until the batch is formed, which must not wait for a compiler.
        let fitting = self.fitting(batch, rows, &sizes)?;
        let raw = inputs.iter().map(raw_bytes).collect::<Result<Vec<_>, _>>()?;
        let row_bytes: Vec<usize> = raw.iter().map(|raw| raw.len() / rows).collect();
        let slot = match self.pool(&row_bytes) {
            Some(pool) => {
                let how = (copy == CopyTime::Early, self.services.memory.are_in_host_pool(&raw));
                pool.take(&raw, rows, how, notify).map_err(|err| self.services.device.error(err))?
            }
            None => None,
        };
        if slot.is_none() {
            notify();
        }
        let storage = slot.map_or(StagedStorage::Host(inputs), StagedStorage::Pool);
        Ok(Box::new(CudaStaged { sizes, rows, storage, fitting }))
    }

    pub(crate) fn gather(
        &self,
        staged: Vec<Box<dyn StagedInputs>>,
    ) -> Result<GatheredBatch, DeviceError> {
        self.services.device.check_healthy()?;
        let (mut own, mut plain) = (Vec::new(), Vec::new());
        for staged in staged {
            match unstage(staged)? {
                StagingLocation::Device(staged) => own.push(staged),
                StagingLocation::Host(inputs) => plain.push(inputs),
            }
        }
        let (Some(first), Some(batch)) = (own.first(), leading_symbol(&self.plan)) else {
            return Ok(GatheredBatch::Inputs(join_rows(&plain)?));
        };
        if !plain.is_empty() || own.iter().any(|staged| staged.sizes != first.sizes) {
            return Err(DeviceError::BadInput(
                "requests of different sizes in one batch".to_string(),
            ));
        }
        let rows = own.iter().map(|staged| staged.rows).sum();
        let held = own.iter().map(|staged| &staged.fitting).find(|(_, held)| *held >= rows);
        let (specialization, plan_rows) = match (self.ready(batch, rows, &first.sizes), held) {
            (Some(ready), _) => ready,
            (None, Some(held)) => held.clone(),
            (None, None) => self.fitting(batch, rows, &first.sizes)?,
        };
        let mut staging = specialization.take_staging()?;
        let batch_inputs = match BatchInputs::new(&specialization, plan_rows, own, &mut staging) {
            Ok(batch_inputs) => batch_inputs,
            Err(err) => {
                specialization.return_staging(staging);
                return Err(err);
            }
        };
        Ok(GatheredBatch::Task(Box::new(CudaTask::of_batch(specialization, staging, batch_inputs))))
    }

    pub(crate) fn make_batches_ready(
        &self,
        others: &[(String, usize)],
        batches: &[usize],
    ) -> Result<(), DeviceError> {
        let Some(batch) = leading_symbol(&self.plan) else { return Ok(()) };
        let mut distinct = batches.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        for rows in distinct {
            let Some(sizes) = sizes_with(&self.plan, batch, rows, others) else { return Ok(()) };
            let specialization = self.specialization(sizes, &|_, _| {})?;
            let row_bytes =
                specialization.gpu.inputs.iter().map(|slot| slot.bytes as usize / rows.max(1));
            self.make_pool(&row_bytes.collect::<Vec<_>>());
            let count = batches.iter().filter(|other| **other == rows).count();
            self.reserve_runs(&specialization, count)?;
        }
        Ok(())
    }

    /// Keeps memory for `count` runs at the same time, with all graphs that they launch.
    pub(crate) fn reserve_runs(
        &self,
        specialization: &Arc<Specialization>,
        count: usize,
    ) -> Result<(), DeviceError> {
        let services = &self.services;
        specialization.reserve();
        let (mut instances, mut staging) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let mut instance = specialization.take_instance(Priority::High)?;
            let made = instance.prepare_graph(specialization);
            let made = made.and_then(|()| instance.prepare_chains(specialization));
            made.map_err(|err| services.device.error(err))?;
            instances.push(instance);
            staging.push(specialization.take_staging()?);
        }
        instances
            .into_iter()
            .for_each(|instance| specialization.return_instance(instance, Priority::High));
        staging.into_iter().for_each(|buffer| specialization.return_staging(buffer));
        Ok(())
    }
}

/// A gathered batch: a task, or inputs to make one of.
pub(crate) enum GatheredBatch {
    Task(Box<dyn Task>),
    Inputs(Vec<Tensor>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{DataType, ValueId, ValueInfo};

    fn plan(shapes: &[&[&str]]) -> LaunchPlan {
        let dim = |word: &&str| match word.parse() {
            Ok(size) => Dim::Fixed(size),
            Err(_) => Dim::Symbol((*word).to_string()),
        };
        let value = |shape: &&[&str]| ValueInfo {
            name: "x".to_string(),
            dtype: DataType::F32,
            shape: Some(shape.iter().map(dim).collect()),
        };
        LaunchPlan {
            values: shapes.iter().map(value).collect(),
            inputs: (0..shapes.len() as u32).map(ValueId).collect(),
            ..LaunchPlan::default()
        }
    }

    #[test]
    fn sizes_follow_the_order_of_inputs() {
        let tokens = plan(&[&["n", "tokens"], &["n", "3"]]);
        assert_eq!(leading_symbol(&tokens), Some("n"));
        let others = [("tokens".to_string(), 7)];
        let sizes = sizes_with(&tokens, "n", 4, &others).expect("all are said");
        assert_eq!(sizes, [("n".to_string(), 4), ("tokens".to_string(), 7)]);
        assert_eq!(sizes_with(&tokens, "n", 4, &[]), None);
        assert_eq!(leading_symbol(&plan(&[&["n", "3"], &["3", "n"]])), None);
        assert_eq!(leading_symbol(&plan(&[&["1", "3"]])), None);
    }

    #[test]
    fn specializations_of_other_sizes_are_no_batches() {
        let sizes = |n: usize, tokens: usize| -> Sizes {
            vec![("n".to_string(), n), ("tokens".to_string(), tokens)]
        };
        assert_eq!(rows_if_same(&sizes(8, 7), &sizes(0, 7), "n"), Some(8));
        assert_eq!(rows_if_same(&sizes(8, 9), &sizes(0, 7), "n"), None);
    }
}
