//! The GPU kinds that the planner knows.
//!
//! Sources. Names, identifiers, starts: NVIDIA's MIG user guide, public `nvidia-smi mig -lgipp`
//! listings and mig-parted's default configuration; the starts of H200, B200 and GH200 are assumed
//! to be H100's. Memory: what `nvidia-smi mig -lgip` lists, because a name rounds up: of an H200's
//! 18 GB a `1g.18gb` has 16.0 GiB. A30 and A100-40GB are in the user guide; A100-80GB and H100-80GB
//! in public listings of drivers 515 to 570; H200 in mig-parted's issue 120, B200 in its pull
//! request 187, GH200 144 GB in 139, GH200 96 GB in a public listing. Where drivers differ, the
//! smallest figure is taken. A listing that ends before a large profile gives a limit from below:
//! it has at least the memory of the smaller slices that fit into it.
//!
//! Memory of GPUs without MIG is what `nvidia-smi` reports as their total.

use super::{Division, GpuKind, SliceKind};

const ONES: &[u8] = &[0, 1, 2, 3, 4, 5, 6];
const WIDE_ONES: &[u8] = &[0, 2, 4, 6];
const TWOS: &[u8] = &[0, 2, 4];
const THREES: &[u8] = &[0, 4];
const FIRST: &[u8] = &[0];

const fn slice(
    name: &'static str,
    profile_id: u8,
    gpcs: u8,
    memory_mib: u32,
    memory_slices: u8,
    starts: &'static [u8],
) -> SliceKind {
    SliceKind { name, profile_id, gpcs, memory_mib, memory_slices, starts }
}

/// The six profiles of GPUs with seven compute slices: their names, and the memory of a slice of
/// one, two, four and eight memory slices.
const fn seven(
    [one, wide, two, three, four, whole]: [&'static str; 6],
    [mib_1, mib_2, mib_4, mib_8]: [u32; 4],
) -> [SliceKind; 6] {
    [
        slice(one, 19, 1, mib_1, 1, ONES),
        slice(wide, 15, 1, mib_2, 2, WIDE_ONES),
        slice(two, 14, 2, mib_2, 2, TWOS),
        slice(three, 9, 3, mib_4, 4, THREES),
        slice(four, 5, 4, mib_4, 4, FIRST),
        slice(whole, 0, 7, mib_8, 8, FIRST),
    ]
}

/// Parts that a GPU without MIG is divided into: eighths of its SMs.
pub(super) const EIGHTHS: u8 = 8;
/// Names and sizes of the parts.
pub(super) const PARTS: [(&str, u8, &[u8]); 6] = [
    ("1/8", 1, &[0, 1, 2, 3, 4, 5, 6, 7]),
    ("2/8", 2, &[0, 1, 2, 3, 4, 5, 6]),
    ("3/8", 3, &[0, 1, 2, 3, 4, 5]),
    ("4/8", 4, &[0, 1, 2, 3, 4]),
    ("6/8", 6, &[0, 1, 2]),
    ("8/8", 8, &[0]),
];

/// The parts of a GPU without MIG. A part's memory is its share of the whole, so that the parts of
/// a GPU fit together.
pub(super) const fn parts(memory_mib: u32) -> [SliceKind; 6] {
    const fn part(index: usize, memory_mib: u32) -> SliceKind {
        let (name, eighths, starts) = PARTS[index];
        let memory_mib = (memory_mib as u64 * eighths as u64 / EIGHTHS as u64) as u32;
        slice(name, 0, eighths, memory_mib, eighths, starts)
    }
    [
        part(0, memory_mib),
        part(1, memory_mib),
        part(2, memory_mib),
        part(3, memory_mib),
        part(4, memory_mib),
        part(5, memory_mib),
    ]
}

const fn mig(
    name: &'static str,
    words: &'static [&'static str],
    slices: &'static [SliceKind],
) -> GpuKind {
    GpuKind { name, words, division: Division::Mig, gpcs: 7, memory_slices: 8, slices }
}

const fn by_sms(
    name: &'static str,
    words: &'static [&'static str],
    sms: u16,
    slices: &'static [SliceKind],
) -> GpuKind {
    let division = Division::Sms { sms };
    GpuKind { name, words, division, gpcs: EIGHTHS, memory_slices: EIGHTHS, slices }
}

const A100_40GB: [SliceKind; 6] = seven(
    ["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
    [4_864, 9_984, 20_096, 40_448],
);
const A100_80GB: [SliceKind; 6] = seven(
    ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
    [9_728, 19_968, 40_192, 80_896],
);
const H100_80GB: [SliceKind; 6] = seven(
    ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
    [9_984, 20_096, 40_448, 81_152],
);
const H200_141GB: [SliceKind; 6] = seven(
    ["1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
    [16_384, 33_024, 71_168, 143_360],
);
const GH200_96GB: [SliceKind; 6] = seven(
    ["1g.12gb", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"],
    [11_264, 23_552, 47_616, 95_232],
);
// The listing ends after 2g: the others have at least twice and four times its memory.
const GH200_144GB: [SliceKind; 6] = seven(
    ["1g.18gb", "1g.36gb", "2g.36gb", "3g.72gb", "4g.72gb", "7g.144gb"],
    [17_920, 36_096, 72_192, 144_384],
);
// The listing ends after 2g: the others have at least twice and four times its memory.
const B200_180GB: [SliceKind; 6] = seven(
    ["1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"],
    [20_992, 45_312, 90_624, 181_248],
);
const L4_24GB: [SliceKind; 6] = parts(23_034);
const A10_24GB: [SliceKind; 6] = parts(23_028);
const L40S_48GB: [SliceKind; 6] = parts(46_068);
const RTX_4090_24GB: [SliceKind; 6] = parts(24_564);
const RTX_5090_32GB: [SliceKind; 6] = parts(32_607);

/// Every GPU kind the planner knows.
pub const GPU_KINDS: &[GpuKind] = &[
    GpuKind {
        name: "a30-24gb",
        words: &["a30"],
        division: Division::Mig,
        gpcs: 4,
        memory_slices: 4,
        slices: &[
            slice("1g.6gb", 14, 1, 5_952, 1, &[0, 1, 2, 3]),
            slice("2g.12gb", 5, 2, 11_968, 2, &[0, 2]),
            slice("4g.24gb", 0, 4, 24_000, 4, FIRST),
        ],
    },
    mig("a100-40gb", &["a100"], &A100_40GB),
    mig("a100-80gb", &["a100"], &A100_80GB),
    mig("h100-80gb", &["h100"], &H100_80GB),
    mig("h200-141gb", &["h200"], &H200_141GB),
    mig("gh200-96gb", &["gh200"], &GH200_96GB),
    mig("gh200-144gb", &["gh200"], &GH200_144GB),
    mig("b200-180gb", &["b200"], &B200_180GB),
    by_sms("l4-24gb", &["l4"], 58, &L4_24GB),
    by_sms("a10-24gb", &["a10"], 72, &A10_24GB),
    by_sms("l40s-48gb", &["l40s"], 142, &L40S_48GB),
    by_sms("rtx-4090-24gb", &["rtx", "4090"], 128, &RTX_4090_24GB),
    by_sms("rtx-5090-32gb", &["rtx", "5090"], 170, &RTX_5090_32GB),
];
