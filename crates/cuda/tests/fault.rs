//! A kernel that breaks the device. Alone in its process, since nothing works afterwards.

#[path = "support/bench.rs"]
#[allow(dead_code)]
mod bench;
#[path = "support/toy.rs"]
#[allow(dead_code)]
mod toy;

use bench::{Lane, numbers, open, start};
use device::{Completion, Device, DeviceError, Outcome};
use toy::Chain;

fn assert_faulted(completion: &Completion) {
    let outcome = &completion.outcome;
    assert!(matches!(outcome, Outcome::Failed(DeviceError::Faulted { .. })), "{outcome:?}");
}

#[test]
fn a_broken_device_says_so_and_computes_nothing_more() {
    let Some(device) = open() else { return };
    let lanes = [Lane::open(&device, 0, true, 4), Lane::open(&device, 1, false, 4)];
    let fine = device.load(Chain::default().plan()).expect("a program");
    let wild = device.load(Chain { wild: true, ..Chain::default() }.plan()).expect("a program");
    let x = numbers(1000, 1);
    let prepared: Vec<_> = lanes.iter().map(|_| start(&fine, &x)).collect();
    lanes[1].launch(start(&wild, &x), 1);
    let first = lanes[1].wait();
    println!("{:?}", first.outcome);
    assert_faulted(&first);
    for (lane, task) in lanes.iter().zip(prepared) {
        lane.launch(task, 2);
        assert_faulted(&lane.wait());
        lane.queue.preempt();
    }
    let input = model::Tensor::from_vec(vec![1], vec![1f32]).expect("a tensor");
    assert!(matches!(fine.prepare(vec![input]), Err(DeviceError::Faulted { .. })));
    let loaded = device.load(Chain::default().plan());
    assert!(matches!(loaded, Err(DeviceError::Faulted { .. })));
}
