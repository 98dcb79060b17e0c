use base::{ManualClock, Random};

use super::*;

const COLUMNS: &str = "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n";

fn offer(price: f64, count: Option<usize>) -> Vec<GpuOffer> {
    vec![GpuOffer { name: "o".to_string(), price, watts: 300.0, count }]
}

/// Profiles of two models whose best kind differs: `small` runs on little, `large` needs much.
fn kind(name: &str, factor: f64, price: f64, count: Option<usize>) -> MixKind {
    let gpu = GpuKind::find(name).unwrap();
    let mut text = COLUMNS.to_string();
    let mut sizes: Vec<u8> = gpu.slices.iter().map(|slice| slice.gpcs).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for gpcs in sizes {
        let rate = f64::from(gpcs) * 100.0 * factor;
        text += &format!("small,{gpcs},1,1,{rate},10\n");
        if gpcs >= 4 {
            text += &format!("large,{gpcs},1,1,{},10\n", rate * factor / 8.0);
        }
    }
    MixKind { gpu, profiles: Profiles::from_csv(&text).unwrap(), offers: offer(price, count) }
}

fn mix(services: usize, kinds: Vec<MixKind>) -> MixProblem {
    let mut random = Random::new(7);
    let service = |index: usize| Service {
        name: format!("s{index}"),
        model: if index.is_multiple_of(4) { "large" } else { "small" }.to_string(),
        rate: 5.0 + 300.0 * random.unit_f64() * random.unit_f64(),
        slo_ms: 400.0,
    };
    let services: Vec<Service> = (0..services).map(service).collect();
    let terms = services.iter().map(|_| ServiceTerms::default()).collect();
    MixProblem {
        services,
        terms,
        rules: PlanRules::default(),
        kinds,
        objective: MixObjective::Cost,
        gpus_max: None,
        serve_first: ServeFirst::Priority,
        layout: Layout::default(),
        survive: None,
    }
}

fn solve(problem: &MixProblem) -> Result<MixSolution, PlanError> {
    let clock = ManualClock::default();
    let mut report = |_| true;
    let solution = plan_mix(problem, &mut SearchControl::new(&clock, &mut report))?;
    assert_eq!(check_mix(problem, &solution), Vec::<String>::new());
    assert!(solution.bound <= solution.total + 1e-9, "{} {}", solution.bound, solution.total);
    Ok(solution)
}

#[test]
fn a_mix_costs_at_most_what_the_best_single_kind_does() {
    let three = || {
        vec![
            kind("a30-24gb", 0.5, 0.6, None),
            kind("a100-80gb", 1.0, 2.0, None),
            kind("h200-141gb", 2.2, 4.5, None),
        ]
    };
    let mixed = solve(&mix(60, three())).unwrap();
    let mut singles = Vec::new();
    for one in three() {
        if let Ok(single) = solve(&mix(60, vec![one])) {
            singles.push(single.total);
        }
    }
    let best = singles.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(mixed.total <= best + 1e-9, "{} {singles:?}", mixed.total);
    assert!(mixed.total < best * 0.99, "the mix gains nothing: {} {singles:?}", mixed.total);
    assert!(mixed.unserved.is_empty());
    // Fewest GPUs instead of the lowest price.
    let fewest = MixProblem { objective: MixObjective::Gpus, ..mix(60, three()) };
    let fewest = solve(&fewest).unwrap();
    assert!(fewest.gpus() <= mixed.gpus() && fewest.total == fewest.gpus() as f64);
}

#[test]
fn stock_and_limits_decide_who_is_served() {
    let cheap = || vec![kind("a100-80gb", 1.0, 1.0, Some(3)), kind("h100-80gb", 1.5, 5.0, None)];
    let full = solve(&mix(40, cheap())).unwrap();
    assert!(full.kinds[0].gpus <= 3 && full.kinds[1].gpus > 0);
    let most = full.gpus() / 2;
    let mut limited = MixProblem { gpus_max: Some(most), ..mix(40, cheap()) };
    // The last ten matter most.
    limited.terms.iter_mut().skip(30).for_each(|terms| terms.priority = 1);
    let solution = solve(&limited).unwrap();
    assert!(solution.gpus() <= most && !solution.unserved.is_empty());
    assert!(solution.unserved.iter().all(|&service| service < 30), "{:?}", solution.unserved);
    // By revenue the order is another one.
    limited.serve_first = ServeFirst::Revenue;
    limited.terms[3].revenue = 1e6;
    let solution = solve(&limited).unwrap();
    assert!(!solution.unserved.contains(&3), "{:?}", solution.unserved);
    let none = MixProblem { gpus_max: Some(0), ..mix(4, cheap()) };
    assert!(matches!(solve(&none), Err(PlanError::NoStock)));
}

#[test]
fn any_gpu_machine_or_rack_may_fail() {
    let kinds = || vec![kind("a100-80gb", 1.0, 1.0, None), kind("h200-141gb", 2.0, 2.5, None)];
    let layout = Layout { machine_gpus: Some(2), rack_gpus: Some(4) };
    let plain = solve(&mix(60, kinds())).unwrap();
    for domain in [FailureDomain::Gpu, FailureDomain::Machine, FailureDomain::Rack] {
        let problem = MixProblem { layout, survive: Some(domain), ..mix(60, kinds()) };
        let solution = solve(&problem).unwrap();
        let least = problem.bound_with_spare(&solution);
        assert!(solution.total > plain.total && least > plain.bound);
        assert!(solution.total >= least - 1e-9, "{} {least}", solution.total);
        // Slices of a service are spread: a lost rack costs little more than a lost GPU.
        assert!(solution.total < 1.25 * least, "{domain:?} {} {least}", solution.total);
        // The checker sees a plan without spare capacity.
        assert!(check_mix(&problem, &plain).iter().any(|what| what.contains("without domain")));
    }
    let unknown = MixProblem { survive: Some(FailureDomain::Rack), ..mix(60, kinds()) };
    let error = solve(&unknown).unwrap_err();
    assert!(error.to_string().contains("--rack-gpus"), "{error}");
    let layout = Layout { machine_gpus: Some(3), rack_gpus: Some(4) };
    let error = solve(&MixProblem { layout, ..mix(60, kinds()) }).unwrap_err();
    assert!(error.to_string().contains("whole machines"), "{error}");
}

#[test]
fn groups_stay_apart_by_machine_and_by_rack() {
    let layout = Layout { machine_gpus: Some(2), rack_gpus: Some(4) };
    let mut problem = mix(60, vec![kind("a100-80gb", 1.0, 1.0, None)]);
    problem.layout = layout;
    let plain = solve(&problem).unwrap();
    for (from, domain) in [(10, FailureDomain::Machine), (20, FailureDomain::Rack)] {
        for terms in problem.terms.iter_mut().skip(from).take(4) {
            terms.apart = domain.name().to_string();
        }
        // One of a group says it for all.
        problem.terms[from + 1].apart_by = domain;
    }
    for survive in [None, Some(FailureDomain::Gpu), Some(FailureDomain::Rack)] {
        problem.survive = survive;
        let solution = solve(&problem).unwrap();
        assert!(survive.is_some() || solution.gpus() <= plain.gpus() + 1, "{}", solution.gpus());
    }
    // The checker sees services of a group in one rack.
    let wrong = check_mix(&MixProblem { survive: None, ..problem.clone() }, &plain).join(" ");
    assert!(wrong.contains("has two services of group 'rack'"), "{wrong}");
    (problem.survive, problem.layout.rack_gpus) = (None, None);
    assert!(solve(&problem).unwrap_err().to_string().contains("is apart by rack"));
}

#[test]
fn groups_are_together_on_a_gpu_in_a_machine_and_in_a_rack() {
    let layout = Layout { machine_gpus: Some(2), rack_gpus: Some(4) };
    for seed in 0..6 {
        let mut random = Random::new(seed);
        let mut problem =
            mix(40, vec![kind("a100-80gb", 1.0, 1.0, None), kind("h100-80gb", 1.3, 1.4, Some(30))]);
        problem.layout = layout;
        let plain = solve(&problem).unwrap();
        let domains = [FailureDomain::Gpu, FailureDomain::Machine, FailureDomain::Rack];
        for (at, domain) in domains.into_iter().enumerate() {
            for _ in 0..2 + at {
                let one = &mut problem.terms[random.below(40) as usize];
                (one.together, one.together_by) = (domain.name().to_string(), domain);
            }
        }
        // Small enough for one GPU.
        for (service, terms) in problem.services.iter_mut().zip(&problem.terms) {
            if !terms.together.is_empty() {
                service.model = "small".to_string();
                service.rate = 20.0 + 30.0 * random.unit_f64();
            }
        }
        let solution = solve(&problem).unwrap();
        assert_eq!(check_mix(&problem, &solution), [""; 0]);
        assert!(solution.unserved.is_empty());
        assert!(solution.gpus() <= plain.gpus() + 3, "{} of {}", solution.gpus(), plain.gpus());
        // The checker sees groups that are not.
        let mut scattered = problem.clone();
        scattered.terms.iter_mut().for_each(|one| one.together = "all".to_string());
        let wrong = check_mix(&scattered, &solution).join(" ");
        assert!(wrong.contains("group 'all' is"), "{wrong}");
    }
}

#[test]
fn groups_that_cannot_be_together_say_why() {
    let together = |problem: &mut MixProblem, domain| {
        for terms in &mut problem.terms[..3] {
            (terms.together, terms.together_by) = ("g".to_string(), domain);
        }
    };
    let refused = |problem: &MixProblem| solve(problem).unwrap_err().to_string();
    let mut problem = mix(9, vec![kind("a100-80gb", 1.0, 1.0, None)]);
    together(&mut problem, FailureDomain::Machine);
    assert!(refused(&problem).contains("--machine-gpus"), "{}", refused(&problem));
    problem.layout.machine_gpus = Some(2);
    problem.services[1].rate = 5_000.0;
    assert!(refused(&problem).contains("is together in one machine of 2"), "{}", refused(&problem));
    problem.services[1].rate = 5.0;
    solve(&problem).unwrap();
    let spare = MixProblem { survive: Some(FailureDomain::Gpu), ..problem.clone() };
    assert!(refused(&spare).contains("--survive"), "{}", refused(&spare));
    let mut apart = problem.clone();
    apart.terms[0].apart = "h".to_string();
    assert!(refused(&apart).contains("apart, too"), "{}", refused(&apart));
    let mut kinds = problem.clone();
    kinds.kinds.push(kind("h100-80gb", 1.0, 1.0, None));
    kinds.terms[0].gpus = vec!["h100-80gb".to_string()];
    kinds.terms[1].gpus = vec!["a100-80gb".to_string()];
    assert!(refused(&kinds).contains("no kind runs all"), "{}", refused(&kinds));
}

#[test]
fn services_stay_on_their_kinds_and_apart() {
    let mut problem =
        mix(24, vec![kind("a100-80gb", 1.0, 1.0, None), kind("h100-80gb", 1.5, 9.0, None)]);
    problem.terms[5].gpus = vec!["H100-80GB".to_string()];
    for terms in problem.terms.iter_mut().skip(6).take(6) {
        terms.apart = "replicas".to_string();
    }
    let solution = solve(&problem).unwrap();
    assert!(solution.kinds[1].services.contains(&5));
    // The others are cheaper elsewhere, as far as the GPU that it needs has no room left.
    assert_eq!(solution.kinds[1].gpus, 1);
    problem.terms[5].gpus = vec!["l4-24gb".to_string()];
    let error = solve(&problem).unwrap_err();
    assert!(matches!(error, PlanError::NoKind { .. }), "{error}");
}

#[test]
fn offers_are_read_and_bad_ones_named() {
    let good = "[[offer]]\ngpu = 'a100-80gb'\nprice = 1.5\ncount = 8\n[[offer]]\ngpu = 'l4-24gb'\n\
                price = 0.3\nwatts = 72\n[[offer]]\ngpu = 'A100-80GB'\nname = 'spot'\n\
                price = 0.9\n";
    let cost = MixObjective::Cost;
    let kinds = offers_from_toml(good, cost, GpuKind::find).unwrap();
    assert_eq!((kinds.len(), kinds[0].1.len(), kinds[1].1[0].watts), (2, 2, 72.0));
    let kinds =
        kinds.into_iter().map(|(gpu, offers)| MixKind { offers, ..kind(gpu.name, 1.0, 1.0, None) });
    let problem = mix(4, kinds.collect());
    // Spot first, then the eight leased ones.
    assert_eq!((problem.total(0, 2), problem.weight(0, 0.0)), (Some(1.8), 0.9));
    for (old, new, line) in [
        ("price = 1.5", "price = nan", 3),
        ("count = 8", "count = 0", 4),
        ("'l4-24gb'", "'k80'", 6),
        ("watts = 72", "watts = -1.0", 8),
        ("watts = 72", "watts = 0", 8),
        ("watts = 72", "power = 1.0", 8),
    ] {
        let error = offers_from_toml(&good.replace(old, new), cost, GpuKind::find).unwrap_err();
        assert!(error.to_string().contains(&format!("line {line}:")), "{error}");
    }
    assert!(offers_from_toml("", cost, GpuKind::find).is_err());
}

#[test]
fn energy_needs_the_watts_of_every_offer() {
    let watts = "[[offer]]\ngpu = 'a100-80gb'\nprice = 1\nwatts = 400\n";
    let none = "[[offer]]\ngpu = 'l4-24gb'\nprice = 1\n";
    let read = |text: &str| offers_from_toml(text, MixObjective::Energy, GpuKind::find);
    assert!(read(watts).is_ok());
    // A GPU without watts counted nothing, so all services went there, for "0.00 watts".
    let error = read(&format!("{watts}{none}")).unwrap_err().to_string();
    assert!(error.contains("line 5: the offer of l4-24gb has no watts"), "{error}");
    let mut problem = mix(4, vec![kind("a100-80gb", 1.0, 1.0, None)]);
    problem.objective = MixObjective::Energy;
    let file = |problem: &MixProblem, solution: &MixSolution| {
        crate::verify::mix::MixFile::new(problem, solution)
    };
    let solution = solve(&problem).unwrap();
    let mut planned = file(&problem, &solution);
    assert_eq!(planned.verify().unwrap().total, 300.0 * solution.gpus() as f64);
    problem.kinds[0].offers[0].watts = 0.0;
    assert!(matches!(solve(&problem), Err(PlanError::NoWatts { .. })));
    planned.kinds[0].offers[0].watts = 0.0;
    let wrong = planned.verify().unwrap_err().join(" ");
    assert!(wrong.contains("offer 'o' has no watts"), "{wrong}");
}

/// Random services of which only a part fits.
fn crowded(random: &mut Random) -> MixProblem {
    let stock = |random: &mut Random| (random.below(3) == 0).then(|| 1 + random.below(3) as usize);
    let mut kinds = vec![kind("a100-80gb", 1.0, 1.0, stock(random))];
    if random.below(2) == 0 {
        kinds.push(kind("h200-141gb", 2.0, 2.5, stock(random)));
    }
    let mut problem = mix(10 + random.below(30) as usize, kinds);
    for (service, terms) in problem.services.iter_mut().zip(&mut problem.terms) {
        // A few need more than all that there is.
        let large = random.below(5) == 0;
        service.rate = 5.0 + random.unit_f64() * if large { 8000.0 } else { 400.0 };
        terms.priority = 1 + random.below(4) as u32;
        terms.revenue = random.unit_f64();
    }
    problem.gpus_max = Some(1 + random.below(6) as usize);
    if random.below(2) == 0 {
        problem.serve_first = ServeFirst::Revenue;
    }
    problem
}

#[test]
fn nobody_is_left_out_who_would_fit() {
    let mut random = Random::new(27);
    let mut passed_over = 0;
    for round in 0..60 {
        let problem = crowded(&mut random);
        let clock = ManualClock::default();
        let mut report = |_| true;
        let mut control = SearchControl::new(&clock, &mut report);
        let solution = match plan_mix(&problem, &mut control) {
            Ok(solution) => solution,
            Err(error) => panic!("round {round}: {error}"),
        };
        assert_eq!(check_mix(&problem, &solution), Vec::<String>::new(), "round {round}");
        let mixer = Mixer::new(&problem, &mut control).unwrap();
        let order = mixer.order();
        let place = |service: &usize| order.iter().position(|other| other == service);
        let served = solution.kinds.iter().flat_map(|kind| kind.services.iter().copied());
        let served: Vec<usize> = served.collect();
        let last = served.iter().map(place).max();
        for service in &solution.unserved {
            let more: Vec<usize> = served.iter().chain([service]).copied().collect();
            let found = mixer.solve(&more, &mut control).unwrap();
            assert!(found.is_none(), "round {round}: service {service} fits, too");
            passed_over += usize::from(Some(place(service)) < last);
        }
    }
    // One whom nothing can serve came first; at most eight behind it were tried.
    assert!(passed_over > 100, "{passed_over} services were passed over");
}
