//! Request bodies read under a limit, and the compression of both directions.

use std::collections::TryReserveError;
use std::io::{Read, Write};

use api::error::ApiResult;
use api::fallible::{FallibleBytes, out_of_memory};
use api::{ApiError, ErrorKind};
use axum::BoxError;
use bytes::Bytes;
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http::HeaderMap;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use model::{MemoryError, Reservation};

use crate::body_buffers::BodyBuffer;
use crate::connection::BodyError;
use crate::heavy_work::heavy;
use crate::server::AppState;

/// What a compressed byte may become at most.
pub(crate) const MAX_EXPANSION: usize = 1032;

/// Bytes that are decompressed at once.
const DECOMPRESSED_STEP: usize = 64 << 10;

/// Bytes that a body reserves first, unless it is shorter.
const MIN_STEP: usize = 64 << 10;

/// A compression that clients of the protocol use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    Deflate,
}

impl Coding {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Coding> {
        match name.trim() {
            name if name.eq_ignore_ascii_case("gzip") => Some(Coding::Gzip),
            name if name.eq_ignore_ascii_case("deflate") => Some(Coding::Deflate),
            _ => None,
        }
    }
}

/// Reads a whole body of at most `limit` bytes, before and after decompression. The reservation of
/// its memory must live as long as the body.
pub(crate) async fn read<B>(
    app: &AppState,
    headers: &HeaderMap,
    body: B,
    limit: usize,
) -> ApiResult<(Bytes, Reservation)>
where
    B: hyper::body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let claimed = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if claimed.is_some_and(|claimed: u64| claimed > limit as u64) {
        return Err(too_large(limit));
    }
    let claimed = claimed.map_or(0, |claimed| claimed as usize);
    let (bytes, mut memory) =
        gather(app, Limited::new(body, limit), claimed).await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                return too_large(limit);
            }
            if let Some(refused) = error.downcast_ref::<TryReserveError>() {
                return out_of_memory(refused.clone());
            }
            match error.downcast_ref::<MemoryError>() {
                Some(refused) => ApiError::from(*refused),
                None => ended_early(&*error),
            }
        })?;
    match request_coding(headers)? {
        None => Ok((bytes, memory)),
        Some(coding) => {
            let length = bytes.len().saturating_mul(MAX_EXPANSION);
            let work = move || Ok((decompress(&bytes, coding, limit, &mut memory)?, memory));
            heavy(length, work).await
        }
    }
}

/// Reserves memory for a body of which `received` bytes arrived. What a client only claims to send
/// is not reserved; a body that grows is reserved in steps, as its buffer grows.
pub(crate) fn reserve_received(
    memory: &mut Reservation,
    received: usize,
    claimed: usize,
) -> Result<(), MemoryError> {
    if received <= memory.bytes() {
        return Ok(());
    }
    let ahead = received.saturating_mul(2).max(MIN_STEP).min(claimed.max(received));
    memory.grow_to(ahead)
}

/// Collects a body in a reused buffer; a body of one frame is not copied.
async fn gather<B>(
    app: &AppState,
    body: B,
    claimed: usize,
) -> Result<(Bytes, Reservation), BoxError>
where
    B: hyper::body::Body<Data = Bytes, Error = BoxError>,
{
    let mut body = std::pin::pin!(body);
    let (mut memory, mut received) = (app.bodies.memory.empty(), 0);
    let (mut first, mut all): (Option<Bytes>, Option<BodyBuffer>) = (None, None);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        received += data.len();
        reserve_received(&mut memory, received, claimed)?;
        match (&mut first, &mut all) {
            (_, Some(all)) => all.extend(&data)?,
            (None, None) => first = Some(data),
            (Some(first), None) => {
                let mut buffer = app.bodies.buffers.take(claimed.max(first.len() + data.len()));
                buffer.extend(first)?;
                buffer.extend(&data)?;
                all = Some(buffer);
            }
        }
    }
    Ok((all.map(BodyBuffer::freeze).or(first).unwrap_or_default(), memory))
}

/// The error of a body whose client is late or gone, wherever it is in the chain of causes.
pub(super) fn ended_early(error: &(dyn std::error::Error + 'static)) -> ApiError {
    let mut cause = Some(error);
    while let Some(error) = cause {
        match error.downcast_ref::<BodyError>() {
            Some(BodyError::Timeout) => {
                return ApiError::new(ErrorKind::RequestTimeout, BodyError::Timeout.to_string());
            }
            Some(BodyError::Draining) => return ApiError::shutting_down(),
            _ => cause = error.source(),
        }
    }
    ApiError::new(ErrorKind::Cancelled, "the body ended early")
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(ErrorKind::TooLarge, format!("the body exceeds the limit of {limit} bytes"))
}

fn request_coding(headers: &HeaderMap) -> ApiResult<Option<Coding>> {
    let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(None) };
    match value.to_str().map(str::trim) {
        Ok("" | "identity") => Ok(None),
        Ok(name) => Coding::parse(name).map(Some).ok_or_else(|| {
            ApiError::invalid(format!("content-encoding '{name}' is not gzip or deflate"))
        }),
        Err(_) => Err(ApiError::invalid("content-encoding is not gzip or deflate")),
    }
}

/// Decompresses `bytes`. Every step is reserved before memory for it is allocated.
pub(crate) fn decompress(
    bytes: &[u8],
    coding: Coding,
    limit: usize,
    memory: &mut Reservation,
) -> ApiResult<Bytes> {
    match coding {
        Coding::Gzip => read_plain(GzDecoder::new(bytes), coding, limit, memory),
        Coding::Deflate => read_plain(ZlibDecoder::new(bytes), coding, limit, memory),
    }
}

fn read_plain(
    mut source: impl Read,
    coding: Coding,
    limit: usize,
    memory: &mut Reservation,
) -> ApiResult<Bytes> {
    let mut plain: Vec<u8> = Vec::new();
    let mut step = vec![0; DECOMPRESSED_STEP];
    loop {
        let length = source.read(&mut step).map_err(|error| {
            ApiError::invalid(format!("the body is not valid {}: {error}", coding.as_str()))
        })?;
        if length == 0 {
            return Ok(plain.into());
        }
        if plain.len() + length > limit {
            return Err(too_large(limit));
        }
        if plain.capacity() - plain.len() < length {
            // Twice as much as before, or as much as is allowed.
            let more = plain.len().max(DECOMPRESSED_STEP).min(limit - plain.len());
            memory.grow(more)?;
            let refused = |_| ApiError::from(memory.memory().refusal(more, 0));
            plain.try_reserve_exact(more).map_err(refused)?;
        }
        plain.extend_from_slice(&step[..length]);
    }
}

/// The compression the client prefers for the response.
pub(crate) fn response_coding(headers: &HeaderMap) -> Option<Coding> {
    let accepted = headers.get(ACCEPT_ENCODING)?.to_str().ok()?;
    let mut best: Option<(Coding, f32)> = None;
    for item in accepted.split(',') {
        let (name, weight) = item.split_once(';').unwrap_or((item, ""));
        let weight = weight.trim().strip_prefix("q=").map_or(1.0, |q| q.parse().unwrap_or(0.0));
        if let Some(coding) = Coding::parse(name)
            && weight > best.map_or(0.0, |(_, weight)| weight)
        {
            best = Some((coding, weight));
        }
    }
    best.map(|(coding, _)| coding)
}

/// Compresses `parts` into one.
pub(crate) fn compress(parts: &[Bytes], coding: Coding) -> ApiResult<Vec<u8>> {
    let (level, packed) = (Compression::fast(), FallibleBytes::default());
    let compressed = match coding {
        Coding::Gzip => {
            let mut encoder = GzEncoder::new(packed, level);
            let written = parts.iter().try_for_each(|part| encoder.write_all(part));
            written.and_then(|()| encoder.finish())
        }
        Coding::Deflate => {
            let mut encoder = ZlibEncoder::new(packed, level);
            let written = parts.iter().try_for_each(|part| encoder.write_all(part));
            written.and_then(|()| encoder.finish())
        }
    };
    // Only memory can be short.
    compressed.map(|packed| packed.0).map_err(|error| {
        ApiError::unavailable(format!("cannot compress the response: {error}")).retry_after(1)
    })
}

#[cfg(test)]
mod tests {
    use model::HostMemory;

    use super::*;

    fn accepted(value: &'static str) -> Option<Coding> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, value.parse().unwrap());
        response_coding(&headers)
    }

    #[test]
    fn selects_the_preferred_coding() {
        assert_eq!(accepted("gzip, deflate"), Some(Coding::Gzip));
        assert_eq!(accepted("gzip;q=0.5, deflate"), Some(Coding::Deflate));
        assert_eq!(accepted("gzip;q=0"), None);
        assert_eq!(accepted("br, identity"), None);
    }

    #[test]
    fn decompression_stops_at_the_limit() {
        let zeros = Bytes::from(vec![0; 1 << 20]);
        for coding in [Coding::Gzip, Coding::Deflate] {
            let packed = compress(std::slice::from_ref(&zeros), coding).unwrap();
            let mut memory = HostMemory::leaked(4 << 20).empty();
            assert_eq!(decompress(&packed, coding, 1 << 20, &mut memory).unwrap(), zeros);
            assert_eq!(memory.bytes(), 1 << 20);
            let error = decompress(&packed, coding, 1000, &mut memory).unwrap_err();
            assert_eq!(error.kind, ErrorKind::TooLarge);
            // A budget that does not hold it stops it earlier.
            let small = HostMemory::leaked(200_000);
            let error = decompress(&packed, coding, 1 << 20, &mut small.empty()).unwrap_err();
            assert_eq!((error.kind, small.used()), (ErrorKind::TooLarge, 0));
        }
        let mut memory = HostMemory::process().empty();
        assert!(decompress(b"not gzip", Coding::Gzip, 100, &mut memory).is_err());
    }

    #[test]
    fn what_is_only_claimed_is_not_reserved() {
        let budget = HostMemory::leaked(1 << 30);
        let mut memory = budget.empty();
        let mut after = |received, claimed| {
            reserve_received(&mut memory, received, claimed).unwrap();
            memory.bytes()
        };
        assert_eq!(after(10, 1 << 29), 64 << 10);
        assert_eq!(after(60_000, 1 << 29), 64 << 10);
        assert_eq!(after(70_000, 1 << 29), 140_000);
        assert_eq!(after(200_000, 300_000), 300_000);
        assert_eq!(after(300_000, 300_000), 300_000);
        let mut short = budget.empty();
        reserve_received(&mut short, 100, 100).unwrap();
        assert_eq!(short.bytes(), 100);
    }
}
