//! The text of a few generated kernels, compared with golden files. `ATOLL_BLESS=1` rewrites them.

use std::path::Path;

use compiler::gpu::elementwise::{Expr, copy, work};
use compiler::gpu::view::{BufferId, Element, View, packed_strides};
use model::op::{Activation, Binary, Compare, Unary};

fn packed(element: Element, shape: &[usize]) -> View {
    let strides = packed_strides(shape);
    View { buffer: BufferId(0), offset: 0, shape: shape.to_vec(), strides, element, slack: 0 }
}

fn input(index: usize) -> Box<Expr> {
    Box::new(Expr::Input(index))
}

/// Name, expression, inputs and output of every file.
fn chains() -> Vec<(&'static str, Expr, Vec<View>, View)> {
    let image = packed(Element::F16, &[2, 7, 7, 64]).permuted(&[0, 3, 1, 2]);
    let channel = packed(Element::F32, &[64, 1, 1]);
    let scaled = Expr::ScaleShift(Activation::Silu, input(0), input(1), input(2));
    let residual = Expr::Binary(Binary::Add, Box::new(scaled), input(3));
    let whole = packed(Element::I64, &[5, 9]);
    let modulo = Expr::Binary(Binary::Mod, input(0), Box::new(Expr::Integer(Element::I64, -3)));
    let quotient = Expr::Binary(Binary::Div, Box::new(modulo), input(1));
    let brain = packed(Element::BF16, &[4, 33]);
    let near = Expr::Compare(
        Compare::Less,
        Box::new(Expr::Unary(Unary::Abs, input(0))),
        Box::new(Expr::Float(0.5)),
    );
    let causal = Expr::Compare(
        Compare::LessOrEqual,
        Box::new(Expr::Coordinate(1)),
        Box::new(Expr::Coordinate(0)),
    );
    let lowest = Box::new(Expr::Float(f32::NEG_INFINITY));
    let masked = Expr::Where(Box::new(causal), input(0), lowest);
    vec![
        (
            "scale_silu_residual",
            residual,
            vec![image.clone(), channel.clone(), channel, image.clone()],
            image,
        ),
        ("integers", quotient, vec![whole.clone(), packed(Element::I64, &[9])], whole),
        ("brain_compare", near, vec![brain], packed(Element::Bool, &[4, 33])),
        (
            "causal_mask",
            masked,
            vec![packed(Element::F32, &[12, 12])],
            packed(Element::F16, &[12, 12]),
        ),
    ]
}

#[test]
fn generated_text_matches_golden_files() {
    let mut texts: Vec<(String, String)> = Vec::new();
    for (name, expr, inputs, output) in chains() {
        let made = work(&expr, &inputs, &output).unwrap();
        texts.push((format!("{name}.cu"), made.drafts[0].kernel.source.clone()));
    }
    let mut pixels = packed(Element::F16, &[1, 8, 8, 4]).permuted(&[0, 3, 1, 2]).sliced(1, 0, 3, 1);
    pixels.slack = 1;
    let made = copy(&packed(Element::F32, &[1, 3, 8, 8]), &pixels).unwrap();
    texts.push(("image.cu".to_string(), made.drafts[0].kernel.source.clone()));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, text) in texts {
        let file = folder.join(name);
        if std::env::var_os("ATOLL_BLESS").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(text, known, "{} is stale: run with ATOLL_BLESS=1", file.display());
    }
}
