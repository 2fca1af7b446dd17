//! In-flight counts that heal: this thread's lane, and those of threads that died.

use std::rc::Rc;

use hashbrown::HashMap;

use super::Router;
use super::ticket::InFlight;
use crate::host::{Host, HostError, MetricId};
use crate::lanes::{self, Lane, Presence};
use crate::metric::{ErrorKind, Metric};
use crate::pool::{Pool, Replica};

/// The replicas that have this one's statistics: itself, and others where names have run out.
fn sharing<'p>(pool: &'p Pool, replica: &'p Replica) -> impl Iterator<Item = &'p Rc<Replica>> {
    pool.registry.known().filter(|other| other.label == replica.label)
}

/// What this thread has in flight at all of them.
fn own_by_name(pool: &Pool, replica: &Replica) -> u64 {
    sharing(pool, replica).map(|other| u64::from(other.own.get())).sum()
}

impl<H: Host> Router<H> {
    /// Reserves a request in flight at a replica.
    pub(super) fn reserve(&self, pool: &Pool, replica: &Rc<Replica>) -> Result<InFlight<H>, HostError> {
        if replica.lane.get().is_none() {
            self.enter_lane(pool, replica)?;
        }
        InFlight::reserve(&self.host, replica)
    }

    /// Takes a lane for this thread, if it has none.
    pub(super) fn take_lane(&self) -> Result<(), HostError> {
        if self.lane.get().is_none() && !self.lanes_are_out.get() {
            self.lane.set(Lane::take(&self.host, self.pool_list)?);
            self.lanes_are_out.set(self.lane.get().is_none());
        }
        Ok(())
    }

    /// Gives a replica, and those that share its name, the gauge of this thread's lane, with what this thread already has in flight there.
    fn enter_lane(&self, pool: &Pool, replica: &Replica) -> Result<(), HostError> {
        self.take_lane()?;
        // Without a free lane a trap leaks, and nothing else.
        let Some(lane) = self.lane.get() else { return Ok(()) };
        let metric = Metric::LaneInFlight { lane: lane.number, pool: &pool.policy.cluster, replica: &replica.label };
        let gauge = self.host.define(&metric)?;
        // Set, not added: the lane's last thread may have left something.
        self.host.set(gauge, own_by_name(pool, replica))?;
        sharing(pool, replica).for_each(|sharing| sharing.lane.set(Some(gauge)));
        Ok(())
    }

    /// Signs this thread in and settles one that has died. Call it on every tick.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn heal(&mut self) -> Result<(), HostError> {
        self.lanes_are_out.set(false);
        if let Some(lane) = self.lane.get()
            && lane.sign_in(&self.host)? == Presence::Gone
        {
            self.come_back()?;
        }
        if let Some(dead) = lanes::take_dead(&self.host, self.pool_list)? {
            // It may have sent requests to replicas this thread has not heard of yet.
            self.refreshed_pools().map(drop)?;
            let leaked = self.settle(dead)?;
            self.settle_places(dead);
            lanes::free(&self.host, dead)?;
            if leaked > 0 {
                self.count_error(ErrorKind::Leak, leaked);
            }
        }
        Ok(())
    }

    /// Another thread took this one for dead and took what its lane held off the totals: puts it back, and takes a new lane.
    fn come_back(&self) -> Result<(), HostError> {
        self.lane.set(None);
        for pool in self.pools.values() {
            // Once for each name, whoever shares it.
            let lost: HashMap<&str, (&Replica, MetricId)> = pool
                .registry
                .known()
                .filter_map(|replica| Some((replica.label.as_str(), (&**replica, replica.lane.take()?))))
                .collect();
            for (replica, lost) in lost.into_values() {
                // The lane was set to zero then; what it shows now is what has begun and ended since.
                let since = self.host.value(lost)?.cast_signed();
                // Its next thread must not be taken to have done this.
                self.host.add(lost, since.saturating_neg())?;
                self.host.add(replica.in_flight, own_by_name(pool, replica).cast_signed().saturating_sub(since))?;
                self.enter_lane(pool, replica)?;
            }
        }
        Ok(())
    }

    /// Takes what a dead thread had in flight off the totals; says how much that was.
    pub(super) fn settle(&self, dead: usize) -> Result<u64, HostError> {
        let mut leaked = 0_u64;
        for pool in self.pools.values() {
            for replica in pool.registry.known() {
                let metric = Metric::LaneInFlight { lane: dead, pool: &pool.policy.cluster, replica: &replica.label };
                let gauge = self.host.define(&metric)?;
                let in_lane = self.host.value(gauge)?.cast_signed();
                if in_lane != 0 {
                    self.host.add(gauge, in_lane.saturating_neg())?;
                    self.host.add(replica.in_flight, in_lane.saturating_neg())?;
                    leaked = leaked.saturating_add(in_lane.unsigned_abs());
                }
            }
        }
        Ok(leaked)
    }
}
