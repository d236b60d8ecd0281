//! What runs against a real Kubernetes API server.

mod api_server;
mod authority;
mod bed;
mod commands;
mod definition;
mod gate;
mod lease;
mod members;
mod pods;
