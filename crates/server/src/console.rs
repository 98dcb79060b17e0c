//! The console: pages that the server itself serves, with everything they need.
//!
//! The files are in `console/`, as they are: no build step makes them. They hold no data; what they
//! show comes from the routes of REST, with the credentials that the user enters.

use std::io::Write;
use std::sync::OnceLock;

use axum::body::Body;
use axum::extract::Path;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG,
    HeaderValue, IF_NONE_MATCH, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, Response, StatusCode};
use sha2::{Digest, Sha256};

use api::ApiError;

use crate::rest::{Routes, response};

/// What pages may load: files of this server, and pictures they made themselves.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

struct ConsoleFile {
    name: &'static str,
    content: &'static [u8],
    encoded: OnceLock<Encoded>,
}

/// A file as it is sent.
struct Encoded {
    gzip: Vec<u8>,
    tag: HeaderValue,
}

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(ConsoleFile {
            name: $name,
            content: include_bytes!(concat!("../console/", $name)),
            encoded: OnceLock::new(),
        }),*]
    };
}

static FILES: [ConsoleFile; 20] = files![
    "index.html",
    "docs.html",
    "style.css",
    "app.js",
    "api.js",
    "charts.js",
    "cluster.js",
    "detail.js",
    "docs.js",
    "dom.js",
    "models.js",
    "now.js",
    "plan.js",
    "settings.js",
    "spans.js",
    "steps.js",
    "sweep.js",
    "timeline.js",
    "try.js",
    "way.js",
];

impl ConsoleFile {
    fn encoded(&self) -> &Encoded {
        self.encoded.get_or_init(|| {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
            // Writing to memory does not fail.
            let _ = gzip.write_all(self.content);
            let hash = Sha256::digest(self.content);
            let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            let tag = HeaderValue::from_str(&format!("\"{hex}\""));
            Encoded {
                gzip: gzip.finish().unwrap_or_default(),
                tag: tag.unwrap_or(HeaderValue::from_static("\"\"")),
            }
        })
    }

    fn media_type(&self) -> HeaderValue {
        HeaderValue::from_static(match self.name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            _ => "application/octet-stream",
        })
    }

    fn respond(&'static self, headers: &HeaderMap) -> Response<Body> {
        let encoded = self.encoded();
        let asked = |name: http::HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
        let fresh = asked(IF_NONE_MATCH).is_some_and(|tags| encoded.tag == *tags);
        let gzip = asked(ACCEPT_ENCODING).is_some_and(|codings| codings.contains("gzip"));
        let body = match (fresh, gzip) {
            (true, _) => Body::empty(),
            (false, true) => Body::from(encoded.gzip.as_slice()),
            (false, false) => Body::from(self.content),
        };
        let mut response = Response::new(body);
        if fresh {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let sent = response.headers_mut();
        if gzip && !fresh {
            sent.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        sent.insert(CONTENT_TYPE, self.media_type());
        sent.insert(ETAG, encoded.tag.clone());
        sent.insert(VARY, HeaderValue::from_static("accept-encoding"));
        sent.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        sent.insert(CONTENT_SECURITY_POLICY, POLICY);
        sent.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        sent.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        response
    }
}

async fn page(headers: HeaderMap) -> Response<Body> {
    FILES[0].respond(&headers)
}

async fn docs(headers: HeaderMap) -> Response<Body> {
    FILES[1].respond(&headers)
}

async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response<Body> {
    match FILES.iter().find(|file| file.name == name) {
        Some(file) => file.respond(&headers),
        None => response::error(&ApiError::not_found("the console has no such file")),
    }
}

/// Adds the console to the routes of REST.
pub(crate) fn with_console(routes: Routes) -> Routes {
    routes.get("/", page).get("/docs", docs).get("/console/{file}", file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_is_small_and_loads_nothing_from_elsewhere() {
        let total: usize = FILES.iter().map(|file| file.encoded().gzip.len()).sum();
        assert!(total < 300_000, "{total} bytes compressed");
        for file in &FILES {
            let text = std::str::from_utf8(file.content).expect("text");
            let foreign = text.replace("http://www.w3.org/2000/svg", "");
            let foreign = foreign.replace("https://ui.perfetto.dev", "");
            assert!(!foreign.contains("http://") && !foreign.contains("https://"), "{}", file.name);
            // The policy forbids both.
            assert!(!text.contains("style=\"") && !text.contains("onclick="), "{}", file.name);
        }
    }

    #[test]
    fn files_are_sent_once() {
        let mut headers = HeaderMap::new();
        let first = FILES[0].respond(&headers);
        assert_eq!(first.status(), StatusCode::OK);
        assert!(first.headers().get(CONTENT_ENCODING).is_none());
        assert!(first.headers().contains_key(CONTENT_SECURITY_POLICY));
        headers.insert(IF_NONE_MATCH, first.headers()[ETAG].clone());
        assert_eq!(FILES[0].respond(&headers).status(), StatusCode::NOT_MODIFIED);
        headers.remove(IF_NONE_MATCH);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("br, gzip"));
        assert_eq!(FILES[0].respond(&headers).headers()[CONTENT_ENCODING], "gzip");
    }
}
