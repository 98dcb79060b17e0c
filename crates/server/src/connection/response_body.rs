//! Response bodies that know what the client has not taken yet.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::table::{Connection, EndlessResponse, RequestInFlight, Undelivered};

/// A response body; its request is in flight until it is dropped.
pub(crate) struct TrackedBody<B> {
    inner: B,
    // Dropped first: a request is in flight for at least as long as its response is endless.
    _endless: Option<EndlessResponse>,
    request: RequestInFlight,
}

impl<B> TrackedBody<B> {
    pub(crate) fn new(
        inner: B,
        request: RequestInFlight,
        endless: Option<EndlessResponse>,
    ) -> TrackedBody<B> {
        TrackedBody { inner, _endless: endless, request }
    }
}

/// Bytes that are dropped when they are written to the socket.
struct Sending {
    bytes: Bytes,
    _undelivered: Undelivered,
}

impl AsRef<[u8]> for Sending {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Data of HTTP/1 below this size is copied and written at once.
const SMALL: usize = 4096;

/// HTTP/2 keeps data until the client's window has room, where no write stalls. The deadline
/// belongs to the bytes themselves: it ends when the last reference to them is dropped.
fn tracked(connection: &Arc<Connection>, bytes: Bytes) -> Bytes {
    let _undelivered = connection.sending(bytes.len() as u64);
    Bytes::from_owner(Sending { bytes, _undelivered })
}

impl<B: Body<Data = Bytes> + Unpin> Body for TrackedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        let connection = &self.request.0;
        let track = |bytes: Bytes| match bytes.len() < SMALL && !connection.is_http2() {
            true => bytes,
            false => tracked(connection, bytes),
        };
        frame.map_ok(|frame| frame.map_data(track))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
