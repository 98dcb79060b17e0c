//! A kernel that faults the device. Alone in its process, since the context does not recover.

#[path = "support/bench.rs"]
#[allow(dead_code)]
mod bench;
#[path = "support/toy.rs"]
#[allow(dead_code)]
mod toy;

use bench::{TestQueue, numbers, open, start};
use device::{Completion, Device, DeviceError, Outcome};
use toy::Chain;

fn assert_faulted(completion: &Completion) {
    let outcome = &completion.outcome;
    assert!(matches!(outcome, Outcome::Failed(DeviceError::Faulted { .. })), "{outcome:?}");
}

#[test]
fn faulted_device_fails_all_further_work() {
    let Some(device) = open() else { return };
    let queues = [TestQueue::open(&device, 0, true, 4), TestQueue::open(&device, 1, false, 4)];
    let fine = device.load(Chain::default().plan()).expect("a program");
    let wild = device.load(Chain { wild: true, ..Chain::default() }.plan()).expect("a program");
    let x = numbers(1000, 1);
    let prepared: Vec<_> = queues.iter().map(|_| start(&fine, &x)).collect();
    queues[1].launch(start(&wild, &x), 1);
    let first = queues[1].wait();
    println!("{:?}", first.outcome);
    assert_faulted(&first);
    for (queue, task) in queues.iter().zip(prepared) {
        queue.launch(task, 2);
        assert_faulted(&queue.wait());
        queue.queue.preempt();
    }
    let input = model::Tensor::from_vec(vec![1], vec![1f32]).expect("a tensor");
    assert!(matches!(fine.prepare(vec![input]), Err(DeviceError::Faulted { .. })));
    let loaded = device.load(Chain::default().plan());
    assert!(matches!(loaded, Err(DeviceError::Faulted { .. })));
}
