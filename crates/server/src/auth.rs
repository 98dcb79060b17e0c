//! Who may do what: credentials, scopes, limits, the check of `Host` and `Origin`, and the audit
//! log. See ADR 37.
//!
//! Every request passes `Access::admit` before its body is read. Handlers that learn the model or
//! the class from the body ask the `Caller` they get.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::error::ApiResult;
use api::{ApiError, ErrorKind, InferOptions};
use http::header::AUTHORIZATION;
use http::request::Parts;
use model::config::Class;

pub(crate) mod audit;
mod browser;
mod grant;
mod jwt;
pub(crate) mod routes;
mod token_file;
pub(crate) mod usage;
pub(crate) mod watched_file;

pub use grant::{GrantRecord, Scope, Scopes};
pub use jwt::JwtOptions;
pub use model::config::Rate;
pub use token_file::{NewToken, TokenError, TokenFile, TokenRecord};

use audit::AuditLog;
use browser::BrowserRules;
use grant::Grant;
use jwt::JwtKeys;
use routes::Need;
use token_file::TokenTable;
use usage::Slot;
use watched_file::Watched;

/// Who may use a server. The default suits a server that only listens on loopback addresses.
#[derive(Clone, Debug, Default)]
pub struct AccessOptions {
    /// File of tokens, written by [`TokenFile`]. Requests need one of them.
    pub tokens: Option<PathBuf>,
    /// Accept JSON Web Tokens signed by these keys. Requests need one, or a token.
    pub jwt: Option<JwtOptions>,
    /// Further values of `Host`. Without any, a server on loopback addresses accepts `localhost`
    /// and IP addresses, another one all names.
    pub allow_hosts: Vec<String>,
    /// Origins of web pages that may send requests, such as `https://example.org`.
    pub allow_origins: Vec<String>,
    /// Refuse every request that changes models or queries.
    pub read_only: bool,
    /// Classes that clients may choose where no credentials are required. Without any: both on
    /// loopback addresses, otherwise best effort.
    pub classes: Vec<Class>,
    /// Highest priority (lowest number) that clients may choose where no credentials are required.
    pub max_priority: Option<u32>,
    /// File of the audit log, appended to; without one its lines are part of the log.
    pub audit_log: Option<PathBuf>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    NoToken,
    WrongToken,
    ExpiredToken,
    Scope,
    Model,
    Class,
    Priority,
    Rate,
    Concurrency,
    Host,
    Origin,
    ReadOnly,
    Certificate,
}

impl Reason {
    pub(crate) const ALL: [Reason; 13] = [
        Reason::NoToken,
        Reason::WrongToken,
        Reason::ExpiredToken,
        Reason::Scope,
        Reason::Model,
        Reason::Class,
        Reason::Priority,
        Reason::Rate,
        Reason::Concurrency,
        Reason::Host,
        Reason::Origin,
        Reason::ReadOnly,
        Reason::Certificate,
    ];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Reason::NoToken => "no_token",
            Reason::WrongToken => "wrong_token",
            Reason::ExpiredToken => "expired_token",
            Reason::Scope => "scope",
            Reason::Model => "model",
            Reason::Class => "class",
            Reason::Priority => "priority",
            Reason::Rate => "rate",
            Reason::Concurrency => "concurrency",
            Reason::Host => "host",
            Reason::Origin => "origin",
            Reason::ReadOnly => "read_only",
            Reason::Certificate => "certificate",
        }
    }

    const fn kind(self) -> ErrorKind {
        match self {
            Reason::NoToken | Reason::WrongToken | Reason::ExpiredToken | Reason::Certificate => {
                ErrorKind::Unauthenticated
            }
            Reason::Rate | Reason::Concurrency => ErrorKind::TooManyRequests,
            _ => ErrorKind::Forbidden,
        }
    }
}

/// A refusal: its reason, and the message for the client.
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) message: String,
    retry_after: Option<u32>,
}

impl Refusal {
    pub(crate) fn new(reason: Reason, message: impl Into<String>) -> Refusal {
        Refusal { reason, message: message.into(), retry_after: None }
    }

    fn retry_after(self, seconds: u32) -> Refusal {
        Refusal { retry_after: Some(seconds), ..self }
    }

    pub(crate) fn into_error(self) -> ApiError {
        ApiError {
            retry_after: self.retry_after,
            ..ApiError::new(self.reason.kind(), self.message)
        }
    }
}

/// The rules of one server, shared by its listeners.
pub(crate) struct Access {
    tokens: Option<Watched<TokenTable>>,
    jwt: Option<Watched<JwtKeys>>,
    anonymous: Arc<Grant>,
    browser: BrowserRules,
    read_only: bool,
    /// Whether clients need a certificate. Where they may connect without one, only health is open.
    certificates: bool,
    pub(crate) audit: AuditLog,
    refused: [AtomicU64; Reason::ALL.len()],
    next_request: AtomicU64,
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

impl Access {
    /// Opens the files of `options`, for a server that listens on `addresses`.
    pub(crate) fn open(
        options: &AccessOptions,
        addresses: &[SocketAddr],
        certificates: bool,
    ) -> Result<Arc<Access>, String> {
        let local = addresses.iter().all(|address| address.ip().to_canonical().is_loopback());
        let tokens = options.tokens.clone().map(|path| Watched::open(path, TokenTable::read));
        let jwt = options
            .jwt
            .clone()
            .map(|jwt| Watched::open(jwt.keys.clone(), move |path, _| JwtKeys::read(path, &jwt)));
        let classes = match options.classes.is_empty() {
            false => options.classes.clone(),
            true if local => vec![Class::RealTime, Class::BestEffort],
            true => vec![Class::BestEffort],
        };
        let audit = AuditLog::open(options.audit_log.as_deref())?;
        Ok(Arc::new(Access {
            tokens: tokens.transpose()?,
            jwt: jwt.transpose()?,
            anonymous: Arc::new(Grant::anonymous(classes, options.max_priority)),
            browser: BrowserRules::new(&options.allow_hosts, &options.allow_origins, local)?,
            read_only: options.read_only,
            certificates,
            audit,
            refused: Default::default(),
            // Two servers do not give the same ids.
            next_request: AtomicU64::new(unix_seconds() << 24),
        }))
    }

    /// Reads files that changed. What cannot be read stays as it was.
    pub(crate) fn reload(&self) {
        let tokens = self.tokens.as_ref().map(|tokens| ("tokens", tokens.reload()));
        let keys = self.jwt.as_ref().map(|keys| ("jwt_keys", keys.reload()));
        for (what, reloaded) in tokens.into_iter().chain(keys) {
            match reloaded {
                None => {}
                Some(Ok(())) => self.audit.reloaded(what),
                Some(Err(why)) => tracing::error!("{why}; the previous content stays in use"),
            }
        }
    }

    /// How often requests were refused for `reason`.
    pub(crate) fn refused(&self, reason: Reason) -> u64 {
        self.refused[reason as usize].load(Relaxed)
    }

    /// Admits a request, or refuses it. `need` is what its route needs.
    pub(crate) fn admit(
        self: &Arc<Self>,
        need: &Need,
        head: &Parts,
        peer: SocketAddr,
        certificate: Option<&Arc<str>>,
    ) -> Result<Arc<Caller>, (ApiError, String)> {
        let mut caller = Caller {
            access: self.clone(),
            grant: self.anonymous.clone(),
            subject: certificate.cloned(),
            peer,
            id: self.request_id(head),
            _slot: None,
        };
        match self.check(need, head, &mut caller) {
            Ok(()) => Ok(Arc::new(caller)),
            Err(refusal) => {
                let id = caller.id();
                Err((caller.refuse_at(refusal, head.uri.path()), id))
            }
        }
    }

    fn check(&self, need: &Need, head: &Parts, caller: &mut Caller) -> Result<(), Refusal> {
        // Health has no secret, and whatever watches it need not know the server's name.
        if need.scopes.is_empty() {
            return Ok(());
        }
        self.browser.check(head)?;
        if self.certificates && caller.subject.is_none() {
            return Err(Refusal::new(Reason::Certificate, "a client certificate is required"));
        }
        let usage = match self.identify(head)? {
            Some((grant, subject, usage)) => {
                (caller.grant, caller.subject) = (grant, Some(subject));
                Some(usage)
            }
            None => None,
        };
        let grant = &caller.grant;
        if !grant.scopes.allows(need.scopes) {
            let wanted = need.scopes;
            return Err(Refusal::new(
                Reason::Scope,
                format!("this needs a token with scope {wanted}"),
            ));
        }
        if let Some(model) = &need.model
            && !grant.allows_model(model)
        {
            return Err(no_model());
        }
        if self.read_only && need.change.is_some() {
            return Err(Refusal::new(Reason::ReadOnly, "the server is read-only"));
        }
        if let Some(usage) = usage {
            usage.take(grant.rate, "the token")?;
            caller._slot = Some(Slot::take(usage, grant.concurrency, "the token")?);
        }
        Ok(())
    }

    /// The grant of the request's credentials; `None` where none are required.
    fn identify(&self, head: &Parts) -> Result<Option<Identity>, Refusal> {
        if self.tokens.is_none() && self.jwt.is_none() {
            return Ok(None);
        }
        let Some(header) = head.headers.get(AUTHORIZATION) else {
            return Err(Refusal::new(
                Reason::NoToken,
                "a token is required: send the header authorization: Bearer TOKEN",
            ));
        };
        let wrong = || Refusal::new(Reason::WrongToken, "the token is not valid");
        let text = header.to_str().map_err(|_| wrong())?;
        let (scheme, token) = text.split_once(' ').ok_or_else(wrong)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(wrong());
        }
        let (token, now) = (token.trim(), unix_seconds());
        if token_file::is_token(token) {
            let tokens = self.tokens.as_ref().ok_or_else(wrong)?;
            return tokens.get().identify(token, now).map(Some);
        }
        self.jwt.as_ref().ok_or_else(wrong)?.get().identify(token, now).map(Some)
    }

    /// The client's request id if it is usable, else a new one.
    fn request_id(&self, head: &Parts) -> RequestId {
        let given = head.headers.get(routes::REQUEST_ID).and_then(|value| value.to_str().ok());
        let usable = |text: &&str| !text.is_empty() && text.len() <= 64;
        match given.filter(usable) {
            Some(text) => RequestId::Given(text.into()),
            None => RequestId::Made(self.next_request.fetch_add(1, Relaxed)),
        }
    }

    /// The origin of the request, if it is a web page that may read the response.
    pub(crate) fn allowed_origin(&self, headers: &http::HeaderMap) -> Option<http::HeaderValue> {
        self.browser.allowed_origin(headers)
    }

    /// Records that a client's certificate was refused.
    pub(crate) fn refuse_certificate(&self, peer: SocketAddr, why: &str) {
        self.refused[Reason::Certificate as usize].fetch_add(1, Relaxed);
        self.audit.refusal(&audit::Refused {
            reason: Reason::Certificate.as_str(),
            status: 0,
            peer,
            subject: None,
            request_id: "",
            path: why,
        });
    }
}

type Identity = (Arc<Grant>, Arc<str>, Arc<usage::Usage>);

fn no_model() -> Refusal {
    Refusal::new(Reason::Model, "the token does not allow this model")
}

enum RequestId {
    Given(Box<str>),
    Made(u64),
}

/// Who sent a request, and what they may do.
pub(crate) struct Caller {
    access: Arc<Access>,
    grant: Arc<Grant>,
    subject: Option<Arc<str>>,
    peer: SocketAddr,
    id: RequestId,
    /// Counts as one of the token's concurrent requests.
    _slot: Option<Slot>,
}

impl Caller {
    /// The id of the request in the audit log.
    pub(crate) fn id(&self) -> String {
        match &self.id {
            RequestId::Given(text) => text.to_string(),
            RequestId::Made(number) => format!("{number:x}"),
        }
    }

    /// Checks a model that the body names.
    pub(crate) fn check_model(&self, model: &str) -> ApiResult<()> {
        match self.grant.allows_model(model) {
            true => Ok(()),
            false => Err(self.refuse(no_model())),
        }
    }

    /// Checks that the caller has one of `scopes`.
    pub(crate) fn check_scope(&self, scopes: Scopes) -> ApiResult<()> {
        match self.grant.scopes.allows(scopes) {
            true => Ok(()),
            false => Err(self.refuse(Refusal::new(
                Reason::Scope,
                format!("this needs a token with scope {scopes}"),
            ))),
        }
    }

    /// Checks the class and priority that the client chose. Callers who may only use one class get
    /// it for models of the other one too.
    pub(crate) fn limit(&self, options: &mut InferOptions) -> ApiResult<()> {
        let classes = &self.grant.classes;
        match options.class {
            Some(class) if !classes.contains(&class) => {
                let name = class.as_str();
                return Err(self.refuse(Refusal::new(
                    Reason::Class,
                    format!("class {name} is not allowed here (--allow-class, token --class)"),
                )));
            }
            Some(_) => {}
            None if self.grant.forces_class && classes.len() == 1 => {
                options.class = Some(classes[0])
            }
            None => {}
        }
        if let (Some(highest), Some(priority)) = (self.grant.max_priority, options.priority)
            && priority < highest
        {
            return Err(self.refuse(Refusal::new(
                Reason::Priority,
                format!("priority {priority} is not allowed; the highest is {highest}"),
            )));
        }
        Ok(())
    }

    /// Checks the class of a model that the caller registers.
    pub(crate) fn check_class(&self, class: Option<Class>) -> ApiResult<()> {
        self.limit(&mut InferOptions { class, ..InferOptions::default() })
    }

    fn refuse(&self, refusal: Refusal) -> ApiError {
        self.refuse_at(refusal, "")
    }

    fn refuse_at(&self, refusal: Refusal, path: &str) -> ApiError {
        let reason = refusal.reason;
        self.access.refused[reason as usize].fetch_add(1, Relaxed);
        let error = refusal.into_error();
        self.access.audit.refusal(&audit::Refused {
            reason: reason.as_str(),
            status: error.kind.http_status(),
            peer: self.peer,
            subject: self.subject.as_deref(),
            request_id: &self.id(),
            path,
        });
        error
    }

    /// Writes a change that this caller requested to the audit log.
    pub(crate) fn changed(&self, change: &str, path: &str, status: u16) {
        self.access.audit.change(&audit::Changed {
            change,
            status,
            peer: self.peer,
            subject: self.subject.as_deref(),
            request_id: &self.id(),
            path,
        });
    }
}
