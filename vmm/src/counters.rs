//! Counters of virtual CPUs and devices: the threads that do the work add, the API reads. They
//! only grow, and nothing is decided by them.

use std::sync::{
    Arc, Mutex, PoisonError,
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
    /// Interrupts raised.
    pub interrupts: Counter,
}

/// Devices that count, by name. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    devices: Arc<Mutex<Vec<Named>>>,
}

#[derive(Debug)]
struct Named {
    name: String,
    activity: Arc<Activity>,
}

impl Registry {
    /// Adds a device of `kind`, named by kind and order, as `blk0`.
    pub fn device(&self, kind: &str) -> Arc<Activity> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let digits = |name: &str| {
            name.strip_prefix(kind).is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
        };
        let order = devices.iter().filter(|device| digits(&device.name)).count();
        let activity = Arc::new(Activity::default());
        let name = format!("{kind}{order}");
        devices.push(Named { name, activity: Arc::clone(&activity) });
        activity
    }

    /// Returns all numbers as they are now.
    pub fn read(&self) -> Vec<DeviceCounters> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |Named { name, activity }: &Named| DeviceCounters {
            name: name.clone(),
            requests: activity.requests.get(),
            read_bytes: activity.read_bytes.get(),
            written_bytes: activity.written_bytes.get(),
            errors: activity.errors.get(),
            interrupts: activity.interrupts.get(),
        };
        devices.iter().map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_kind_and_order() {
        let registry = Registry::default();
        registry.device("blk").requests.add(3);
        registry.device("rng").errors.add(1);
        registry.clone().device("blk").read_bytes.add(512);
        let read = registry.read();
        let names: Vec<_> = read.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["blk0", "rng0", "blk1"]);
        assert_eq!((read[0].requests, read[1].errors, read[2].read_bytes), (3, 1, 512));
    }
}
