//! Xids: errors that the kernel module of NVIDIA's driver reports, watched through NVML.
//!
//! An error of a process's own kernels is returned by its calls. Some errors of the hardware are
//! not, or only much later: calls hang, or other processes see them first.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::nvml::{Handle, Nvml, SUCCESS, check};

/// NVML's bit of Xids among events, and its code for a wait that is over.
const XID_EVENT: c_ulonglong = 8;
const TIMEOUT: c_int = 10;

/// How long the thread waits before it looks whether its device is gone.
const WAIT_MS: c_uint = 500;

/// Xids after which a GPU runs nothing until it is reset, by NVIDIA's list: uncorrectable errors of
/// the memory that are not contained (48, 95, 140), a halted engine (62), failed row remapping
/// (64), a GPU that is off the bus (79), and a system processor that does not answer (119, 120).
/// Others are errors of some process's kernels, which fault only that process.
const CRITICAL: [u64; 8] = [48, 62, 64, 79, 95, 119, 120, 140];

/// Watches one GPU in a thread, which ends within half a second after this is dropped.
pub(crate) struct XidWatch {
    stopped: Arc<AtomicBool>,
}

/// What `nvmlEventSetWait_v2` fills in.
#[repr(C)]
struct EventData {
    device: Handle,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// A set of events. NVML's handles are only names.
struct EventSet<'a> {
    nvml: &'a Nvml,
    set: Handle,
}

/// What a wait brought.
#[derive(Debug, PartialEq, Eq)]
enum Waited {
    Xid(u64),
    Nothing,
    Failed(c_int),
}

impl XidWatch {
    /// Calls `report` with every critical Xid of the GPU at `pci_bus_id`. Where NVML or its events
    /// are missing, as in some containers, the thread ends at once. `None` without a thread.
    pub(crate) fn start(
        pci_bus_id: &str,
        report: impl Fn(u64) + Send + 'static,
    ) -> Option<XidWatch> {
        let pci_bus_id = pci_bus_id.to_string();
        XidWatch::spawn(move || Nvml::open(&pci_bus_id), report)
    }

    /// NVML is opened in the thread: that takes longer than opening the GPU may.
    fn spawn(
        open: impl FnOnce() -> Result<Nvml, String> + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> Option<XidWatch> {
        let stopped = Arc::new(AtomicBool::new(false));
        let stop = stopped.clone();
        let work = move || {
            let watched = open().and_then(|nvml| {
                watch(&EventSet::new(&nvml)?, &stop, &report);
                Ok(())
            });
            if let Err(why) = watched {
                tracing::debug!(why, "Xids are not watched");
            }
        };
        std::thread::Builder::new().name("cuda-xid".to_string()).spawn(work).ok()?;
        Some(XidWatch { stopped })
    }
}

impl Drop for XidWatch {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
    }
}

fn watch(events: &EventSet<'_>, stop: &AtomicBool, report: &impl Fn(u64)) {
    while !stop.load(Ordering::SeqCst) {
        match events.wait() {
            Waited::Nothing => {}
            Waited::Xid(xid) if CRITICAL.contains(&xid) => {
                tracing::error!(xid, "the GPU reports a critical error");
                report(xid);
            }
            Waited::Xid(xid) => tracing::warn!(xid, "the GPU reports an error"),
            Waited::Failed(code) => {
                // Waiting on would fail at once, again and again.
                tracing::warn!(code, "Xids are not watched any more");
                return;
            }
        }
    }
}

impl EventSet<'_> {
    fn new(nvml: &Nvml) -> Result<EventSet<'_>, String> {
        let mut set: Handle = std::ptr::null_mut();
        // SAFETY: the symbols have these types since NVML 2; `set` receives the result, and is
        // freed with the value that holds it.
        unsafe {
            let library = &nvml.library;
            let missing = |err: libloading::Error| err.to_string();
            let create = library
                .get::<unsafe extern "C" fn(*mut Handle) -> c_int>(b"nvmlEventSetCreate\0")
                .map_err(missing)?;
            check("nvmlEventSetCreate", create(&mut set))?;
            let events = EventSet { nvml, set };
            let register = library
                .get::<unsafe extern "C" fn(Handle, c_ulonglong, Handle) -> c_int>(
                    b"nvmlDeviceRegisterEvents\0",
                )
                .map_err(missing)?;
            check("nvmlDeviceRegisterEvents", register(nvml.device, XID_EVENT, set))?;
            Ok(events)
        }
    }

    fn wait(&self) -> Waited {
        let mut event = EventData {
            device: std::ptr::null_mut(),
            kind: 0,
            data: 0,
            gpu_instance: 0,
            compute_instance: 0,
        };
        // SAFETY: the symbol has this type, and `event` has the layout it fills in.
        let code = unsafe {
            let wait =
                self.nvml
                    .library
                    .get::<unsafe extern "C" fn(Handle, *mut EventData, c_uint) -> c_int>(
                        b"nvmlEventSetWait_v2\0",
                    );
            match wait {
                Ok(wait) => wait(self.set, &mut event, WAIT_MS),
                Err(_) => return Waited::Failed(0),
            }
        };
        match code {
            SUCCESS if event.kind & XID_EVENT != 0 => Waited::Xid(event.data),
            SUCCESS | TIMEOUT => Waited::Nothing,
            code => Waited::Failed(code),
        }
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        // SAFETY: the symbol has this type; the set was made by NVML and is not used after this.
        unsafe {
            let free = self
                .nvml
                .library
                .get::<unsafe extern "C" fn(Handle) -> c_int>(b"nvmlEventSetFree\0");
            if let Ok(free) = free {
                let _ = free(self.set);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// NVML with four events: a kernel's fault, another kind, a GPU off the bus, and a failure.
    const FAKE: &str = r#"
        #include <stddef.h>
        typedef struct {
            void *device; unsigned long long kind, data; unsigned int gpu, compute;
        } Event;
        static int made = 0, waited = 0;
        extern "C" {
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **device) {
            *device = &made;
            return 0;
        }
        int nvmlEventSetCreate(void **set) { made += 1; *set = &waited; return 0; }
        int nvmlEventSetFree(void *) { return 0; }
        int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *set) {
            return device == &made && kinds == 8 && set == &waited ? 0 : 2;
        }
        int nvmlEventSetWait_v2(void *set, Event *event, unsigned int) {
            if (set != &waited) return 2;
            static const unsigned long long kinds[] = {8, 4, 8}, data[] = {31, 79, 79};
            if (waited >= 6) return 999;
            if (waited % 2 == 0) { waited += 1; return 10; }
            event->device = &made;
            event->kind = kinds[waited / 2];
            event->data = data[waited / 2];
            waited += 1;
            return 0;
        }
        }
    "#;

    #[test]
    fn critical_errors_are_reported_and_others_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, file) = (folder.path().join("n.cpp"), folder.path().join("libfake-xid.so"));
        std::fs::write(&source, FAKE).expect("a folder to write to");
        let built = Command::new("g++")
            .args(["-shared", "-fPIC", "-o"])
            .args([&file, &source])
            .status()
            .expect("g++ is installed");
        assert!(built.success());
        let nvml = Nvml::open_file(file.to_str().expect("text"), "0000:01:00.0").expect("NVML");
        let (sender, receiver) = channel();
        let report = move |xid| sender.send(xid).expect("the test listens");
        let _watch = XidWatch::spawn(move || Ok(nvml), report).expect("a thread");
        // The channel is closed when the thread ends, which it does after the failure.
        let limit = Duration::from_secs(20);
        let all: Vec<u64> = std::iter::from_fn(|| receiver.recv_timeout(limit).ok()).collect();
        assert_eq!(all, [79]);
    }
}
