//! A swim-lane timeline as SVG: a lane per stream, how full each is, and what was thrown away.

use std::fmt::Write as _;
use std::ops::Range;

use base::Nanos;
use device::sim::{Gpu, Span};

use crate::plot::COLOURS;

const WIDTH: f64 = 1_600.0;
const LANE: f64 = 46.0;
const LEFT: f64 = 70.0;

/// Draws everything a device kept between two times.
pub fn svg(gpu: &Gpu, real_time: &Range<usize>, window: Range<Nanos>) -> String {
    let shown: Vec<&Span> =
        gpu.spans().iter().filter(|s| s.to > window.start && s.from < window.end).collect();
    let lanes = shown.iter().map(|span| span.stream + 1).max().unwrap_or(1);
    let sms = f64::from(gpu.profile().sms);
    let height = LANE * (lanes as f64 + 1.0) + 40.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH + LEFT + 10.0
    );
    let length = (window.end - window.start).0.max(1) as f64;
    let x = |at: Nanos| {
        LEFT + (at.clamp(window.start, window.end) - window.start).0 as f64 / length * WIDTH
    };
    for lane in 0..lanes {
        let y = LANE * (lane as f64 + 1.0);
        let name = if real_time.contains(&lane) { "RT".to_string() } else { format!("BE {lane}") };
        let _ = writeln!(
            text,
            "<text x=\"4\" y=\"{}\">{name}</text><line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#ccc\"/>",
            y - 12.0,
            LEFT + WIDTH
        );
    }
    for span in shown {
        let y = LANE * (span.stream as f64 + 1.0);
        let tall = (LANE - 8.0) * f64::from(span.sms) / sms;
        let colour =
            if real_time.contains(&span.stream) { COLOURS[3] } else { COLOURS[span.stream % 3] };
        let fill = if span.aborted { "#bbbbbb" } else { colour };
        let state = if span.aborted { ", left in the middle" } else { "" };
        let _ = writeln!(
            text,
            "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{tall:.2}\" fill=\"{fill}\"><title>kernel {}, {:.1} SMs{state}</title></rect>",
            x(span.from),
            y - tall,
            (x(span.to) - x(span.from)).max(0.3),
            span.step,
            span.sms
        );
    }
    for tick in 0..=10 {
        let at = Nanos(window.start.0 + (length as u64) * tick / 10);
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{:.2} ms</text>",
            x(at),
            height - 8.0,
            at.as_millis_f64()
        );
    }
    text.push_str("</svg>\n");
    text
}
