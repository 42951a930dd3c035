//! The serial port that firmware has its own console on, where the kernel has another: a BMC shows one port
//! over the network, and on many servers that is not the first. A thread copies there what the kernel's
//! consoles show, and questions are asked there too. What the kernel says when it dies is not among it:
//! nobody is left to copy that.
//!
//! Source: "Serial Port Console Redirection Table" (Microsoft), revisions 1 to 4; the kernel's
//! Documentation/ABI/testing/{dev-kmsg,sysfs-tty} and Documentation/admin-guide/sysctl/kernel.rst, `printk`.
//!
//! | Offset | Size | Meaning                                                        |
//! |--------|------|----------------------------------------------------------------|
//! | 36     | 1    | interface: 0, 1, 0x12 are UARTs like the 16550                 |
//! | 40     | 1    | space of the address: 0 memory, 1 ports                        |
//! | 44     | 8    | address; 0 when there is no console                            |
//! | 58     | 1    | bits per second: 3 9600, 4 19200, 6 57600, 7 115200, 0 as it is |
//! | 80     | 4    | bits per second in full, from revision 4 on; 0 when not told   |

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    thread,
};

use nix::sys::signal::SigSet;
use rustix::{
    fs::OFlags,
    termios::{ControlModes, InputModes, OptionalActions, tcgetattr, tcsetattr},
};

use super::kmsg;
use crate::{
    events::Event,
    logs::{self, record},
};

/// Where the kernel shows the table.
const TABLE: &str = "sys/firmware/acpi/tables/SPCR";
/// Where it shows its serial ports.
const PORTS: &str = "sys/class/tty";
/// Which consoles it writes to.
pub const ACTIVE: &str = "sys/class/tty/console/active";
/// The first number is the level below which records go to the consoles.
const PRINTK: &str = "/proc/sys/kernel/printk";

/// Speed where firmware does not tell one, in bits per second: that of our own console.
const USUAL_SPEED: u32 = 115_200;

/// Where a UART is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At a port.
    Port(u64),
    /// At an address in memory.
    Memory(u64),
}

/// What the table says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// The UART.
    pub place: Place,
    /// Bits per second; `None` where firmware does not tell.
    pub speed: Option<u32>,
}

/// Reads the table; `None` where it tells of no UART that this kernel drives.
pub fn parse(table: &[u8]) -> Option<Line> {
    let byte = |at: usize| table.get(at).copied();
    let long = |at: usize| Some(u32::from_le_bytes(table.get(at..at + 4)?.try_into().ok()?));
    if table.get(..4)? != b"SPCR" || !matches!(byte(36)?, 0 | 1 | 0x12) {
        return None;
    }
    let address = u64::from_le_bytes(table.get(44..52)?.try_into().ok()?);
    let place = match (byte(40)?, address) {
        (_, 0) => return None,
        (0, address) => Place::Memory(address),
        (1, address) => Place::Port(address),
        _ => return None,
    };
    let coded = match byte(58)? {
        3 => Some(9600),
        4 => Some(19_200),
        6 => Some(57_600),
        7 => Some(115_200),
        _ => None,
    };
    let in_full = (byte(8)? >= 4).then(|| long(80)).flatten().filter(|speed| *speed != 0);
    Some(Line { place, speed: in_full.or(coded) })
}

/// Returns the device file of firmware's port below `root`, and its speed, where it is none of the kernel's
/// consoles.
pub fn beside(root: &Path) -> Option<(PathBuf, u32)> {
    let line = parse(&fs::read(root.join(TABLE)).ok()?)?;
    let active = fs::read_to_string(root.join(ACTIVE)).unwrap_or_default();
    let mut ports = fs::read_dir(root.join(PORTS)).ok()?.flatten();
    let entry = ports.find(|entry| is_at(&entry.path(), line.place))?;
    let name = entry.file_name().into_string().ok()?;
    let taken = active.split_whitespace().any(|console| console == name);
    (!taken).then(|| (root.join("dev").join(name), line.speed.unwrap_or(USUAL_SPEED)))
}

/// Whether a serial port is there, and driven: the kernel lists some that a server does not have, of type 0.
fn is_at(port: &Path, place: Place) -> bool {
    let told = |name| fs::read_to_string(port.join(name)).unwrap_or_default();
    let (name, address) = match place {
        Place::Port(address) => ("port", address),
        Place::Memory(address) => ("iomem_base", address),
    };
    let number = |text: &str| u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok();
    number(&told(name)) == Some(address) && !matches!(told("type").trim(), "" | "0")
}

/// Starts to copy, if firmware has its console on a port of its own. The port stays open, and so as it was
/// set, for whoever asks there.
pub fn start(root: &Path) -> io::Result<()> {
    let Some((path, speed)) = beside(root) else { return Ok(()) };
    let flags = OFlags::NOCTTY.union(OFlags::NONBLOCK).bits().cast_signed();
    let port = File::options().read(true).write(true).custom_flags(flags).open(&path)?;
    set(&port, speed)?;
    let log = File::open(logs::KMSG)?;
    thread::Builder::new().name("serial".to_owned()).spawn(move || {
        // Signals are for the thread that waits for them. At this time nobody sends any.
        let _ = SigSet::all().thread_block();
        // Nobody is there to whom a port that failed would matter.
        let _ = copy(log, port, console_level);
    })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    kmsg::event(&Event::SerialLine { port: name, speed });
    Ok(())
}

/// Eight bits, no handshake: nobody may be at the other end, and what floats there must not stop us.
fn set(port: &File, speed: u32) -> io::Result<()> {
    rustix::fs::fcntl_setfl(port, OFlags::empty())?;
    let mut settings = tcgetattr(port)?;
    settings.input_modes -= InputModes::IXON;
    settings.control_modes -= ControlModes::CRTSCTS;
    settings.control_modes |= ControlModes::CLOCAL | ControlModes::CREAD;
    settings.set_speed(speed)?;
    Ok(tcsetattr(port, OptionalActions::Now, &settings)?)
}

fn console_level() -> u32 {
    let levels = fs::read_to_string(PRINTK).unwrap_or_default();
    let first = levels.split_whitespace().next().and_then(|level| level.parse().ok());
    // The kernel's own default.
    first.unwrap_or(7)
}

/// Copies records as the kernel's consoles show them, until one side fails.
fn copy(mut log: impl Read, mut port: impl Write, level: impl Fn() -> u32) -> io::Result<()> {
    let mut buffer = vec![0; logs::MAX_RECORD];
    loop {
        match log.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => {
                let Some(record) = record::split(&buffer[..length]) else { continue };
                if record.priority & 7 < level() {
                    let (seconds, micros) = (record.micros / 1_000_000, record.micros % 1_000_000);
                    write!(port, "[{seconds:5}.{micros:06}] {}\r\n", record.text)?;
                }
            }
            Err(error) => match error.raw_os_error() {
                // Overwritten before it was read: the next read goes on after the gap.
                Some(libc::EPIPE) => port.write_all(b"(lines are missing here)\r\n")?,
                Some(libc::EINTR) => {}
                _ => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::testing;

    fn table(interface: u8, space: u8, address: u64, speed: u8) -> Vec<u8> {
        let mut table = vec![0; 80];
        table[..4].copy_from_slice(b"SPCR");
        (table[8], table[36], table[40], table[58]) = (2, interface, space, speed);
        table[44..52].copy_from_slice(&address.to_le_bytes());
        table
    }

    #[test]
    fn the_table_tells_a_uart_and_its_speed() {
        let line = |place, speed| Some(Line { place, speed });
        let port = Place::Port(0x2f8);
        for (code, speed) in [(3, 9600), (4, 19_200), (6, 57_600), (7, 115_200)] {
            assert_eq!(parse(&table(0, 1, 0x2f8, code)), line(port, Some(speed)));
        }
        assert_eq!(parse(&table(1, 1, 0x2f8, 0)), line(port, None));
        let memory = Place::Memory(0xfedc_9000);
        assert_eq!(parse(&table(0x12, 0, 0xfedc_9000, 7)), line(memory, Some(115_200)));

        let mut full = table(0x12, 1, 0x2f8, 7);
        full.extend(921_600_u32.to_le_bytes());
        assert_eq!(parse(&full), line(port, Some(115_200)), "revision 2 has no such field");
        full[8] = 4;
        assert_eq!(parse(&full), line(port, Some(921_600)));
        full[80..].fill(0);
        assert_eq!(parse(&full), line(port, Some(115_200)));
    }

    #[test]
    fn a_table_without_a_uart_of_ours_is_nothing() {
        assert_eq!(parse(&table(0, 1, 0, 7)), None, "firmware has no console");
        assert_eq!(parse(&table(3, 1, 0x2f8, 7)), None, "no 16550");
        assert_eq!(parse(&table(0, 2, 0x2f8, 7)), None, "neither ports nor memory");
        assert_eq!(parse(&table(0, 1, 0x2f8, 7)[..58]), None);
        assert_eq!(parse(b"SPCX"), None);
    }

    fn server(active: &str) -> tempfile::TempDir {
        let port = |name: &str, file| format!("sys/class/tty/{name}/{file}");
        testing::root(&[
            (TABLE, &table(0, 1, 0x2f8, 3)),
            (ACTIVE, active.as_bytes()),
            (&port("ttyS0", "port"), b"0x3F8\n"),
            (&port("ttyS0", "type"), b"4\n"),
            (&port("ttyS1", "port"), b"0x2F8\n"),
            (&port("ttyS1", "type"), b"4\n"),
        ])
    }

    #[test]
    fn firmwares_port_is_found_where_the_kernel_writes_to_another() {
        let root = server("tty0 ttyS0\n");
        assert_eq!(beside(root.path()), Some((root.path().join("dev/ttyS1"), 9600)));
        // The kernel lists it, and the server does not have it.
        fs::write(root.path().join("sys/class/tty/ttyS1/type"), "0\n").expect("written");
        assert_eq!(beside(root.path()), None);
        assert_eq!(beside(server("tty0 ttyS1\n").path()), None);
        assert_eq!(beside(testing::root(&[]).path()), None);
    }

    /// A log that hands out one record each time, as the kernel does, and then what a read may fail with.
    struct Log(VecDeque<Result<Vec<u8>, i32>>);

    impl Read for Log {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.pop_front() {
                None => Ok(0),
                Some(Err(code)) => Err(io::Error::from_raw_os_error(code)),
                Some(Ok(record)) => record.as_slice().read(buffer),
            }
        }
    }

    #[test]
    fn what_the_consoles_show_is_copied() {
        let log = Log(VecDeque::from([
            Ok(b"13,7,5140900,-;holdfast: event=init-ready ms=3\n SUBSYSTEM=net\n".to_vec()),
            Ok(b"6,8,5140901,-;for the log only".to_vec()),
            Err(libc::EPIPE),
            Err(libc::EINTR),
            Ok(b"rubbish".to_vec()),
            Ok(testing::kmsg("3,9,12345678901,-", "name=\"\\\"Küche\\\"\" last")),
        ]));
        let mut shown = Vec::new();
        copy(log, &mut shown, || 6).expect("copied");
        let expected = "[    5.140900] holdfast: event=init-ready ms=3\r\n\
            (lines are missing here)\r\n[12345.678901] name=\"\\\"Küche\\\"\" last\r\n";
        assert_eq!(String::from_utf8_lossy(&shown), expected);
        let failed = copy(Log(VecDeque::from([Err(libc::EIO)])), Vec::new(), || 6);
        assert_eq!(failed.map_err(|error| error.raw_os_error()), Err(Some(libc::EIO)));
    }
}
