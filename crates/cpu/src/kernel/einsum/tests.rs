//! Equations against loops over every subscript.

use base::Random;
use model::Tensor as Host;
use model::op::Op;

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, random, run, run_f32, wide,
};
use super::*;

/// Sums over all values of all letters, each of which has extent `extent`.
fn reference(
    terms: &[&str],
    output: &str,
    operands: &[Host],
    extent: impl Fn(char) -> usize,
) -> Vec<f64> {
    let mut letters: Vec<char> = output.chars().collect();
    letters.extend(terms.iter().flat_map(|term| term.chars()));
    let mut seen = Vec::new();
    letters.retain(|letter| {
        !seen.contains(letter) && {
            seen.push(*letter);
            true
        }
    });
    let data: Vec<Vec<f64>> = operands.iter().map(wide).collect();
    let count: usize = letters.iter().map(|&letter| extent(letter)).product();
    let out_count: usize = output.chars().map(&extent).product();
    let mut out = vec![0.0; out_count];
    for flat in 0..count {
        let mut rest = flat;
        let mut at = std::collections::HashMap::new();
        for &letter in letters.iter().rev() {
            at.insert(letter, rest % extent(letter));
            rest /= extent(letter);
        }
        let product: f64 = terms
            .iter()
            .zip(operands)
            .zip(&data)
            .map(|((term, operand), data)| {
                let index = term.chars().zip(operand.shape()).fold(0, |index, (letter, &dim)| {
                    index * dim + if dim == 1 { 0 } else { at[&letter] }
                });
                data[index]
            })
            .product();
        let index = output.chars().fold(0, |index, letter| index * extent(letter) + at[&letter]);
        out[index] += product;
    }
    out
}

#[test]
fn equations_match_the_reference() {
    let mut source = Random::new(81);
    let extent = |letter: char| 2 + (letter as usize - 'a' as usize) % 5;
    for equation in [
        "ab,bc->ac",
        "abc,acd->abd",
        "ab,cb->ac",
        "a,b->ab",
        "ab->ba",
        "ab->a",
        "ab->",
        "aa->a",
        "aab->b",
        "abc,cd,de->abe",
        "abcd,abed->abce",
        "ab,ab->ab",
        "ab,ab->",
        "abcd,cde->abe",
        "ab,c->c",
        "bhwc,hkc->bhwk",
        "abc,bd,cd->ad",
    ] {
        let (left, output) = equation.split_once("->").unwrap();
        let terms: Vec<&str> = left.split(',').collect();
        let operands: Vec<Host> = terms
            .iter()
            .map(|term| random(&mut source, &term.chars().map(extent).collect::<Vec<_>>()))
            .collect();
        let expected = reference(&terms, output, &operands, extent);
        let op = Op::Einsum { equation: equation.to_string() };
        let given: Vec<TestOperand> = operands.iter().cloned().map(TestOperand::Input).collect();
        let (shape, actual) = run_f32(op.clone(), &given).unwrap();
        assert_eq!(shape, output.chars().map(extent).collect::<Vec<_>>(), "{equation}");
        assert_close(&actual, &expected, 1e-5, equation);
        let double: Vec<TestOperand> = operands
            .iter()
            .map(|t| TestOperand::Input(Host::from_vec(t.shape().to_vec(), wide(t)).unwrap()))
            .collect();
        let out = run(op, &double, &[DataType::F64]).unwrap();
        assert_close_f64(&wide(&out[0]), &expected, 1e-12, equation);
    }
}

#[test]
fn ellipses_and_implied_outputs_match_the_reference() {
    let mut source = Random::new(82);
    let (a, b) = (random(&mut source, &[2, 3, 4, 5]), random(&mut source, &[1, 5, 6]));
    let given = [TestOperand::Input(a.clone()), TestOperand::Input(b.clone())];
    let extent = |letter: char| match letter {
        'x' => 2,
        'y' => 3,
        'i' => 4,
        'j' => 5,
        _ => 6,
    };
    let expected = reference(&["xyij", "yjk"], "xyik", &[a.clone(), b], extent);
    for equation in ["...ij,...jk->...ik", "... i j , ... j k"] {
        let op = Op::Einsum { equation: equation.to_string() };
        let (shape, actual) = run_f32(op, &given).unwrap();
        assert_eq!(shape, [2, 3, 4, 6]);
        assert_close(&actual, &expected, 1e-5, equation);
    }
    let op = Op::Einsum { equation: "...ij->...ji".to_string() };
    let (shape, _) = run_f32(op, &[TestOperand::Input(a.clone())]).unwrap();
    assert_eq!(shape, [2, 3, 5, 4]);
    for bad in ["ab->ab", "ij,j->i", "i1->i", "abcd->e", "abcd->aa"] {
        let op = Op::Einsum { equation: bad.to_string() };
        assert!(run_f32(op, &[TestOperand::Input(a.clone())]).is_err(), "{bad}");
    }
}
