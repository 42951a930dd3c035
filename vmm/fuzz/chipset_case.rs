//! Runs one fuzz case of the chipset's two functions: what a guest reads and writes there.
//!
//! | Byte of 8 | Meaning                                                                      |
//! |-----------|------------------------------------------------------------------------------|
//! | 0         | bit 0: the LPC bridge, else the host bridge; bits 3:1 what: 0 to 2 read,     |
//! |           | write, BAR; others write one of the registers that mean something            |
//! | 1         | bits 1:0 length, 1, 2 or 4; bits 7:2 which register                          |
//! | 2..4      | offset, little endian                                                        |
//! | 4..8      | data                                                                         |

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use vmm::{
    layout,
    pci::{
        chipset::{Ecam, HostBridge, LpcBridge, SmramWatch},
        function::PciFunction,
    },
};

const STEP: usize = 8;
/// Registers that mean something: command, PMBASE, ACPI_CNTL, PCIEXBAR (and PIRQ), its upper half,
/// PIRQ, ESMRAMC, RCBA.
const REGISTERS: [u16; 8] = [0x04, 0x40, 0x44, 0x60, 0x64, 0x68, 0x9c, 0xf0];
const PCIEXBAR: u16 = 0x60;
const ESMRAMC: u16 = 0x9e;
/// Address bits of PCIEXBAR (316966 §5.1.16).
const BASE: u64 = 0xf_f000_0000;

/// Which bits of the host bridge a guest may change: four bytes at an offset.
const HOST_WRITABLE: [(u16, u32); 5] =
    [(0x04, 0x0547), (0x0c, 0xff), (0x3c, 0xff), (0x60, 0xf000_0007), (0x64, 0xf)];
/// The same of the LPC bridge.
const LPC_WRITABLE: [(u16, u32); 5] =
    [(0x0c, 0xff), (0x3c, 0xff), (0x60, 0x8f8f_8f8f), (0x68, 0x8f8f_8f8f), (0xf0, 0xffff_c001)];

/// Counts the reads of ESMRAMC.
#[derive(Default)]
struct Reads(AtomicU32);

impl SmramWatch for Reads {
    fn asked(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A function and what it must read as.
struct Modelled {
    function: Box<dyn PciFunction>,
    bytes: Vec<u8>,
    writable: Vec<u8>,
}

impl Modelled {
    fn new(mut function: Box<dyn PciFunction>, registers: &[(u16, u32)]) -> Self {
        let mut writable = vec![0; 4096];
        for (at, bits) in registers {
            let at = usize::from(*at);
            writable[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        }
        let mut bytes = vec![0; 4096];
        function.read_config(0, &mut bytes);
        Self { function, bytes, writable }
    }

    fn read(&mut self, offset: u16, length: usize) {
        let mut data = [0x5a; 4];
        self.function.read_config(offset, &mut data[..length]);
        let at = usize::from(offset);
        assert_eq!(data[..length], self.bytes[at..at + length], "{length} bytes at {offset:#x}");
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        self.function.write_config(offset, data);
        for (at, value) in (usize::from(offset)..).zip(data) {
            let writable = self.writable[at];
            self.bytes[at] = self.bytes[at] & !writable | value & writable;
        }
        self.read(offset, data.len());
    }

    /// There are no BARs.
    fn bar(&mut self, offset: u64, data: &mut [u8]) {
        self.function.write_bar(0, offset, data);
        self.function.read_bar(0, offset, data);
        assert!(data.iter().all(|byte| *byte == 0xff), "a BAR that is not there answers");
        self.function.place_bar(0, offset);
        assert!(self.function.bars().is_empty());
    }

    fn whole(&mut self) {
        let mut all = vec![0; 4096];
        self.function.read_config(0, &mut all);
        assert!(all == self.bytes, "a register that was not written has changed");
    }
}

/// Decodes and runs a case. Panics when a register is not what the sources say.
pub(crate) fn run(bytes: &[u8]) {
    let (ecam, reads) = (Ecam::default(), Arc::new(Reads::default()));
    let watch: Arc<dyn SmramWatch> = Arc::<Reads>::clone(&reads);
    let host = HostBridge::new(ecam.clone()).watched(Some(watch));
    let mut host = Modelled::new(Box::new(host), &HOST_WRITABLE);
    let mut lpc = Modelled::new(Box::new(LpcBridge::default()), &LPC_WRITABLE);
    // Taking note of the host bridge was a read.
    let mut expected = 1;
    for step in bytes.chunks_exact(STEP) {
        let length = 1usize << (step[1] % 3);
        let given = u16::from_le_bytes([step[2], step[3]]) & 0xfff;
        let mut data = [step[4], step[5], step[6], step[7]];
        let is_host = step[0] & 1 == 0;
        let function = if is_host { &mut host } else { &mut lpc };
        let (what, named) = (step[0] >> 1 & 7, REGISTERS[usize::from(step[1] >> 2) % 8]);
        let offset = if what > 2 { named | given & 3 } else { given };
        let offset = offset & !(u16::try_from(length).expect("small") - 1);
        match what {
            0 => function.read(offset, length),
            2 => function.bar(offset.into(), &mut data),
            _ => function.write(offset, &data[..length]),
        }
        let end = usize::from(offset) + length;
        let asks = what != 2 && offset <= ESMRAMC && end > usize::from(ESMRAMC);
        expected += u32::from(is_host && asks);
        assert_eq!(reads.0.load(Ordering::Relaxed), expected, "reads of ESMRAMC are told once");
        placed(&host, &ecam);
    }
    host.whole();
    lpc.whole();
}

/// Enhanced configuration space is where PCIEXBAR says, all of it and nothing else.
fn placed(host: &Modelled, ecam: &Ecam) {
    let at = usize::from(PCIEXBAR);
    let register: [u8; 8] = host.bytes[at..at + 8].try_into().expect("eight bytes");
    let register = u64::from_le_bytes(register);
    let base = register & BASE;
    let on = register & 0b111 == 1;
    assert_eq!(ecam.base(), if on { base } else { layout::ECAM });
    assert_eq!(ecam.offset(base), on.then_some(0));
    assert_eq!(ecam.offset(base + layout::ECAM_SIZE - 1), on.then_some(layout::ECAM_SIZE - 1));
    assert_eq!(ecam.offset(base + layout::ECAM_SIZE), None, "behind it");
    assert_eq!(base.checked_sub(1).and_then(|before| ecam.offset(before)), None, "before it");
    let elsewhere = (layout::ECAM != base || !on).then(|| ecam.offset(layout::ECAM));
    assert_eq!(elsewhere.flatten(), None, "where it was at power-on");
}
