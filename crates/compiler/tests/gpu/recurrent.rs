//! Recurrent layers: their plans are valid, and their kernels compile for every supported GPU.

use std::collections::BTreeMap;

use compiler::gpu::{GpuCompiler, check};
use cuda::EntryFacts;
use device::KernelCompiler;
use model::gpu::{GpuPlan, GpuTarget, Kernel, Precision};
use model::op::{Op, Rnn, RnnCell, RnnDirection};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId};

use crate::compiled::{Compiled, compiler_for};
use crate::models::Builder;

const LSTM: RnnCell = RnnCell::Lstm { input_forget: false };
const CELLS: [RnnCell; 4] = [
    RnnCell::Simple,
    LSTM,
    RnnCell::Gru { linear_before_reset: true },
    RnnCell::Gru { linear_before_reset: false },
];

/// Two bidirectional layers, the second on the states of the first.
fn layers(cell: RnnCell, width: usize, hidden: usize, constant: bool) -> LaunchPlan {
    let mut b = Builder::default();
    let x = b.input(&[7, width]);
    let y = layer(&mut b, cell, (x, width), hidden, constant);
    let rows = b.activation(&[7, 2 * hidden]);
    let name = "rows".to_string();
    let shape = b.value(vec![Dim::Fixed(3)], DataType::I64);
    let sizes = Tensor::from_vec(vec![3], vec![0, 7, 2 * hidden as i64]).unwrap();
    b.plan.constants.push((shape, sizes));
    let op = Op::Reshape { allow_zero: false };
    let (inputs, outputs) = (vec![Some(y), Some(shape)], vec![Some(rows)]);
    b.plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
    let last = layer(&mut b, cell, (rows, 2 * hidden), hidden, constant);
    b.plan.outputs.push(last);
    b.plan.plan_lifetimes();
    b.plan.check().unwrap();
    b.plan
}

fn layer(
    b: &mut Builder,
    cell: RnnCell,
    (x, width): (ValueId, usize),
    hidden: usize,
    constant: bool,
) -> ValueId {
    let rows = compiler::gpu::recurrent::gates(cell) * hidden;
    let fixed = |shape: &[usize]| shape.iter().map(|size| Dim::Fixed(*size)).collect::<Vec<_>>();
    let weight = |b: &mut Builder, shape: &[usize]| {
        if constant {
            return b.constant(shape);
        }
        let id = b.value(fixed(shape), DataType::F32);
        b.plan.inputs.push(id);
        id
    };
    let w = weight(b, &[2, rows, width]);
    let r = weight(b, &[2, rows, hidden]);
    let bias = weight(b, &[2, 2 * rows]);
    let y = b.activation(&[7, 2, hidden]);
    let (h, c) = (b.activation(&[2, hidden]), b.activation(&[2, hidden]));
    b.plan.outputs.extend([h, c]);
    let op = Op::Rnn(Rnn {
        cell,
        direction: RnnDirection::Bidirectional,
        hidden_size: hidden,
        batch_first: true,
        clip: None,
        activations: vec![],
    });
    let name = format!("layer{}", b.plan.steps.len());
    let (inputs, outputs) =
        (vec![Some(x), Some(w), Some(r), Some(bias)], vec![Some(y), Some(h), Some(c)]);
    b.plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
    y
}

fn lower(plan: &LaunchPlan, batch: usize, capability: u32, precision: Precision) -> GpuPlan {
    let target = GpuTarget { capability, multiprocessors: 132, precision };
    GpuCompiler::default().lower(plan, &[("batch".to_string(), batch)], &target).unwrap()
}

#[test]
fn plans_of_recurrent_layers_are_valid() {
    for cell in CELLS {
        for (width, hidden, constant) in [(64, 256, true), (3, 5, true), (13, 100, false)] {
            let plan = layers(cell, width, hidden, constant);
            for batch in [1, 3, 17, 64] {
                for capability in [80, 89, 90, 100] {
                    for precision in [Precision::F16, Precision::BF16, Precision::F32] {
                        let gpu = lower(&plan, batch, capability, precision);
                        let faults = check::faults(&gpu);
                        assert_eq!(faults, Vec::<String>::new(), "{cell:?} {hidden} {batch}");
                        let clusters = gpu.steps.iter().flat_map(|step| &step.choices);
                        assert!(clusters.clone().all(|c| c.cluster == 1 || capability >= 90));
                        for weight in gpu.weights.iter().filter(|_| batch == 1) {
                            assert_eq!((weight.pack.0)().len() as u64, weight.bytes);
                        }
                    }
                }
            }
        }
    }
}

/// The input product is on the tensor cores, the second layer reads the first one's states in
/// place, and the default on a device with clusters is a cluster.
#[test]
fn a_layer_is_one_product_and_one_recurrence() {
    let gpu = lower(&layers(LSTM, 64, 256, true), 2, 90, Precision::F16);
    let ops: Vec<&str> = gpu.steps.iter().map(|step| step.op.as_str()).collect();
    assert_eq!(ops[..5], ["Copy", "MatMul", "Recurrent", "MatMul", "Recurrent"]);
    assert!(gpu.steps[2].choices[0].cluster > 1, "{}", gpu.steps[2].choices[0].variant);
    assert_eq!(gpu.steps[2].choices[gpu.steps[2].be].cluster, 1);
}

#[test]
fn a_layer_too_wide_for_shared_memory_is_refused_with_the_reason() {
    let plan = layers(RnnCell::Simple, 8, 20_000, false);
    let target = GpuTarget { capability: 80, multiprocessors: 108, precision: Precision::F32 };
    let errors =
        GpuCompiler::default().lower(&plan, &[("batch".to_string(), 1)], &target).unwrap_err();
    assert!(errors[0].to_string().contains("shared memory"), "{}", errors[0]);
}

#[test]
fn recurrent_kernels_compile_and_keep_weights_in_registers() {
    let compiled = Compiled::open("recurrent");
    for capability in [80, 89, 90, 100] {
        let Some(report) = compiler_for(capability) else { return };
        let mut kernels = BTreeMap::new();
        for (number, cell) in CELLS.into_iter().enumerate() {
            let plan = layers(cell, 64, [256, 512, 128, 40][number], true);
            for (batch, precision) in
                [(1, Precision::F16), (16, Precision::F16), (3, Precision::F32)]
            {
                let gpu = lower(&plan, batch, capability, precision);
                let used = gpu.steps.iter().filter(|step| step.op == "Recurrent");
                for kernel in used.map(|step| &gpu.kernels[step.choices[0].kernel]) {
                    kernels.insert(kernel.expression.clone(), kernel.clone());
                }
            }
        }
        let kernels: Vec<&Kernel> = kernels.values().collect();
        for (kernel, facts) in kernels.iter().zip(compiled.facts(&report, &kernels)) {
            let facts = facts.unwrap_or_else(|err| panic!("{}: {err}", kernel.expression));
            check_registers(&kernel.expression, &facts);
        }
    }
    compiled.record();
}

fn check_registers(expression: &str, facts: &[EntryFacts]) {
    for entry in facts {
        let (name, spilled) = (&entry.entry, entry.spilled_bytes);
        // A few words of addresses may spill, weights must not.
        assert!(spilled <= 160, "{name} of {expression} spills {spilled} bytes");
    }
}
