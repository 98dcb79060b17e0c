//! Registrations and deletions: records in the store, files in the model store.

use std::collections::BTreeSet;

use api::error::ApiResult;
use api::{ApiError, ErrorKind, ModelRef, ModelState, RegisterRequest, Registered};
use bytes::Bytes;
use model::ModelConfig;

use super::Inner;
use super::service::{LOAD_TIMEOUT, candidate_error, store_error};
use crate::model_store::{ModelStore, digest};
use crate::record::ModelRecord;
use crate::record::canary::split_served;
use crate::store::StoreError;

/// Digests of the files of a record.
fn files_of(record: Option<&ModelRecord>) -> BTreeSet<String> {
    record.into_iter().flat_map(ModelRecord::files).map(|(name, _)| name.to_string()).collect()
}

impl Inner {
    pub(super) async fn register(&self, mut request: RegisterRequest) -> ApiResult<Registered> {
        let files = self.settings.files.clone().ok_or_else(|| {
            ApiError::unavailable("cannot register models: start the frontend with --model-store")
        })?;
        let config = request.take_config()?;
        let (name, onnx) = (request.name.clone(), request.onnx.clone());
        let before = self.records.find(&name).await.map_err(store_error)?;
        let hashed = onnx.clone();
        let digest = tokio::task::spawn_blocking(move || digest(&hashed)).await;
        let digest = digest.map_err(|error| ApiError::internal(error.to_string()))?;
        self.check_limits(&name, &digest, onnx.len()).await?;
        let result = self.register_file(&files, &digest, config, request).await;
        // Of a registration that failed, or of versions that are older than those that are kept.
        let mut unneeded = files_of(before.as_ref());
        unneeded.insert(digest);
        self.remove_unneeded(&name, &unneeded).await;
        result
    }

    async fn register_file(
        &self,
        files: &ModelStore,
        digest: &str,
        config: ModelConfig,
        request: RegisterRequest,
    ) -> ApiResult<Registered> {
        let RegisterRequest { name, onnx, canary, .. } = request;
        let bytes = onnx.len() as u64;
        self.store_file(files, onnx.clone()).await?;
        if let Some(options) = canary {
            let registered = self.register_canary(&name, (digest, bytes), config, &options).await?;
            self.store_file_again(files, digest, onnx).await?;
            return Ok(registered);
        }
        // Nothing is replaced before a backend has compiled and loaded it.
        let candidate = (name.as_str(), digest, bytes);
        self.records.propose(candidate, &config, LOAD_TIMEOUT).await.map_err(candidate_error)?;
        // Others may have registered models meanwhile.
        self.check_limits(&name, digest, onnx.len()).await?;
        let before = self.records.find(&name).await.map_err(store_error)?;
        let version =
            self.records.register(&name, digest, bytes, &config).await.map_err(store_error)?;
        let ready = async {
            self.store_file_again(files, digest, onnx).await?;
            self.wait_until_ready(&name, version).await
        };
        if let Err(error) = ready.await {
            self.records.restore(&name, version, before).await.map_err(store_error)?;
            return Err(ApiError { kind: ErrorKind::InvalidArgument, ..error });
        }
        Ok(Registered { name, version: version.to_string(), state: ModelState::Ready })
    }

    async fn check_limits(&self, name: &str, digest: &str, bytes: usize) -> ApiResult<()> {
        let limits = &self.settings.limits;
        let checked = self.records.check_limits(limits, name, (digest, bytes as u64)).await;
        checked.map_err(store_error)?.map_err(|why| ApiError::new(ErrorKind::TooLarge, why))
    }

    async fn store_file(&self, files: &ModelStore, onnx: Bytes) -> ApiResult<()> {
        let stored = files.put_owned(onnx, &self.owner).await;
        stored
            .map(|_| ())
            .map_err(|error| ApiError::unavailable(format!("cannot store the model: {error}")))
    }

    /// Stores a file again if another frontend has removed it before the record that needs it was
    /// there.
    async fn store_file_again(
        &self,
        files: &ModelStore,
        digest: &str,
        onnx: Bytes,
    ) -> ApiResult<()> {
        match files.has(digest).await {
            Ok(false) => self.store_file(files, onnx).await,
            // A store that is away now has the file all the same.
            Ok(true) | Err(_) => Ok(()),
        }
    }

    /// Removes files of a model that no record needs, where a frontend of this cluster has written
    /// them. What cannot be removed is logged and stays.
    pub(super) async fn remove_unneeded(&self, name: &str, files: &BTreeSet<String>) {
        let Some(store) = &self.settings.files else { return };
        for digest in files {
            let is_needed = || async {
                // Also by records that the store has lost and will get back.
                let known = self.knows_file(name, digest);
                Ok::<bool, StoreError>(known || self.records.refer_to(digest).await?)
            };
            match store.remove_unneeded(digest, &self.owner, is_needed).await {
                Ok(true) => tracing::info!(model = name, digest, "file of a model removed"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(model = name, digest, %error, "file of a model not removed");
                }
            }
        }
    }

    /// Whether another model has this file, as far as this frontend knows.
    fn knows_file(&self, name: &str, digest: &str) -> bool {
        let table = self.table();
        let mut others = table.models.iter().filter(|(other, _)| split_served(other).0 != name);
        others.any(|(_, entry)| entry.record.files().any(|(own, _)| own == digest))
    }

    /// Deletes a version of a model from the cluster, or all of them; returns when no backend
    /// serves it. Files that are not needed any more go, too.
    pub(super) async fn delete(&self, model: ModelRef<'_>) -> ApiResult<usize> {
        let name = model.name;
        let before = self.records.find(name).await.map_err(store_error)?;
        let files = files_of(before.as_ref());
        let (count, left) = self.records.delete(name, model.version).await.map_err(store_error)?;
        if count == 0 {
            return Err(ApiError::not_found(format!("there is no such version of '{name}'")));
        }
        match left {
            Some(left) if before.is_some_and(|before| before.version != left.version) => {
                self.wait_until_served(name, left.version).await?;
            }
            Some(_) => {}
            None => {
                self.wait_for(name, |entry| Ok(entry.is_none_or(|e| e.targets.is_empty()))).await?;
            }
        }
        self.remove_unneeded(name, &files).await;
        Ok(count)
    }
}
