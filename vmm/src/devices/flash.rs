//! A NOR flash chip, one byte wide: where firmware keeps its variables.
//! Source: Intel "Common Flash Interface (CFI) and Command Sets" (AP-646), §4 and table 7; JEDEC
//! JESD68.01 (query); Intel StrataFlash J3 datasheet, "Command Definitions" and "Status Register".
//!
//! | Command    | Then                               | Meaning                                 |
//! |------------|------------------------------------|-----------------------------------------|
//! | 0xff, 0xf0, 0x00 |                              | reads return the contents               |
//! | 0x70       |                                    | reads return the status                 |
//! | 0x50       |                                    | clears the status                       |
//! | 0x90       |                                    | reads return the identity               |
//! | 0x98       |                                    | reads return the query table            |
//! | 0x10, 0x40 | byte                               | programs: clears bits at that address   |
//! | 0x20       | 0xd0                               | erases the block at that address        |
//! | 0x60       | 0x01, 0xd0, 0x2f                   | locks, unlocks: blocks are not locked   |
//! | 0xe8       | count - 1, bytes, 0xd0             | programs up to a buffer's worth         |
//!
//! | Status bit | Meaning                            |
//! |------------|------------------------------------|
//! | 7          | ready: commands take no time, and  |
//! |            | a cleared status has not even this |
//! | 5          | an erasure failed                  |
//! | 4          | programming failed                 |
//! | 5 and 4    | a wrong sequence of commands       |

use std::io;

/// Bytes of a block: what is erased at once.
pub const BLOCK: u64 = ERASED.len() as u64;
/// What is in a block then.
const ERASED: [u8; 4096] = [0xff; 4096];
/// Bytes that are programmed at once at most; a buffer starts at a multiple of it.
pub const BUFFER: usize = 1 << BUFFER_BITS;
const BUFFER_BITS: u8 = 8;

const READY: u8 = 1 << 7;
/// What firmware that asks for the status just after clearing it takes for a flash chip; anything
/// else is memory to it (edk2 OvmfPkg/QemuFlashFvbServicesRuntimeDxe/QemuFlash.c,
/// `QemuFlashDetected`). A chip of Intel's would say [`READY`].
const CLEARED: u8 = 0;
const ERASE_FAILED: u8 = 1 << 5;
const PROGRAM_FAILED: u8 = 1 << 4;
const WRONG_SEQUENCE: u8 = ERASE_FAILED | PROGRAM_FAILED;
/// Intel, and a device code of its J3 family.
const IDENTITY: [u8; 2] = [0x89, 0x18];
const CONFIRM: u8 = 0xd0;
/// Most blocks: what the query table can tell in one region.
const MAX_BLOCKS: u64 = 1 << 16;

/// Where the contents are. Offsets lie inside, and ranges do not pass the end.
pub trait Store: Send {
    /// Fills `data` from `offset`.
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Replaces what is at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Makes what was written last.
    fn sync(&mut self) -> io::Result<()>;
}

/// What the next write means, and what reads return.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Contents,
    Status,
    Identity,
    Query,
    Program,
    Erase,
    Lock,
    BufferCount,
    Buffer { start: u64, left: usize, bytes: Vec<(u64, u8)> },
    BufferConfirm { bytes: Vec<(u64, u8)> },
}

/// The chip.
pub struct Flash<S> {
    store: S,
    size: u64,
    state: State,
    status: u8,
    /// Whether something was written since it was made to last.
    unsynced: bool,
    /// The last attempt to make it last failed.
    failed: bool,
}

impl<S: Store> Flash<S> {
    /// Makes a chip of `size` bytes over `store`, or `None` unless these are whole blocks, at least
    /// one and at most 65,536.
    pub fn new(store: S, size: u64) -> Option<Self> {
        let blocks = size / BLOCK;
        let fits = size.is_multiple_of(BLOCK) && (1..=MAX_BLOCKS).contains(&blocks);
        fits.then_some(Self {
            store,
            size,
            state: State::Contents,
            status: CLEARED,
            unsynced: false,
            failed: false,
        })
    }

    /// Returns whether reads return the contents, so that they need not come here.
    pub fn is_readable(&self) -> bool {
        self.state == State::Contents
    }

    /// Reads at `offset`. Past the end everything reads as ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = if at >= self.size { 0xff } else { self.read_byte(at) };
        }
    }

    fn read_byte(&self, at: u64) -> u8 {
        match self.state {
            State::Contents => {
                let mut byte = [0xff];
                // A host that cannot read its file gives an erased chip.
                let _ = self.store.read(at, &mut byte);
                byte[0]
            }
            // Byte 2 of each block would say that it is locked.
            State::Identity => {
                let within = usize::try_from(at % BLOCK).unwrap_or(usize::MAX);
                IDENTITY.get(within).copied().unwrap_or(0)
            }
            State::Query => query(self.size, at),
            State::Status
            | State::Program
            | State::Erase
            | State::Lock
            | State::BufferCount
            | State::Buffer { .. }
            | State::BufferConfirm { .. } => self.status,
        }
    }

    /// Writes at `offset`. Writes past the end are lost.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if at < self.size {
                self.write_byte(at, *byte);
            }
        }
    }

    fn write_byte(&mut self, at: u64, value: u8) {
        if !matches!(self.state, State::Contents | State::Status | State::Identity | State::Query) {
            self.status |= READY;
        }
        self.state = match std::mem::replace(&mut self.state, State::Status) {
            State::Contents | State::Status | State::Identity | State::Query => self.command(value),
            State::Program => {
                self.program(&[(at, value)]);
                State::Status
            }
            State::Erase => {
                match value {
                    CONFIRM => self.erase(at),
                    _ => self.status |= WRONG_SEQUENCE,
                }
                State::Status
            }
            State::Lock => {
                if !matches!(value, 0x01 | 0x2f | CONFIRM) {
                    self.status |= WRONG_SEQUENCE;
                }
                State::Status
            }
            State::BufferCount => match usize::from(value) + 1 {
                left if left <= BUFFER => {
                    let start = at - at % BUFFER as u64;
                    State::Buffer { start, left, bytes: Vec::with_capacity(left) }
                }
                _ => {
                    self.status |= WRONG_SEQUENCE;
                    State::Status
                }
            },
            State::Buffer { start, left, bytes } => self.fill(start, left, bytes, (at, value)),
            State::BufferConfirm { bytes } => {
                match value {
                    CONFIRM => self.program(&bytes),
                    _ => self.status |= WRONG_SEQUENCE,
                }
                State::Status
            }
        };
    }

    fn command(&mut self, value: u8) -> State {
        match value {
            0x00 | 0xf0 | 0xff => {
                self.sync();
                State::Contents
            }
            0x10 | 0x40 => State::Program,
            0x20 => State::Erase,
            0x50 => {
                self.status = CLEARED;
                State::Status
            }
            0x60 => State::Lock,
            // Resuming what was never suspended changes nothing.
            0x70 | CONFIRM => State::Status,
            0x90 => State::Identity,
            0x98 => State::Query,
            0xe8 => {
                self.status |= READY;
                State::BufferCount
            }
            _ => {
                self.status |= READY | WRONG_SEQUENCE;
                State::Status
            }
        }
    }

    /// Takes one byte of a buffer. All of them lie in one buffer's range.
    fn fill(
        &mut self,
        start: u64,
        left: usize,
        mut bytes: Vec<(u64, u8)>,
        next: (u64, u8),
    ) -> State {
        if !(start..start + BUFFER as u64).contains(&next.0) {
            self.status |= WRONG_SEQUENCE;
            return State::Status;
        }
        bytes.push(next);
        if left == 1 {
            return State::BufferConfirm { bytes };
        }
        State::Buffer { start, left: left - 1, bytes }
    }

    /// Programming only clears bits.
    fn program(&mut self, bytes: &[(u64, u8)]) {
        for (at, value) in bytes {
            let mut byte = [0];
            let done = self.store.read(*at, &mut byte);
            if done.and_then(|()| self.store.write(*at, &[byte[0] & value])).is_err() {
                self.status |= PROGRAM_FAILED;
            }
        }
        self.unsynced = true;
    }

    fn erase(&mut self, at: u64) {
        if self.store.write(at - at % BLOCK, &ERASED).is_err() {
            self.status |= ERASE_FAILED;
        }
        self.unsynced = true;
    }

    /// Firmware goes back to the contents when it is done with a change. What failed is tried again the next time.
    fn sync(&mut self) {
        if !self.unsynced {
            return;
        }
        let rewritten = if self.failed { self.rewrite() } else { Ok(()) };
        match rewritten.and_then(|()| self.store.sync()) {
            Ok(()) => (self.unsynced, self.failed) = (false, false),
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    eprintln!("holdfast-vmm: the firmware's variables may not last: {error}");
                }
                self.status |= PROGRAM_FAILED;
            }
        }
    }

    /// Writes all blocks as they read: the kernel takes what it could not write for written (fsync(2), "EIO").
    fn rewrite(&mut self) -> io::Result<()> {
        let mut block = ERASED;
        for at in (0..self.size).step_by(block.len()) {
            self.store.read(at, &mut block)?;
            self.store.write(at, &block)?;
        }
        Ok(())
    }
}

/// The query table of a chip with `size` bytes. Its first words lie at 0x10, one byte each.
fn query(size: u64, at: u64) -> u8 {
    let bits = u8::try_from(64 - (size - 1).leading_zeros()).unwrap_or(64);
    let [blocks_low, blocks_high, ..] = (size / BLOCK - 1).to_le_bytes();
    let [unit_low, unit_high, ..] = (BLOCK / 256).to_le_bytes();
    #[rustfmt::skip]
    let table = [
        b'Q', b'R', b'Y',
        // Intel's extended command set, its table at 0x31; no alternative.
        1, 0, 0x31, 0, 0, 0, 0, 0,
        // 4.5 to 5.5 V; typical and longest times, as powers of two.
        0x45, 0x55, 0, 0, 7, 7, 10, 0, 4, 4, 4, 0,
        // Size, eight data lines, buffer, one region of equal blocks.
        bits, 0, 0, BUFFER_BITS, 0, 1, blocks_low, blocks_high, unit_low, unit_high,
        b'P', b'R', b'I', b'1', b'0',
    ];
    let index = at.checked_sub(0x10).and_then(|index| usize::try_from(index).ok());
    index.and_then(|index| table.get(index)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Memory {
        bytes: Vec<u8>,
        synced: u32,
        bytes_written: usize,
        broken: bool,
    }

    impl Store for Memory {
        fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(offset).expect("small");
            data.copy_from_slice(&self.bytes[at..at + data.len()]);
            Ok(())
        }
        fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
            if self.broken {
                return Err(io::ErrorKind::Other.into());
            }
            let at = usize::try_from(offset).expect("small");
            self.bytes[at..at + data.len()].copy_from_slice(data);
            self.bytes_written += data.len();
            Ok(())
        }
        fn sync(&mut self) -> io::Result<()> {
            if self.broken {
                return Err(io::ErrorKind::Other.into());
            }
            self.synced += 1;
            Ok(())
        }
    }

    fn chip() -> Flash<Memory> {
        let memory =
            Memory { bytes: vec![0x5a; 3 * 4096], synced: 0, bytes_written: 0, broken: false };
        Flash::new(memory, 3 * 4096).expect("whole blocks")
    }

    fn byte(chip: &Flash<Memory>, at: u64) -> u8 {
        let mut data = [0];
        chip.read(at, &mut data);
        data[0]
    }

    fn writes(chip: &mut Flash<Memory>, at: u64, values: &[u8]) {
        values.iter().for_each(|value| chip.write(at, &[*value]));
    }

    #[test]
    fn firmware_that_probes_finds_a_flash_chip() {
        let mut chip = chip();
        writes(&mut chip, 0, &[0x50]);
        assert_eq!(byte(&chip, 0), CLEARED);
        writes(&mut chip, 0, &[0x70]);
        assert_eq!((byte(&chip, 0), chip.is_readable()), (CLEARED, false));
        writes(&mut chip, 0, &[0x10, 0x5a, 0x70]);
        assert_eq!(byte(&chip, 0), READY);
        writes(&mut chip, 0, &[0xff]);
        assert_eq!((byte(&chip, 0), chip.is_readable()), (0x5a, true));
    }

    #[test]
    fn what_was_not_made_to_last_is_tried_again() {
        let mut chip = chip();
        writes(&mut chip, 9, &[0x10, 0xf0]);
        chip.store.broken = true;
        writes(&mut chip, 9, &[0xff, 0x70]);
        assert_eq!(byte(&chip, 9), READY | PROGRAM_FAILED);
        chip.store.broken = false;
        chip.store.bytes_written = 0;
        writes(&mut chip, 9, &[0xff]);
        assert_eq!((chip.store.synced, chip.store.bytes_written), (1, 3 * 4096));
        writes(&mut chip, 9, &[0xff]);
        assert_eq!((chip.store.synced, chip.store.bytes_written), (1, 3 * 4096));
    }

    #[test]
    fn programming_clears_bits_and_is_made_to_last() {
        let mut chip = chip();
        writes(&mut chip, 9, &[0x10, 0xf0, 0xff]);
        assert_eq!((byte(&chip, 9), chip.store.synced), (0x50, 1));
        writes(&mut chip, 9, &[0x40, 0xff, 0xff, 0xff]);
        assert_eq!((byte(&chip, 9), chip.store.synced), (0x50, 2));
    }

    #[test]
    fn erasing_takes_the_block_and_a_confirmation() {
        let mut chip = chip();
        writes(&mut chip, 5000, &[0x20, 0x00]);
        assert_eq!(byte(&chip, 0), READY | WRONG_SEQUENCE);
        writes(&mut chip, 5000, &[0x50, 0x20, 0xd0, 0xff]);
        let around = [4095, 4096, 8191, 8192].map(|at| byte(&chip, at));
        assert_eq!(around, [0x5a, 0xff, 0xff, 0x5a]);
    }

    #[test]
    fn a_buffer_is_programmed_at_once() {
        let mut chip = chip();
        writes(&mut chip, 256, &[0xe8, 2]);
        assert_eq!(byte(&chip, 0), READY);
        chip.write(256, &[0x0f]);
        chip.write(258, &[0xf0]);
        chip.write(257, &[0x00]);
        assert_eq!(chip.store.bytes[256..259], [0x5a; 3]);
        writes(&mut chip, 256, &[0xd0, 0xff]);
        assert_eq!(chip.store.bytes[256..260], [0x0a, 0x00, 0x50, 0x5a]);
    }

    #[test]
    fn a_buffer_that_leaves_its_range_or_is_not_confirmed_is_an_error() {
        let mut chip = chip();
        writes(&mut chip, 256, &[0xe8, 1, 0]);
        chip.write(512, &[0]);
        assert_eq!(byte(&chip, 0), READY | WRONG_SEQUENCE);
        writes(&mut chip, 256, &[0x50, 0xe8, 0, 0, 0xff]);
        assert_eq!(byte(&chip, 0), READY | WRONG_SEQUENCE);
        assert_eq!(chip.store.bytes[256], 0x5a);
    }

    #[test]
    fn identity_and_query_say_what_it_is() {
        let mut chip = chip();
        writes(&mut chip, 0, &[0x90]);
        assert_eq!([0, 1, 2, 4098].map(|at| byte(&chip, at)), [0x89, 0x18, 0, 0]);
        writes(&mut chip, 0x55, &[0x98]);
        assert_eq!([0x10, 0x11, 0x12, 0x13].map(|at| byte(&chip, at)), *b"QRY\x01");
        assert_eq!([0x27, 0x2a, 0x2c, 0x2d, 0x2e].map(|at| byte(&chip, at)), [14, 8, 1, 2, 0]);
        assert_eq!(
            [0x2f, 0x30, 0x31, 0x35, 0x36].map(|at| byte(&chip, at)),
            [16, 0, b'P', b'0', 0]
        );
    }

    #[test]
    fn locking_is_accepted_and_unknown_commands_are_not() {
        let mut chip = chip();
        writes(&mut chip, 0, &[0x60, 0xd0]);
        assert_eq!(byte(&chip, 0), READY);
        writes(&mut chip, 0, &[0x33]);
        assert_eq!(byte(&chip, 0), READY | WRONG_SEQUENCE);
    }

    #[test]
    fn a_host_that_cannot_write_is_an_error_of_the_chip() {
        let mut chip = chip();
        chip.store.broken = true;
        writes(&mut chip, 0, &[0x10, 0]);
        assert_eq!(byte(&chip, 0), READY | PROGRAM_FAILED);
        writes(&mut chip, 0, &[0x50, 0x20, 0xd0]);
        assert_eq!(byte(&chip, 0), READY | ERASE_FAILED);
    }

    #[test]
    fn odd_sizes_and_ends_are_refused() {
        let memory = || Memory { bytes: Vec::new(), synced: 0, bytes_written: 0, broken: false };
        assert!(Flash::new(memory(), 0).is_none() && Flash::new(memory(), 100).is_none());
        let mut chip = chip();
        chip.write(3 * 4096 - 1, &[0x70, 0x10]);
        let mut data = [0; 2];
        chip.read(3 * 4096 - 1, &mut data);
        assert_eq!(data, [CLEARED, 0xff]);
    }
}
