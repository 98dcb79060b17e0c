//! Best effort: few launches in flight, out of the way within microseconds.

use std::sync::Arc;

use device::{CompletionSink, DeviceError, Queue, QueueOptions, Segment};

use super::dispatcher::{Duties, Waker};
use super::lane::{Inbox, Lane};
use crate::hub::Hub;

/// A queue of low priority.
pub(crate) struct BestEffortQueue {
    inbox: Arc<Inbox>,
    waker: Waker,
}

impl BestEffortQueue {
    pub(crate) fn open(
        hub: &Arc<Hub>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<BestEffortQueue, DeviceError> {
        let inbox = Arc::new(Inbox::new(options.capacity.max(1)));
        let lane = Lane::new(hub.clone(), options.id, inbox.clone(), sink);
        let lane = lane.map_err(|err| hub.error(err))?;
        let duties = Duties {
            polling: hub.options().polling,
            quiet: hub.quiet.clone(),
            seats: hub.seats.clone(),
        };
        let added = hub.dispatcher.add(lane, duties);
        added.map_err(|err| DeviceError::Faulted {
            device: hub.info.name.clone(),
            reason: format!("cannot start the thread of best effort: {err}"),
        })?;
        Ok(BestEffortQueue { inbox, waker: hub.dispatcher.waker() })
    }
}

impl Queue for BestEffortQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.inbox.put(segment)?;
        self.waker.wake();
        Ok(())
    }

    fn preempt(&self) {
        self.inbox.orders.order();
    }
}

impl Drop for BestEffortQueue {
    fn drop(&mut self) {
        self.inbox.close();
        self.waker.wake();
    }
}
