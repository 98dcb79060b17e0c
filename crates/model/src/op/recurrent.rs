//! Recurrent layers.

use serde::{Deserialize, Serialize};

/// A recurrent layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rnn {
    /// The cell.
    pub cell: RnnCell,
    /// The direction of time.
    pub direction: RnnDirection,
    /// Width of the state.
    pub hidden_size: usize,
    /// Batch before time in every tensor (`layout = 1`).
    pub batch_first: bool,
    /// Gate clipping.
    pub clip: Option<f32>,
    /// ONNX names of the activations, per direction; the cell's defaults when empty.
    pub activations: Vec<String>,
}

/// Recurrent cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RnnCell {
    /// Elman cell.
    Simple,
    /// Long short-term memory.
    Lstm {
        /// Input and forget gate coupled.
        input_forget: bool,
    },
    /// Gated recurrent unit.
    Gru {
        /// The reset gate acts after the recurrent product.
        linear_before_reset: bool,
    },
}

/// The direction of time in a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX direction of the same name.
pub enum RnnDirection {
    Forward,
    Reverse,
    Bidirectional,
}
