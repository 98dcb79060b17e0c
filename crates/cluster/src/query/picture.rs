//! Pictures between stages: decoded within limits, cropped along a rectangle of any angle, resized
//! and normalised.

use api::ApiError;
use api::error::ApiResult;
use api::picture::{self, DecodeLimits, Transparency};
use bytes::Bytes;
use model::config::{ChannelOrder, ImageLayout};
use model::memory::try_vec;
use model::tensor::TensorData;
use model::{DataType, HostMemory, Reservation, Tensor};

use super::spec::{PictureFeed, Size};

/// Maximum edge of a picture.
const EDGE_MAX: u32 = 16_384;

/// A picture in RGB.
#[derive(Debug)]
pub struct Picture {
    /// Pixels.
    pub width: usize,
    /// Pixels.
    pub height: usize,
    /// Rows of red, green, blue.
    pub rgb: Bytes,
    /// The budget of what is made of it, and what it takes of it itself.
    memory: Reservation,
}

/// The corners of a rectangle in pixels, clockwise from the upper left of its content.
pub type Corners = [[f32; 2]; 4];

impl Picture {
    /// Reads a picture from a tensor: UINT8 of height x width x 3, or BYTES with a JPEG or PNG
    /// file.
    pub fn of(name: &str, tensor: &Tensor, memory: &'static HostMemory) -> ApiResult<Picture> {
        match tensor.data() {
            TensorData::Strings(files) => match &files[..] {
                [file] => Picture::decode(file, memory),
                _ => Err(ApiError::invalid(format!("'{name}' must hold one picture"))),
            },
            TensorData::Raw(bytes) => {
                let dims = match tensor.shape() {
                    [height, width, 3] | [1, height, width, 3] => Some((*height, *width)),
                    _ => None,
                };
                let max = EDGE_MAX as usize;
                match dims.filter(|_| tensor.dtype() == DataType::U8) {
                    Some((height, width)) if height.min(width) > 0 && height.max(width) <= max => {
                        let memory = memory.empty();
                        Ok(Picture { width, height, rgb: bytes.clone(), memory })
                    }
                    _ => Err(ApiError::invalid(format!(
                        "'{name}' is {}{:?}; a picture is UINT8 of height x width x 3, or BYTES \
                         with a JPEG or PNG file",
                        tensor.dtype().wire_name(),
                        tensor.shape()
                    ))),
                }
            }
        }
    }

    /// Decodes a JPEG or PNG file. What is transparent is white, as on a page. The memory of its
    /// pixels stays reserved as long as the picture lives.
    pub fn decode(file: &[u8], memory: &'static HostMemory) -> ApiResult<Picture> {
        let limits = DecodeLimits { edge: EDGE_MAX, ..DecodeLimits::default() };
        let mut memory = memory.empty();
        let decoded = picture::decode(file, Transparency::OnWhite, &limits, &mut memory)?;
        let picture::RgbPicture { width, height, rgb } = decoded;
        // The decoder's own memory is free again.
        memory.shrink_to(rgb.capacity());
        Ok(Picture { width, height, rgb: rgb.into(), memory })
    }

    /// The corners of the whole picture.
    pub fn whole(&self) -> Corners {
        let (width, height) = (self.width as f32, self.height as f32);
        [[0.0, 0.0], [width, 0.0], [width, height], [0.0, height]]
    }

    /// The content of `corners` as a tensor with one row.
    pub fn tensor(&self, corners: &Corners, feed: &PictureFeed) -> ApiResult<Tensor> {
        let (width, height, total) = size(corners, &feed.size);
        let channels = if feed.channels == ChannelOrder::Gray { 1 } else { 3 };
        let (dims, at): (Vec<usize>, _) = match feed.layout {
            ImageLayout::Nchw => (vec![1, channels, height, total], true),
            ImageLayout::Nhwc => (vec![1, height, total, channels], false),
        };
        let count = channels * height * total;
        let (mut values, memory) = try_vec(self.memory.memory(), count)?;
        values.resize(count, 0f32);
        let of = |list: &[f32], channel: usize| list[channel.min(list.len() - 1)];
        for y in 0..height {
            for x in 0..width {
                let [r, g, b] = self.sample(corners, x, y, width, height);
                let colours = match feed.channels {
                    ChannelOrder::Rgb => [r, g, b],
                    ChannelOrder::Bgr => [b, g, r],
                    ChannelOrder::Gray => [0.299 * r + 0.587 * g + 0.114 * b, 0.0, 0.0],
                };
                for (channel, value) in colours.into_iter().take(channels).enumerate() {
                    let index = match at {
                        true => (channel * height + y) * total + x,
                        false => (y * total + x) * channels + channel,
                    };
                    values[index] = (value - of(&feed.mean, channel)) / of(&feed.std, channel);
                }
            }
        }
        Ok(Tensor::from_reserved(DataType::F32, dims, values, memory)?)
    }

    /// The colour at a pixel of a `width` x `height` view of `corners`, by bilinear interpolation.
    fn sample(
        &self,
        corners: &Corners,
        x: usize,
        y: usize,
        width: usize,
        height: usize,
    ) -> [f32; 3] {
        let (u, v) = ((x as f32 + 0.5) / width as f32, (y as f32 + 0.5) / height as f32);
        let [origin, right, _, down] = corners;
        let along = |axis: usize| {
            origin[axis] + u * (right[axis] - origin[axis]) + v * (down[axis] - origin[axis]) - 0.5
        };
        let bound = |value: f32, edge: usize| value.clamp(0.0, (edge - 1) as f32);
        let (px, py) = (bound(along(0), self.width), bound(along(1), self.height));
        let (left, top) = (px as usize, py as usize);
        let (next, below) = ((left + 1).min(self.width - 1), (top + 1).min(self.height - 1));
        let (fx, fy) = (px - left as f32, py - top as f32);
        let pixel = |x: usize, y: usize, channel: usize| {
            f32::from(self.rgb[(y * self.width + x) * 3 + channel])
        };
        std::array::from_fn(|c| {
            let upper = pixel(left, top, c) * (1.0 - fx) + pixel(next, top, c) * fx;
            let lower = pixel(left, below, c) * (1.0 - fx) + pixel(next, below, c) * fx;
            upper * (1.0 - fy) + lower * fy
        })
    }
}

fn edges(corners: &Corners) -> (f32, f32) {
    let length = |a: [f32; 2], b: [f32; 2]| (a[0] - b[0]).hypot(a[1] - b[1]).max(1.0);
    (length(corners[0], corners[1]), length(corners[0], corners[3]))
}

/// Width and height of the sampled content, and the width including padding.
fn size(corners: &Corners, size: &Size) -> (usize, usize, usize) {
    let (wide, high) = edges(corners);
    match *size {
        Size::Exact { width, height } => (width as usize, height as usize, width as usize),
        Size::Whole { short_least, long_most, multiple } => {
            let (short, long) = (wide.min(high), wide.max(high));
            let scale = (short_least as f32 / short).max(1.0).min(long_most as f32 / long);
            let multiple = multiple as f32;
            let max = (long_most as f32 / multiple).floor().max(1.0);
            let fit =
                |edge: f32| ((edge * scale / multiple).round().clamp(1.0, max) * multiple) as usize;
            (fit(wide), fit(high), fit(wide))
        }
        Size::Line { height, width_step, width_least, width_most } => {
            let natural = (height as f32 * wide / high).ceil().clamp(1.0, width_most as f32) as u32;
            let total = natural.max(width_least).div_ceil(width_step) * width_step;
            (natural as usize, height as usize, total.max(natural) as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Red grows with x, green with y.
    fn ramp(width: usize, height: usize) -> Picture {
        let pixel = |index: usize| [(index % width) as u8, (index / width) as u8, 9];
        let memory = HostMemory::leaked(1 << 30).empty();
        Picture { width, height, rgb: (0..width * height).flat_map(pixel).collect(), memory }
    }

    fn feed(size: Size) -> PictureFeed {
        PictureFeed {
            of: "image".to_string(),
            crop: true,
            size,
            mean: vec![0.0],
            std: vec![1.0],
            channels: ChannelOrder::Rgb,
            layout: ImageLayout::Nchw,
        }
    }

    #[test]
    fn crops_rectangles_of_any_angle() {
        let picture = ramp(40, 30);
        let exact = feed(Size::Exact { width: 4, height: 2 });
        let straight = [[10.0, 5.0], [14.0, 5.0], [14.0, 7.0], [10.0, 7.0]];
        let values = picture.tensor(&straight, &exact).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(values[..8], [10.0, 11.0, 12.0, 13.0, 10.0, 11.0, 12.0, 13.0]);
        assert_eq!(values[8..16], [5.0, 5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 6.0]);
        // Rotated by 90 degrees: right becomes down.
        let turned = [[12.0, 5.0], [12.0, 9.0], [10.0, 9.0], [10.0, 5.0]];
        let values = picture.tensor(&turned, &exact).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(values[..8], [11.0, 11.0, 11.0, 11.0, 10.0, 10.0, 10.0, 10.0]);
        assert_eq!(values[8..12], [5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn sizes_follow_the_picture_within_limits() {
        let wide = |w: f32, h: f32| [[0.0, 0.0], [w, 0.0], [w, h], [0.0, h]];
        let whole = Size::Whole { short_least: 64, long_most: 320, multiple: 32 };
        assert_eq!(size(&wide(100.0, 50.0), &whole), (128, 64, 128));
        assert_eq!(size(&wide(1000.0, 10.0), &whole), (320, 32, 320));
        let line = Size::Line { height: 48, width_step: 100, width_least: 320, width_most: 1000 };
        assert_eq!(size(&wide(100.0, 50.0), &line), (96, 48, 400));
        assert_eq!(size(&wide(500.0, 50.0), &line), (480, 48, 500));
        assert_eq!(size(&wide(9000.0, 50.0), &line), (1000, 48, 1000));
    }

    #[test]
    fn pads_with_zeros() {
        let line = feed(Size::Line { height: 4, width_step: 8, width_least: 0, width_most: 100 });
        let line = PictureFeed { mean: vec![1.0], ..line };
        let tensor = ramp(40, 30).tensor(&[[8., 8.], [11., 8.], [11., 12.], [8., 12.]], &line);
        let tensor = tensor.unwrap();
        assert_eq!(tensor.shape(), [1, 3, 4, 8]);
        assert_eq!(tensor.to_vec::<f32>().unwrap()[..8], [7.0, 8.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn memory_is_reserved_as_long_as_the_picture_and_its_crops_live() {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 300, 200);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().unwrap().write_image_data(&[9; 180_000]).unwrap();
        let memory = HostMemory::leaked(1 << 20);
        let picture = Picture::decode(&file, memory).unwrap();
        assert_eq!(memory.used(), 180_000);
        let exact = feed(Size::Exact { width: 100, height: 50 });
        let crop = picture.tensor(&picture.whole(), &exact).unwrap();
        assert_eq!(memory.used(), 180_000 + 60_000);
        drop(picture);
        assert_eq!(memory.used(), 60_000);
        // Two at once do not fit: the second is not decoded.
        let held = memory.reserve(800_000).unwrap();
        let error = Picture::decode(&file, memory).unwrap_err();
        assert_eq!((error.kind, error.retry_after), (api::ErrorKind::Unavailable, Some(1)));
        drop((crop, held));
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn rejects_what_is_no_picture() {
        for file in [&b""[..], b"GIF89a", b"\x89PNG\r\n\x1a\n"] {
            assert!(Picture::decode(file, HostMemory::process()).is_err());
        }
        let flat = Tensor::from_vec(vec![4, 4], vec![0u8; 16]).unwrap();
        let error = Picture::of("image", &flat, HostMemory::process()).unwrap_err();
        assert!(error.message.contains("UINT8[4, 4]"));
    }
}
