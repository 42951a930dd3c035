//! Where a guest's kernel keeps its VMCOREINFO: an item that the guest writes, and a dump follows.
//! Whether there is such a note at the place that it names is not known here.
//! Source: QEMU docs/specs/vmcoreinfo.rst; Linux include/uapi/linux/qemu_fw_cfg.h
//! (`struct fw_cfg_vmcoreinfo`).
//!
//! | Offset | Bytes | Field of the item, little-endian                    |
//! |--------|-------|-----------------------------------------------------|
//! | 0      | 2     | host_format: what the host takes; 1 an ELF note     |
//! | 2      | 2     | guest_format: what the guest has; 0 nothing, 1 that |
//! | 4      | 4     | size of the note, in bytes                          |
//! | 8      | 8     | guest-physical address of the note                  |

/// Name of the file.
pub const VMCOREINFO_FILE: &str = "etc/vmcoreinfo";

/// Bytes of the item.
const SIZE: usize = 16;
/// Format: an ELF note.
const ELF: u16 = 1;

/// Where a guest says that its note is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotePlace {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes, its header and padding included.
    pub size: u32,
}

/// Returns the item before the guest has written it.
pub fn vmcoreinfo_item() -> Vec<u8> {
    let mut item = ELF.to_le_bytes().to_vec();
    item.resize(SIZE, 0);
    item
}

/// Returns where the note is, once the guest has said so.
pub fn note_place(item: &[u8]) -> Option<NotePlace> {
    let [_, _, format @ .., s0, s1, s2, s3, a0, a1, a2, a3, a4, a5, a6, a7] = item else {
        return None;
    };
    let size = u32::from_le_bytes([*s0, *s1, *s2, *s3]);
    let address = u64::from_le_bytes([*a0, *a1, *a2, *a3, *a4, *a5, *a6, *a7]);
    (format == ELF.to_le_bytes()).then_some(NotePlace { address, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_guest_has_them() {
        let item = [0, 0, 1, 0, 4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1];
        let place = NotePlace { address: 0x0102_0304_0506_0708, size: 0x0102_0304 };
        assert_eq!(note_place(&item), Some(place));
        // Another format is none that a dump could have, and less is no item.
        assert_eq!(note_place(&[0, 0, 2, 0, 4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1]), None);
        assert_eq!(note_place(&item[..15]), None);
    }

    #[test]
    fn a_guest_that_said_nothing_has_no_note() {
        assert_eq!(vmcoreinfo_item(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(note_place(&vmcoreinfo_item()), None);
    }
}
