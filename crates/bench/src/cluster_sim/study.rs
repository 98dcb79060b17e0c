//! Nexus's two case studies (SOSP'19, section 7.3) with its techniques turned off one after
//! another: figures 10 and 11.
//!
//! Profiles are linear through the times the paper gives for a batch of one; how much larger
//! batches save is not published, so the slopes are ours and stated here. Everything else is the
//! product's: query split, packing, routing, batching and dropping.

use std::collections::HashMap;

use base::Nanos;
use cluster::query::{QueryStage, stage_demands};
use cluster::scheduler::packing::Packer;
use cluster::scheduler::placement::{PlacementSettings, place};
use cluster::scheduler::plan::{Curve, Curves, Demand, LoadedModels, Machine};
use cluster::scheduler::pooling::{self, BackendPools};
use runtime::batching::BatchProfile;
use serde::Serialize;

use super::{ClusterSession, ClusterSim, QuerySource, RouteTarget};

/// Techniques that are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Techniques {
    /// Machines of one model form a backend pool; not in the paper.
    pub pools: bool,
    /// Prefix batching: specialised versions of a model run as one.
    pub prefix: bool,
    /// The query's SLO is split for the fewest GPUs; otherwise evenly.
    pub split: bool,
    /// Batch-aware packing; otherwise shares of GPUs by rate over best throughput.
    pub squishy: bool,
    /// Early drop; otherwise requests are dropped only once they are late.
    pub early: bool,
    /// The CPU prepares the next batch while the GPU runs this one; otherwise one after the other.
    pub overlap: bool,
}

/// All techniques.
pub const FULL: Techniques = Techniques {
    pools: true,
    prefix: true,
    split: true,
    squishy: true,
    early: true,
    overlap: true,
};

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct StudyRow {
    /// Techniques that are off, in the paper's words.
    pub system: &'static str,
    /// Highest rate of queries with 99 % of replies in time.
    pub rate: f64,
    /// The paper's figure, if there is one.
    pub paper: Option<f64>,
}

/// One model of a study.
struct StudyModel {
    /// Milliseconds a request adds.
    alpha_ms: f64,
    /// Milliseconds of a batch apart from its requests.
    beta_ms: f64,
    /// Milliseconds a CPU core needs to prepare a request.
    prepare_ms: f64,
    batch_max: u32,
}

/// CPU cores that prepare requests of one GPU.
const CORES: u32 = 6;
const GPUS: usize = 16;
/// Seconds of load by which a rate is judged, after a second of warm-up.
const SECONDS: u64 = 8;
const GOOD: f64 = 0.99;

impl StudyModel {
    /// Milliseconds that a batch occupies the GPU.
    fn ms(&self, batch: u32, overlap: bool) -> f64 {
        let run = self.alpha_ms * f64::from(batch) + self.beta_ms;
        let prepare = self.prepare_ms * f64::from(batch.div_ceil(CORES));
        if overlap { run } else { run + prepare }
    }

    fn curve(&self, overlap: bool) -> Vec<(u32, f64)> {
        (1..=self.batch_max).map(|batch| (batch, self.ms(batch, overlap))).collect()
    }
}

/// A study for one set of techniques and one rate.
struct StudySetup {
    /// Models with rate, SLO and batch times.
    stages: Vec<(f64, f64, Curve)>,
    feeds: Vec<Vec<(usize, f64)>>,
    sources: Vec<QuerySource>,
}

/// Share of queries with replies in time.
fn good_share(setup: StudySetup, techniques: Techniques) -> f64 {
    let name = |index: usize| format!("s{index:03}");
    let machines: Vec<Machine> = (0..GPUS)
        .map(|gpu| Machine { name: format!("g{gpu:02}"), device: "gpu".into(), memory_bytes: 0 })
        .collect();
    let mut curves = Curves::new();
    let mut demands = Vec::new();
    for (index, (rate, slo_ms, curve)) in setup.stages.iter().enumerate() {
        curves.insert(("gpu".to_string(), name(index)), curve.clone());
        demands.push(Demand {
            model: name(index),
            rate: *rate,
            slo_ms: *slo_ms,
            real_time: true,
            memory_bytes: 0,
            prefix_group: None,
        });
    }
    let packer = if techniques.squishy { Packer::Certified } else { Packer::Oblivious };
    let settings = PlacementSettings {
        headroom: 0.0,
        copies: 1,
        spread: true,
        packer,
        pooled: techniques.pools,
    };
    let placement = place(&machines, &demands, &curves, &LoadedModels::new(), &settings);
    let sessions = setup.stages.iter().zip(&setup.feeds).map(|((_, slo_ms, curve), feeds)| {
        let latencies = curve.iter().map(|(_, ms)| Nanos((ms * 1e6) as u64)).collect();
        ClusterSession {
            profile: BatchProfile::from_latencies(latencies)
                .unwrap_or_else(|| BatchProfile::linear(Nanos(1), Nanos(1), 1)),
            budget: Nanos((slo_ms * 1e6) as u64),
            feeds: feeds.clone(),
        }
    });
    let mut cluster =
        ClusterSim::new(sessions.collect(), GPUS, setup.sources, 1, !techniques.early);
    let index: HashMap<String, usize> = (0..demands.len()).map(|i| (name(i), i)).collect();
    let devices = machines.iter().map(|m| (m.name.clone(), m.device.clone())).collect();
    let pools = match techniques.pools {
        true => pooling::pools(&placement, &devices, &demands, &curves, |_| 1.0 / placement.scale),
        false => BackendPools::default(),
    };
    let mut routes: Vec<Vec<RouteTarget>> = vec![Vec::new(); demands.len()];
    for (gpu, machine) in machines.iter().enumerate() {
        let Some(cycle) = placement.duty_cycles.get(&machine.name) else { continue };
        let held: Vec<(usize, usize)> =
            cycle.parts.iter().map(|part| (index[&part.model], part.batch as usize)).collect();
        cluster.hold(gpu, &held);
        for part in &cycle.parts {
            let least = pools.min_batch(&machine.name, &part.model) as usize;
            routes[index[&part.model]].push(RouteTarget { gpu, weight: part.rate, least });
        }
    }
    routes.iter().enumerate().for_each(|(session, targets)| cluster.route(session, targets));
    cluster.run_until(Nanos::from_millis((SECONDS + 1) * 1000));
    let seconds = &cluster.seconds()[1..=(SECONDS as usize - 1)];
    let (sent_queries, bad) =
        seconds.iter().fold((0, 0), |(a, b), t| (a + t.sent_queries, b + t.bad));
    1.0 - bad as f64 / (sent_queries as f64).max(1.0)
}

/// The highest rate with enough replies in time, to a percent.
fn highest(setup: impl Fn(f64) -> Option<StudySetup>, techniques: Techniques, top: f64) -> f64 {
    let works = |rate: f64| setup(rate).is_some_and(|s| good_share(s, techniques) >= GOOD);
    let (mut low, mut high) = (0.0, top);
    while high - low > 0.01 * high {
        let middle = (low + high) / 2.0;
        if works(middle) { low = middle } else { high = middle }
    }
    low
}

/// Twenty games with an SLO of 50 ms; frames have six numbers and an icon: LeNet and ResNet-50,
/// specialised for each game.
fn game(rate: f64, techniques: Techniques) -> Option<StudySetup> {
    const GAMES: usize = 20;
    const SLO_MS: f64 = 50.0;
    let resnet = StudyModel { alpha_ms: 1.2, beta_ms: 5.0, prepare_ms: 10.0, batch_max: 48 };
    let lenet = StudyModel { alpha_ms: 0.02, beta_ms: 0.08, prepare_ms: 1.0, batch_max: 64 };
    let weight = |game: usize| 1.0 / ((game + 1) as f64).powf(0.9);
    let total: f64 = (0..GAMES).map(weight).sum();
    // Preparing takes its time from the SLO in any case.
    let slo = |model: &StudyModel| SLO_MS - if techniques.overlap { model.prepare_ms } else { 0.0 };
    let mut setup = StudySetup { stages: Vec::new(), feeds: Vec::new(), sources: Vec::new() };
    let variants = if techniques.prefix { 1 } else { GAMES };
    for model in [&resnet, &lenet] {
        let numbers = if model.beta_ms < 1.0 { 6.0 } else { 1.0 };
        for variant in 0..variants {
            let part = if techniques.prefix { 1.0 } else { weight(variant) / total };
            let curve = model.curve(techniques.overlap);
            setup.stages.push((rate * part * numbers, slo(model), curve));
            setup.feeds.push(Vec::new());
        }
    }
    for game in 0..GAMES {
        let (icon, number) = if techniques.prefix { (0, 1) } else { (game, GAMES + game) };
        let rate = rate * weight(game) / total;
        setup.sources.push(QuerySource {
            rate,
            sessions_per_query: vec![(icon, 1), (number, 6)],
            poisson: false,
        });
    }
    Some(setup)
}

/// Twenty cameras with an SLO of 400 ms: SSD on every frame, then a face or a car model on each
/// detection.
fn traffic(rate: f64, techniques: Techniques, rush: bool) -> Option<StudySetup> {
    const SLO_MS: f64 = 400.0;
    let ssd = StudyModel { alpha_ms: 22.0, beta_ms: 25.0, prepare_ms: 10.0, batch_max: 16 };
    let face = StudyModel { alpha_ms: 3.2, beta_ms: 3.2, prepare_ms: 2.0, batch_max: 64 };
    let car = StudyModel { alpha_ms: 1.3, beta_ms: 2.9, prepare_ms: 2.0, batch_max: 64 };
    let (faces, cars) = if rush { (1.5, 5.0) } else { (0.3, 1.0) };
    let all = [&ssd, &face, &car];
    let rates = [rate, rate * faces, rate * cars];
    let stages: Vec<QueryStage> = (0..3)
        .map(|index| QueryStage {
            model: index.to_string(),
            rate: rates[index],
            curve: all[index].curve(techniques.overlap),
            next: if index == 0 { vec![1, 2] } else { Vec::new() },
        })
        .collect();
    let prepare = if techniques.overlap { ssd.prepare_ms + face.prepare_ms } else { 0.0 };
    let split =
        stage_demands(&stages, SLO_MS - prepare, !techniques.split, techniques.pools).ok()?;
    let mut setup = StudySetup { stages: Vec::new(), feeds: Vec::new(), sources: Vec::new() };
    for (index, stage) in stages.into_iter().enumerate() {
        setup.stages.push((stage.rate, split.budgets_ms[index], stage.curve));
        setup.feeds.push(if index == 0 { vec![(1, faces), (2, cars)] } else { Vec::new() });
    }
    for _ in 0..20 {
        let source =
            QuerySource { rate: rate / 20.0, sessions_per_query: vec![(0, 1)], poisson: false };
        setup.sources.push(source);
    }
    Some(setup)
}

/// Figure 10.
pub fn figure_10() -> Vec<StudyRow> {
    let nexus = Techniques { pools: false, ..FULL };
    let separate = Techniques { prefix: false, ..nexus };
    let oblivious = Techniques { squishy: false, ..separate };
    let lazy = Techniques { early: false, ..oblivious };
    let rows: [(&'static str, Techniques, Option<f64>); 7] = [
        ("full", FULL, None),
        ("-PO", nexus, Some(4120.0)),
        ("-PO -PB", separate, None),
        ("-PO -PB -SS", oblivious, None),
        ("-PO -PB -SS -ED", lazy, Some(2143.0)),
        ("-PO -PB -SS -ED -OL", Techniques { overlap: false, ..lazy }, Some(2143.0 / 7.4)),
        ("TF Serving (paper)", FULL, Some(4120.0 / 12.7)),
    ];
    study(&rows, game, 20_000.0)
}

/// Figure 11, outside rush hour, or figure 12's other half.
pub fn figure_11(rush: bool) -> Vec<StudyRow> {
    let paper = |normal: f64, rush_hour: Option<f64>| if rush { rush_hour } else { Some(normal) };
    let nexus = Techniques { pools: false, ..FULL };
    let even = Techniques { split: false, ..nexus };
    let oblivious = Techniques { squishy: false, ..even };
    let lazy = Techniques { early: false, ..oblivious };
    let rows: [(&'static str, Techniques, Option<f64>); 7] = [
        ("full", FULL, None),
        ("-PO", nexus, paper(534.0, Some(264.0))),
        ("-PO -QA", even, paper(433.0, None)),
        ("-PO -QA -SS", oblivious, None),
        ("-PO -QA -SS -ED", lazy, paper(326.0, None)),
        ("-PO -QA -SS -ED -OL", Techniques { overlap: false, ..lazy }, paper(216.0, None)),
        ("TF Serving (paper)", FULL, paper(227.0, Some(146.0))),
    ];
    study(&rows, |rate, techniques| traffic(rate, techniques, rush), 3000.0)
}

fn study(
    rows: &[(&'static str, Techniques, Option<f64>)],
    setup: impl Fn(f64, Techniques) -> Option<StudySetup>,
    top: f64,
) -> Vec<StudyRow> {
    let row = |&(system, techniques, paper): &(&'static str, Techniques, Option<f64>)| {
        let rate = match system.contains("(paper)") {
            true => 0.0,
            false => highest(|rate| setup(rate, techniques), techniques, top),
        };
        StudyRow { system, rate: rate.round(), paper: paper.map(f64::round) }
    };
    rows.iter().map(row).collect()
}

/// The table as text.
pub fn text(title: &str, rows: &[StudyRow]) -> String {
    let mut text = format!("{title}\n{:<22} {:>10} {:>10}\n", "system", "queries/s", "paper");
    for row in rows {
        let shown = |value: f64| if value > 0.0 { format!("{value:.0}") } else { "-".to_string() };
        let paper = row.paper.map_or("-".to_string(), shown);
        text.push_str(&format!("{:<22} {:>11} {:>10}\n", row.system, shown(row.rate), paper));
    }
    if let (Some(full), Some(bare)) = (rows.first(), rows.get(rows.len().saturating_sub(2))) {
        text.push_str(&format!(
            "full is {:.2}x of everything off\n",
            full.rate / bare.rate.max(1.0)
        ));
    }
    text
}
