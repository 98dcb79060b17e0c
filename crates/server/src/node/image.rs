//! Images as input tensors: decoded under limits, resized, cropped and normalised.

use api::ApiError;
use api::error::ApiResult;
use api::fallible::{converted, with_room};
use api::picture::{self, DecodeLimits, RgbPicture, Transparency};
use model::config::{ChannelOrder, ImageLayout, Preprocessing};
use model::{DataType, Dim, Reservation, Tensor, ValueInfo};

/// Longest edge of an image, before and after resizing.
const MAX_EDGE: u32 = 16_384;
/// Maximum number of pixels of a resized image.
const MAX_PIXELS: u64 = 1 << 26;

/// Checks the pre-processing settings of a user.
pub fn check(preprocessing: &Preprocessing) -> ApiResult<()> {
    let refuse = |why: &'static str| Err(ApiError::invalid(why));
    if !(preprocessing.crop > 0.0 && preprocessing.crop <= 1.0) {
        return refuse("preprocessing: 'crop' must be in 0..1, without 0");
    }
    let channels = channel_count(preprocessing.channels);
    for values in [&preprocessing.mean, &preprocessing.std] {
        if values.len() != 1 && values.len() != channels {
            return refuse("preprocessing: 'mean' and 'std' have one value, or one per channel");
        }
        if values.iter().any(|value| !value.is_finite()) {
            return refuse("preprocessing: 'mean' and 'std' must be finite");
        }
    }
    if preprocessing.std.contains(&0.0) {
        return refuse("preprocessing: 'std' must not be 0");
    }
    let edges = [preprocessing.width, preprocessing.height];
    if edges.iter().flatten().any(|&edge| edge == 0 || edge > MAX_EDGE) {
        return refuse("preprocessing: 'width' and 'height' must be in 1..16384");
    }
    Ok(())
}

fn channel_count(order: ChannelOrder) -> usize {
    match order {
        ChannelOrder::Rgb | ChannelOrder::Bgr => 3,
        ChannelOrder::Gray => 1,
    }
}

/// Converts an image file to the model input `info`. `memory` must live as long as the result.
pub fn to_tensor(
    file: &[u8],
    preprocessing: &Preprocessing,
    info: &ValueInfo,
    memory: &mut Reservation,
) -> ApiResult<Tensor> {
    check(preprocessing)?;
    let (width, height) = input_size(preprocessing, info)?;
    let limits = DecodeLimits { edge: MAX_EDGE, ..DecodeLimits::default() };
    let image = picture::decode(file, Transparency::Dropped, &limits, memory)?;
    let image = resize_and_crop(&image, width, height, preprocessing, memory)?;
    let values = normalise(&image, preprocessing)?;
    let (width, height) = (width as usize, height as usize);
    let channels = channel_count(preprocessing.channels);
    let mut shape = match preprocessing.layout {
        ImageLayout::Nchw => vec![1, channels, height, width],
        ImageLayout::Nhwc => vec![1, height, width, channels],
    };
    if info.shape.as_ref().is_some_and(|dims| dims.len() == 3) {
        shape.remove(0);
    }
    match info.dtype {
        DataType::F32 => Ok(Tensor::from_vec(shape, values)?),
        DataType::F16 => {
            let halves = converted(values.into_iter(), |value| Ok(half::f16::from_f32(value)))?;
            Ok(Tensor::from_vec::<half::f16>(shape, halves)?)
        }
        DataType::U8 => {
            let bytes = converted(values.into_iter(), |value| Ok(value.round() as u8))?;
            Ok(Tensor::from_vec::<u8>(shape, bytes)?)
        }
        other => Err(ApiError::invalid(format!(
            "input '{}' is {other}; images become FP32, FP16 or UINT8",
            info.name
        ))),
    }
}

/// The input size: from the settings, or from the model's shape.
fn input_size(preprocessing: &Preprocessing, info: &ValueInfo) -> ApiResult<(u32, u32)> {
    let dims = info.shape.as_deref().unwrap_or_default();
    let from_end = |position: usize| match dims.len().checked_sub(position).map(|at| &dims[at]) {
        Some(Dim::Fixed(size)) => u32::try_from(*size).ok().filter(|s| (1..=MAX_EDGE).contains(s)),
        _ => None,
    };
    let (model_height, model_width) = match preprocessing.layout {
        ImageLayout::Nchw => (from_end(2), from_end(1)),
        ImageLayout::Nhwc => (from_end(3), from_end(2)),
    };
    let width = preprocessing.width.or(model_width);
    let height = preprocessing.height.or(model_height);
    width.zip(height).ok_or_else(|| {
        ApiError::invalid(format!(
            "input '{}' does not fix the image size; set 'width' and 'height' in preprocessing",
            info.name
        ))
    })
}

/// Resizes so that the centred crop of `width` x `height` keeps the requested share of the image.
fn resize_and_crop(
    image: &RgbPicture,
    width: u32,
    height: u32,
    preprocessing: &Preprocessing,
    memory: &mut Reservation,
) -> ApiResult<RgbPicture> {
    let crop = f64::from(preprocessing.crop);
    let (from_width, from_height) = (image.width as f64, image.height as f64);
    let scale = (f64::from(width) / crop / from_width).max(f64::from(height) / crop / from_height);
    let to_width = ((from_width * scale).round() as u32).max(width);
    let to_height = ((from_height * scale).round() as u32).max(height);
    let pixels = u64::from(to_width) * u64::from(to_height);
    if to_width > MAX_EDGE || to_height > MAX_EDGE || pixels > MAX_PIXELS {
        return Err(ApiError::invalid(format!(
            "an image of {from_width}x{from_height} is too narrow for a {width}x{height} input"
        )));
    }
    // The resized picture, one row of floats, the crop, and the tensor in two element types.
    let input = width as usize * height as usize;
    memory.grow(pixels as usize * 3 + image.width * 12 + input * (3 + 3 * 8))?;
    let (left, top) = ((to_width - width) / 2, (to_height - height) / 2);
    let resized = image.resize(to_width as usize, to_height as usize, preprocessing.resize)?;
    resized.crop(left as usize, top as usize, width as usize, height as usize)
}

fn normalise(image: &RgbPicture, preprocessing: &Preprocessing) -> ApiResult<Vec<f32>> {
    let channels = channel_count(preprocessing.channels);
    let pixels = image.width * image.height;
    let of = |values: &[f32], channel: usize| values[channel.min(values.len() - 1)];
    let mut tensor = with_room(channels * pixels)?;
    tensor.resize(channels * pixels, 0f32);
    for (position, pixel) in image.pixels().enumerate() {
        let [r, g, b] = [pixel[0], pixel[1], pixel[2]].map(f32::from);
        let colours = match preprocessing.channels {
            ChannelOrder::Rgb => [r, g, b],
            ChannelOrder::Bgr => [b, g, r],
            ChannelOrder::Gray => [0.299 * r + 0.587 * g + 0.114 * b, 0.0, 0.0],
        };
        for (channel, value) in colours.into_iter().take(channels).enumerate() {
            let at = match preprocessing.layout {
                ImageLayout::Nchw => channel * pixels + position,
                ImageLayout::Nhwc => position * channels + channel,
            };
            let (mean, std) = (of(&preprocessing.mean, channel), of(&preprocessing.std, channel));
            tensor[at] = (value - mean) / std;
        }
    }
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use model::HostMemory;

    use super::*;

    fn png(width: u32, height: u32) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let pixels = [255, 0, 51].repeat((width * height) as usize);
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        file
    }

    fn read(file: &[u8], preprocessing: &Preprocessing, info: &ValueInfo) -> ApiResult<Tensor> {
        to_tensor(file, preprocessing, info, &mut HostMemory::process().empty())
    }

    /// A grey picture that compresses to a thousandth.
    fn bomb(edge: u32) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, edge, edge);
        encoder.set_color(png::ColorType::Rgb);
        let pixels = vec![0; 3 * (edge * edge) as usize];
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        file
    }

    #[test]
    fn pictures_that_do_not_fit_are_refused_before_they_are_decoded() {
        let info = input(&[1, 3, 8, 8]);
        let file = bomb(2000);
        assert!(file.len() < 100_000, "{}", file.len());
        let read =
            |memory: &mut Reservation| to_tensor(&file, &Preprocessing::default(), &info, memory);
        // Two copies of the pixels fit, and not those of a second request.
        let memory = HostMemory::leaked(40 << 20);
        let mut first = memory.empty();
        assert!(read(&mut first).is_ok());
        let error = read(&mut memory.empty()).unwrap_err();
        assert_eq!((error.kind, error.retry_after), (api::ErrorKind::Unavailable, Some(1)));
        drop(first);
        assert!(read(&mut memory.empty()).is_ok());
        let error = read(&mut HostMemory::leaked(10 << 20).empty()).unwrap_err();
        assert_eq!((error.kind, error.retry_after), (api::ErrorKind::TooLarge, None));
        assert_eq!(memory.used(), 0);
    }

    fn input(dims: &[usize]) -> ValueInfo {
        let shape = dims.iter().map(|&dim| Dim::Fixed(dim)).collect();
        ValueInfo { name: "x".to_string(), dtype: DataType::F32, shape: Some(shape) }
    }

    #[test]
    fn images_become_tensors() {
        let tensor = read(&png(20, 10), &Preprocessing::default(), &input(&[1, 3, 4, 6])).unwrap();
        assert_eq!(tensor.shape(), [1, 3, 4, 6]);
        let values = tensor.to_vec::<f32>().unwrap();
        assert_eq!((values[0], values[24], values[48]), (1.0, 0.0, 0.2));
        let nhwc = Preprocessing {
            layout: ImageLayout::Nhwc,
            channels: ChannelOrder::Bgr,
            ..Preprocessing::default()
        };
        let tensor = read(&png(5, 5), &nhwc, &input(&[1, 2, 2, 3])).unwrap();
        assert_eq!(tensor.to_vec::<f32>().unwrap()[..3], [0.2, 0.0, 1.0]);
    }

    #[test]
    fn refuses_hostile_images() {
        let info = input(&[1, 3, 224, 224]);
        let good = png(9, 9);
        // A huge width in the header.
        let mut huge = good.clone();
        huge[16..20].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff]);
        let files =
            [&b""[..], b"GIF89a", b"\x89PNG\r\n\x1a\n", &good[..20], &huge, &png(16_000, 1)];
        for file in files {
            let error = read(file, &Preprocessing::default(), &info).unwrap_err();
            assert_eq!(error.kind, api::ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn refuses_invalid_preprocessing() {
        for json in [
            r#"{"crop":0}"#,
            r#"{"crop":2}"#,
            r#"{"std":[0]}"#,
            r#"{"mean":[1,2]}"#,
            r#"{"mean":[1e39]}"#,
            r#"{"std":[-1e300]}"#,
            r#"{"mean":[]}"#,
            r#"{"width":0}"#,
            r#"{"height":4000000000}"#,
        ] {
            assert!(check(&serde_json::from_str(json).unwrap()).is_err(), "{json}");
        }
        assert!(check(&Preprocessing::default()).is_ok());
    }
}
