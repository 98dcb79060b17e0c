//! Stores, describes and deletes queries.

use std::collections::HashMap;

use api::error::ApiResult;
use api::{ApiError, ModelRef, QueryMetadata, QueryStageMetadata, check_model_name};

use super::Inner;
use super::routing_table::RoutingTable;
use super::service::store_error;
use crate::query::model_fit::{KnownModel, check_models};
use crate::query::spec::{Checked, QuerySpec};

/// Maximum size of a query's text in bytes.
const TEXT_MAX: usize = 256 << 10;

impl Inner {
    /// A query, how its SLO is split, and what this frontend observes of it.
    pub(super) fn describe(&self, table: &RoutingTable, name: &str) -> ApiResult<QueryMetadata> {
        let entry = table.query(name)?;
        let spec = &entry.query.spec;
        let load = entry.meter.counts(self.clock.now());
        let stage = |(index, stage): (usize, &crate::query::spec::StageSpec)| {
            let split = entry.split.as_ref();
            let budget = split.and_then(|split| split.stages.get(&stage.name));
            let model = ModelRef { name: &stage.model, version: None };
            QueryStageMetadata {
                name: stage.name.clone(),
                model: stage.model.clone(),
                after: entry.query.parents[index].iter().copied().collect(),
                ready: table.serving(model).is_ok(),
                budget_ms: budget.map(|budget| budget.budget_ms),
                fan_out: budget.map(|budget| budget.fan_out),
                p99_ms: load.stages.get(&stage.name).map_or(0.0, |load| load.p99_ms),
            }
        };
        Ok(QueryMetadata {
            name: name.to_string(),
            slo_ms: spec.slo_ms,
            inputs: entry.query.inputs.iter().cloned().collect(),
            outputs: spec.output.keys().cloned().collect(),
            stages: spec.stages.iter().enumerate().map(stage).collect(),
            even_because: entry.split.as_ref().and_then(|split| split.even_because.clone()),
            exact: entry.split.as_ref().is_some_and(|split| split.exact),
            requests: load.requests.arrived,
            answered: load.requests.answered,
            late: load.requests.late,
            refused: load.requests.refused,
            p99_ms: load.requests.p99_ms,
            between_p99_ms: load.between_ms,
        })
    }

    /// Stores a query; returns when this frontend has it.
    pub(super) async fn put_query(&self, name: &str, text: &str) -> ApiResult<QueryMetadata> {
        check_model_name(name)?;
        if text.len() > TEXT_MAX {
            return Err(ApiError::invalid(format!("a query has at most {TEXT_MAX} bytes")));
        }
        let checked = QuerySpec::read(text).and_then(QuerySpec::check);
        let checked = checked.map_err(|error| ApiError::invalid(error.to_string()))?;
        self.check_models(&checked).await?;
        let spec = checked.spec;
        self.records.put_query(name, &spec).await.map_err(store_error)?;
        let known = |table: &RoutingTable| {
            table.queries.get(name).is_some_and(|entry| entry.query.spec == spec)
        };
        self.wait_for_table(name, known).await?;
        self.describe(&self.table(), name)
    }

    /// Checks that the models of a query exist and fit.
    async fn check_models(&self, query: &Checked) -> ApiResult<()> {
        let table = self.table();
        let mut served = HashMap::new();
        for stage in &query.spec.stages {
            if let Some(entry) = table.models.get(&stage.model)
                && !served.contains_key(stage.model.as_str())
                && let Ok(metadata) = self.metadata(entry).await
            {
                served.insert(stage.model.as_str(), metadata);
            }
        }
        let find = |model: &str| match (served.get(model), table.models.contains_key(model)) {
            (Some(metadata), _) => KnownModel::Served(metadata),
            (None, true) => KnownModel::NotServed,
            (None, false) => KnownModel::Missing,
        };
        check_models(query, find).map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// Deletes a query.
    pub(super) async fn delete_query(&self, name: &str) -> ApiResult<()> {
        self.table().query(name)?;
        self.records.delete_query(name).await.map_err(store_error)?;
        self.wait_for_table(name, |table| !table.queries.contains_key(name)).await
    }
}
