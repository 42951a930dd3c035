//! The first serial port: a 16550A whose output goes to the console ring.
//! Source: vm-superio's register model of the NS16550A datasheet; ports 0x3f8..=0x3ff, interrupt 4.

use std::{collections::VecDeque, io, sync::Arc};

use vm_superio::{Serial as Registers, Trigger, serial::NoEvents};

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

/// Raises the port's interrupt: an edge, as ISA interrupts are.
pub struct Edge(Arc<dyn InterruptLine>);

impl Trigger for Edge {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.set_level(Level::High)?;
        self.0.set_level(Level::Low)
    }
}

/// Input that waits for room in the port's receive buffer, in bytes.
pub const MAX_WAITING: usize = 1 << 16;

/// The serial port.
pub struct Serial {
    registers: Registers<Edge, NoEvents, Console>,
    waiting: VecDeque<u8>,
    /// Room in the receive buffer when it is empty.
    empty: usize,
}

impl Serial {
    /// Makes a port that writes to `console` and interrupts through `line`.
    pub fn new(line: Arc<dyn InterruptLine>, console: Console) -> Self {
        let registers = Registers::new(Edge(line), console);
        let empty = registers.fifo_capacity();
        Self { registers, waiting: VecDeque::new(), empty }
    }

    /// Reads the register at `offset`, 0..=7.
    pub fn read(&mut self, offset: u8) -> u8 {
        let value = self.registers.read(offset);
        self.deliver();
        value
    }

    /// Writes the register at `offset`, 0..=7. Output never fails: the console ring takes it all.
    pub fn write(&mut self, offset: u8, value: u8) {
        // The only error is an interrupt that KVM refuses; the guest then polls.
        let _ = self.registers.write(offset, value);
        self.deliver();
    }

    /// Gives the guest input; returns how many bytes were taken. What the port's buffer has no room
    /// for waits, up to [`MAX_WAITING`] bytes.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(MAX_WAITING - self.waiting.len());
        self.waiting.extend(&bytes[..taken]);
        self.deliver();
        taken
    }

    /// Moves the next byte that waits into the receive buffer when that is empty: each byte then
    /// comes with an interrupt of its own. A driver that stops reading in the middle of a full
    /// buffer, as Linux does after 256 bytes, would get none for the rest.
    fn deliver(&mut self) {
        if self.registers.fifo_capacity() < self.empty {
            return;
        }
        if let Some(byte) = self.waiting.front() {
            // In loop-back mode the port takes nothing; an interrupt that KVM refuses loses nothing.
            let _ = self.registers.enqueue_raw_bytes(&[*byte]);
            if self.registers.fifo_capacity() < self.empty {
                self.waiting.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use super::*;

    struct Wire(OwnedFd);

    impl InterruptLine for Wire {
        fn set_level(&self, _asserted: Level) -> io::Result<()> {
            Ok(())
        }
        fn trigger_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
        fn resample_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    fn port() -> (Serial, Console) {
        let wire = Wire(OwnedFd::from(std::fs::File::open("/dev/null").expect("there")));
        let console = Console::default();
        (Serial::new(Arc::new(wire), console.clone()), console)
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
        let taken = port.input(&vec![0; 2 * MAX_WAITING]);
        assert_eq!(taken, MAX_WAITING);
        assert!(port.input(&[0; 128]) <= 64);
    }

    #[test]
    fn output_goes_to_the_console() {
        let (mut port, console) = port();
        port.write(0, b'x');
        assert_eq!(console.range(), (0, 1));
    }
}
