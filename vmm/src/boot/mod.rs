//! Loading a Linux guest: kernel, initramfs, command line, memory map. The kernel's file says
//! itself which of the two protocols it speaks.

mod bzimage;
mod elf;
mod pvh;

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};

use crate::{layout, sys::memory::Ram};

/// State of the first virtual CPU when the guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The state after reset: firmware at 0xffff_fff0, in real mode (Intel SDM vol. 3A, "First Instruction Executed").
    Reset,
    /// 64-bit mode with an identity map; `rsi` points to the boot parameters
    /// (Linux Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").
    Linux64 {
        /// First instruction.
        address: u64,
    },
    /// 32-bit protected mode without paging; `ebx` points to the start information
    /// (Xen docs/misc/pvh.pandoc).
    Pvh {
        /// First instruction.
        address: u64,
    },
}

/// What to load.
pub struct Linux<'a> {
    /// A bzImage or a PVH vmlinux.
    pub kernel: &'a mut File,
    /// The initramfs, if any.
    pub initrd: Option<&'a mut File>,
    /// Command line.
    pub cmdline: &'a str,
    /// Address of the ACPI root pointer.
    pub acpi: u64,
}

/// Why a guest cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum BootError {
    #[error("cannot read the {file}")]
    Read { file: &'static str, source: std::io::Error },
    #[error(
        "the kernel is neither a bzImage nor an ELF vmlinux: it has no \"HdrS\" at byte 514 and no \
         ELF magic at byte 0"
    )]
    NotAKernel,
    #[error("the kernel is damaged: {0}")]
    Damaged(&'static str),
    #[error("the kernel is a {0}; a 64-bit x86 Linux bzImage or PVH vmlinux is needed")]
    Unsupported(&'static str),
    #[error(
        "the {file} needs guest memory up to {end:#x}, but there is only {available:#x} below the \
         PCI gap; give the machine more memory"
    )]
    TooLarge { file: &'static str, end: u64, available: u64 },
    #[error("the command line has {length} bytes; this kernel takes {most}")]
    CommandLine { length: usize, most: usize },
    #[error("the command line holds a NUL byte at position {0}")]
    CommandLineNul(usize),
}

/// Loads everything into `ram` and returns where to start.
pub fn load(linux: Linux<'_>, ram: &Ram) -> Result<Entry, BootError> {
    if let Some(position) = linux.cmdline.bytes().position(|byte| byte == 0) {
        return Err(BootError::CommandLineNul(position));
    }
    let mut head = [0; 0x206];
    let length = read_head(linux.kernel, &mut head)?;
    if length >= 4 && head[..4] == *b"\x7fELF" {
        if let Some(other) = elf::of_another_machine(&head[..length]) {
            return Err(BootError::Unsupported(other));
        }
        return pvh::load(linux, ram);
    }
    if length == head.len() && head[0x202..0x206] == *b"HdrS" {
        return bzimage::load(linux, ram);
    }
    Err(BootError::NotAKernel)
}

fn read_head(file: &mut File, head: &mut [u8]) -> Result<usize, BootError> {
    let read = |source| BootError::Read { file: "kernel", source };
    file.seek(SeekFrom::Start(0)).map_err(read)?;
    let mut length = 0;
    while length < head.len() {
        match file.read(&mut head[length..]).map_err(read)? {
            0 => break,
            count => length += count,
        }
    }
    Ok(length)
}

/// Kind of a piece of the memory map, as e820 and PVH number them.
const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// Returns the guest's memory map: (address, length, kind).
fn memory_map(ram: &Ram) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, layout::LOW_RAM_END, RAM),
        (layout::LOW_RAM_END, layout::HIGH_RAM - layout::LOW_RAM_END, RESERVED),
        (layout::ECAM, layout::ECAM_SIZE, RESERVED),
    ];
    for region in &ram.regions {
        let end = region.address + region.size;
        let start = region.address.max(layout::HIGH_RAM);
        if end > start {
            map.push((start, end - start, RAM));
        }
    }
    map.sort_unstable();
    map
}

/// Returns the end of guest memory below the PCI gap.
fn low_end(ram: &Ram) -> u64 {
    let below = ram.regions.iter().filter(|region| region.address < layout::RAM_GAP);
    below.map(|region| region.address + region.size).max().unwrap_or(0)
}

/// Writes the command line and its terminating zero.
fn write_cmdline(cmdline: &str, most: usize, ram: &Ram) -> Result<(), BootError> {
    let length = cmdline.len();
    if length >= most {
        return Err(BootError::CommandLine { length, most: most.saturating_sub(1) });
    }
    let mut bytes = cmdline.as_bytes().to_vec();
    bytes.push(0);
    write(ram, layout::COMMAND_LINE, &bytes)
}

/// Loads the initramfs as high as it may lie, and returns its address and size. An empty file is none.
fn load_initrd(
    initrd: Option<&mut File>,
    kernel_end: u64,
    highest: u64,
    ram: &Ram,
) -> Result<(u64, u64), BootError> {
    let Some(file) = initrd else { return Ok((0, 0)) };
    let read = |source| BootError::Read { file: "initramfs", source };
    let size = file.seek(SeekFrom::End(0)).map_err(read)?;
    if size == 0 {
        return Ok((0, 0));
    }
    file.seek(SeekFrom::Start(0)).map_err(read)?;
    let available = low_end(ram).min(highest.saturating_add(1));
    let address = available.checked_sub(size).map(|address| address & !0xfff);
    match address {
        Some(address) if address >= kernel_end => {
            read_into(file, "initramfs", address, size, ram)?;
            Ok((address, size))
        }
        Some(_) | None => {
            let end = kernel_end.saturating_add(size);
            Err(BootError::TooLarge { file: "initramfs", end, available })
        }
    }
}

/// Reads `size` bytes of `file`, from where it stands, into guest memory.
fn read_into(
    file: &mut impl ReadVolatile,
    name: &'static str,
    address: u64,
    size: u64,
    ram: &Ram,
) -> Result<(), BootError> {
    let available = low_end(ram);
    let end = address.saturating_add(size);
    let too_large = BootError::TooLarge { file: name, end, available };
    let Ok(count) = usize::try_from(size) else { return Err(too_large) };
    if end > available || !ram.memory.address_in_range(GuestAddress(address)) {
        return Err(too_large);
    }
    ram.memory.read_exact_volatile_from(GuestAddress(address), file, count).map_err(|error| {
        BootError::Read { file: name, source: std::io::Error::other(error.to_string()) }
    })
}

fn write(ram: &Ram, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    ram.memory.write_slice(bytes, GuestAddress(address)).map_err(|_| BootError::TooLarge {
        file: "boot data",
        end: address.saturating_add(bytes.len() as u64),
        available: low_end(ram),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use types::vm::MemoryBacking;

    use super::*;

    fn ram(mib: u64) -> Ram {
        Ram::new(&[(0, mib << 20)], MemoryBacking::Memfd).expect("memory")
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("written");
        file
    }

    fn try_load(kernel: &[u8], initrd: Option<&[u8]>, cmdline: &str) -> Result<Entry, BootError> {
        load_into(&ram(16), kernel, initrd, cmdline)
    }

    fn load_into(
        ram: &Ram,
        kernel: &[u8],
        initrd: Option<&[u8]>,
        cmdline: &str,
    ) -> Result<Entry, BootError> {
        let (mut kernel, mut initrd) = (file(kernel), initrd.map(file));
        let initrd = initrd.as_mut();
        load(Linux { kernel: &mut kernel, initrd, cmdline, acpi: layout::ACPI }, ram)
    }

    /// A bzImage of protocol 2.15 with one setup sector and `payload` bytes of 64-bit code.
    pub(super) fn bzimage(payload: usize) -> Vec<u8> {
        let mut image = vec![0u8; 1024 + payload];
        image[0x1f1] = 1;
        image[0x201] = 0x6a;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
        image[0x211] = 1;
        image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        image[0x230..0x234].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image[0x234] = 1;
        image[0x236] = 1;
        image[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
        image[0x258..0x260].copy_from_slice(&0x10_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x10_0000u32.to_le_bytes());
        image
    }

    #[test]
    fn files_that_are_no_kernel_are_refused() {
        assert!(matches!(try_load(b"", None, ""), Err(BootError::NotAKernel)));
        assert!(matches!(try_load(&[7; 4096], None, ""), Err(BootError::NotAKernel)));
        assert!(matches!(try_load(b"\x7fELF", None, ""), Err(BootError::Damaged(_))));
        // A multiboot kernel, as Xen's and GNU Mach's, and one for AArch64.
        let mut elf = b"\x7fELF\x01\x01\x01".to_vec();
        elf.resize(64, 0);
        assert!(matches!(try_load(&elf, None, ""), Err(BootError::Unsupported(_))));
        (elf[4], elf[18]) = (2, 183);
        assert!(matches!(try_load(&elf, None, ""), Err(BootError::Unsupported(_))));
        assert!(matches!(try_load(&bzimage(0)[..0x230], None, ""), Err(BootError::Damaged(_))));
    }

    #[test]
    fn a_pvh_kernel_is_entered_by_its_note_and_has_room_for_what_it_finds_zeroed() {
        let load = |address: u64, size: u64, entry: u32| {
            let note = elf::tests::note(b"Xen\0", 18, &entry.to_le_bytes(), 4);
            let segments: [(u32, u64, u64, u64, &[u8]); 3] =
                [(1, address, 16, 1, &[7; 16]), (1, 0x20_0000, size, 1, &[]), (4, 0, 0, 4, &note)];
            try_load(&elf::tests::elf(&segments), Some(b""), "quiet")
        };
        let entry = load(0x10_0000, 0x1000, 0x10_0004).expect("sound");
        assert_eq!(entry, Entry::Pvh { address: 0x10_0004 });
        assert!(load(0xf_f000, 0x1000, 0x10_0004).is_ok());
        let below = load(0x8000, 0x1000, 0x10_0004);
        assert!(matches!(below, Err(BootError::Unsupported(_))), "{below:?}");
        let large = load(0x10_0000, 1 << 40, 0x10_0004);
        assert!(matches!(large, Err(BootError::TooLarge { file: "kernel", .. })), "{large:?}");
        let lost = load(0x10_0000, 0x1000, 0x20_1000);
        assert!(matches!(lost, Err(BootError::Damaged(_))), "{lost:?}");
    }

    /// Xen's `start_info.h`: the number of modules, and where their list is.
    #[test]
    fn a_pvh_kernel_is_told_of_a_list_of_modules_where_there_are_some() {
        let note = elf::tests::note(b"Xen\0", 18, &0x10_0000u32.to_le_bytes(), 4);
        let kernel = elf::tests::elf(&[(1, 0x10_0000, 16, 1, &[7; 16]), (4, 0, 0, 4, &note)]);
        let told = |initrd: Option<&[u8]>| {
            let ram = ram(16);
            load_into(&ram, &kernel, initrd, "").expect("sound");
            let mut told = [0; 12];
            let at = GuestAddress(layout::PVH_START_INFO + 12);
            ram.memory.read_slice(&mut told, at).expect("in memory");
            told
        };
        assert_eq!(told(None), [0; 12]);
        assert_eq!(told(Some(b"")), [0; 12]);
        let list = layout::PVH_MODULES.to_le_bytes();
        assert_eq!(told(Some(b"initrd")), [&[1, 0, 0, 0][..], &list].concat()[..]);
    }

    #[test]
    fn a_bzimage_of_an_old_protocol_is_not_called_damaged() {
        // As iPXE's: protocol 2.07, whose header ends at 0x248.
        let mut image = bzimage(4096);
        (image[0x201], image[0x206]) = (0x46, 7);
        let refusal = try_load(&image, None, "").expect_err("it has no 64-bit entry");
        assert!(matches!(refusal, BootError::Unsupported(_)), "{refusal}");
        image[0x206] = 15;
        let refusal = try_load(&image, None, "").expect_err("protocol 2.15 has more");
        assert!(matches!(refusal, BootError::Damaged(_)), "{refusal}");
    }

    #[test]
    fn a_bzimage_that_is_cut_short_is_refused() {
        let mut image = bzimage(4096);
        image[0x1f4..0x1f8].copy_from_slice(&256u32.to_le_bytes());
        assert!(try_load(&image, None, "").is_ok());
        let refusal = try_load(&image[..image.len() - 512], None, "").expect_err("cut");
        assert!(matches!(refusal, BootError::Damaged(_)), "{refusal}");
    }

    #[test]
    fn a_bzimage_starts_at_its_64_bit_entry() {
        let entry = try_load(&bzimage(4096), Some(b"initrd"), "console=ttyS0").expect("loads");
        assert_eq!(entry, Entry::Linux64 { address: 0x10_0200 });
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let refusal =
            try_load(&bzimage(4096), Some(&vec![0; 15 << 20]), "").expect_err("too large");
        assert!(matches!(refusal, BootError::TooLarge { file: "initramfs", .. }), "{refusal}");
        let refusal = try_load(&bzimage(4096), None, &"x".repeat(3000)).expect_err("too long");
        assert!(
            matches!(refusal, BootError::CommandLine { length: 3000, most: 2047 }),
            "{refusal}"
        );
        let refusal = try_load(&bzimage(4096), None, "a\0b").expect_err("NUL");
        assert!(matches!(refusal, BootError::CommandLineNul(1)), "{refusal}");
    }
    /// The bzImage above, to run from 16 MiB on in 8 MiB.
    fn at_16_mib() -> Vec<u8> {
        let mut image = bzimage(4096);
        image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x80_0000u32.to_le_bytes());
        image
    }

    /// Loads `image` into 32 MiB with an initramfs of so many MiB, and returns the end of what did not fit.
    fn end_in_32_mib(image: &[u8], initrd_mib: usize) -> Option<(&'static str, u64)> {
        let initrd = vec![0; initrd_mib << 20];
        match load_into(&ram(32), image, Some(&initrd), "") {
            Ok(_) => None,
            Err(BootError::TooLarge { file, end, .. }) => Some((file, end)),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn an_initramfs_lies_behind_where_the_kernel_unpacks_itself() {
        let mut image = at_16_mib();
        assert_eq!(end_in_32_mib(&image, 8), None);
        assert_eq!(end_in_32_mib(&image, 12), Some(("initramfs", 36 << 20)));
        // It runs on multiples of its alignment, wherever it would like to.
        image[0x258..0x260].copy_from_slice(&0u64.to_le_bytes());
        image[0x230..0x234].copy_from_slice(&0x40_0000u32.to_le_bytes());
        assert_eq!(end_in_32_mib(&image, 20), None);
        assert_eq!(end_in_32_mib(&image, 21), Some(("initramfs", 33 << 20)));
        // One that is not relocatable runs at one place only, on a multiple or not.
        let mut image = at_16_mib();
        image[0x258..0x260].copy_from_slice(&0x110_0000u64.to_le_bytes());
        image[0x234] = 0;
        assert_eq!(end_in_32_mib(&image, 7), None);
        assert_eq!(end_in_32_mib(&image, 8), Some(("initramfs", 33 << 20)));
    }

    #[test]
    fn a_kernel_that_would_unpack_itself_past_memory_is_refused() {
        let mut image = at_16_mib();
        let refusal = load_into(&ram(16), &image, None, "").expect_err("16 MiB end too early");
        let told = matches!(
            refusal,
            BootError::TooLarge { file: "kernel", end: 0x180_0000, available: 0x100_0000 }
        );
        assert!(told, "{refusal}");
        image[0x258..0x260].copy_from_slice(&u64::MAX.to_le_bytes());
        let refusal = load_into(&ram(32), &image, None, "").expect_err("nowhere");
        assert!(matches!(refusal, BootError::TooLarge { file: "kernel", .. }), "{refusal}");
    }

    #[test]
    fn an_alignment_that_is_none_is_damage() {
        for wrong in [0u32, 3 << 20] {
            let mut image = bzimage(4096);
            image[0x230..0x234].copy_from_slice(&wrong.to_le_bytes());
            let refusal = try_load(&image, None, "").expect_err("no power of two");
            assert!(matches!(refusal, BootError::Damaged(_)), "{refusal}");
        }
    }
}
