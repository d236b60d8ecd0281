//! What runs against a real Kubernetes API server.

mod api_server;
mod authority;
mod bed;
mod commands;
mod definition;
mod epochs;
mod gate;
mod lease;
mod members;
mod operator;
mod pods;
mod process;
mod world;
