//! What a machine boots from: the ISO, the raw disk image and the PXE set.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use update::disk::gpt::{self, BlockSize, GptError};
use update::disk::{Slice, esp as volume, layout, medium, template};

use crate::esp;
use crate::program::Program;
use crate::tools::{self, ToolError};

/// The ISO may not grow past this without a decision: it is downloaded over BMCs' virtual media.
pub const ISO_LIMIT: u64 = 48 << 20;
/// The EFI system partition as a file of the ISO.
const EFI_IMAGE: &str = "efi.img";
/// Name space of every identity below.
const IDENTITY: Uuid = Uuid::from_u128(0x686f6c64_6661_4374_8000_6964656e7431);
/// Features of ext4, named in full so that no machine's /etc/mke2fs.conf decides.
const EXT4_FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,\
                             flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// Bytes of DATA for each inode: 512 inodes in a group of 128 MiB, for files that are mostly long. Inodes are
/// counted in 32 bits, and no file system is grown past that: mke2fs's usual 16 KiB end at 64 TiB, these at 1 PiB.
const DATA_INODE_BYTES: u64 = 256 << 10;
/// The same of STATE, which has short files and is not grown.
const STATE_INODE_BYTES: u64 = 16 << 10;

/// Why a medium was not made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum MediaError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    Gpt(#[from] GptError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} does not hold the boot program that was written into it")]
    ReadBack { path: PathBuf },
    #[error("the ISO has {found} bytes, and at most {ISO_LIMIT} are allowed; find out what grew")]
    IsoTooLarge { found: u64 },
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MediaError {
    let path = path.to_owned();
    move |source| MediaError::File { action, path, source }
}

/// Makes a hybrid ISO: El Torito for CDs, and the same EFI partition in a GPT for USB sticks. Both are the
/// file [`EFI_IMAGE`] of the CD, by which tools know that it starts, and which they need to make a stick that does.
///
/// `extra` are small files for whoever looks into the CD; `work` is an empty folder.
pub(crate) fn iso(
    program: &Program,
    extra: &[(&str, &[u8])],
    work: &Path,
    time: u64,
    to: &Path,
) -> Result<(), MediaError> {
    let tree = work.join("iso");
    fs::create_dir(&tree).map_err(file("create", &tree))?;
    let volume = tree.join(EFI_IMAGE);
    let bytes = esp::volume_for(program).map_err(file("format", &volume))?;
    fs::write(&volume, bytes).map_err(file("write", &volume))?;
    for (name, content) in extra {
        let path = tree.join(name);
        fs::write(&path, content).map_err(file("write", &path))?;
    }
    let mut xorriso = tools::command("xorriso");
    xorriso
        .env("SOURCE_DATE_EPOCH", time.to_string())
        .args(["-as", "mkisofs", "-quiet", "-V", "HOLDFAST_OS", "-r"])
        .arg("--set_all_file_dates")
        .arg(format!("={time}"))
        .args(["-e", EFI_IMAGE, "-no-emul-boot"])
        .args(["-efi-boot-part", "--efi-boot-image"])
        .arg("-o")
        .arg(to)
        .arg(&tree);
    tools::output(&mut xorriso)?;
    let found = fs::metadata(to).map_err(file("inspect", to))?.len();
    if found > ISO_LIMIT {
        return Err(MediaError::IsoTooLarge { found });
    }
    Ok(())
}

/// Makes the disk image: ESP with the boot program, empty STATE and DATA.
pub(crate) fn disk(program: &Program, time: u64, to: &Path) -> Result<(), MediaError> {
    let identities = layout::Identities {
        disk: identity("disk"),
        esp: identity(layout::ESP),
        state: identity(layout::STATE),
        data: identity(layout::DATA),
    };
    let table = layout::smallest(identities, BlockSize::B512)?;
    let disk = OpenOptions::new()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(to)
        .map_err(file("create", to))?;
    disk.set_len(table.bytes).map_err(file("grow", to))?;
    for (offset, bytes) in table.writes() {
        write_at(&disk, offset, &bytes).map_err(file("write", to))?;
    }
    for (start, partition) in &table.placed {
        if partition.kind == gpt::TYPE_ESP {
            write_esp(&disk, (*start, partition.bytes), program, to)?;
        } else {
            format_ext4(partition.name, (*start, partition.bytes), time, to)?;
        }
    }
    Ok(())
}

/// A constant identity for something that the image holds once.
fn identity(name: &str) -> Uuid {
    Uuid::new_v5(&IDENTITY, name.as_bytes())
}

fn write_at(mut disk: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    disk.seek(SeekFrom::Start(offset))?;
    disk.write_all(bytes)
}

fn write_esp(
    disk: &File,
    (start, length): (u64, u64),
    program: &Program,
    to: &Path,
) -> Result<(), MediaError> {
    let paths = [volume::FALLBACK, volume::SLOT_A];
    let slice = || Slice::new(disk, start, length);
    esp::fill(&mut slice(), program, &paths).map_err(file("format the ESP of", to))?;
    for path in paths {
        let length = program.bytes.len() as u64;
        let found = volume::read(slice(), path, length).map_err(file("read the ESP of", to))?;
        if found != program.bytes {
            return Err(MediaError::ReadBack { path: to.to_owned() });
        }
    }
    Ok(())
}

/// Makes an empty file system of the length that a new partition has at least, and returns it as a
/// template ([`update::disk::template`]).
pub(crate) fn empty_ext4(name: &str, time: u64, work: &Path) -> Result<Vec<u8>, MediaError> {
    let length = if name == layout::STATE { layout::STATE_BYTES } else { layout::DATA_BYTES };
    let length = length - layout::HEADER_BYTES;
    let path = work.join(name);
    let mut volume = vec![template::FILL; usize::try_from(length).unwrap_or(usize::MAX)];
    fs::write(&path, &volume).map_err(file("write", &path))?;
    format_ext4(name, (0, length), time, &path)?;
    volume.clear();
    File::open(&path).and_then(|mut f| f.read_to_end(&mut volume)).map_err(file("read", &path))?;
    fs::remove_file(&path).map_err(file("remove", &path))?;
    Ok(template::capture(&volume))
}

fn format_ext4(
    name: &str,
    (start, length): (u64, u64),
    time: u64,
    to: &Path,
) -> Result<(), MediaError> {
    let extended = format!(
        "offset={start},hash_seed={},root_owner=0:0,lazy_itable_init=1,lazy_journal_init=0,nodiscard",
        identity("hash")
    );
    let inode_bytes = if name == layout::DATA { DATA_INODE_BYTES } else { STATE_INODE_BYTES };
    let mut mke2fs = tools::command("mke2fs");
    mke2fs
        .env("E2FSPROGS_FAKE_TIME", time.to_string())
        .env("SOURCE_DATE_EPOCH", time.to_string())
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"])
        .args(["-i", &inode_bytes.to_string()])
        .args(["-O", EXT4_FEATURES, "-E", &extended, "-L", name, "-U"])
        .arg(identity(&format!("{name} file system")).to_string())
        .arg(to)
        .arg(format!("{}k", length / 1024));
    tools::output(&mut mke2fs)?;
    Ok(())
}

/// Lays out what a boot server hands out, in `folder`, which it creates.
pub(crate) fn pxe(
    uki: &[u8],
    kernel: &[u8],
    initrd: &[u8],
    cmdline: &str,
    folder: &Path,
) -> Result<(), MediaError> {
    fs::create_dir(folder).map_err(file("create", folder))?;
    let script = ipxe_script(cmdline);
    for (name, bytes) in [
        ("holdfast.efi", uki),
        ("vmlinuz", kernel),
        ("initrd", initrd),
        ("cmdline", cmdline.as_bytes()),
        ("boot.ipxe", script.as_bytes()),
    ] {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(file("write", &path))?;
    }
    Ok(())
}

/// The one signed file where firmware is UEFI, its parts otherwise. iPXE passes a program's name and words as its
/// load options, which without Secure Boot replace the built-in command line and are measured into PCR 12. An
/// empty name without words is none (iPXE `efi_image_cmdline`; systemd `src/boot/stub.c`, `process_arguments`), so
/// that such a node runs and measures what it would from any other medium.
fn ipxe_script(cmdline: &str) -> String {
    format!(
        "#!ipxe\n\
         iseq ${{platform}} efi && chain --name ${{}} holdfast.efi ||\n\
         kernel vmlinuz initrd=initrd {cmdline}\n\
         initrd initrd\n\
         boot\n"
    )
}

/// Finds the EFI partition in the ISO's GPT and reads the boot program back.
pub fn read_iso(path: &Path) -> Result<Vec<u8>, MediaError> {
    let bytes = fs::read(path).map_err(file("read", path))?;
    let wrong = || MediaError::ReadBack { path: path.to_owned() };
    let partitions = medium::esp_partitions(Cursor::new(&bytes), BlockSize::B512);
    let (start, length) = *partitions.first().ok_or_else(wrong)?;
    let start = usize::try_from(start).map_err(|_| wrong())?;
    let end = usize::try_from(length).ok().and_then(|length| start.checked_add(length));
    let end = end.ok_or_else(wrong)?;
    let mut bytes = bytes.get(start..end).ok_or_else(wrong)?.to_vec();
    volume::read(Cursor::new(&mut bytes), volume::FALLBACK, ISO_LIMIT)
        .map_err(file("read the EFI partition of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_may_grow_to_the_longest_disks() {
        if !tools::missing().iter().all(|requirement| requirement.probe != "mke2fs") {
            println!("skipped: this machine lacks mke2fs");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let inodes_per_group = |name: &str, bytes: u64| {
            let path = folder.path().join(name);
            let made = File::create(&path).and_then(|file| file.set_len(bytes));
            made.expect("a sparse file");
            format_ext4(name, (0, bytes), 1, &path).expect("formatted");
            let mut superblock = [0; 1024];
            let mut file = File::open(&path).expect("there");
            file.seek(SeekFrom::Start(1024))
                .and_then(|_| file.read_exact(&mut superblock))
                .expect("read");
            u32::from_le_bytes([0x28, 0x29, 0x2a, 0x2b].map(|at| superblock[at]))
        };
        let data = inodes_per_group(layout::DATA, layout::DATA_BYTES - layout::HEADER_BYTES);
        assert_eq!(data, 512);
        // Groups of 128 MiB, as many as there are numbers for inodes.
        assert!((u64::from(u32::MAX / data) << 27) > 1000 << 40);
        let state = inodes_per_group(layout::STATE, layout::STATE_BYTES - layout::HEADER_BYTES);
        assert!(state > 4096, "{state}");
    }

    #[test]
    fn the_efi_partition_of_an_iso_is_a_file_of_it() {
        if tools::missing().iter().any(|requirement| requirement.probe == "xorriso") {
            println!("skipped: this machine lacks xorriso");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        let program = Program { bytes, updates: Vec::new(), measurements: serde_json::Value::Null };
        let make = |name: &str| {
            let (work, to) = (folder.path().join(name), folder.path().join(format!("{name}.iso")));
            fs::create_dir(&work).expect("made");
            iso(&program, &[("README", b"read me")], &work, 1_700_000_000, &to).expect("an ISO");
            to
        };
        let (path, again) = (make("one"), make("two"));
        assert_eq!(read_iso(&path).expect("read"), program.bytes);
        assert_eq!(fs::read(&path).expect("read"), fs::read(again).expect("read"));
        let disk = Cursor::new(fs::read(&path).expect("read"));
        let partitions = update::disk::medium::esp_partitions(disk, BlockSize::B512);
        let [(start, length)] = partitions[..] else { panic!("{partitions:?}") };
        // What xorriso finds in it: the file, the GPT's partition and El Torito's image are one.
        let mut xorriso = tools::command("xorriso");
        xorriso.arg("-indev").arg(&path).args(["-report_el_torito", "plain"]);
        xorriso.args(["-find", "/efi.img", "-exec", "report_lba"]);
        let said = tools::output(&mut xorriso).expect("said");
        let (block, blocks) = ((start / 2048).to_string(), (length / 2048).to_string());
        let torito = said.lines().find(|line| line.starts_with("El Torito boot img"));
        assert_eq!(torito.and_then(|line| line.split_whitespace().last()), Some(&*block), "{said}");
        let line = said.lines().find(|line| line.ends_with("'/efi.img'")).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words.contains(&&*block) && words.contains(&&*blocks), "{said}");
    }

    #[test]
    fn the_script_falls_back_to_the_parts() {
        let script = ipxe_script("console=ttyS0");
        assert!(script.starts_with("#!ipxe\n"));
        assert!(script.contains(" chain --name ${} holdfast.efi ||\n"));
        assert!(script.contains("\nkernel vmlinuz initrd=initrd console=ttyS0\n"));
    }
}
