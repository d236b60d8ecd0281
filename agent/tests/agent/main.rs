//! Tests of the agent as a process: real sockets, real clients, a coordinator in the test.

mod bad_input;
mod following;
mod groups;
mod reference;
mod refit;
mod socket_document;
mod strangers;
mod supervised;
mod support;
mod told;
