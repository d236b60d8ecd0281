//! Generates the gRPC code with protox, so that no `protoc` binary is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("proto");
    let files = ["weightrefit/v1/coordinator.proto", "weightrefit/v1/round.proto"];
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    for file in files {
        println!("cargo:rerun-if-changed=proto/{file}");
    }
    Ok(())
}
