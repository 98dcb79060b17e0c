//! Requests of a model with a canary, sent by a real frontend to backends that are played here:
//! each gets one reply, from a version that it may get, whatever the canary's backends do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use api::canary::CanaryState;
use api::error::ApiResult;
use api::{
    CanaryChoice, CanaryOptions, ErrorKind, InferOptions, InferRequest, InferResponse,
    InferenceService, Inputs, ModelRef, NamedTensor, RequestContext, ServerMetadata,
};
use base::{MonotonicClock, Random};
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::record::canary::served_name;
use cluster::record::{
    BackendRecord, FrontendRecord, Keys, LoadReport, ModelRecord, RecordKind, RouteRecord,
    TargetRecord, VersionRecord, decode, encode,
};
use cluster::store::{self, Store, Write};
use model::Tensor;

mod played;

use played::{Backend, INTERNAL, INVALID_ARGUMENT, Mood, UNAVAILABLE, until, version_of};

/// A frontend with the model `m`: version 1 in force, version 2 its canary with this share.
struct Fixture {
    store: Arc<dyn Store>,
    keys: Keys,
    frontend: Frontend,
    backends: Vec<Arc<Backend>>,
    record: ModelRecord,
}

impl Fixture {
    async fn start(share_percent: f64) -> Fixture {
        let clock = Arc::new(MonotonicClock::new());
        let access = store::etcd::EtcdAccess::default();
        let store = store::open("memory", access, clock.clone()).unwrap();
        let keys = Keys::new("test");
        let backends = vec![Backend::start().await, Backend::start().await];
        let digest = "one".to_string();
        let record = ModelRecord { version: 1, digest, enabled: true, ..ModelRecord::default() };
        let (digest, config) = ("two".to_string(), Default::default());
        let canary = VersionRecord { version: 2, digest, bytes: 1, config };
        let record = record.with_canary(canary, &CanaryOptions::with_share(share_percent));
        let settings = FrontendSettings {
            name: "frontend".to_string(),
            lease: Duration::from_secs(5),
            metadata: ServerMetadata {
                name: String::new(),
                version: String::new(),
                extensions: Vec::new(),
            },
            requests_max: 1000,
            timeout: Duration::from_secs(20),
            files: None,
            backend_tls: None,
            saved: None,
            cold_start: Default::default(),
            limits: Default::default(),
            memory: Default::default(),
        };
        let frontend = Frontend::start(store.clone(), keys.clone(), clock, settings).await.unwrap();
        let fixture = Fixture { store, keys, frontend, backends, record };
        fixture.write().await;
        fixture
    }

    /// Writes records and routes as a scheduler does.
    async fn write(&self) {
        let target = |(index, backend): (usize, &Arc<Backend>), version| TargetRecord {
            backend: format!("b{index}"),
            grpc: backend.address.clone(),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 0.0,
            cycle_ms: 0.0,
            min_batch: 0,
            version,
        };
        let route = |version: u64| {
            let backends = self.backends.iter().enumerate();
            let targets = backends.map(|backend| target(backend, version)).collect();
            encode(&RouteRecord { epoch: 1, targets, rate_max: None })
        };
        let mut writes = Vec::new();
        for (index, backend) in self.backends.iter().enumerate() {
            let record = BackendRecord { grpc: backend.address.clone(), ..Default::default() };
            let key = self.keys.one(RecordKind::Backend, &format!("b{index}"));
            writes.push(Write::put(key, encode(&record)));
        }
        let key = |kind, name: &str| self.keys.one(kind, name);
        writes.push(Write::put(key(RecordKind::Model, "m"), encode(&self.record)));
        writes.push(Write::put(key(RecordKind::Route, "m"), route(self.record.version)));
        let canary = key(RecordKind::Route, &served_name("m", 2));
        writes.push(match self.record.canary {
            Some(_) => Write::put(canary, route(2)),
            None => Write::delete(canary),
        });
        self.store.transact(vec![], writes).await.unwrap();
        let canary = self.record.canary.clone();
        until("the frontend sees the record", || async {
            let status = self.frontend.canary("m").await;
            status.is_ok_and(|status| (status.state == CanaryState::Running) == canary.is_some())
        })
        .await;
    }

    async fn send(&self, version: Option<u64>, canary: CanaryChoice) -> ApiResult<InferResponse> {
        let tensor = Tensor::from_vec(vec![1], vec![0.0f32]).unwrap();
        let request = InferRequest {
            id: "7".to_string(),
            options: InferOptions { binary_output: true, ..InferOptions::default() },
            inputs: Inputs::Named(vec![NamedTensor { name: "x".into(), tensor }]),
            outputs: Vec::new(),
        };
        let context = RequestContext { canary, ..RequestContext::default() };
        self.frontend.infer(ModelRef { name: "m", version }, request, context).await
    }

    fn set_mood(&self, mood: Mood) {
        for (index, backend) in self.backends.iter().enumerate() {
            // Without any connection, nobody could serve.
            let is_left = mood == Mood::Breaks && index > 0;
            *backend.mood.lock().unwrap() = if is_left { Mood::Good } else { mood };
        }
    }

    fn sum(&self, of: impl Fn(&Backend) -> &AtomicU64) -> u64 {
        self.backends.iter().map(|backend| of(backend).load(SeqCst)).sum()
    }

    /// The counts that the frontend reports.
    async fn reported(&self) -> cluster::record::canary::CanaryLoad {
        let key = self.keys.one(RecordKind::Load, "frontend");
        let entry = self.store.get(&key).await.unwrap();
        let report: Option<LoadReport> = entry.and_then(|entry| decode(&key, &entry.value));
        let mut report = report.unwrap_or_default();
        let key = self.keys.one(RecordKind::LoadDelta, "frontend/rest");
        if let Some(entry) = self.store.get(&key).await.unwrap()
            && let Some(rest) = decode::<LoadReport>(&key, &entry.value)
            && rest.number == report.number
        {
            report = rest;
        }
        report.canaries.remove("m").unwrap_or_default()
    }
}

#[tokio::test]
async fn every_request_gets_one_reply_of_a_version_that_it_may_get() {
    let fixture = Fixture::start(30.0).await;
    let mut random = Random::new(17);
    let moods = [
        Mood::Good,
        Mood::Fails(UNAVAILABLE),
        Mood::Good,
        Mood::Fails(INTERNAL),
        Mood::Breaks,
        Mood::Good,
        Mood::Fails(INVALID_ARGUMENT),
    ];
    for mood in moods {
        fixture.set_mood(mood);
        let mut drawn = 0;
        for _ in 0..20 {
            let choices: Vec<(Option<u64>, CanaryChoice)> = (0..10)
                .map(|_| match random.below(8) {
                    0 => (Some(1), CanaryChoice::Always),
                    1 => (Some(2), CanaryChoice::Never),
                    2 => (Some(3), CanaryChoice::ByShare),
                    3 => (None, CanaryChoice::Never),
                    4 => (None, CanaryChoice::Always),
                    5 => (None, CanaryChoice::ByKey(random.next_u64())),
                    _ => (None, CanaryChoice::ByShare),
                })
                .collect();
            let replies = choices.iter().map(|(version, choice)| fixture.send(*version, *choice));
            let replies = futures_util::future::join_all(replies).await;
            for ((version, choice), reply) in choices.into_iter().zip(replies) {
                match (version, choice, reply) {
                    (Some(3), _, reply) => {
                        assert_eq!(reply.unwrap_err().kind, ErrorKind::NotFound);
                    }
                    (Some(2), _, Err(error)) => {
                        assert!(mood != Mood::Good, "{error}");
                        assert!(!error.message.contains('@'), "{error}");
                    }
                    (Some(version), _, reply) => assert_eq!(version_of(&reply.unwrap()), version),
                    (None, CanaryChoice::Never, reply) => {
                        assert_eq!(version_of(&reply.unwrap()), 1)
                    }
                    (None, CanaryChoice::Always, reply) if mood == Mood::Good => {
                        let _ = version_of(&reply.unwrap());
                    }
                    // Whatever the canary does, the stable version answers.
                    (None, _, reply) => {
                        let version = version_of(&reply.unwrap());
                        let may_serve = matches!(mood, Mood::Good | Mood::Breaks);
                        assert!(version == 1 || may_serve, "{version} while {mood:?}");
                        drawn += version - 1;
                    }
                }
            }
        }
        assert!(drawn > 0 || mood != Mood::Good, "nothing was drawn for the canary");
    }
}

#[tokio::test]
async fn shares_and_counts_are_right_and_reported() {
    let fixture = Fixture::start(20.0).await;
    let record = FrontendRecord::default();
    let _membership = fixture.frontend.join(fixture.store.clone(), &fixture.keys, &record);
    let mut by_version: BTreeMap<u64, u64> = BTreeMap::new();
    let count = 3000u64;
    for _ in 0..count / 20 {
        let replies = (0..20).map(|_| fixture.send(None, CanaryChoice::ByShare));
        for reply in futures_util::future::join_all(replies).await {
            *by_version.entry(version_of(&reply.unwrap())).or_default() += 1;
        }
    }
    // Those that choose their version are not judged.
    for (version, choice) in [(Some(2), CanaryChoice::ByShare), (None, CanaryChoice::Always)] {
        assert_eq!(version_of(&fixture.send(version, choice).await.unwrap()), 2);
    }
    let deviation = (count as f64 * 0.2 * 0.8).sqrt();
    let canary = by_version[&2];
    assert!((canary as f64 - 0.2 * count as f64).abs() < 4.0 * deviation, "{by_version:?}");
    assert_eq!(fixture.sum(|backend| &backend.answered), canary + 2);
    until("the counts are not reported", || async {
        let load = fixture.reported().await;
        (load.number, load.stable.requests, load.canary.requests)
            == (1, by_version[&1], by_version[&2])
            && load.canary.replies() == by_version[&2]
    })
    .await;
    // What only the canary refuses is its failure, also where it blames the client.
    fixture.set_mood(Mood::Fails(INVALID_ARGUMENT));
    let (seen, before) = (fixture.sum(|backend| &backend.seen), fixture.reported().await.canary);
    for _ in 0..100 {
        assert_eq!(version_of(&fixture.send(None, CanaryChoice::ByShare).await.unwrap()), 1);
    }
    let failed = fixture.sum(|backend| &backend.seen) - seen;
    assert!(failed > 0);
    until("the failures are not reported", || async {
        fixture.reported().await.canary.failures == before.failures + failed
    })
    .await;
}

#[tokio::test]
async fn a_canary_that_hangs_costs_no_reply() {
    let fixture = Fixture::start(50.0).await;
    for _ in 0..20 {
        assert_eq!(version_of(&fixture.send(None, CanaryChoice::Never).await.unwrap()), 1);
    }
    fixture.set_mood(Mood::Hangs);
    let replies = (0..10).map(|_| fixture.send(None, CanaryChoice::Always));
    for reply in futures_util::future::join_all(replies).await {
        assert_eq!(version_of(&reply.unwrap()), 1);
    }
    assert!(fixture.sum(|backend| &backend.seen) >= 10);
}

#[tokio::test]
async fn index_metadata_and_routes_agree_while_a_canary_comes_and_goes() {
    let mut fixture = Fixture::start(50.0).await;
    let frontend = fixture.frontend.clone();
    let rows = || async {
        let rows = frontend.index(true).await.unwrap();
        rows.into_iter().map(|row| (row.name, row.version, row.reason)).collect::<Vec<_>>()
    };
    let row = |version: &str, reason: &str| ("m".to_string(), version.into(), reason.into());
    assert_eq!(rows().await, [row("1", ""), row("2", "canary")]);
    let is_ready = |name: &'static str, version| frontend.model_ready(ModelRef { name, version });
    assert!(is_ready("m", Some(2)).await.unwrap() && is_ready("m", Some(1)).await.unwrap());
    // A canary is a version, and no model.
    let unknown = is_ready("m@2", None).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::NotFound);

    let (store, keys) = (fixture.store.clone(), fixture.keys.clone());
    // Backends without the canary: everything goes to the stable version, at once.
    let nowhere = encode(&RouteRecord::default());
    store.put(&keys.one(RecordKind::Route, "m@2"), nowhere, None).await.unwrap();
    until("the route is still there", || async { !is_ready("m", Some(2)).await.unwrap() }).await;
    for _ in 0..50 {
        assert_eq!(version_of(&fixture.send(None, CanaryChoice::Always).await.unwrap()), 1);
    }
    let error = fixture.send(Some(2), CanaryChoice::ByShare).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");

    fixture.record = fixture
        .record
        .without_canary(cluster::record::canary::CanaryOutcome::RolledBack, "it is slow");
    fixture.write().await;
    assert_eq!(rows().await, [row("1", "")]);
    let status = frontend.canary("m").await.unwrap();
    assert_eq!((status.state, status.why.as_str()), (CanaryState::RolledBack, "it is slow"));
    let error = fixture.send(Some(2), CanaryChoice::ByShare).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
    assert_eq!(version_of(&fixture.send(None, CanaryChoice::Always).await.unwrap()), 1);
}

/// A cluster at zero: the version in force comes back first, the canary later.
#[tokio::test]
async fn a_request_that_waits_at_zero_gets_the_version_it_chose() {
    let fixture = Fixture::start(50.0).await;
    let (store, keys) = (&fixture.store, &fixture.keys);
    let scaling = encode(&cluster::record::ScalingRecord::default());
    let nowhere = || encode(&RouteRecord::default());
    let route = async |name: &str| {
        let entry = store.get(&keys.one(RecordKind::Route, name)).await.unwrap();
        (keys.one(RecordKind::Route, name), entry.unwrap().value)
    };
    let (stable, canary) = (route("m").await, route("m@2").await);
    let gone = || async {
        let served = async |version| {
            let model = ModelRef { name: "m", version };
            fixture.frontend.model_ready(model).await.unwrap_or(false)
        };
        !served(Some(1)).await && !served(Some(2)).await
    };
    let choices = [
        (None, CanaryChoice::Always, 2),
        (None, CanaryChoice::Never, 1),
        (Some(1), CanaryChoice::ByShare, 1),
        (Some(2), CanaryChoice::ByShare, 2),
        (Some(2), CanaryChoice::Never, 2),
    ];
    for canary_comes in [true, false] {
        let empty = [&stable.0, &canary.0].map(|key| Write::put(key.clone(), nowhere()));
        store.put(&keys.scaling(), scaling.clone(), None).await.unwrap();
        store.transact(vec![], empty.to_vec()).await.unwrap();
        until("the routes are still there", gone).await;
        let sent = choices.iter().map(|(version, choice, _)| fixture.send(*version, *choice));
        let arrive = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            store.put(&stable.0, stable.1.clone(), None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            if canary_comes {
                store.put(&canary.0, canary.1.clone(), None).await.unwrap();
                return;
            }
            // It has ended.
            let outcome = cluster::record::canary::CanaryOutcome::Aborted;
            let record = fixture.record.without_canary(outcome, "it cannot be loaded");
            let key = keys.one(RecordKind::Model, "m");
            store.put(&key, encode(&record), None).await.unwrap();
        };
        let (replies, ()) = tokio::join!(futures_util::future::join_all(sent), arrive);
        for ((version, choice, expected), reply) in choices.iter().zip(replies) {
            match (canary_comes, version) {
                (false, Some(2)) => {
                    assert_eq!(reply.unwrap_err().kind, ErrorKind::NotFound, "{choice:?}");
                }
                (false, _) => assert_eq!(version_of(&reply.unwrap()), 1, "{choice:?}"),
                (true, _) => assert_eq!(version_of(&reply.unwrap()), *expected, "{choice:?}"),
            }
        }
    }
}
