//! Drivers that firmware loaded beside its own: option ROMs of add-in cards, and files on disks. Firmware with
//! Secure Boot starts them only when a certificate in `db` vouches for them.
//!
//! Firmware measures each into register 2 before it starts it; the log shows where it came from.
//! Sources: TCG PC Client Platform Firmware Profile 1.06, §3.3.4.3 (register 2), §10.2.3
//! (`UEFI_IMAGE_LOAD_EVENT`); UEFI 2.10 §10.3 (device paths) and §10.6 (their text).
//!
//! | Field of the event | Offset |
//! |--------------------|--------|
//! | place in memory    | 0      |
//! | length             | 8      |
//! | address of linking | 16     |
//! | length of the path | 24     |
//! | device path        | 32     |

use super::log::{LogError, read};

/// Register of what firmware starts that is not its own.
const REGISTER: u8 = 2;
/// `EV_EFI_BOOT_SERVICES_DRIVER` and `EV_EFI_RUNTIME_SERVICES_DRIVER`.
const KINDS: [u32; 2] = [0x8000_0004, 0x8000_0005];
/// Bytes before the device path.
const HEADER: usize = 32;
/// EISA IDs of the roots of PCI and PCI Express.
const ROOTS: [(u32, &str); 2] = [(0x0a03_41d0, "PciRoot"), (0x0a08_41d0, "PcieRoot")];
/// Most steps of a path that are told.
const MAX_STEPS: usize = 32;

/// A driver that firmware loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Driver {
    /// Where it came from, as UEFI writes it: `PciRoot(0x0)/Pci(0x1,0x0)/Pci(0x0,0x0)`. Empty when the log
    /// does not tell.
    pub path: String,
    /// The UID of the PCI root that the path begins at.
    pub root: Option<u32>,
    /// Device and function at each bus below it.
    pub hops: Vec<(u8, u8)>,
}

/// Returns the drivers that a firmware's log tells of and that were not in the firmware's own flash. The
/// log's word alone: no signature covers it here.
pub fn drivers(log: &[u8]) -> Result<Vec<Driver>, LogError> {
    let events = read(log)?.into_iter();
    let loaded = events.filter(|event| event.register == REGISTER && KINDS.contains(&event.kind));
    Ok(loaded.filter_map(|event| driver(event.data)).collect())
}

/// Reads an event; `None` when the driver is part of the firmware.
fn driver(event: &[u8]) -> Option<Driver> {
    let mut nodes = event.get(HEADER..).unwrap_or_default();
    let (mut found, mut steps) = (Driver::default(), Vec::new());
    while let Some(([kind, sort, low, high], _)) = nodes.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let Some((node, rest)) = nodes.split_at_checked(length).filter(|_| length >= 4) else {
            break;
        };
        match (*kind, *sort, &node[4..]) {
            (0x01, 0x01, [function, device]) => {
                steps.push(format!("Pci({device:#x},{function:#x})"));
                found.hops.push((*device, *function));
            }
            (0x02, 0x01, [a, b, c, d, uid @ ..]) => {
                let uid = uid.first_chunk().map(|uid| u32::from_le_bytes(*uid))?;
                let name = u32::from_le_bytes([*a, *b, *c, *d]);
                let root = ROOTS.into_iter().find(|(id, _)| *id == name);
                steps.extend(root.map(|(_, root)| format!("{root}({uid:#x})")));
                found.root = root.map(|_| uid).or(found.root);
            }
            // A file of the firmware's own volumes.
            (0x04, 0x06 | 0x07, _) => return None,
            (0x04, 0x04, text) => steps.push(super::log::utf16(text)),
            (0x7f, ..) => break,
            _ => {}
        }
        nodes = rest;
    }
    steps.truncate(MAX_STEPS);
    found.hops.truncate(MAX_STEPS);
    found.path = steps.join("/").chars().filter(|c| !c.is_control()).collect();
    Some(found)
}
