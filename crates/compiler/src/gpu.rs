//! From a launch plan to kernels of a GPU.

pub mod args;
pub mod draft;
pub mod elementwise;
pub mod index;
pub mod product;
pub mod quantize;
pub mod reduce;
pub mod view;
pub mod walk;
pub mod window;
