//! Watchdogs: the last word when everything else hangs.
//!
//! Every watchdog that the kernel knows is armed, hardware and software alike: whichever works
//! resets the machine. They are fed from init's loop and from nowhere else, so they bite when
//! init no longer goes round.
//!
//! A BMC's watchdog is no numbered one: its driver takes `/dev/watchdog`, which is the first numbered one's
//! other name elsewhere, and its calls last as long as the BMC takes, seconds when that restarts. Init's loop
//! only pokes the thread that makes them. Source: the kernel's drivers/char/ipmi/ipmi_watchdog.c and
//! Documentation/watchdog/watchdog-api.rst.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;

use super::kmsg;
use crate::{events::Event, sys};

/// Seconds without feeding until the machine is reset: longer than any shutdown step and than
/// the worst pause of a busy host, short enough that a hung node is back within two minutes.
pub const TIMEOUT_S: i32 = 60;

/// How often init feeds them: several chances per timeout.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Most watchdogs that are armed.
const MAX_WATCHDOGS: usize = 8;

/// The device of a driver that is not the watchdog core's.
const UNNUMBERED: &str = "/dev/watchdog";

/// The armed watchdogs; none at first.
#[derive(Debug, Default)]
pub struct Watchdogs {
    devices: Vec<File>,
    slow: Option<Slow>,
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
        // Busy where it is another name of one of these.
        let unnumbered = File::options().write(true).open(UNNUMBERED).ok();
        let slow = unnumbered.and_then(|device| {
            Slow::start(device)
                .inspect_err(|error| {
                    let text =
                        format!("init: {UNNUMBERED} is not armed, no thread for it: {error}");
                    kmsg::line(kmsg::Level::Error, &text);
                })
                .ok()
        });
        if devices.is_empty() && slow.is_none() {
            events.push(Event::WatchdogAbsent);
        }
        (Self { devices, slow }, events)
    }

    /// Gives every watchdog another [`TIMEOUT_S`]. Waits for none of them.
    pub fn feed(&mut self) {
        for device in &mut self.devices {
            // A watchdog that cannot be fed resets the machine, which is the right answer.
            let _ = device.write_all(b"k");
        }
        if let Some(slow) = &self.slow {
            slow.poke();
        }
    }
}

/// A watchdog whose calls may last, with the thread that makes them.
#[derive(Debug)]
struct Slow {
    pokes: SyncSender<()>,
    /// Open whatever becomes of the thread: the driver starts to count when it is closed.
    _device: Arc<File>,
}

impl Slow {
    /// Arms it by and by: the thread says so when it is done.
    fn start(device: File) -> io::Result<Self> {
        let device = Arc::new(device);
        let (pokes, poked) = sync_channel(1);
        let fed = Arc::clone(&device);
        let slow = Self { pokes, _device: device };
        let attended = thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            // Signals are for the thread that waits for them. At this time nobody sends any.
            let _ = SigSet::all().thread_block();
            attend(&poked, || arm(&fed), || (&*fed).write_all(b"k"));
        });
        if let Err(error) = attended {
            // Never closed, so that it never counts.
            std::mem::forget(slow);
            return Err(error);
        }
        slow.poke();
        Ok(slow)
    }

    /// Has it fed, unless the thread is still busy with the last time.
    fn poke(&self) {
        let _ = self.pokes.try_send(());
    }
}

/// Feeds at each poke, once `arm` worked; until then each poke tries that again.
fn attend(
    poked: &Receiver<()>,
    mut arm: impl FnMut() -> io::Result<()>,
    mut feed: impl FnMut() -> io::Result<()>,
) {
    let mut armed = false;
    while poked.recv().is_ok() {
        armed = armed || arm().is_ok();
        if armed {
            // One that cannot be fed resets the machine, which is the right answer.
            let _ = feed();
        }
    }
}

/// Sets the time, without which the driver's own would be as short as the time between two pokes, and says so.
/// It counts from the first feeding on.
fn arm(device: &File) -> io::Result<()> {
    let timeout_s = sys::watchdog::set_timeout(device.as_fd(), TIMEOUT_S)?;
    let name = sys::watchdog::identity(device.as_fd()).unwrap_or_else(|_| "unknown".to_owned());
    kmsg::event(&Event::WatchdogArmed { device: name, timeout_s });
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::{sync::mpsc::channel, time::Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn one_that_blocks_keeps_nobody_waiting_and_is_fed_again_afterwards() {
        let (pokes, poked) = sync_channel(1);
        let (tell_fed, fed) = channel();
        let (release, released) = channel::<()>();
        let attended = thread::spawn(move || {
            attend(
                &poked,
                || Ok(()),
                || {
                    tell_fed.send(()).unwrap();
                    released.recv().map_err(io::Error::other)
                },
            );
        });
        let folder = tempfile::tempdir().unwrap();
        let device = Arc::new(File::create(folder.path().join("watchdog")).unwrap());
        let slow = Slow { pokes, _device: device };
        slow.poke();
        fed.recv_timeout(PATIENCE).unwrap();
        let begin = Instant::now();
        (0..100).for_each(|_| slow.poke());
        assert!(begin.elapsed() < PATIENCE / 2);
        // All pokes meanwhile are one.
        release.send(()).unwrap();
        fed.recv_timeout(PATIENCE).unwrap();
        drop((slow, release));
        attended.join().unwrap();
        assert!(fed.try_recv().is_err());
    }

    #[test]
    fn one_whose_time_cannot_be_set_is_not_started() {
        let (pokes, poked) = sync_channel(8);
        (0..5).for_each(|_| pokes.try_send(()).unwrap());
        drop(pokes);
        let (mut tries, mut feedings) = (0, 0);
        let arm = || {
            tries += 1;
            if tries < 3 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
        };
        let feed = || {
            feedings += 1;
            Ok(())
        };
        attend(&poked, arm, feed);
        assert_eq!((tries, feedings), (3, 3));
    }
}
