//! The CustomResourceDefinition: its text, its schema, its rules.

mod definition;
mod rules;

use kube::CustomResourceExt;
use serde_json::Value;
use weightrefit::api::refit::WeightRefit;

/// The schema of the whole resource.
fn schema() -> Value {
    let crd = serde_json::to_value(WeightRefit::crd()).expect("JSON");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}
