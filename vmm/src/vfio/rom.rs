//! Expansion ROMs, of the GPUs whose drivers have nowhere else to read what is in them. Others have none for the
//! guest: nothing needs it, and firmware would run what lies there.
//!
//! Linux' amdgpu does not start without the tables of the video BIOS. It looks for them in the ROM, and then in
//! registers that lead to the flash chip, which the Instinct MI300 has not (drivers/gpu/drm/amd/amdgpu:
//! amdgpu_bios.c, and smuio_v13_0_3.c beside its siblings); ACPI tables tell them on the host only.
//!
//! What is in the ROM is read once, as the kernel maps the ROM anew for each access, and is the guest's business.
//! Source: PCI Local Bus Specification 3.0 §6.2.5.2; linux/vfio.h, VFIO_PCI_ROM_REGION_INDEX.

use std::ops::RangeInclusive;

use super::{
    capabilities::word,
    device::{Device, Region},
};

/// Number of the ROM's register among the BARs: it comes behind the six.
pub const INDEX: u8 = 6;
/// Sizes that the register can have, in bytes.
const SIZES: RangeInclusive<u64> = 1 << 11..=16 << 20;

/// AMD, and where the base class is: that of displays, and of processing accelerators.
const AMD: u16 = 0x1002;
const BASE_CLASS: usize = 0x0b;
const GPUS: [u8; 2] = [0x03, 0x12];

/// Returns what is in the ROM of a device that the guest needs it of, empty for others. `snapshot` is its
/// configuration space.
pub(super) fn read(device: &dyn Device, snapshot: &[u8]) -> Vec<u8> {
    let is_gpu = snapshot.get(BASE_CLASS).is_some_and(|class| GPUS.contains(class));
    if word(snapshot, 0) != AMD || !is_gpu {
        return Vec::new();
    }
    // The kernel has looked whether there is an image in it. A GPU may do without.
    let size = device.region(Region::Rom).map_or(0, |region| region.size);
    let Ok(length) = usize::try_from(size) else { return Vec::new() };
    if !size.is_power_of_two() || !SIZES.contains(&size) {
        return Vec::new();
    }
    let mut bytes = vec![0; length];
    match device.read(Region::Rom, 0, &mut bytes) {
        Ok(()) => bytes,
        Err(_) => Vec::new(),
    }
}

/// Reads `rom` at `offset`; behind its end there is nothing.
pub(super) fn copy(rom: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).ok();
    let there = start.and_then(|start| rom.get(start..)).unwrap_or_default();
    data.fill(0xff);
    data.iter_mut().zip(there).for_each(|(byte, value)| *byte = *value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::fake::{FakeDevice, lock};

    fn found(vendor: u16, class: u8, rom: &[u8]) -> usize {
        let device = FakeDevice::nvme().with_rom(rom);
        let snapshot = {
            let mut config = lock(&device.config);
            config[..2].copy_from_slice(&vendor.to_le_bytes());
            config[BASE_CLASS] = class;
            config.clone()
        };
        read(&device, &snapshot).len()
    }

    #[test]
    fn the_rom_of_amds_gpus_is_read_and_no_other() {
        let rom = vec![0x55; 0x2_0000];
        assert_eq!(found(AMD, 0x12, &rom), 0x2_0000);
        assert_eq!(found(AMD, 0x03, &rom), 0x2_0000);
        assert_eq!(found(AMD, 0x04, &rom), 0, "sound");
        assert_eq!(found(0x10de, 0x03, &rom), 0);
    }

    #[test]
    fn a_rom_that_no_register_decodes_is_none() {
        assert_eq!(found(AMD, 0x12, &[]), 0);
        assert_eq!(found(AMD, 0x12, &vec![0; 0x3000]), 0);
        assert_eq!(found(AMD, 0x12, &vec![0; 0x400]), 0);
    }

    #[test]
    fn behind_the_rom_there_is_nothing() {
        let mut data = [0; 4];
        copy(&[1, 2, 3], 1, &mut data);
        assert_eq!(data, [2, 3, 0xff, 0xff]);
        copy(&[1, 2, 3], u64::MAX, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
}
