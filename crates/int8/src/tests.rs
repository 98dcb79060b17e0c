use super::*;

/// Numbers that look random, always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 32) as u32
    }
}

/// Every byte is the largest or the smallest: products of 16 bits would overflow.
fn extreme(numbers: &mut Numbers) -> u32 {
    let random = numbers.next();
    let byte = |at: u32| if random >> at & 1 == 0 { 0x80 } else { [0x7f, 0xff][at as usize % 2] };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

fn reference(unsigned: Unsigned, left: u32, right: u32) -> i32 {
    let (first, second) = match unsigned {
        Unsigned::Left => (left, right),
        Unsigned::Right => (right, left),
    };
    let mut sum = 0;
    for at in [0, 8, 16, 24] {
        sum += i32::from((first >> at) as u8) * i32::from((second >> at) as u8 as i8);
    }
    sum
}

fn check(set: InstructionSet, make: fn(&mut Numbers) -> u32) {
    let mut numbers = Numbers(7);
    for unsigned in [Unsigned::Left, Unsigned::Right] {
        for rows in [1, 2, 4, 8] {
            for vectors in 1..=MAX_VECTORS {
                for depth in [0, 1, 2, 17] {
                    let left: Vec<u32> = (0..depth * rows).map(|_| make(&mut numbers)).collect();
                    let columns = vectors * LANES;
                    let right: Vec<u32> =
                        (0..depth * columns).map(|_| make(&mut numbers)).collect();
                    let mut sums = Sums::default();
                    dot_with(set, rows, vectors, unsigned, &left, &right, &mut sums);
                    for row in 0..rows {
                        for column in 0..columns {
                            let terms = (0..depth).map(|at| {
                                let right = right[at * columns + column];
                                reference(unsigned, left[at * rows + row], right)
                            });
                            let got = sums[row][column / LANES][column % LANES];
                            assert_eq!(got, terms.sum::<i32>(), "{set:?} {rows} {vectors} {depth}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_computes_the_sums() {
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
        check(set, Numbers::next);
        check(set, extreme);
    }
}

#[test]
fn an_instruction_set_that_is_missing_is_replaced() {
    // Whether it exists or not, this must not end the process.
    InstructionSet::ALL.into_iter().for_each(|set| check(set, Numbers::next));
}

/// A run over random bytes, and the bytes that it must write.
struct RandomRun {
    image: Vec<u8>,
    offsets: Vec<usize>,
    words: usize,
    step: usize,
    weights: Vec<u32>,
    positions: usize,
    start: Vec<i32>,
    scales: Vec<f32>,
    bias: Vec<f32>,
    blocks: usize,
}

impl RandomRun {
    fn new(numbers: &mut Numbers, make: fn(&mut Numbers) -> u32) -> RandomRun {
        let mut below = |most: usize| numbers.next() as usize % most;
        let words = [1, 4][below(2)];
        let step = words * 4 * [1, 2, 3][below(3)];
        let (positions, blocks) = (1 + below(20), 1 + below(MAX_BLOCKS));
        let offsets: Vec<usize> = (0..below(12)).map(|_| below(200)).collect();
        let length = 200 + positions * step + 16;
        let channels = blocks * BLOCK;
        let image = (0..length).map(|_| make(numbers) as u8).collect();
        let weights = (0..offsets.len() * words * channels).map(|_| make(numbers)).collect();
        let start = (0..channels).map(|_| numbers.next() as i32 >> 12).collect();
        let mut number = |scale: f32| (numbers.next() % 2001) as f32 * scale - 1000.0 * scale;
        let scales = (0..channels).map(|_| number(1e-6)).collect();
        let bias = (0..channels).map(|_| number(0.1)).collect();
        RandomRun { image, offsets, words, step, weights, positions, start, scales, bias, blocks }
    }

    fn finish(&self) -> BlockFinish<'_> {
        let (start, scales, bias) = (&self.start, &self.scales, &self.bias);
        BlockFinish { start, scales, bias, clamp: (-60.0, 150.0), zero: 61 }
    }

    fn run(&self, set: InstructionSet) -> Vec<u8> {
        let mut out = vec![0; self.blocks * self.positions * BLOCK];
        let mut parts: Vec<&mut [u8]> = out.chunks_exact_mut(self.positions * BLOCK).collect();
        convolve_with(
            set,
            BlockRun {
                image: &self.image,
                offsets: &self.offsets,
                words: self.words,
                step: self.step,
                weights: &self.weights,
                positions: self.positions,
                finish: self.finish(),
                out: &mut parts,
            },
        );
        out
    }

    fn wanted(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for block in 0..self.blocks {
            for position in 0..self.positions {
                for lane in 0..BLOCK {
                    let channel = block * BLOCK + lane;
                    let mut sum = self.start[channel];
                    for (index, offset) in self.offsets.iter().enumerate() {
                        for word in 0..self.words {
                            let from = position * self.step + offset + 4 * word;
                            let bytes = self.image[from..from + 4].try_into().unwrap();
                            let at = (index * self.words + word) * self.blocks + block;
                            let weight = self.weights[at * BLOCK + lane];
                            sum += reference(Unsigned::Left, u32::from_le_bytes(bytes), weight);
                        }
                    }
                    let value = sum as f32 * self.scales[channel] + self.bias[channel];
                    let rounded = value.clamp(-60.0, 150.0).round_ties_even() as i32;
                    out.push((rounded + 61) as u8);
                }
            }
        }
        out
    }
}

#[test]
fn every_instruction_set_convolves() {
    let mut numbers = Numbers(11);
    for round in 0..300 {
        let make = if round % 3 == 0 { extreme } else { Numbers::next };
        let run = RandomRun::new(&mut numbers, make);
        let wanted = run.wanted();
        for set in InstructionSet::ALL {
            assert!(run.run(set) == wanted, "round {round}: {set:?}");
        }
    }
}

#[test]
fn numbers_between_two_bytes_become_the_even_one() {
    let (start, scales) = ([1, 3, -1, -3].repeat(4), [0.5; BLOCK]);
    for set in InstructionSet::ALL {
        let mut out = [0; BLOCK];
        let finish = BlockFinish {
            start: &start,
            scales: &scales,
            bias: &[0.0; BLOCK],
            clamp: (-128.0, 127.0),
            zero: 128,
        };
        convolve_with(
            set,
            BlockRun {
                image: &[],
                offsets: &[],
                words: 4,
                step: 16,
                weights: &[],
                positions: 1,
                finish,
                out: &mut [&mut out],
            },
        );
        assert_eq!(out[..4], [128, 130, 128, 126], "{set:?}");
    }
}
