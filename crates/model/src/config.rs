//! Settings of a model. Every setting has a default, so a model needs no configuration file.

mod batching;
mod limits;
pub mod pbtxt;
mod settings_change;

pub use batching::{Batching, BatchingPolicy, CopyTime};
pub use limits::{Rate, RequestLimits};
use serde::{Deserialize, Serialize};
pub use settings_change::SettingsChange;

/// How a request is scheduled relative to others on the same device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum Class {
    /// Has the latency of an otherwise idle device; preempts best effort.
    #[serde(rename = "rt", alias = "real_time")]
    RealTime,
    /// Uses the device time that real time does not need.
    #[default]
    #[serde(rename = "be", alias = "best_effort")]
    BestEffort,
}

impl Class {
    /// The short name used in configuration, metrics and traces.
    pub const fn as_str(self) -> &'static str {
        match self {
            Class::RealTime => "rt",
            Class::BestEffort => "be",
        }
    }

    /// The class with this short name.
    pub fn parse(name: &str) -> Option<Class> {
        match name {
            "rt" | "real_time" => Some(Class::RealTime),
            "be" | "best_effort" => Some(Class::BestEffort),
            _ => None,
        }
    }
}

/// How an image becomes the model's input tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Preprocessing {
    /// Width of the input in pixels; the model's own when absent.
    pub width: Option<u32>,
    /// Height of the input in pixels; the model's own when absent.
    pub height: Option<u32>,
    /// Share of the shorter edge that the centred crop keeps.
    pub crop: f32,
    /// Interpolation when resizing.
    pub resize: ResizeFilter,
    /// Subtracted per channel, in 0..255.
    pub mean: Vec<f32>,
    /// Divides per channel, in 0..255.
    pub std: Vec<f32>,
    /// Order of the dimensions.
    pub layout: ImageLayout,
    /// Order of the colours.
    pub channels: ChannelOrder,
}

impl Default for Preprocessing {
    fn default() -> Self {
        Preprocessing {
            width: None,
            height: None,
            crop: 0.875,
            resize: ResizeFilter::Bilinear,
            mean: vec![0.0],
            std: vec![255.0],
            layout: ImageLayout::Nchw,
            channels: ChannelOrder::Rgb,
        }
    }
}

/// Interpolation of [`Preprocessing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum ResizeFilter {
    Nearest,
    Bilinear,
    Bicubic,
    Lanczos,
}

/// Order of an image tensor's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs)]
pub enum ImageLayout {
    Nchw,
    Nhwc,
}

/// Order of an image tensor's colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs)]
pub enum ChannelOrder {
    Rgb,
    Bgr,
    Gray,
}

/// The settings of one model: `atoll.toml`, or the equivalent fields of `config.pbtxt`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Class of requests that do not name one.
    pub class: Class,
    /// Priority of requests that do not name one; 1 is the highest.
    pub priority: u32,
    /// Deadline of requests that do not name one, in milliseconds from arrival.
    pub timeout_ms: Option<u64>,
    /// The queue capacity: how many requests may wait.
    pub queue_capacity: usize,
    /// Its weights are never evicted from the device.
    pub pinned: bool,
    /// The largest batch of one request; 0 means as the model declares.
    pub max_batch_size: usize,
    /// Latency objective from arrival to reply, in milliseconds; batches that would miss it are not
    /// formed.
    pub slo_ms: Option<u64>,
    /// How batches are formed.
    pub batching: Batching,
    /// Names of a classifier's classes, in the order of its scores.
    pub labels: Vec<String>,
    /// How `/classify` converts an image to the model's input.
    pub preprocessing: Option<Preprocessing>,
    /// Limits on its requests.
    pub limits: RequestLimits,
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            class: Class::BestEffort,
            priority: 100,
            timeout_ms: None,
            queue_capacity: 1024,
            pinned: false,
            max_batch_size: 0,
            slo_ms: None,
            batching: Batching::default(),
            labels: Vec::new(),
            preprocessing: None,
            limits: RequestLimits::default(),
        }
    }
}
