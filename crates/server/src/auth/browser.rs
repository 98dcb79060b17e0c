//! Protection from web pages: the check of `Host` and `Origin`.
//!
//! A page of any site can make its visitor's browser send requests to `localhost` or to a private
//! network. The browser names the page's site in `Origin`. A site whose name resolves to a private
//! address (DNS rebinding) has its own origin there, but its name is in `Host`.

use http::header::{HOST, ORIGIN};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Version};

use super::{Reason, Refusal};

/// Which hosts and origins requests may name.
#[derive(Debug)]
pub(crate) struct BrowserRules {
    /// Lower-case names without port; `None` accepts any.
    hosts: Option<Vec<String>>,
    origins: Vec<String>,
}

/// The host of `HOST[:PORT]`, in lower case, without brackets.
fn host_of(authority: &str) -> Option<String> {
    let authority: Authority = authority.parse().ok()?;
    let host = authority.host().to_ascii_lowercase();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let bare = bare.map_or(host.clone(), str::to_string);
    Some(bare.strip_suffix('.').map_or(bare.clone(), str::to_string))
}

impl BrowserRules {
    /// Rules of a server; `local` if it only listens on loopback addresses.
    pub(crate) fn new(
        hosts: &[String],
        origins: &[String],
        local: bool,
    ) -> Result<BrowserRules, String> {
        let any = hosts.iter().any(|host| host == "*") || (hosts.is_empty() && !local);
        let name = |host: &String| {
            host_of(host).ok_or_else(|| format!("--allow-host '{host}' is not a host name"))
        };
        let hosts = match any {
            true => None,
            false => Some(hosts.iter().map(name).collect::<Result<Vec<_>, _>>()?),
        };
        for origin in origins {
            if origin != "*" && !origin.contains("://") {
                return Err(format!(
                    "--allow-origin '{origin}' is not an origin such as https://example.org"
                ));
            }
        }
        let plain = |origin: &String| origin.trim_end_matches('/').to_ascii_lowercase();
        Ok(BrowserRules { hosts, origins: origins.iter().map(plain).collect() })
    }

    pub(crate) fn check(&self, head: &Parts) -> Result<(), Refusal> {
        let named = match head.uri.authority() {
            Some(authority) => Some(authority.as_str()),
            None => text_of(&head.headers, HOST)?,
        };
        self.check_host(named, head.version)?;
        let Some(origin) = text_of(&head.headers, ORIGIN)? else { return Ok(()) };
        let same = origin.split_once("://").is_some_and(|(_, host)| Some(host) == named);
        match same || self.allows_origin(origin) {
            true => Ok(()),
            false => Err(Refusal::new(
                Reason::Origin,
                "requests of web pages of other origins are refused (--allow-origin)",
            )),
        }
    }

    fn check_host(&self, named: Option<&str>, version: Version) -> Result<(), Refusal> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let wrong = |message: &str| Refusal::new(Reason::Host, message);
        let Some(named) = named else {
            // Browsers always name a host.
            return match version {
                Version::HTTP_11 => Err(wrong("the request has no host")),
                _ => Ok(()),
            };
        };
        let host = host_of(named).ok_or_else(|| wrong("the request's host is not valid"))?;
        // An address cannot be rebound: the request was sent to it.
        let known = host == "localhost"
            || host.ends_with(".localhost")
            || host.parse::<std::net::IpAddr>().is_ok()
            || hosts.contains(&host);
        match known {
            true => Ok(()),
            false => Err(wrong("the request is for another host (--allow-host)")),
        }
    }

    fn allows_origin(&self, origin: &str) -> bool {
        let origin = origin.to_ascii_lowercase();
        self.origins.iter().any(|allowed| allowed == "*" || *allowed == origin)
    }

    /// The request's origin, if its page may read the response.
    pub(crate) fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        origin.to_str().is_ok_and(|text| self.allows_origin(text)).then(|| origin.clone())
    }
}

/// The value of a header; several are as suspicious as unreadable ones.
fn text_of(headers: &HeaderMap, name: http::HeaderName) -> Result<Option<&str>, Refusal> {
    let reason = if name == HOST { Reason::Host } else { Reason::Origin };
    let wrong = || Refusal::new(reason, format!("the header {name} is not valid"));
    let mut values = headers.get_all(&name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(wrong());
    }
    value.to_str().map(Some).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn refused(rules: &BrowserRules, headers: &[(&str, &str)]) -> Option<Reason> {
        let mut request = Request::get("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        rules.check(&head).err().map(|refusal| refusal.reason)
    }

    fn rules(hosts: &[&str], origins: &[&str], local: bool) -> BrowserRules {
        let owned = |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        BrowserRules::new(&owned(hosts), &owned(origins), local).unwrap()
    }

    #[test]
    fn foreign_hosts_are_refused() {
        let local = rules(&[], &[], true);
        for good in [
            "localhost",
            "LocalHost:8000",
            "127.0.0.1:1",
            "[::1]:8000",
            "a.localhost",
            "10.0.0.7",
            "localhost.",
        ] {
            assert_eq!(refused(&local, &[("host", good)]), None, "{good}");
        }
        for bad in ["evil.example", "evil.example:8000", "localhost.evil.example", "", "a b", "@"] {
            assert_eq!(refused(&local, &[("host", bad)]), Some(Reason::Host), "{bad}");
        }
        assert_eq!(refused(&local, &[]), Some(Reason::Host));
        let twice = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(refused(&local, &twice), Some(Reason::Host));
        assert_eq!(refused(&rules(&["Atoll"], &[], true), &[("host", "atoll:80")]), None);
        assert_eq!(refused(&rules(&[], &[], false), &[("host", "any.example")]), None);
        let listed = rules(&["atoll"], &[], false);
        assert_eq!(refused(&listed, &[("host", "any.example")]), Some(Reason::Host));
    }

    #[test]
    fn foreign_origins_are_refused() {
        let local = rules(&[], &["https://App.example/"], true);
        let with = |origin| refused(&local, &[("host", "localhost:8000"), ("origin", origin)]);
        assert_eq!(with("http://localhost:8000"), None);
        assert_eq!(with("https://app.example"), None);
        for bad in ["http://localhost:9000", "https://evil.example", "null", "", "app.example"] {
            assert_eq!(with(bad), Some(Reason::Origin), "{bad}");
        }
    }
}
