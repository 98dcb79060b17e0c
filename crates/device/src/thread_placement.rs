//! Processors of threads, in a process whose models compute on a GPU.
//!
//! A thread that is woken may be put behind one that polls, or behind one that is inside a long
//! call of the kernel: mapping, pinning and freeing memory, which nothing interrupts on most
//! systems. It then waits for milliseconds beside idle processors, because schedulers look for one
//! only near the last one it had. So threads that poll get a processor each, work that no
//! request waits for gets a part of the others, and everything else the rest.
//!
//! Nothing is placed until [`start`], nor where there are few processors.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// With fewer processors nothing is placed.
const MIN_PROCESSORS: usize = 4;

/// With fewer, no processor is set aside for a thread.
const MIN_TO_SET_ASIDE: usize = 8;

/// One of so many processors is set aside, at most.
const SET_ASIDE: usize = 3;

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// Requests wait for it.
    Serving,
    /// Loads, compilations, slow calls of a driver: no request waits for it, or it is best effort.
    Background,
    /// As `Background`, while no real time is there that it could disturb.
    BackgroundAlone,
}

/// Threads that get a processor each as far as there are enough; the first need it most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoneThreads {
    /// They poll.
    pub polling: usize,
    /// They hold the lock of a driver.
    pub driver: usize,
}

/// Which of [`LoneThreads`] a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoneThread {
    /// It polls.
    Polling,
    /// It holds the lock of a driver.
    Driver,
}

/// The processors of each role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shares {
    serving: Vec<usize>,
    background: Vec<usize>,
    polling: Vec<usize>,
    driver: Vec<usize>,
}

impl Shares {
    fn set_background_apart(&self) -> bool {
        !self.serving.iter().any(|number| self.background.contains(number))
    }
}

struct Placement {
    /// All that the process may use.
    all: Vec<usize>,
    shares: Shares,
    /// Processors for one thread that none has: for [`LoneThread::Polling`], and for others.
    free: Mutex<[Vec<usize>; 2]>,
}

static PLACEMENT: OnceLock<Option<Placement>> = OnceLock::new();

thread_local! {
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

fn placement() -> Option<&'static Placement> {
    PLACEMENT.get().and_then(Option::as_ref)
}

impl Placement {
    fn free(&self) -> MutexGuard<'_, [Vec<usize>; 2]> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places all threads of this process from now on. The first call decides.
pub fn start(lone: LoneThreads) {
    PLACEMENT.get_or_init(|| {
        let cores = system::cores();
        let shares = divide(&cores, lone)?;
        // Threads that exist serve; those they start inherit that.
        system::place_all(&shares.serving);
        tracing::info!(
            serving = shares.serving.len(),
            background = shares.background.len(),
            polling = shares.polling.len(),
            driver = shares.driver.len(),
            "threads are placed on processors"
        );
        let free = Mutex::new([shares.polling.clone(), shares.driver.clone()]);
        Some(Placement { all: cores.concat(), shares, free })
    });
}

/// Leaves all threads where the system puts them, whatever [`start`] is asked for later.
pub fn leave_to_system() {
    PLACEMENT.get_or_init(|| None);
}

/// Whether background work shares no processor with what requests wait for.
pub fn sets_background_apart() -> bool {
    placement().is_some_and(|placement| placement.shares.set_background_apart())
}

/// Whether the calling thread is in the background.
pub fn is_in_background() -> bool {
    IN_BACKGROUND.get()
}

/// Moves the calling thread, and those it starts, to the processors of `role`.
pub fn enter(role: ThreadRole) {
    IN_BACKGROUND.set(role != ThreadRole::Serving);
    let Some(placement) = placement() else { return };
    let Shares { serving, background, .. } = &placement.shares;
    match role {
        ThreadRole::Serving => system::place(None, serving),
        ThreadRole::Background => system::place(None, background),
        ThreadRole::BackgroundAlone => system::place(None, &[&serving[..], background].concat()),
    }
}

/// Lets the calling thread run everywhere: before it becomes another process, which would inherit
/// its place.
pub fn leave() {
    if let Some(placement) = placement() {
        system::place(None, &placement.all);
    }
}

/// A processor that the calling thread has for itself; others may have it when this is dropped.
pub struct OwnProcessor {
    number: usize,
    kind: LoneThread,
}

/// Moves the calling thread to a processor of its own, if there is one left. Otherwise one that
/// polls stays where it is, and one that holds a driver's lock shares the processors of others that
/// do: were it descheduled for work in the background, real time would wait for its lock.
#[must_use]
pub fn enter_alone(kind: LoneThread) -> Option<OwnProcessor> {
    let placement = placement()?;
    let own = placement.free()[kind as usize].pop();
    let Shares { driver, background, .. } = &placement.shares;
    match own {
        Some(number) => system::place(None, &[number]),
        None if kind == LoneThread::Polling => {}
        None if driver.is_empty() => system::place(None, background),
        None => system::place(None, driver),
    }
    own.map(|number| OwnProcessor { number, kind })
}

impl Drop for OwnProcessor {
    fn drop(&mut self) {
        if let Some(placement) = placement() {
            placement.free()[self.kind as usize].push(self.number);
        }
    }
}

/// Processors that this process may use, those of one core in a row.
pub fn processors() -> Vec<usize> {
    system::cores().concat()
}

/// Moves the calling thread, and the threads and processes it starts, to `processors`: for
/// measurements whose clients stand for those of other machines.
pub fn confine(processors: &[usize]) {
    system::place(None, processors);
}

/// Divides the processors of `cores` among the roles: `None` where there are too few. Threads that
/// serve and threads in the background share no core.
fn divide(cores: &[Vec<usize>], lone: LoneThreads) -> Option<Shares> {
    let count: usize = cores.iter().map(Vec::len).sum();
    if count < MIN_PROCESSORS {
        return None;
    }
    let mut all = cores.to_vec();
    let most_apart = if count < MIN_TO_SET_ASIDE { 0 } else { count / SET_ASIDE };
    // Threads that hold a driver's lock can share a processor: they wait for each other anyway.
    let kept_for_drivers = usize::from(lone.driver > 0 && most_apart > 1);
    let polling_count = lone.polling.min(most_apart - kept_for_drivers);
    let mut polling = Vec::new();
    // What is left of cores with a thread that polls.
    let mut beside = Vec::new();
    while polling.len() < polling_count {
        // On cores of their own as far as there are enough.
        let next = match all.len() > 1 {
            true => all.pop(),
            false => beside.pop().or_else(|| all.pop()),
        };
        let Some(mut core) = next else { break };
        polling.extend(core.pop());
        if !core.is_empty() {
            beside.push(core);
        }
    }
    let mut driver = Vec::new();
    while driver.len() < lone.driver.min(most_apart - polling_count)
        && let Some(last) = all.last_mut().or(beside.last_mut())
    {
        driver.extend(last.pop());
        all.retain(|core| !core.is_empty());
        beside.retain(|core| !core.is_empty());
    }
    // Few threads in the background compute for long, and many connections need many processors.
    let parts = if count < MIN_TO_SET_ASIDE { 2 } else { 3 };
    let rest = count - polling.len() - driver.len();
    let in_background = rest / parts;
    let (mut serving, mut background): (Vec<Vec<usize>>, Vec<usize>) = (Vec::new(), Vec::new());
    for core in all.into_iter().rev() {
        match background.len() + core.len() <= in_background {
            true => background.extend(core),
            false => serving.push(core),
        }
    }
    for core in beside {
        match background.is_empty() && core.len() <= in_background {
            true => background.extend(core),
            false => serving.push(core),
        }
    }
    // Cores of many processors: one with up to half of them is better than a part of one.
    if background.is_empty()
        && let Some(at) = serving.iter().position(|core| core.len() <= rest / 2)
    {
        background = serving.remove(at);
    }
    let mut serving = serving.concat();
    // One core of many processors is divided nevertheless.
    if background.is_empty() {
        background = serving.split_off(serving.len() - in_background);
    }
    if count < MIN_TO_SET_ASIDE {
        serving.extend(&background);
    }
    serving.sort_unstable();
    background.sort_unstable();
    Some(Shares { serving, background, polling, driver })
}

/// Processors by core: `numbers` with what the system says of each one's core.
fn by_core(numbers: &[usize], core_of: impl Fn(usize) -> Option<String>) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<(usize, String), Vec<usize>> = BTreeMap::new();
    let mut first: BTreeMap<String, usize> = BTreeMap::new();
    for number in numbers {
        let core = core_of(*number).unwrap_or_else(|| format!("alone {number}"));
        let at = *first.entry(core.clone()).or_insert(*number);
        cores.entry((at, core)).or_default().push(*number);
    }
    cores.into_values().collect()
}

#[cfg(target_os = "linux")]
mod system {
    use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

    /// The processors that the calling thread may use, by core.
    pub(super) fn cores() -> Vec<Vec<usize>> {
        let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
        let numbers: Vec<usize> =
            (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number)).collect();
        // A quota of fewer processors is not a set of them: nothing is placed then.
        let granted = std::thread::available_parallelism().map_or(1, usize::from);
        if granted < numbers.len() {
            return Vec::new();
        }
        super::by_core(&numbers, |number| {
            let path = format!("/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list");
            std::fs::read_to_string(path).ok()
        })
    }

    /// Moves the thread `id`, or the calling one, to `processors`. Fails only where a sandbox
    /// forbids it; the thread then stays where it is.
    pub(super) fn place(id: Option<Pid>, processors: &[usize]) {
        let mut set = CpuSet::new();
        processors.iter().for_each(|number| set.set(*number));
        let _ = sched_setaffinity(id, &set);
    }

    /// Moves all threads of this process.
    pub(super) fn place_all(processors: &[usize]) {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        for thread in threads {
            let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            if id.is_some() {
                place(id, processors);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn cores() -> Vec<Vec<usize>> {
        Vec::new()
    }

    pub(super) fn place(_: Option<()>, _: &[usize]) {}

    pub(super) fn place_all(_: &[usize]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cores` cores of `threads` processors, numbered as most systems do.
    fn machine(cores: usize, threads: usize) -> Vec<Vec<usize>> {
        let core = |core: usize| (0..threads).map(|thread| core + thread * cores).collect();
        (0..cores).map(core).collect()
    }

    fn lone(polling: usize, driver: usize) -> LoneThreads {
        LoneThreads { polling, driver }
    }

    /// Serving, in the background, polling, inside a driver.
    fn counts(shares: &Shares) -> [usize; 4] {
        [&shares.serving, &shares.background, &shares.polling, &shares.driver].map(Vec::len)
    }

    #[test]
    fn small_machines_are_left_to_the_system() {
        for cores in [0, 1, 2, 3] {
            assert_eq!(divide(&machine(cores, 1), lone(2, 2)), None);
        }
        let four = divide(&machine(4, 1), lone(2, 2)).unwrap();
        assert_eq!(four.serving, [0, 1, 2, 3], "serving threads may use all of them");
        assert_eq!((&four.background, counts(&four)), (&vec![2, 3], [4, 2, 0, 0]));
        assert!(!four.set_background_apart());
    }

    #[test]
    fn threads_that_poll_have_processors_of_their_own() {
        let of = |cores, threads, lone| counts(&divide(&machine(cores, threads), lone).unwrap());
        assert_eq!(of(8, 1, lone(2, 2)), [4, 2, 1, 1], "one for those that hold a driver's lock");
        assert_eq!(of(9, 1, lone(2, 2)), [4, 2, 2, 1], "the others are for those that poll");
        assert_eq!(of(13, 1, lone(2, 2)), [6, 3, 2, 2]);
        assert_eq!(of(16, 1, lone(2, 2)), [8, 4, 2, 2]);
        assert_eq!(of(16, 1, lone(16, 1)), [8, 3, 4, 1], "a third at most");
        assert_eq!(of(16, 2, lone(2, 0)), [20, 10, 2, 0]);
        assert_eq!(of(1, 16, lone(2, 0)), [10, 4, 2, 0], "one core of sixteen");
    }

    #[test]
    fn threads_that_poll_share_no_core_with_each_other_or_the_background() {
        for (cores, polling) in [(8, 2), (16, 4), (32, 8)] {
            let cores = machine(cores, 2);
            let shares = divide(&cores, lone(polling, 2)).unwrap();
            for number in &shares.polling {
                let core = cores.iter().find(|core| core.contains(number)).unwrap();
                let others = |share: &[usize]| core.iter().filter(|n| share.contains(n)).count();
                assert_eq!((others(&shares.polling), others(&shares.background)), (1, 0));
            }
            assert_eq!(shares.polling.len(), polling);
        }
    }

    #[test]
    fn shares_of_random_machines_are_disjoint_and_complete() {
        let mut random = base::Random::new(7);
        for _ in 0..2_000 {
            let threads = 1 + random.below(4) as usize;
            let mut cores = machine(1 + random.below(64) as usize, threads);
            // Some processors are not this process'.
            for core in &mut cores {
                core.retain(|_| random.below(8) > 0);
            }
            cores.retain(|core| !core.is_empty());
            let count: usize = cores.iter().map(Vec::len).sum();
            let asked = lone(random.below(9) as usize, random.below(4) as usize);
            let Some(shares) = divide(&cores, asked) else {
                assert!(count < MIN_PROCESSORS);
                continue;
            };
            let [serving, background, polling, driver] = counts(&shares);
            assert!(serving >= 2 && background >= 1, "{cores:?}: {shares:?}");
            assert!(polling <= asked.polling && driver <= asked.driver && serving >= background);
            assert_eq!(shares.set_background_apart(), count >= MIN_TO_SET_ASIDE);
            if count < MIN_TO_SET_ASIDE {
                assert_eq!((serving, polling, driver), (count, 0, 0));
                continue;
            }
            let Shares { serving, background, polling, driver } = &shares;
            let mut all = [&serving[..], background, polling, driver].concat();
            all.sort_unstable();
            let mut expected = cores.concat();
            expected.sort_unstable();
            assert_eq!(all, expected, "each processor once");
            let has = |core: &[usize], share: &[usize]| core.iter().any(|n| share.contains(n));
            let split = cores.iter().find(|core| has(core, serving) && has(core, background));
            assert_eq!(split, None, "{shares:?}");
        }
    }

    #[test]
    fn processors_of_a_core_are_found_by_what_the_system_says() {
        let core_of = |number: usize| match number {
            9 => None,
            _ => Some(format!("{},{}", number % 4, number % 4 + 4)),
        };
        let cores = by_core(&[0, 1, 3, 4, 5, 9], core_of);
        assert_eq!(cores, [vec![0, 4], vec![1, 5], vec![3], vec![9]]);
        let own = processors();
        assert!(own.len() <= std::thread::available_parallelism().map_or(1, usize::from));
    }

    /// The only test that starts a placement: it holds for the whole process.
    #[test]
    fn placed_threads_run_where_they_should() {
        start(lone(2, 1));
        let on_thread = |work: fn() -> Vec<usize>| std::thread::spawn(work).join().unwrap();
        let Some(placement) = placement() else {
            assert!(processors().len() < MIN_PROCESSORS, "nothing to divide");
            assert!(enter_alone(LoneThread::Polling).is_none());
            return;
        };
        let seen = on_thread(|| {
            enter(ThreadRole::Background);
            assert!(is_in_background());
            processors()
        });
        assert_eq!(sorted(seen), placement.shares.background);
        let seen = on_thread(|| {
            let _own = enter_alone(LoneThread::Polling);
            processors()
        });
        match placement.shares.polling.len() {
            0 => assert!(seen.len() >= MIN_PROCESSORS),
            _ => assert!(seen.len() == 1 && placement.shares.polling.contains(&seen[0])),
        }
        let shares = &placement.shares;
        assert_eq!(
            placement.free().each_ref().map(Vec::len),
            [shares.polling.len(), shares.driver.len()]
        );
        let seen = on_thread(|| {
            enter(ThreadRole::Background);
            leave();
            processors()
        });
        assert_eq!(sorted(seen), sorted(placement.all.clone()));
    }

    fn sorted(mut numbers: Vec<usize>) -> Vec<usize> {
        numbers.sort_unstable();
        numbers
    }
}
