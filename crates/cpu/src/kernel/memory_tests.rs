//! Kernels whose output does not fit the budget return an error, and leave nothing reserved.

use model::op::*;
use model::{DataType, HostMemory, Tensor};

use super::gemm;
use super::testing::*;
use crate::buffer;

fn zeros(shape: &[usize]) -> Tensor {
    floats(shape, &vec![0.0; shape.iter().product()])
}

fn sizes(values: &[i64]) -> Tensor {
    integers(&[values.len()], values)
}

fn texts(count: usize, bytes: usize) -> Tensor {
    Tensor::from_strings(vec![count], vec!["A b".repeat(bytes / 3).into(); count]).unwrap()
}

/// Operators that make strings; there are few of them, so that only their contents are large.
fn string_bombs() -> Vec<(Op, Vec<Option<Tensor>>)> {
    let large = || Some(texts(64, 30_000));
    let normalize = |case| {
        Op::Text(Text::Normalize { case: Some(case), case_sensitive: true, stopwords: vec![] })
    };
    vec![
        (Op::Text(Text::Join), vec![large(), large()]),
        (normalize(LetterCase::Lower), vec![large()]),
        (normalize(LetterCase::Upper), vec![large()]),
    ]
}

#[test]
fn contents_of_strings_are_counted() {
    for (op, inputs) in string_bombs() {
        let memory = HostMemory::leaked(1 << 20);
        let name = op.name();
        let error = buffer::with_memory(memory, || try_run(op, &inputs, 2)).unwrap_err();
        assert!(error.contains("bytes of memory are needed"), "{name}: {error}");
        assert_eq!(memory.used(), 0, "{name}");
    }
    // Strings stay counted while a value holds them.
    let memory = HostMemory::leaked(1 << 20);
    let inputs = [texts(4, 30_000), texts(4, 30_000)].map(Some);
    let joined = buffer::with_memory(memory, || try_run(Op::Text(Text::Join), &inputs, 1));
    let joined = joined.unwrap().remove(0);
    assert!(memory.used() >= 240_000, "{}", memory.used());
    let row = joined.rows(3..4).unwrap();
    drop(joined);
    assert!(memory.used() >= 240_000, "{}", memory.used());
    drop(row);
    assert_eq!(memory.used(), 0);
}

/// Operators on small operands whose results are larger than any memory here.
fn bombs() -> Vec<(Op, Vec<Option<Tensor>>)> {
    let huge: i64 = 1 << 36;
    let column = zeros(&[1 << 10, 1]);
    let row = zeros(&[1, 1 << 10]);
    let resize = |mode| Resize {
        mode,
        coordinates: CoordinateMode::HalfPixel,
        nearest: NearestMode::RoundPreferFloor,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 0.0,
        antialias: false,
        axes: None,
        keep_aspect: AspectPolicy::Stretch,
    };
    let image = || Some(zeros(&[1, 1, 2, 2]));
    let resized = |mode| {
        let inputs = vec![image(), None, None, Some(sizes(&[1, 1, 3000, 3000]))];
        (Op::Resize(resize(mode)), inputs)
    };
    let of = |inputs: &[Tensor]| inputs.iter().cloned().map(Some).collect::<Vec<_>>();
    vec![
        (Op::MatMul(MatMul::default()), of(&[column.clone(), row.clone()])),
        (Op::Binary(Binary::Add), of(&[column.clone(), row.clone()])),
        (Op::Compare(Compare::Less), of(&[column.clone(), row.clone()])),
        (Op::Einsum { equation: "ab,bc->ac".to_string() }, of(&[column.clone(), row.clone()])),
        (Op::Expand, of(&[zeros(&[1]), sizes(&[huge])])),
        (Op::Tile, of(&[zeros(&[2]), sizes(&[huge])])),
        (Op::Range, of(&[integers(&[], &[0]), integers(&[], &[huge]), integers(&[], &[1])])),
        (Op::ConstantOfShape { dtype: DataType::F32, value: [0; 8] }, of(&[sizes(&[huge])])),
        (
            Op::OneHot { axis: -1 },
            of(&[integers(&[1], &[0]), sizes(&[huge]), floats(&[2], &[0.0, 1.0])]),
        ),
        (Op::Pad { mode: PadMode::Constant }, of(&[zeros(&[2]), sizes(&[huge, huge])])),
        (Op::Pad { mode: PadMode::Edge }, of(&[zeros(&[2]), sizes(&[huge, huge])])),
        (Op::Gather { axis: 0 }, of(&[zeros(&[1, 1 << 12]), integers(&[1 << 12], &[0; 1 << 12])])),
        (
            Op::Attention { scale: 1.0 },
            of(&[column.clone(), column.clone(), zeros(&[1 << 10, 400])]),
        ),
        resized(ResizeMode::Nearest),
        resized(ResizeMode::Linear),
        resized(ResizeMode::Cubic),
    ]
}

#[test]
fn outputs_that_do_not_fit_are_errors() {
    for (op, inputs) in bombs() {
        let memory = HostMemory::leaked(1 << 20);
        let name = op.name();
        let error = buffer::with_memory(memory, || try_run(op, &inputs, 1)).unwrap_err();
        assert!(error.contains("bytes of memory are needed"), "{name}: {error}");
        assert_eq!(memory.used(), 0, "{name}");
    }
}

#[test]
fn outputs_beyond_the_address_space_are_errors() {
    // The budget would grant these, the allocator cannot.
    let memory = HostMemory::leaked(usize::MAX);
    for shape in [&[1i64 << 40][..], &[1 << 20, 1 << 20], &[1 << 39, 2]] {
        for dtype in [DataType::F64, DataType::I64] {
            let op = Op::ConstantOfShape { dtype, value: [0; 8] };
            let run = || try_run(op, &[Some(sizes(shape))], 1);
            let result = buffer::with_memory(memory, run);
            // Filling four terabytes would take too long: this must fail before it starts.
            assert!(result.is_err(), "{shape:?}");
            assert_eq!(memory.used(), 0);
        }
    }
}

#[test]
fn every_refused_reservation_is_an_error() {
    for (op, inputs) in cases() {
        let name = op.name();
        let expected = try_run(op.clone(), &inputs, 1).unwrap();
        let memory = HostMemory::leaked_with_faults(usize::MAX);
        let run = || buffer::with_memory(memory, || try_run(op.clone(), &inputs, 1));
        let mut refused = 0;
        loop {
            memory.fail_at(refused);
            let result = run();
            let failed = memory.has_failed();
            memory.fail_at(u64::MAX);
            if !failed {
                assert_eq!(result.as_ref(), Ok(&expected), "{name}");
                break;
            }
            let error = result.unwrap_err();
            gemm::free_scratch();
            assert_eq!(memory.used(), 0, "{name}: reservation {refused} leaked");
            assert!(error.contains("bytes of memory are needed"), "{name} at {refused}: {error}");
            refused += 1;
            assert!(refused < 1000, "{name}");
        }
        assert!(refused > 0, "{name} reserves nothing");
    }
}

/// Operators on operands that are large enough to be counted.
fn cases() -> Vec<(Op, Vec<Option<Tensor>>)> {
    let random = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        floats(shape, &(0..count).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<_>>())
    };
    let of = |inputs: &[Tensor]| inputs.iter().cloned().map(Some).collect::<Vec<_>>();
    let x = random(&[40, 50]);
    let image = random(&[2, 4, 16, 18]);
    let window = Window {
        kernel: vec![3, 3],
        strides: vec![1, 1],
        dilations: vec![1, 1],
        padding: Padding::Explicit(vec![1, 1, 1, 1]),
    };
    let conv = Conv { window, groups: 1, activation: Activation::None };
    vec![
        (Op::Unary(Unary::Exp), of(std::slice::from_ref(&x))),
        (Op::Binary(Binary::Mul), of(&[x.clone(), random(&[50])])),
        (Op::MatMul(MatMul::default()), of(&[x.clone(), random(&[50, 60])])),
        (Op::MatMul(MatMul::default()), of(&[random(&[3, 20, 50]), random(&[3, 50, 60])])),
        (
            Op::Attention { scale: 0.1 },
            of(&[random(&[2, 30, 16]), random(&[2, 40, 16]), random(&[2, 40, 16])]),
        ),
        (Op::Einsum { equation: "ab,cb->ca".to_string() }, of(&[x.clone(), random(&[30, 50])])),
        (Op::Conv(conv), of(&[image.clone(), random(&[8, 4, 3, 3])])),
        (Op::Transpose { perm: None }, of(std::slice::from_ref(&x))),
        (Op::Concat { axis: 1 }, of(&[x.clone(), random(&[40, 30])])),
        (
            Op::Softmax(Softmax { axis: 0, kind: SoftmaxKind::Softmax, flatten: false }),
            of(std::slice::from_ref(&x)),
        ),
        (Op::LayerNorm { axis: -1, epsilon: 1e-5 }, of(&[x.clone(), random(&[50])])),
        (Op::Gather { axis: 0 }, of(&[x.clone(), integers(&[300], &[3; 300])])),
        (Op::NonZero, of(std::slice::from_ref(&x))),
        (Op::Cast(Cast { to: DataType::String }), of(std::slice::from_ref(&x))),
        (Op::Text(Text::Join), of(&[texts(40, 300), texts(40, 60)])),
        (Op::Cast(Cast { to: DataType::F64 }), of(std::slice::from_ref(&x))),
        (Op::Pad { mode: PadMode::Reflect }, of(&[x, sizes(&[5, 5, 5, 5])])),
    ]
}

/// Lengths of vectors that kernels may make without a reservation: ranks and numbers of operands.
const SMALL: [&str; 11] = [
    "shape.len()",
    "axes.len()",
    "dims.len()",
    "target.len()",
    "inputs.len()",
    "terms.len()",
    "ranks.len()",
    "term.len()",
    "; out.len()]",
    "; rank]",
    "(4)",
];

#[test]
fn kernels_make_no_vectors_of_unchecked_length() {
    let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel")];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if name.contains("test") {
                continue;
            }
            seen += 1;
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.lines().take_while(|line| !line.contains("#[cfg(test)]"));
            for line in code {
                let repeats = line.contains("vec![") && line.contains("; ");
                let makes = repeats || line.contains("Vec::with_capacity(");
                let small = SMALL.iter().any(|length| line.contains(length));
                assert!(!makes || small, "use Buffer in {}: {line}", path.display());
            }
        }
    }
    assert!(seen > 40, "{seen}");
}
