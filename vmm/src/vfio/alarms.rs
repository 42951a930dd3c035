//! What the host's kernel says of passed-through devices besides their interrupts: that it wants one back, because it
//! was taken out or another driver is to have it, and that one has reported an error that it cannot get over.
//! Source: Linux include/uapi/linux/vfio.h, `VFIO_PCI_REQ_IRQ_INDEX` and `VFIO_PCI_ERR_IRQ_INDEX`;
//! drivers/vfio/pci/vfio_pci_core.c, `vfio_pci_core_request` and `vfio_pci_core_aer_err_detected`.
//!
//! The kernel waits for what it wants back, and keeps all of the host's hot-plug waiting with it.

use std::{
    io,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::event::{PollFd, PollFlags};
use types::node::Bdf;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::Device;
use crate::sys::io::borrow_eventfd;

/// What the kernel says of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// It wants the device back, and waits.
    Wanted,
    /// The device has reported an error after which it does not work as it did.
    Failed,
}

const ALL: [Alarm; 2] = [Alarm::Wanted, Alarm::Failed];

/// Since when the machine has a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// Since it started.
    Start,
    /// It was attached later.
    Later,
}

/// What the kernel said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// Of which device.
    pub device: Bdf,
    /// Since when that is here.
    pub since: Since,
    /// What.
    pub alarm: Alarm,
}

/// The devices that are listened to. Clones share them.
#[derive(Clone)]
pub struct Alarms(Arc<Shared>);

struct Shared {
    devices: Mutex<Vec<Weak<Ears>>>,
    /// Signalled when there are others to listen to.
    changed: EventFd,
}

/// What a device's alarms ring.
struct Ears {
    address: Bdf,
    since: Since,
    events: [EventFd; 2],
    /// It was told that the device failed: a guest may have it fail without end.
    failed: AtomicBool,
    /// Nobody listens any more.
    gone: AtomicBool,
}

impl Ears {
    fn is_news(&self, alarm: Alarm) -> bool {
        let gone = self.gone.load(Ordering::Acquire);
        !gone && (alarm == Alarm::Wanted || !self.failed.swap(true, Ordering::Relaxed))
    }
}

/// A device that is listened to until this is dropped.
pub struct Watch {
    ears: Arc<Ears>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Somebody who waits has a hand on them.
        self.ears.gone.store(true, Ordering::Release);
    }
}

impl Alarms {
    /// Returns a place where nobody is listened to.
    pub fn new() -> io::Result<Self> {
        let changed = EventFd::new(EFD_NONBLOCK)?;
        Ok(Self(Arc::new(Shared { devices: Mutex::default(), changed })))
    }

    /// Listens to `device`, which is at `address`.
    pub fn watch(&self, address: Bdf, since: Since, device: &dyn Device) -> io::Result<Watch> {
        let event = || EventFd::new(EFD_NONBLOCK);
        let ears = Arc::new(Ears {
            address,
            since,
            events: [event()?, event()?],
            failed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        });
        for (alarm, event) in ALL.into_iter().zip(&ears.events) {
            let set = device.set_alarm(alarm, borrow_eventfd(event));
            // Only PCI Express has error reports that the kernel passes on.
            if alarm == Alarm::Wanted {
                set?;
            }
        }
        self.devices().push(Arc::downgrade(&ears));
        // A full counter is a signal that is pending already.
        let _ = self.0.changed.write(1);
        Ok(Watch { ears })
    }

    /// Waits until the kernel says something, or there are others to listen to; returns what it said. That a device
    /// failed is said once.
    pub fn wait(&self) -> io::Result<Vec<Said>> {
        let ears: Vec<Arc<Ears>> = {
            let mut devices = self.devices();
            devices.retain(|ears| ears.strong_count() > 0);
            devices.iter().filter_map(Weak::upgrade).collect()
        };
        let events = ears.iter().flat_map(|ears| &ears.events).chain([&self.0.changed]);
        let fds: Vec<_> = events.map(borrow_eventfd).collect();
        let mut polled: Vec<PollFd<'_>> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
        match rustix::event::poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let _ = self.0.changed.read();
        let rung = ears.iter().flat_map(|ears| {
            let both = ALL.into_iter().zip(&ears.events);
            both.filter(|(alarm, event)| event.read().is_ok() && ears.is_news(*alarm))
                .map(|(alarm, _)| Said { device: ears.address, since: ears.since, alarm })
        });
        Ok(rung.collect())
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Weak<Ears>>> {
        self.0.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fake::FakeDevice, *};

    #[test]
    fn what_the_kernel_says_is_passed_on_once_and_only_of_devices_that_are_there() {
        let alarms = Alarms::new().expect("an eventfd");
        let [first, second] =
            ["0000:01:00.0", "0000:02:00.0"].map(|text| text.parse::<Bdf>().expect("an address"));
        let (one, two) = (FakeDevice::nvme(), FakeDevice::nvme());
        let _watch = alarms.watch(first, Since::Start, &one).expect("watched");
        let gone = alarms.watch(second, Since::Later, &two).expect("watched");
        assert_eq!(alarms.wait().expect("polled"), [], "there are others to listen to");
        one.ring(Alarm::Failed);
        two.ring(Alarm::Wanted);
        let said = alarms.wait().expect("polled");
        let of_first = |alarm| Said { device: first, since: Since::Start, alarm };
        let of_second = Said { device: second, since: Since::Later, alarm: Alarm::Wanted };
        assert_eq!(said, [of_first(Alarm::Failed), of_second]);
        let ears = Arc::clone(&gone.ears);
        assert!(ears.is_news(Alarm::Wanted));
        drop(gone);
        assert!(!ears.is_news(Alarm::Wanted), "somebody who waits has a hand on them");
        drop(ears);
        two.ring(Alarm::Wanted);
        one.ring(Alarm::Failed);
        one.ring(Alarm::Wanted);
        assert_eq!(alarms.wait().expect("polled"), [of_first(Alarm::Wanted)]);
    }
}
