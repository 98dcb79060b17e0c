//! The fused attention kernel, with tensor-core instructions emulated, against the CPU device.

use compiler::gpu::attention::{self, Operands};
use compiler::gpu::view::{Element, View};
use model::gpu::{GpuTarget, Precision};
use model::op::{Compare, Op};
use model::{DataType, Tensor};

use crate::bench::{Bench, Layout, Random, numbers};

const TARGET: GpuTarget =
    GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };

/// The order of `[batch, heads, tokens, width]` in memory, slowest first.
#[derive(Clone, Copy, Debug)]
struct Order([usize; 4]);

const SEQUENCES: Order = Order([0, 2, 1, 3]);
const TOKENS_FIRST: Order = Order([2, 0, 1, 3]);
const HEADS: Order = Order([0, 1, 2, 3]);

impl Order {
    /// A view of `tensor` (or NaN) whose rows are padded to 16 bytes.
    fn place(self, bench: &mut Bench, shape: &[usize], tensor: Option<&Tensor>) -> View {
        let mut sizes: Vec<usize> = self.0.iter().map(|axis| shape[*axis]).collect();
        sizes[3] = sizes[3].next_multiple_of(8);
        let buffer = match tensor {
            None => bench.buffer(&sizes, Layout::Packed, Element::F16),
            Some(tensor) => bench.place(&self.packed(tensor, &sizes), Layout::Packed, Element::F16),
        };
        let mut view = buffer;
        view.shape[3] = shape[3];
        let mut back = [0; 4];
        self.0.iter().enumerate().for_each(|(at, axis)| back[*axis] = at);
        view.permuted(&back)
    }

    /// The elements in this order, NaN in the padding.
    fn packed(self, tensor: &Tensor, sizes: &[usize]) -> Tensor {
        let (shape, from) = (tensor.shape(), numbers(tensor));
        let mut out = vec![f32::NAN; sizes.iter().product()];
        for (n, value) in from.iter().enumerate() {
            let mut index = [0; 4];
            let mut rest = n;
            for axis in (0..4).rev() {
                index[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            let at = self.0.iter().zip(sizes).fold(0, |at, (axis, size)| at * size + index[*axis]);
            out[at] = *value as f32;
        }
        Tensor::from_vec(sizes.to_vec(), out).unwrap()
    }
}

struct Sizes {
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    widths: (usize, usize),
}

/// Repeats the heads of keys or values for the reference.
fn repeated(x: &Tensor, heads: usize) -> Tensor {
    let [batch, key_heads, rows, columns] = x.shape()[..] else { panic!("four dimensions") };
    let (from, group) = (x.to_vec::<f32>().unwrap(), heads / key_heads);
    let size = rows * columns;
    let of = |n: usize| from[(n / heads * key_heads + n % heads / group) * size..][..size].to_vec();
    let values: Vec<f32> = (0..batch * heads).flat_map(of).collect();
    Tensor::from_vec(vec![batch, heads, rows, columns], values).unwrap()
}

/// Heads as groups of one key head each, so that keys and values broadcast over a group.
fn grouped(view: &View, groups: usize) -> View {
    let [batch, heads, rows, columns] = view.shape[..] else { panic!("four dimensions") };
    view.reshaped(&[batch, groups, heads / groups, rows, columns]).unwrap()
}

/// A mask for the scores, with the sizes of its four dimensions; and whether it is boolean.
fn run(
    bench: &mut Bench,
    random: &mut Random,
    sizes: &Sizes,
    order: Order,
    mask: Option<(&[usize], Element)>,
    causal: Option<usize>,
) {
    let Sizes { batch, heads, key_heads, queries, keys, widths: (width, value_width) } = *sizes;
    let q = random.floats(&[batch, heads, queries, width]);
    let k = random.floats(&[batch, key_heads, keys, width]);
    let v = random.floats(&[batch, key_heads, keys, value_width]);
    let scale = 1.0 / (width as f32).sqrt();
    let mask = mask.map(|(shape, element)| {
        let numbers = random.floats(shape);
        match element {
            Element::Bool => {
                let low = Tensor::from_vec(vec![], vec![0.5f32]).unwrap();
                let op = Op::Compare(Compare::Less);
                (crate::reference(&op, &[&numbers, &low], 1).remove(0), element)
            }
            _ => (numbers, element),
        }
    });
    let hidden: Option<Tensor> = causal.map(|offset| {
        let at = |n: usize| if n % keys <= n / keys + offset { 0.0 } else { f32::NEG_INFINITY };
        let numbers: Vec<f32> = (0..queries * keys).map(at).collect();
        Tensor::from_vec(vec![queries, keys], numbers).unwrap()
    });
    let (wide_k, wide_v) = (repeated(&k, heads), repeated(&v, heads));
    let mut inputs = vec![&q, &wide_k, &wide_v];
    inputs.extend(mask.as_ref().map(|(mask, _)| mask).or(hidden.as_ref()));
    let expected = crate::reference(&Op::Attention { scale }, &inputs, 1).remove(0);
    let [q, k, v] = [&q, &k, &v].map(|t| order.place(bench, t.shape(), Some(t)));
    let y = order.place(bench, &[batch, heads, queries, value_width], None);
    let mask = mask.map(|(mask, element)| {
        let mut shape = vec![1; 4 - mask.shape().len()];
        shape.extend(mask.shape());
        let view = bench.place(&mask, Layout::Packed, element);
        view.reshaped(&shape).unwrap()
    });
    let bias = mask.map(|mask| match mask.shape[1] {
        1 => mask.reshaped(&[mask.shape[0], 1, 1, mask.shape[2], mask.shape[3]]).unwrap(),
        _ => grouped(&mask, key_heads),
    });
    let [gq, gk, gv, gy] = [&q, &k, &v, &y].map(|view| grouped(view, key_heads));
    let operands = Operands { q: &gq, k: &gk, v: &gv, bias: bias.as_ref(), y: &gy };
    let work = attention::work(scale, causal, &operands, &TARGET);
    let name = format!(
        "{batch}x{heads}/{key_heads} {queries}x{keys} {width} {value_width} {order:?} {:?} {:?}",
        bias.as_ref().map(|bias| (bias.element, bias.shape.clone())),
        causal
    );
    let work = work.unwrap_or_else(|| panic!("{name}: not supported"));
    bench.check(&name, &[work], &[(&y, &expected)], 3e-3);
}

fn sizes(
    (batch, heads, key_heads): (usize, usize, usize),
    (queries, keys): (usize, usize),
    widths: (usize, usize),
) -> Sizes {
    Sizes { batch, heads, key_heads, queries, keys, widths }
}

#[test]
fn fused_attention_of_any_size_and_order() {
    let mut bench = Bench::default();
    let mut random = Random::new(91);
    let r = &mut random;
    run(&mut bench, r, &sizes((2, 3, 3), (20, 37), (32, 32)), SEQUENCES, None, None);
    run(&mut bench, r, &sizes((2, 2, 2), (70, 70), (64, 64)), TOKENS_FIRST, None, Some(0));
    run(&mut bench, r, &sizes((1, 2, 1), (9, 5), (20, 17)), HEADS, None, None);
    run(&mut bench, r, &sizes((1, 1, 1), (1, 1), (20, 17)), HEADS, None, None);
    run(&mut bench, r, &sizes((1, 4, 2), (33, 80), (20, 17)), TOKENS_FIRST, None, Some(47));
    run(&mut bench, r, &sizes((1, 1, 1), (5, 40), (136, 152)), SEQUENCES, None, None);
    bench.finish("fused_attention");
}

#[test]
fn fused_attention_with_any_bias() {
    let mut bench = Bench::default();
    let mut random = Random::new(92);
    let r = &mut random;
    let plain = sizes((2, 4, 2), (18, 34), (32, 32));
    let odd = sizes((2, 4, 4), (7, 35), (32, 32));
    for (shape, element) in [
        (&[2, 1, 1, 34][..], Element::F16),
        (&[1, 4, 18, 34], Element::F16),
        (&[2, 4, 18, 34], Element::F32),
        (&[18, 34], Element::Bool),
        (&[2, 1, 18, 1], Element::F16),
    ] {
        run(&mut bench, r, &plain, SEQUENCES, Some((shape, element)), None);
    }
    for (shape, element) in [
        (&[4, 7, 35][..], Element::F16),
        (&[2, 1, 1, 35], Element::Bool),
        (&[2, 4, 7, 35], Element::F16),
    ] {
        run(&mut bench, r, &odd, TOKENS_FIRST, Some((shape, element)), None);
    }
    bench.finish("fused_attention_bias");
}

#[test]
fn fused_attention_split_over_keys() {
    let mut bench = Bench::default();
    let mut random = Random::new(93);
    let r = &mut random;
    run(&mut bench, r, &sizes((1, 2, 2), (1, 700), (16, 16)), SEQUENCES, None, None);
    run(&mut bench, r, &sizes((1, 8, 2), (1, 530), (32, 48)), HEADS, None, None);
    let mask = Some((&[1, 1, 1, 530][..], Element::Bool));
    run(&mut bench, r, &sizes((1, 8, 2), (1, 530), (32, 48)), HEADS, mask, None);
    run(&mut bench, r, &sizes((1, 1, 1), (40, 300), (16, 16)), SEQUENCES, None, Some(100));
    bench.finish("fused_attention_split");
}

/// A query that sees no key gets zeros, and keys that some queries must not see change nothing.
#[test]
fn hidden_keys_and_rows() {
    let mut bench = Bench::default();
    let mut random = Random::new(94);
    let (q, k) = (random.floats(&[1, 2, 3, 16]), random.floats(&[1, 2, 70, 16]));
    let v = random.floats(&[1, 2, 70, 16]);
    let at = |n: usize| match n / 70 {
        0 => f32::NEG_INFINITY,
        1 if n % 70 != 65 => f32::NEG_INFINITY,
        _ => 0.0,
    };
    let mask = Tensor::from_vec(vec![3, 70], (0..210).map(at).collect::<Vec<f32>>()).unwrap();
    let op = Op::Attention { scale: 0.25 };
    let expected = crate::reference(&op, &[&q, &k, &v, &mask], 1).remove(0);
    let found = numbers(&expected);
    assert!(found[..16].iter().all(|x| *x == 0.0), "{:?}", &found[..16]);
    assert_eq!(found[16..32], numbers(&v)[65 * 16..66 * 16]);
    let [q, k, v] = [&q, &k, &v].map(|t| HEADS.place(&mut bench, t.shape(), Some(t)));
    let y = HEADS.place(&mut bench, &[1, 2, 3, 16], None);
    let bias = bench.place(&mask, Layout::Packed, Element::F16);
    let operands = Operands { q: &q, k: &k, v: &v, bias: Some(&bias), y: &y };
    let work = attention::work(0.25, None, &operands, &TARGET).unwrap();
    bench.check("hidden", &[work], &[(&y, &expected)], 2e-3);
    bench.finish("fused_attention_hidden");
}

/// What the kernel cannot read or compute is left to others.
#[test]
fn unsupported_operands_are_refused() {
    let mut bench = Bench::default();
    let view =
        |bench: &mut Bench, shape: &[usize], layout| bench.buffer(shape, layout, Element::F16);
    let q = view(&mut bench, &[2, 9, 16], Layout::Packed);
    let odd = view(&mut bench, &[2, 9, 16], Layout::Gapped);
    let wide = view(&mut bench, &[2, 9, 264], Layout::Packed);
    let bias = bench.place(
        &Tensor::from_raw(DataType::I32, vec![9, 9], vec![0; 324].into()).unwrap(),
        Layout::Packed,
        Element::I32,
    );
    let plain = Operands { q: &q, k: &q, v: &q, bias: None, y: &q };
    let refused = [
        Operands { k: &odd, ..plain },
        Operands { q: &wide, k: &wide, ..plain },
        Operands { bias: Some(&bias), ..plain },
    ];
    assert!(attention::work(0.25, None, &plain, &TARGET).is_some());
    for (n, operands) in refused.iter().enumerate() {
        assert!(attention::work(0.25, None, operands, &TARGET).is_none(), "{n}");
    }
    assert!(attention::work(-0.25, None, &plain, &TARGET).is_none());
}
