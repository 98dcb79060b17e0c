//! Flow-control windows: how much clients of HTTP/2 may send before anybody reads it.
//!
//! A client may fill its window without a request that could be counted. All windows together are
//! therefore a part of the budget of memory; connections beyond it get the least that works.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Window of a connection, large enough for many requests at once.
const CONNECTION: u32 = 16 << 20;
const STREAM: u32 = 1 << 20;
/// Maximum size of a frame: an image in one frame is not copied after it is read from the socket.
const FRAME: u32 = 1 << 20;

/// The least: what HTTP/2 begins with.
const LEAST_WINDOW: u32 = (64 << 10) - 1;
const LEAST_FRAME: u32 = 16 << 10;

/// The part of the budget that windows may take: one of so many.
const PART: usize = 16;

/// The windows of all connections of a server.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    used: AtomicUsize,
}

/// The window of one connection.
#[derive(Debug)]
pub(crate) struct Window {
    windows: Arc<Windows>,
    taken: usize,
    /// Bytes of all streams together.
    pub(crate) connection: u32,
    /// Bytes of each stream.
    pub(crate) stream: u32,
    /// Bytes of a frame.
    pub(crate) frame: u32,
}

impl Windows {
    /// The window of a new connection, under a budget of `limit` bytes.
    pub(crate) fn take(self: &Arc<Windows>, limit: usize) -> Window {
        // A frame is read as a whole before it counts.
        let wanted = (CONNECTION + FRAME) as usize;
        let room = |used: usize| used.checked_add(wanted).filter(|used| *used <= limit / PART);
        let windows = self.clone();
        match self.used.fetch_update(Relaxed, Relaxed, room) {
            Ok(_) => {
                let (connection, stream, frame) = (CONNECTION, STREAM, FRAME);
                Window { windows, taken: wanted, connection, stream, frame }
            }
            Err(_) => {
                let (connection, stream, frame) = (LEAST_WINDOW, LEAST_WINDOW, LEAST_FRAME);
                Window { windows, taken: 0, connection, stream, frame }
            }
        }
    }
}

impl Window {
    /// Gives back its part: the connection does not use it.
    pub(crate) fn release(&mut self) {
        self.windows.used.fetch_sub(std::mem::take(&mut self.taken), Relaxed);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_take_no_more_than_their_part_of_the_budget() {
        let limit = 1 << 30;
        let windows = Arc::new(Windows::default());
        let open: Vec<Window> = (0..1000).map(|_| windows.take(limit)).collect();
        let large = |open: &[Window]| open.iter().filter(|w| w.connection == CONNECTION).count();
        let count = large(&open);
        assert!((1..=limit / PART / CONNECTION as usize).contains(&count), "{count}");
        assert!(open.iter().all(|w| w.stream <= w.connection && w.connection >= LEAST_WINDOW));
        drop(open);
        let mut again: Vec<Window> = (0..count).map(|_| windows.take(limit)).collect();
        assert_eq!((large(&again), windows.take(limit).connection), (count, LEAST_WINDOW));
        again[0].release();
        assert_eq!(windows.take(limit).connection, CONNECTION);
        assert_eq!(windows.take(0).connection, LEAST_WINDOW);
    }
}
