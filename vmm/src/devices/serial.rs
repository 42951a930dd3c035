//! The first serial port: a 16550A whose output goes to the console ring.
//! Source: vm-superio's register model of the NS16550A datasheet; ports 0x3f8..=0x3ff, interrupt 4.

use std::{io, sync::Arc};

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

/// The serial port.
pub struct Serial {
    registers: Registers<Edge, NoEvents, Console>,
}

impl Serial {
    /// Makes a port that writes to `console` and interrupts through `line`.
    pub fn new(line: Arc<dyn InterruptLine>, console: Console) -> Self {
        Self { registers: Registers::new(Edge(line), console) }
    }

    /// Reads the register at `offset`, 0..=7.
    pub fn read(&mut self, offset: u8) -> u8 {
        self.registers.read(offset)
    }

    /// Writes the register at `offset`, 0..=7. Output never fails: the console ring takes it all.
    pub fn write(&mut self, offset: u8, value: u8) {
        // The only error is an interrupt that KVM refuses; the guest then polls.
        let _ = self.registers.write(offset, value);
    }

    /// Gives the guest input; returns how many bytes its buffer took.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        self.registers.enqueue_raw_bytes(bytes).unwrap_or(0)
    }
}
