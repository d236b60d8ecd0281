//! What the operator makes beside refits belongs to the definition of WeightRefit: the authority's Secret, the lease, the
//! certificates in members' namespaces. They outlive a release, so that agents find the same authority after the next
//! install, and go with the definition.

use crate::limits;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, CustomResourceExt, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Knows the definition, once it was asked for.
pub struct Definition {
    client: Client,
    found: Mutex<Option<OwnerReference>>,
}

impl Definition {
    /// Nothing is asked yet.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, found: Mutex::default() }
    }

    /// Makes the definition an owner of the object, which is there. Other owners stay.
    ///
    /// # Errors
    /// The API server refuses, or has no definition or no such object.
    pub async fn adopt<K>(&self, api: &Api<K>, name: &str) -> Result<(), kube::Error>
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        // Asked anew each time: what one that is gone owns is collected.
        let owner = self.find().await?;
        // Strategic: the API server merges lists of owners by UID.
        let patch = Patch::Strategic(json!({"metadata": {"ownerReferences": [&owner]}}));
        *self.found() = Some(owner);
        let parameters =
            PatchParams { field_manager: Some(limits::FIELD_MANAGER.into()), ..Default::default() };
        api.patch_metadata(name, &parameters, &patch).await.map(drop)
    }

    /// As [`Self::adopt`], where the definition does not own the object yet.
    ///
    /// # Errors
    /// Those of [`Self::adopt`].
    pub async fn keep<K>(&self, api: &Api<K>, name: &str) -> Result<(), kube::Error>
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        match self.owns(&api.get_metadata(name).await?) {
            true => Ok(()),
            false => self.adopt(api, name).await,
        }
    }

    /// Whether the object, as the API server has it, is the definition's already.
    pub fn owns(&self, object: &impl Resource) -> bool {
        let owners = object.meta().owner_references.as_deref().unwrap_or_default();
        self.found().as_ref().is_some_and(|own| owners.iter().any(|owner| owner.uid == own.uid))
    }

    fn found(&self) -> MutexGuard<'_, Option<OwnerReference>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn find(&self) -> Result<OwnerReference, kube::Error> {
        let definitions = Api::<CustomResourceDefinition>::all(self.client.clone());
        let definition = definitions.get_metadata(crate::api::refit::WeightRefit::crd_name()).await?;
        Ok(OwnerReference {
            api_version: CustomResourceDefinition::api_version(&()).into_owned(),
            kind: CustomResourceDefinition::kind(&()).into_owned(),
            name: definition.name_any(),
            uid: definition.uid().unwrap_or_default(),
            ..OwnerReference::default()
        })
    }
}
