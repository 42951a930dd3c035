//! Watchdogs: the last word when everything else hangs.
//!
//! Every watchdog that the kernel knows is armed, hardware and software alike: whichever works
//! resets the machine. They are fed from init's loop and from nowhere else, so they bite when
//! init no longer goes round.

use std::{
    fs::{self, File},
    io::Write,
    os::fd::AsFd,
    time::Duration,
};

use crate::{events::Event, sys};

/// Seconds without feeding until the machine is reset: longer than any shutdown step and than
/// the worst pause of a busy host, short enough that a hung node is back within two minutes.
pub const TIMEOUT_S: i32 = 60;

/// How often init feeds them: several chances per timeout.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Most watchdogs that are armed.
const MAX_WATCHDOGS: usize = 8;

/// The armed watchdogs; none at first.
#[derive(Debug, Default)]
pub struct Watchdogs {
    devices: Vec<File>,
}

impl Watchdogs {
    /// Arms every watchdog in /dev and says which.
    pub fn arm() -> (Self, Vec<Event>) {
        let mut devices = Vec::new();
        let mut events = Vec::new();
        for number in 0..MAX_WATCHDOGS {
            let Ok(device) = File::options().write(true).open(format!("/dev/watchdog{number}"))
            else {
                continue;
            };
            let timeout_s = sys::watchdog::set_timeout(device.as_fd(), TIMEOUT_S).unwrap_or(0);
            let identity = format!("/sys/class/watchdog/watchdog{number}/identity");
            let name = fs::read_to_string(identity).unwrap_or_else(|_| "unknown".to_owned());
            events.push(Event::WatchdogArmed { device: name.trim().to_owned(), timeout_s });
            devices.push(device);
        }
        if devices.is_empty() {
            events.push(Event::WatchdogAbsent);
        }
        (Self { devices }, events)
    }

    /// Gives every watchdog another [`TIMEOUT_S`].
    pub fn feed(&mut self) {
        for device in &mut self.devices {
            // A watchdog that cannot be fed resets the machine, which is the right answer.
            let _ = device.write_all(b"k");
        }
    }
}
