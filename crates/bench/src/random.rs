//! Random scenarios for the checker: small models, few clients, every policy, and faults.

use base::Random;
use device::sim::{FaultKind, KernelProfile, ModelProfile, ProfileSet, builtin};
use model::config::Class;

use crate::arrival::Arrival;
use crate::scenario::{ClientSpec, FaultAt, Scenario};

/// The scenario made from `seed`, and its profiles.
pub fn scenario(seed: u64) -> (Scenario, ProfileSet) {
    let mut random = Random::new(seed.wrapping_mul(0x9E37_79B9) ^ 0x5EED);
    let mut set = profiles(&mut random);
    let policies = [
        "atoll",
        "atoll",
        "atoll",
        "reef",
        "reef_n",
        "sequential",
        "free_streams",
        "priority_streams",
    ];
    let mut clients: Vec<ClientSpec> =
        (0..1 + random.below(3)).map(|_| real_time(&mut random, &set)).collect();
    clients.extend((0..1 + random.below(4)).map(|_| best_effort(&mut random, &set)));
    let faults = if random.below(2) == 0 { Vec::new() } else { faults(&mut random) };
    let scenario = Scenario {
        name: format!("random {seed}"),
        policy: policies[random.below(policies.len() as u64) as usize].to_string(),
        seconds: 0.05 + 0.1 * random.unit_f64(),
        seed,
        best_effort_share_percent: [0, 0, 0, 10, 30][random.below(5) as usize],
        earliest_deadline_first: random.below(4) > 0,
        queue_capacity: 1 + random.below(40) as usize,
        best_effort_streams: random.below(4) as usize,
        clients,
        faults,
        ..Scenario::default()
    };
    if scenario.policy == "reef" {
        // REEF resumes some kernels earlier, so kernels must tolerate a second run.
        let kernels = set.models.iter_mut().flat_map(|model| &mut model.kernels);
        kernels.for_each(|kernel| kernel.idempotent = true);
    }
    (scenario, set)
}

fn profiles(random: &mut Random) -> ProfileSet {
    let mut gpu = builtin::mi50().gpu;
    gpu.sms = 4 + random.below(60) as u32;
    gpu.level = 1 + random.below(3) as u8;
    gpu.kills = random.below(3) > 0;
    gpu.queue_capacity = 1 + random.below(6) as usize;
    gpu.reset_ns = 5_000_000;
    let fragile = random.below(4) == 0;
    let models: Vec<ModelProfile> = (0..2 + random.below(4))
        .map(|index| {
            let count = 1 + random.below(12);
            let kernels = (0..count).map(|_| kernel(random, gpu.sms, fragile)).collect();
            ModelProfile {
                name: format!("m{index}"),
                kernels,
                input_bytes: random.below(1_000_000),
                weight_bytes: 1 + random.below(20_000_000),
            }
        })
        .collect();
    let total: u64 = models.iter().map(|model| model.weight_bytes).sum();
    let largest = models.iter().map(|model| model.weight_bytes).max().unwrap_or(0);
    // In half of the scenarios not all models fit.
    gpu.memory_bytes = if random.below(2) == 0 { total } else { largest.max(total * 2 / 3) };
    ProfileSet { gpu, models }
}

fn kernel(random: &mut Random, sms: u32, fragile: bool) -> KernelProfile {
    KernelProfile {
        blocks: 1 + random.below(u64::from(sms) * 8) as u32,
        block_ns: 500 + random.below(60_000),
        occupancy: 1 + random.below(8) as u32,
        memory_share: random.unit_f64() as f32,
        idempotent: !fragile || random.below(3) > 0,
    }
}

fn some_model(random: &mut Random, set: &ProfileSet) -> String {
    set.models[random.below(set.models.len() as u64) as usize].name.clone()
}

fn real_time(random: &mut Random, set: &ProfileSet) -> ClientSpec {
    let rate = 20.0 + 600.0 * random.unit_f64();
    let arrival = match random.below(6) {
        0 => Arrival::Uniform { rate, phase_us: random.below(5_000) },
        1 => Arrival::OnOff { rate: rate * 4.0, on_ms: 5.0, off_ms: 20.0 },
        2 => Arrival::Diurnal { rate, swing: 0.9, day_s: 0.05 },
        3 => Arrival::ClosedLoop { think_us: random.below(3_000) },
        4 => Arrival::Trace { times_ms: (0..20).map(|i| f64::from(i * i) / 4.0).collect() },
        _ => Arrival::Poisson { rate },
    };
    ClientSpec {
        name: "rt".to_string(),
        model: some_model(random, set),
        class: Class::RealTime,
        priority: 1 + random.below(2) as u32,
        deadline_ms: (random.below(2) == 0).then(|| 0.5 + 20.0 * random.unit_f64()),
        one_outstanding: random.below(3) == 0,
        cancel_percent: if random.below(4) == 0 { 20 } else { 0 },
        arrival,
    }
}

fn best_effort(random: &mut Random, set: &ProfileSet) -> ClientSpec {
    let arrival = match random.below(3) {
        0 => Arrival::Poisson { rate: 50.0 + 1_000.0 * random.unit_f64() },
        _ => Arrival::ClosedLoop { think_us: 0 },
    };
    ClientSpec {
        name: "be".to_string(),
        model: some_model(random, set),
        class: Class::BestEffort,
        priority: 1,
        deadline_ms: (random.below(5) == 0).then_some(30.0),
        one_outstanding: false,
        cancel_percent: if random.below(4) == 0 { 10 } else { 0 },
        arrival,
    }
}

fn faults(random: &mut Random) -> Vec<FaultAt> {
    let mut draw = |_| {
        let kind = match random.below(5) {
            0 | 1 => FaultKind::SlowKernel { factor: 2.0 + 20.0 * random.unit_f64() },
            2 => FaultKind::LostCompletion,
            3 => FaultKind::DeviceReset,
            _ => FaultKind::CopyStall { span_us: 100 + random.below(10_000) },
        };
        FaultAt { at_ms: 120.0 * random.unit_f64(), kind }
    };
    (0..3).map(&mut draw).collect()
}
