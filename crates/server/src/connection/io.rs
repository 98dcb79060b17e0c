//! A stream that reports what arrives and gives up when the client takes nothing.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::read_ahead::ReadAhead;
use super::table::Connection;

/// A stream over a socket.
pub(crate) trait OverSocket {
    fn socket(&self) -> BorrowedFd<'_>;
}

impl OverSocket for TcpStream {
    fn socket(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl<S: OverSocket> OverSocket for ReadAhead<S> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.get_ref().socket()
    }
}

impl<S: OverSocket> OverSocket for tokio_rustls::server::TlsStream<S> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.get_ref().0.socket()
    }
}

/// A stream with the limits of its connection.
pub(crate) struct GuardedIo<S> {
    stream: S,
    connection: Arc<Connection>,
    /// Runs while the client takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> GuardedIo<S> {
    pub(crate) fn new(stream: S, connection: Arc<Connection>) -> GuardedIo<S> {
        GuardedIo { stream, connection, stalled: None }
    }

    /// Passes `written` on, or the error of a client that took nothing for too long.
    fn limit<T>(&mut self, context: &mut Context<'_>, written: Poll<Result<T>>) -> Poll<Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.connection.limits().write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client takes no data")))
    }
}

impl<S: AsyncRead + OverSocket + Unpin> AsyncRead for GuardedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_pending() && self.connection.is_closing() {
            // The runtime learns of what has arrived later than the socket.
            let unread = rustix::io::ioctl_fionread(self.stream.socket());
            self.connection.note_unread(unread.is_ok_and(|bytes| bytes > 0));
        }
        ready!(read)?;
        self.connection.received(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuardedIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, data);
        self.limit(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, data);
        self.limit(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(context, closed)
    }
}
