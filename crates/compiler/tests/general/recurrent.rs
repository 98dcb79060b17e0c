//! Recurrent layers.

use compiler::gpu::args::Address;
use compiler::gpu::product;
use compiler::gpu::recurrent::{self, Extents, Operands, StateWeights};
use compiler::gpu::view::{Element, View};
use model::Tensor;
use model::gpu::{GpuTarget, Precision};
use model::op::{MatMul, Op, Rnn, RnnCell, RnnDirection};

use crate::bench::{Bench, Layout, Random};
use crate::tolerance;

const TARGET: GpuTarget =
    GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
const LSTM: RnnCell = RnnCell::Lstm { input_forget: false };
const GRU: RnnCell = RnnCell::Gru { linear_before_reset: true };
const EARLY_GRU: RnnCell = RnnCell::Gru { linear_before_reset: false };

/// Between -1 and 1 times a power of two, in steps that bf16 can represent.
fn floats(random: &mut Random, shape: &[usize], scale: f32) -> Tensor {
    let len = shape.iter().product();
    let values = (0..len).map(|_| (random.below(257) as f32 - 128.0) / 128.0 * scale);
    Tensor::from_vec(shape.to_vec(), values.collect::<Vec<_>>()).unwrap()
}

/// A layer and the operands that it has.
#[derive(Clone, Debug)]
struct Layer {
    rnn: Rnn,
    time: usize,
    batch: usize,
    width: usize,
    lengths: Option<Vec<i32>>,
    bias: bool,
    first: bool,
    peepholes: bool,
    /// Whether outputs are wanted: all states, the last, the last cell state.
    wants: [bool; 3],
    element: Element,
    tensor: bool,
}

impl Layer {
    fn new(cell: RnnCell, hidden: usize, time: usize, batch: usize) -> Layer {
        let rnn = Rnn {
            cell,
            direction: RnnDirection::Forward,
            hidden_size: hidden,
            batch_first: false,
            clip: None,
            activations: vec![],
        };
        Layer {
            rnn,
            time,
            batch,
            width: 3,
            lengths: None,
            bias: true,
            first: true,
            peepholes: false,
            wants: [true, true, matches!(cell, RnnCell::Lstm { .. })],
            element: Element::F16,
            tensor: true,
        }
    }

    fn plain(self, element: Element) -> Layer {
        Layer { element, tensor: false, ..self }
    }

    /// The operands as ONNX numbers them.
    fn operands(&self, random: &mut Random) -> Vec<Option<Tensor>> {
        let (directions, gates) =
            (recurrent::directions(&self.rnn), recurrent::gates(self.rnn.cell));
        let (hidden, rows) = (self.rnn.hidden_size, gates * self.rnn.hidden_size);
        let scale = 1.0 / (hidden as f32).sqrt().log2().ceil().exp2();
        let sequence = match self.rnn.batch_first {
            true => [self.batch, self.time, self.width],
            false => [self.time, self.batch, self.width],
        };
        let states = match self.rnn.batch_first {
            true => [self.batch, directions, hidden],
            false => [directions, self.batch, hidden],
        };
        let lstm = matches!(self.rnn.cell, RnnCell::Lstm { .. });
        let lengths = self.lengths.clone();
        vec![
            Some(floats(random, &sequence, 1.0)),
            Some(floats(random, &[directions, rows, self.width], 0.5)),
            Some(floats(random, &[directions, rows, hidden], scale)),
            self.bias.then(|| floats(random, &[directions, 2 * rows], 0.5)),
            lengths.map(|lengths| Tensor::from_vec(vec![self.batch], lengths).unwrap()),
            self.first.then(|| floats(random, &states, 1.0)),
            (self.first && lstm).then(|| floats(random, &states, 1.0)),
            self.peepholes.then(|| floats(random, &[directions, 3 * hidden], 0.5)),
        ]
    }

    fn check(&self, bench: &mut Bench, random: &mut Random) {
        self.check_with_fault(bench, random, false);
    }

    /// With a fault, the lengths that are out of range count as the nearest that are not.
    fn check_with_fault(&self, bench: &mut Bench, random: &mut Random, fault: bool) {
        let given = self.operands(random);
        let mut legal = given.clone();
        if let Some(lengths) = &self.lengths {
            let lengths = lengths.iter().map(|n| *n.clamp(&0, &(self.time as i32))).collect();
            legal[4] = Some(Tensor::from_vec(vec![self.batch], lengths).unwrap());
        }
        let op = Op::Rnn(self.rnn.clone());
        let expected =
            cpu::evaluate(&op, &legal, 3).unwrap_or_else(|| panic!("no reference for {self:?}"));
        let outputs: Vec<Option<View>> = expected
            .iter()
            .zip(self.wants)
            .map(|(t, wanted)| {
                wanted.then(|| bench.buffer(t.shape(), Layout::Packed, self.element))
            })
            .collect();
        let place = |bench: &mut Bench, index: usize, layout: Layout, element: Element| {
            given[index].as_ref().map(|tensor| bench.place(tensor, layout, element))
        };
        let (x, w) = (
            place(bench, 0, Layout::Packed, self.element).unwrap(),
            place(bench, 1, Layout::Packed, self.element).unwrap(),
        );
        let (inputs, product) = self.input_products(bench, &x, &w);
        let operands = Operands {
            inputs: Some(inputs),
            weights: self.weights(bench, given[2].as_ref().unwrap()),
            bias: place(bench, 3, Layout::Packed, Element::F32),
            lengths: place(bench, 4, Layout::Packed, Element::I32),
            h0: place(bench, 5, Layout::Reversed, self.element),
            c0: place(bench, 6, Layout::Gapped, self.element),
            peepholes: place(bench, 7, Layout::Packed, Element::F32),
            y: outputs[0].clone(),
            y_h: outputs[1].clone(),
            y_c: outputs[2].clone(),
        };
        let target = GpuTarget { capability: 80, multiprocessors: 108, precision: Precision::F16 };
        let extents = Extents { time: self.time, batch: self.batch };
        let work = recurrent::work(&self.rnn, &target, extents, &operands, self.element).unwrap();
        let pairs: Vec<(&View, &Tensor)> =
            outputs.iter().zip(&expected).filter_map(|(v, t)| Some((v.as_ref()?, t))).collect();
        let works: Vec<_> = product.into_iter().chain([work]).collect();
        let tolerance = tolerance(self.element) * 2.0;
        bench.check_with_fault(&format!("{self:?}"), &works, &pairs, tolerance, fault);
    }

    fn input_products(
        &self,
        bench: &mut Bench,
        x: &View,
        w: &View,
    ) -> (View, Option<compiler::gpu::draft::StepDraft>) {
        let columns = w.shape[0] * w.shape[1];
        let products =
            bench.buffer(&[x.shape[0], x.shape[1], columns], Layout::Packed, self.element);
        if products.is_empty() {
            return (products, None);
        }
        let weight = w.reshaped(&[columns, self.width]).unwrap();
        let spec = MatMul { transpose_b: true, ..MatMul::default() };
        let work = product::matmul(&TARGET, &spec, (x, &weight), (None, None), &products).unwrap();
        (products, Some(work))
    }

    fn weights(&self, bench: &mut Bench, r: &Tensor) -> StateWeights {
        if !self.tensor {
            return StateWeights::Strided(bench.place(r, Layout::Reversed, self.element));
        }
        let (directions, gates) =
            (recurrent::directions(&self.rnn), recurrent::gates(self.rnn.cell));
        let values = r.to_vec::<f32>().unwrap();
        let packed = recurrent::pack(&values, directions, gates, self.rnn.hidden_size);
        assert_eq!(packed.len(), recurrent::packed_len(directions, gates, self.rnn.hidden_size));
        let tensor = Tensor::from_vec(vec![packed.len()], packed).unwrap();
        let view = bench.place(&tensor, Layout::Packed, self.element);
        StateWeights::Packed(Address::Buffer(view.buffer, 0))
    }
}

#[test]
fn cells_of_all_sizes() {
    let mut bench = Bench::default();
    let mut random = Random::new(51);
    for cell in [RnnCell::Simple, LSTM, GRU, EARLY_GRU] {
        for (hidden, time, batch) in
            [(1, 1, 1), (5, 37, 3), (16, 2, 17), (33, 3, 9), (64, 2, 1), (100, 1, 2)]
        {
            Layer::new(cell, hidden, time, batch).check(&mut bench, &mut random);
        }
    }
    bench.finish("recurrent_sizes");
}

/// More units than the registers, the shared memory and the warps of a block hold at once.
#[test]
fn wide_layers_take_several_passes() {
    let mut bench = Bench::default();
    let mut random = Random::new(52);
    Layer::new(LSTM, 256, 1, 3).check(&mut bench, &mut random);
    Layer::new(GRU, 256, 1, 1).check(&mut bench, &mut random);
    Layer::new(RnnCell::Simple, 300, 1, 2).check(&mut bench, &mut random);
    Layer::new(EARLY_GRU, 290, 1, 1).check(&mut bench, &mut random);
    Layer::new(LSTM, 264, 1, 2).plain(Element::F32).check(&mut bench, &mut random);
    bench.finish("recurrent_wide");
}

#[test]
fn every_precision() {
    let mut bench = Bench::default();
    let mut random = Random::new(53);
    for cell in [RnnCell::Simple, LSTM, GRU, EARLY_GRU] {
        for element in [Element::F32, Element::F16, Element::BF16] {
            Layer::new(cell, 40, 3, 17).plain(element).check(&mut bench, &mut random);
            Layer::new(cell, 5, 9, 1).plain(element).check(&mut bench, &mut random);
        }
        let brain = Layer { element: Element::BF16, ..Layer::new(cell, 40, 5, 3) };
        brain.check(&mut bench, &mut random);
    }
    bench.finish("recurrent_precision");
}

#[test]
fn directions_layouts_and_lengths() {
    let mut bench = Bench::default();
    let mut random = Random::new(54);
    let directions = [RnnDirection::Forward, RnnDirection::Reverse, RnnDirection::Bidirectional];
    for (number, direction) in directions.into_iter().cycle().take(12).enumerate() {
        let cell = [RnnCell::Simple, LSTM, GRU, EARLY_GRU][number / 3];
        let mut layer = Layer::new(cell, 20, 6, 11);
        layer.rnn.direction = direction;
        layer.rnn.batch_first = number % 2 == 0;
        layer.lengths = Some((0..11).map(|_| random.below(7) as i32).collect());
        layer.check(&mut bench, &mut random);
        layer.wants = [number % 2 == 0, number % 3 == 0, number % 2 == 1 && cell == LSTM];
        layer.wants[1] |= layer.wants == [false; 3];
        layer.check(&mut bench, &mut random);
        let element = [Element::F32, Element::BF16][number % 2];
        layer.plain(element).check(&mut bench, &mut random);
    }
    for (time, lengths) in [(3, vec![0, 0]), (0, vec![0, 0])] {
        let layer = Layer { lengths: Some(lengths), ..Layer::new(LSTM, 8, time, 2) };
        let wants = [time > 0, true, true];
        Layer { wants, ..layer }.check(&mut bench, &mut random);
    }
    bench.finish("recurrent_directions");
}

#[test]
fn attributes_of_cells() {
    let mut bench = Bench::default();
    let mut random = Random::new(55);
    let names = [
        "Relu",
        "Tanh",
        "Sigmoid",
        "LeakyRelu",
        "HardSigmoid",
        "Elu",
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
    ];
    let cells = [RnnCell::Simple, LSTM, GRU, EARLY_GRU, RnnCell::Lstm { input_forget: true }];
    for number in 0..30 {
        let cell = cells[number % 5];
        let mut layer = Layer::new(cell, 9, 4, 3);
        layer.rnn.direction = RnnDirection::Bidirectional;
        let each = match cell {
            RnnCell::Simple => 1,
            RnnCell::Lstm { .. } => 3,
            RnnCell::Gru { .. } => 2,
        };
        let name = |place: usize| names[(number / 5 + place * 2) % names.len()].to_string();
        layer.rnn.activations = (0..2 * each).map(name).collect();
        layer.rnn.clip = (number % 2 == 0).then_some(0.5);
        layer.peepholes = each == 3 && number % 4 != 0;
        layer.bias = number % 3 != 0;
        layer.first = number % 7 != 0;
        layer.check(&mut bench, &mut random);
        layer.plain(Element::F32).check(&mut bench, &mut random);
    }
    bench.finish("recurrent_attributes");
}

#[test]
fn lengths_out_of_range_are_reported() {
    let mut bench = Bench::default();
    let mut random = Random::new(56);
    let layer = Layer { lengths: Some(vec![2, 5, -1]), ..Layer::new(LSTM, 8, 4, 3) };
    layer.check_with_fault(&mut bench, &mut random, true);
    bench.finish("recurrent_fault");
}
