//! The power of a hotplug slot, switched behind the host's back: what is in it reads all ones from then on, as a
//! device does that fell off the bus. The switch is the slot's own, bit 10 of Slot Control (PCI Express Base
//! Specification 6.0 §7.5.3.10); it is reached by the configuration ports (PCI Local Bus Specification 3.0
//! §3.2.2.3.2) while the host stands still, so that its own accesses go on as if nothing had been.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::qmp::Qmp;

/// The configuration ports.
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
/// Place of the first capability's offset, and the identity of PCI Express.
const CAPABILITIES: u8 = 0x34;
const EXPRESS: u8 = 0x10;
/// Place of Slot Control in that capability, and its bit for no power.
const SLOT_CONTROL: u8 = 0x18;
const POWER_OFF: u16 = 1 << 10;

/// What a slot has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// Power.
    On,
    /// None.
    Off,
}

/// Switches the slot of the root port with QEMU's name `port`.
pub fn switch(qmp: &mut Qmp, port: &str, power: Power) -> Result<()> {
    let function = Function::find(qmp, port)?;
    qmp.execute("stop", json!({}))?;
    let switched = function.switch(qmp, power);
    qmp.execute("cont", json!({}))?;
    switched
}

/// A function of bus 0.
struct Function {
    /// What selects it at the configuration ports.
    selector: u32,
}

impl Function {
    fn find(qmp: &mut Qmp, name: &str) -> Result<Self> {
        let buses = qmp.execute("query-pci", json!({}))?;
        let devices = buses[0]["devices"].as_array().context("no PCI devices")?;
        let found = devices.iter().find(|device| device["qdev_id"] == name);
        let found = found.with_context(|| format!("there is no port {name}"))?;
        let number = |key: &str| -> Result<u32> {
            let number = found[key].as_u64().with_context(|| format!("{name} has no {key}"))?;
            Ok(number.try_into()?)
        };
        let selector = 1 << 31 | number("bus")? << 16 | number("slot")? << 11;
        Ok(Self { selector: selector | number("function")? << 8 })
    }

    fn switch(&self, qmp: &mut Qmp, power: Power) -> Result<()> {
        let before = port_in(qmp, 'w', ADDRESS)?;
        let switched = self.switch_selected(qmp, power);
        port_out(qmp, 'w', ADDRESS, before)?;
        switched
    }

    fn switch_selected(&self, qmp: &mut Qmp, power: Power) -> Result<()> {
        let mut at = self.read(qmp, CAPABILITIES)?.to_le_bytes()[0];
        loop {
            let [identity, next] = self.read(qmp, at)?.to_le_bytes();
            match identity {
                EXPRESS => break,
                _ if next == 0 => bail!("the port has no capability of PCI Express"),
                _ => at = next,
            }
        }
        let at = at + SLOT_CONTROL;
        let rest = self.read(qmp, at)? & !POWER_OFF;
        let value = if power == Power::Off { rest | POWER_OFF } else { rest };
        port_out(qmp, 'w', ADDRESS, self.selector | u32::from(at & !3))?;
        port_out(qmp, 'h', DATA + u16::from(at & 2), value.into())
    }

    /// Reads 16 bits.
    fn read(&self, qmp: &mut Qmp, at: u8) -> Result<u16> {
        port_out(qmp, 'w', ADDRESS, self.selector | u32::from(at & !3))?;
        Ok(port_in(qmp, 'h', DATA + u16::from(at & 2))?.try_into()?)
    }
}

/// Reads an I/O port of the host: 32 bits (`w`) or 16 (`h`).
fn port_in(qmp: &mut Qmp, size: char, port: u16) -> Result<u32> {
    let said = monitor(qmp, &format!("i /{size} {port:#x}"))?;
    let value = said.rsplit("0x").next().map(str::trim);
    let value = value.and_then(|value| u32::from_str_radix(value, 16).ok());
    value.with_context(|| format!("no value of a port: {said}"))
}

fn port_out(qmp: &mut Qmp, size: char, port: u16, value: u32) -> Result<()> {
    let said = monitor(qmp, &format!("o /{size} {port:#x} {value:#x}"))?;
    if said.trim().is_empty() { Ok(()) } else { bail!("port {port:#x} was not written: {said}") }
}

fn monitor(qmp: &mut Qmp, line: &str) -> Result<String> {
    let said = qmp.execute("human-monitor-command", json!({ "command-line": line }))?;
    let Value::String(said) = said else { bail!("the monitor said {said}") };
    Ok(said)
}
