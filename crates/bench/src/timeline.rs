//! A timeline as SVG, one row per stream: the SMs it holds, and where work was preempted.

use std::fmt::Write as _;
use std::ops::Range;

use base::Nanos;
use device::sim::{Gpu, WorkSpan};

use crate::plot::COLOURS;

const WIDTH: f64 = 1_500.0;
const ROW_HEIGHT: f64 = 64.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 44.0;
const PREEMPTED_COLOUR: &str = "#CC0000";

/// One row: its name, its colour, and the spans that fill it.
struct TimelineRow<'a> {
    name: String,
    colour: &'static str,
    spans: Vec<&'a WorkSpan>,
}

/// Draws what a device recorded between two times.
pub fn svg(gpu: &Gpu, real_time: &Range<usize>, window: Range<Nanos>) -> String {
    let shown: Vec<&WorkSpan> =
        gpu.spans().iter().filter(|s| s.to > window.start && s.from < window.end).collect();
    let rows = rows(&shown, real_time);
    let height = TOP + ROW_HEIGHT * rows.len() as f64 + 36.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" \
         font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH + LEFT + 40.0
    );
    legend(&mut text, gpu.profile().sms);
    let length = (window.end - window.start).0.max(1) as f64;
    let x = |at: Nanos| {
        LEFT + (at.clamp(window.start, window.end) - window.start).0 as f64 / length * WIDTH
    };
    for tick in 0..=10 {
        let at = Nanos(window.start.0 + (length as u64) * tick / 10);
        let _ = writeln!(
            text,
            "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{TOP}\" y2=\"{1}\" stroke=\"#eee\"/>\
             <text x=\"{0:.1}\" y=\"{2}\" text-anchor=\"middle\">{3:.2} ms</text>",
            x(at),
            height - 30.0,
            height - 12.0,
            at.as_millis_f64()
        );
    }
    for (index, row) in rows.iter().enumerate() {
        draw_row(&mut text, row, index, f64::from(gpu.profile().sms), &x);
    }
    text.push_str("</svg>\n");
    text
}

fn rows<'a>(shown: &[&'a WorkSpan], real_time: &Range<usize>) -> Vec<TimelineRow<'a>> {
    let streams = shown.iter().map(|span| span.stream + 1).max().unwrap_or(1);
    let row = |stream: usize| {
        let is_rt = real_time.contains(&stream);
        TimelineRow {
            name: format!("{} {stream}", if is_rt { "real time" } else { "best effort" }),
            colour: if is_rt { COLOURS[3] } else { [COLOURS[1], COLOURS[2]][stream % 2] },
            spans: shown.iter().copied().filter(|span| span.stream == stream).collect(),
        }
    };
    let all = TimelineRow { name: "all SMs".to_string(), colour: "#888888", spans: shown.to_vec() };
    (0..streams).map(row).chain([all]).collect()
}

fn legend(text: &mut String, sms: u32) {
    let entries = [
        (COLOURS[3], "real time".to_string()),
        (COLOURS[1], "best effort (colours alternate)".to_string()),
        (PREEMPTED_COLOUR, "preempted".to_string()),
        ("#888888", format!("all together; a row is {sms} SMs high")),
    ];
    for (index, (colour, name)) in entries.iter().enumerate() {
        let x = LEFT + 290.0 * index as f64;
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"12\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"22\">{name}</text>",
            x + 18.0
        );
    }
}

/// The SMs held as an area, and a mark at each preemption.
fn draw_row(
    text: &mut String,
    row: &TimelineRow<'_>,
    index: usize,
    sms: f64,
    x: &dyn Fn(Nanos) -> f64,
) {
    let bottom = TOP + ROW_HEIGHT * (index as f64 + 1.0);
    let y = |held: f64| bottom - (ROW_HEIGHT - 14.0) * held.min(sms) / sms;
    let _ = writeln!(
        text,
        "<text x=\"6\" y=\"{}\">{}</text>\
         <line x1=\"{LEFT}\" x2=\"{}\" y1=\"{bottom}\" y2=\"{bottom}\" stroke=\"#999\"/>",
        bottom - 20.0,
        row.name,
        LEFT + WIDTH
    );
    let ends =
        |span: &&WorkSpan| [(span.from, f64::from(span.sms)), (span.to, -f64::from(span.sms))];
    let mut changes: Vec<(Nanos, f64)> = row.spans.iter().flat_map(ends).collect();
    changes.sort_by_key(|(at, _)| *at);
    let mut path = format!("M{LEFT:.1} {bottom:.1}");
    let mut held = 0.0;
    for (position, (at, change)) in changes.iter().enumerate() {
        held += change;
        if changes.get(position + 1).is_none_or(|(next, _)| next > at) {
            let _ = write!(path, "H{:.2}V{:.1}", x(*at), y(held));
        }
    }
    let _ = writeln!(
        text,
        "<path d=\"{path}H{}V{bottom:.1}Z\" fill=\"{}\"/>",
        LEFT + WIDTH,
        row.colour
    );
    let mut preemptions: Vec<Nanos> =
        row.spans.iter().filter(|s| s.aborted).map(|s| s.to).collect();
    preemptions.dedup();
    for at in preemptions {
        let _ = writeln!(
            text,
            "<path d=\"M{0:.2} {1}l-4 -7h8z\" fill=\"{PREEMPTED_COLOUR}\">\
             <title>preempted at {2:.3} ms</title></path>",
            x(at),
            bottom - ROW_HEIGHT + 13.0,
            at.as_millis_f64()
        );
    }
}
