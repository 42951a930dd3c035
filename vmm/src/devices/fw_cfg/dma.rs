//! One DMA request of fw_cfg.
//! Source: QEMU docs/specs/fw_cfg.rst, "Guest-side DMA Interface".
//!
//! | Offset | Bytes | Field of the descriptor, big-endian                              |
//! |--------|-------|------------------------------------------------------------------|
//! | 0      | 4     | control: bits 31:16 key, 4 write, 3 select, 2 skip, 1 read, 0 error |
//! | 4      | 4     | length                                                           |
//! | 8      | 8     | address                                                          |

use vm_memory::{Bytes, GuestAddress};

use super::{Content, FwCfg};
use crate::sys::memory::GuestRam;

const ERROR: u32 = 1 << 0;
const READ: u32 = 1 << 1;
const SKIP: u32 = 1 << 2;
const SELECT: u32 = 1 << 3;
const WRITE: u32 = 1 << 4;
/// Zeros that follow an item's end are written in pieces of this many bytes.
const ZEROS: [u8; 4096] = [0; 4096];

impl FwCfg {
    /// Carries out the request whose descriptor lies at `address`, and says in its control field
    /// how that went. A descriptor that is not in memory is ignored.
    pub(super) fn transfer(&mut self, address: u64, ram: &GuestRam) {
        let mut descriptor = [0; 16];
        let place = GuestAddress(address);
        if address.checked_add(16).is_none() || ram.read_slice(&mut descriptor, place).is_err() {
            return;
        }
        let [a, b, c, d, e, f, g, h, to @ ..] = descriptor;
        let control = u32::from_be_bytes([a, b, c, d]);
        let length = u32::from_be_bytes([e, f, g, h]);
        if control & SELECT != 0 {
            self.select(u16::from_be_bytes([a, b]));
        }
        let result = if control & READ != 0 {
            self.read_to(u64::from_be_bytes(to), length, ram)
        } else if control & WRITE != 0 {
            self.write_from(u64::from_be_bytes(to), length, ram)
        } else {
            if control & SKIP != 0 {
                self.selected.take(usize::try_from(length).unwrap_or(usize::MAX));
            }
            0
        };
        // The descriptor was in memory above, and guest memory does not go away.
        let _ = ram.write_slice(&result.to_be_bytes(), place);
    }

    /// Writes the selected item, if it is one that the guest writes: from its start to its end.
    fn write_from(&mut self, address: u64, length: u32, ram: &GuestRam) -> u32 {
        let item = self.selected.key.and_then(|key| self.items.get_mut(&key));
        let Some(Content::Written(bytes)) = item else { return ERROR };
        let is_whole = self.selected.next == 0 && usize::try_from(length) == Ok(bytes.len());
        if !is_whole || address.checked_add(length.into()).is_none() {
            return ERROR;
        }
        let mut new = vec![0; bytes.len()];
        if ram.read_slice(&mut new, GuestAddress(address)).is_err() {
            return ERROR;
        }
        bytes.clone_from(&new);
        self.selected.next = new.len();
        self.selected.bytes = new;
        0
    }

    fn read_to(&mut self, address: u64, length: u32, ram: &GuestRam) -> u32 {
        if address.checked_add(u64::from(length)).is_none() {
            return ERROR;
        }
        let bytes = self.selected.take(usize::try_from(length).unwrap_or(usize::MAX));
        let mut next = address;
        if ram.write_slice(bytes, GuestAddress(next)).is_err() {
            return ERROR;
        }
        next += bytes.len() as u64;
        let mut left = u64::from(length) - bytes.len() as u64;
        while left > 0 {
            let count = left.min(ZEROS.len() as u64);
            let piece = usize::try_from(count).unwrap_or(ZEROS.len());
            if ram.write_slice(&ZEROS[..piece], GuestAddress(next)).is_err() {
                return ERROR;
            }
            (next, left) = (next + count, left - count);
        }
        0
    }
}
