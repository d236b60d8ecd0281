//! gRPC services and agent-socket frames of weightrefit.

#![forbid(unsafe_code)]

mod claim;
pub mod reference;
pub mod refit;
pub mod report;
pub mod socket;

/// Generated from `proto/weightrefit/v1/*.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    rust_2018_idioms,
    clippy::all,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("weightrefit.v1");
}
