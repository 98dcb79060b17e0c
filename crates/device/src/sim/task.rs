//! Data of a simulated task, so that a wrong restore shows in its output.
//!
//! The output of a kernel is a function of its input and of each of its blocks. The sum over a
//! range of blocks has a closed form, so a kernel of any size costs a few operations.

/// Scrambles 64 bits (the finaliser of SplitMix64).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn key(input: u64, step: usize) -> u64 {
    mix(input ^ (step as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1
}

/// Contribution of blocks `from..to` to the output of a kernel.
fn blocks_sum(key: u64, from: u32, to: u32) -> u64 {
    let triangle = |n: u64| n * (n + 1) / 2;
    key.wrapping_mul(triangle(u64::from(to)) - triangle(u64::from(from)))
}

/// The output of a task that was never preempted.
pub fn reference_output(input: u64, blocks: impl Iterator<Item = u32>) -> u64 {
    blocks
        .enumerate()
        .fold(input, |value, (step, count)| mix(blocks_sum(key(value, step), 0, count)))
}

/// Buffers of one task on the device.
#[derive(Clone, Debug)]
pub(super) struct TaskMemory {
    /// `values[k]` is the input of kernel `k`; zero until it is there.
    values: Vec<u64>,
    /// The kernel whose output is being written.
    step: usize,
    /// How many of its blocks are done.
    tiles: u32,
    /// Their sum so far.
    sum: u64,
    /// The furthest point reached, to count repeated work.
    furthest: (usize, u32),
}

impl TaskMemory {
    pub(super) fn new(input: u64, steps: usize) -> TaskMemory {
        let mut values = vec![0; steps + 1];
        values[0] = input;
        TaskMemory { values, step: 0, tiles: 0, sum: 0, furthest: (0, 0) }
    }

    /// Kernel `step` begins at block `tile`; all blocks before it count as done.
    pub(super) fn begin(&mut self, step: usize, tile: u32) {
        let there = if self.step == step { self.tiles.min(tile) } else { 0 };
        self.sum = blocks_sum(key(self.values[step], step), 0, there);
        self.step = step;
        self.tiles = tile;
    }

    /// Blocks `from..to` of `step` are done. Returns how many of them had been done before.
    pub(super) fn run(&mut self, step: usize, from: u32, to: u32, idempotent: bool) -> u32 {
        let again = match step.cmp(&self.furthest.0) {
            std::cmp::Ordering::Less => to - from,
            std::cmp::Ordering::Equal => self.furthest.1.clamp(from, to) - from,
            std::cmp::Ordering::Greater => 0,
        };
        let key = key(self.values[step], step);
        self.sum = self.sum.wrapping_add(blocks_sum(key, from, to));
        if !idempotent && again > 0 {
            self.sum = self.sum.wrapping_add(mix(u64::from(again)));
        }
        self.tiles = to;
        self.furthest = self.furthest.max((step, to));
        again
    }

    /// Kernel `step` is complete.
    pub(super) fn finish(&mut self, step: usize) {
        self.values[step + 1] = mix(self.sum);
        self.furthest = self.furthest.max((step + 1, 0));
        self.tiles = 0;
        self.step = step + 1;
        self.sum = 0;
    }

    /// The progress of the running kernel is lost.
    pub(super) fn forget(&mut self) {
        self.tiles = 0;
        self.sum = 0;
    }

    pub(super) fn output(&self) -> u64 {
        self.values[self.values.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [u32; 3] = [7, 120, 33];

    fn run_from(task: &mut TaskMemory, step: usize, tile: u32) {
        for (step, blocks) in BLOCKS.iter().enumerate().skip(step) {
            let first = if step == 1 { tile } else { 0 };
            task.begin(step, first);
            task.run(step, first, *blocks, true);
            task.finish(step);
        }
    }

    fn interrupted_in_kernel_1() -> TaskMemory {
        let mut task = TaskMemory::new(5, 3);
        task.begin(0, 0);
        task.run(0, 0, 7, true);
        task.finish(0);
        task.begin(1, 0);
        task.run(1, 0, 50, true);
        task
    }

    #[test]
    fn output_shows_whether_the_restore_was_right() {
        let want = reference_output(5, BLOCKS.into_iter());
        for (step, tile, right) in
            [(1, 50, true), (1, 20, true), (1, 0, true), (1, 51, false), (2, 0, false)]
        {
            let mut task = interrupted_in_kernel_1();
            run_from(&mut task, step, tile);
            assert_eq!(task.output() == want, right, "from {step}, {tile}");
        }
        let mut task = interrupted_in_kernel_1();
        run_from(&mut task, 0, 0);
        assert_eq!(task.output(), want);
        let mut task = interrupted_in_kernel_1();
        task.forget();
        run_from(&mut task, 1, 50);
        assert_ne!(task.output(), want);
    }

    #[test]
    fn counts_repeated_blocks() {
        let mut task = interrupted_in_kernel_1();
        task.begin(1, 20);
        assert_eq!(task.run(1, 20, 120, true), 30);
        task.finish(1);
        task.begin(0, 0);
        assert_eq!(task.run(0, 0, 7, true), 7);
    }
}
