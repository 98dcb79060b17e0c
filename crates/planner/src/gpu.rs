//! GPU kinds, their MIG profiles and the legal starts of these.
//!
//! Sources: NVIDIA's MIG user guide (A30, A100), public `nvidia-smi mig -lgipp` listings (H100) and
//! mig-parted's default configuration (names and counts of H200 and B200). The starts of H200 and
//! B200 are assumed to be H100's until NVML reports otherwise.

use crate::error::PlanError;

/// Maximum number of slice kinds of a GPU; counts are arrays of this length.
pub const KINDS_MAX: usize = 6;

/// How many slices of each kind, in the order of [`GpuKind::slices`].
pub type SliceCounts = [u32; KINDS_MAX];

/// One MIG profile of a GPU kind.
#[derive(Debug)]
pub struct SliceKind {
    /// NVIDIA's name, such as `3g.40gb`.
    pub name: &'static str,
    /// Identifier that `nvidia-smi mig -cgi` takes.
    pub profile_id: u8,
    /// Compute slices.
    pub gpcs: u8,
    /// Memory in gigabytes, as in the name.
    pub memory_gb: u32,
    /// Memory slices; placements must not overlap in these.
    pub memory_slices: u8,
    /// Legal first memory slices.
    pub starts: &'static [u8],
}

impl SliceKind {
    /// Memory in MiB.
    pub fn memory_mib(&self) -> u64 {
        u64::from(self.memory_gb) * 1024
    }

    /// The memory slices it holds when it starts at `start`, one bit each.
    pub fn mask(&self, start: u8) -> u16 {
        ((1u16 << self.memory_slices) - 1) << start
    }
}

/// One kind of GPU.
#[derive(Debug)]
pub struct GpuKind {
    /// Name on the command line, such as `a100-80gb`.
    pub name: &'static str,
    /// Compute slices of the whole GPU.
    pub gpcs: u8,
    /// Memory slices of the whole GPU.
    pub memory_slices: u8,
    /// Its profiles, smallest first.
    pub slices: &'static [SliceKind],
}

const fn slice(
    name: &'static str,
    profile_id: u8,
    gpcs: u8,
    memory_gb: u32,
    memory_slices: u8,
    starts: &'static [u8],
) -> SliceKind {
    SliceKind { name, profile_id, gpcs, memory_gb, memory_slices, starts }
}

const ONES: &[u8] = &[0, 1, 2, 3, 4, 5, 6];
const WIDE_ONES: &[u8] = &[0, 2, 4, 6];
const TWOS: &[u8] = &[0, 2, 4];
const THREES: &[u8] = &[0, 4];
const FIRST: &[u8] = &[0];

/// Every GPU kind the planner knows.
pub const GPU_KINDS: &[GpuKind] = &[
    GpuKind {
        name: "a30-24gb",
        gpcs: 4,
        memory_slices: 4,
        slices: &[
            slice("1g.6gb", 14, 1, 6, 1, &[0, 1, 2, 3]),
            slice("2g.12gb", 5, 2, 12, 2, &[0, 2]),
            slice("4g.24gb", 0, 4, 24, 4, FIRST),
        ],
    },
    GpuKind {
        name: "a100-40gb",
        gpcs: 7,
        memory_slices: 8,
        slices: &[
            slice("1g.5gb", 19, 1, 5, 1, ONES),
            slice("1g.10gb", 15, 1, 10, 2, WIDE_ONES),
            slice("2g.10gb", 14, 2, 10, 2, TWOS),
            slice("3g.20gb", 9, 3, 20, 4, THREES),
            slice("4g.20gb", 5, 4, 20, 4, FIRST),
            slice("7g.40gb", 0, 7, 40, 8, FIRST),
        ],
    },
    GpuKind {
        name: "a100-80gb",
        gpcs: 7,
        memory_slices: 8,
        slices: &[
            slice("1g.10gb", 19, 1, 10, 1, ONES),
            slice("1g.20gb", 15, 1, 20, 2, WIDE_ONES),
            slice("2g.20gb", 14, 2, 20, 2, TWOS),
            slice("3g.40gb", 9, 3, 40, 4, THREES),
            slice("4g.40gb", 5, 4, 40, 4, FIRST),
            slice("7g.80gb", 0, 7, 80, 8, FIRST),
        ],
    },
    GpuKind {
        name: "h100-80gb",
        gpcs: 7,
        memory_slices: 8,
        slices: &[
            slice("1g.10gb", 19, 1, 10, 1, ONES),
            slice("1g.20gb", 15, 1, 20, 2, WIDE_ONES),
            slice("2g.20gb", 14, 2, 20, 2, TWOS),
            slice("3g.40gb", 9, 3, 40, 4, THREES),
            slice("4g.40gb", 5, 4, 40, 4, FIRST),
            slice("7g.80gb", 0, 7, 80, 8, FIRST),
        ],
    },
    GpuKind {
        name: "h200-141gb",
        gpcs: 7,
        memory_slices: 8,
        slices: &[
            slice("1g.18gb", 19, 1, 18, 1, ONES),
            slice("1g.35gb", 15, 1, 35, 2, WIDE_ONES),
            slice("2g.35gb", 14, 2, 35, 2, TWOS),
            slice("3g.71gb", 9, 3, 71, 4, THREES),
            slice("4g.71gb", 5, 4, 71, 4, FIRST),
            slice("7g.141gb", 0, 7, 141, 8, FIRST),
        ],
    },
    GpuKind {
        name: "b200-180gb",
        gpcs: 7,
        memory_slices: 8,
        slices: &[
            slice("1g.23gb", 19, 1, 23, 1, ONES),
            slice("1g.45gb", 15, 1, 45, 2, WIDE_ONES),
            slice("2g.45gb", 14, 2, 45, 2, TWOS),
            slice("3g.90gb", 9, 3, 90, 4, THREES),
            slice("4g.90gb", 5, 4, 90, 4, FIRST),
            slice("7g.180gb", 0, 7, 180, 8, FIRST),
        ],
    },
];

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

#[cfg(test)]
mod tests {
    use super::*;

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
