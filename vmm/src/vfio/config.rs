//! The configuration space that the guest sees of a device: which bits come from a shadow, which
//! from the device, and which of the guest's writes reach it.
//!
//! | registers                          | guest reads  | guest's writes go to                    |
//! |------------------------------------|--------------|-----------------------------------------|
//! | command: I/O and memory decoding   | shadow       | shadow; the device decodes throughout   |
//! | header type                        | one function | nowhere                                 |
//! | BIST                               | 0            | nowhere                                 |
//! | expansion ROM, where `rom` has it  | shadow       | shadow                                  |
//! | expansion ROM of other devices     | 0            | nowhere                                 |
//! | BARs                               | shadow       | shadow                                  |
//! | interrupt line                     | shadow       | shadow                                  |
//! | pointers between capabilities      | shadow       | nowhere                                 |
//! | hidden capabilities                | 0            | nowhere                                 |
//! | MSI; MSI-X control                 | shadow       | shadow                                  |
//! | power state                        | shadow       | shadow; the device stays in D0          |
//! | no soft reset                      | 1            | nowhere                                 |
//! | vital product data                 | device       | device, but for the order to write      |
//! | everything else                    | device       | device, as far as the kernel lets it    |
//!
//! Decoding and D0 are kept up because mapped BARs fault for the guest's virtual CPU otherwise, and
//! a guest may touch a BAR it has switched off.
//! Source: PCI Express Base Specification 6.0 §7.5, §7.7.1, §7.7.2, PCI Local Bus 3.0 appendix I.

mod clique;
mod messages;

pub use messages::{MsiState, MsixLayout, MsixState};

use self::messages::MsiLayout;
use super::{
    capabilities::{self, Capability, dword, word},
    quirks::{Effect, Quirk},
    rom,
};
use crate::pci::function::{Bar, BarKind};

const COMMAND: usize = 0x04;
const COMMAND_IO: u8 = 1 << 0;
const COMMAND_MEMORY: u8 = 1 << 1;
const HEADER_TYPE: usize = 0x0e;
const MULTI_FUNCTION: u8 = 1 << 7;
const BIST: usize = 0x0f;
const BARS: usize = 0x10;
/// Granularity of mappings.
const PAGE: u64 = 4096;
const ROM: usize = 0x30;
/// Bits of its register: it decodes; and its address.
const ROM_ENABLED: u32 = 1 << 0;
const ROM_ADDRESS: u32 = 0xffff_f800;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
/// Size of configuration space of a conventional device, and the least there is.
const CONVENTIONAL: usize = 0x100;

const POWER_MANAGEMENT: u8 = 0x01;
/// Bits of its control register.
const POWER_STATE: u8 = 3;
const NO_SOFT_RESET: u8 = 1 << 3;
const VITAL_PRODUCT_DATA: u8 = 0x03;
const MSI: u8 = 0x05;
const EXPRESS: u8 = 0x10;
/// Id of the MSI-X capability, which a quirk may hide.
pub const MSIX: u8 = 0x11;
const ADVANCED_FEATURES: u8 = 0x13;
const ENHANCED_ALLOCATION: u8 = 0x14;

/// Extended capabilities that the guest does not see: it has no IOMMU of its own (ATS, page
/// requests, PASID), no other functions (ARI, SR-IOV), and BARs of a fixed size.
const HIDDEN_EXTENDED: [u16; 7] = [
    0x0e, // ARI
    0x0f, // ATS
    0x10, // SR-IOV
    0x13, // page request
    0x15, // resizable BAR
    0x1b, // PASID
    0x24, // resizable BAR of virtual functions
];

/// Why a device's configuration space cannot be shown to a guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ConfigError {
    #[error("configuration space reads as all ones: the device is gone or did not leave reset")]
    Gone,
    #[error("configuration space has {size} bytes, expected at least 256")]
    Short { size: usize },
    #[error(
        "header type {header_type:#x} is that of a bridge; only endpoints (type 0) can be given"
    )]
    NoEndpoint { header_type: u8 },
    #[error("BAR {index} is {size:#x} bytes, which register {register:#010x} cannot decode")]
    BarSize { index: u8, size: u64, register: u32 },
    #[error("MSI-X table of {vectors} vectors at {offset:#x} does not fit BAR {bar}")]
    MsixTable { bar: u8, offset: u64, vectors: u16 },
    #[error("it cannot be in GPUDirect clique {clique}: {reason}")]
    Clique { clique: u8, reason: &'static str },
}

/// How one byte of configuration space behaves.
#[derive(Debug, Clone, Copy)]
struct Byte {
    /// Value of emulated bits.
    shadow: u8,
    /// Bits that are read from the shadow; the others are the device's.
    emulated: u8,
    /// Bits of the shadow that the guest may change.
    writable: u8,
    /// Bits of the guest's writes that the device gets.
    passed: u8,
    /// What the device gets in the other bits, when it gets any.
    forced: u8,
}

const DEVICE: Byte = Byte { shadow: 0, emulated: 0, writable: 0, passed: 0xff, forced: 0 };

/// A BAR as its registers decode it.
#[derive(Debug, Clone, Copy)]
struct BarRegister {
    index: u8,
    kind: BarKind,
    size: u64,
}

/// What a write amounted to, beyond its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Nothing.
    Registers,
    /// The guest has reset the function.
    FunctionReset,
}

/// Where a read is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In part at least by the device.
    Device,
    /// By the shadow alone.
    Shadow,
}

/// A device's configuration space as the guest sees it.
#[derive(Debug)]
pub struct ConfigFilter {
    bytes: Vec<Byte>,
    bars: Vec<BarRegister>,
    /// Size of the expansion ROM, 0 for none.
    rom: u64,
    msi: Option<MsiLayout>,
    msix: Option<MsixLayout>,
    /// Bytes and the bit in each that starts a function-level reset.
    resets: Vec<(usize, u8)>,
}

/// What the filter is made from.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The whole configuration space, as read after a reset.
    pub snapshot: &'a [u8],
    /// Sizes of the six BARs, 0 for none.
    pub bar_sizes: [u64; 6],
    /// Size of the expansion ROM, a power of two from 2 KiB to 16 MiB, or 0 where the guest has none.
    pub rom_size: u64,
    /// Number of vectors the host can deliver by pin, MSI and MSI-X.
    pub vectors: [u32; 3],
    /// What is known of this device.
    pub quirks: &'a [&'static Quirk],
    /// Which clique of peers the device is told to be in, 0..=15, if any.
    pub clique: Option<u8>,
}

impl ConfigFilter {
    /// Decides what to show of a device.
    pub fn new(facts: &Facts<'_>) -> Result<Self, ConfigError> {
        let snapshot = facts.snapshot;
        if snapshot.len() < CONVENTIONAL {
            return Err(ConfigError::Short { size: snapshot.len() });
        }
        if word(snapshot, 0) == u16::MAX {
            return Err(ConfigError::Gone);
        }
        let header_type = snapshot[HEADER_TYPE] & !MULTI_FUNCTION;
        if header_type != 0 {
            return Err(ConfigError::NoEndpoint { header_type });
        }
        let mut filter = Self {
            bytes: vec![DEVICE; snapshot.len().min(4096)],
            bars: Vec::new(),
            // One that is smaller than a page has a page for itself, as a BAR.
            rom: if facts.rom_size == 0 { 0 } else { facts.rom_size.max(PAGE) },
            msi: None,
            msix: None,
            resets: Vec::new(),
        };
        filter.header(facts);
        filter.base_addresses(facts)?;
        filter.standard(facts)?;
        filter.extended(snapshot);
        Ok(filter)
    }

    /// Returns where the guest starts a function-level reset: a byte and its bit. Not all devices can.
    pub fn function_reset(&self) -> Option<(u16, u8)> {
        let (at, bit) = self.resets.first()?;
        Some((u16::try_from(*at).ok()?, *bit))
    }

    /// Replaces the emulated bits of `data`, which holds what the device answered at `offset`.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, value) in (usize::from(offset)..).zip(data) {
            *value = match self.bytes.get(at) {
                Some(byte) => (*value & !byte.emulated) | (byte.shadow & byte.emulated),
                None => 0xff,
            };
        }
    }

    /// Returns whether the device must be asked before [`Self::read`].
    pub fn reads_device(&self, offset: u16, length: usize) -> Source {
        let start = usize::from(offset).min(self.bytes.len());
        let end = start.saturating_add(length).min(self.bytes.len());
        let shadowed = self.bytes[start..end].iter().all(|byte| byte.emulated == 0xff);
        if shadowed { Source::Shadow } else { Source::Device }
    }

    /// Takes the guest's `data`, and hands `device` the runs of bytes that it is to get.
    pub fn write(
        &mut self,
        offset: u16,
        data: &[u8],
        mut device: impl FnMut(u16, &[u8]),
    ) -> Written {
        let mut run: Vec<u8> = Vec::with_capacity(4);
        let mut start = offset;
        let mut written = Written::Registers;
        for (at, value) in (offset..).zip(data) {
            let Some(byte) = self.bytes.get_mut(usize::from(at)) else { break };
            byte.shadow = (byte.shadow & !byte.writable) | (value & byte.writable);
            if self.resets.contains(&(usize::from(at), value & 0x80))
                || self.resets.contains(&(usize::from(at), value & 0x01))
            {
                written = Written::FunctionReset;
            }
            if byte.passed != 0 {
                if run.is_empty() {
                    start = at;
                }
                run.push((value & byte.passed) | (byte.forced & !byte.passed));
            } else if !run.is_empty() {
                device(start, &run);
                run.clear();
            }
        }
        if !run.is_empty() {
            device(start, &run);
        }
        written
    }

    /// Returns what the device's command register must hold for its BARs to answer.
    pub fn initial_command(&self, current: u16) -> u16 {
        current | u16::from(self.bytes[COMMAND].forced)
    }

    /// Whether the device's own answer to a read at `offset` shows that its BARs do not answer any more: it was reset
    /// by other ways than the kernel's. One that is silent tells nothing.
    pub fn stopped_decoding(&self, offset: u16, answer: &[u8]) -> bool {
        let at = COMMAND.checked_sub(usize::from(offset));
        let forced = self.bytes[COMMAND].forced;
        let silent = answer.iter().all(|byte| *byte == 0xff);
        !silent && at.and_then(|at| answer.get(at)).is_some_and(|byte| byte & forced != forced)
    }

    /// Returns the BARs as programmed.
    pub fn bars(&self) -> Vec<Bar> {
        let command = self.bytes[COMMAND].shadow;
        let bar = |register: &BarRegister| {
            let at = BARS + 4 * usize::from(register.index);
            let low = self.shadow_dword(at);
            let (address, decode) = match register.kind {
                BarKind::Io => (u64::from(low & !0x3), COMMAND_IO),
                BarKind::Memory32 => (u64::from(low & !0xf), COMMAND_MEMORY),
                BarKind::Memory64 | BarKind::Memory64Prefetchable => {
                    let high = u64::from(self.shadow_dword(at + 4));
                    (high << 32 | u64::from(low & !0xf), COMMAND_MEMORY)
                }
            };
            let decoding = command & decode != 0;
            Bar {
                index: register.index,
                kind: register.kind,
                size: register.size,
                address,
                decoding,
            }
        };
        self.bars.iter().map(bar).chain(self.rom()).collect()
    }

    fn rom(&self) -> Option<Bar> {
        let register = self.shadow_dword(ROM);
        let memory = self.bytes[COMMAND].shadow & COMMAND_MEMORY != 0;
        (self.rom != 0).then(|| Bar {
            index: rom::INDEX,
            kind: BarKind::Memory32,
            size: self.rom,
            address: u64::from(register & ROM_ADDRESS),
            decoding: memory && register & ROM_ENABLED != 0,
        })
    }

    /// Programs BAR `index`, as the guest would.
    pub fn place_bar(&mut self, index: u8, address: u64) {
        let Some(register) = self.bars().into_iter().find(|bar| bar.index == index) else {
            return;
        };
        let wide = matches!(register.kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        let size = if wide { 8 } else { 4 };
        let at = if index == rom::INDEX { ROM } else { BARS + 4 * usize::from(index) };
        for (byte, value) in self.bytes[at..at + size].iter_mut().zip(address.to_le_bytes()) {
            byte.shadow = (byte.shadow & !byte.writable) | (value & byte.writable);
        }
    }

    /// Returns what the guest may change to what it is after power-on.
    pub fn reset(&mut self) {
        for byte in &mut self.bytes {
            byte.shadow &= !byte.writable;
        }
    }

    fn header(&mut self, facts: &Facts<'_>) {
        let decoding = COMMAND_IO | COMMAND_MEMORY;
        self.bytes[COMMAND] = Byte {
            shadow: 0,
            emulated: decoding,
            writable: decoding,
            passed: !decoding,
            forced: 0,
        };
        self.show(HEADER_TYPE, facts.snapshot[HEADER_TYPE] & !MULTI_FUNCTION);
        self.show(BIST, 0);
        self.blank(ROM, 4);
        if self.rom != 0 {
            let writable = (!(self.rom - 1)).to_le_bytes();
            for (byte, writable) in self.bytes[ROM..ROM + 4].iter_mut().zip(writable) {
                byte.writable = writable;
            }
            self.bytes[ROM].writable = 1;
        }
        self.bytes[INTERRUPT_LINE] =
            Byte { shadow: 0xff, emulated: 0xff, writable: 0xff, passed: 0, forced: 0 };
        if facts.vectors[0] == 0 {
            self.show(INTERRUPT_PIN, 0);
        }
    }

    fn base_addresses(&mut self, facts: &Facts<'_>) -> Result<(), ConfigError> {
        self.blank(BARS, 24);
        let mut index = 0;
        while index < 6_u8 {
            let register = dword(facts.snapshot, BARS + 4 * usize::from(index));
            let size = facts.bar_sizes[usize::from(index)];
            let kind = match register & 0xf {
                io if io & 1 != 0 => BarKind::Io,
                memory if memory & 0x6 != 0x4 => BarKind::Memory32,
                memory if memory & 0x8 == 0 => BarKind::Memory64,
                _ => BarKind::Memory64Prefetchable,
            };
            let wide = matches!(kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
            if size != 0 {
                let (least, most) = match kind {
                    BarKind::Io => (4, 1 << 16),
                    BarKind::Memory32 => (16, 1 << 31),
                    BarKind::Memory64 | BarKind::Memory64Prefetchable => (16, 1 << 62),
                };
                let fits = size.is_power_of_two() && (least..=most).contains(&size);
                if !fits || (wide && index == 5) {
                    return Err(ConfigError::BarSize { index, size, register });
                }
                // A BAR smaller than a page has a page for itself, so that it can be mapped.
                let shown = if kind == BarKind::Io { size } else { size.max(PAGE) };
                self.bar_register(BarRegister { index, kind, size: shown }, register);
            }
            index += if wide { 2 } else { 1 };
        }
        Ok(())
    }

    fn bar_register(&mut self, bar: BarRegister, register: u32) {
        let at = BARS + 4 * usize::from(bar.index);
        let writable = (!(bar.size - 1)).to_le_bytes();
        let (flags, length, decode) = match bar.kind {
            BarKind::Io => (register & 0x3, 4, COMMAND_IO),
            BarKind::Memory32 => (register & 0xf, 4, COMMAND_MEMORY),
            BarKind::Memory64 | BarKind::Memory64Prefetchable => {
                (register & 0xf, 8, COMMAND_MEMORY)
            }
        };
        for (byte, writable) in self.bytes[at..at + length].iter_mut().zip(writable) {
            byte.writable = writable;
        }
        let [low, ..] = flags.to_le_bytes();
        self.bytes[at].shadow = low;
        self.bytes[COMMAND].forced |= decode;
        self.bars.push(bar);
    }

    fn standard(&mut self, facts: &Facts<'_>) -> Result<(), ConfigError> {
        let all = capabilities::walk(facts.snapshot);
        // A function has each of these once; of more, the host's kernel knows the first.
        let first = |capability: &Capability| {
            all.iter().find(|other| other.id == capability.id) == Some(capability)
        };
        let kept = |capability: &&Capability| match capability.id {
            MSI => facts.vectors[1] != 0 && !facts.hides(MSI) && first(capability),
            MSIX => facts.vectors[2] != 0 && !facts.hides(MSIX) && first(capability),
            ENHANCED_ALLOCATION => false,
            id => !facts.hides(id),
        };
        for capability in all.iter().filter(|capability| !kept(capability)) {
            let start = usize::from(capability.offset);
            let end = all
                .iter()
                .map(|other| usize::from(other.offset))
                .filter(|other| *other > start)
                .min()
                .unwrap_or(CONVENTIONAL);
            // What lies behind it can be registers of the device's own, which its driver needs. Where nobody knows how
            // long it is, none of it may stay that a row of `quirks` hides for a reason.
            let length = capabilities::length(facts.snapshot, *capability);
            self.blank(start, length.unwrap_or(end - start).min(end - start));
        }
        let mut pointer = capabilities::POINTER;
        for capability in all.iter().filter(kept) {
            self.show(pointer, capability.offset);
            let at = usize::from(capability.offset);
            self.show(at, capability.id);
            pointer = at + 1;
            self.capability(*capability, facts)?;
        }
        if let Some(clique) = facts.clique {
            let at = clique::place(facts.snapshot, clique)?;
            for (at, value) in (usize::from(at)..).zip(clique::capability(clique)) {
                self.show(at, value);
            }
            self.show(pointer, at);
            pointer = usize::from(at) + 1;
        }
        self.show(pointer, 0);
        Ok(())
    }

    fn capability(&mut self, found: Capability, facts: &Facts<'_>) -> Result<(), ConfigError> {
        let at = usize::from(found.offset);
        match found.id {
            POWER_MANAGEMENT => self.edit(at + 4, |byte| {
                // Nothing is reset on the way from D3hot, where the device never was: a guest that takes this for a
                // way to reset it would not try another.
                let emulated = POWER_STATE | NO_SOFT_RESET;
                let (shadow, writable) = (NO_SOFT_RESET, POWER_STATE);
                *byte = Byte { shadow, emulated, writable, passed: !emulated, forced: 0 };
            }),
            VITAL_PRODUCT_DATA => {
                // Bit 15 of the address orders a write; without it a read is done instead.
                self.edit(at + 3, |byte| byte.passed = 0x7f);
                (at + 4..at + 8).for_each(|at| self.edit(at, |byte| byte.passed = 0));
            }
            MSI => self.msi_capability(at, facts.snapshot),
            MSIX => self.msix_capability(at, facts)?,
            EXPRESS => {
                if dword(facts.snapshot, at + 4) & (1 << 28) != 0 {
                    self.resets.push((at + 9, 0x80));
                }
                // An endpoint integrated in the host's root complex sits behind a port here.
                let low = facts.snapshot.get(at + 2).copied().unwrap_or(0);
                if low >> 4 == 9 {
                    self.show(at + 2, low & 0x0f);
                }
            }
            ADVANCED_FEATURES
                if facts.snapshot.get(at + 3).is_some_and(|features| features & 2 != 0) =>
            {
                self.resets.push((at + 4, 0x01));
            }
            _ => {}
        }
        Ok(())
    }

    fn extended(&mut self, snapshot: &[u8]) {
        let all = capabilities::walk_extended(snapshot);
        for capability in &all {
            let at = usize::from(capability.offset);
            let header = if HIDDEN_EXTENDED.contains(&capability.id) {
                let next = all.iter().map(|other| usize::from(other.offset));
                let end = next.filter(|other| *other > at).min().unwrap_or(self.bytes.len());
                let length = capabilities::extended_length(snapshot, *capability);
                self.blank(at, length.unwrap_or(end - at).min(end - at));
                // The null capability (§7.9.28) keeps the chain.
                u32::from(capability.next) << 20
            } else {
                dword(snapshot, at) & 0x000f_ffff | u32::from(capability.next) << 20
            };
            for (at, value) in (at..).zip(header.to_le_bytes()) {
                self.show(at, value);
            }
        }
        if all.is_empty() && self.bytes.len() > CONVENTIONAL {
            // Whatever is there has no list; show that there is none.
            self.blank(CONVENTIONAL, 4);
        }
    }

    /// Shows a constant, which the guest cannot change.
    fn show(&mut self, at: usize, value: u8) {
        self.edit(at, |byte| {
            *byte = Byte { shadow: value, emulated: 0xff, writable: 0, passed: 0, forced: 0 };
        });
    }

    /// Shows zeroes.
    fn blank(&mut self, at: usize, length: usize) {
        (at..at + length).for_each(|at| self.show(at, 0));
    }

    /// Changes the rule of a byte; a hostile list may point beyond the end, where there is none.
    fn edit(&mut self, at: usize, change: impl FnOnce(&mut Byte)) {
        if let Some(byte) = self.bytes.get_mut(at) {
            change(byte);
        }
    }

    fn shadow_word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at].shadow, self.bytes[at + 1].shadow])
    }

    fn shadow_dword(&self, at: usize) -> u32 {
        u32::from(self.shadow_word(at)) | u32::from(self.shadow_word(at + 2)) << 16
    }
}

impl Facts<'_> {
    fn hides(&self, id: u8) -> bool {
        self.quirks.iter().any(|quirk| quirk.effect == Effect::HideCapability(id))
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;

#[cfg(test)]
mod gpu_tests;
