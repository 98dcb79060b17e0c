//! `atoll top`: the console's page Now in a terminal.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use assembly::{Failure, tokio_runtime};
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal;
use tokio::sync::mpsc;

use crate::server_client::ServerClientArgs;

mod figures;
mod frame_reader;
mod screen;

use figures::{Figures, Minute};
use frame_reader::FrameReader;
use screen::{Direction, View};

/// Pause before the first new attempt to connect; it doubles up to the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Time that the frame of `--once` covers.
const ONE_FRAME_MS: u64 = 1_000;
/// Columns of a frame that is not printed to a terminal.
const PLAIN_WIDTH: u16 = 100;
/// Maximum number of lines of a frame that is printed.
const MAX_LINES: u16 = 1_000;

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Keys: left and right choose the column to sort by, up and down the order; \
                        q ends.

Examples:
  atoll top                                        the server on port 8000
  atoll top --once                                 one frame as text, for scripts and logs
  atoll top --json --interval-ms 1000              a line of JSON a second"
)]
pub(crate) struct TopArgs {
    /// Print one frame and end; needs no terminal
    #[arg(long)]
    pub(crate) once: bool,

    /// Print figures as JSON, one line for each frame
    #[arg(long)]
    pub(crate) json: bool,

    /// Time between two frames
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=10_000))]
    pub(crate) interval_ms: u64,

    #[command(flatten)]
    pub(crate) server: ServerClientArgs,
}

/// Runs the command.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    let runtime = tokio_runtime()?;
    if args.once || args.json {
        return runtime.block_on(print(args));
    }
    if !std::io::stdout().is_terminal() {
        let help = "standard output is not a terminal: use --once or --json";
        return Err(Failure::usage(help));
    }
    // A wrong address or token is said where it can be read.
    let stream = runtime.block_on(Stream::open(args))?;
    let mut terminal = ratatui::try_init().map_err(Failure::failed)?;
    let result = runtime.block_on(show(args, &mut terminal, stream));
    ratatui::restore();
    result
}

/// The live figures of a server.
struct Stream {
    response: reqwest::Response,
    frames: FrameReader,
}

impl Stream {
    async fn open(args: &TopArgs) -> Result<Stream, Failure> {
        // The one frame tells rates: it covers a second.
        let interval_ms = if args.once { ONE_FRAME_MS } else { args.interval_ms };
        let path = format!("/v2/atoll/live?interval_ms={interval_ms}");
        let response = args.server.get(&path, None).await?;
        Ok(Stream { response, frames: FrameReader::default() })
    }

    /// The next figures; `None` when the server ends the stream.
    async fn next(&mut self, args: &TopArgs) -> Result<Option<Figures>, Failure> {
        loop {
            if let Some(content) = self.frames.next_figures().map_err(Failure::failed)? {
                let figures = serde_json::from_slice(&content).map_err(|error| {
                    Failure::failed(format!("{}: unexpected figures: {error}", args.server.url))
                })?;
                return Ok(Some(figures));
            }
            match self.response.chunk().await.map_err(|error| args.server.failed(&error))? {
                Some(chunk) => self.frames.push(&chunk),
                None => return Ok(None),
            }
        }
    }
}

/// Prints frames as text or JSON.
async fn print(args: &TopArgs) -> Result<(), Failure> {
    let mut stream = Stream::open(args).await?;
    let mut minute = Minute::default();
    while let Some(figures) = stream.next(args).await? {
        if figures.are_empty() {
            continue;
        }
        minute.add(figures);
        let text = match args.json {
            true => minute.json().to_string(),
            false => screen::text(&minute, plain_width(), MAX_LINES),
        };
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
            // The reader has seen enough.
            return Ok(());
        }
        if args.once {
            return Ok(());
        }
    }
    Err(Failure::failed(format!("{} ended the stream", args.server.url)))
}

fn plain_width() -> u16 {
    match std::io::stdout().is_terminal() {
        true => terminal::size().map_or(PLAIN_WIDTH, |(width, _)| width),
        false => PLAIN_WIDTH,
    }
}

/// Reads keys on a thread of its own, which ends with the process.
fn keys() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// What a key does to the view; `false` ends the program.
fn press(key: KeyEvent, view: &mut View) -> bool {
    if key.kind == KeyEventKind::Release {
        return true;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Left => view.previous_column(),
        KeyCode::Right => view.next_column(),
        KeyCode::Up => view.direction = Direction::Ascending,
        KeyCode::Down => view.direction = Direction::Descending,
        _ => {}
    }
    true
}

/// What happens next to the screen.
enum Next {
    Figures(Box<Figures>),
    Event(Event),
    Lost(String),
}

async fn show(
    args: &TopArgs,
    terminal: &mut ratatui::DefaultTerminal,
    stream: Stream,
) -> Result<(), Failure> {
    let (mut minute, mut view) = (Minute::default(), View::new(&args.server.url));
    let (mut stream, mut keys) = (Some(stream), keys());
    let mut pause = FIRST_PAUSE;
    loop {
        terminal
            .draw(|frame| screen::draw(&minute, &view, frame.area(), frame.buffer_mut()))
            .map_err(Failure::failed)?;
        match next(args, &mut stream, &mut keys, pause).await {
            None => return Ok(()),
            Some(Next::Figures(figures)) => {
                minute.add(*figures);
                (view.problem, pause) = (None, FIRST_PAUSE);
            }
            Some(Next::Event(Event::Key(key))) if !press(key, &mut view) => return Ok(()),
            // Also a new size: everything is drawn again.
            Some(Next::Event(_)) => {}
            Some(Next::Lost(why)) => {
                (view.problem, stream) = (Some(why), None);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Waits for figures, keys or a broken connection; `None` without keys.
async fn next(
    args: &TopArgs,
    stream: &mut Option<Stream>,
    keys: &mut mpsc::Receiver<Event>,
    pause: Duration,
) -> Option<Next> {
    let figures = async {
        if stream.is_none() {
            tokio::time::sleep(pause).await;
            match Stream::open(args).await {
                Ok(open) => *stream = Some(open),
                Err(failure) => return Next::Lost(failure.message().to_string()),
            }
        }
        // A key that is pressed meanwhile does not lose what was read.
        let ended = || Next::Lost("the server ended the stream".to_string());
        let Some(open) = stream else { return ended() };
        match open.next(args).await {
            Ok(Some(figures)) => Next::Figures(Box::new(figures)),
            Ok(None) => ended(),
            Err(failure) => Next::Lost(failure.message().to_string()),
        }
    };
    tokio::select! {
        next = figures => Some(next),
        event = keys.recv() => event.map(Next::Event),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_and_end() {
        let mut view = View::new("http://host");
        let mut press = |code| press(KeyEvent::new(code, KeyModifiers::NONE), &mut view);
        assert!(press(KeyCode::Right) && press(KeyCode::Up) && press(KeyCode::Char('x')));
        assert!(!press(KeyCode::Char('q')) && !press(KeyCode::Esc));
        assert_eq!((view.column, view.direction), (1, Direction::Ascending));
        let end = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!super::press(end, &mut view));
    }
}
