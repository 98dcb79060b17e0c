//! Built-in profiles: an MI50-like GPU after REEF's Table 1 and an H200-like one after our own measurements.
//!
//! Published are the number of kernels and the latency of each model, the range of kernel times and the mean
//! share of multiprocessors in use. Single kernels are drawn from a fixed seed so that they add up to that.

use base::Random;

use super::profile::{GpuProfile, KernelProfile, ModelProfile, ProfileSet};

/// What is known of a model: name, kernels, latency on the MI50 and on the H200 in microseconds, mean
/// share of multiprocessors in percent, megabytes of weights (fp32), kilobytes of input.
type Known = (&'static str, usize, [u64; 2], u32, u64, u64);

/// REEF's Table 1 (the 3.5 ms of DenseNet follow from the load of its workloads: five models at 20/s are
/// 70 % of the GPU). The shares of Inception and Bert are those of its figure 17.
const MODELS: [Known; 5] = [
    ("resnet152", 307, [13_600, 2_430], 45, 241, 602),
    ("densenet201", 207, [3_500, 3_560], 30, 80, 602),
    ("vgg19", 55, [4_400, 490], 50, 575, 602),
    ("inceptionv3", 146, [8_300, 1_720], 85, 95, 1_073),
    ("distilbert", 205, [5_400, 585], 70, 265, 2),
];

/// A GPU like the AMD MI50 with the paper's patched driver.
pub fn mi50() -> ProfileSet {
    let gpu = GpuProfile {
        name: "mi50".to_string(),
        sms: 60,
        level: 3,
        kills: true,
        launch_ns: 20_000,
        gap_ns: 1_000,
        leave_ns: 2_000,
        tile_ns: 5_000,
        queue_capacity: 4,
        evict_ns: 7_750,
        host_reset_ns: 3_000,
        kill_ns: 3_000,
        reset_ns: 50_000_000,
        copy_ns: 10_000,
        copy_bytes_per_us: 12_000,
        memory_bytes: 16 << 30,
    };
    assemble(gpu, 0)
}

/// A GPU like the NVIDIA H200 with an unmodified driver.
pub fn h200() -> ProfileSet {
    let gpu = GpuProfile {
        name: "h200".to_string(),
        sms: 132,
        level: 3,
        kills: false,
        launch_ns: 7_000,
        gap_ns: 560,
        leave_ns: 3_000,
        tile_ns: 2_000,
        queue_capacity: 4,
        evict_ns: 3_400,
        host_reset_ns: 1_000,
        kill_ns: 0,
        reset_ns: 50_000_000,
        copy_ns: 6_000,
        copy_bytes_per_us: 50_000,
        memory_bytes: 141_000_000_000,
    };
    assemble(gpu, 1)
}

/// A built-in set by the name of its GPU.
pub fn by_name(name: &str) -> Option<ProfileSet> {
    match name {
        "mi50" => Some(mi50()),
        "h200" => Some(h200()),
        _ => None,
    }
}

fn assemble(gpu: GpuProfile, column: usize) -> ProfileSet {
    let models = MODELS.iter().map(|known| draw_model(known, column, &gpu)).collect();
    ProfileSet { gpu, models }
}

fn draw_model(known: &Known, column: usize, gpu: &GpuProfile) -> ModelProfile {
    let (name, count, latency_us, share, weight_mb, input_kb) = *known;
    let seed = name.bytes().fold(7, |seed: u64, byte| seed * 31 + u64::from(byte));
    let mut random = Random::new(seed);
    let gaps = gpu.launch_ns + gpu.gap_ns * (count as u64 - 1);
    let target = (latency_us[column] * 1_000 - gaps) as f64;
    // Kernel times spread over a factor of 25 around their middle, as in the paper's figure 10.
    let weights: Vec<f64> = (0..count).map(|_| 25f64.powf(random.unit_f64())).collect();
    let total: f64 = weights.iter().sum();
    let kernels = weights
        .iter()
        .map(|weight| {
            draw_kernel(weight / total * target, f64::from(share) / 100.0, gpu, &mut random)
        })
        .collect();
    ModelProfile {
        name: name.to_string(),
        kernels,
        input_bytes: input_kb * 1_000,
        weight_bytes: weight_mb * 1_000_000,
    }
}

fn draw_kernel(time_ns: f64, share: f64, gpu: &GpuProfile, random: &mut Random) -> KernelProfile {
    let occupancy = [2, 2, 4, 4, 6, 8][random.below(6) as usize];
    let full = share * share;
    let (blocks, waves) = if random.unit_f64() < full {
        let waves = 2 + random.below(3) as u32;
        // The last wave is rarely full.
        let last = 0.5 + 0.5 * random.unit_f64();
        let at_once = f64::from(gpu.sms * occupancy);
        ((at_once * (f64::from(waves - 1) + last)) as u32, waves)
    } else {
        let mean = (share - full) / (1.0 - full);
        let spread = mean.min(1.0 - mean);
        let used = mean + spread * (2.0 * random.unit_f64() - 1.0);
        let sms = (used * f64::from(gpu.sms)).round().max(1.0) as u32;
        (sms * occupancy, 1)
    };
    let memory_bound = random.below(5) == 0;
    let low = random.unit_f64() as f32 * 0.3;
    KernelProfile {
        blocks,
        block_ns: ((time_ns / f64::from(waves)) as u64).max(500),
        occupancy,
        memory_share: if memory_bound { 0.6 + low } else { 0.1 + low },
        idempotent: true,
    }
}
