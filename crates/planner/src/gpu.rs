//! GPU kinds, their slices and the legal starts of these.

pub mod file;
mod table;

use crate::error::PlanError;

pub use self::table::GPU_KINDS;

/// Maximum number of slice kinds of a GPU; counts are arrays of this length.
pub const KINDS_MAX: usize = 6;

/// Maximum number of compute slices, and of memory slices, of a GPU.
pub const SLOTS_MAX: u8 = 8;

/// How many slices of each kind, in the order of [`GpuKind::slices`].
pub type SliceCounts = [u32; KINDS_MAX];

/// One kind of slice: a MIG profile, or a part of a GPU's SMs.
#[derive(Debug)]
pub struct SliceKind {
    /// NVIDIA's name, such as `3g.40gb`; `3/8` for a part of the SMs.
    pub name: &'static str,
    /// Identifier that `nvidia-smi mig -cgi` takes; 0 without MIG.
    pub profile_id: u8,
    /// Compute slices.
    pub gpcs: u8,
    /// Memory in MiB that its processes can use; less than the name says.
    pub memory_mib: u32,
    /// Memory slices; placements must not overlap in these.
    pub memory_slices: u8,
    /// Legal first memory slices.
    pub starts: &'static [u8],
}

impl SliceKind {
    /// Memory in MiB.
    pub fn memory_mib(&self) -> u64 {
        u64::from(self.memory_mib)
    }

    /// The memory slices it holds when it starts at `start`, one bit each.
    pub fn mask(&self, start: u8) -> u16 {
        ((1u16 << self.memory_slices) - 1) << start
    }
}

/// How a GPU is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// Into MIG instances, each with memory of its own.
    Mig,
    /// Into parts of its SMs: shares of its threads under MPS. Nothing but the plan divides memory.
    Sms {
        /// SMs of the whole GPU.
        sms: u16,
    },
}

/// One kind of GPU.
#[derive(Debug)]
pub struct GpuKind {
    /// Name on the command line, such as `a100-80gb`.
    pub name: &'static str,
    /// Words of the name that the driver reports, in lower case.
    pub words: &'static [&'static str],
    /// How it is divided.
    pub division: Division,
    /// Compute slices of the whole GPU.
    pub gpcs: u8,
    /// Memory slices of the whole GPU.
    pub memory_slices: u8,
    /// Its slices, smallest first.
    pub slices: &'static [SliceKind],
}

/// Ratio of the memory that a driver reports to that of the largest slice.
const REPORTED_SHARE: std::ops::RangeInclusive<f64> = 0.9..=1.12;

impl GpuKind {
    /// The kind of that name; upper and lower case are the same.
    pub fn find(name: &str) -> Result<&'static GpuKind, PlanError> {
        GPU_KINDS.iter().find(|kind| kind.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
            PlanError::UnknownGpu {
                name: name.to_string(),
                known: GPU_KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", "),
            }
        })
    }

    /// Whether it is divided into MIG instances.
    pub fn has_mig(&self) -> bool {
        self.division == Division::Mig
    }

    /// Memory of its largest slice in MiB.
    pub fn memory_mib(&self) -> u64 {
        self.slices.iter().map(SliceKind::memory_mib).max().unwrap_or(0)
    }

    /// Whether `name` is this kind's, or the name that a driver reports for such a GPU. Drivers
    /// name an A100's memory and not an H200's, so a size counts only where a kind with the same
    /// words has it.
    pub fn is_named(&self, name: &str) -> bool {
        if self.name.eq_ignore_ascii_case(name) {
            return true;
        }
        let words = words_of(name);
        if self.words.is_empty() || !self.words.iter().all(|word| has(&words, word)) {
            return false;
        }
        let like = GPU_KINDS.iter().filter(|kind| kind.words == self.words);
        let mut sizes = like.map(GpuKind::size_word).filter(|size| has(&words, size)).peekable();
        sizes.peek().is_none() || sizes.any(|size| size == self.size_word())
    }

    /// Whether a GPU that a driver reports under this name and with this memory is of the kind.
    pub fn is_device(&self, name: &str, memory_mib: u64) -> bool {
        let share = memory_mib as f64 / self.memory_mib().max(1) as f64;
        self.is_named(name) && REPORTED_SHARE.contains(&share)
    }

    /// The kind of a GPU that a driver reports under this name and with this memory.
    pub fn of_device(name: &str, memory_mib: u64) -> Option<&'static GpuKind> {
        GPU_KINDS.iter().find(|kind| kind.is_device(name, memory_mib))
    }

    /// The last part of its name, such as `80gb`.
    fn size_word(&self) -> &'static str {
        self.name.rsplit('-').next().unwrap_or_default()
    }

    /// The plain slice with that many compute slices: the one with the least memory.
    pub fn kind_of_size(&self, gpcs: u8) -> Option<usize> {
        self.slices.iter().position(|slice| slice.gpcs == gpcs)
    }

    /// Starts for the slices of `counts` in addition to the `occupied` memory slices; `None` if
    /// they do not fit.
    ///
    /// The search is exact. Larger slices are placed first and at their last legal start first, so
    /// that threes take slot 4 and the slots below stay free for fours, twos and ones.
    pub fn place(&self, counts: &SliceCounts, occupied: u16) -> Option<Vec<(usize, u8)>> {
        let mut order: Vec<usize> = Vec::new();
        for kind in (0..self.slices.len()).rev() {
            order.extend(std::iter::repeat_n(kind, counts[kind] as usize));
        }
        order.sort_by_key(|&kind| std::cmp::Reverse(self.slices[kind].memory_slices));
        let gpcs: u32 = order.iter().map(|&kind| u32::from(self.slices[kind].gpcs)).sum();
        if gpcs > u32::from(self.gpcs) {
            return None;
        }
        let mut placed = Vec::with_capacity(order.len());
        self.place_rest(&order, occupied, &mut placed).then_some(placed)
    }

    fn place_rest(&self, order: &[usize], occupied: u16, placed: &mut Vec<(usize, u8)>) -> bool {
        let Some((&kind, rest)) = order.split_first() else { return true };
        let slice = &self.slices[kind];
        // A slice of at most two memory slices avoids slot 4, which threes need.
        let mut starts: Vec<u8> = slice.starts.to_vec();
        if slice.memory_slices >= 4 {
            starts.reverse();
        }
        for start in starts {
            let mask = slice.mask(start);
            if occupied & mask == 0 {
                placed.push((kind, start));
                if self.place_rest(rest, occupied | mask, placed) {
                    return true;
                }
                placed.pop();
            }
        }
        false
    }

    /// Every multiset of slices that fits one GPU and to which no further slice can be added in any
    /// arrangement.
    pub fn maximal_patterns(&self) -> Vec<SliceCounts> {
        let mut found = Vec::new();
        self.grow([0; KINDS_MAX], 0, &mut found);
        let all = found.clone();
        found.retain(|a| !all.iter().any(|b| a != b && (0..KINDS_MAX).all(|k| a[k] <= b[k])));
        found.sort();
        found
    }

    fn grow(&self, counts: SliceCounts, from: usize, found: &mut Vec<SliceCounts>) {
        found.push(counts);
        for kind in from..self.slices.len() {
            let mut more = counts;
            more[kind] += 1;
            if self.place(&more, 0).is_some() {
                self.grow(more, kind, found);
            }
        }
    }
}

/// The words of a name in lower case: `NVIDIA A100-SXM4-80GB` has `nvidia`, `a100`, `sxm4`, `80gb`.
fn words_of(name: &str) -> Vec<String> {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect()
}

fn has(words: &[String], word: &str) -> bool {
    words.iter().any(|other| other == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_have_the_memory_that_nvidia_smi_lists() {
        // The names rounded up: an H200's 1g.18gb was planned with 18 GiB.
        let mib = |gpu: &str, slice: usize| GpuKind::find(gpu).unwrap().slices[slice].memory_mib();
        assert_eq!(mib("h200-141gb", 0), 16 * 1024);
        assert_eq!(mib("h200-141gb", 3), 69 * 1024 + 512);
        assert_eq!(mib("a100-80gb", 3), 40_192);
        assert_eq!(mib("a30-24gb", 2), 24_000);
        assert_eq!(mib("gh200-96gb", 0), 11 * 1024);
        for gpu in GPU_KINDS {
            let whole = gpu.memory_mib();
            for slice in gpu.slices {
                // No slice has more than its share of a whole GPU of this kind, as named.
                let named: u64 = gpu.size_word().trim_end_matches("gb").parse().unwrap();
                let share = named * 1024 * u64::from(slice.memory_slices);
                assert!(slice.memory_mib() * u64::from(gpu.memory_slices) <= share, "{slice:?}");
                assert!(slice.memory_mib() <= whole, "{slice:?}");
                let last = slice.starts.last().unwrap();
                assert!(last + slice.memory_slices <= gpu.memory_slices, "{slice:?}");
            }
            let sizes: Vec<_> = gpu.slices.iter().map(|s| (s.gpcs, s.memory_slices)).collect();
            assert!(sizes.is_sorted(), "{}", gpu.name);
        }
    }

    #[test]
    fn names_of_drivers_are_recognised() {
        let of = |name: &str, mib: u64| GpuKind::of_device(name, mib).map(|kind| kind.name);
        assert_eq!(of("NVIDIA A100-SXM4-80GB", 81_920), Some("a100-80gb"));
        assert_eq!(of("NVIDIA A100-SXM4-40GB", 40_960), Some("a100-40gb"));
        assert_eq!(of("NVIDIA H100 80GB HBM3", 81_559), Some("h100-80gb"));
        assert_eq!(of("NVIDIA H200", 143_771), Some("h200-141gb"));
        assert_eq!(of("NVIDIA GH200 480GB", 97_871), Some("gh200-96gb"));
        assert_eq!(of("NVIDIA L40S", 46_068), Some("l40s-48gb"));
        assert_eq!(of("NVIDIA GeForce RTX 4090", 24_564), Some("rtx-4090-24gb"));
        assert_eq!(of("NVIDIA K80", 12_000), None);
        let named = |kind: &str, name: &str| GpuKind::find(kind).unwrap().is_named(name);
        assert!(named("a100-80gb", "A100-80GB") && named("a100-80gb", "NVIDIA A100 80GB PCIe"));
        assert!(!named("a30-24gb", "a100-80gb") && !named("a100-40gb", "NVIDIA A100-SXM4-80GB"));
        assert!(!named("h200-141gb", "NVIDIA GH200 480GB"));
    }

    #[test]
    fn a_gpu_without_mig_is_divided_by_sms() {
        let gpu = GpuKind::find("l40s-48gb").unwrap();
        assert!(!gpu.has_mig());
        // Every sum of eight is a pattern.
        assert!(gpu.maximal_patterns().iter().all(|counts| {
            let eighths = |(kind, count): (usize, &u32)| match gpu.slices.get(kind) {
                Some(slice) => u32::from(slice.gpcs) * count,
                None => 0,
            };
            counts.iter().enumerate().map(eighths).sum::<u32>() == 8
        }));
        assert!(gpu.place(&[0, 0, 2, 0, 0, 0], 0).is_some_and(|placed| placed.len() == 2));
        assert!(gpu.place(&[0, 0, 3, 0, 0, 0], 0).is_none());
    }

    #[test]
    fn an_a100_has_twelve_maximal_multisets_of_plain_slices() {
        let gpu = GpuKind::find("A100-80GB").unwrap();
        let plain: Vec<SliceCounts> =
            gpu.maximal_patterns().into_iter().filter(|counts| counts[1] == 0).collect();
        assert_eq!(plain.len(), 12);
    }

    #[test]
    fn the_wide_one_at_start_six_uses_the_eighth_memory_slice() {
        let gpu = GpuKind::find("a100-80gb").unwrap();
        let placed = gpu.place(&[0, 1, 3, 0, 0, 0], 0).unwrap();
        assert!(placed.contains(&(1, 6)));
        assert!(gpu.place(&[0, 1, 0, 1, 1, 0], 0).is_none());
    }

    #[test]
    fn two_threes_leave_no_room() {
        let gpu = GpuKind::find("h100-80gb").unwrap();
        assert!(gpu.place(&[0, 0, 0, 2, 0, 0], 0).is_some());
        assert!(gpu.place(&[1, 0, 0, 2, 0, 0], 0).is_none());
    }

    #[test]
    fn an_unknown_kind_is_named() {
        let error = GpuKind::find("k80").unwrap_err().to_string();
        assert!(error.contains("k80") && error.contains("a100-80gb"), "{error}");
    }
}
