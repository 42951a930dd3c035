//! The first serial port: a 16550 whose output goes to the console ring.
//! Source: National Semiconductor PC16550D datasheet (June 1995), table II "Summary of Registers",
//! table III "UART Reset Functions", table IV "Interrupt Control Functions", §8.
//!
//! | Offset | DLAB | Access | Register                                                            |
//! |--------|------|--------|---------------------------------------------------------------------|
//! | 0      | 0    | r      | RBR: the next byte received                                         |
//! | 0      | 0    | w      | THR: a byte to send                                                 |
//! | 1      | 0    | r/w    | IER: 0 received data, 1 THR empty, 2 line status, 3 modem status    |
//! | 0, 1   | 1    | r/w    | divisor, low and high: kept                                         |
//! | 2      |      | r      | IIR: 0 nothing pending, 3:1 what is, 7:6 FIFOs on                   |
//! | 2      |      | w      | FCR: 0 FIFOs on, 1 and 2 clear them, 7:6 level that interrupts      |
//! | 3      |      | r/w    | LCR: 7 DLAB, the rest kept                                          |
//! | 4      |      | r/w    | MCR: 0 DTR, 1 RTS, 2 OUT1, 3 OUT2, 4 loop back                      |
//! | 5      |      | r      | LSR: 0 data ready, 1 overrun, 5 THR empty, 6 transmitter empty      |
//! | 6      |      | r      | MSR: 0 CTS, 1 DSR, 3 DCD changed, 2 RI fell; 4 CTS 5 DSR 6 RI 7 DCD |
//! | 7      |      | r/w    | SCR: kept                                                           |
//!
//! | IIR  | Interrupt, the first first | Ends with                                |
//! |------|----------------------------|------------------------------------------|
//! | 0x06 | line status                | LSR read                                 |
//! | 0x04 | received data              | fewer bytes than the level that interrupts |
//! | 0x0c | some bytes wait            | RBR read                                 |
//! | 0x02 | THR empty                  | IIR read; what is sent leaves at once    |
//! | 0x00 | modem status               | MSR read                                 |
//!
//! Bytes are sent and received at once: the transmitter is always empty, and bytes below the level
//! that interrupts do not wait for the time of four characters. What the receiver has no room for
//! waits outside, so only loop-back overruns. OUT2 is a wire of the board and gates nothing.

use std::{collections::VecDeque, io::Write, sync::Arc};

use crate::{
    console::Console,
    irq::{InterruptLine, Level},
};

/// First port.
pub const BASE: u16 = 0x3f8;
/// Number of ports.
pub const LENGTH: u16 = 8;
/// ISA interrupt.
pub const GSI: u32 = 4;

/// Bytes of the receiver's FIFO.
const FIFO: usize = 16;

const IER_RECEIVED: u8 = 1 << 0;
const IER_EMPTY: u8 = 1 << 1;
const IER_LINE: u8 = 1 << 2;
const IER_MODEM: u8 = 1 << 3;
const IER_WRITABLE: u8 = 0x0f;

const IIR_NONE: u8 = 0x01;
const IIR_LINE: u8 = 0x06;
const IIR_RECEIVED: u8 = 0x04;
const IIR_WAITING: u8 = 0x0c;
const IIR_EMPTY: u8 = 0x02;
const IIR_MODEM: u8 = 0x00;
const IIR_FIFOS: u8 = 0xc0;

const FCR_ENABLE: u8 = 1 << 0;
const FCR_CLEAR_RECEIVER: u8 = 1 << 1;
/// Bytes that interrupt, by bits 7:6 of FCR.
const TRIGGERS: [usize; 4] = [1, 4, 8, 14];

const LCR_DLAB: u8 = 1 << 7;

const MCR_DTR: u8 = 1 << 0;
const MCR_RTS: u8 = 1 << 1;
const MCR_OUT1: u8 = 1 << 2;
const MCR_OUT2: u8 = 1 << 3;
const MCR_LOOP: u8 = 1 << 4;
const MCR_WRITABLE: u8 = 0x1f;

const LSR_READY: u8 = 1 << 0;
const LSR_OVERRUN: u8 = 1 << 1;
const LSR_EMPTY: u8 = 1 << 5 | 1 << 6;

const MSR_CTS: u8 = 1 << 4;
const MSR_DSR: u8 = 1 << 5;
const MSR_RI: u8 = 1 << 6;
const MSR_DCD: u8 = 1 << 7;
/// A terminal that is there and listens.
const MSR_CONNECTED: u8 = MSR_CTS | MSR_DSR | MSR_DCD;

/// Divisor of 115,200 baud.
const DIVISOR: [u8; 2] = [1, 0];

/// The registers.
#[derive(Debug)]
struct Uart {
    received: VecDeque<u8>,
    ier: u8,
    fcr: u8,
    lcr: u8,
    mcr: u8,
    scratch: u8,
    divisor: [u8; 2],
    /// A byte was lost, and LSR not read since.
    overrun: bool,
    /// THR became empty, and neither IIR told it nor THR was written since.
    emptied: bool,
    /// What changed of the modem's lines since MSR was read: bits 3:0 of MSR.
    changed: u8,
}

impl Default for Uart {
    fn default() -> Self {
        Self {
            received: VecDeque::with_capacity(FIFO),
            ier: 0,
            fcr: 0,
            lcr: 0,
            mcr: 0,
            scratch: 0,
            divisor: DIVISOR,
            overrun: false,
            emptied: false,
            changed: 0,
        }
    }
}

impl Uart {
    fn has_dlab(&self) -> bool {
        self.lcr & LCR_DLAB != 0
    }

    fn loops(&self) -> bool {
        self.mcr & MCR_LOOP != 0
    }

    /// Returns whether the receiver has room for a byte from outside.
    fn takes_input(&self) -> bool {
        !self.loops() && self.received.len() < self.room()
    }

    /// Bytes that the receiver holds: one without FIFOs.
    fn room(&self) -> usize {
        if self.fcr & FCR_ENABLE != 0 { FIFO } else { 1 }
    }

    /// Returns what IIR says, without the bits of the FIFOs.
    fn interrupt(&self) -> u8 {
        let wants = |bit| self.ier & bit != 0;
        let trigger =
            if self.fcr & FCR_ENABLE != 0 { TRIGGERS[usize::from(self.fcr >> 6)] } else { 1 };
        match self.received.len() {
            _ if wants(IER_LINE) && self.overrun => IIR_LINE,
            waiting if wants(IER_RECEIVED) && waiting >= trigger => IIR_RECEIVED,
            waiting if wants(IER_RECEIVED) && waiting > 0 => IIR_WAITING,
            _ if wants(IER_EMPTY) && self.emptied => IIR_EMPTY,
            _ if wants(IER_MODEM) && self.changed != 0 => IIR_MODEM,
            _ => IIR_NONE,
        }
    }

    /// The modem's lines, bits 7:4 of MSR.
    fn modem(&self) -> u8 {
        if !self.loops() {
            return MSR_CONNECTED;
        }
        let wires =
            [(MCR_DTR, MSR_DSR), (MCR_RTS, MSR_CTS), (MCR_OUT1, MSR_RI), (MCR_OUT2, MSR_DCD)];
        let high = wires.iter().filter(|(output, _)| self.mcr & output != 0);
        high.fold(0, |lines, (_, input)| lines | input)
    }

    fn read(&mut self, offset: u8) -> u8 {
        match offset {
            0 | 1 if self.has_dlab() => self.divisor[usize::from(offset)],
            0 => self.received.pop_front().unwrap_or(0),
            1 => self.ier,
            2 => {
                let interrupt = self.interrupt();
                if interrupt == IIR_EMPTY {
                    self.emptied = false;
                }
                interrupt | if self.fcr & FCR_ENABLE != 0 { IIR_FIFOS } else { 0 }
            }
            3 => self.lcr,
            4 => self.mcr,
            5 => {
                let ready = if self.received.is_empty() { 0 } else { LSR_READY };
                let overrun = if std::mem::take(&mut self.overrun) { LSR_OVERRUN } else { 0 };
                LSR_EMPTY | ready | overrun
            }
            6 => self.modem() | std::mem::take(&mut self.changed),
            7 => self.scratch,
            _ => 0xff,
        }
    }

    /// Writes a register; returns the byte that is sent, if one is.
    fn write(&mut self, offset: u8, value: u8) -> Option<u8> {
        match offset {
            0 | 1 if self.has_dlab() => self.divisor[usize::from(offset)] = value,
            0 => return self.send(value),
            1 => {
                let before = std::mem::replace(&mut self.ier, value & IER_WRITABLE);
                // Switched on while THR is empty, its interrupt comes at once.
                if self.ier & !before & IER_EMPTY != 0 {
                    self.emptied = true;
                }
            }
            2 => self.control_fifos(value),
            3 => self.lcr = value,
            4 => {
                let before = self.modem();
                self.mcr = value & MCR_WRITABLE;
                let after = self.modem();
                // The ring indicator tells its fall only.
                let changed = (before ^ after) & !(MSR_RI & after);
                self.changed |= changed >> 4;
            }
            7 => self.scratch = value,
            // LSR and MSR are read-only.
            _ => {}
        }
        None
    }

    fn send(&mut self, byte: u8) -> Option<u8> {
        self.emptied = true;
        if !self.loops() {
            return Some(byte);
        }
        if self.received.len() < self.room() {
            self.received.push_back(byte);
        } else {
            self.overrun = true;
        }
        None
    }

    /// Without bit 0 the other bits count for nothing; changing it clears the FIFOs.
    fn control_fifos(&mut self, value: u8) {
        let value = if value & FCR_ENABLE != 0 { value } else { 0 };
        let switched = (value ^ self.fcr) & FCR_ENABLE != 0;
        if switched || value & FCR_CLEAR_RECEIVER != 0 {
            self.received.clear();
        }
        self.fcr = value & (FCR_ENABLE | IIR_FIFOS);
    }
}

/// Input that waits for room in the receiver, in bytes.
pub const MAX_WAITING: usize = 1 << 16;

/// The serial port.
pub struct Serial {
    uart: Uart,
    waiting: VecDeque<u8>,
    line: Arc<dyn InterruptLine>,
    level: Level,
    console: Console,
}

impl Serial {
    /// Makes a port that writes to `console` and interrupts through `line`.
    pub fn new(line: Arc<dyn InterruptLine>, console: Console) -> Self {
        let (uart, waiting) = (Uart::default(), VecDeque::new());
        Self { uart, waiting, line, level: Level::Low, console }
    }

    /// Reads the register at `offset`, 0..=7.
    pub fn read(&mut self, offset: u8) -> u8 {
        let value = self.uart.read(offset);
        self.settle();
        value
    }

    /// Writes the register at `offset`, 0..=7. Output never fails: the console ring takes it all.
    pub fn write(&mut self, offset: u8, value: u8) {
        if let Some(byte) = self.uart.write(offset, value) {
            let _ = self.console.write_all(&[byte]);
        }
        self.settle();
    }

    /// Gives the guest input; returns how many bytes were taken: all, or none, so that whoever is refused knows
    /// what to send again. What the receiver has no room for waits, up to [`MAX_WAITING`] bytes.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        if bytes.len() > MAX_WAITING - self.waiting.len() {
            return 0;
        }
        self.waiting.extend(bytes);
        self.settle();
        bytes.len()
    }

    /// Fills the receiver, and brings the line to the level that the registers call for.
    ///
    /// The receiver is filled when it is empty, so that the line falls in between: a driver that
    /// stops reading in the middle of much input, as Linux does after 256 bytes, is then told of the
    /// rest by an edge.
    fn settle(&mut self) {
        let before = self.uart.interrupt();
        self.drive(before);
        if self.uart.received.is_empty() {
            while self.uart.takes_input()
                && let Some(byte) = self.waiting.pop_front()
            {
                self.uart.received.push_back(byte);
            }
            self.drive(self.uart.interrupt());
        }
    }

    fn drive(&mut self, interrupt: u8) {
        let level = if interrupt == IIR_NONE { Level::Low } else { Level::High };
        // An interrupt that KVM refuses is lost; the guest then polls.
        if level != self.level && self.line.set_level(level).is_ok() {
            self.level = level;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        os::fd::{AsFd, BorrowedFd, OwnedFd},
        sync::Mutex,
    };

    use super::*;

    /// Every level that the line took.
    struct Wire {
        levels: Mutex<Vec<Level>>,
        file: OwnedFd,
    }

    impl InterruptLine for Wire {
        fn set_level(&self, level: Level) -> io::Result<()> {
            self.levels.lock().expect("one thread").push(level);
            Ok(())
        }
        fn trigger_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
        fn resample_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    fn wired() -> (Serial, Console, Arc<Wire>) {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let wire = Arc::new(Wire { levels: Mutex::default(), file });
        let console = Console::default();
        (Serial::new(Arc::<Wire>::clone(&wire), console.clone()), console, wire)
    }

    fn port() -> (Serial, Console) {
        let (port, console, _) = wired();
        (port, console)
    }

    /// Table III.
    #[test]
    fn registers_after_a_reset() {
        let (mut port, _) = port();
        let values = [1, 2, 3, 4, 5, 6, 7].map(|offset| port.read(offset));
        assert_eq!(values, [0, 0x01, 0, 0, 0x60, 0xb0, 0]);
    }

    /// Table II: reserved bits read as zero, read-only registers stay.
    #[test]
    fn registers_keep_what_they_hold() {
        let (mut port, _) = port();
        (1..8).filter(|offset| *offset != 2).for_each(|offset| port.write(offset, 0x7f));
        let values = [1, 3, 4, 7].map(|offset| port.read(offset));
        assert_eq!(values, [0x0f, 0x7f, 0x1f, 0x7f]);
        port.write(3, LCR_DLAB);
        port.write(0, 0x0c);
        port.write(1, 0x01);
        assert_eq!((port.read(0), port.read(1)), (0x0c, 0x01));
        port.write(3, 0);
        assert_eq!((port.read(0), port.read(1)), (0, 0x0f));
    }

    /// §8.3: FIFO control; table II, bits 7:6 of IIR.
    #[test]
    fn fifos_are_switched_on_cleared_and_interrupt_at_their_level() {
        let (mut port, _) = port();
        port.write(1, IER_RECEIVED);
        port.write(2, 0x80 | FCR_ENABLE);
        assert_eq!(port.read(2), 0xc1);
        assert_eq!(port.input(b"abcdefgh"), 8);
        assert_eq!(port.read(2), 0xc4, "eight bytes are there");
        port.read(0);
        assert_eq!(port.read(2), 0xcc, "some are");
        port.write(2, FCR_CLEAR_RECEIVER | FCR_ENABLE);
        assert_eq!((port.read(2), port.read(5)), (0xc1, 0x60));
        port.input(b"i");
        port.write(2, 0);
        assert_eq!((port.read(2), port.read(5)), (0x01, 0x60));
    }

    /// Table IV.
    #[test]
    fn interrupts_come_by_priority_and_end_as_they_should() {
        let (mut port, _) = port();
        port.write(4, MCR_LOOP);
        port.write(6, 0);
        let _ = port.read(6);
        port.write(1, 0x0f);
        port.write(0, b'a');
        port.write(0, b'b');
        port.write(4, MCR_LOOP | MCR_RTS);
        assert_eq!(port.read(2), IIR_LINE);
        assert_eq!(port.read(5), LSR_EMPTY | LSR_OVERRUN | LSR_READY);
        assert_eq!(port.read(5), LSR_EMPTY | LSR_READY, "reading ended it");
        assert_eq!((port.read(2), port.read(2)), (IIR_RECEIVED, IIR_RECEIVED));
        assert_eq!(port.read(0), b'a');
        assert_eq!((port.read(2), port.read(2)), (IIR_EMPTY, IIR_MODEM), "telling it ended it");
        assert_eq!((port.read(6), port.read(2)), (MSR_CTS | 1, IIR_NONE));
    }

    /// §8.6, §8.8: in loop-back mode outputs are inputs; RI tells its fall only.
    #[test]
    fn loop_back_turns_outputs_into_inputs() {
        let (mut port, console) = port();
        port.write(4, MCR_LOOP | MCR_OUT2 | MCR_RTS);
        assert_eq!(port.read(6) & 0xf0, 0x90);
        port.write(4, MCR_LOOP | MCR_OUT1);
        assert_eq!(port.read(6), MSR_RI | 0b1001);
        port.write(4, MCR_LOOP);
        assert_eq!((port.read(6), port.read(6)), (0b0100, 0));
        port.write(0, 0xae);
        assert_eq!((port.read(0), console.range()), (0xae, (0, 0)));
        port.input(b"x");
        assert_eq!(port.read(5) & 1, 0, "nothing comes in from outside");
        port.write(4, 0);
        assert_eq!(port.read(0), b'x');
    }

    #[test]
    fn the_line_has_an_edge_for_each_full_receiver() {
        let (mut port, _, wire) = wired();
        let levels = || std::mem::take(&mut *wire.levels.lock().expect("one thread"));
        port.write(2, 0xc0 | FCR_ENABLE);
        port.write(1, IER_RECEIVED | IER_EMPTY);
        assert_eq!((levels(), port.read(2), levels()), (vec![Level::High], 0xc2, vec![Level::Low]));
        port.input(&[b'x'; 17]);
        assert_eq!(levels(), [Level::High]);
        (0..15).for_each(|_| assert_eq!(port.read(0), b'x'));
        assert_eq!(levels(), []);
        port.read(0);
        assert_eq!(levels(), [Level::Low, Level::High]);
        port.read(0);
        assert_eq!(levels(), [Level::Low]);
    }

    #[test]
    fn long_input_arrives_in_order() {
        let (mut port, _) = port();
        let input: Vec<u8> = (0..200u8).collect();
        assert_eq!(port.input(&input), 200);
        let read: Vec<u8> = (0..200).map(|_| port.read(0)).collect();
        assert_eq!(read, input);
        assert_eq!(port.read(5) & 1, 0);
    }

    #[test]
    fn a_driver_that_stops_in_the_middle_is_told_of_the_rest() {
        let (mut port, _) = port();
        port.write(1, 1); // IER: received data
        assert_eq!(port.input(&[b'x'; 300]), 300);
        for _ in 0..260 {
            assert_eq!(port.read(2) & 0x0f, 0x04, "IIR: received data waits");
            assert_eq!(port.read(0), b'x');
        }
        assert_eq!(port.read(2) & 0x0f, 0x04);
    }

    #[test]
    fn input_that_nobody_reads_is_bounded() {
        let (mut port, _) = port();
        assert_eq!(port.input(&vec![0; MAX_WAITING + 1]), 0);
        assert_eq!(port.input(&vec![0; MAX_WAITING]), MAX_WAITING);
        // The receiver holds the first of them, so there is room again, but not for all of these.
        assert_eq!(port.input(&[0; 128]), 0);
        assert_eq!(port.input(&[0]), 1);
    }

    #[test]
    fn output_goes_to_the_console() {
        let (mut port, console) = port();
        port.write(0, b'x');
        assert_eq!(console.range(), (0, 1));
    }
}
