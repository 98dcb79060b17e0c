//! Request bodies read under a limit, and the compression of both directions.

use std::io::{Read, Write};

use api::error::ApiResult;
use api::{ApiError, ErrorKind};
use axum::BoxError;
use bytes::Bytes;
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http::HeaderMap;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::body_buffers::BodyBuffer;
use crate::connection::BodyError;
use crate::server::AppState;

/// Bodies above this size are processed off the threads that serve connections.
pub(crate) const LARGE_BYTES: usize = 1 << 20;

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

    fn parse(name: &str) -> Option<Coding> {
        match name.trim() {
            name if name.eq_ignore_ascii_case("gzip") => Some(Coding::Gzip),
            name if name.eq_ignore_ascii_case("deflate") => Some(Coding::Deflate),
            _ => None,
        }
    }
}

/// Reads a whole body of at most `limit` bytes, before and after decompression.
pub(crate) async fn read<B>(
    app: &AppState,
    headers: &HeaderMap,
    body: B,
    limit: usize,
) -> ApiResult<Bytes>
where
    B: hyper::body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let claimed = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if claimed.is_some_and(|claimed: u64| claimed > limit as u64) {
        return Err(too_large(limit));
    }
    let claimed = claimed.map_or(0, |claimed| claimed as usize);
    let bytes = gather(app, Limited::new(body, limit), claimed).await.map_err(|error| {
        match error.is::<LengthLimitError>() {
            true => too_large(limit),
            false => ended_early(&*error),
        }
    })?;
    match request_coding(headers)? {
        None => Ok(bytes),
        Some(coding) => heavy(bytes.len(), move || decompress(&bytes, coding, limit)).await,
    }
}

/// Collects a body in a reused buffer; a body of one frame is not copied.
async fn gather<B>(app: &AppState, body: B, claimed: usize) -> Result<Bytes, BoxError>
where
    B: hyper::body::Body<Data = Bytes, Error = BoxError>,
{
    let mut body = std::pin::pin!(body);
    let (mut first, mut all): (Option<Bytes>, Option<BodyBuffer>) = (None, None);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        match (&mut first, &mut all) {
            (_, Some(all)) => all.extend(&data),
            (None, None) => first = Some(data),
            (Some(first), None) => {
                let mut buffer = app.buffers.take(claimed.max(first.len() + data.len()));
                buffer.extend(first);
                buffer.extend(&data);
                all = Some(buffer);
            }
        }
    }
    Ok(all.map(BodyBuffer::freeze).or(first).unwrap_or_default())
}

/// Runs `work`; off the serving threads if it processes many bytes.
pub(crate) async fn heavy<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    if bytes < LARGE_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal("the server failed on this request")),
    }
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

fn decompress(bytes: &[u8], coding: Coding, limit: usize) -> ApiResult<Bytes> {
    let mut plain = Vec::new();
    // One byte more than allowed distinguishes a body that fits from a truncated one.
    let allowed = limit as u64 + 1;
    let result = match coding {
        Coding::Gzip => GzDecoder::new(bytes).take(allowed).read_to_end(&mut plain),
        Coding::Deflate => ZlibDecoder::new(bytes).take(allowed).read_to_end(&mut plain),
    };
    result.map_err(|error| {
        ApiError::invalid(format!("the body is not valid {}: {error}", coding.as_str()))
    })?;
    if plain.len() > limit {
        return Err(too_large(limit));
    }
    Ok(plain.into())
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
pub(crate) fn compress(parts: &[Bytes], coding: Coding) -> std::io::Result<Vec<u8>> {
    let level = Compression::fast();
    match coding {
        Coding::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), level);
            parts.iter().try_for_each(|part| encoder.write_all(part))?;
            encoder.finish()
        }
        Coding::Deflate => {
            let mut encoder = ZlibEncoder::new(Vec::new(), level);
            parts.iter().try_for_each(|part| encoder.write_all(part))?;
            encoder.finish()
        }
    }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(decompress(&packed, coding, 1 << 20).unwrap(), zeros);
            let error = decompress(&packed, coding, 1000).unwrap_err();
            assert_eq!(error.kind, ErrorKind::TooLarge);
        }
        assert!(decompress(b"not gzip", Coding::Gzip, 100).is_err());
    }
}
