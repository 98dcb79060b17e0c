//! Reads ahead of TLS, which asks its stream for 4 KiB at a time: a large body would cost a system
//! call for each of them.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of one read ahead: two records of TLS.
const SIZE: usize = 32 << 10;

/// A stream that reads ahead while more arrives than is asked for. An idle connection holds no
/// buffer.
pub(crate) struct ReadAhead<S> {
    stream: S,
    /// What has been read ahead; empty while less arrives.
    ahead: Vec<u8>,
    /// Bytes of `ahead` that have been taken.
    taken: usize,
    /// Whether the last read got all it asked for.
    more: bool,
}

impl<S> ReadAhead<S> {
    pub(crate) fn new(stream: S) -> ReadAhead<S> {
        ReadAhead { stream, ahead: Vec::new(), taken: 0, more: false }
    }

    pub(crate) fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Moves what has been read ahead, as far as it fits.
    fn take(&mut self, buffer: &mut ReadBuf<'_>) {
        let end = self.ahead.len().min(self.taken + buffer.remaining());
        buffer.put_slice(&self.ahead[self.taken..end]);
        self.taken = end;
        if self.taken == self.ahead.len() {
            self.ahead.clear();
            self.taken = 0;
            if !self.more {
                self.ahead = Vec::new();
            }
        }
    }
}

impl<S: AsyncRead + Unpin> ReadAhead<S> {
    /// Fills `ahead`, which is empty; without memory for it, nothing is read ahead.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<bool>> {
        if self.ahead.try_reserve_exact(SIZE).is_err() {
            return Poll::Ready(Ok(false));
        }
        self.ahead.resize(SIZE, 0);
        let mut whole = ReadBuf::new(&mut self.ahead);
        let read = Pin::new(&mut self.stream).poll_read(context, &mut whole);
        let filled = whole.filled().len();
        self.ahead.truncate(filled);
        if filled == 0 {
            // A connection that waits holds no buffer.
            self.ahead = Vec::new();
        }
        ready!(read)?;
        self.more = filled == SIZE;
        Poll::Ready(Ok(true))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = &mut *self;
        let filled = this.ahead.is_empty() && this.more && ready!(this.poll_fill(context))?;
        if filled || !this.ahead.is_empty() {
            this.take(buffer);
            return Poll::Ready(Ok(()));
        }
        ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        this.more = buffer.remaining() == 0;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use base::Random;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Random writes and random reads: the same bytes in the same order, the end included.
    #[tokio::test]
    async fn passes_on_what_arrives() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let data: Vec<u8> = (0..300_000).map(|_| random.below(256) as u8).collect();
            let (mut near, far) = tokio::io::duplex(1 + random.below(100_000) as usize);
            let sent = data.clone();
            let writer = tokio::spawn(async move {
                let mut rest = &sent[..];
                while !rest.is_empty() {
                    let part = (1 + random.below(70_000) as usize).min(rest.len());
                    near.write_all(&rest[..part]).await.unwrap();
                    rest = &rest[part..];
                }
            });
            let (mut random, mut reader) = (Random::new(seed + 100), ReadAhead::new(far));
            let mut received = Vec::new();
            loop {
                let mut part = vec![0; 1 + random.below(6_000) as usize];
                match reader.read(&mut part).await.unwrap() {
                    0 => break,
                    count => received.extend_from_slice(&part[..count]),
                }
            }
            writer.await.unwrap();
            assert!(received == data, "seed {seed}");
        }
    }

    #[tokio::test]
    async fn idle_connection_holds_no_buffer() {
        let (mut near, far) = tokio::io::duplex(1 << 20);
        let mut reader = ReadAhead::new(far);
        // The second number ends with a full read ahead.
        for count in [100_000, 4_000 + 2 * SIZE, 4_000] {
            near.write_all(&vec![7; count]).await.unwrap();
            let mut part = vec![0; count];
            for part in part.chunks_mut(4_000) {
                reader.read_exact(part).await.unwrap();
            }
            let wait = std::time::Duration::from_millis(20);
            let empty = tokio::time::timeout(wait, reader.read_u8());
            assert!(empty.await.is_err(), "{count}");
            assert_eq!(reader.ahead.capacity(), 0, "{count}");
        }
    }
}
