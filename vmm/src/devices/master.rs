//! Bus Master Enable of a function whose device runs on threads of ours: when they have to leave guest
//! memory alone. A kernel that starts another one in its place takes it from every function, and what a
//! device wrote after that would be written over the new kernel.
//! Source: PCI Local Bus 3.0 §6.2.2, command register, bit 2; NVMe 1.4 §2.1.2.
//!
//! Only taking it from a running device counts. Some drivers never set it, and their devices work.
//! What moves data by itself, as a network card does, stays held until it is reset: Linux' virtio_pci
//! gives bus mastering back before it resets what the kernel before left running. QEMU's devices do so
//! too (hw/virtio/virtio-pci.c, `virtio_write_config`).
//! Holds no thread: the function holds its device and lets it go on.

use crate::pci::config::COMMAND_MASTER;

/// Whether the guest has taken bus mastering from the running device.
#[derive(Debug)]
pub struct Mastery {
    taken: bool,
    until: Until,
}

/// What ends the wait of a device from which bus mastering was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// It is given back, or the device is reset.
    Back,
    /// The device is reset.
    Reset,
}

/// Whether the device serves a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Running {
    /// It does.
    Yes,
    /// It was not started, or is being reset.
    No,
}

/// What the function has to do with its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Make it leave guest memory alone, as soon as what is under way is done.
    Hold,
    /// Let it go on.
    GoOn,
}

impl Mastery {
    /// Begins with nothing taken.
    pub fn new(until: Until) -> Self {
        Self { taken: false, until }
    }

    /// The guest wrote the command register, which was `before` and is `after` now.
    pub fn written(&mut self, before: u16, after: u16, running: Running) -> Effect {
        let has = after & COMMAND_MASTER != 0;
        if self.taken && has {
            match self.until {
                Until::Back => self.reset(),
                Until::Reset => Effect::None,
            }
        } else if before & COMMAND_MASTER != 0 && !has && running == Running::Yes {
            self.taken = true;
            Effect::Hold
        } else {
            Effect::None
        }
    }

    /// The device was told to forget its driver: nothing is left to keep it from.
    pub fn reset(&mut self) -> Effect {
        if std::mem::take(&mut self.taken) { Effect::GoOn } else { Effect::None }
    }

    /// Returns whether the device is held on account of this, whoever else holds it and lets it go.
    pub fn is_taken(&self) -> bool {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: u16 = COMMAND_MASTER | 2;
    const OFF: u16 = 2;

    /// Command before and after, whether the device runs; what follows.
    #[test]
    fn only_what_is_taken_from_a_running_device_is_held() {
        let table = [
            (ON, OFF, Running::Yes, Effect::Hold),
            (ON, OFF, Running::No, Effect::None),
            (OFF, OFF, Running::Yes, Effect::None),
            (OFF, ON, Running::Yes, Effect::None),
            (ON, ON, Running::Yes, Effect::None),
        ];
        let done = table.map(|(before, after, running, _)| {
            (before, after, running, Mastery::new(Until::Back).written(before, after, running))
        });
        assert_eq!(done, table);
    }

    #[test]
    fn giving_it_back_and_resetting_let_go_once() {
        let mut mastery = Mastery::new(Until::Back);
        assert_eq!(mastery.written(ON, OFF, Running::Yes), Effect::Hold);
        assert!(mastery.is_taken());
        assert_eq!(mastery.written(OFF, OFF, Running::Yes), Effect::None);
        assert_eq!(mastery.written(OFF, ON, Running::Yes), Effect::GoOn);
        assert!(!mastery.is_taken());
        assert_eq!(mastery.reset(), Effect::None);
        mastery.written(ON, OFF, Running::Yes);
        assert_eq!([mastery.reset(), mastery.reset()], [Effect::GoOn, Effect::None]);
        assert_eq!(mastery.written(OFF, ON, Running::Yes), Effect::None);
    }

    #[test]
    fn what_waits_for_a_reset_does_not_go_on_without() {
        let mut mastery = Mastery::new(Until::Reset);
        for _ in 0..2 {
            assert_eq!(mastery.written(ON, OFF, Running::Yes), Effect::Hold);
            assert_eq!(mastery.written(OFF, ON, Running::Yes), Effect::None);
            assert!(mastery.is_taken());
        }
        assert_eq!([mastery.reset(), mastery.reset()], [Effect::GoOn, Effect::None]);
    }
}
