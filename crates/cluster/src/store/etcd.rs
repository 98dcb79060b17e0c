//! The store of a cluster: etcd's v3 API over gRPC.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::health::HealthRecord;
use super::{
    Change, Condition, Entry, LeaseId, Listing, OPERATIONS_MAX, Revision, Store, StoreError,
    StoreFuture, StoreHealth, StoreSpace, Watch, Write,
};
use crate::tls::{ClientTls, Secret};

mod proto {
    #![allow(missing_docs, clippy::all, clippy::pedantic)]
    tonic::include_proto!("etcdserverpb");
}

use proto::auth_client::AuthClient;
use proto::kv_client::KvClient;
use proto::lease_client::LeaseClient;
use proto::maintenance_client::MaintenanceClient;
use proto::watch_client::WatchClient;

/// Time limit of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of a defragmentation, which reads and writes the whole file.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that is silent for this long gets a ping.
const PING: Duration = Duration::from_secs(2);
/// Keys per page of a listing.
const PAGE: i64 = 1000;
/// Maximum size of a reply in bytes.
const REPLY_MAX: usize = 64 << 20;
/// Batches of changes buffered for a watcher.
const WATCH_BUFFER: usize = 64;

/// How to connect to etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdAccess {
    /// TLS; without it the connection is not encrypted.
    pub tls: Option<ClientTls>,
    /// User and password, where etcd requires them.
    pub user: Option<(String, Secret)>,
}

/// The token that etcd gave this client; every call carries it.
#[derive(Clone, Default)]
struct AuthToken(Arc<RwLock<Option<MetadataValue<Ascii>>>>);

impl AuthToken {
    fn get(&self) -> Option<MetadataValue<Ascii>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, token: Option<MetadataValue<Ascii>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = token;
    }
}

impl Interceptor for AuthToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = self.get() {
            request.metadata_mut().insert("token", token);
        }
        Ok(request)
    }
}

type Member = InterceptedService<Channel, AuthToken>;

/// A client of an etcd cluster.
pub struct EtcdStore {
    members: Vec<Channel>,
    /// Index of the member that replied last.
    current: AtomicUsize,
    user: Option<(String, Secret)>,
    token: AuthToken,
    health: HealthRecord,
}

/// A channel to a member, which connects on demand.
fn channel(member: &str, tls: Option<&ClientTls>) -> Result<Channel, StoreError> {
    let bad = |why: String| StoreError::Refused(format!("etcd member '{member}': {why}"));
    if member.is_empty() || member.contains('/') {
        return Err(bad("give it as HOST:PORT".to_string()));
    }
    let endpoint = Endpoint::from_shared(format!("http://{member}"))
        .map_err(|error| bad(error.to_string()))?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true);
    let Some(tls) = tls else { return Ok(endpoint.connect_lazy()) };
    tls.check().map_err(bad)?;
    let (tls, member) = (tls.clone(), member.to_string());
    let connect = move |_: Uri| {
        let (tls, member) = (tls.clone(), member.clone());
        async move {
            let stream = TcpStream::connect(&member).await?;
            stream.set_nodelay(true)?;
            let stream = tls.connect(stream, &member, b"h2").await;
            stream.map(TokioIo::new).map_err(std::io::Error::other)
        }
    };
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(connect)))
}

impl EtcdStore {
    /// Creates a client of the members `HOST:PORT[,HOST:PORT...]`; it connects on demand.
    pub fn new(endpoints: &str, access: EtcdAccess) -> Result<EtcdStore, StoreError> {
        let channel = |member: &str| channel(member, access.tls.as_ref());
        let members = endpoints.split(',').map(channel).collect::<Result<Vec<_>, _>>()?;
        Ok(EtcdStore {
            members,
            current: AtomicUsize::new(0),
            user: access.user,
            token: AuthToken::default(),
            health: HealthRecord::default(),
        })
    }

    /// Calls a member, and records whether it replied; `writes` where the call needs space.
    async fn call<T, F>(&self, writes: bool, call: impl Fn(Member) -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let result = self.call_any(call).await;
        self.health.record(&result, writes);
        result
    }

    /// Calls a member; where it is unreachable, each of the others once.
    async fn call_any<T, F>(&self, call: impl Fn(Member) -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let first = self.current.load(Ordering::Relaxed);
        let mut last = StoreError::Unreachable("there are no members".to_string());
        for attempt in 0..self.members.len() {
            let member = (first + attempt) % self.members.len();
            let work = self.call_member(&self.members[member], &call);
            last = match tokio::time::timeout(CALL_TIMEOUT, work).await {
                Ok(Ok(reply)) => {
                    self.current.store(member, Ordering::Relaxed);
                    return Ok(reply);
                }
                Ok(Err(status)) => failure(&status),
                Err(_) => StoreError::Unreachable("no reply in time".to_string()),
            };
            if !matches!(last, StoreError::Unreachable(_)) {
                break;
            }
        }
        Err(last)
    }

    /// Calls one member, with a new token if etcd does not accept the present one.
    async fn call_member<T, F>(
        &self,
        member: &Channel,
        call: &impl Fn(Member) -> F,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let Some((name, password)) = &self.user else {
            return call(InterceptedService::new(member.clone(), AuthToken::default())).await;
        };
        for _ in 0..2 {
            if self.token.get().is_none() {
                self.token.set(Some(authenticate(member, name, password).await?));
            }
            match call(InterceptedService::new(member.clone(), self.token.clone())).await {
                // Tokens expire, and a change of users makes them old.
                Err(status) if is_old_token(&status) => self.token.set(None),
                reply => return reply,
            }
        }
        Err(Status::unauthenticated("etcd does not accept the token that it gave"))
    }
}

fn is_old_token(status: &Status) -> bool {
    status.code() == Code::Unauthenticated || status.message().contains("auth store is old")
}

async fn authenticate(
    member: &Channel,
    name: &str,
    password: &Secret,
) -> Result<MetadataValue<Ascii>, Status> {
    let request = proto::AuthenticateRequest {
        name: name.to_string(),
        password: password.reveal().to_string(),
    };
    let reply = AuthClient::new(member.clone()).authenticate(request).await;
    let reply = reply.map_err(|status| match status.code() {
        // Not a token that expired: asking again does not help.
        Code::Unauthenticated => Status::permission_denied(status.message()),
        _ => status,
    })?;
    let token = reply.into_inner().token.parse::<MetadataValue<Ascii>>();
    let mut token = token.map_err(|_| Status::internal("etcd's token is not text"))?;
    token.set_sensitive(true);
    Ok(token)
}

fn failure(status: &Status) -> StoreError {
    let message = status.message().to_string();
    match status.code() {
        Code::NotFound if message.contains("lease") => StoreError::NoLease,
        Code::OutOfRange => StoreError::Behind,
        Code::InvalidArgument | Code::FailedPrecondition | Code::PermissionDenied => {
            StoreError::Refused(message)
        }
        Code::ResourceExhausted if message.contains("space exceeded") => StoreError::Full(message),
        // It is busy; that passes.
        Code::ResourceExhausted if message.contains("too many requests") => {
            StoreError::Unreachable(message)
        }
        Code::ResourceExhausted | Code::Unauthenticated | Code::Unimplemented => {
            StoreError::Refused(message)
        }
        _ => StoreError::Unreachable(message),
    }
}

fn kv(channel: Member) -> KvClient<Member> {
    KvClient::new(channel).max_decoding_message_size(REPLY_MAX)
}

/// The first key after all keys with this prefix; a zero byte means all keys.
fn range_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(&[0])
}

fn entry(pair: proto::KeyValue) -> Entry {
    Entry {
        key: String::from_utf8_lossy(&pair.key).into_owned(),
        value: pair.value,
        revision: u64::try_from(pair.mod_revision).unwrap_or_default(),
        lease: (pair.lease != 0).then_some(LeaseId(pair.lease)),
    }
}

fn revision_of(header: Option<&proto::ResponseHeader>) -> Revision {
    header.and_then(|header| u64::try_from(header.revision).ok()).unwrap_or_default()
}

fn signed(revision: Revision) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

fn operation(write: Write) -> proto::RequestOp {
    use proto::request_op::Request;
    let request = match write {
        Write::Put { key, value, lease } => Request::RequestPut(proto::PutRequest {
            key: key.into(),
            value,
            lease: lease.map_or(0, |lease| lease.0),
        }),
        Write::Delete { key } => Request::RequestDeleteRange(proto::DeleteRangeRequest {
            key: key.into(),
            ..Default::default()
        }),
    };
    proto::RequestOp { request: Some(request) }
}

fn comparison(condition: Condition) -> proto::Compare {
    use proto::compare::{CompareResult, CompareTarget, TargetUnion};
    proto::Compare {
        result: CompareResult::Equal as i32,
        target: CompareTarget::Mod as i32,
        key: condition.key.into(),
        target_union: Some(TargetUnion::ModRevision(signed(condition.revision))),
    }
}

impl Store for EtcdStore {
    fn get<'a>(&'a self, key: &'a str) -> StoreFuture<'a, Option<Entry>> {
        let request = proto::RangeRequest {
            key: Bytes::copy_from_slice(key.as_bytes()),
            ..Default::default()
        };
        Box::pin(async move {
            let reply = self
                .call(false, |channel| {
                    let request = request.clone();
                    async move { kv(channel).range(request).await }
                })
                .await?
                .into_inner();
            Ok(reply.kvs.into_iter().next().map(entry))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Listing> {
        Box::pin(async move {
            let end = range_end(prefix.as_bytes());
            let mut listing = Listing::default();
            let mut from = Bytes::copy_from_slice(prefix.as_bytes());
            loop {
                // Later pages are read at the revision of the first one, so that the listing is
                // consistent.
                let request = proto::RangeRequest {
                    key: from.clone(),
                    range_end: end.clone(),
                    limit: PAGE,
                    revision: signed(listing.revision),
                };
                let reply = self
                    .call(false, |channel| {
                        let request = request.clone();
                        async move { kv(channel).range(request).await }
                    })
                    .await?
                    .into_inner();
                if listing.revision == 0 {
                    listing.revision = revision_of(reply.header.as_ref());
                }
                let more = reply.more;
                if let Some(last) = reply.kvs.last() {
                    let mut next = last.key.to_vec();
                    next.push(0);
                    from = next.into();
                }
                listing.entries.extend(reply.kvs.into_iter().map(entry));
                if !more {
                    return Ok(listing);
                }
            }
        })
    }

    fn transact(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> StoreFuture<'_, Option<Revision>> {
        Box::pin(async move {
            if writes.len() > OPERATIONS_MAX {
                let message = format!("more than {OPERATIONS_MAX} writes at once");
                return Err(StoreError::Refused(message));
            }
            let needs_space = writes.iter().any(|write| matches!(write, Write::Put { .. }));
            let request = proto::TxnRequest {
                compare: conditions.into_iter().map(comparison).collect(),
                success: writes.into_iter().map(operation).collect(),
                failure: Vec::new(),
            };
            let reply = self
                .call(false, |channel| {
                    let request = request.clone();
                    async move { kv(channel).txn(request).await }
                })
                .await?
                .into_inner();
            if reply.succeeded && needs_space {
                self.health.record(&Ok(()), true);
            }
            Ok(reply.succeeded.then(|| revision_of(reply.header.as_ref())))
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, since: Revision) -> StoreFuture<'a, Watch> {
        let create = proto::WatchCreateRequest {
            key: Bytes::copy_from_slice(prefix.as_bytes()),
            range_end: range_end(prefix.as_bytes()),
            start_revision: signed(since).saturating_add(1),
            progress_notify: false,
        };
        let request = proto::WatchRequest {
            request_union: Some(proto::watch_request::RequestUnion::CreateRequest(create)),
        };
        Box::pin(async move {
            let (requests_in, replies) = self
                .call(false, |channel| {
                    let request = request.clone();
                    async move {
                        // The stream ends when its sender is dropped, so the sender lives as long
                        // as the watch.
                        let (requests_in, requests) = mpsc::channel(1);
                        let _ = requests_in.send(request).await;
                        let mut client =
                            WatchClient::new(channel).max_decoding_message_size(REPLY_MAX);
                        let replies = client.watch(stream(requests)).await?;
                        Ok((requests_in, replies.into_inner()))
                    }
                })
                .await?;
            let (changed, changes) = mpsc::channel(WATCH_BUFFER);
            tokio::spawn(forward(requests_in, replies, changed, since));
            Ok(Watch { changes })
        })
    }

    fn grant(&self, span: Duration) -> StoreFuture<'_, LeaseId> {
        let seconds = i64::try_from(span.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1);
        Box::pin(async move {
            let request = proto::LeaseGrantRequest { ttl: seconds, id: 0 };
            let reply = self
                .call(true, |channel| async move {
                    LeaseClient::new(channel).lease_grant(request).await
                })
                .await?
                .into_inner();
            match reply.error.is_empty() {
                true => Ok(LeaseId(reply.id)),
                false => Err(StoreError::Refused(reply.error)),
            }
        })
    }

    fn renew(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let reply = self
                .call(false, |channel| async move {
                    let request = proto::LeaseKeepAliveRequest { id: lease.0 };
                    let once = futures_util::stream::iter([request]);
                    let mut client = LeaseClient::new(channel);
                    let mut replies = client.lease_keep_alive(once).await?.into_inner();
                    replies.message().await
                })
                .await?;
            match reply {
                Some(reply) if reply.ttl > 0 => Ok(()),
                Some(_) => Err(StoreError::NoLease),
                None => Err(StoreError::Unreachable("no reply to a renewal".to_string())),
            }
        })
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let request = proto::LeaseRevokeRequest { id: lease.0 };
            let reply = self
                .call(false, |channel| async move {
                    LeaseClient::new(channel).lease_revoke(request).await
                })
                .await;
            match reply {
                Ok(_) | Err(StoreError::NoLease) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn compact(&self, revision: Revision) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let request = proto::CompactionRequest { revision: signed(revision), physical: false };
            let reply =
                self.call(false, |channel| async move { kv(channel).compact(request).await }).await;
            match reply {
                // Another client was faster.
                Ok(_) | Err(StoreError::Behind) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn space(&self) -> StoreFuture<'_, StoreSpace> {
        Box::pin(async move {
            let mut space = StoreSpace::default();
            let mut last = None;
            for member in &self.members {
                let status = |channel: Member| async move {
                    MaintenanceClient::new(channel).status(proto::StatusRequest {}).await
                };
                let work = self.call_member(member, &status);
                match tokio::time::timeout(CALL_TIMEOUT, work).await {
                    Ok(Ok(reply)) => {
                        let reply = reply.into_inner();
                        let bytes = u64::try_from(reply.db_size).unwrap_or_default();
                        let used = u64::try_from(reply.db_size_in_use).unwrap_or_default();
                        space.bytes = space.bytes.max(bytes);
                        space.used_bytes = space.used_bytes.max(used);
                        space.full |= reply.errors.iter().any(|error| error.contains("NOSPACE"));
                    }
                    Ok(Err(status)) => last = Some(failure(&status)),
                    Err(_) => {
                        last = Some(StoreError::Unreachable("no reply in time".to_string()));
                    }
                }
            }
            match last {
                Some(error) if space.bytes == 0 => Err(error),
                _ => Ok(space),
            }
        })
    }

    fn reclaim(&self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            // One after the other: a member does not answer while it is defragmented.
            for member in &self.members {
                let defragment = |channel: Member| async move {
                    MaintenanceClient::new(channel).defragment(proto::DefragmentRequest {}).await
                };
                let work = self.call_member(member, &defragment);
                match tokio::time::timeout(RECLAIM_TIMEOUT, work).await {
                    Ok(reply) => reply.map_err(|status| failure(&status))?,
                    Err(_) => {
                        let why = "the defragmentation takes too long".to_string();
                        return Err(StoreError::Unreachable(why));
                    }
                };
            }
            use proto::alarm_request::AlarmAction;
            let alarm = async |action: AlarmAction, member: u64| {
                let request = proto::AlarmRequest {
                    action: action as i32,
                    member_id: member,
                    alarm: proto::AlarmType::Nospace as i32,
                };
                let call = |channel: Member| async move {
                    MaintenanceClient::new(channel).alarm(request).await
                };
                self.call(false, call).await
            };
            for raised in alarm(AlarmAction::Get, 0).await?.into_inner().alarms {
                alarm(AlarmAction::Deactivate, raised.member_id).await?;
            }
            Ok(())
        })
    }

    fn health(&self) -> StoreHealth {
        self.health.get()
    }
}

fn stream<T: Send + 'static>(
    receiver: mpsc::Receiver<T>,
) -> impl futures_util::Stream<Item = T> + Send + 'static {
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|item| (item, receiver))
    })
}

/// Forwards a watch's replies until either side ends.
async fn forward(
    requests_in: mpsc::Sender<proto::WatchRequest>,
    mut replies: tonic::Streaming<proto::WatchResponse>,
    changed: mpsc::Sender<Result<Vec<Change>, StoreError>>,
    since: Revision,
) {
    loop {
        let reply = tokio::select! {
            () = changed.closed() => break,
            reply = replies.message() => reply,
        };
        let forwarded = match reply {
            Ok(Some(reply)) if reply.compact_revision > 0 => Err(StoreError::Behind),
            // An etcd that has lost its data counts from the beginning, and would say nothing until
            // it is there again.
            Ok(Some(reply)) if revision_of(reply.header.as_ref()) < since => {
                Err(StoreError::Behind)
            }
            Ok(Some(reply)) if reply.canceled => Err(StoreError::Refused(reply.cancel_reason)),
            Ok(Some(reply)) if reply.events.is_empty() => continue,
            Ok(Some(reply)) => Ok(reply.events.into_iter().filter_map(change).collect()),
            Ok(None) => Err(StoreError::Unreachable("the watch ended".to_string())),
            Err(status) => Err(failure(&status)),
        };
        let ended = forwarded.is_err();
        if changed.send(forwarded).await.is_err() || ended {
            break;
        }
    }
    drop(requests_in);
}

fn change(event: proto::Event) -> Option<Change> {
    let deleted = event.r#type() == proto::event::EventType::Delete;
    let entry = entry(event.kv?);
    Some(match deleted {
        true => Change::Delete { key: entry.key, revision: entry.revision },
        false => Change::Put(entry),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_ends_after_the_prefix() {
        assert_eq!(&range_end(b"/a")[..], b"/b");
        assert_eq!(&range_end(&[1, 0xff])[..], [2]);
        assert_eq!(&range_end(&[0xff])[..], [0]);
        assert_eq!(&range_end(b"")[..], [0]);
    }

    #[test]
    fn rejects_bad_endpoints() {
        assert!(EtcdStore::new("", EtcdAccess::default()).is_err());
        assert!(EtcdStore::new("http://a:1", EtcdAccess::default()).is_err());
    }
}
