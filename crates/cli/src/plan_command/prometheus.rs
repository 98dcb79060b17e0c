//! Rates from a Prometheus server: `query_range` over days, in parts that are small enough for any
//! server, with a limit on everything that comes back.

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use assembly::Failure;
use planner::traffic::prometheus::AnswerError;
use planner::traffic::{DAY_S, Traffic, seconds_of};
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue, LOCATION};
use reqwest::{Client, Response, StatusCode, Url, redirect};

use super::read_input;
use crate::args::PlanArgs;

/// Steps of one request. Servers refuse more than 11,000.
const STEPS_PER_REQUEST: u64 = 1_000;
/// Most steps of the whole range.
const STEPS_MAX: u64 = 200_000;
/// Most bytes of one answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Most bytes of a query, which is part of an address.
const QUERY_BYTES_MAX: usize = 4096;
/// Bytes of an answer that is none which a message may show.
const EXCERPT_BYTES: usize = 300;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Days before the end, where no start is given.
const DEFAULT_DAYS: u64 = 7;

/// What is asked for, checked.
#[derive(Clone, Debug, PartialEq)]
struct RangeQuery<'a> {
    /// The address of `query_range`.
    url: Url,
    query: &'a str,
    label: &'a str,
    start_s: u64,
    end_s: u64,
    step_s: u64,
}

/// The samples of a query.
pub(super) fn read(args: &PlanArgs, server: &str) -> Result<Traffic, Failure> {
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let range = range(args, server, now_s)?;
    let token = args.prometheus_token_file.as_deref().map(bearer).transpose()?;
    let client = client(Duration::from_secs(args.prometheus_timeout_secs))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Failure::failed)?.block_on(collect(&client, &range, token.as_ref()))
}

/// Checks the flags.
fn range<'a>(args: &'a PlanArgs, server: &str, now_s: u64) -> Result<RangeQuery<'a>, Failure> {
    let query = args.query.as_deref().map(str::trim).filter(|query| !query.is_empty());
    let query = query.ok_or_else(|| {
        let label = &args.service_label;
        Failure::usage(format!(
            "--prometheus needs --query, such as \
             'sum by ({label}) (rate(nv_inference_request_success[5m]))'"
        ))
    })?;
    if query.len() > QUERY_BYTES_MAX {
        let long = query.len();
        return Err(Failure::usage(format!(
            "--query has {long} bytes of at most {QUERY_BYTES_MAX}; make it a recording rule"
        )));
    }
    let time = |flag: &str, text: &str| {
        seconds_of(text).ok_or_else(|| {
            Failure::usage(format!(
                "{flag} '{text}' is not a time: give seconds or 2026-01-31T18:00:00 in UTC"
            ))
        })
    };
    let end_s = args.end.as_deref().map_or(Ok(now_s), |text| time("--end", text))?;
    let default_start = end_s.saturating_sub(DEFAULT_DAYS * DAY_S);
    let start_s = args.start.as_deref().map_or(Ok(default_start), |text| time("--start", text))?;
    let step_s = u64::from(args.step_s);
    if start_s > end_s {
        return Err(Failure::usage(format!("--start {start_s} is after --end {end_s}")));
    }
    if (end_s - start_s) / step_s >= STEPS_MAX {
        return Err(Failure::usage(format!(
            "{} s in steps of {step_s} s are more than {STEPS_MAX} steps; take a longer --step-s \
             or a later --start",
            end_s - start_s
        )));
    }
    let url = address(server)?;
    Ok(RangeQuery { url, query, label: &args.service_label, start_s, end_s, step_s })
}

/// The address of `query_range` below that of a server, which may have a path of its own.
fn address(server: &str) -> Result<Url, Failure> {
    // An address with a password must not reach a message.
    let shown = if server.contains('@') { "the address" } else { server };
    let bad = |what: &dyn Display| {
        Failure::usage(format!("--prometheus: {shown} {what}; give http://HOST:9090"))
    };
    let mut url = Url::parse(server).map_err(|error| bad(&format!("is none ({error})")))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(bad(&"has a user or password: use --prometheus-token-file"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad(&"has a query: that is what --query is for"));
    }
    let web = matches!(url.scheme(), "http" | "https") && url.has_host();
    match url.path_segments_mut() {
        Ok(mut segments) if web => {
            segments.pop_if_empty().extend(["api", "v1", "query_range"]);
        }
        _ => return Err(bad(&"is not of http or https")),
    }
    Ok(url)
}

fn bearer(path: &Path) -> Result<HeaderValue, Failure> {
    let token = read_input(path)?;
    let unfit = |_| Failure::usage(format!("{}: this is no token", path.display()));
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim())).map_err(unfit)?;
    value.set_sensitive(true);
    Ok(value)
}

fn client(timeout: Duration) -> Result<Client, Failure> {
    cluster::tls::choose();
    let builder = Client::builder()
        .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(timeout)
        // A token goes to the server that was named, and to no other.
        .redirect(redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy();
    builder.build().map_err(|error| Failure::failed(causes(&error)))
}

impl RangeQuery<'_> {
    /// First and last moment of each request.
    fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        let (end_s, step_s) = (self.end_s, self.step_s);
        let length = step_s * STEPS_PER_REQUEST;
        let starts = (self.start_s..=end_s).step_by(usize::try_from(length).unwrap_or(usize::MAX));
        starts.map(move |start_s| (start_s, end_s.min(start_s + length - step_s)))
    }

    fn part_url(&self, (start_s, end_s): (u64, u64)) -> Url {
        let mut url = self.url.clone();
        url.query_pairs_mut()
            .append_pair("query", self.query)
            .append_pair("start", &start_s.to_string())
            .append_pair("end", &end_s.to_string())
            .append_pair("step", &self.step_s.to_string());
        url
    }

    /// A message names address and query.
    fn named(&self, what: &dyn Display) -> String {
        format!("{}, query '{}': {what}", self.url, self.query)
    }

    /// The user can mend the query; the rest is up to the server.
    fn failure(&self, error: &AnswerError) -> Failure {
        match error {
            AnswerError::Refused { kind, .. } if kind != "bad_data" => {
                Failure::failed(self.named(error))
            }
            _ => Failure::usage(self.named(error)),
        }
    }
}

async fn collect(
    client: &Client,
    range: &RangeQuery<'_>,
    token: Option<&HeaderValue>,
) -> Result<Traffic, Failure> {
    let mut traffic = Traffic::default();
    let mut gaps = 0;
    for part in range.parts() {
        let mut request = client.get(range.part_url(part)).header(ACCEPT, "application/json");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.clone());
        }
        let response = request.send().await.map_err(|error| unreachable(range, &error))?;
        let body = body(range, response).await?;
        let notes =
            traffic.add_prometheus(&body, range.label).map_err(|error| range.failure(&error))?;
        for warning in notes.warnings {
            tracing::warn!("{}: {warning}", range.url);
        }
        gaps += notes.gaps;
    }
    if gaps > 0 {
        tracing::warn!("{gaps} samples are not a number and count as gaps");
    }
    if traffic.samples() == 0 {
        let (start_s, end_s) = (range.start_s, range.end_s);
        return Err(Failure::usage(range.named(&format!(
            "there are no samples from {start_s} to {end_s}; try the query in the server's own \
             console, and --start and --end"
        ))));
    }
    Ok(traffic)
}

fn unreachable(range: &RangeQuery<'_>, error: &reqwest::Error) -> Failure {
    let hint = match error.is_timeout() {
        true => "take a longer --step-s, a recording rule or --prometheus-timeout-secs",
        false => "is the server up, and is this its address?",
    };
    Failure::failed(range.named(&format!("{}; {hint}", causes(error))))
}

/// The body of an answer, or why there is none. Errors of the query are bodies, too.
async fn body(range: &RangeQuery<'_>, mut response: Response) -> Result<Vec<u8>, Failure> {
    let status = response.status();
    let too_long = || {
        let mib = ANSWER_BYTES_MAX >> 20;
        Failure::usage(range.named(&format!(
            "the answer has more than {mib} MiB; aggregate with sum by ({}) (...), or take a \
             longer --step-s",
            range.label
        )))
    };
    if status.is_redirection() {
        let to = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("-");
        let to: String = to.chars().take(EXCERPT_BYTES).collect();
        let what = format!("the server redirects to {to}; name that address");
        return Err(Failure::failed(range.named(&what)));
    }
    if response.content_length().is_some_and(|bytes| bytes > ANSWER_BYTES_MAX as u64) {
        return Err(too_long());
    }
    let mut body = Vec::new();
    while let Some(more) = response.chunk().await.map_err(|error| unreachable(range, &error))? {
        if body.len() + more.len() > ANSWER_BYTES_MAX {
            return Err(too_long());
        }
        body.try_reserve(more.len()).map_err(Failure::failed)?;
        body.extend_from_slice(&more);
    }
    // Prometheus explains 400, 422 and 503 in the form of an answer.
    let explained = body.starts_with(b"{") && body.windows(9).take(4096).any(is_error_type);
    if status.is_success() || explained {
        return Ok(body);
    }
    let excerpt = String::from_utf8_lossy(&body[..body.len().min(EXCERPT_BYTES)]);
    let excerpt: String = excerpt.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let hint = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            "; give a token with --prometheus-token-file"
        }
        StatusCode::NOT_FOUND => "; is this the address of a Prometheus server?",
        _ => "",
    };
    let excerpt = excerpt.trim();
    Err(Failure::failed(range.named(&format!("HTTP {}: {excerpt}{hint}", status.as_u16()))))
}

fn is_error_type(window: &[u8]) -> bool {
    window == b"errorType"
}

/// An error with its causes; reqwest's own text leaves them out, and names the address, which
/// messages name already.
fn causes(error: &reqwest::Error) -> String {
    let mut parts = Vec::new();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        parts.push(next.to_string());
        cause = next.source();
    }
    parts.dedup();
    match parts.is_empty() {
        true if error.is_timeout() => "there was no answer in time".to_string(),
        true => "the request failed".to_string(),
        false => parts.join(": "),
    }
}

#[cfg(test)]
mod tests;
