//! atoll
fn main() {}
