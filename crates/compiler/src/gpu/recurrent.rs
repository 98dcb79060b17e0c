//! Recurrent layers: one product for the inputs of all time steps, then a kernel that stays on the
//! device for the whole sequence (`kernels/recurrent.cuh`).

mod shape;

use graph::ir::GraphNode;
use model::gpu::{GpuTarget, MemoryLocation};
use model::op::{MatMul, Rnn, RnnCell, RnnDirection};
use model::{Tensor, ValueId};

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::{address, check_view, describe, include};
use super::lowering::{BufferLocation, Lowering, UnsupportedReason};
use super::view::{Element, View};
use super::{packing, product};
use shape::{Problem, Shape};

/// The kernel's cells; see `RecurrentCell` in `kernels/recurrent.cuh`.
fn cell_code(cell: RnnCell) -> usize {
    match cell {
        RnnCell::Simple => 0,
        RnnCell::Lstm { .. } => 1,
        RnnCell::Gru { linear_before_reset: true } => 2,
        RnnCell::Gru { linear_before_reset: false } => 3,
    }
}

/// Gates of a cell.
pub fn gates(cell: RnnCell) -> usize {
    match cell {
        RnnCell::Simple => 1,
        RnnCell::Lstm { .. } => 4,
        RnnCell::Gru { .. } => 3,
    }
}

/// Directions of a layer.
pub fn directions(rnn: &Rnn) -> usize {
    if rnn.direction == RnnDirection::Bidirectional { 2 } else { 1 }
}

/// A function of a gate with its parameters; see `GateFunction` in `kernels/recurrent.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GateFunction {
    kind: i32,
    alpha: f32,
    beta: f32,
}

impl GateFunction {
    fn parse(name: &str) -> Result<GateFunction, String> {
        let (kind, alpha, beta) = match name.to_ascii_lowercase().as_str() {
            "relu" => (0, 0.0, 0.0),
            "tanh" => (1, 0.0, 0.0),
            "sigmoid" => (2, 0.0, 0.0),
            "leakyrelu" => (3, 0.01, 0.0),
            "hardsigmoid" => (4, 0.2, 0.5),
            "elu" => (5, 1.0, 0.0),
            "softplus" => (6, 0.0, 0.0),
            "softsign" => (7, 0.0, 0.0),
            "thresholdedrelu" => (8, 1.0, 0.0),
            _ => return Err(format!("the activation '{name}' is not supported")),
        };
        Ok(GateFunction { kind, alpha, beta })
    }

    /// The functions of gates, candidate and output, per direction.
    fn of(rnn: &Rnn) -> Result<[[GateFunction; 3]; 2], String> {
        let defaults: &[&str] = match rnn.cell {
            RnnCell::Simple => &["Tanh"],
            RnnCell::Lstm { .. } => &["Sigmoid", "Tanh", "Tanh"],
            RnnCell::Gru { .. } => &["Sigmoid", "Tanh"],
        };
        let each = defaults.len();
        let given = rnn.activations.len();
        if given != 0 && given != each * directions(rnn) {
            return Err(format!("{given} activations for {} directions", directions(rnn)));
        }
        let parse = |direction: usize, position: usize| {
            let position = position.min(each - 1);
            let name = rnn.activations.get(direction * each + position);
            GateFunction::parse(name.map_or(defaults[position], String::as_str))
        };
        let one = |direction: usize| -> Result<[GateFunction; 3], String> {
            Ok([parse(direction, 0)?, parse(direction, 1)?, parse(direction, 2)?])
        };
        Ok([one(0)?, one(directions(rnn) - 1)?])
    }
}

/// The weights of the state.
#[derive(Clone, Debug)]
pub enum StateWeights {
    /// As [`pack`] orders them, for the tensor cores.
    Packed(Address),
    /// `[directions, gates * hidden, hidden]` of any strides.
    Strided(View),
}

/// The operands of the kernel. Shapes are those of ONNX, with `batch_first` as in the layer.
#[derive(Clone, Debug)]
pub struct Operands {
    /// Products with the inputs: two dimensions of the input, then directions, gates and units in
    /// one; `None` for inputs of no width.
    pub inputs: Option<View>,
    /// The weights of the state.
    pub weights: StateWeights,
    /// Biases in single precision, packed.
    pub bias: Option<View>,
    /// Peepholes in single precision, packed.
    pub peepholes: Option<View>,
    /// Number of valid time steps of each item.
    pub lengths: Option<View>,
    /// First state.
    pub h0: Option<View>,
    /// First cell state.
    pub c0: Option<View>,
    /// States of all time steps.
    pub y: Option<View>,
    /// Last state, packed.
    pub y_h: Option<View>,
    /// Last cell state, packed.
    pub y_c: Option<View>,
}

impl Operands {
    fn reads(&self) -> Vec<View> {
        let weights = match &self.weights {
            StateWeights::Packed(_) => None,
            StateWeights::Strided(view) => Some(view),
        };
        let all = [&self.inputs, &self.bias, &self.peepholes, &self.lengths, &self.h0, &self.c0];
        let given = all.into_iter().flatten().chain(weights);
        given.filter(|view| !view.is_empty()).cloned().collect()
    }

    fn writes(&self) -> Vec<View> {
        let all = [&self.y, &self.y_h, &self.y_c].into_iter().flatten();
        all.filter(|view| !view.is_empty()).cloned().collect()
    }
}

/// Sizes of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// Time steps.
    pub time: usize,
    /// Items.
    pub batch: usize,
}

/// The step of a recurrent layer whose inputs are multiplied already.
pub fn work(
    rnn: &Rnn,
    target: &GpuTarget,
    extents: Extents,
    operands: &Operands,
    element: Element,
) -> Result<StepDraft, String> {
    for view in operands.reads().iter().chain(&operands.writes()) {
        check_view(view)?;
    }
    let tensor = matches!(operands.weights, StateWeights::Packed(_));
    let functions = GateFunction::of(rnn)?;
    let problem = Problem {
        element,
        cell: cell_code(rnn.cell),
        gates: gates(rnn.cell),
        hidden: rnn.hidden_size,
        batch: extents.batch,
        directions: directions(rnn),
        tensor,
        plain: functions == GateFunction::of(&Rnn { activations: vec![], ..rnn.clone() })?
            && rnn.clip.is_none()
            && operands.peepholes.is_none()
            && rnn.cell != RnnCell::Lstm { input_forget: true },
    };
    let shapes = problem.shapes(target);
    if !shapes.iter().any(|shape| shape.blocks == 1) {
        return Err(format!(
            "a recurrent layer of {} units needs more shared memory than a block has",
            rnn.hidden_size
        ));
    }
    let draft = |shape: &Shape| {
        let args = args(rnn, &functions, extents, operands, shape.cell_in_memory);
        let kernel = KernelText {
            source: include("recurrent.cuh", &[element]),
            expression: shape.expression(&problem),
            threads: shape.threads() as u32,
            shared_bytes: shape.shared_bytes(&problem) as u32,
        };
        let tiles = problem.teams(shape) * shape.blocks;
        let mut draft = LaunchDraft::plain(kernel, tiles, args);
        draft.variant = shape.name();
        draft.cluster = shape.blocks;
        draft.workspace_bytes = shape.cell_bytes(tiles);
        draft
    };
    let signature = format!(
        "{:?} {:?} {} steps of {} {:?} {}",
        rnn.cell,
        rnn.direction,
        extents.time,
        extents.batch,
        operands.h0.is_some(),
        operands
            .reads()
            .iter()
            .chain(&operands.writes())
            .map(describe)
            .collect::<Vec<_>>()
            .join(" ")
    );
    let rows = (directions(rnn) * gates(rnn.cell) * rnn.hidden_size) as u64;
    let steps = (extents.time * extents.batch) as u64;
    Ok(StepDraft {
        op: "Recurrent",
        signature,
        drafts: shapes.iter().map(draft).collect(),
        reads: operands.reads(),
        writes: operands.writes(),
        flops: 2 * rows * rnn.hidden_size as u64 * steps,
        weight_bytes: rows * (rnn.hidden_size * element.size()) as u64,
        finish_tiles: None,
    })
}

/// `RecurrentArgs` of `kernels/recurrent.cuh`, field by field.
fn args(
    rnn: &Rnn,
    functions: &[[GateFunction; 3]; 2],
    extents: Extents,
    operands: &Operands,
    cell_in_memory: bool,
) -> ArgsWriter {
    let at = |view: &Option<View>| {
        view.as_ref().filter(|view| !view.is_empty()).map_or(Address::Null, address)
    };
    let (weights, r) = match &operands.weights {
        StateWeights::Packed(address) => (*address, vec![0; 3]),
        StateWeights::Strided(view) => (address(view), view.strides.clone()),
    };
    let when = |needed, location| if needed { Address::Fixed(location) } else { Address::Null };
    let cell = when(cell_in_memory, MemoryLocation::Workspace(0));
    let fault = when(operands.lengths.is_some(), MemoryLocation::Fault);
    // Time or direction before items.
    let ordered = |view: &Option<View>, item_first: &[usize]| -> Vec<usize> {
        let Some(view) = view else { return vec![0; item_first.len()] };
        if !rnn.batch_first {
            return view.strides.clone();
        }
        item_first.iter().map(|axis| view.strides[*axis]).collect()
    };
    let x = ordered(&operands.inputs, &[1, 0, 2]);
    let y = ordered(&operands.y, &[1, 2, 0, 3]);
    let (h0, c0) = (ordered(&operands.h0, &[1, 0, 2]), ordered(&operands.c0, &[1, 0, 2]));
    let last = if operands.y_h.is_some() { &operands.y_h } else { &operands.y_c };
    let last = ordered(last, &[1, 0, 2]);
    let backward = match rnn.direction {
        RnnDirection::Forward => 0,
        RnnDirection::Reverse => 1,
        RnnDirection::Bidirectional => 2,
    };
    let mut args = ArgsWriter::new();
    args.address(at(&operands.inputs)).address(weights).address(at(&operands.bias));
    args.address(at(&operands.peepholes)).address(at(&operands.h0)).address(at(&operands.c0));
    args.address(at(&operands.lengths));
    args.address(at(&operands.y)).address(at(&operands.y_h)).address(at(&operands.y_c));
    args.address(cell).address(fault);
    args.int(rnn.hidden_size).int(extents.batch).int(extents.time);
    args.int(directions(rnn)).signed(backward);
    args.int(x[0]).int(x[1]).int(gates(rnn.cell) * rnn.hidden_size);
    args.int(r[0]).int(r[1]).int(r[2]);
    for stride in h0.iter().chain(&c0) {
        args.int(*stride);
    }
    args.int(operands.lengths.as_ref().map_or(0, |view| view.strides[0]));
    args.int(y[0]).int(y[1]).int(y[2]).int(last[0]).int(last[1]);
    args.int(usize::from(rnn.cell == RnnCell::Lstm { input_forget: true }));
    args.int(usize::from(rnn.clip.is_some())).float(rnn.clip.unwrap_or(0.0));
    for function in functions.iter().flatten() {
        args.signed(function.kind).float(function.alpha).float(function.beta);
    }
    args
}

/// Weights `[directions, gates * hidden, hidden]` in the order of the tensor cores' registers:
/// `[direction][16 units][gate][32 depths][2][lane][4 registers][2]`; zeros beyond the layer.
///
/// A lane of a product with 16 depths has, of row `lane / 4` and the row eight below, two adjacent
/// depths of the first eight and two of the last. Which depths of the layer these are does not
/// matter as long as the state uses the same: here a lane has eight adjacent ones of 32, so that
/// one load fetches its part of the state for two products.
pub fn pack(values: &[f32], directions: usize, gates: usize, hidden: usize) -> Vec<f32> {
    let (groups, chunks) = (hidden.div_ceil(16), hidden.div_ceil(32));
    let mut packed = Vec::with_capacity(packed_len(directions, gates, hidden));
    for block in 0..directions * groups * gates * chunks {
        let (block, chunk) = (block / chunks, block % chunks);
        let (block, gate) = (block / gates, block % gates);
        let (direction, group) = (block / groups, block % groups);
        for place in 0..512 {
            let (half, lane) = (place / 256, place / 8 % 32);
            let (register, side) = (place / 2 % 4, place % 2);
            let unit = group * 16 + lane / 4 + register % 2 * 8;
            let depth = chunk * 32 + lane % 4 * 8 + half * 4 + register / 2 * 2 + side;
            let row = (direction * gates + gate) * hidden + unit;
            let inside = unit < hidden && depth < hidden;
            packed.push(if inside { values[row * hidden + depth] } else { 0.0 });
        }
    }
    packed
}

/// Elements that [`pack`] gives.
pub fn packed_len(directions: usize, gates: usize, hidden: usize) -> usize {
    directions * hidden.div_ceil(16) * gates * hidden.div_ceil(32) * 512
}

impl Lowering<'_> {
    /// A recurrent layer.
    pub(super) fn recurrent(
        &mut self,
        node: &GraphNode,
        rnn: &Rnn,
    ) -> Result<(), UnsupportedReason> {
        let element = self.float();
        let x = self.input(node, 0)?;
        let &[first, second, width] = &x.shape[..] else {
            return Err(format!("an input of shape {:?} is not a sequence", x.shape));
        };
        let (time, batch) = if rnn.batch_first { (second, first) } else { (first, second) };
        let (directions, gates, hidden) = (directions(rnn), gates(rnn.cell), rnn.hidden_size);
        let expect = |index: usize, shape: &[usize]| -> Result<(), UnsupportedReason> {
            let Some(id) = node.inputs.get(index).copied().flatten() else { return Ok(()) };
            let given = self.shape(id)?;
            let why = || format!("operand {index} of shape {given:?} is not {shape:?}");
            (given == shape).then_some(()).ok_or_else(why)
        };
        let states =
            if rnn.batch_first { [batch, directions, hidden] } else { [directions, batch, hidden] };
        expect(1, &[directions, gates * hidden, width])?;
        expect(2, &[directions, gates * hidden, hidden])?;
        expect(3, &[directions, 2 * gates * hidden])?;
        expect(4, &[batch])?;
        expect(5, &states)?;
        expect(6, &states)?;
        expect(7, &[directions, 3 * hidden])?;
        let inputs = self.input_products(node, &x, directions * gates * hidden)?;
        let outputs = self.recurrent_outputs(node, rnn)?;
        let operands = Operands {
            inputs,
            weights: self.state_weights(node, rnn)?,
            bias: self.float_operand(node, 3)?,
            lengths: self.optional(node, 4)?,
            h0: self.optional(node, 5)?,
            c0: self.optional(node, 6)?,
            peepholes: self.float_operand(node, 7)?,
            y: outputs[0].clone(),
            y_h: outputs[1].clone(),
            y_c: outputs[2].clone(),
        };
        if operands.lengths.as_ref().is_some_and(|view| view.element != Element::I32) {
            return Err("the lengths are not 32-bit integers".to_string());
        }
        let work = work(rnn, &self.target, Extents { time, batch }, &operands, element)?;
        self.finish(node, work, outputs.to_vec())
    }

    /// Memory for the outputs that exist. The states of one time step of all directions are
    /// adjacent for each item: the next layer, or the reader after a transposition, needs no copy.
    fn recurrent_outputs(
        &mut self,
        node: &GraphNode,
        rnn: &Rnn,
    ) -> Result<[Option<View>; 3], UnsupportedReason> {
        let mut views = [None, None, None];
        for (index, view) in views.iter_mut().enumerate() {
            let Some(id) = node.outputs.get(index).copied().flatten() else { continue };
            let (shape, element) = (self.shape(id)?, self.element(id)?);
            *view = Some(match index {
                0 if !rnn.batch_first => self.ordered(&shape, &[0, 2, 1, 3], element),
                _ => self.packed(&shape, element),
            });
        }
        Ok(views)
    }

    /// The products of all inputs with the weights of all directions.
    fn input_products(
        &mut self,
        node: &GraphNode,
        x: &View,
        columns: usize,
    ) -> Result<Option<View>, UnsupportedReason> {
        let [first, second, width] = x.shape[..] else { return Err("no sequence".to_string()) };
        let rows = first * second;
        if rows * width == 0 {
            return Ok(None);
        }
        // The order of the rows does not matter: whichever needs no copy.
        let turned = x.permuted(&[1, 0, 2]).reshaped(&[rows, width]);
        let (flat, is_turned) = match (x.reshaped(&[rows, width]), turned) {
            (Some(flat), _) => (flat, false),
            (None, Some(flat)) => (flat, true),
            (None, None) => {
                let packed = self.in_row_major(x.clone())?;
                (packed.reshaped(&[rows, width]).ok_or("the rows cannot be merged")?, false)
            }
        };
        let id = node.inputs.get(1).copied().flatten().ok_or("no weights")?;
        let constant = self.graph.constant(id).cloned();
        let product = match constant.filter(|_| self.float() == Element::F16) {
            Some(weight) => self.constant_rows(&flat, &weight, columns)?,
            None => self.any_rows(&flat, id, columns)?,
        };
        let shape = if is_turned { [second, first, columns] } else { [first, second, columns] };
        let shaped = product.reshaped(&shape).ok_or("the products' rows cannot be split")?;
        Ok(Some(if is_turned { shaped.permuted(&[1, 0, 2]) } else { shaped }))
    }

    /// The products of the rows of `x` with a constant `[.., width]`, on the tensor cores.
    fn constant_rows(
        &mut self,
        x: &View,
        weight: &Tensor,
        columns: usize,
    ) -> Result<View, UnsupportedReason> {
        let (rows, width) = (x.shape[0], x.shape[1]);
        let pixels = x.reshaped(&[rows, width, 1, 1]).ok_or("no rows")?;
        let (image, stride, depth) = self.as_image(pixels, 8)?;
        let mut input = image.reshaped(&[rows, width]).ok_or("no rows")?;
        input.strides[0] = stride;
        let raw = weight.raw().cloned().ok_or("the weights are no numbers")?;
        let matrix = Tensor::from_raw(weight.dtype(), vec![columns, width], raw);
        let matrix = matrix.map_err(|err| err.to_string())?;
        let bytes = columns.next_multiple_of(8) * depth * 2;
        let pack = |tensor: &Tensor| packing::matrix(tensor, true, 1.0).unwrap_or_default();
        let number = self.weight(&matrix, "recurrent input", bytes, pack);
        self.rows_product(input, depth, (number, bytes), columns)
    }

    /// The products of the rows of `x` with the value `id`, in any precision.
    fn any_rows(
        &mut self,
        x: &View,
        id: ValueId,
        columns: usize,
    ) -> Result<View, UnsupportedReason> {
        let width = x.shape[1];
        let weight = self.operand(id)?;
        let weight = match weight.reshaped(&[columns, width]) {
            Some(view) => view,
            None => self.in_row_major(weight)?.reshaped(&[columns, width]).ok_or("no matrix")?,
        };
        let output = self.packed(&[x.shape[0], columns], self.float());
        let spec = MatMul { transpose_b: true, ..MatMul::default() };
        let work = product::matmul(&self.target, &spec, (x, &weight), (None, None), &output)?;
        self.push(work);
        Ok(output)
    }

    /// The weights of the state: packed for tensor cores when they are constant and the precision
    /// has them, else with units fastest, so that threads read neighbours.
    fn state_weights(
        &mut self,
        node: &GraphNode,
        rnn: &Rnn,
    ) -> Result<StateWeights, UnsupportedReason> {
        let element = self.float();
        let (directions, gates, hidden) = (directions(rnn), gates(rnn.cell), rnn.hidden_size);
        let id = node.inputs.get(2).copied().flatten().ok_or("no weights")?;
        let Some(tensor) = self.graph.constant(id).cloned() else {
            return Ok(StateWeights::Strided(self.operand(id)?));
        };
        if !packing::converts(&tensor, element) {
            return Err("the weights are no floating-point numbers".to_string());
        }
        if element == Element::F32 {
            let rows = gates * hidden;
            let pack = move |tensor: &Tensor| units_fastest(tensor, rows, hidden);
            let bytes = tensor.len() * element.size();
            let number = self.weight(&tensor, "recurrent columns", bytes, pack);
            let location = BufferLocation::Fixed(MemoryLocation::Weight(number, 0));
            let buffer = self.buffer(bytes, location);
            let shape = vec![directions, rows, hidden];
            let strides = vec![rows * hidden, 1, rows];
            let view = View { buffer, offset: 0, shape, strides, element, slack: 0 };
            return Ok(StateWeights::Strided(view));
        }
        let bytes = packed_len(directions, gates, hidden) * element.size();
        let how = format!("recurrent {element:?} {directions} {gates}");
        let order = move |tensor: &Tensor| {
            let values = graph::content::floats(tensor)?;
            packing::floats_as(&pack(&values, directions, gates, hidden), element)
        };
        let pack = move |tensor: &Tensor| order(tensor).unwrap_or_default();
        let number = self.weight(&tensor, &how, bytes, pack);
        Ok(StateWeights::Packed(Self::weight_address(number)))
    }

    /// The operand at `index`, packed in single precision.
    fn float_operand(
        &mut self,
        node: &GraphNode,
        index: usize,
    ) -> Result<Option<View>, UnsupportedReason> {
        let Some(id) = node.inputs.get(index).copied().flatten() else { return Ok(None) };
        if let Some(tensor) = self.graph.constant(id).cloned() {
            return self.constant_view(id, &tensor, Element::F32).map(Some);
        }
        let view = self.operand(id)?;
        if view.element == Element::F32 {
            return self.in_row_major(view).map(Some);
        }
        let packed = self.packed(&view.shape, Element::F32);
        self.copy_into(&view, &packed)?;
        Ok(Some(packed))
    }
}

/// Matrices `[rows, depth]` as `[depth][rows]` floats.
fn units_fastest(tensor: &Tensor, rows: usize, depth: usize) -> Vec<u8> {
    let values = graph::content::floats(tensor).unwrap_or_default();
    let turned = |matrix: &[f32]| -> Vec<f32> {
        let at = |place: usize| matrix[place % rows * depth + place / rows];
        (0..rows * depth).map(at).collect()
    };
    let all: Vec<f32> = values.chunks_exact(rows * depth).flat_map(turned).collect();
    packing::floats_as(&all, Element::F32).unwrap_or_default()
}
