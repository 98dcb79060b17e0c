use model::HostMemory;

use super::*;

fn decode(file: &[u8], limits: &DecodeLimits) -> ApiResult<RgbPicture> {
    super::decode(file, Transparency::Dropped, limits, &mut HostMemory::process().empty())
}

/// Expected pixels, computed by the crate `image` before this module replaced it.
const EXPECTED: &str = include_str!("../../testdata/picture.txt");

fn expected(case: &str) -> Vec<u8> {
    let line = EXPECTED.lines().find_map(|line| line.strip_prefix(case)?.strip_prefix(' '));
    let line = line.unwrap_or_else(|| panic!("no expected pixels for {case}")).as_bytes();
    let digits = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    line.chunks(2).map(digits).collect()
}

fn assert_near(case: &str, rgb: &[u8], tolerance: u8) {
    let expected = expected(case);
    assert_eq!(rgb.len(), expected.len(), "{case}");
    let worst = rgb.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(worst <= tolerance, "{case} differs by {worst}");
}

fn sample(width: u32, height: u32) -> Vec<u8> {
    let value = |i: u32| (i.wrapping_mul(i).wrapping_mul(31) >> 3) as u8 ^ (i * 7) as u8;
    (0..width * height * 3).map(value).collect()
}

struct PngCase<'a> {
    colour: png::ColorType,
    depth: png::BitDepth,
    data: &'a [u8],
    palette: &'a [u8],
    transparent: &'a [u8],
}

/// A PNG file of 5 x 2 pixels.
fn png_file(case: &PngCase) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 5, 2);
    encoder.set_color(case.colour);
    encoder.set_depth(case.depth);
    if !case.palette.is_empty() {
        encoder.set_palette(case.palette.to_vec());
    }
    if !case.transparent.is_empty() {
        encoder.set_trns(case.transparent.to_vec());
    }
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(case.data).unwrap();
    drop(writer);
    file
}

#[test]
fn resizes_like_the_image_crate() {
    let picture = RgbPicture { width: 13, height: 11, rgb: sample(13, 11) };
    let filters = [
        ("nearest", ResizeFilter::Nearest),
        ("bilinear", ResizeFilter::Bilinear),
        ("bicubic", ResizeFilter::Bicubic),
        ("lanczos", ResizeFilter::Lanczos),
    ];
    for (name, filter) in filters {
        for (width, height) in [(4, 3), (5, 14), (13, 2)] {
            let resized = picture.resize(width, height, filter).unwrap();
            assert_eq!((resized.width, resized.height), (width, height));
            assert_near(&format!("resize_{name}_{width}x{height}"), &resized.rgb, 1);
        }
        assert_eq!(picture.resize(13, 11, filter).unwrap(), picture);
    }
}

#[test]
fn decodes_every_kind_of_png_like_the_image_crate() {
    use png::{BitDepth as Depth, ColorType as Colour};
    let bytes = sample(40, 40);
    let palette = &bytes[100..112];
    let plain = |colour, depth, length: usize| PngCase {
        colour,
        depth,
        data: &bytes[7..7 + length],
        palette: &[],
        transparent: &[],
    };
    let colour_key = [0, bytes[7], 0, bytes[8], 0, bytes[9]];
    let indexed = PngCase { palette, ..plain(Colour::Indexed, Depth::Two, 4) };
    let outside_palette = [0, 1, 2, 3, 0, 3, 2, 1, 9, 1];
    let cases = [
        ("grey1", plain(Colour::Grayscale, Depth::One, 2)),
        ("grey2", plain(Colour::Grayscale, Depth::Two, 4)),
        ("grey4", plain(Colour::Grayscale, Depth::Four, 6)),
        ("grey8", plain(Colour::Grayscale, Depth::Eight, 10)),
        ("grey16", plain(Colour::Grayscale, Depth::Sixteen, 20)),
        ("greya8", plain(Colour::GrayscaleAlpha, Depth::Eight, 20)),
        ("greya16", plain(Colour::GrayscaleAlpha, Depth::Sixteen, 40)),
        ("rgb8", plain(Colour::Rgb, Depth::Eight, 30)),
        ("rgb16", plain(Colour::Rgb, Depth::Sixteen, 60)),
        ("rgba8", plain(Colour::Rgba, Depth::Eight, 40)),
        ("rgba16", plain(Colour::Rgba, Depth::Sixteen, 80)),
        ("pal2trns", PngCase { transparent: &[0, 128], ..indexed }),
        ("pal2", indexed),
        (
            "pal8bad",
            PngCase { data: &outside_palette, palette, ..plain(Colour::Indexed, Depth::Eight, 0) },
        ),
        ("rgbtrns", PngCase { transparent: &colour_key, ..plain(Colour::Rgb, Depth::Eight, 30) }),
        ("grey4trns", PngCase { transparent: &[0, 3], ..plain(Colour::Grayscale, Depth::Four, 6) }),
    ];
    for (name, case) in cases {
        let picture = decode(&png_file(&case), &DecodeLimits::default()).unwrap();
        assert_eq!((picture.width, picture.height), (5, 2), "{name}");
        assert_near(name, &picture.rgb, 0);
    }
}

#[test]
fn transparent_pixels_are_put_on_white() {
    use png::{BitDepth as Depth, ColorType as Colour};
    let grey = [[0, 0], [0, 255], [0, 128], [200, 0], [100, 51]];
    let rgba = [[0, 0, 0, 0], [9, 8, 7, 255], [0, 255, 0, 128], [1, 2, 3, 0], [100, 0, 255, 51]];
    let (grey, rgba) = ([grey, grey].concat().concat(), [rgba, rgba].concat().concat());
    // Index 0 of the palette is black and transparent.
    let palette = [0, 0, 0, 10, 20, 30];
    let plain = |colour, data| PngCase {
        colour,
        depth: Depth::Eight,
        data,
        palette: &[],
        transparent: &[],
    };
    let indexed = PngCase {
        palette: &palette,
        transparent: &[0],
        ..plain(Colour::Indexed, &[0, 1, 0, 1, 1, 0, 0, 0, 0, 1])
    };
    let cases = [
        (plain(Colour::GrayscaleAlpha, &grey), [[255; 3], [0; 3], [127; 3], [255; 3], [224; 3]]),
        (
            plain(Colour::Rgba, &rgba),
            [[255; 3], [9, 8, 7], [127, 255, 127], [255; 3], [224, 204, 255]],
        ),
        (indexed, [[255; 3], [10, 20, 30], [255; 3], [10, 20, 30], [10, 20, 30]]),
    ];
    for (case, row) in cases {
        let (limits, mut memory) = (DecodeLimits::default(), HostMemory::process().empty());
        let file = png_file(&case);
        let seen = super::decode(&file, Transparency::OnWhite, &limits, &mut memory).unwrap();
        assert_eq!(seen.rgb[..15], row.concat(), "{:?}", case.colour);
        let dropped = decode(&file, &limits).unwrap();
        assert_ne!(seen.rgb, dropped.rgb, "{:?}", case.colour);
    }
}

#[test]
fn decodes_jpeg_like_the_image_crate() {
    let files = [
        ("colour.jpg", &include_bytes!("../../testdata/colour.jpg")[..]),
        ("grey.jpg", include_bytes!("../../testdata/grey.jpg")),
    ];
    for (name, file) in files {
        let picture = decode(file, &DecodeLimits::default()).unwrap();
        assert_eq!((picture.width, picture.height), (16, 12));
        // Decoders round differently from processor to processor.
        assert_near(name, &picture.rgb, 2);
    }
}

#[test]
fn limits_apply_before_pixels_are_decoded() {
    let bytes = sample(10, 1);
    let rgb = PngCase {
        colour: png::ColorType::Rgb,
        depth: png::BitDepth::Eight,
        data: &bytes,
        palette: &[],
        transparent: &[],
    };
    let files = [png_file(&rgb), include_bytes!("../../testdata/colour.jpg").to_vec()];
    for (file, edge, size) in [(&files[0], 5, 30), (&files[1], 16, 16 * 12 * 3)] {
        assert_eq!(decoded_size_bytes(file), size);
        let refusal = |edge, bytes| decode(file, &DecodeLimits { edge, bytes }).unwrap_err().kind;
        assert_eq!(refusal(edge - 1, 1 << 20), crate::ErrorKind::InvalidArgument);
        assert_eq!(refusal(edge, size - 1), crate::ErrorKind::InvalidArgument);
        // The rest of the file may need more than its pixels.
        assert!(decode(file, &DecodeLimits { edge, bytes: 1 << 16 }).is_ok());
        // A header that claims far more pixels than the file has.
        let mut huge = file.clone();
        match edge {
            5 => huge[16..24].copy_from_slice(&[0, 0, 0x3f, 0xff, 0, 0, 0x3f, 0xff]),
            _ => {
                let frame = huge.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
                huge[frame + 5..frame + 9].copy_from_slice(&[0x3f, 0xff, 0x3f, 0xff]);
            }
        }
        assert!(decode(&huge, &DecodeLimits::default()).is_err());
        assert_eq!(decoded_size_bytes(&huge), 3 * 0x3fff * 0x3fff);
    }
}

#[test]
fn refuses_what_is_no_picture() {
    for file in [&b""[..], b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\xff\xd8\xff\xc0"] {
        assert!(decode(file, &DecodeLimits::default()).is_err());
        assert_eq!(decoded_size_bytes(file), 0);
    }
}

#[test]
fn crops_rows_and_columns() {
    let picture = RgbPicture { width: 5, height: 4, rgb: sample(5, 4) };
    let cropped = picture.crop(1, 2, 3, 2).unwrap();
    assert_eq!(cropped.rgb[..9], picture.rgb[33..42]);
    assert_eq!(cropped.rgb[9..], picture.rgb[48..57]);
}
