//! Generates the gRPC service from `proto/inference.proto`, without a protobuf compiler installed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/inference.proto");
    let descriptors = protox::compile(["inference.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("inference.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").btree_map(".").compile_fds(descriptors)?;
    Ok(())
}
