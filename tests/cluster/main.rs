//! What runs against a real Kubernetes API server.

mod api_server;
mod bed;
mod commands;
mod definition;
mod epochs;
mod operator;
mod process;
mod world;
