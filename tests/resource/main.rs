//! The resource: the text, schema and rules of its definition, and its page.

mod definition;
mod page;
mod rules;
mod troubleshooting;

use kube::CustomResourceExt;
use serde_json::Value;
use weightrefit::api::refit::WeightRefit;

/// The schema of the whole resource.
fn schema() -> Value {
    let crd = serde_json::to_value(WeightRefit::crd()).expect("JSON");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}
