//! The device on a real GPU, with a toy compiler. Skipped, with the reason, without a GPU. Timings
//! are printed and never fail a test; run with `--test-threads=1 --nocapture` to see them
//! undisturbed.

#[path = "support/bench.rs"]
mod bench;
#[path = "support/toy.rs"]
mod toy;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::Random;
use bench::{TestQueue, numbers, open, open_with, outputs, percentiles, start};
use cuda::{
    CoRunMethod, CudaDevice, CudaOptions, PaddingBench, PaddingOptions, PaddingPair, ProfileOptions,
};
use device::{Device, Outcome, Program};
use model::Tensor;
use toy::Chain;

fn load(device: &CudaDevice, chain: &Chain) -> Arc<dyn Program> {
    device.load(chain.plan()).expect("a program")
}

fn spin(micros: u64) {
    let since = Instant::now();
    while since.elapsed() < Duration::from_micros(micros) {
        std::hint::spin_loop();
    }
}

#[test]
fn both_classes_compute_the_reference_at_many_sizes() {
    let Some(device) = open() else { return };
    println!("{}; {:?}", device.info().description, device.health());
    let (real_time, best_effort) =
        (TestQueue::open(&device, 0, true, 4), TestQueue::open(&device, 1, false, 4));
    for ring in [64, 3, 2] {
        let chain = Chain { ring, rounds: 9, ..Chain::default() };
        let program = load(&device, &chain);
        for (seed, count) in [1, 127, 128, 1000, 100_000].into_iter().enumerate() {
            let x = numbers(count, seed as u64);
            let want = chain.reference(&x);
            assert!(real_time.run(start(&program, &x)) == want, "real time, {count}");
            assert!(best_effort.run(start(&program, &x)) == want, "best effort, {count}");
        }
    }
}

#[test]
fn task_moves_between_queues_step_by_step() {
    let Some(device) = open() else { return };
    let queues = [TestQueue::open(&device, 0, true, 1), TestQueue::open(&device, 1, false, 1)];
    let chain = Chain { steps: 12, rounds: 6, ..Chain::default() };
    let program = load(&device, &chain);
    let x = numbers(5000, 3);
    let mut task = start(&program, &x);
    task.record_step_times();
    for step in 0..12 {
        let queue = &queues[step / 2 % 2];
        let segment = device::Segment { token: step as u64, task, steps: step..step + 1 };
        assert!(queue.queue.launch(segment).is_ok());
        let completion = queue.wait();
        assert_eq!((&completion.outcome, completion.token), (&Outcome::Done, step as u64));
        task = completion.task;
        assert_eq!(task.next_step(), step + 1);
    }
    assert_eq!(task.step_times().map(<[_]>::len), Some(12));
    println!("step times {:?}", task.step_times());
    let got = task.into_outputs().expect("outputs");
    assert!(got[0].to_vec::<f32>().expect("numbers") == chain.reference(&x));
}

/// Preempts and resumes until `rounds` tasks are done; returns how often work was preempted, and
/// how long each preemption took.
fn preempt_until_done(
    device: &CudaDevice,
    chain: &Chain,
    count: usize,
    rounds: usize,
) -> (usize, Vec<f64>) {
    let queue = TestQueue::open(device, 0, false, 2);
    let program = load(device, chain);
    let x = numbers(count, 5);
    let want = chain.reference(&x);
    let mut random = Random::new(11);
    let (mut preempted, mut stopped) = (0, Vec::new());
    for _ in 0..rounds {
        let mut task = start(&program, &x);
        loop {
            let before = task.next_step();
            queue.launch(task, 1);
            spin(20 + random.below(400));
            let requested = Instant::now();
            queue.queue.preempt();
            let completion = queue.wait();
            if completion.outcome == Outcome::Done {
                assert!(outputs(completion) == want, "other bits after preemption");
                break;
            }
            assert_eq!(completion.outcome, Outcome::Preempted);
            stopped.push(requested.elapsed().as_secs_f64() * 1e6);
            preempted += 1;
            assert!(completion.task.next_step() >= before);
            task = completion.task;
        }
    }
    (preempted, stopped)
}

#[test]
fn preempted_work_resumes_with_the_same_bits() {
    let Some(device) = open() else { return };
    let tiles = device.target().multiprocessors as usize * 16 * 4;
    for (what, chain, tiles, rounds) in [
        ("long steps", Chain { steps: 40, rounds: 100, ..Chain::default() }, tiles, 40),
        ("short steps", Chain { steps: 60, rounds: 30, ..Chain::default() }, tiles / 8, 40),
        ("two buffers", Chain { steps: 20, rounds: 200, ring: 2, ..Chain::default() }, tiles, 20),
        (
            "never preempted",
            Chain { steps: 6, rounds: 400, finish: true, ..Chain::default() },
            tiles,
            10,
        ),
    ] {
        let (preempted, stopped) = preempt_until_done(&device, &chain, tiles * toy::TILE, rounds);
        assert!(preempted > 0, "{what}: never preempted");
        let (p50, p99) = percentiles(stopped);
        println!("preempted {what}: {preempted} times, stopped after p50 {p50:.1} p99 {p99:.1} us");
    }
}

#[test]
fn preempts_only_the_named_queue() {
    let Some(device) = open() else { return };
    let (preempted, other) =
        (TestQueue::open(&device, 0, false, 2), TestQueue::open(&device, 1, false, 2));
    let chain = Chain { steps: 8, rounds: 400, ..Chain::default() };
    let program = load(&device, &chain);
    let x = numbers(100_000, 9);
    let want = chain.reference(&x);
    for _ in 0..20 {
        preempted.launch(start(&program, &x), 1);
        other.launch(start(&program, &x), 2);
        spin(60);
        preempted.queue.preempt();
        assert!(outputs(other.wait()) == want, "the other queue's work");
        let completion = preempted.wait();
        assert!(matches!(completion.outcome, Outcome::Done | Outcome::Preempted));
    }
}

#[test]
fn every_segment_completes_once_and_in_order() {
    let Some(device) = open() else { return };
    let chain = Chain { steps: 6, rounds: 50, ..Chain::default() };
    let program = load(&device, &chain);
    let x = numbers(20_000, 1);
    for high in [true, false] {
        let queue = TestQueue::open(&device, 7, high, 32);
        let mut random = Random::new(4);
        for round in 0..20 {
            for token in 0..12 {
                queue.launch(start(&program, &x), token);
                if random.below(4) == 0 {
                    queue.queue.preempt();
                }
            }
            let seen: Vec<u64> = (0..12).map(|_| queue.wait().token).collect();
            assert_eq!(seen, (0..12).collect::<Vec<_>>(), "round {round}");
            assert!(queue.completions.try_recv().is_err(), "more completions than segments");
        }
    }
}

/// RT latency from launch to completion. `preempt` is called right before each request; best effort
/// that locks `gate` before it launches waits until the request is done.
fn latencies(
    queue: &TestQueue,
    program: &Arc<dyn Program>,
    x: &[f32],
    gate: &Mutex<()>,
    preempt: impl Fn(),
) -> Vec<f64> {
    let mut all = Vec::new();
    for _ in 0..300 {
        let task = start(program, x);
        let since = Instant::now();
        let closed = gate.lock().expect("a gate");
        preempt();
        queue.launch(task, 1);
        let completion = queue.wait();
        drop(closed);
        all.push(since.elapsed().as_secs_f64() * 1e6);
        assert_eq!(completion.outcome, Outcome::Done);
        spin(300);
    }
    all
}

#[test]
fn real_time_latency_next_to_best_effort() {
    let Some(device) = open() else { return };
    let real_time = TestQueue::open(&device, 0, true, 4);
    let rt = load(&device, &Chain { steps: 40, rounds: 4, ..Chain::default() });
    let x = numbers(132 * 128, 2);
    let report = |what: &str, all: Vec<f64>| {
        let (p50, p99) = percentiles(all);
        println!("real time {what}: p50 {p50:.1} p99 {p99:.1} us");
    };
    let gate = Mutex::new(());
    latencies(&real_time, &rt, &x, &gate, || {});
    report("alone", latencies(&real_time, &rt, &x, &gate, || {}));
    let full = device.target().multiprocessors as usize * 16;
    for (what, chain, tiles) in [
        ("long", Chain { steps: 4, rounds: 4000, ..Chain::default() }, full * 2),
        ("short", Chain { steps: 100, rounds: 4, ..Chain::default() }, full / 16),
    ] {
        let be = load(&device, &chain);
        let y = numbers(tiles * toy::TILE, 2);
        let want = chain.reference(&y);
        for preempting in [true, false] {
            let queue = TestQueue::open(&device, 1, false, 2);
            let preemptible = queue.queue.clone();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (be, y, want, stop) = (&be, &y, &want, &stop);
                let closed = preempting.then_some(&gate);
                scope.spawn(move || run_until_stopped(&queue, be, y, want, closed, stop));
                spin(20_000);
                let preempt = || {
                    if preempting {
                        preemptible.preempt();
                    }
                };
                let how = if preempting { "with preemption" } else { "by priority alone" };
                let open = Mutex::new(());
                let gate = if preempting { &gate } else { &open };
                let all = latencies(&real_time, &rt, &x, gate, preempt);
                report(&format!("over {what} steps {how}"), all);
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
}

/// Keeps a queue busy while `gate` is open; preempted tasks resume.
fn run_until_stopped(
    queue: &TestQueue,
    program: &Arc<dyn Program>,
    x: &[f32],
    want: &[f32],
    gate: Option<&Mutex<()>>,
    stop: &AtomicBool,
) {
    let mut task = start(program, x);
    while !stop.load(Ordering::Relaxed) {
        {
            let _open = gate.map(|gate| gate.lock().expect("a gate"));
            queue.launch(task, 1);
        }
        let completion = queue.wait();
        task = match completion.outcome {
            Outcome::Preempted => completion.task,
            _ => {
                assert!(outputs(completion) == want, "best effort computed other bits");
                start(program, x)
            }
        };
    }
}

#[test]
fn request_overhead_without_kernels() {
    let Some(device) = open() else { return };
    let program = load(&device, &Chain { steps: 1, ..Chain::default() });
    for count in [128, 150_528] {
        let x = numbers(count, 1);
        for (name, high) in [("real time", true), ("best effort", false)] {
            let queue = TestQueue::open(&device, 0, high, 4);
            let (mut prepare, mut launch, mut all) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..300 {
                let since = Instant::now();
                let task = start(&program, &x);
                prepare.push(since.elapsed().as_secs_f64() * 1e6);
                let since = Instant::now();
                queue.launch(task, 1);
                launch.push(since.elapsed().as_secs_f64() * 1e6);
                let completion = queue.wait();
                all.push(since.elapsed().as_secs_f64() * 1e6);
                drop(completion);
                spin(50);
            }
            let figures = [prepare, launch, all].map(|all| percentiles(all[100..].to_vec()));
            println!("one step of {count} as {name}: prepare, launch, all {figures:.1?} us");
        }
    }
}

#[test]
fn latency_by_chain_length() {
    for chain_length in [1, 4, 8, 16, 32] {
        let options = CudaOptions { chain_length, ..CudaOptions::default() };
        let Some(device) = open_with(options) else { return };
        let chain = Chain { steps: 100, rounds: 4, ..Chain::default() };
        let program = load(&device, &chain);
        let x = numbers(132 * toy::TILE, 2);
        let queue = TestQueue::open(&device, 0, false, 4);
        let run = |_| {
            let task = start(&program, &x);
            let since = Instant::now();
            queue.run(task);
            since.elapsed().as_secs_f64() * 1e6
        };
        let (p50, p99) = percentiles((0..60).map(run).skip(10).collect());
        println!("100 short steps, chains of {chain_length}: p50 {p50:.1} p99 {p99:.1} us");
    }
}

#[test]
fn class_latencies_compared() {
    let Some(device) = open() else { return };
    for (what, rounds, tiles) in [("short", 4, 132), ("of ten microseconds", 64, 132 * 4)] {
        let chain = Chain { steps: 100, rounds, ..Chain::default() };
        let program = load(&device, &chain);
        let x = numbers(tiles * toy::TILE, 2);
        for (name, high) in [("real time", true), ("best effort", false)] {
            let queue = TestQueue::open(&device, 0, high, 4);
            let mut all = Vec::new();
            for _ in 0..60 {
                let task = start(&program, &x);
                let since = Instant::now();
                queue.run(task);
                all.push(since.elapsed().as_secs_f64() * 1e6);
            }
            let (p50, p99) = percentiles(all.split_off(10));
            println!("100 steps {what} as {name}: p50 {p50:.1} p99 {p99:.1} us");
        }
        let sizes = [("n".to_string(), tiles * toy::TILE)];
        let profile = device
            .profile(&chain.plan(), &sizes, ProfileOptions::default(), &|_, _| {})
            .expect("a profile");
        println!(
            "  on the device: {:?} with dependent launches, {:?} without; a step {:?}",
            profile.graph, profile.plain_graph, profile.steps[0].choices
        );
    }
}

/// Two chains on a bench.
fn chain_pair(device: &CudaDevice) -> (PaddingBench, PaddingPair) {
    let mut bench = device.padding_bench();
    let mut add = |chain: Chain, count: usize| {
        let x = Tensor::from_vec(vec![count], numbers(count, 3)).expect("a tensor");
        bench.add(&chain.plan(), &[x], &|_, _| {}).expect("a network")
    };
    let real_time = add(Chain { steps: 3, rounds: 60, ..Chain::default() }, 9_000);
    let best_effort = add(Chain { steps: 4, rounds: 40, ring: 3, ..Chain::default() }, 50_000);
    (bench, PaddingPair { real_time, best_effort })
}

#[test]
fn co_running_networks_compute_what_each_computes_alone() {
    let Some(device) = open() else { return };
    let (mut bench, pair) = chain_pair(&device);
    use CoRunMethod::{Alone, Apart, Free, Partition};
    let methods = vec![Alone, Free, Partition(8), Partition(16), Apart(16)];
    let options = PaddingOptions { methods, turns: 2, turn: Duration::from_millis(20) };
    let timed = bench.measure(&pair, &options).expect("a measurement");
    for method in &timed.methods {
        println!("{method:?}");
        assert_eq!((method.checks, method.wrong_real_time, method.wrong_best_effort), (2, 0, 0));
        assert_eq!(method.best_effort_runs > 0.0, method.method != Alone);
    }
}

#[test]
fn unloading_returns_memory() {
    let Some(device) = open() else { return };
    let chain = Chain { steps: 4, ..Chain::default() };
    let plan = chain.plan();
    let queue = TestQueue::open(&device, 0, false, 1);
    let x = numbers(1 << 20, 1);
    let mut resident = None;
    for _ in 0..100 {
        let program = device.load(plan.clone()).expect("a program");
        let now = program.resident();
        assert!(resident.is_none_or(|before| before == now), "{resident:?} became {now:?}");
        resident = Some(now);
        drop(queue.run(start(&program, &x)));
    }
    assert_eq!(Arc::strong_count(&plan), 1);
    println!("a program holds {}", resident.expect("a hundred rounds"));
}

#[test]
fn passes_device_conformance() {
    let Some(device) = open() else { return };
    let report = device::conformance::run(&device);
    println!("{report}");
    assert_eq!(report.failures().count(), 0, "{report}");
}

#[test]
fn missing_gpu_is_reported() {
    if let Err(err) = CudaDevice::open(99, CudaOptions::default(), Arc::new(toy::ToyCompiler)) {
        let text = err.to_string();
        let reported = text.contains("no CUDA driver") || text.contains("there is no cuda:99");
        assert!(reported, "{text}");
    } else {
        panic!("a hundredth GPU was opened");
    }
}
