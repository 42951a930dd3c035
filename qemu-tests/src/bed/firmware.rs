//! Debian's UEFI firmware, and disks that start by it: GRUB, systemd-boot with a unified kernel
//! image, an installer's ISO. All of Debian's packages as they are.

use std::{
    fs::{self, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use image::{
    cpio::{self, Entry, Kind},
    disk::{
        Slice,
        gpt::{BlockSize, Partition, TYPE_ESP, Table, Uuid},
    },
    uki::{self, Section},
};

use super::guest;
use crate::harness::packages;

/// The file system of the firmware's variables, as a module.
const VARIABLES_MODULE: &str = "efivarfs";

/// Where a volume's files come from: path in the volume, and content.
type Files<'a> = [(&'a str, &'a [u8])];

/// A release of Debian and with it of the firmware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Debian 12: OVMF 2022.11.
    Bookworm,
    /// Debian 13.
    Trixie,
}

/// The firmware's files.
#[derive(Debug, Clone)]
pub struct Firmware {
    /// `OVMF_CODE_4M.fd`.
    pub code: PathBuf,
    /// `OVMF_VARS_4M.fd`, the template.
    pub variables: PathBuf,
}

/// Returns the firmware of a release, as packaged.
pub fn ovmf(release: Release) -> Result<Firmware> {
    let suite = match release {
        Release::Bookworm => "bookworm",
        Release::Trixie => "trixie",
    };
    let folder = unpacked(suite, &["ovmf"])?.join("usr/share/OVMF");
    let file = |name| folder.join(name);
    Ok(Firmware { code: file("OVMF_CODE_4M.fd"), variables: file("OVMF_VARS_4M.fd") })
}

/// Makes a disk that GRUB starts Debian's kernel from, with the guest of [`guest::make`].
pub fn grub_disk(folder: &Path) -> Result<PathBuf> {
    let (kernel, initrd) = system(folder)?;
    let grub = unpacked("bookworm", &["grub-efi-amd64-bin"])?;
    let program = read(&grub.join("usr/lib/grub/x86_64-efi/monolithic/grubx64.efi"))?;
    let menu = "set timeout=0\nmenuentry Debian {\n  linux /vmlinuz console=ttyS0 quiet\n  \
                initrd /initrd.img\n}\n";
    let disk = folder.join("grub.img");
    system_disk(
        &disk,
        &[
            ("EFI/BOOT/BOOTX64.EFI", &program),
            ("EFI/debian/grub.cfg", menu.as_bytes()),
            ("vmlinuz", &kernel),
            ("initrd.img", &initrd),
        ],
    )?;
    Ok(disk)
}

/// Formats a volume that firmware starts Debian's GRUB from, which then does what `menu` says.
pub fn loader_volume(volume: impl Read + Write + Seek, label: [u8; 11], menu: &str) -> Result<()> {
    let grub = unpacked("bookworm", &["grub-efi-amd64-bin"])?;
    let program = read(&grub.join("usr/lib/grub/x86_64-efi/monolithic/grubx64.efi"))?;
    let files: &Files<'_> =
        &[("EFI/BOOT/BOOTX64.EFI", &program), ("EFI/debian/grub.cfg", menu.as_bytes())];
    fat_named(volume, label, files)
}

/// Makes a disk that systemd-boot starts a unified kernel image from, with the same guest.
pub fn systemd_boot_disk(folder: &Path) -> Result<PathBuf> {
    let (kernel, initrd) = system(folder)?;
    let root = unpacked("bookworm", &["systemd-boot-efi"])?.join("usr/lib/systemd/boot/efi");
    let release = b"ID=debian\nNAME=Debian\nPRETTY_NAME=\"Debian\"\nVERSION_ID=12\n";
    let sections = [
        Section { name: ".osrel", data: release },
        Section { name: ".cmdline", data: b"console=ttyS0 quiet" },
        Section { name: ".initrd", data: &initrd },
        Section { name: ".linux", data: &kernel },
    ];
    let image = uki::assemble(&read(&root.join("linuxx64.efi.stub"))?, &sections)?;
    let disk = folder.join("systemd-boot.img");
    system_disk(
        &disk,
        &[
            ("EFI/BOOT/BOOTX64.EFI", &read(&root.join("systemd-bootx64.efi"))?),
            ("EFI/Linux/debian.efi", &image),
            ("loader/loader.conf", b"timeout 0\n"),
        ],
    )?;
    Ok(disk)
}

/// x86-64 code of a UEFI program that asks firmware to power off: the second argument is the system
/// table, its runtime services are at 0x58, of which the reset is at 0x68 (UEFI 2.10 §4.3, §4.5, §8.5.1).
const SHUTDOWN: [u8; 25] = [
    0x48, 0x8b, 0x42, 0x58, // mov rax, [rdx + 0x58]
    0xb9, 0x02, 0x00, 0x00, 0x00, // mov ecx, EfiResetShutdown
    0x31, 0xd2, // xor edx, edx: EFI_SUCCESS
    0x45, 0x31, 0xc0, // xor r8d, r8d: no data
    0x45, 0x31, 0xc9, // xor r9d, r9d
    0x48, 0x83, 0xec, 0x28, // sub rsp, 0x28: room for the arguments, and alignment
    0xff, 0x50, 0x68, // call [rax + 0x68]
    0xf4, // hlt: not reached
];

/// Makes a disk that does no more than have firmware power off, as Windows does when it has shut down.
pub fn shutdown_disk(folder: &Path) -> Result<PathBuf> {
    let disk = folder.join("shutdown.img");
    system_disk(&disk, &[("EFI/BOOT/BOOTX64.EFI", &program(&SHUTDOWN))])?;
    Ok(disk)
}

/// Makes a UEFI program of code without data. Source: Microsoft "PE Format".
fn program(code: &[u8]) -> Vec<u8> {
    const HEADERS: u16 = 0x200;
    const SECTION: u16 = 0x1000;
    const DIRECTORIES: u16 = 16;
    let mut file = vec![0; usize::from(HEADERS) + 0x200];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x3c, &[0x40]);
    put(0x40, b"PE\0\0");
    // x86-64, one section, the optional header's size, an executable that knows large addresses.
    put(0x44, &[0x64, 0x86, 1, 0]);
    put(0x54, &(112 + 8 * DIRECTORIES).to_le_bytes());
    put(0x56, &[0x22, 0]);
    // Of 64 bits. Code's size, entry and base, the alignments in memory and file, the sizes of the image
    // and of its headers, a UEFI application.
    put(0x58, &[0x0b, 0x02]);
    put(0x5c, &0x200u32.to_le_bytes());
    put(0x68, &u32::from(SECTION).to_le_bytes());
    put(0x6c, &u32::from(SECTION).to_le_bytes());
    put(0x78, &u32::from(SECTION).to_le_bytes());
    put(0x7c, &0x200u32.to_le_bytes());
    put(0x90, &u32::from(2 * SECTION).to_le_bytes());
    put(0x94, &u32::from(HEADERS).to_le_bytes());
    put(0x9c, &[10, 0]);
    put(0xc4, &u32::from(DIRECTORIES).to_le_bytes());
    // The section: name, sizes and places in memory and file; code that runs and is read.
    put(0x148, b".text");
    put(0x150, &u32::from(SECTION).to_le_bytes());
    put(0x154, &u32::from(SECTION).to_le_bytes());
    put(0x158, &0x200u32.to_le_bytes());
    put(0x15c, &u32::from(HEADERS).to_le_bytes());
    put(0x16c, &0x6000_0020u32.to_le_bytes());
    put(usize::from(HEADERS), code);
    file
}

/// Makes an ISO of Debian's installer, which GRUB starts as on Debian's own.
pub fn installer_iso(folder: &Path) -> Result<PathBuf> {
    let grub = unpacked("bookworm", &["grub-efi-amd64-bin"])?;
    let program = read(&grub.join("usr/lib/grub/x86_64-efi/monolithic/gcdx64.efi"))?;
    let installer = unpacked("bookworm", &["debian-installer-12-netboot-amd64"])?
        .join("usr/lib/debian-installer/images/12/amd64/text/debian-installer/amd64");
    let tree = folder.join("iso");
    for name in ["install.amd", "boot/grub/x86_64-efi", ".disk"] {
        fs::create_dir_all(tree.join(name))?;
    }
    fs::write(tree.join(".disk/info"), "Debian installer\n")?;
    let menu = "set timeout=0\nmenuentry Install {\n  linux /install.amd/vmlinuz console=ttyS0 \
                quiet\n  initrd /install.amd/initrd.gz\n}\n";
    fs::write(tree.join("boot/grub/grub.cfg"), menu)?;
    fs::write(tree.join("boot/grub/x86_64-efi/grub.cfg"), "source /boot/grub/grub.cfg\n")?;
    fs::copy(installer.join("linux"), tree.join("install.amd/vmlinuz"))?;
    fs::copy(installer.join("initrd.gz"), tree.join("install.amd/initrd.gz"))?;
    let volume = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(tree.join("boot/grub/efi.img"))?;
    volume.set_len(4 << 20)?;
    fat(&volume, &[("EFI/BOOT/BOOTX64.EFI", &program)])?;
    drop(volume);
    let iso = folder.join("installer.iso");
    let made = Command::new("xorriso")
        .args(["-as", "mkisofs", "-quiet", "-r", "-J", "-V", "Debian", "-o"])
        .arg(&iso)
        .args(["-eltorito-alt-boot", "-e", "boot/grub/efi.img", "-no-emul-boot"])
        .arg(&tree)
        .output()
        .context("cannot start xorriso")?;
    if !made.status.success() {
        bail!("xorriso: {}", String::from_utf8_lossy(&made.stderr));
    }
    Ok(iso)
}

/// Returns the kernel and the initramfs of [`guest::make`], with the module for the firmware's
/// variables in the root folder.
fn system(folder: &Path) -> Result<(Vec<u8>, Vec<u8>)> {
    let made = guest::make_telling_its_seed(folder)?;
    let module = packages::guest_module(VARIABLES_MODULE)?;
    let name = format!("{VARIABLES_MODULE}.ko");
    let entry = Entry { name, mode: 0o644, kind: Kind::File(read(&module)?) };
    // The kernel unpacks one archive after the other.
    let mut initrd = read(&made.initrd)?;
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    initrd.extend(cpio::write(&[entry])?);
    Ok((read(&made.kernel)?, initrd))
}

fn unpacked(suite: &str, packages: &[&str]) -> Result<PathBuf> {
    image::unpacked(&image::default_cache(), suite, packages)
        .with_context(|| format!("cannot have Debian's {packages:?}"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{}", path.display()))
}

/// Writes a GPT disk with one EFI system partition.
fn system_disk(path: &Path, files: &Files<'_>) -> Result<()> {
    let content: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    // FAT32 has at least 65,525 clusters.
    let bytes = (content as u64 + (8 << 20)).max(40 << 20).next_multiple_of(1 << 20);
    let id = |number: u128| Uuid::from_u128(0x484f_4c44_4641_5354_8000_0000_0000_0000 + number);
    let partition = Partition { kind: TYPE_ESP, id: id(1), name: "EFI system", bytes };
    let table = Table::new(id(0), BlockSize::B512, vec![partition])?;
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(table.bytes)?;
    for (offset, bytes) in table.writes() {
        file.seek(SeekFrom::Start(offset))?;
        file.write_all(&bytes)?;
    }
    fat(Slice::new(&file, table.placed[0].0, bytes), files)
}

/// Formats a volume and fills it.
fn fat<V: Read + Write + Seek>(volume: V, files: &Files<'_>) -> Result<()> {
    fat_named(volume, *b"NO NAME    ", files)
}

fn fat_named<V: Read + Write + Seek>(
    mut volume: V,
    label: [u8; 11],
    files: &Files<'_>,
) -> Result<()> {
    let options = fatfs::FormatVolumeOptions::new().volume_label(label);
    fatfs::format_volume(&mut volume, options)?;
    let system = fatfs::FileSystem::new(&mut volume, fatfs::FsOptions::new())?;
    for (path, content) in files {
        let mut folder = system.root_dir();
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        for part in folders.split('/').filter(|part| !part.is_empty()) {
            folder = folder.create_dir(part)?;
        }
        folder.create_file(name)?.write_all(content)?;
    }
    system.unmount()?;
    Ok(())
}
