//! Kernels that fault the device. Alone in its process: everything of a faulted device must go
//! before it can be opened again.

#[path = "support/bench.rs"]
#[allow(dead_code)]
mod bench;
#[path = "support/toy.rs"]
#[allow(dead_code)]
mod toy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::{TestQueue, numbers, open, start};
use cuda::CudaDevice;
use device::{Completion, Device, DeviceError, InjectedFault, Outcome};
use toy::Chain;

fn assert_faulted(completion: &Completion) {
    let outcome = &completion.outcome;
    assert!(matches!(outcome, Outcome::Failed(DeviceError::Faulted { .. })), "{outcome:?}");
}

/// Opens the device as soon as nothing of the faulted one is left.
fn reopen() -> CudaDevice {
    let options = || cuda::CudaOptions {
        cache_dir: std::env::var_os("ATOLL_TEST_CACHE").map(std::path::PathBuf::from),
        ..cuda::CudaOptions::default()
    };
    let began = Instant::now();
    loop {
        match CudaDevice::open(0, options(), Arc::new(toy::ToyCompiler)) {
            Ok(device) => return device,
            Err(err) => assert!(began.elapsed() < Duration::from_secs(60), "{err}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// After a kernel has faulted, everything fails, and the driver refuses the GPU to this process.
fn faulted_device_fails_all_further_work(device: &CudaDevice) {
    let queues = [TestQueue::open(device, 0, true, 4), TestQueue::open(device, 1, false, 4)];
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
    assert!(cuda::is_refused(0));
}

/// One test, because a process cannot use the GPU any more when it is done.
#[test]
fn a_device_is_opened_again_after_a_hang_and_refused_after_a_fault() {
    let Some(mut device) = open() else { return };
    let x = numbers(1000, 1);
    let mut first: Option<Vec<f32>> = None;
    let kinds = [InjectedFault::Lost, InjectedFault::Hang { millis: 1_000 }];
    for kind in kinds.iter().cycle().take(8) {
        {
            let queues =
                [TestQueue::open(&device, 0, true, 4), TestQueue::open(&device, 1, false, 4)];
            let program = device.load(Chain::default().plan()).expect("a program");
            for queue in &queues {
                let y = queue.run(start(&program, &x));
                assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "{kind:?}");
            }
            device.inject(*kind).expect("a fault");
            let began = Instant::now();
            while device.fault().is_none() {
                // A hang is noticed by what waits for it.
                if matches!(kind, InjectedFault::Hang { .. }) {
                    device.give_up("it hangs");
                }
                assert!(began.elapsed() < Duration::from_secs(10), "{kind:?} was not noticed");
                std::thread::sleep(Duration::from_millis(1));
            }
            println!("{kind:?} noticed after {:?}", began.elapsed());
        }
        let began = Instant::now();
        drop(device);
        device = reopen();
        println!("{kind:?}: open again after {:?}", began.elapsed());
    }
    assert!(!cuda::is_refused(0));
    faulted_device_fails_all_further_work(&device);
}
