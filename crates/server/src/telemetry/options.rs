//! The standard variables of OpenTelemetry.

use std::time::Duration;

use api::TraceContext;

/// Path of traces below a collector's address.
const TRACES_PATH: &str = "v1/traces";
/// Where collectors listen unless told otherwise.
const DEFAULT_ENDPOINT: &str = "http://localhost:4318";

/// Which requests become traces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Whether a caller's decision counts.
    pub parent_based: bool,
    /// Share of the traces that have no deciding caller.
    pub ratio: f64,
}

impl Default for Sampler {
    fn default() -> Self {
        Sampler { parent_based: true, ratio: 1.0 }
    }
}

impl Sampler {
    fn parse(name: &str, argument: Option<&str>) -> Result<Sampler, String> {
        let ratio = || match argument.map(str::parse::<f64>) {
            None => Ok(1.0),
            Some(Ok(ratio)) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
            Some(_) => Err("OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1".to_string()),
        };
        let (parent_based, kind) = match name.strip_prefix("parentbased_") {
            Some(kind) => (true, kind),
            None => (false, name),
        };
        let ratio = match kind {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => ratio()?,
            _ => {
                return Err(format!(
                    "OTEL_TRACES_SAMPLER '{name}' is not one of always_on, always_off, \
                     traceidratio, parentbased_always_on, parentbased_always_off, \
                     parentbased_traceidratio"
                ));
            }
        };
        Ok(Sampler { parent_based, ratio })
    }

    /// Whether a request becomes a trace. All servers decide the same for a trace.
    pub(super) fn samples(&self, trace_id: u128, caller: Option<TraceContext>) -> bool {
        if let (true, Some(caller)) = (self.parent_based, caller) {
            return caller.flags & 1 == 1;
        }
        let bound = (self.ratio * (1u64 << 63) as f64) as u64;
        (trace_id as u64 >> 1) < bound
    }
}

/// Where spans are sent, and which.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetryOptions {
    /// URL that traces are posted to.
    pub endpoint: String,
    /// Headers of each request to it.
    pub headers: Vec<(String, String)>,
    /// Attributes of the server, the name of the service among them.
    pub resource: Vec<(String, String)>,
    /// Which requests become traces.
    pub sampler: Sampler,
    /// How long a request to the collector may take.
    pub timeout: Duration,
    /// Whether bodies are compressed.
    pub gzip: bool,
    /// Requests that wait to be exported at most.
    pub queue_size: usize,
    /// Requests that are exported at once at most.
    pub batch_size: usize,
    /// How long a request waits for others to be exported with.
    pub delay: Duration,
}

impl TelemetryOptions {
    /// Reads the variables; `None` unless they ask for traces.
    pub fn from_env(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<TelemetryOptions>, String> {
        // An empty variable is as good as none.
        let get = |name: &str| {
            variable(name).map(|text| text.trim().to_string()).filter(|text| !text.is_empty())
        };
        // A variable for traces alone goes before the one for all signals.
        let signal = |name: &str| {
            get(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))
                .or_else(|| get(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let exporter = get("OTEL_TRACES_EXPORTER");
        let disabled =
            get("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
        if disabled || exporter.as_deref() == Some("none") {
            return Ok(None);
        }
        let endpoint = match (
            get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            get("OTEL_EXPORTER_OTLP_ENDPOINT"),
            exporter.as_deref(),
        ) {
            (_, _, Some(other)) if other != "otlp" => {
                return Err(format!("OTEL_TRACES_EXPORTER '{other}' is not otlp or none"));
            }
            (Some(endpoint), ..) => endpoint,
            (None, Some(base), _) => below(&base),
            (None, None, Some(_)) => below(DEFAULT_ENDPOINT),
            (None, None, None) => return Ok(None),
        };
        check_endpoint(&endpoint)?;
        if let Some(protocol) = signal("PROTOCOL")
            && protocol != "http/protobuf"
        {
            return Err(format!(
                "OTEL_EXPORTER_OTLP_PROTOCOL '{protocol}' is not supported; use http/protobuf"
            ));
        }
        let gzip = match signal("COMPRESSION").as_deref() {
            None | Some("none") => false,
            Some("gzip") => true,
            Some(other) => {
                return Err(format!(
                    "OTEL_EXPORTER_OTLP_COMPRESSION '{other}' is not gzip or none"
                ));
            }
        };
        let sampler = get("OTEL_TRACES_SAMPLER");
        let argument = get("OTEL_TRACES_SAMPLER_ARG");
        let queue_size = number(&get, "OTEL_BSP_MAX_QUEUE_SIZE", 2_048)?;
        let batch_size = number(&get, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?;
        let timeout_ms = match signal("TIMEOUT") {
            None => 10_000,
            Some(text) => positive("OTEL_EXPORTER_OTLP_TIMEOUT", &text)?,
        };
        Ok(Some(TelemetryOptions {
            endpoint,
            headers: pairs("OTEL_EXPORTER_OTLP_HEADERS", &signal("HEADERS").unwrap_or_default())?,
            resource: resource(&get)?,
            sampler: match sampler {
                None => Sampler::default(),
                Some(name) => Sampler::parse(&name, argument.as_deref())?,
            },
            timeout: Duration::from_millis(timeout_ms),
            gzip,
            queue_size: (queue_size as usize).min(1 << 20),
            batch_size: (batch_size.min(queue_size) as usize).min(1 << 16),
            delay: Duration::from_millis(number(&get, "OTEL_BSP_SCHEDULE_DELAY", 5_000)?),
        }))
    }
}

/// The URL of traces of a collector.
fn below(base: &str) -> String {
    format!("{}/{TRACES_PATH}", base.trim_end_matches('/'))
}

fn check_endpoint(endpoint: &str) -> Result<(), String> {
    let rest = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    match rest {
        Some(rest) if !rest.is_empty() && endpoint.parse::<http::Uri>().is_ok() => Ok(()),
        _ => Err(format!(
            "the endpoint of OTLP '{endpoint}' is not a URL such as http://localhost:4318"
        )),
    }
}

fn positive(name: &str, text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| format!("{name} '{text}' is not a positive number"))
}

fn number(get: &impl Fn(&str) -> Option<String>, name: &str, default: u64) -> Result<u64, String> {
    get(name).map_or(Ok(default), |text| positive(name, &text))
}

/// `key=value,key=value`, with percent-encoded values.
fn pairs(name: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |part: &str| {
        let (key, value) = part.split_once('=')?;
        (!key.trim().is_empty()).then(|| (key.trim().to_string(), decode(value.trim())))
    };
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts
        .map(|part| pair(part).ok_or_else(|| format!("{name}: '{part}' is not KEY=VALUE")))
        .collect()
}

/// A text without percent-encoding.
fn decode(text: &str) -> String {
    crate::auth::routes::decode(text)
}

fn resource(get: &impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, String> {
    const NAME: &str = "service.name";
    let given = get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let mut attributes = pairs("OTEL_RESOURCE_ATTRIBUTES", &given)?;
    if let Some(name) = get("OTEL_SERVICE_NAME") {
        attributes.retain(|(key, _)| key != NAME);
        attributes.push((NAME.to_string(), name));
    }
    let defaults = [
        (NAME, "atoll"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("telemetry.sdk.name", "atoll"),
        ("telemetry.sdk.language", "rust"),
        ("telemetry.sdk.version", env!("CARGO_PKG_VERSION")),
    ];
    for (key, value) in defaults {
        if !attributes.iter().any(|(known, _)| known == key) {
            attributes.push((key.to_string(), value.to_string()));
        }
    }
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<TelemetryOptions>, String> {
        TelemetryOptions::from_env(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");

    #[test]
    fn nothing_is_sent_unless_it_is_asked_for() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")]), Ok(None));
        let default = read(&[("OTEL_TRACES_EXPORTER", "otlp")]).unwrap().expect("options");
        assert_eq!(default.endpoint, "http://localhost:4318/v1/traces");
    }

    #[test]
    fn variables_of_traces_go_before_those_of_all_signals() {
        let options = read(&[ENDPOINT]).unwrap().expect("options");
        assert_eq!(options.endpoint, "http://collector:4318/v1/traces");
        assert_eq!((options.queue_size, options.batch_size), (2_048, 512));
        let options = read(&[
            ENDPOINT,
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://other/path"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=b, token=x%20y"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
        ]);
        let options = options.unwrap().expect("options");
        assert_eq!(options.endpoint, "https://other/path");
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        assert_eq!(options.headers, [pair("a", "b"), pair("token", "x y")]);
        assert_eq!(options.timeout, Duration::from_millis(250));
        assert!(options.gzip);
    }

    #[test]
    fn the_name_of_the_service_has_one_value() {
        let name = |variables: &[(&str, &str)]| {
            let options = read(variables).unwrap().expect("options");
            let named = options.resource.into_iter().filter(|(key, _)| key == "service.name");
            named.map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(name(&[ENDPOINT]), ["atoll"]);
        let attributes = ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,team=b");
        assert_eq!(name(&[ENDPOINT, attributes]), ["a"]);
        assert_eq!(name(&[ENDPOINT, attributes, ("OTEL_SERVICE_NAME", "c")]), ["c"]);
    }

    #[test]
    fn what_is_not_supported_is_an_error() {
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "novalue"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ] {
            let error = read(&[(name, value), ENDPOINT]).unwrap_err();
            assert!(error.contains(value), "{name}: {error}");
        }
        let ratio = [ENDPOINT, ("OTEL_TRACES_SAMPLER", "traceidratio")];
        let wrong = [&ratio[..], &[("OTEL_TRACES_SAMPLER_ARG", "2")]].concat();
        assert!(read(&wrong).unwrap_err().contains("OTEL_TRACES_SAMPLER_ARG"));
    }

    #[test]
    fn samplers_decide_by_the_caller_and_the_trace() {
        let caller = |flags| Some(TraceContext { trace_id: 5, parent_id: 1, flags });
        let default = Sampler::default();
        assert!(default.samples(5, None) && default.samples(5, caller(1)));
        assert!(!default.samples(5, caller(0)));
        let off = Sampler::parse("parentbased_always_off", None).unwrap();
        assert!(off.samples(5, caller(1)) && !off.samples(5, None));
        let on = Sampler::parse("always_on", None).unwrap();
        assert!(on.samples(5, caller(0)) && on.samples(u128::MAX, None));
        let tenth = Sampler::parse("traceidratio", Some("0.1")).unwrap();
        let step = u64::MAX / 1_000;
        let sampled = (0..1_000).filter(|i| tenth.samples(u128::from(i * step), None)).count();
        assert!((99..=101).contains(&sampled), "{sampled}");
        assert!(!tenth.samples(u128::from(u64::MAX), caller(1)));
    }
}
