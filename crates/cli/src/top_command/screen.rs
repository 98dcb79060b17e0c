//! What `atoll top` draws.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use base::Bytes;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Table, Widget};

use super::figures::{BackendRow, DeviceRow, Minute, ModelRow};

/// Columns of a bar.
const BAR: usize = 20;
/// Heights of a point of a history, lowest first.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Seconds of the history in the table.
const HISTORY: usize = 16;
/// Lines of a device, with its memory by model.
const DEVICE_LINES: u16 = 4;
/// Models that the memory of a device is listed by.
const MEMORY_MODELS: usize = 8;

/// Columns that a name has at least.
const MIN_NAME: u16 = 12;
/// Indices of columns, the least important first: rows, wait, failures, SLO, queue, p50, requests,
/// p99.
const LEAST_FIRST: [usize; 8] = [5, 4, 7, 6, 3, 1, 0, 2];

/// Lines that are not for devices: totals, some models, keys.
const TABLE_LINES: usize = 10;

const REAL_TIME: Color = Color::LightBlue;
const BEST_EFFORT: Color = Color::Yellow;

/// An order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Ascending,
    Descending,
}

/// How the user wants to see it.
#[derive(Clone, Debug)]
pub(super) struct View {
    url: String,
    /// Index of the column that the table is sorted by.
    pub(super) column: usize,
    pub(super) direction: Direction,
    /// Why there are no new figures.
    pub(super) problem: Option<String>,
}

impl View {
    pub(super) fn new(url: &str) -> View {
        View { url: url.to_string(), column: 0, direction: Direction::Descending, problem: None }
    }

    pub(super) fn next_column(&mut self) {
        self.column = (self.column + 1) % COLUMNS.len();
    }

    pub(super) fn previous_column(&mut self) {
        self.column = (self.column + COLUMNS.len() - 1) % COLUMNS.len();
    }
}

/// A column of the table: title, width, text, and the number to sort by.
struct Column {
    title: &'static str,
    width: u16,
    text: fn(&ModelRow) -> String,
    sort: fn(&ModelRow) -> f64,
}

const COLUMNS: [Column; 8] = [
    Column { title: "REQ/S", width: 8, text: |r| number(r.rate), sort: |r| r.rate },
    Column { title: "P50", width: 8, text: |r| time(r.p50_us), sort: |r| r.p50_us.unwrap_or(-1.0) },
    Column { title: "P99", width: 8, text: |r| time(r.p99_us), sort: |r| r.p99_us.unwrap_or(-1.0) },
    Column {
        title: "QUEUE",
        width: 6,
        text: |r| r.pending.to_string(),
        sort: |r| r.pending as f64,
    },
    Column {
        title: "WAIT",
        width: 8,
        text: |r| time(r.wait_p99_us),
        sort: |r| r.wait_p99_us.unwrap_or(-1.0),
    },
    Column {
        title: "ROWS",
        width: 5,
        text: |r| r.mean_rows.map_or_else(absent, |rows| format!("{rows:.1}")),
        sort: |r| r.mean_rows.unwrap_or(-1.0),
    },
    Column {
        title: "SLO",
        width: 7,
        text: |r| r.slo_kept.map_or_else(absent, kept),
        sort: |r| r.slo_kept.unwrap_or(2.0),
    },
    Column {
        title: "FAIL",
        width: 6,
        text: |r| number(r.failed as f64),
        sort: |r| r.failed as f64,
    },
];

fn absent() -> String {
    "-".to_string()
}

fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 99.95 { "100 %".to_string() } else { format!("{percent:.1} %") }
}

/// A share of requests that kept their SLO, rounded down: 100 % are all of them.
fn kept(share: f64) -> String {
    let tenths = (share * 1000.0).floor();
    if tenths >= 1000.0 { "100 %".to_string() } else { format!("{:.1} %", tenths / 10.0) }
}

/// A number in at most six characters.
fn number(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.1}M", value / 1e6),
        value if value >= 1e4 => format!("{:.1}k", value / 1e3),
        value if value >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        value => format!("{value:.1}"),
    }
}

fn time(micros: Option<f64>) -> String {
    match micros {
        None => absent(),
        Some(us) if us >= 1e6 => format!("{:.2} s", us / 1e6),
        Some(us) if us >= 1e5 => format!("{:.0} ms", us / 1e3),
        Some(us) if us >= 1e3 => format!("{:.1} ms", us / 1e3),
        Some(us) => format!("{us:.0} us"),
    }
}

fn class_color(class: &str) -> Color {
    if class == "rt" { REAL_TIME } else { BEST_EFFORT }
}

/// The models in the order of the view. Equal ones keep their order, which is by name.
fn sorted(minute: &Minute, view: &View) -> Vec<ModelRow> {
    let mut rows = minute.models();
    rows.sort_by(|a, b| (&a.name, &b.class).cmp(&(&b.name, &a.class)));
    let key = COLUMNS[view.column].sort;
    rows.sort_by(|a, b| match view.direction {
        Direction::Ascending => key(a).total_cmp(&key(b)),
        Direction::Descending => key(b).total_cmp(&key(a)),
    });
    rows
}

/// Requests of each second as a line of blocks.
fn history(row: &ModelRow) -> String {
    let last = &row.history[row.history.len().saturating_sub(HISTORY)..];
    let most = last.iter().copied().max().unwrap_or(0).max(1);
    let block = |count: &u64| match count {
        0 => ' ',
        count => HEIGHTS[((count * 8).div_ceil(most) as usize).clamp(1, 8) - 1],
    };
    last.iter().map(block).collect()
}

fn head(minute: &Minute, view: &View) -> Vec<Line<'static>> {
    let models = minute.models();
    let rate = |class: &str| -> f64 {
        // The sum of no rates would be a negative zero.
        models.iter().filter(|row| row.class == class).fold(0.0, |sum, row| sum + row.rate)
    };
    let worst = |class: &str| {
        let times = models.iter().filter(|row| row.class == class).filter_map(|row| row.p99_us);
        time(times.reduce(f64::max))
    };
    let class = |name: &'static str, class: &str, color| {
        let figures = format!(" {}/s, p99 {}   ", number(rate(class)), worst(class));
        [Span::styled(name, Style::new().fg(color)), Span::raw(figures)]
    };
    let mut totals = class("real time", "rt", REAL_TIME).to_vec();
    totals.extend(class("best effort", "be", BEST_EFFORT));
    let title = Span::styled("atoll top", Style::new().add_modifier(Modifier::BOLD));
    let state = match &view.problem {
        None => Span::raw(format!("  {}", view.url)),
        Some(why) => Span::styled(format!("  {why}"), Style::new().fg(Color::LightRed)),
    };
    vec![Line::from(vec![title, state]), Line::from(totals)]
}

fn bar(busy: [f64; 2]) -> Vec<Span<'static>> {
    let over = (busy[0] + busy[1]).max(1.0);
    let cells = busy.map(|share| (share / over * BAR as f64).round() as usize);
    let rest = BAR.saturating_sub(cells[0] + cells[1]);
    vec![
        Span::styled("#".repeat(cells[0]), Style::new().fg(REAL_TIME)),
        Span::styled(
            "=".repeat(cells[1].min(BAR - cells[0].min(BAR))),
            Style::new().fg(BEST_EFFORT),
        ),
        Span::styled(".".repeat(rest), Style::new().fg(Color::DarkGray)),
    ]
}

/// The models whose weights are on the device of this index, the largest first.
fn memory(models: &[ModelRow], device: usize) -> Option<Line<'static>> {
    // By name, because a model with requests of both classes has two rows.
    let sizes: BTreeMap<&str, u64> = models
        .iter()
        .filter_map(|row| {
            let bytes = row.resident.iter().filter(|(at, _)| *at == device).map(|(_, size)| size);
            Some((row.name.as_str(), bytes.sum())).filter(|(_, bytes)| *bytes > 0)
        })
        .collect();
    let mut sizes: Vec<(&str, u64)> = sizes.into_iter().collect();
    sizes.sort_by_key(|(_, bytes)| Reverse(*bytes));
    let more = sizes.len().saturating_sub(MEMORY_MODELS);
    let mut texts: Vec<String> = sizes
        .iter()
        .take(MEMORY_MODELS)
        .map(|(name, size)| format!("{name} {}", Bytes(*size)))
        .collect();
    if more > 0 {
        texts.push(format!("{more} more"));
    }
    (!texts.is_empty()).then(|| Line::from(format!("  memory: {}", texts.join(", "))))
}

fn device(row: &DeviceRow, memory: Option<Line<'static>>) -> Vec<Line<'static>> {
    let figures = &row.figures;
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut first = vec![Span::styled(figures.name.clone(), bold)];
    match &figures.fault {
        Some(fault) => {
            first.push(Span::styled(format!("  fault: {fault}"), Style::new().fg(Color::LightRed)));
        }
        None => first.push(Span::raw(format!("  {}", figures.description))),
    }
    let mut second = vec![Span::raw("  [")];
    second.extend(bar(row.busy));
    second.push(Span::raw(format!(
        "] {} real time, {} best effort",
        percent(row.busy[0]),
        percent(row.busy[1])
    )));
    let mut third = format!(
        "  {} preemptions/s, leaving p99 {}, weights {}",
        number(row.preemption_rate),
        time(row.leaving_p99_us),
        Bytes(figures.resident_bytes)
    );
    if figures.budget_bytes > 0 {
        third += &format!(" of {}", Bytes(figures.budget_bytes));
    }
    if let Some(power) = figures.power_milliwatts {
        third += &format!(", {} W", power / 1000);
        if let Some(limit) = figures.power_limit_milliwatts {
            third += &format!(" of {} W", limit / 1000);
        }
    }
    let lines = [Line::from(first), Line::from(second), Line::from(third)];
    lines.into_iter().chain(memory).collect()
}

fn backend(row: &BackendRow) -> Line<'static> {
    let figures = &row.figures;
    let color = if figures.state == "serving" { Color::LightGreen } else { Color::LightRed };
    let device = figures.device.as_deref().unwrap_or_default();
    Line::from(vec![
        Span::styled(figures.name.clone(), Style::new().add_modifier(Modifier::BOLD)),
        Span::styled(format!("  {}", figures.state), Style::new().fg(color)),
        Span::raw(format!(
            "  {}/s, p99 {}, {} in flight, {} failed  {device}",
            number(row.rate),
            time(row.p99_us),
            figures.in_flight,
            row.failed
        )),
    ])
}

/// Columns that fit beside a name: on a narrow screen those that matter least are left out, never
/// the one that the table is sorted by.
fn fitting(view: &View, width: u16) -> Vec<usize> {
    let mut shown: Vec<usize> = (0..COLUMNS.len()).collect();
    let taken = |shown: &[usize]| shown.iter().map(|at| COLUMNS[*at].width + 1).sum::<u16>() + 3;
    for least in LEAST_FIRST.into_iter().filter(|at| *at != view.column) {
        if taken(&shown) + MIN_NAME > width {
            shown.retain(|at| *at != least);
        }
    }
    shown
}

fn table(minute: &Minute, view: &View, width: u16) -> Table<'static> {
    let shown = fitting(view, width);
    let fixed: u16 = COLUMNS.iter().map(|column| column.width + 1).sum::<u16>() + 3;
    let with_history = width >= fixed + 14 + HISTORY as u16;
    let title = |index: &usize| {
        let mark = match (*index == view.column, view.direction) {
            (false, _) => "",
            (true, Direction::Descending) => "v",
            (true, Direction::Ascending) => "^",
        };
        Cell::from(Line::from(format!("{}{mark}", COLUMNS[*index].title)).right_aligned())
    };
    let mut titles = vec![Cell::from("MODEL"), Cell::from("CL")];
    titles.extend(shown.iter().map(title));
    let rows: Vec<Row<'static>> = sorted(minute, view)
        .iter()
        .map(|row| {
            let class = Span::styled(row.class.clone(), Style::new().fg(class_color(&row.class)));
            let mut cells = vec![Cell::from(row.name.clone()), Cell::from(class)];
            let text =
                |at: &usize| Cell::from(Line::from((COLUMNS[*at].text)(row)).right_aligned());
            cells.extend(shown.iter().map(text));
            if with_history {
                cells.push(Cell::from(history(row)));
            }
            Row::new(cells)
        })
        .collect();
    let mut widths = vec![Constraint::Fill(1), Constraint::Length(2)];
    widths.extend(shown.iter().map(|at| Constraint::Length(COLUMNS[*at].width)));
    if with_history {
        titles.push(Cell::from("REQUESTS"));
        widths.push(Constraint::Length(HISTORY as u16));
    }
    let style = Style::new().add_modifier(Modifier::REVERSED);
    Table::new(rows, widths).header(Row::new(titles).style(style)).column_spacing(1)
}

/// Draws everything; what does not fit is cut off, models last.
pub(super) fn draw(minute: &Minute, view: &View, area: Rect, buffer: &mut Buffer) {
    let devices = minute.devices();
    // The table keeps its title and some lines.
    let room = area.height.saturating_sub(TABLE_LINES as u16);
    let most = (room / DEVICE_LINES).max(1) as usize;
    let shown = &devices[..devices.len().min(most)];
    let mut above = head(minute, view);
    let models = minute.models();
    let lines = |(at, row)| device(row, memory(&models, at));
    above.extend(shown.iter().enumerate().flat_map(lines));
    if shown.len() < devices.len() {
        above.push(Line::from(format!("and {} more devices", devices.len() - shown.len())));
    }
    let backends = minute.backends();
    let shown = &backends[..backends.len().min((room as usize).max(1))];
    above.extend(shown.iter().map(backend));
    if shown.len() < backends.len() {
        above.push(Line::from(format!("and {} more backends", backends.len() - shown.len())));
    }
    let below = Line::from("left/right: sort by  up/down: order  q: quit")
        .style(Style::new().fg(Color::DarkGray));
    let [top, gap, middle, bottom] = Layout::vertical([
        Constraint::Length(above.len() as u16),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    let _ = gap;
    for (line, y) in above.into_iter().zip(top.y..top.bottom()) {
        line.render(Rect { y, height: 1, ..top }, buffer);
    }
    Widget::render(table(minute, view, area.width), middle, buffer);
    below.render(bottom, buffer);
}

/// The screen as plain text, as high as it needs to be up to `max_lines`.
pub(super) fn text(minute: &Minute, width: u16, max_lines: u16) -> String {
    let view = View { url: "last second".to_string(), ..View::new("") };
    let devices = minute.devices().len() * DEVICE_LINES as usize;
    let lines = devices + minute.backends().len() + minute.models().len();
    let height = u16::try_from(lines + TABLE_LINES + 4).unwrap_or(max_lines).min(max_lines);
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    draw(minute, &view, area, &mut buffer);
    // The last line has the keys.
    let lines = (0..height.saturating_sub(1)).map(|y| {
        let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_string()
    });
    lines.collect::<Vec<_>>().join("\n").trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::figures::tests::{example, frontend_example};
    use super::*;

    fn minute() -> Minute {
        let mut minute = Minute::default();
        (0..8).for_each(|_| minute.add(example()));
        minute
    }

    /// The lines of a screen.
    fn drawn(minute: &Minute, view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal
            .draw(|frame| draw(minute, view, frame.area(), frame.buffer_mut()))
            .expect("it draws");
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_string()).collect()
    }

    #[test]
    fn everything_fits_into_80_by_24() {
        let lines = drawn(&minute(), &View::new("http://host:8000"), 80, 24);
        let screen = lines.join("\n");
        for text in [
            "atoll top  http://host:8000",
            "real time 100/s, p99 4.3 ms",
            "cpu  CPU with 2 threads",
            "20.0 % real time, 40.0 % best effort",
            "20 preemptions/s",
            "70 W of 700 W",
            "REQ/Sv",
            "70.0 %",
            "memory: resnet 2.0 MiB, bert 1.0 MiB",
            "WAIT",
            "q: quit",
        ] {
            assert!(screen.contains(text), "{text} is missing:\n{screen}");
        }
        let resnet = lines.iter().find(|line| line.starts_with("resnet")).expect("a line");
        let cells: Vec<&str> = resnet.split_whitespace().collect();
        let expected = "resnet rt 100 1.1 ms 4.3 ms 3 535 us 1.8 70.0 % 40";
        assert_eq!(cells.join(" "), expected);
    }

    #[test]
    fn only_all_are_a_hundred_percent() {
        assert_eq!([1.0, 0.9999, 0.7, 0.0].map(kept), ["100 %", "99.9 %", "70.0 %", "0.0 %"]);
    }

    #[test]
    fn the_backends_of_a_frontend_have_a_line_each() {
        let mut minute = Minute::default();
        (0..8).for_each(|_| minute.add(frontend_example()));
        let lines = drawn(&minute, &View::new("http://host:8000"), 80, 24);
        let line = |text: &str| lines.iter().any(|line| line.starts_with(text));
        assert!(line("b1  serving  80/s, p99 1.1 ms, 2 in flight, 8 failed"), "{lines:?}");
        assert!(line("b2  ejected") && line("resnet"), "{lines:?}");
        assert!(text(&minute, 100, 1_000).contains("b2  ejected"));
    }

    #[test]
    fn rows_are_sorted_by_the_chosen_column() {
        let first = |view: &View| {
            let lines = drawn(&minute(), view, 80, 24);
            let head = lines.iter().position(|line| line.starts_with("MODEL")).expect("a table");
            lines[head + 1].split_whitespace().next().map(str::to_string)
        };
        let mut view = View::new("");
        assert_eq!(first(&view).as_deref(), Some("resnet"));
        view.direction = Direction::Ascending;
        assert_eq!(first(&view).as_deref(), Some("unused"));
        view = View { column: 2, ..View::new("") };
        assert_eq!(first(&view).as_deref(), Some("bert"));
        view.previous_column();
        assert_eq!(view.column, 1);
        (0..COLUMNS.len()).for_each(|_| view.next_column());
        assert_eq!(view.column, 1);
    }

    #[test]
    fn small_and_empty_screens_do_not_fail() {
        for (width, height) in [(1, 1), (20, 5), (80, 24), (200, 60)] {
            drawn(&minute(), &View::new("http://host"), width, height);
            drawn(&Minute::default(), &View::new("http://host"), width, height);
        }
        let lost = View { problem: Some("no connection".to_string()), ..View::new("") };
        assert!(drawn(&minute(), &lost, 80, 24)[0].contains("no connection"));
        // A wide screen shows the requests of each second, too.
        assert!(drawn(&minute(), &lost, 120, 24).join("\n").contains("█"));
    }

    #[test]
    fn a_narrow_screen_keeps_names_and_the_sorted_column() {
        let view = View { column: 5, ..View::new("") };
        let lines = drawn(&minute(), &view, 44, 24);
        let head = lines.iter().find(|line| line.starts_with("MODEL")).expect("a table");
        assert!(head.contains("P99") && head.contains("ROWSv") && !head.contains("FAIL"), "{head}");
        let row = lines.iter().find(|line| line.starts_with("resnet")).expect("a row");
        assert!(row.contains("4.3 ms") && row.contains("1.8"), "{row}");
        // Nothing was sent: no rate is negative.
        assert!(drawn(&Minute::default(), &view, 80, 24)[1].starts_with("real time 0/s"));
    }

    #[test]
    fn a_frame_of_text_has_no_empty_end() {
        let text = text(&minute(), 100, 1_000);
        assert!(text.contains("resnet") && text.contains("unused") && !text.contains("quit"));
        assert!(!text.ends_with('\n'));
    }
}
