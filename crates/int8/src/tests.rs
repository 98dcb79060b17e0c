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
