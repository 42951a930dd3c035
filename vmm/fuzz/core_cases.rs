//! Runs fuzz cases of the core: specification, kernel image, API request, PCI accesses.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use types::vm::MemoryBacking;
use vmm::{
    api,
    boot::{self, Entry, Linux},
    console::Console,
    devices::{
        power::{self, Power},
        pvpanic,
        serial::{self, Serial},
    },
    irq::{InterruptLine, InterruptSource, Level, MsiMessage, MsiVector},
    layout,
    pci::{
        bus::{Address, Bus},
        config::{ConfigSpace, Identity},
        function::{Bar, BarKind, PciFunction},
        msix::MsixTable,
        port::{Kind, Link, Port},
    },
    spec,
    sys::memory::Ram,
};

/// A specification, as the agent might get it wrong.
pub(crate) fn specification(bytes: &[u8]) {
    let Ok(parsed) = spec::parse(bytes) else { return };
    assert!((1..=spec::MAX_VCPUS).contains(&parsed.vcpus), "virtual CPUs out of range");
    let all = spec::descriptors(&parsed);
    assert!(all.iter().all(|fd| *fd > types::vm::SPEC_FD), "a reserved descriptor");
}

/// Guest memory of the kernel cases, in bytes.
const MEMORY: u64 = 16 << 20;

/// A kernel: the first byte says whether there is an initramfs, the rest is the file.
pub(crate) fn kernel(bytes: &[u8]) {
    let Some((with_initrd, image)) = bytes.split_first() else { return };
    let ram = Ram::new(&[(0, MEMORY)], MemoryBacking::Memfd).expect("memory");
    let (mut kernel, mut initrd) = (file(image), file(b"initramfs"));
    let initrd = (with_initrd & 1 == 1).then_some(&mut initrd);
    let linux = Linux { kernel: &mut kernel, initrd, cmdline: "quiet", acpi: layout::ACPI };
    match boot::load(linux, &ram) {
        Ok(Entry::Linux64 { address }) => assert!(address < MEMORY, "the entry is no memory"),
        Ok(Entry::Reset) => panic!("a kernel is no firmware"),
        Ok(Entry::Pvh { .. }) => {}
        // What is wrong is told in words.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn file(bytes: &[u8]) -> File {
    let fd = rustix::fs::memfd_create("case", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let mut file = File::from(fd);
    file.write_all(bytes).expect("written");
    file.seek(SeekFrom::Start(0)).expect("a file");
    file
}

/// A request: whole and as it comes in pieces, which must agree.
pub(crate) fn request(bytes: &[u8]) {
    const MAX_BODY: usize = 64;
    /// How many beginnings of it are tried.
    const PIECES: usize = 16;
    let whole = api::parse(bytes, MAX_BODY);
    if let Ok(Some(request)) = &whole {
        assert!(request.body.len() <= MAX_BODY, "a body past the limit");
        let path = request.target.split('?').next().unwrap_or_default();
        let segments: Option<Vec<String>> = path.split('/').map(decoded).collect();
        let last = segments.as_ref().and_then(|all| all.last().cloned()).unwrap_or_default();
        assert_eq!((request.path(), request.last_segment()), (path, last));
        assert_eq!(request.segments(), segments);
        let _ = (request.number("from"), request.number("wait_ms"));
        for piece in 0..PIECES {
            let early = api::parse(&bytes[..bytes.len() * piece / PIECES], MAX_BODY);
            assert!(!matches!(early, Ok(Some(early)) if early != *request), "a piece is another");
        }
    }
}

/// Decodes a segment (RFC 3986 §2.1) otherwise than the API does: byte by byte.
fn decoded(segment: &str) -> Option<String> {
    let (mut bytes, mut decoded) = (segment.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let byte = match byte {
            b'%' => u8::try_from(digit()? << 4 | digit()?).ok()?,
            plain => plain,
        };
        decoded.push(byte);
    }
    String::from_utf8(decoded).ok()
}

/// Bytes of console input and output, and of PM registers, that one case can make.
const PORT_STEPS: usize = 4096;

/// Accesses to the ports of the serial port, power management, reset and the panic device.
///
/// | Byte of 4 | Meaning                                                                 |
/// |-----------|-------------------------------------------------------------------------|
/// | 0         | what: serial read, write, input; PM read, write; button; reset; panic   |
/// | 1         | offset                                                                  |
/// | 2         | value                                                                   |
/// | 3         | how often, or how many bytes                                            |
pub(crate) fn ports(bytes: &[u8]) {
    let console = Console::default();
    let mut serial = Serial::new(Arc::new(Wire), console.clone());
    let mut power = Power::new(Arc::new(Wire));
    let (mut written, mut input) = (0u64, 0);
    for step in bytes.chunks_exact(4).take(PORT_STEPS) {
        let (offset, value, count) = (step[1], step[2], usize::from(step[3]));
        match step[0] % 8 {
            0 => drop((0..count).map(|_| serial.read(offset & 7)).collect::<Vec<_>>()),
            1 => (0..=count).for_each(|_| {
                serial.write(offset & 7, value);
                written += 1;
            }),
            2 => {
                let taken = serial.input(&vec![value; count * 256]);
                assert!(taken <= count * 256, "more was taken than there was");
                input += taken;
            }
            3 => {
                let at = u16::from(offset);
                let uptime = Duration::from_millis(u64::from(value) << count.min(40));
                let read = power.read(at, uptime);
                assert!(at < power::PM_LENGTH || read == 0xff, "registers past the end");
            }
            4 => {
                let uptime = Duration::from_secs(u64::from(offset) << (value & 0xf));
                let _ = power.write(u16::from(offset), &vec![value; count % 9], uptime);
            }
            5 => power.press_button(),
            6 => {
                let asked = (power::reset_control(value), power::keyboard(value));
                assert!(!matches!(asked, (power::Request::Off, _) | (_, power::Request::Off)));
            }
            _ => assert_eq!(pvpanic::write(value) == pvpanic::Report::Nothing, value & 3 == 0),
        }
    }
    assert!(console.range().1 <= written, "output that nobody wrote");
    assert!(input <= PORT_STEPS * (serial::MAX_WAITING + 64), "{input} bytes wait");
}

/// A line that goes nowhere.
struct Wire;

impl InterruptLine for Wire {
    fn set_level(&self, _asserted: Level) -> io::Result<()> {
        Ok(())
    }

    fn trigger_fd(&self) -> BorrowedFd<'_> {
        rustix::stdio::stdin()
    }

    fn resample_fd(&self) -> BorrowedFd<'_> {
        rustix::stdio::stdin()
    }
}

/// Accesses to a bus with a bridge, a device with BARs and MSI-X behind it, and one beside it.
///
/// | Byte of 12 | Meaning                                                                 |
/// |------------|-------------------------------------------------------------------------|
/// | 0          | bits 2:0 what: ECAM, 0xcf8, memory, port; bit 3 a write                  |
/// | 1          | length, modulo 16, at least 1                                           |
/// | 2..8       | address, offset or port                                                 |
/// | 8..12      | data, repeated                                                          |
pub(crate) fn accesses(bytes: &[u8]) {
    let mut bus = board();
    for access in bytes.chunks_exact(12) {
        let length = usize::from(access[1] % 16).max(1);
        let mut data: Vec<u8> = access[8..12].iter().copied().cycle().take(length).collect();
        let mut wide = [0; 8];
        wide[..6].copy_from_slice(&access[2..8]);
        let (place, port) = (u64::from_le_bytes(wide), u16::from_le_bytes([access[2], access[3]]));
        match access[0] & 0xf {
            0 => bus.read_ecam(place & 0xfff_ffff, &mut data),
            8 => bus.write_ecam(place & 0xfff_ffff, &data),
            1 => bus.read_mechanism1(port & 7, &mut data),
            9 => bus.write_mechanism1(port & 7, &data),
            2 => drop(bus.read_memory(place, &mut data)),
            10 => drop(bus.write_memory(place, &data)),
            3 => drop(bus.read_port(port, &mut data)),
            11 => drop(bus.write_port(port, &data)),
            // Near the BARs, whatever the address.
            4 => drop(bus.read_memory(BAR + (place & 0x1fff), &mut data)),
            12 => drop(bus.write_memory(BAR + (place & 0x1fff), &data)),
            _ => {}
        }
    }
    let mut identity = [0; 4];
    bus.read_ecam(0x10 << 15, &mut identity);
    assert_eq!(identity, [0xf4, 0x1a, 0x41, 0x10], "the identity was changed");
}

/// Where the device's BAR is placed.
const BAR: u64 = 0xc000_0000;
/// Vectors of the device.
const VECTORS: u16 = 8;

fn board() -> Bus {
    let mut bus = Bus::default();
    let at = |bus, device| Address { bus, device, function: 0 };
    let registers = Link { speed: 4, width: 16 }.fixed().registers();
    let port = Port::new(Kind::Root, &registers, None).expect("a port");
    bus.add(at(0, 2), Arc::new(Mutex::new(port)));
    bus.add_behind(at(0, 2), at(1, 0), Arc::new(Mutex::new(device(BAR + 0x10_0000))));
    bus.add(at(0, 0x10), Arc::new(Mutex::new(device(BAR))));
    bus
}

struct Device {
    config: ConfigSpace,
    msix: MsixTable,
    capability: u16,
}

fn device(place: u64) -> Device {
    let identity = Identity {
        vendor: 0x1af4,
        device: 0x1041,
        class: 0x02_00_00,
        revision: 1,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1041,
    };
    let mut config = ConfigSpace::new(identity);
    config.add_bar(0, BarKind::Memory32, 0x1000).expect("a BAR");
    config.add_bar(1, BarKind::Io, 0x40).expect("a BAR");
    config.add_bar(2, BarKind::Memory64Prefetchable, 1 << 38).expect("a BAR");
    let msix = MsixTable::new(VECTORS, &Source).expect("vectors");
    let body = msix.capability((0, 0), (0, 0x800));
    let capability = config.add_capability(0x11, &body, &[]).expect("room");
    config.place_bar(0, place);
    Device { config, msix, capability }
}

impl PciFunction for Device {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        checked(u64::from(offset), data.len(), 4, 4096);
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        checked(u64::from(offset), data.len(), 4, 4096);
        self.config.write(offset, data);
        if let Some(within) = offset.checked_sub(self.capability) {
            self.msix.write_capability(within, data).expect("nothing refuses");
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.config.bars()
    }

    fn place_bar(&mut self, index: u8, address: u64) {
        self.config.place_bar(index, address);
    }

    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        checked(offset, data.len(), 8, 1 << 38);
        match bar {
            0 if offset < 0x800 => self.msix.read_table(offset, data),
            _ => self.msix.read_pending(offset, data),
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        checked(offset, data.len(), 8, 1 << 38);
        if bar == 0 {
            self.msix.write_table(offset, data).expect("nothing refuses");
        }
        let _ = self.msix.trigger(u16::try_from(offset & 0xf).unwrap_or(0));
    }
}

/// What the bus promises its functions.
fn checked(offset: u64, length: usize, most: usize, size: u64) {
    let length = length as u64;
    assert!(length.is_power_of_two() && length <= most as u64, "{length} bytes");
    assert!(offset.is_multiple_of(length) && offset + length <= size, "{length} at {offset:#x}");
}

/// Interrupts that go nowhere.
struct Source;

struct Vector(OwnedFd);

impl InterruptSource for Source {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        Ok(Arc::new(Vector(OwnedFd::from(File::open("/dev/null")?))))
    }

    fn line(&self, _slot: u8, _pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl MsiVector for Vector {
    fn route(&self, _message: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}
