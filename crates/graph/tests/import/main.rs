//! Importing whole models: good ones, old ones, hostile ones.

mod control;
mod hostile;
mod models;
mod operators;
mod quantize;
mod sharing;
