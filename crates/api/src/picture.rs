//! JPEG and PNG files as RGB pictures, and resizing of these.
//!
//! A file comes from a client, so its header is checked against [`DecodeLimits`] before memory for
//! its pixels is allocated. 16-bit channels are rounded to 8 bits and colour profiles are ignored;
//! what becomes of transparent pixels, the caller says.

use std::fmt::Display;
use std::io::Cursor;

use model::Reservation;
use model::config::ResizeFilter;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::error::{ApiError, ApiResult};
use crate::fallible::with_room;

#[cfg(test)]
mod tests;

/// Limits that a file's header is checked against.
#[derive(Clone, Copy, Debug)]
pub struct DecodeLimits {
    /// Longest edge in pixels.
    pub edge: u32,
    /// Largest buffer of decoded pixels, before they are converted to RGB.
    pub bytes: usize,
}

impl DecodeLimits {
    fn check(&self, width: usize, height: usize, bytes: Option<usize>) -> ApiResult<usize> {
        if width == 0 || height == 0 {
            return Err(unreadable(&"it is empty"));
        }
        if width.max(height) > self.edge as usize {
            let edge = self.edge;
            let error = format!("{width}x{height} pixels exceed the limit of {edge} per edge");
            return Err(unreadable(&error));
        }
        bytes.filter(|&bytes| bytes <= self.bytes).ok_or_else(|| {
            let limit = self.bytes;
            unreadable(&format!("{width}x{height} pixels exceed the limit of {limit} bytes"))
        })
    }
}

impl Default for DecodeLimits {
    fn default() -> DecodeLimits {
        DecodeLimits { edge: 16_384, bytes: 512 << 20 }
    }
}

/// A picture of 8-bit red, green and blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbPicture {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `3 * width * height` bytes, row by row.
    pub rgb: Vec<u8>,
}

/// What becomes of transparent pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transparency {
    /// They have the colour that the file gives them, as where networks are trained.
    Dropped,
    /// They are put on white, as on a page.
    OnWhite,
}

/// Decodes a JPEG or PNG file. The memory of its pixels is reserved in `memory`, which must live as
/// long as the picture, before it is allocated.
pub fn decode(
    file: &[u8],
    transparency: Transparency,
    limits: &DecodeLimits,
    memory: &mut Reservation,
) -> ApiResult<RgbPicture> {
    if file.starts_with(b"\x89PNG\r\n\x1a\n") {
        decode_png(file, transparency, limits, memory)
    } else if file.starts_with(b"\xff\xd8\xff") {
        decode_jpeg(file, limits, memory)
    } else {
        Err(unreadable(&"it is neither JPEG nor PNG"))
    }
}

/// The size of the pixels of a JPEG or PNG file, by its header alone; 0 if that cannot be read.
pub fn decoded_size_bytes(file: &[u8]) -> usize {
    let pixels = if file.starts_with(b"\x89PNG\r\n\x1a\n") {
        let number = |at: usize| {
            let bytes = file.get(at..)?.first_chunk::<4>()?;
            usize::try_from(u32::from_be_bytes(*bytes)).ok()
        };
        // The first chunk begins with both edges.
        number(16).zip(number(20))
    } else {
        let mut decoder = zune_jpeg::JpegDecoder::new(ZCursor::new(file));
        decoder.decode_headers().ok().and_then(|()| decoder.dimensions())
    };
    pixels.map_or(0, |(width, height)| width.saturating_mul(height).saturating_mul(3))
}

fn unreadable(error: &dyn Display) -> ApiError {
    ApiError::invalid(format!("the picture cannot be read: {error}"))
}

fn decode_png(
    file: &[u8],
    transparency: Transparency,
    limits: &DecodeLimits,
    memory: &mut Reservation,
) -> ApiResult<RgbPicture> {
    let refuse = |error: png::DecodingError| unreadable(&error);
    let bytes = png::Limits { bytes: limits.bytes };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), bytes);
    decoder.set_ignore_text_chunk(true);
    let (width, height) = decoder.read_header_info().map_err(refuse)?.size();
    let (width, height) = (width as usize, height as usize);
    limits.check(width, height, Some(0))?;
    // Palettes and channels of fewer than 8 bits become 8 bits per channel.
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(refuse)?;
    let size = limits.check(width, height, reader.output_buffer_size())?;
    let mut decoded = pixels_buffer(size, width * height, 1, memory)?;
    reader.next_frame(&mut decoded).map_err(refuse)?;
    let (colour, depth) = reader.output_color_type();
    let samples = match depth {
        png::BitDepth::Sixteen => to_8_bits(decoded),
        _ => decoded,
    };
    let samples = match (transparency, colour) {
        (Transparency::OnWhite, png::ColorType::GrayscaleAlpha) => on_white::<2>(samples),
        (Transparency::OnWhite, png::ColorType::Rgba) => on_white::<4>(samples),
        _ => samples,
    };
    let rgb = match colour {
        png::ColorType::Grayscale => grey_to_rgb::<1>(&samples)?,
        png::ColorType::GrayscaleAlpha => grey_to_rgb::<2>(&samples)?,
        png::ColorType::Rgb => samples,
        png::ColorType::Rgba => drop_alpha(samples),
        png::ColorType::Indexed => return Err(unreadable(&"its palette is missing")),
    };
    Ok(RgbPicture { width, height, rgb })
}

fn decode_jpeg(
    file: &[u8],
    limits: &DecodeLimits,
    memory: &mut Reservation,
) -> ApiResult<RgbPicture> {
    let refuse = |error: zune_jpeg::errors::DecodeErrors| unreadable(&error);
    let options = DecoderOptions::default()
        .set_strict_mode(false)
        .set_max_width(limits.edge as usize)
        .set_max_height(limits.edge as usize)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers().map_err(refuse)?;
    let grey = decoder.input_colorspace() == Some(ColorSpace::Luma);
    if grey {
        decoder.set_options(options.jpeg_set_out_colorspace(ColorSpace::Luma));
    }
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let size = limits.check(width, height, decoder.output_buffer_size())?;
    // Progressive files keep the coefficients of all channels, two bytes each.
    let mut decoded = pixels_buffer(size, width * height, 7, memory)?;
    decoder.decode_into(&mut decoded).map_err(refuse)?;
    let rgb = if grey { grey_to_rgb::<1>(&decoded)? } else { decoded };
    Ok(RgbPicture { width, height, rgb })
}

/// A buffer of `size` zeros for decoded pixels. Reserves it, the decoder's own memory of `own`
/// bytes per pixel, and the pixels as RGB.
fn pixels_buffer(
    size: usize,
    pixels: usize,
    own: usize,
    memory: &mut Reservation,
) -> ApiResult<Vec<u8>> {
    let bytes = size.saturating_add(pixels.saturating_mul(3 + own));
    memory.grow(bytes)?;
    let mut buffer = Vec::new();
    let refused = |_| ApiError::from(memory.memory().refusal(bytes, 0));
    buffer.try_reserve_exact(size).map_err(refused)?;
    buffer.resize(size, 0);
    Ok(buffer)
}

/// Rounds big-endian 16-bit samples to 8 bits.
fn to_8_bits(mut samples: Vec<u8>) -> Vec<u8> {
    let count = samples.len() / 2;
    for at in 0..count {
        let wide = u32::from(u16::from_be_bytes([samples[2 * at], samples[2 * at + 1]]));
        // The nearest value of wide * 255 / 65535.
        samples[at] = ((wide + 128) / 257) as u8;
    }
    samples.truncate(count);
    samples
}

fn grey_to_rgb<const CHANNELS: usize>(samples: &[u8]) -> ApiResult<Vec<u8>> {
    let mut rgb = with_room(3 * (samples.len() / CHANNELS))?;
    rgb.extend(samples.chunks_exact(CHANNELS).flat_map(|pixel| [pixel[0]; 3]));
    Ok(rgb)
}

/// What is seen of pixels over white; the last of their channels says how much of it they cover.
fn on_white<const CHANNELS: usize>(mut samples: Vec<u8>) -> Vec<u8> {
    for pixel in samples.chunks_exact_mut(CHANNELS) {
        if let Some((alpha, colours)) = pixel.split_last_mut() {
            let alpha = u32::from(*alpha);
            for sample in colours {
                *sample = ((u32::from(*sample) * alpha + 255 * (255 - alpha) + 127) / 255) as u8;
            }
        }
    }
    samples
}

fn drop_alpha(mut samples: Vec<u8>) -> Vec<u8> {
    let count = samples.len() / 4;
    for at in 0..count {
        samples.copy_within(4 * at..4 * at + 3, 3 * at);
    }
    samples.truncate(3 * count);
    samples
}

impl RgbPicture {
    /// The red, green and blue of each pixel, row by row.
    pub fn pixels(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.rgb.chunks_exact(3)
    }

    /// The rectangle of `width` x `height` whose upper left pixel is at `left`, `top`.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn crop(
        &self,
        left: usize,
        top: usize,
        width: usize,
        height: usize,
    ) -> ApiResult<RgbPicture> {
        let row = |y: usize| {
            let start = (y * self.width + left) * 3;
            &self.rgb[start..start + width * 3]
        };
        let mut rgb = with_room(width * height * 3)?;
        (top..top + height).for_each(|y| rgb.extend_from_slice(row(y)));
        Ok(RgbPicture { width, height, rgb })
    }

    /// The picture scaled to `width` x `height`.
    ///
    /// The filter is separable. It is widened when the picture shrinks, so that every pixel counts.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn resize(
        &self,
        width: usize,
        height: usize,
        filter: ResizeFilter,
    ) -> ApiResult<RgbPicture> {
        if (width, height) == (self.width, self.height) {
            return self.crop(0, 0, width, height);
        }
        let columns: Vec<Taps> = (0..width).map(|x| taps(x, self.width, width, filter)).collect();
        let stride = self.width * 3;
        let mut rgb = with_room(width * height * 3)?;
        // One row after the other, so that no picture of floats is held.
        let mut blended = vec![0f32; stride];
        for y in 0..height {
            let rows = taps(y, self.height, height, filter);
            blended.fill(0.0);
            for (row, weight) in self.rgb[rows.first * stride..].chunks(stride).zip(&rows.weights) {
                for (sum, &value) in blended.iter_mut().zip(row) {
                    *sum += f32::from(value) * weight;
                }
            }
            for column in &columns {
                let mut pixel = [0f32; 3];
                let sources = blended[column.first * 3..].chunks_exact(3);
                for (source, weight) in sources.zip(&column.weights) {
                    for (sum, value) in pixel.iter_mut().zip(source) {
                        *sum += value * weight;
                    }
                }
                rgb.extend(pixel.map(|value| value.clamp(0.0, 255.0).round() as u8));
            }
        }
        Ok(RgbPicture { width, height, rgb })
    }
}

/// The source pixels that make one pixel of a resized row or column.
struct Taps {
    first: usize,
    /// One per source pixel from `first` on; their sum is 1.
    weights: Vec<f32>,
}

fn taps(target: usize, from: usize, to: usize, filter: ResizeFilter) -> Taps {
    let ratio = from as f32 / to as f32;
    let scale = ratio.max(1.0);
    let support = scale
        * match filter {
            ResizeFilter::Nearest => 0.0,
            ResizeFilter::Bilinear => 1.0,
            ResizeFilter::Bicubic => 2.0,
            ResizeFilter::Lanczos => 3.0,
        };
    let centre = (target as f32 + 0.5) * ratio;
    let first = ((centre - support).floor().max(0.0) as usize).min(from - 1);
    let end = ((centre + support).ceil() as usize).clamp(first + 1, from);
    // Distances are from the centre of a source pixel.
    let centre = centre - 0.5;
    let weight = |source: usize| weight((source as f32 - centre) / scale, filter);
    let mut weights: Vec<f32> = (first..end).map(weight).collect();
    let sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
    weights.iter_mut().for_each(|weight| *weight /= sum);
    Taps { first, weights }
}

/// The weight of a source pixel at `distance` from the centre of a target pixel.
fn weight(distance: f32, filter: ResizeFilter) -> f32 {
    let x = distance.abs();
    match filter {
        ResizeFilter::Nearest => 1.0,
        ResizeFilter::Bilinear => (1.0 - x).max(0.0),
        // Catmull-Rom.
        ResizeFilter::Bicubic if x < 1.0 => (9.0 * x.powi(3) - 15.0 * x.powi(2) + 6.0) / 6.0,
        ResizeFilter::Bicubic if x < 2.0 => {
            (-3.0 * x.powi(3) + 15.0 * x.powi(2) - 24.0 * x + 12.0) / 6.0
        }
        ResizeFilter::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
        ResizeFilter::Bicubic | ResizeFilter::Lanczos => 0.0,
    }
}

fn sinc(x: f32) -> f32 {
    let angle = x * std::f32::consts::PI;
    if x == 0.0 { 1.0 } else { angle.sin() / angle }
}
