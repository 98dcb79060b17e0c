//! Publishes what models take and return, so that frontends can say so while no backend has them.

use std::collections::BTreeSet;
use std::sync::Arc;

use api::{InferenceService, ModelRef};

use crate::record::signature::SignatureRecord;
use crate::record::{Keys, RecordKind, encode};
use crate::store::Store;

/// The digests whose signature is in the store.
#[derive(Default)]
pub(super) struct PublishedSignatures {
    digests: BTreeSet<String>,
}

impl PublishedSignatures {
    /// Publishes the signature of a model that `service` has, where the store lacks it. A failure
    /// is tried again with the next assignment: only metadata at zero backends depends on it.
    pub(super) async fn publish(
        &mut self,
        store: &dyn Store,
        keys: &Keys,
        service: Arc<dyn InferenceService>,
        model: &str,
        digest: &str,
    ) {
        if self.digests.contains(digest) {
            return;
        }
        let key = keys.one(RecordKind::Signature, digest);
        let known = match store.get(&key).await {
            Ok(Some(_)) => true,
            Ok(None) => {
                let reference = ModelRef { name: model, version: None };
                let Ok(metadata) = service.model_metadata(reference).await else { return };
                let value = encode(&SignatureRecord::of(&metadata));
                store.compare_and_put(&key, 0, value, None).await.is_ok()
            }
            Err(_) => false,
        };
        if known {
            self.digests.insert(digest.to_string());
        }
    }
}
