//! The firmware's own account of what it measured: which event made which value. The account is only
//! paper; it counts as far as it yields the registers that the TPM signed.
//! Source: TCG PC Client Platform Firmware Profile 1.06, §10 (event log); UEFI 2.10 §3.3 (global variables).
//!
//! All integers are little-endian. The log begins with one record of the old form, which tells the sizes
//! of the digests in all others:
//!
//! | Record              | Fields                                                                |
//! |---------------------|-----------------------------------------------------------------------|
//! | `TCG_PCR_EVENT`     | register 4, kind 4, SHA-1 20, length 4, event                         |
//! | `TCG_EfiSpecIdEvent`| signature 16, class 4, version 3, 1, count 4, (bank 2, size 2)…, vendor's 1 + n |
//! | `TCG_PCR_EVENT2`    | register 4, kind 4, count 4, (bank 2, digest)…, length 4, event       |

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use sha2::{Digest, Sha256};
use types::hex;

use super::wire::SHA256;

/// Longest log that is read, in bytes. Servers with long lists of forbidden programs write about 100 KiB.
pub const MAX_LOG: usize = 512 << 10;
/// Most events of one log.
const MAX_EVENTS: usize = 4096;
/// Most banks of one log.
const MAX_BANKS: usize = 16;
/// Longest text of one event, in characters.
const MAX_TEXT: usize = 160;

/// `EV_NO_ACTION`: told, not measured.
const NO_ACTION: u32 = 3;
/// EV_EFI_HCRTM_EVENT: measured by hardware, before the first program ran (§9.2.2, §10.4.1).
const HCRTM: u32 = 0x8000_0010;
/// `EV_EFI_VARIABLE_DRIVER_CONFIG`.
const VARIABLE_CONFIG: u32 = 0x8000_0001;
/// What the first record's event begins with.
const SPECIFICATION: &[u8; 16] = b"Spec ID Event03\0";
/// What an event of no action in register 0 begins with; the locality in which the register began follows.
const LOCALITY: &[u8; 16] = b"StartupLocality\0";
/// EFI_GLOBAL_VARIABLE, in the order of its bytes in memory.
const GLOBAL: [u8; 16] = [
    0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c,
];
/// Registers of this log; those above are not firmware's or the boot program's.
const REGISTERS: u32 = 24;

/// What the firmware's log tells.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FirmwareLog {
    /// Registers whose signed values the log yields.
    pub explained: Vec<u8>,
    /// Registers that the log tells of and whose signed values it does not yield: its events there prove
    /// nothing.
    pub unexplained: Vec<u8>,
    /// Whether firmware checked what it started; nothing when the first event of register 7 does not count
    /// or is about something else.
    pub secure_boot: Option<bool>,
    /// Every event, in order.
    pub events: Vec<FirmwareEvent>,
    /// Why the log could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread: Option<String>,
}

/// One event of the firmware's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FirmwareEvent {
    /// The register that it went into.
    pub register: u8,
    /// Its kind, as the specification names it. This is the log's word alone: no digest covers it.
    pub kind: String,
    /// The SHA-256 digest that was measured, as hexadecimal digits.
    pub digest: String,
    /// What was measured, in words, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub says: Option<String>,
    /// Whether the words are of what was measured, and its register's value is explained.
    pub proved: bool,
}

/// Why a log cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum LogError {
    #[error("it ends in the middle of an event")]
    Short,
    #[error("it does not begin as a log for TPM 2.0 does")]
    Head,
    #[error("it has no digests of SHA-256")]
    Bank,
    #[error("it has more than {MAX_EVENTS} events, or {MAX_LOG} bytes")]
    Long,
    #[error("an event is of register {register}")]
    Register { register: u32 },
}

/// Compares a log with the values that the TPM signed; nothing when there is none.
pub(super) fn judge(log: &[u8], registers: &BTreeMap<u8, [u8; 32]>) -> Option<FirmwareLog> {
    if log.is_empty() {
        return None;
    }
    let events = match read(log) {
        Ok(events) => events,
        Err(error) => {
            return Some(FirmwareLog { unread: Some(error.to_string()), ..FirmwareLog::default() });
        }
    };
    let replayed = replay(&events);
    let told: BTreeSet<u8> = replayed.keys().copied().collect();
    let quoted = told.iter().filter(|register| registers.contains_key(register)).copied();
    let (explained, unexplained): (Vec<u8>, Vec<u8>) =
        quoted.partition(|register| registers.get(register) == replayed.get(register));
    let counts = |event: &Event<'_>| explained.contains(&event.register) && event.is_whole();
    // The first that was measured there (§3.3.4.8). Kinds are in no digest, and whoever runs later may measure
    // anything: behind a first event that was renamed, a second one would lie.
    let first = events.iter().find(|event| event.register == 7 && event.kind != NO_ACTION);
    let secure_boot = first.filter(|event| counts(event)).and_then(Event::secure_boot);
    let shown = events.iter().filter(|event| event.kind != NO_ACTION).map(|event| FirmwareEvent {
        register: event.register,
        kind: name(event.kind),
        digest: hex::encode(&event.digest),
        says: event.says(),
        proved: counts(event),
    });
    Some(FirmwareLog { events: shown.collect(), explained, unexplained, secure_boot, unread: None })
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event<'a> {
    pub(super) register: u8,
    pub(super) kind: u32,
    digest: [u8; 32],
    pub(super) data: &'a [u8],
}

impl Event<'_> {
    /// Whether what was measured is what the log shows.
    fn is_whole(&self) -> bool {
        Sha256::digest(self.data).as_slice() == self.digest
    }

    fn secure_boot(&self) -> Option<bool> {
        let variable = Variable::read(self.data).filter(|_| self.kind == VARIABLE_CONFIG)?;
        let named = variable.vendor == GLOBAL && variable.name == "SecureBoot";
        named.then_some(variable.value == [1])
    }

    /// The event in words.
    fn says(&self) -> Option<String> {
        let text = match self.kind {
            VARIABLE_CONFIG | 0x8000_0002 | 0x8000_000c | 0x8000_00e0 => {
                let variable = Variable::read(self.data)?;
                match variable.value {
                    [] => format!("{} is not there", variable.name),
                    [value] => format!("{} = {value}", variable.name),
                    value => format!("{}, {} bytes", variable.name, value.len()),
                }
            }
            4 if self.data == [0; 4] => return None,
            4 => "an error of firmware's".to_owned(),
            5 | 0x8000_0007 => String::from_utf8_lossy(self.data).into_owned(),
            8 | 0x0d => utf16(self.data),
            1 | 0x13 | 0x8000_000a => words(self.data)?,
            _ => return None,
        };
        let plain = text.trim_end_matches('\0').chars();
        let plain: String = plain.filter(|c| !c.is_control()).take(MAX_TEXT).collect();
        (!plain.is_empty()).then_some(plain)
    }
}

/// `UEFI_VARIABLE_DATA` (§10.2.6): vendor 16, length of the name in characters 8, of the value 8, both.
struct Variable<'a> {
    vendor: [u8; 16],
    name: String,
    value: &'a [u8],
}

impl<'a> Variable<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let (vendor, rest) = bytes.split_first_chunk::<16>()?;
        let (characters, rest) = rest.split_first_chunk::<8>()?;
        let (length, rest) = rest.split_first_chunk::<8>()?;
        let size = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).ok();
        let (name, rest) = rest.split_at_checked(size(characters)?.checked_mul(2)?)?;
        let value = rest.get(..size(length)?)?;
        Some(Self { vendor: *vendor, name: utf16(name), value })
    }
}

pub(super) fn utf16(bytes: &[u8]) -> String {
    let pairs = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    char::decode_utf16(pairs.take_while(|unit| *unit != 0))
        .map(|c| c.unwrap_or('\u{fffd}'))
        .collect()
}

/// Text of bytes that may be anything else.
fn words(bytes: &[u8]) -> Option<String> {
    let is_text = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ' || *byte == 0;
    bytes.iter().all(is_text).then(|| String::from_utf8_lossy(bytes).into_owned())
}

/// Bytes that are read from the start.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], LogError> {
        let (now, rest) = self.0.split_at_checked(count).ok_or(LogError::Short)?;
        self.0 = rest;
        Ok(now)
    }

    fn u16(&mut self) -> Result<u16, LogError> {
        let (now, rest) = self.0.split_first_chunk().ok_or(LogError::Short)?;
        self.0 = rest;
        Ok(u16::from_le_bytes(*now))
    }

    fn u32(&mut self) -> Result<u32, LogError> {
        let (now, rest) = self.0.split_first_chunk().ok_or(LogError::Short)?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*now))
    }

    /// A length of four bytes and as many bytes.
    fn sized(&mut self) -> Result<&'a [u8], LogError> {
        let length = usize::try_from(self.u32()?).map_err(|_| LogError::Short)?;
        self.take(length)
    }
}

/// Reads the first record: each bank's size of digests.
fn banks(reader: &mut Reader<'_>) -> Result<BTreeMap<u16, usize>, LogError> {
    if (reader.u32()?, reader.u32()?) != (0, NO_ACTION) {
        return Err(LogError::Head);
    }
    let _digest = reader.take(20)?;
    let mut event = Reader(reader.sized()?);
    if event.take(16)? != SPECIFICATION {
        return Err(LogError::Head);
    }
    let _class_and_version = event.take(8)?;
    let count = usize::try_from(event.u32()?).ok().filter(|count| *count <= MAX_BANKS);
    let mut banks = BTreeMap::new();
    for _ in 0..count.ok_or(LogError::Head)? {
        let (bank, size) = (event.u16()?, usize::from(event.u16()?));
        banks.insert(bank, size);
    }
    if banks.get(&SHA256) == Some(&32) { Ok(banks) } else { Err(LogError::Bank) }
}

/// Reads a whole log, with the digests of SHA-256's bank.
pub(super) fn read(log: &[u8]) -> Result<Vec<Event<'_>>, LogError> {
    if log.len() > MAX_LOG {
        return Err(LogError::Long);
    }
    let mut reader = Reader(log);
    let banks = banks(&mut reader)?;
    let mut events = Vec::new();
    while !reader.0.is_empty() {
        if events.len() == MAX_EVENTS {
            return Err(LogError::Long);
        }
        let (register, kind, count) = (reader.u32()?, reader.u32()?, reader.u32()?);
        if register >= REGISTERS {
            // Register -1 is for events of no action only.
            let nowhere = register == u32::MAX && kind == NO_ACTION;
            nowhere.then_some(()).ok_or(LogError::Register { register })?;
        }
        let mut digest = None;
        for _ in 0..usize::try_from(count).map_or(usize::MAX, |count| count.min(MAX_BANKS + 1)) {
            let bank = reader.u16()?;
            let bytes = reader.take(*banks.get(&bank).ok_or(LogError::Bank)?)?;
            if bank == SHA256 {
                digest = bytes.first_chunk::<32>().copied();
            }
        }
        let data = reader.sized()?;
        if register < REGISTERS {
            // What extends nothing needs none.
            let absent = if kind == NO_ACTION { Some([0; 32]) } else { None };
            let digest = digest.or(absent).ok_or(LogError::Bank)?;
            let register = u8::try_from(register).map_err(|_| LogError::Register { register })?;
            events.push(Event { register, kind, digest, data });
        }
    }
    Ok(events)
}

/// What the registers hold after the events, for each that has any.
fn replay(events: &[Event<'_>]) -> BTreeMap<u8, [u8; 32]> {
    // Register 0's last byte is the locality in which the TPM was started (§9.2.2): 4 where hardware measured
    // before the first program ran, whether or not firmware says so.
    let begin = |locality: u8| {
        let mut begin = [0; 32];
        begin[31] = locality;
        begin
    };
    let by_hardware = events.iter().any(|event| event.register == 0 && event.kind == HCRTM);
    let mut values = BTreeMap::new();
    for event in events {
        if event.kind == NO_ACTION {
            if let Some([locality]) = event.data.strip_prefix(LOCALITY)
                && event.register == 0
            {
                values.entry(0).or_insert(begin(*locality));
            }
            continue;
        }
        let locality = if event.register == 0 && by_hardware { 4 } else { 0 };
        let value = values.entry(event.register).or_insert(begin(locality));
        *value = Sha256::new().chain_update(*value).chain_update(event.digest).finalize().into();
    }
    values
}

/// The specification's name of a kind (§10.4.1).
fn name(kind: u32) -> String {
    let name = match kind {
        0x01 => "EV_POST_CODE",
        0x04 => "EV_SEPARATOR",
        0x05 => "EV_ACTION",
        0x06 => "EV_EVENT_TAG",
        0x07 => "EV_S_CRTM_CONTENTS",
        0x08 => "EV_S_CRTM_VERSION",
        0x09 => "EV_CPU_MICROCODE",
        0x0a => "EV_PLATFORM_CONFIG_FLAGS",
        0x0b => "EV_TABLE_OF_DEVICES",
        0x0c => "EV_COMPACT_HASH",
        0x0d => "EV_IPL",
        0x0e => "EV_IPL_PARTITION_DATA",
        0x0f => "EV_NONHOST_CODE",
        0x10 => "EV_NONHOST_CONFIG",
        0x11 => "EV_NONHOST_INFO",
        0x12 => "EV_OMIT_BOOT_DEVICE_EVENTS",
        0x13 => "EV_POST_CODE2",
        0x8000_0001 => "EV_EFI_VARIABLE_DRIVER_CONFIG",
        0x8000_0002 => "EV_EFI_VARIABLE_BOOT",
        0x8000_0003 => "EV_EFI_BOOT_SERVICES_APPLICATION",
        0x8000_0004 => "EV_EFI_BOOT_SERVICES_DRIVER",
        0x8000_0005 => "EV_EFI_RUNTIME_SERVICES_DRIVER",
        0x8000_0006 => "EV_EFI_GPT_EVENT",
        0x8000_0007 => "EV_EFI_ACTION",
        0x8000_0008 => "EV_EFI_PLATFORM_FIRMWARE_BLOB",
        0x8000_0009 => "EV_EFI_HANDOFF_TABLES",
        0x8000_000a => "EV_EFI_PLATFORM_FIRMWARE_BLOB2",
        0x8000_000b => "EV_EFI_HANDOFF_TABLES2",
        0x8000_000c => "EV_EFI_VARIABLE_BOOT2",
        0x8000_000d => "EV_EFI_GPT_EVENT2",
        HCRTM => "EV_EFI_HCRTM_EVENT",
        0x8000_00e0 => "EV_EFI_VARIABLE_AUTHORITY",
        0x8000_00e1 => "EV_EFI_SPDM_FIRMWARE_BLOB",
        0x8000_00e2 => "EV_EFI_SPDM_FIRMWARE_CONFIG",
        other => return format!("{other:#x}"),
    };
    name.to_owned()
}
