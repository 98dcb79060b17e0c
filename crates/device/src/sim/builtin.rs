//! Built-in profiles: a GPU like the MI50 after Table 1 of REEF, and one like the H200 after our
//! own measurements.
//!
//! Published are the number of kernels and the latency of each model, the range of kernel times and
//! the mean share of SMs in use. Single kernels are drawn with a fixed seed to match them.

use base::Random;

use super::profile::{GpuProfile, ModelProfile, ProfileSet};
use crate::profile::KernelProfile;

/// Published figures of a model.
struct PublishedModel {
    name: &'static str,
    kernels: usize,
    /// Latency on the MI50 and on the H200.
    latency_us: [u64; 2],
    usage: Usage,
    /// Blocks that fit on an SM; one value is drawn for every kernel.
    occupancies: &'static [u32],
    weight_mb: u64,
    input_kb: u64,
}

/// Share of the SMs that the kernels of a model use, in thousandths.
enum Usage {
    /// The mean; some kernels fill the GPU several times.
    Mean(u32),
    /// Uniform in this range, in one wave.
    Between(u32, u32),
}

/// Used where nothing is published.
const ANY: &[u32] = &[2, 2, 4, 4, 6, 8];

/// Table 1 of REEF, except for ResNet: beside REEF's queues it takes 12.3 ms (figure 15a), which
/// also matches its throughput in figure 11. VGG uses between 6.7 and 86.7 % of the GPU (figure
/// 3b), and most models may pad it (section 7.2), so its occupancy is the lowest. The shares of
/// Inception and Bert are those of figure 17.
const MODELS: [PublishedModel; 5] = [
    PublishedModel {
        name: "resnet152",
        kernels: 307,
        latency_us: [12_300, 2_430],
        usage: Usage::Mean(450),
        occupancies: ANY,
        weight_mb: 241,
        input_kb: 602,
    },
    PublishedModel {
        name: "densenet201",
        kernels: 207,
        latency_us: [3_500, 3_560],
        usage: Usage::Mean(300),
        occupancies: ANY,
        weight_mb: 80,
        input_kb: 602,
    },
    PublishedModel {
        name: "vgg19",
        kernels: 55,
        latency_us: [4_400, 490],
        usage: Usage::Between(67, 867),
        occupancies: &[2],
        weight_mb: 575,
        input_kb: 602,
    },
    PublishedModel {
        name: "inceptionv3",
        kernels: 146,
        latency_us: [8_300, 1_720],
        usage: Usage::Mean(850),
        occupancies: ANY,
        weight_mb: 95,
        input_kb: 1_073,
    },
    PublishedModel {
        name: "distilbert",
        kernels: 205,
        latency_us: [5_400, 585],
        usage: Usage::Mean(700),
        occupancies: ANY,
        weight_mb: 265,
        input_kb: 2,
    },
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
        // The delay between streams in section 5 of the paper.
        switch_ns: [20_000, 40_000],
        preempt_ns: 2_000,
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
        switch_ns: [0, 0],
        preempt_ns: 3_000,
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
    let models = MODELS.iter().map(|published| draw_model(published, column, &gpu)).collect();
    ProfileSet { gpu, models }
}

fn draw_model(published: &PublishedModel, column: usize, gpu: &GpuProfile) -> ModelProfile {
    let seed = published.name.bytes().fold(7, |seed: u64, byte| seed * 31 + u64::from(byte));
    let mut random = Random::new(seed);
    let gaps = gpu.launch_ns + gpu.gap_ns * (published.kernels as u64 - 1);
    let target = (published.latency_us[column] * 1_000 - gaps) as f64;
    // Kernel times spread over a factor of 25 around their median, as in figure 10 of the paper.
    let weights: Vec<f64> = (0..published.kernels).map(|_| 25f64.powf(random.unit_f64())).collect();
    let total: f64 = weights.iter().sum();
    let mut draw = |weight: &f64| draw_kernel(published, weight / total * target, gpu, &mut random);
    ModelProfile {
        name: published.name.to_string(),
        kernels: weights.iter().map(&mut draw).collect(),
        input_bytes: published.input_kb * 1_000,
        weight_bytes: published.weight_mb * 1_000_000,
    }
}

fn draw_kernel(
    published: &PublishedModel,
    time_ns: f64,
    gpu: &GpuProfile,
    random: &mut Random,
) -> KernelProfile {
    let occupancy =
        published.occupancies[random.below(published.occupancies.len() as u64) as usize];
    let (blocks, waves) = draw_blocks(&published.usage, occupancy, gpu, random);
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

/// Blocks of a kernel, and in how many waves they run.
fn draw_blocks(usage: &Usage, occupancy: u32, gpu: &GpuProfile, random: &mut Random) -> (u32, u32) {
    let one_wave = |share: f64| {
        let sms = (share * f64::from(gpu.sms)).round().max(1.0) as u32;
        (sms * occupancy, 1)
    };
    let thousandths = |share: u32| f64::from(share) / 1_000.0;
    match *usage {
        Usage::Between(least, most) => {
            let (least, most) = (thousandths(least), thousandths(most));
            one_wave(least + (most - least) * random.unit_f64())
        }
        Usage::Mean(share) => {
            let share = thousandths(share);
            let full = share * share;
            if random.unit_f64() >= full {
                let mean = (share - full) / (1.0 - full);
                let spread = mean.min(1.0 - mean);
                return one_wave(mean + spread * (2.0 * random.unit_f64() - 1.0));
            }
            let waves = 2 + random.below(3) as u32;
            // The last wave is rarely full.
            let last = 0.5 + 0.5 * random.unit_f64();
            let at_once = f64::from(gpu.sms * occupancy);
            ((at_once * (f64::from(waves - 1) + last)) as u32, waves)
        }
    }
}
