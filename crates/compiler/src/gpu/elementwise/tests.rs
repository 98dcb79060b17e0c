use super::*;
use crate::gpu::view::{BufferId, packed_strides};

fn packed(buffer: u32, element: Element, shape: &[usize]) -> View {
    View {
        buffer: BufferId(buffer),
        offset: 0,
        shape: shape.to_vec(),
        strides: packed_strides(shape),
        element,
        slack: 0,
    }
}

fn input(index: usize) -> Box<Expr> {
    Box::new(Expr::Input(index))
}

#[test]
fn rows_are_vectors_where_they_are_aligned() {
    let add = Expr::Binary(Binary::Add, input(0), input(1));
    let whole = packed(0, Element::F16, &[4, 24]);
    let row = packed(1, Element::F16, &[24]);
    let made =
        work(&add, &[whole.clone(), row.clone()], &packed(2, Element::F16, &[4, 24])).unwrap();
    let source = &made.drafts[0].kernel.source;
    assert!(source.contains("kRank = 2, kCount = 8"), "{source}");
    assert!(source.contains("place.load<half, kRow>(1, x1)"), "{source}");
    let shifted = View { offset: 1, ..row };
    let made = work(&add, &[whole, shifted], &packed(2, Element::F16, &[4, 24])).unwrap();
    assert!(made.drafts[0].kernel.source.contains("kCount = 1"));
}

#[test]
fn kernels_do_not_depend_on_sizes() {
    let relu = Expr::Unary(Unary::Relu, input(0));
    let kernel = |shape: &[usize]| {
        let views = (packed(0, Element::F32, shape), packed(1, Element::F32, shape));
        work(&relu, &[views.0], &views.1).unwrap().drafts[0].kernel.clone()
    };
    assert_eq!(kernel(&[3, 5, 7]), kernel(&[1001]));
}

#[test]
fn images_get_zeros_in_their_slack() {
    let image = packed(0, Element::F32, &[2, 3, 5, 6]);
    let mut pixels =
        packed(1, Element::F16, &[2, 5, 6, 4]).permuted(&[0, 3, 1, 2]).sliced(1, 0, 3, 1);
    pixels.slack = 1;
    let made = copy(&image, &pixels).unwrap();
    assert!(
        made.drafts[0].kernel.source.contains("kRank = 2, kCount = 4"),
        "{}",
        made.drafts[0].kernel.source
    );
    assert_eq!(made.drafts[0].tiles, 1);
    assert!(clear_slack(&pixels).unwrap().is_ok());
    assert!(clear_slack(&image).is_none());
}

#[test]
fn long_dimensions_are_transposed_in_shared_memory() {
    let image = packed(0, Element::F32, &[2, 64, 20, 30]);
    let pixels = packed(1, Element::F16, &[2, 20, 30, 64]).permuted(&[0, 3, 1, 2]);
    let made = copy(&image, &pixels).unwrap();
    assert_eq!(made.drafts[0].kernel.expression, "tiles::Turn<float, half, float, 1>");
    assert_eq!(made.drafts[0].tiles, 2 * 2 * 19);
}

#[test]
fn types_are_checked() {
    let (half, long) = (packed(0, Element::F16, &[4]), packed(1, Element::I64, &[4]));
    let add = Expr::Binary(Binary::Add, input(0), input(1));
    assert!(work(&add, &[half.clone(), long.clone()], &half).is_err());
    let not = Expr::Unary(Unary::Not, input(0));
    assert!(work(&not, std::slice::from_ref(&long), &long).is_err());
    assert!(work(&input(1), std::slice::from_ref(&half), &half).is_err());
    let power = Expr::Binary(Binary::Pow, input(0), input(1));
    assert!(work(&power, &[half.clone(), long], &half).is_ok());
}
