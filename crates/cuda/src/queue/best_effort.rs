//! Work that leaves, best effort above all: few launches in flight, out of the way within microseconds.

use std::sync::Arc;

use device::{CompletionSink, DeviceError, Queue, QueueOptions, Segment};

use super::dispatcher::{Duties, Waker};
use super::lane::{Inbox, Lane};
use crate::driver::Priority;
use crate::hub::Hub;
use crate::quiet::Quiet;

/// A queue whose work leaves when it is told to.
pub(crate) struct BestEffortQueue {
    inbox: Arc<Inbox>,
    waker: Waker,
    has_partition: bool,
    /// Wanted for launches elsewhere, where this queue's are not among those that others keep quiet for.
    quiet: Option<Arc<Quiet>>,
}

impl BestEffortQueue {
    pub(crate) fn open(
        hub: &Arc<Hub>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<BestEffortQueue, DeviceError> {
        let inbox = Arc::new(Inbox::new(options.capacity.max(1)));
        let priority = if options.high_priority { Priority::High } else { Priority::Low };
        let lane = Lane::new(hub.clone(), options.id, priority, inbox.clone(), sink);
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
        Ok(BestEffortQueue {
            inbox,
            waker: hub.dispatcher.waker(),
            has_partition: hub.partition.is_some() && priority == Priority::Low,
            quiet: (priority == Priority::High).then(|| hub.quiet.clone()),
        })
    }
}

impl Queue for BestEffortQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.inbox.put(segment)?;
        if let Some(quiet) = &self.quiet {
            quiet.end();
        }
        self.waker.wake();
        Ok(())
    }

    fn preempt(&self) {
        self.inbox.orders.order();
    }

    fn confine(&self, confined: bool) {
        if self.has_partition {
            self.inbox.orders.confine(confined);
        }
    }
}

impl Drop for BestEffortQueue {
    fn drop(&mut self) {
        self.inbox.close();
        self.waker.wake();
    }
}
