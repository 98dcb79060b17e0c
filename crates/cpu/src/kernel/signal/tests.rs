use super::super::testing::integers;
use super::super::testing::*;
use super::*;
use base::Random;

/// The transform by its definition.
fn slow(line: &[Complex], inverse: bool) -> Vec<Complex> {
    let n = line.len();
    let sign = if inverse { 1.0 } else { -1.0 };
    let term = |x: &Complex, k: usize, index: usize| {
        let angle = sign * 2.0 * std::f64::consts::PI * (k * index % n) as f64 / n as f64;
        let (sin, cos) = angle.sin_cos();
        (x.re * cos - x.im * sin, x.re * sin + x.im * cos)
    };
    let scale = if inverse { 1.0 / n as f64 } else { 1.0 };
    (0..n)
        .map(|k| {
            let terms = line.iter().enumerate().map(|(index, x)| term(x, k, index));
            let (re, im) = terms.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
            Complex { re: re * scale, im: im * scale }
        })
        .collect()
}

#[test]
fn transforms_of_every_length_are_right() {
    let mut random = Random::new(3);
    for length in [1, 2, 3, 4, 5, 7, 8, 12, 30, 37, 64, 97, 120, 134] {
        for inverse in [false, true] {
            let mut number = || f64::from(random.symmetric_f32());
            let line: Vec<Complex> =
                (0..length).map(|_| Complex { re: number(), im: number() }).collect();
            let mut got = line.clone();
            Transform::new(length, inverse).unwrap().run(&mut got).unwrap();
            for (got, want) in got.iter().zip(slow(&line, inverse)) {
                let apart = (got.re - want.re).abs() + (got.im - want.im).abs();
                assert!(apart < 1e-10, "{length} {got:?} {want:?}");
            }
        }
    }
}

#[test]
fn half_of_a_spectrum_gives_the_signal_back() {
    let mut random = Random::new(4);
    for length in [6usize, 7, 10] {
        let x = random_floats(&mut random, &[2, length, 3, 1]);
        let forward = Signal::Dft { inverse: false, onesided: true, axis: 1 };
        let half = run(Op::Signal(forward), std::slice::from_ref(&x)).remove(0);
        assert_eq!(half.shape(), [2, length / 2 + 1, 3, 2]);
        let back = Signal::Dft { inverse: true, onesided: true, axis: 1 };
        let size = integers(&[], &[length as i64]);
        let back = run(Op::Signal(back), &[half, size]).remove(0);
        assert_eq!(back.shape(), x.shape());
        let pairs = values::<f32>(&back).into_iter().zip(values::<f32>(&x));
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5));
    }
}

#[test]
fn hostile_sizes_are_refused() {
    let x = floats(&[1, 4, 1], &[1.0; 4]);
    let dft = Op::Signal(Signal::Dft { inverse: false, onesided: false, axis: 1 });
    assert!(error(dft, &[x.clone(), integers(&[], &[i64::MAX])]).contains("outside"));
    let stft = Op::Signal(Signal::Stft { onesided: true });
    assert!(error(stft, &[x, integers(&[], &[0])]).contains("neither a window"));
    let kind = WindowKind::Hann;
    let window = Signal::Window { kind, periodic: true, dtype: DataType::F32 };
    assert!(error(Op::Signal(window), &[integers(&[], &[1 << 40])]).contains("outside"));
}
