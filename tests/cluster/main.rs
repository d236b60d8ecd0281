//! What runs against a real Kubernetes API server.

mod api_server;
mod authority;
mod bed;
mod gate;
mod lease;
mod members;
mod pods;
