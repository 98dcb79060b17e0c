use super::*;

fn kernel(blocks: u32, block_ns: u64, occupancy: u32, memory_share: f32) -> KernelProfile {
    KernelProfile { blocks, block_ns, occupancy, memory_share, idempotent: true }
}

fn model(name: &str, kernels: Vec<KernelProfile>) -> Arc<ModelProfile> {
    let name = name.to_string();
    Arc::new(ModelProfile { name, kernels, input_bytes: 0, weight_bytes: 1_000 })
}

fn small_gpu() -> GpuProfile {
    GpuProfile { sms: 4, launch_ns: 0, gap_ns: 0, switch_ns: [0, 0], ..builtin::mi50().gpu }
}

fn open(gpu: GpuProfile, models: Vec<Arc<ModelProfile>>, faults: Vec<Fault>) -> Gpu {
    let high = StreamOptions { high_priority: true, capacity: 2 };
    let low = StreamOptions { high_priority: false, capacity: 2 };
    Gpu::new(gpu, models, &[high, low, low], faults)
}

fn launch(gpu: &mut Gpu, now: u64, stream: usize, model: usize) -> TaskId {
    let task = gpu.create_task(model, 42);
    let steps = 0..gpu.models[model].kernels.len();
    let segment = GpuSegment { token: stream as u64, task, model, steps, tile: 0 };
    gpu.enqueue(Nanos(now), stream, segment).unwrap();
    task
}

fn run_to(gpu: &mut Gpu, to: u64) -> Vec<(u64, GpuEvent)> {
    let mut events = Vec::new();
    gpu.advance(Nanos(to), &mut events);
    let ended =
        |event: &GpuEvent| !matches!(event, GpuEvent::StepReady { .. } | GpuEvent::Started { .. });
    events.into_iter().map(|(at, event)| (at.0, event)).filter(|(_, event)| ended(event)).collect()
}

fn done(stream: usize, busy: u64) -> GpuEvent {
    GpuEvent::Done { stream, token: stream as u64, busy: Nanos(busy) }
}

fn want(gpu: &Gpu, model: usize) -> u64 {
    reference_output(42, gpu.models[model].kernels.iter().map(|kernel| gpu.profile.tiles(kernel)))
}

#[test]
fn blocks_run_in_waves() {
    let mut gpu = open(small_gpu(), vec![model("a", vec![kernel(9, 100, 1, 0.1)])], vec![]);
    let task = launch(&mut gpu, 0, 1, 0);
    assert_eq!(run_to(&mut gpu, 1_000), [(300, done(1, 300))]);
    assert_eq!(gpu.output(task), Some(want(&gpu, 0)));
    assert_eq!(gpu.work(1).used, 900.0);
}

#[test]
fn high_priority_takes_what_becomes_free() {
    let models = vec![
        model("long", vec![kernel(12, 100, 1, 0.1)]),
        model("short", vec![kernel(4, 10, 1, 0.1)]),
    ];
    let mut gpu = open(small_gpu(), models, vec![]);
    launch(&mut gpu, 0, 1, 0);
    run_to(&mut gpu, 50);
    launch(&mut gpu, 50, 0, 1);
    assert_eq!(run_to(&mut gpu, 1_000), [(110, done(0, 10)), (310, done(1, 310))]);
}

#[test]
fn two_memory_bound_kernels_slow_each_other() {
    let models = vec![model("a", vec![kernel(2, 100, 1, 1.0)])];
    let mut gpu = open(small_gpu(), models, vec![]);
    launch(&mut gpu, 0, 0, 0);
    launch(&mut gpu, 0, 1, 0);
    assert_eq!(run_to(&mut gpu, 1_000), [(200, done(1, 200)), (200, done(0, 200))]);
}

/// Preempts at 150 in the given mode and runs the rest from the reported point.
fn preempt_and_restore(how: PreemptMode) -> (Vec<(u64, GpuEvent)>, bool, f64) {
    let kernels = vec![kernel(4, 10, 1, 0.1), kernel(40, 100, 1, 0.1), kernel(4, 10, 1, 0.1)];
    let profile =
        GpuProfile { evict_ns: 5, preempt_ns: 3, host_reset_ns: 7, kill_ns: 2, ..small_gpu() };
    let mut gpu = open(profile, vec![model("a", kernels)], vec![]);
    let task = launch(&mut gpu, 0, 1, 0);
    run_to(&mut gpu, 150);
    gpu.preempt(Nanos(150), 1, how);
    let events = run_to(&mut gpu, 2_000);
    let GpuEvent::Preempted { step, tile, .. } = events[0].1 else { panic!("{events:?}") };
    let segment = GpuSegment { token: 9, task, model: 0, steps: step..3, tile };
    gpu.enqueue(Nanos(2_000), 1, segment).unwrap();
    run_to(&mut gpu, 10_000);
    let right = gpu.output(task) == Some(want(&gpu, 0));
    (events, right, gpu.work(1).redone)
}

#[test]
fn preempts_as_finely_as_requested_and_resumes() {
    // The second kernel runs its second wave of ten from 110 to 210.
    let cases = [
        (PreemptMode::InsideTile, 153 + 5, (1, 4), 4.0 * 43.0),
        (PreemptMode::TileBoundary, 210 + 5, (1, 8), 0.0),
        (PreemptMode::BetweenLaunches, 1_010 + 5, (2, 0), 0.0),
        (PreemptMode::Kill, 150 + 7 + 5 + 2, (1, 0), 4.0 * 54.0 + 400.0),
    ];
    for (how, at, point, redone) in cases {
        let (events, right, seen) = preempt_and_restore(how);
        let GpuEvent::Preempted { step, tile, .. } = events[0].1 else { panic!() };
        assert_eq!((events[0].0, (step, tile)), (at, point), "{how:?}");
        assert!(right, "{how:?} computed something else");
        assert_eq!(seen, redone, "{how:?}");
    }
}

#[test]
fn keeps_budgets_and_preempts_blocks_above() {
    let models = vec![model("a", vec![kernel(8, 100, 1, 0.1)])];
    let mut gpu = open(small_gpu(), models, vec![]);
    launch(&mut gpu, 0, 1, 0);
    gpu.set_budget(Nanos(0), 1, 2, 2, None);
    run_to(&mut gpu, 50);
    assert_eq!(gpu.held_sms(1), 2.0);
    gpu.set_budget(Nanos(50), 1, 0, 0, None);
    run_to(&mut gpu, 3_000);
    assert_eq!(gpu.held_sms(1), 0.0);
    gpu.set_budget(Nanos(3_000), 1, u32::MAX, u32::MAX, None);
    let events = run_to(&mut gpu, 9_000);
    assert_eq!(events.len(), 1, "{events:?}");
}

#[test]
fn preemption_inside_tiles_loses_at_most_one_tile_per_block() {
    let profile = GpuProfile { tile_ns: 10, preempt_ns: 3, evict_ns: 0, ..small_gpu() };
    let models = vec![model("a", vec![kernel(8, 100, 2, 0.1)])];
    let mut gpu = open(profile, models, vec![]);
    let task = launch(&mut gpu, 0, 1, 0);
    run_to(&mut gpu, 72);
    gpu.preempt(Nanos(72), 1, PreemptMode::InsideTile);
    let events = run_to(&mut gpu, 80);
    // Preempted at 75, inside the eighth of ten tiles of each of the eight blocks.
    assert!(matches!(events[0], (75, GpuEvent::Preempted { step: 0, tile: 56, .. })), "{events:?}");
    assert!((gpu.work(1).redone - 4.0 * 5.0).abs() < 1e-9, "{:?}", gpu.work(1));
    let segment = GpuSegment { token: 1, task, model: 0, steps: 0..1, tile: 56 };
    gpu.enqueue(Nanos(100), 1, segment).unwrap();
    // Twenty-four tiles are two whole blocks and one of four tiles.
    assert_eq!(run_to(&mut gpu, 1_000), [(200, done(1, 100))]);
    assert_eq!(gpu.output(task), Some(want(&gpu, 0)));
    assert!((gpu.work(1).redone - 4.0 * 5.0).abs() < 1e-9, "{:?}", gpu.work(1));
}

#[test]
fn a_budget_that_expires_costs_no_work() {
    let profile = GpuProfile { tile_ns: 10, ..small_gpu() };
    let mut gpu = open(profile, vec![model("a", vec![kernel(4, 100, 1, 0.1)])], vec![]);
    launch(&mut gpu, 0, 1, 0);
    gpu.set_budget(Nanos(0), 1, 4, 4, Some((Nanos(55), 1)));
    run_to(&mut gpu, 54);
    assert_eq!(gpu.held_sms(1), 4.0);
    run_to(&mut gpu, 55);
    assert_eq!(gpu.held_sms(1), 1.0);
    let events = run_to(&mut gpu, 1_000);
    // Three blocks stopped after five of ten tiles: fifteen remain for one SM.
    assert_eq!(events, [(250, done(1, 250))]);
    let work = gpu.work(1);
    assert_eq!((work.used, work.redone), (400.0, 0.0));
}

#[test]
fn switching_between_busy_streams_takes_time() {
    let profile = GpuProfile { switch_ns: [7, 7], ..small_gpu() };
    let models = vec![model("a", vec![kernel(1, 100, 1, 0.1), kernel(1, 100, 1, 0.1)])];
    let mut gpu = open(profile, models, vec![]);
    launch(&mut gpu, 0, 1, 0);
    run_to(&mut gpu, 10);
    launch(&mut gpu, 10, 2, 0);
    // The second begins at 17; from then on they alternate until the first ends.
    assert_eq!(run_to(&mut gpu, 1_000), [(207, done(1, 200)), (224, done(2, 200))]);
    // A stream with a budget is fed by a worker of its own.
    gpu.set_budget(Nanos(1_000), 2, 2, 2, None);
    launch(&mut gpu, 1_000, 1, 0);
    launch(&mut gpu, 1_000, 2, 0);
    assert_eq!(run_to(&mut gpu, 2_000), [(1_200, done(2, 200)), (1_200, done(1, 200))]);
}

#[test]
fn a_padded_kernel_is_part_of_the_one_it_pads() {
    let models = vec![
        model("rt", vec![kernel(2, 100, 1, 0.1), kernel(4, 10, 1, 0.1)]),
        model("be", vec![kernel(2, 130, 1, 0.1), kernel(2, 10, 1, 0.1)]),
    ];
    let mut gpu = open(small_gpu(), models, vec![]);
    gpu.set_budget(Nanos(0), 1, 0, 0, None);
    launch(&mut gpu, 0, 0, 0);
    launch(&mut gpu, 0, 1, 1);
    run_to(&mut gpu, 0);
    gpu.pad(Nanos(0), 1, 0, 2, 2);
    // The real-time kernel of 100 waits for the padding of 130, then runs its second of 10.
    assert_eq!(run_to(&mut gpu, 1_000), [(140, done(0, 110))]);
    assert_eq!(gpu.current_step(1), Some(1), "the second best-effort kernel waits");
}

#[test]
fn some_blocks_of_a_kernel_can_pad_one_and_the_rest_the_next() {
    let rt = vec![kernel(2, 100, 1, 0.1), kernel(2, 100, 1, 0.1)];
    let models = vec![model("rt", rt), model("be", vec![kernel(6, 50, 1, 0.1)])];
    let mut gpu = open(small_gpu(), models, vec![]);
    gpu.set_budget(Nanos(0), 1, 0, 0, None);
    launch(&mut gpu, 0, 0, 0);
    let task = launch(&mut gpu, 0, 1, 1);
    run_to(&mut gpu, 0);
    gpu.pad(Nanos(0), 1, 0, 2, 4);
    assert_eq!(run_to(&mut gpu, 100), []);
    assert_eq!(gpu.held_sms(1), 0.0, "what it was granted is over");
    gpu.pad(Nanos(100), 1, 0, 2, 4);
    assert_eq!(run_to(&mut gpu, 1_000), [(150, done(1, 150)), (200, done(0, 200))]);
    assert_eq!(gpu.output(task), Some(want(&gpu, 1)));
}

#[test]
fn kernels_that_are_not_idempotent_finish() {
    let fragile = KernelProfile { idempotent: false, ..kernel(8, 100, 1, 0.1) };
    let mut gpu = open(small_gpu(), vec![model("a", vec![fragile, fragile])], vec![]);
    launch(&mut gpu, 0, 1, 0);
    run_to(&mut gpu, 50);
    gpu.preempt(Nanos(50), 1, PreemptMode::InsideTile);
    let events = run_to(&mut gpu, 100_000);
    assert!(matches!(events[0].1, GpuEvent::Preempted { step: 1, tile: 0, .. }), "{events:?}");
}

#[test]
fn faults_happen() {
    let fault = |at, kind| Fault { at: Nanos(at), kind };
    let models = || vec![model("a", vec![kernel(4, 100, 1, 0.1)])];
    let slow = vec![fault(0, FaultKind::SlowKernel { factor: 3.0 })];
    let mut gpu = open(small_gpu(), models(), slow);
    run_to(&mut gpu, 0);
    launch(&mut gpu, 0, 0, 0);
    assert_eq!(run_to(&mut gpu, 1_000), [(300, done(0, 300))]);

    let mut gpu = open(small_gpu(), models(), vec![fault(0, FaultKind::LostCompletion)]);
    run_to(&mut gpu, 0);
    launch(&mut gpu, 0, 0, 0);
    assert_eq!(run_to(&mut gpu, 1_000), []);
    gpu.reset(Nanos(1_000));
    let events = run_to(&mut gpu, 100_000_000);
    assert_eq!(events, [(1_000, GpuEvent::Lost), (50_001_000, GpuEvent::Ready)]);

    let mut gpu = open(small_gpu(), models(), vec![fault(5, FaultKind::CopyStall { span_us: 1 })]);
    gpu.copy(Nanos(0), 7, 0);
    assert_eq!(run_to(&mut gpu, 100_000), [(11_000, GpuEvent::Copied { token: 7 })]);
}

#[test]
fn built_in_models_take_the_published_time() {
    let mi50 = builtin::mi50();
    let published = [
        ("resnet152", 307, 12.3),
        ("densenet201", 207, 3.5),
        ("vgg19", 55, 4.4),
        ("inceptionv3", 146, 8.3),
        ("distilbert", 205, 5.4),
    ];
    for (name, kernels, ms) in published {
        let model = mi50.model(name).unwrap();
        assert_eq!(model.kernels.len(), kernels);
        let alone = model.alone(&mi50.gpu).as_millis_f64();
        assert!((alone / ms - 1.0).abs() < 0.02, "{name}: {alone} ms instead of {ms}");
    }
    let text = serde_json::to_string(&mi50).unwrap();
    assert_eq!(serde_json::from_str::<ProfileSet>(&text).unwrap(), mi50);
    assert!(builtin::by_name("h200").is_some() && builtin::by_name("none").is_none());
}

#[test]
fn a_task_alone_takes_what_its_profile_says() {
    let set = builtin::mi50();
    let models: Vec<Arc<ModelProfile>> = set.models.iter().cloned().map(Arc::new).collect();
    for index in 0..models.len() {
        let mut gpu = open(set.gpu.clone(), models.clone(), vec![]);
        launch(&mut gpu, 0, 0, index);
        let events = run_to(&mut gpu, 100_000_000);
        assert_eq!(events[0].0, models[index].alone(&set.gpu).0, "{}", models[index].name);
    }
}
