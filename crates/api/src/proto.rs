//! The messages and the service of `proto/inference.proto`, generated when the crate is built.
#![allow(missing_docs, clippy::all, clippy::pedantic)]

tonic::include_proto!("inference");

/// The compiled descriptors, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));
