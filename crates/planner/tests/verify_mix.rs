//! Verification of plans over several kinds of GPUs, with spare capacity: accepts what the planner
//! writes, and nothing that was changed.

use base::{MonotonicClock, Random};
use planner::gpu_mix::{
    FailureDomain, GpuOffer, Layout, MixKind, MixObjective, MixProblem, ServeFirst, check_mix,
    plan_mix,
};
use planner::plan::ShareFile;
use planner::verify::mix::MixFile;
use planner::{
    GpuKind, OperatingPoint, PlanRules, Profiles, SearchControl, Service, ServiceTerms, Sharing,
};

fn kind(name: &str, speed: f64, offers: &[(f64, Option<usize>)]) -> MixKind {
    let gpu = GpuKind::find(name).unwrap();
    let mut profiles = Profiles::default();
    for (model, base) in [("m0", 40.0), ("m1", 90.0)] {
        for slice in gpu.slices {
            for batch in [1u32, 4, 16] {
                let gain = f64::from(batch).powf(0.4);
                let throughput = base * speed * f64::from(slice.gpcs).powf(0.9) * gain;
                let point = OperatingPoint {
                    gpcs: slice.gpcs,
                    batch,
                    processes: 1,
                    throughput,
                    latency_ms: f64::from(batch) / throughput * 1000.0,
                    memory_mib: Some(1500),
                };
                profiles.push(model, point).unwrap();
            }
        }
    }
    let offer = |&(price, count): &(f64, Option<usize>)| GpuOffer {
        name: "o".to_string(),
        price,
        watts: 300.0,
        count,
    };
    MixKind { gpu, profiles, offers: offers.iter().map(offer).collect() }
}

fn problem(seed: u64, sharing: Sharing, survive: Option<FailureDomain>) -> MixProblem {
    let mut random = Random::new(seed);
    let service = |index: u64| Service {
        name: format!("s{index}"),
        model: format!("m{}", random.below(2)),
        rate: 2.0 * 300f64.powf(random.unit_f64()),
        slo_ms: 60.0 + 400.0 * random.unit_f64(),
    };
    let services: Vec<Service> = (0..14).map(service).collect();
    let mut terms = vec![ServiceTerms::default(); services.len()];
    terms[2].gpus = vec!["h100-80gb".to_string()];
    if sharing == Sharing::None {
        (terms[3].apart, terms[4].apart) = ("g".to_string(), "g".to_string());
        for (index, domain) in [(6, FailureDomain::Machine), (8, FailureDomain::Rack)] {
            for one in &mut terms[index..index + 2] {
                one.apart = domain.name().to_string();
            }
            terms[index].apart_by = domain;
        }
    }
    let kinds = vec![
        kind("a30-24gb", 0.9, &[(0.9, None)]),
        kind("h100-80gb", 1.9, &[(3.2, None), (1.4, Some(1))]),
        kind("l4-24gb", 0.4, &[(0.6, Some(40))]),
    ];
    let mut rules = PlanRules { sharing, headroom: 0.1, ..PlanRules::default() };
    rules.own_headroom.insert("s5".to_string(), 0.4);
    MixProblem {
        services,
        terms,
        rules,
        kinds,
        objective: MixObjective::Cost,
        gpus_max: None,
        serve_first: ServeFirst::Priority,
        layout: Layout { machine_gpus: Some(3), rack_gpus: Some(6) },
        survive,
    }
}

fn file(problem: &MixProblem) -> MixFile {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let solution = plan_mix(problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    assert_eq!(check_mix(problem, &solution), Vec::<String>::new());
    // As a reader of the file sees it.
    let text = serde_json::to_string(&MixFile::new(problem, &solution)).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn mixes_of_the_planner_are_verified_with_their_bound() {
    for sharing in [Sharing::None, Sharing::Time] {
        let domains = [FailureDomain::Gpu, FailureDomain::Machine, FailureDomain::Rack];
        for survive in domains.map(Some).into_iter().chain([None]) {
            for seed in 0..4 {
                let problem = problem(seed, sharing, survive);
                let file = file(&problem);
                let verified = file.verify();
                let verified =
                    verified.unwrap_or_else(|wrong| panic!("{seed} {survive:?} {wrong:?}"));
                assert!(verified.bound <= verified.total, "{verified:?}");
                assert!(verified.bound >= file.bound, "{verified:?} {}", file.bound);
            }
        }
    }
}

/// A change, and what the message about it contains.
type Change = (&'static str, fn(&mut MixFile), &'static str);

const CHANGES: [Change; 18] = [
    ("more is asked for", |file| file.services.iter_mut().for_each(|s| s.rate *= 1.3), ""),
    ("a dearer gpu", |file| busiest(file).offers[0].price += 0.5, "counts"),
    ("fewer gpus", |file| busiest(file).gpus -= 1, "the file says"),
    ("fewer gpus of all", |file| file.gpus -= 1, "the file says"),
    ("a lower total", |file| file.total *= 0.99, "counts"),
    ("a higher bound", |file| file.bound *= 1.01, "prove"),
    ("a limit", |file| file.gpus_max = Some(1), "more than allowed"),
    ("less stock", |file| busiest(file).offers.iter_mut().for_each(|o| o.count = Some(0)), "more"),
    ("no spare gpu", without_last_gpu, ""),
    ("another kind", |file| file.terms[2].gpus = vec!["a30-24gb".to_string()], "may not run"),
    ("two of a group", together, "two services of group"),
    ("two of a group in a rack", in_one_rack, "rack 0 has two services of group"),
    ("a group is scattered", scattered, "group 'all' is not together"),
    ("a rack of unknown size", |file| file.rack_gpus = None, "how many gpus a rack has"),
    ("a service is not there", |file| first(file).name = "nobody".to_string(), "nobody"),
    ("a batch nobody measured", |file| first(file).batch = 3, "measured"),
    ("one is left out", |file| file.unserved.push("s1".to_string()), "'s1' is served by 1"),
    ("own headroom", |file| file.rules.own_headroom.extend([("s1".into(), 9.0)]), "requests/s"),
];

fn busiest(file: &mut MixFile) -> &mut planner::verify::mix::KindFile {
    file.kinds.iter_mut().max_by_key(|kind| kind.gpus).unwrap()
}

fn first(file: &mut MixFile) -> &mut ShareFile {
    let used = busiest(file).plan.iter_mut().find(|gpu| !gpu.slices.is_empty()).unwrap();
    &mut used.slices[0].services[0]
}

/// Takes the last GPU away and corrects every count.
fn without_last_gpu(file: &mut MixFile) {
    let kind = busiest(file);
    kind.plan.pop();
    kind.gpus -= 1;
    let price = kind.offers.iter().map(|offer| offer.price).fold(0.0, f64::max);
    file.gpus -= 1;
    file.total -= price;
}

fn together(file: &mut MixFile) {
    file.terms.iter_mut().for_each(|terms| terms.apart = "all".to_string());
}

fn scattered(file: &mut MixFile) {
    file.terms.iter_mut().for_each(|terms| terms.together = "all".to_string());
}

fn in_one_rack(file: &mut MixFile) {
    together(file);
    file.terms.iter_mut().for_each(|terms| terms.apart_by = FailureDomain::Rack);
}

#[test]
fn no_changed_mix_is_verified() {
    for seed in 0..3 {
        let whole = file(&problem(seed, Sharing::None, Some(FailureDomain::Gpu)));
        for (name, change, message) in CHANGES {
            let mut file = whole.clone();
            change(&mut file);
            let wrong = file.verify().expect_err(name).join("; ");
            assert!(wrong.contains(message), "{name}, seed {seed}: {wrong}");
        }
    }
}

#[test]
fn a_kind_of_the_user_s_own_is_verified_from_the_file() {
    let table = "[[gpu]]\nname = 'l20-48gb'\nsms = 92\nmemory_gib = 44.0\n";
    let own = planner::gpu::file::from_toml(table).unwrap()[0];
    let mut problem = problem(1, Sharing::None, None);
    problem.terms.iter_mut().for_each(|terms| terms.gpus.clear());
    problem.kinds = vec![MixKind { gpu: own, ..kind("l4-24gb", 1.0, &[(1.0, None)]) }];
    let mut file = file(&problem);
    assert!(file.verify().is_ok());
    file.kinds[0].gpu_table = None;
    assert!(file.verify().unwrap_err()[0].contains("l20-48gb"));
}
