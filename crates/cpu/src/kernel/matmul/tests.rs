//! Products against a plain reference.

use base::Random;
use model::Tensor as Host;

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, between, input_or_constant, random, run, run_f32,
    wide,
};
use super::*;

/// The product as numpy defines it, in double precision, of operands that are already transposed.
fn reference(a: (&[usize], &[f64]), b: (&[usize], &[f64])) -> (Vec<usize>, Vec<f64>) {
    let promote = |shape: &[usize], left: bool| match shape {
        [only] if left => vec![1, *only],
        [only] => vec![*only, 1],
        other => other.to_vec(),
    };
    let (a_shape, b_shape) = (promote(a.0, true), promote(b.0, false));
    let (m, k) = (a_shape[a_shape.len() - 2], a_shape[a_shape.len() - 1]);
    let n = b_shape[b_shape.len() - 1];
    let (a_batch, b_batch) = (&a_shape[..a_shape.len() - 2], &b_shape[..b_shape.len() - 2]);
    let batch = dense::broadcast_shapes(a_batch, b_batch).unwrap();
    let locate = |flat: usize, shape: &[usize]| {
        let mut rest = flat;
        let mut at = vec![0; batch.len()];
        for axis in (0..batch.len()).rev() {
            at[axis] = rest % batch[axis];
            rest /= batch[axis];
        }
        let skip = batch.len() - shape.len();
        shape
            .iter()
            .enumerate()
            .fold(0, |index, (axis, &dim)| index * dim + if dim == 1 { 0 } else { at[axis + skip] })
    };
    let mut out = Vec::new();
    for index in 0..batch.iter().product() {
        let (x, y) = (locate(index, a_batch) * m * k, locate(index, b_batch) * k * n);
        for row in 0..m {
            for column in 0..n {
                out.push((0..k).map(|d| a.1[x + row * k + d] * b.1[y + d * n + column]).sum());
            }
        }
    }
    let mut shape = batch.clone();
    shape.extend((a.0.len() > 1).then_some(m));
    shape.extend((b.0.len() > 1).then_some(n));
    (shape, out)
}

/// `tensor` with its last two dimensions exchanged.
fn swapped(tensor: &Host) -> Host {
    let shape = tensor.shape();
    let [batch @ .., rows, columns] = shape else { return tensor.clone() };
    let data: Vec<f32> = tensor.to_vec().unwrap();
    let mut out = Vec::with_capacity(data.len());
    for matrix in data.chunks(rows * columns) {
        for column in 0..*columns {
            out.extend((0..*rows).map(|row| matrix[row * columns + column]));
        }
    }
    Host::from_vec([batch, &[*columns, *rows]].concat(), out).unwrap()
}

#[test]
fn random_products_match_the_reference() {
    let mut source = Random::new(51);
    for case in 0..200 {
        let large = case % 10 == 0;
        let top = if large { 150 } else { 9 };
        let (m, k, n) = (
            between(&mut source, 1, top),
            between(&mut source, 1, top),
            between(&mut source, 1, top),
        );
        let rank = between(&mut source, 0, 2);
        let full: Vec<usize> = (0..rank).map(|_| between(&mut source, 1, 3)).collect();
        let batch = |source: &mut Random| -> Vec<usize> {
            let kept = between(source, 0, full.len());
            full[full.len() - kept..]
                .iter()
                .map(|&dim| if source.below(4) == 0 { 1 } else { dim })
                .collect()
        };
        let a_vector = source.below(8) == 0;
        let b_vector = source.below(8) == 0;
        let a_shape = if a_vector { vec![k] } else { [batch(&mut source), vec![m, k]].concat() };
        let b_shape = if b_vector { vec![k] } else { [batch(&mut source), vec![k, n]].concat() };
        let (a, b) = (random(&mut source, &a_shape), random(&mut source, &b_shape));
        let (shape, mut expected) = reference((&a_shape, &wide(&a)), (&b_shape, &wide(&b)));
        let mut op = MatMul {
            transpose_a: source.below(3) == 0,
            transpose_b: source.below(3) == 0,
            alpha: 0.5,
            activation: Activation::None,
        };
        expected.iter_mut().for_each(|y| *y *= 0.5);
        let stored_a = if op.transpose_a { swapped(&a) } else { a.clone() };
        let stored_b = if op.transpose_b { swapped(&b) } else { b.clone() };
        let mut operands =
            vec![TestOperand::Input(stored_a), input_or_constant(&mut source, &stored_b)];
        operands.push(TestOperand::Absent);
        if !b_vector && source.below(2) == 0 {
            let bias = random(&mut source, &[n]);
            let values = wide(&bias);
            expected.iter_mut().enumerate().for_each(|(i, y)| *y += values[i % n]);
            operands[2] = input_or_constant(&mut source, &bias);
        }
        if source.below(2) == 0 {
            let residual = random(&mut source, &shape);
            expected.iter_mut().zip(wide(&residual)).for_each(|(y, x)| *y += x);
            operands.push(TestOperand::Input(residual));
        }
        if source.below(2) == 0 {
            op.activation = Activation::Clip { low: -0.5, high: 1.5 };
            expected.iter_mut().for_each(|y| *y = y.clamp(-0.5, 1.5));
        }
        let what = format!("{op:?} of {a_shape:?} and {b_shape:?}");
        let (actual_shape, actual) = run_f32(Op::MatMul(op), &operands).unwrap();
        assert_eq!(actual_shape, shape, "{what}");
        assert_close(&actual, &expected, 1e-5, &what);
    }
}

#[test]
fn gemm_broadcasts_its_addend() {
    let mut source = Random::new(52);
    let (m, k, n) = (5, 7, 3);
    let (a, b) = (random(&mut source, &[m, k]), random(&mut source, &[k, n]));
    let (_, product) = reference((&[m, k], &wide(&a)), (&[k, n], &wide(&b)));
    for shape in [vec![], vec![1], vec![n], vec![1, n], vec![m, 1], vec![m, n], vec![1, 1]] {
        let c = random(&mut source, &shape);
        let values = wide(&c);
        let row_wise = shape == [m, 1];
        let expected: Vec<f64> = product
            .iter()
            .enumerate()
            .map(|(i, y)| {
                let c = match values.len() {
                    1 => values[0],
                    count if count == m * n => values[i],
                    _ if row_wise => values[i / n],
                    _ => values[i % n],
                };
                2.0 * y + 3.0 * c
            })
            .collect();
        let op = Gemm {
            transpose_a: true,
            transpose_b: false,
            alpha: 2.0,
            beta: 3.0,
            activation: Activation::None,
        };
        let operands = [
            TestOperand::Input(swapped(&a)),
            TestOperand::Constant(b.clone()),
            TestOperand::Input(c),
        ];
        let (_, actual) = run_f32(Op::Gemm(op), &operands).unwrap();
        assert_close(&actual, &expected, 1e-5, &format!("addend of {shape:?}"));
    }
}

#[test]
fn multiplies_integers_and_doubles() {
    let a = Host::from_vec(vec![2, 2], vec![1i64, 2, 3, 4]).unwrap();
    let b = Host::from_vec(vec![2], vec![10i64, 100]).unwrap();
    let op = Op::MatMul(MatMul::default());
    let out = run(op.clone(), &[TestOperand::Input(a), TestOperand::Constant(b)], &[DataType::I64])
        .unwrap();
    assert_eq!(out[0].to_vec::<i64>().unwrap(), [210, 430]);
    let mut source = Random::new(53);
    let (a, b) = (random(&mut source, &[3, 4]), random(&mut source, &[4, 5]));
    let (_, expected) = reference((&[3, 4], &wide(&a)), (&[4, 5], &wide(&b)));
    let double =
        |t: &Host| TestOperand::Input(Host::from_vec(t.shape().to_vec(), wide(t)).unwrap());
    let out = run(op.clone(), &[double(&a), double(&b)], &[DataType::F64]).unwrap();
    assert_close_f64(&wide(&out[0]), &expected, 1e-12, "f64");
    let narrow = |t: &Host| {
        let values: Vec<half::bf16> = wide(t).into_iter().map(half::bf16::from_f64).collect();
        Host::from_vec(t.shape().to_vec(), values).unwrap()
    };
    let operands = [TestOperand::Input(narrow(&a)), TestOperand::Constant(narrow(&b))];
    let out = run(op, &operands, &[DataType::BF16]).unwrap();
    assert_close_f64(&wide(&out[0]), &expected, 3e-2, "bf16");
}

#[test]
fn bad_shapes_are_refused() {
    let mut source = Random::new(54);
    let op = Op::MatMul(MatMul::default());
    let mut fails = |a: &[usize], b: &[usize]| {
        let operands = [random(&mut source, a), random(&mut source, b)].map(TestOperand::Input);
        run_f32(op.clone(), &operands).unwrap_err()
    };
    assert!(fails(&[2, 3], &[4, 2]).contains("summed dimension"));
    assert!(fails(&[], &[4]).contains("no product"));
    assert!(fails(&[2, 2, 3], &[3, 3, 2]).contains("broadcast"));
    let empty =
        [random(&mut source, &[0, 3]), random(&mut source, &[3, 2])].map(TestOperand::Input);
    assert_eq!(run_f32(op.clone(), &empty).unwrap().0, [0, 2]);
    let hollow =
        [random(&mut source, &[2, 0]), random(&mut source, &[0, 2])].map(TestOperand::Input);
    assert_eq!(run_f32(op, &hollow).unwrap().1, [0.0; 4]);
}
