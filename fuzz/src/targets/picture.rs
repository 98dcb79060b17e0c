//! JPEG and PNG files.

use api::picture::{DecodeLimits, Transparency, decode};
use model::HostMemory;
use model::config::ResizeFilter;

/// Smaller than the server's, so that a run sees them; the code is the same.
const LIMITS: DecodeLimits = DecodeLimits { edge: 1024, bytes: 4 << 20 };

/// Decodes a file, with its transparent pixels as they are and on white, and scales it.
pub(super) fn run(data: &[u8]) {
    for transparency in [Transparency::Dropped, Transparency::OnWhite] {
        run_with(data, transparency);
    }
}

fn run_with(data: &[u8], transparency: Transparency) {
    let mut memory = HostMemory::process().empty();
    let Ok(picture) = decode(data, transparency, &LIMITS, &mut memory) else { return };
    assert_eq!(picture.rgb.len(), 3 * picture.width * picture.height);
    assert!(picture.width.max(picture.height) <= LIMITS.edge as usize);
    if picture.width * picture.height <= 1 << 16 {
        let small = picture.resize(7, 5, ResizeFilter::Bilinear).expect("memory");
        assert_eq!(small.rgb.len(), 3 * 7 * 5);
        let part = picture.crop(0, 0, 1, 1).expect("memory");
        assert_eq!(part.rgb.len(), 3);
    }
}
