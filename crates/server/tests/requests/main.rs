//! Requests over real sockets, one module for each subject. They share a program because each links
//! the whole server.
#![allow(missing_docs, dead_code)]

#[path = "../fake/mod.rs"]
mod fake;
#[path = "../http/mod.rs"]
mod http;
#[path = "../support/mod.rs"]
mod support;

mod access;
mod connections;
mod device_memory;
mod grpc;
mod local_node;
mod rest;
mod settings;
mod tls;
