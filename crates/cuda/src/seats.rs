//! Orders to leave: every run has a seat, a word on the device that grows with every order to it, and beside it the number of the run.
//!
//! A best-effort launch leaves once the order has passed the number. There is no
//! reset, so an order can neither be lost nor meet a launch that came after it. Orders to several runs go to the device in
//! one call. The thread that looks after best effort makes it, since whoever gives an order is about to launch what it is
//! given for; unless that thread is late, and the launch gets there first.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;

/// A number that no order passes: a launch with it runs to its end.
const NEVER: u32 = u32::MAX;

/// Bytes from one seat to the next: watches copy the sixteen it begins, and no two share a sector.
const PITCH: u64 = 32;

/// Where a seat's number is.
const NUMBER_AT: u64 = 4;

/// Seats that are made at once.
const SLAB: u64 = 1024;

/// All seats of a device.
pub(crate) struct Seats {
    stream: Arc<Stream>,
    words: Mutex<Words>,
    /// Orders that are given and not yet sent.
    orders: Mutex<GivenOrders>,
    /// Whether there are any to send, for a look without the lock.
    given: AtomicBool,
    /// Whether a thread looks for them all the time.
    looked_after: bool,
}

struct Words {
    slabs: Vec<DeviceBuffer>,
    /// Seats nobody uses.
    free: Vec<FreeSeat>,
}

/// A seat nobody uses.
#[derive(Clone, Copy)]
struct FreeSeat {
    address: u64,
    /// What its order stands at.
    order: u32,
    /// What the device has for the number of its run.
    armed: u32,
}

#[derive(Default)]
struct GivenOrders {
    /// Who has more to give before they are sent.
    givers: usize,
    words: Vec<(u64, u32)>,
}

/// One run's word.
pub(crate) struct Seat {
    seats: Arc<Seats>,
    address: u64,
    /// What the word is or is about to be; written before the device is told, so a launch found complete while this is still
    /// the number it was launched with cannot have left early.
    number: AtomicU32,
    /// The number of its run as the device has it, or will when what is queued is done.
    armed: AtomicU32,
}

impl Seats {
    /// Seats whose words are written through `stream`, which nothing else uses. Where a thread looks after them all the time,
    /// orders are left to it.
    pub(crate) fn new(stream: Arc<Stream>, looked_after: bool) -> Result<Seats, CudaError> {
        let mut words = Words { slabs: Vec::new(), free: Vec::new() };
        let first = words.grow(&stream)?;
        // SAFETY: the word is in the slab just made, which is dropped after the stream's work.
        unsafe { stream.write_word(first + NUMBER_AT, NEVER) }?;
        stream.synchronize()?;
        // The first of all seats stands for those that are never told.
        words.free.retain(|free| free.address != first);
        let (words, orders) = (Mutex::new(words), Mutex::default());
        Ok(Seats { stream, words, orders, given: AtomicBool::new(false), looked_after })
    }

    /// The seat of work that is never told to leave.
    pub(crate) fn never_address(&self) -> u64 {
        self.words().slabs[0].address()
    }

    /// A seat nobody has.
    pub(crate) fn take(self: &Arc<Seats>) -> Result<Seat, CudaError> {
        let mut words = self.words();
        if words.free.is_empty() {
            words.grow(&self.stream)?;
        }
        let free = words.free.pop().ok_or(CudaError::Misuse("a slab without seats was made"))?;
        let (number, armed) = (AtomicU32::new(free.order), AtomicU32::new(free.armed));
        Ok(Seat { seats: self.clone(), address: free.address, number, armed })
    }

    /// Gives all orders that `give` gives at one go.
    pub(crate) fn together(&self, give: impl FnOnce()) {
        self.orders().givers += 1;
        give();
        let mut orders = self.orders();
        orders.givers -= 1;
        self.leave_to_send(&orders);
        drop(orders);
        if !self.looked_after {
            self.send();
        }
    }

    fn tell(&self, address: u64, number: u32) {
        let mut orders = self.orders();
        orders.words.push((address, number));
        self.leave_to_send(&orders);
        drop(orders);
        if !self.looked_after {
            self.send();
        }
    }

    fn leave_to_send(&self, orders: &GivenOrders) {
        if orders.givers == 0 && !orders.words.is_empty() {
            self.given.store(true, Ordering::Release);
        }
    }

    /// Sends what is given and not yet sent.
    pub(crate) fn send(&self) {
        if !self.given.load(Ordering::Acquire) {
            return;
        }
        let mut orders = self.orders();
        self.given.store(false, Ordering::Release);
        if orders.words.is_empty() {
            return;
        }
        // SAFETY: words live as long as `self`, and dropping it waits for the stream's work.
        if let Err(err) = unsafe { self.stream.write_words(&orders.words) } {
            tracing::error!("an order to leave did not reach the device: {err}");
        }
        orders.words.clear();
    }

    fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn orders(&self) -> MutexGuard<'_, GivenOrders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Words {
    /// Makes more words; the address of the first.
    fn grow(&mut self, stream: &Arc<Stream>) -> Result<u64, CudaError> {
        let slab = DeviceBuffer::fixed(stream, SLAB * PITCH)?;
        let first = slab.address();
        let seat = |index| FreeSeat { address: first + index * PITCH, order: 0, armed: 0 };
        self.free.extend((0..SLAB).rev().map(seat));
        self.slabs.push(slab);
        Ok(first)
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl Seat {
    /// Where it is on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// What launches from now on carry.
    pub(crate) fn number(&self) -> u32 {
        self.number.load(Ordering::Acquire)
    }

    /// Lets what is queued on `stream` behind this carry `number`; nothing of another run that has this seat is queued any
    /// more. Costs nothing while nobody is told to leave.
    pub(crate) fn arm(&self, number: u32, stream: &Stream) -> Result<(), CudaError> {
        if self.armed.load(Ordering::Acquire) == number {
            return Ok(());
        }
        // SAFETY: a word of a slab, which lives as long as `seats`.
        unsafe { stream.write_word(self.address + NUMBER_AT, number) }?;
        self.armed.store(number, Ordering::Release);
        Ok(())
    }

    /// Makes what was launched so far leave.
    fn raise(&self) {
        let next = following(self.number());
        self.number.store(next, Ordering::Release);
        self.seats.tell(self.address, next);
    }
}

/// The last number is never reached: it would take years of orders, and work that cannot be told to leave is safer than work
/// that leaves at once for ever.
fn following(number: u32) -> u32 {
    number.saturating_add(1).min(NEVER - 1)
}

impl Drop for Seat {
    fn drop(&mut self) {
        let (order, armed) = (self.number(), self.armed.load(Ordering::Acquire));
        self.seats.words().free.push(FreeSeat { address: self.address, order, armed });
    }
}

/// What a queue knows of orders to leave. Work gets a ticket when it enters the queue.
#[derive(Default)]
pub(crate) struct Orders {
    state: Mutex<OrderState>,
}

#[derive(Default)]
struct OrderState {
    /// The last ticket that was given out.
    entered: u64,
    /// Work with a ticket up to this one leaves.
    ordered: u64,
    /// The seat of the work that runs, with its ticket.
    running: Option<(u64, Arc<Seat>)>,
    /// Work is held to the partition.
    confined: bool,
    /// The work that runs is there.
    in_partition: bool,
}

/// What work is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seating {
    /// The number its launches carry.
    pub(crate) number: u32,
    /// Whether they go to the partition.
    pub(crate) in_partition: bool,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, OrderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket for work that enters the queue.
    pub(crate) fn enter(&self) -> u64 {
        let mut state = self.lock();
        state.entered += 1;
        state.entered
    }

    /// Makes everything that has entered leave.
    pub(crate) fn order(&self) {
        let mut state = self.lock();
        // Work that was told already is not told again.
        let news = state.running.as_ref().is_some_and(|(ticket, _)| *ticket > state.ordered);
        state.ordered = state.entered;
        if let Some((_, seat)) = state.running.as_ref().filter(|_| news) {
            seat.raise();
        }
    }

    /// Whether work with this ticket was told to leave.
    pub(crate) fn told(&self, ticket: u64) -> bool {
        ticket <= self.lock().ordered
    }

    /// Work takes its seat, or goes on from it after it was sent to another place; `None` when it was told to leave.
    pub(crate) fn sit(&self, ticket: u64, seat: &Arc<Seat>) -> Option<Seating> {
        let mut state = self.lock();
        if ticket <= state.ordered {
            return None;
        }
        state.running = Some((ticket, seat.clone()));
        state.in_partition = state.confined;
        Some(Seating { number: seat.number(), in_partition: state.in_partition })
    }

    /// The work that ran has ended.
    pub(crate) fn stand(&self) {
        self.lock().running = None;
    }

    /// Holds work to the partition, or no more. What runs elsewhere is made to leave, and finds when it has that it was not told
    /// to go; what is in the partition comes out when it next launches, since nobody waits for that.
    pub(crate) fn confine(&self, confined: bool) {
        let mut state = self.lock();
        state.confined = confined;
        let elsewhere = confined && !state.in_partition;
        let runs = |(ticket, _): &&(u64, Arc<Seat>)| elsewhere && *ticket > state.ordered;
        if let Some((_, seat)) = state.running.as_ref().filter(runs) {
            seat.raise();
        }
    }

    /// Whether work is held to the partition.
    pub(crate) fn is_confined(&self) -> bool {
        self.lock().confined
    }

    /// The work that runs has nothing on the device any more and launches from here on where it is held to; whether that is
    /// the partition.
    pub(crate) fn move_over(&self) -> bool {
        let mut state = self.lock();
        state.in_partition = state.confined;
        state.in_partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_concerns_what_has_entered() {
        let orders = Orders::default();
        orders.order();
        let first = orders.enter();
        assert!(!orders.told(first), "it came after the order");
        let second = orders.enter();
        orders.order();
        let third = orders.enter();
        assert_eq!([first, second, third].map(|ticket| orders.told(ticket)), [true, true, false]);
    }

    #[test]
    fn numbers_stop_before_the_one_that_is_never_passed() {
        assert_eq!(following(0), 1);
        assert_eq!(following(NEVER - 1), NEVER - 1);
    }
}
