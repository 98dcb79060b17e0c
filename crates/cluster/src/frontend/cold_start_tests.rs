//! Waiting requests against an independent account of them.

use base::Random;

use super::*;

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

#[test]
fn counts_and_bounds_agree_with_an_independent_account() {
    let limits = ColdStartSettings { model_max: 5, total_max: 12, ..ColdStartSettings::default() };
    for seed in 0..50 {
        let (mut random, mut requests) = (Random::new(seed), WaitingRequests::default());
        // The account: the models of all that wait, in any order.
        let mut waiting: Vec<String> = Vec::new();
        let (mut now, mut entered, mut left) = (Nanos::ZERO, 0u64, 0u64);
        for _ in 0..400 {
            now += Nanos::from_millis(random.below(900));
            let model = format!("m{}", random.below(4));
            if random.below(2) == 0 {
                let of_model = waiting.iter().filter(|other| **other == model).count();
                let fits = of_model < 5 && waiting.len() < 12;
                assert_eq!(requests.enter(now, &model, &limits), fits, "{seed}");
                if fits {
                    waiting.push(model);
                    entered += 1;
                }
            } else if !waiting.is_empty() {
                let index = random.below(waiting.len() as u64) as usize;
                let model = waiting.swap_remove(index);
                requests.leave(now, &model);
                left += 1;
            }
            assert_eq!(requests.total(), waiting.len());
            let report = requests.report(now);
            for model in &waiting {
                let count = waiting.iter().filter(|other| *other == model).count() as u64;
                let reported = report[model];
                assert!(reported >= count && reported < 2 * count.max(1), "{reported} {count}");
            }
        }
        assert_eq!(entered - left, waiting.len() as u64);
        for model in waiting {
            requests.leave(now, &model);
        }
        assert!(requests.report(now + seconds(2)).is_empty());
    }
}

#[test]
fn a_request_that_gives_up_at_once_is_reported_for_a_while() {
    let (mut requests, limits) = (WaitingRequests::default(), ColdStartSettings::default());
    assert!(requests.enter(seconds(10), "m", &limits));
    requests.leave(seconds(10) + Nanos::from_millis(5), "m");
    assert_eq!(requests.report(seconds(11)), [("m".to_string(), 1)].into());
    assert!(requests.report(seconds(13)).is_empty());
}

#[test]
fn a_cold_start_is_the_time_from_the_first_request_to_the_first_reply() {
    let (mut requests, limits) = (WaitingRequests::default(), ColdStartSettings::default());
    assert_eq!(requests.retry_after(), 10);
    for second in 0..3 {
        assert!(requests.enter(seconds(second), "m", &limits));
    }
    for _ in 0..3 {
        requests.leave(seconds(7), "m");
    }
    assert_eq!(requests.answered(seconds(8), "m"), Some((seconds(8), 3)));
    assert_eq!(requests.answered(seconds(8), "m"), None, "once for all that waited");
    assert_eq!(requests.answered(seconds(8), "other"), None, "it did not wait");
    assert_eq!(requests.retry_after(), 8);
    // A later one is a cold start of its own.
    assert!(requests.enter(seconds(100), "m", &limits));
    requests.leave(seconds(101), "m");
    assert_eq!(requests.answered(seconds(101), "m"), Some((seconds(1), 1)));
    let mut text = String::new();
    requests.refuse(ColdRefusal::Late);
    requests.write_metrics(&mut text);
    for line in [
        "atoll_cluster_cold_start_seconds_bucket{le=\"1\"} 1",
        "atoll_cluster_cold_start_seconds_bucket{le=\"10\"} 2",
        "atoll_cluster_cold_start_seconds_bucket{le=\"+Inf\"} 2",
        "atoll_cluster_cold_start_seconds_sum 9",
        "atoll_cluster_cold_start_seconds_count 2",
        "atoll_cluster_cold_refused_total{reason=\"late\"} 1",
        "atoll_cluster_waiting 0",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is not in {text}");
    }
}
