//! Counters of virtual CPUs and devices: the threads that do the work add, the API reads. They
//! only grow, and nothing is decided by them.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicU64, Ordering},
};

use types::operations::{DeviceCounters, ExitCounters};

/// One number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the sum of what was added.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often a virtual CPU left the guest, by reason.
#[derive(Debug, Default)]
pub struct Exits {
    /// Reads of ports.
    pub port_reads: Counter,
    /// Writes to ports.
    pub port_writes: Counter,
    /// Reads of memory that is no RAM.
    pub memory_reads: Counter,
    /// Writes to memory that is no RAM.
    pub memory_writes: Counter,
    /// Signals of other threads.
    pub kicks: Counter,
    /// Locks of the memory bus; such an exit counts under its reason too.
    pub bus_locks: Counter,
    /// Everything else.
    pub others: Counter,
}

impl Exits {
    /// Returns the numbers as they are now.
    pub fn read(&self) -> ExitCounters {
        ExitCounters {
            port_reads: self.port_reads.get(),
            port_writes: self.port_writes.get(),
            memory_reads: self.memory_reads.get(),
            memory_writes: self.memory_writes.get(),
            kicks: self.kicks.get(),
            bus_locks: self.bus_locks.get(),
            others: self.others.get(),
        }
    }
}

/// What one device did.
#[derive(Debug, Default)]
pub struct Activity {
    /// Requests answered.
    pub requests: Counter,
    /// Bytes given to the guest.
    pub read_bytes: Counter,
    /// Bytes taken from the guest.
    pub written_bytes: Counter,
    /// Requests that failed.
    pub errors: Counter,
    /// Those of them that failed since what the host keeps the data on did.
    pub media_errors: Counter,
    /// Interrupts raised.
    pub interrupts: Counter,
}

/// Devices that count, by name, as long as they are there. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    devices: Arc<Mutex<Vec<Named>>>,
}

#[derive(Debug)]
struct Named {
    name: String,
    activity: Weak<Activity>,
}

impl Registry {
    /// Adds a device of `kind`, named by kind and the first number that none has, as `blk0`. It is told of
    /// until the last holder of its numbers lets go: devices come and go as often as a renter likes.
    pub fn device(&self, kind: &str) -> Arc<Activity> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.activity.strong_count() > 0);
        let is_free = |name: &String| devices.iter().all(|device| device.name != *name);
        let mut names = (0..=devices.len()).map(|number| format!("{kind}{number}"));
        let name = names.find(is_free).unwrap_or_else(|| unreachable!("one more than there are"));
        let activity = Arc::new(Activity::default());
        devices.push(Named { name, activity: Arc::downgrade(&activity) });
        activity
    }

    /// Returns all numbers as they are now.
    pub fn read(&self) -> Vec<DeviceCounters> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |Named { name, activity }: &Named| {
            let activity = activity.upgrade()?;
            Some(DeviceCounters {
                name: name.clone(),
                requests: activity.requests.get(),
                read_bytes: activity.read_bytes.get(),
                written_bytes: activity.written_bytes.get(),
                errors: activity.errors.get(),
                media_errors: activity.media_errors.get(),
                interrupts: activity.interrupts.get(),
            })
        };
        devices.iter().filter_map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_kind_and_order() {
        let registry = Registry::default();
        let there = ["blk", "rng", "blk"].map(|kind| registry.clone().device(kind));
        there[0].requests.add(3);
        there[1].errors.add(1);
        there[2].read_bytes.add(512);
        let read = registry.read();
        let names: Vec<_> = read.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["blk0", "rng0", "blk1"]);
        assert_eq!((read[0].requests, read[1].errors, read[2].read_bytes), (3, 1, 512));
    }

    #[test]
    fn one_that_went_is_not_told_of_and_its_name_is_free() {
        let registry = Registry::default();
        let names =
            || registry.read().into_iter().map(|device| device.name).collect::<Vec<String>>();
        let (first, second) = (registry.device("blk"), registry.device("blk"));
        first.requests.add(1);
        drop(first);
        assert_eq!(names(), ["blk1"]);
        for _ in 0..100 {
            let next = registry.device("blk");
            assert_eq!(names(), ["blk1", "blk0"]);
            assert_eq!(next.requests.get(), 0);
        }
        assert_eq!(registry.devices.lock().expect("one thread").len(), 2);
        drop(second);
        assert_eq!(names(), Vec::<String>::new());
    }
}
