//! Spectra, and what is needed to compute them from sound.

use serde::{Deserialize, Serialize};

use crate::DataType;

/// Operators on signals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Signal {
    /// `x, [length], [axis]`: the discrete Fourier transform along one dimension. The last
    /// dimension holds real numbers (size 1) or complex ones (size 2).
    Dft {
        /// From frequencies to time, divided by the length.
        inverse: bool,
        /// Forward: only the first half of the frequencies. Inverse: only these are given, and the
        /// result is real.
        onesided: bool,
        /// The dimension when there is no operand for it.
        axis: i64,
    },
    /// `signal, step, [window], [length]`: transforms of overlapping frames.
    Stft {
        /// Only the first half of the frequencies.
        onesided: bool,
    },
    /// `size`: the weights of a frame.
    Window {
        /// Which weights.
        kind: WindowKind,
        /// As if the window had one more sample, which is left out.
        periodic: bool,
        /// Element type of the output.
        dtype: DataType,
    },
    /// `bins, length, rate, low frequency, high frequency`: from a spectrum to mel bins.
    MelWeights {
        /// Element type of the output.
        dtype: DataType,
    },
}

/// The weights of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX window of the same name.
pub enum WindowKind {
    Hann,
    Hamming,
    Blackman,
}
