//! NVIDIA's GPUDirect clique: a capability by which the driver learns, in a guest, which GPUs may
//! reach each other directly. It is not the device's own; it is shown where the device has nothing.
//!
//! | Offset | Bits  | Meaning                                          |
//! |--------|-------|--------------------------------------------------|
//! | 0      | 7:0   | 0x09: vendor-specific                            |
//! | 1      | 7:0   | next capability                                  |
//! | 2      | 7:0   | 8: length                                        |
//! | 3..6   |       | "P2P"                                            |
//! | 6      | 2:0   | version, 0                                       |
//! | 6      | 6:3   | clique                                           |
//! | 6, 7   |       | else 0                                           |
//!
//! Source: NVIDIA's format as QEMU docs and hw/vfio/pci-quirks.c describe it ("NVIDIA GPUDirect P2P
//! Vendor capability"), which has the driver look at 0xc8 up to Turing and at 0xd4 from Turing on.

use super::ConfigError;
use crate::vfio::capabilities::{self, dword, word};

/// Where the driver looks, in the order of preference.
const PLACES: [u8; 2] = [0xc8, 0xd4];
/// Length of the capability, and what one of an unknown length is taken to have.
const LENGTH: usize = 8;
/// NVIDIA's vendor id.
const NVIDIA: u16 = 0x10de;
/// Classes of GPUs, without the programming interface: VGA and 3D controllers.
const CLASSES: [u32; 2] = [0x03_00, 0x03_02];
/// Most cliques.
const CLIQUES: u8 = 16;

/// Returns the capability, the pointer to the next one left zero.
pub(super) fn capability(clique: u8) -> [u8; LENGTH] {
    [0x09, 0, 8, b'P', b'2', b'P', clique << 3, 0]
}

/// Returns where the capability goes in the configuration space `snapshot`.
pub(super) fn place(snapshot: &[u8], clique: u8) -> Result<u8, ConfigError> {
    let refuse = |reason| Err(ConfigError::Clique { clique, reason });
    if clique >= CLIQUES {
        return refuse("there are cliques 0 to 15");
    }
    if word(snapshot, 0) != NVIDIA || !CLASSES.contains(&(dword(snapshot, 8) >> 16)) {
        return refuse("it is not a GPU of NVIDIA, whose driver alone knows cliques");
    }
    let taken: Vec<(usize, usize)> = capabilities::walk(snapshot)
        .iter()
        .map(|found| {
            let start = usize::from(found.offset);
            (start, start + capabilities::length(snapshot, *found).unwrap_or(LENGTH))
        })
        .collect();
    let free = |place: &&u8| {
        let (start, end) = (usize::from(**place), usize::from(**place) + LENGTH);
        taken.iter().all(|(from, to)| *to <= start || *from >= end)
    };
    match PLACES.iter().find(free) {
        Some(place) => Ok(*place),
        None => refuse("it has capabilities of its own at 0xc8 and at 0xd4"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU with capabilities (id, offset) in a list.
    fn gpu(list: &[(u8, u8)]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[..4].copy_from_slice(&[0xde, 0x10, 0x30, 0x23]);
        config[6] = 0x10;
        config[8..12].copy_from_slice(&[0xa1, 0x00, 0x02, 0x03]);
        let mut pointer = 0x34;
        for (id, offset) in list {
            config[pointer] = *offset;
            config[usize::from(*offset)] = *id;
            pointer = usize::from(*offset) + 1;
        }
        config
    }

    #[test]
    fn the_first_free_place_is_taken() {
        assert_eq!(place(&gpu(&[(0x01, 0x40), (0x10, 0x60)]), 3), Ok(0xc8));
        // MSI-X at 0xc8, as GPUs from Turing on have it, ends at 0xd4.
        assert_eq!(place(&gpu(&[(0x01, 0x40), (0x11, 0xc8)]), 3), Ok(0xd4));
        assert_eq!(place(&gpu(&[(0x10, 0xa0)]), 0).map_err(|_| ()), Err(()));
    }

    #[test]
    fn cliques_are_for_gpus_of_nvidia_only() {
        let mut other = gpu(&[]);
        other[0] = 0x02;
        assert!(place(&other, 0).is_err());
        let mut audio = gpu(&[]);
        audio[10..12].copy_from_slice(&[0x03, 0x04]);
        assert!(place(&audio, 0).is_err());
        assert!(place(&gpu(&[]), 16).is_err());
    }

    #[test]
    fn the_clique_is_in_bits_22_to_19_of_the_second_dword() {
        let bytes = capability(0xf);
        let second = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        assert_eq!((second >> 19 & 0xf, &bytes[3..6]), (0xf, &b"P2P"[..]));
    }
}
