//! Registers, deletes and rolls back models.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::error::ApiResult;
use api::{ApiError, ModelRef, ModelState, RegisterRequest, Registered};

use super::{Inner, blocking};

/// Sets a flag when it is dropped: the client is gone, or the work is done.
pub(super) struct SetOnDrop(pub(super) Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Inner {
    /// Checks a model before it is registered. Dropping the future ends the check.
    pub(super) async fn check(&self, request: &RegisterRequest) -> ApiResult<()> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let _guard = SetOnDrop(cancelled.clone());
        let (loader, request) = (self.loader.clone(), request.clone());
        blocking(move || loader.check(&request, &cancelled)).await
    }

    /// Stores a model and puts it in service. If that fails, it is removed again, and a version
    /// that was in service stays.
    pub(super) async fn register(
        self: Arc<Inner>,
        request: RegisterRequest,
    ) -> ApiResult<Registered> {
        let name = request.name.clone();
        let loader = self.loader.clone();
        let stored = blocking(move || loader.register(request)).await?;
        let version = match self.clone().load(name.clone(), Arc::default()).await {
            Ok(version) => version,
            Err(error) => {
                let (loader, failed) = (self.loader.clone(), name.clone());
                if let Err(why) = blocking(move || loader.delete(&failed, Some(stored))).await {
                    tracing::warn!(model = name, version = stored, %why, "failed model is kept");
                }
                return Err(error);
            }
        };
        self.profile(name.clone());
        Ok(Registered { name, version: version.to_string(), state: ModelState::Ready })
    }

    /// Deletes a registered version, or all of them. What is in service afterwards is the version
    /// in force, if one is left.
    pub(super) async fn delete(
        self: Arc<Inner>,
        name: String,
        version: Option<u64>,
    ) -> ApiResult<usize> {
        if version.is_none() {
            self.models.cancel_load(&name);
        }
        // A load in progress would put it in service afterwards.
        let lock = self.models.lock(&name).await;
        let (loader, deleted) = (self.loader.clone(), name.clone());
        let count = blocking(move || loader.delete(&deleted, version)).await?;
        tracing::info!(model = name, count, "registered versions deleted");
        let served = self.models.find(ModelRef { name: &name, version: None });
        let Some(served) = served.ok().map(|served| served.version) else {
            self.models.forget(&name);
            return Ok(count);
        };
        drop(lock);
        if version.is_none() {
            self.clone().unload(name.clone()).await?;
            self.models.forget(&name);
        } else if version == Some(served)
            && self.clone().load(name.clone(), Arc::default()).await.is_err()
        {
            self.unload(name).await?;
        }
        Ok(count)
    }

    /// Puts an older registered version in service. If that fails, the newer one stays.
    pub(super) async fn roll_back(
        self: Arc<Inner>,
        name: String,
        version: Option<u64>,
    ) -> ApiResult<Registered> {
        let (loader, model) = (self.loader.clone(), name.clone());
        let (before, now) = blocking(move || loader.roll_back(&model, version)).await?;
        match self.clone().load(name.clone(), Arc::default()).await {
            Ok(version) if version == now => {
                tracing::info!(model = name, version, "rolled back");
                Ok(Registered { name, version: version.to_string(), state: ModelState::Ready })
            }
            result => {
                let (loader, model) = (self.loader.clone(), name.clone());
                if let Err(why) = blocking(move || loader.roll_back(&model, Some(before))).await {
                    tracing::warn!(model = name, version = now, %why, "rollback is not undone");
                }
                let other = |version| format!("version {version} was loaded instead of {now}");
                Err(result.map_or_else(|error| error, |v| ApiError::unavailable(other(v))))
            }
        }
    }
}
