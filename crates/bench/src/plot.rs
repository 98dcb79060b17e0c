//! Bar charts as SVG.

use std::fmt::Write as _;

/// Colours that colour-blind readers can tell apart (Okabe and Ito).
pub const COLOURS: [&str; 9] = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999",
    "#000000",
];

/// Bar names in a row of the legend.
const LEGEND_COLUMNS: usize = 6;

/// A group of bars for every label.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Title.
    pub title: String,
    /// The unit.
    pub unit: String,
    /// Names of the groups.
    pub groups: Vec<String>,
    /// Name of each bar of a group, and its value by group.
    pub bars: Vec<(String, Vec<f64>)>,
}

/// Charts one below the other.
pub fn svg(charts: &[Chart]) -> String {
    let (width, height) = (960, 300);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n",
        height * charts.len()
    );
    for (index, chart) in charts.iter().enumerate() {
        let _ = writeln!(text, "<g transform=\"translate(0 {})\">", index * height);
        draw(&mut text, chart, f64::from(width), height as f64);
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

fn draw(text: &mut String, chart: &Chart, width: f64, height: f64) {
    let legend_rows = chart.bars.len().div_ceil(LEGEND_COLUMNS).max(1);
    let (left, top, bottom) = (60.0, 42.0 + 14.0 * legend_rows as f64, height - 30.0);
    let largest = chart.bars.iter().flat_map(|(_, values)| values).copied().fold(1e-9, f64::max);
    let step = round_step(largest);
    let ticks = (largest / step).ceil().max(1.0) as u32;
    let highest = step * f64::from(ticks);
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"18\" font-weight=\"bold\">{} ({})</text>",
        chart.title, chart.unit
    );
    for (index, (name, _)) in chart.bars.iter().enumerate() {
        let x = left + 148.0 * (index % LEGEND_COLUMNS) as f64;
        let y = 26.0 + 14.0 * (index / LEGEND_COLUMNS) as f64;
        let colour = COLOURS[index % COLOURS.len()];
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"{y}\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text \
             x=\"{}\" y=\"{}\">{name}</text>",
            x + 14.0,
            y + 9.0
        );
    }
    for tick in 0..=ticks {
        let value = step * f64::from(tick);
        let y = bottom - (bottom - top) * value / highest;
        let _ = writeln!(
            text,
            "<line x1=\"{left}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#ddd\"/><text x=\"{}\" \
             y=\"{}\" text-anchor=\"end\">{}</text>",
            width - 10.0,
            left - 6.0,
            y + 4.0,
            short(value)
        );
    }
    let group_width = (width - left - 10.0) / chart.groups.len().max(1) as f64;
    let bar_width = group_width * 0.8 / chart.bars.len().max(1) as f64;
    for (group, name) in chart.groups.iter().enumerate() {
        let start = left + group_width * (group as f64 + 0.1);
        for (index, (bar, values)) in chart.bars.iter().enumerate() {
            let value = values.get(group).copied().unwrap_or(0.0).max(0.0);
            let tall = (bottom - top) * value / highest;
            let _ = writeln!(
                text,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{}\">\
                 <title>{bar} {name}: {}</title></rect>",
                start + bar_width * index as f64,
                bottom - tall,
                bar_width * 0.92,
                COLOURS[index % COLOURS.len()],
                short(value)
            );
            if bar_width > 28.0 && value > 0.0 {
                let _ = writeln!(
                    text,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\">{}\
                     </text>",
                    start + bar_width * (index as f64 + 0.46),
                    bottom - tall - 3.0,
                    short(value)
                );
            }
        }
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
            start + group_width * 0.4,
            bottom + 16.0
        );
    }
}

/// Distance of ticks for values up to `largest`: a round number that gives at most five ticks.
fn round_step(largest: f64) -> f64 {
    let power = 10f64.powf((largest / 5.0).log10().floor());
    let enough = |step: &f64| largest / step <= 5.0;
    [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * power).into_iter().find(enough).unwrap_or(largest)
}

fn short(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (largest, step) in [(12.3, 2.5), (166.0, 50.0), (61.1, 20.0), (5.0, 1.0), (0.07, 0.02)]
        {
            assert!((round_step(largest) / step - 1.0).abs() < 1e-9, "{}", round_step(largest));
        }
    }
}
