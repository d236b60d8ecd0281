//! What runs against a real Kubernetes API server.

mod api_server;
mod authority;
mod bad_agents;
mod bad_pods;
mod bed;
mod changed_maps;
mod commands;
mod definition;
mod deleted;
mod doctor;
mod epochs;
mod exposition;
mod fault_proxy;
mod faults;
mod gate;
mod injection;
mod lease;
mod members;
mod operator;
mod pods;
mod process;
mod readiness;
mod rogue;
mod workloads;
mod world;
