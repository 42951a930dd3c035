//! A node installs itself from the ISO, and runs from its disk afterwards, on which it mends what was altered.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use image::disk::{Slice, esp, gpt::ALIGNMENT, layout};
use qemu_tests::harness::{
    host::{Host, HostOptions, Iommu, Medium, Uplink},
    recording::Recording,
    renamed,
    scene::image_folder,
};

/// From power-on to the agent's answer, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(240);
/// Bytes of the disk: more than the smallest one, so that DATA has to grow.
const DISK: u64 = 3 << 30;

/// A configuration that installs.
fn config(section: &str) -> String {
    let key = "01".repeat(32);
    format!(
        "version = 1\nname = \"installed\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{section}"
    )
}

fn blank(folder: &Path) -> PathBuf {
    let path = folder.join("disk.img");
    File::create(&path).unwrap().set_len(DISK).unwrap();
    path
}

fn options(disk: PathBuf, config: Option<String>) -> HostOptions {
    HostOptions {
        medium: Medium::IsoCdAndDisk(disk),
        memory_mib: 1024,
        uplink: Uplink::None,
        config,
        ..HostOptions::default()
    }
}

fn boot(folder: &Path, options: &HostOptions) -> Host {
    Host::start(&image_folder().unwrap(), folder, options).unwrap()
}

/// Flips a bit of a program on `disk` that starts all the same: of the time at which it was linked.
/// Source: Microsoft "PE Format", "COFF File Header".
fn alter(disk: &Path, program: &[u8]) {
    const SECTOR: usize = 512;
    const PROGRAMS: usize = 64 << 20;
    let file = File::options().read(true).write(true).open(disk).unwrap();
    let mut begin = vec![0; PROGRAMS];
    file.read_exact_at(&mut begin, 0).unwrap();
    let head = &program[..SECTOR];
    let mut places = (0..PROGRAMS).step_by(SECTOR);
    let first = places.find(|at| begin[*at..].starts_with(head)).unwrap();
    let header = u32::from_le_bytes(program[0x3c..0x40].try_into().unwrap());
    let at = first as u64 + u64::from(header) + 8;
    let was = program[usize::try_from(header).unwrap() + 8];
    file.write_all_at(&[was ^ 4], at).unwrap();
}

/// Flips a bit of what the first copy of STATE's header says. Source: LUKS2 On-Disk Format Specification
/// 1.1.3, §2: a binary header of 4,096 bytes before the text.
fn alter_header(disk: &Path) {
    let at = ALIGNMENT + layout::ESP_BYTES;
    let file = File::options().read(true).write(true).open(disk).unwrap();
    let (mut magic, mut text) = ([0; 6], [0]);
    file.read_exact_at(&mut magic, at).unwrap();
    assert_eq!(&magic, b"LUKS\xba\xbe");
    file.read_exact_at(&mut text, at + 4200).unwrap();
    file.write_all_at(&[text[0] ^ 1], at + 4200).unwrap();
}

/// What becomes other bytes of the superblock of STATE's file system when one bit of them is flipped below
/// the encryption: what it can do, and half of who it is. Source: the kernel's
/// Documentation/filesystems/ext4/super.rst.
const ALTERED: Range<u64> = 0x60..0x70;

/// Flips that bit.
fn alter_superblock(disk: &Path) {
    let at = ALIGNMENT + layout::ESP_BYTES + layout::HEADER_BYTES + 1024 + ALTERED.start;
    let file = File::options().read(true).write(true).open(disk).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// Whether both places on `disk` hold the program.
fn holds_twice(disk: &Path, program: &[u8]) -> bool {
    [esp::SLOT_A, esp::FALLBACK].iter().all(|path| {
        let file = File::options().read(true).write(true).open(disk).unwrap();
        let volume = Slice::new(file, ALIGNMENT, layout::ESP_BYTES);
        esp::read(volume, path, program.len() as u64).is_ok_and(|found| found == program)
    })
}

/// Returns what follows `key` in the last line that holds it.
fn last<'a>(text: &'a str, key: &str) -> &'a str {
    text.rsplit_once(key).unwrap().1.split_whitespace().next().unwrap()
}

#[test]
fn onto_an_empty_disk_that_it_then_starts_from() {
    let folder = tempfile::tempdir().unwrap();
    let disk = blank(folder.path());
    let section = "[install]\nconfirm = \"unattended\"\n[install.disk]\nserial = \"INSTALL0\"\n";
    let record = folder.path().join("record");
    let mut recording = Recording::begin(&record, &disk, None).unwrap();
    let recorded = Some(recording.log());
    let wanted = |disk| options(disk, Some(config(section)));
    let host = boot(folder.path(), &HostOptions { recorded, ..wanted(disk.clone()) });
    host.serial.wait("event=ram-mode path=/state", UP).unwrap();
    host.serial.wait("event=installed disk=sda", UP).unwrap();
    let program = fs::read(image_folder().unwrap().join("holdfast.efi")).unwrap();
    recording.installed().unwrap();
    recording.program("fallback", &[&program]).unwrap();
    recording.program("a", &[&program]).unwrap();
    host.serial.wait("event=shutdown-done action=reboot", UP).unwrap();
    let mark = host.serial.mark();
    let node = last(&host.serial.text(), "event=node id=").to_owned();
    recording.node(&node).unwrap();
    // The same host starts again, with the CD still in it, and takes the disk.
    host.serial.wait("event=data-grown", UP).unwrap();
    // What it runs is written down.
    host.serial.wait_from(mark, "event=update state=", UP).unwrap();
    drop(host);
    recording.boot(wanted).unwrap();
    recording.judge().unwrap();

    // Nor does it need the medium with the configuration any more. Its program and what opens its disk were
    // altered, each in one copy, and so was the file system in there.
    alter_header(&disk);
    alter_superblock(&disk);
    assert!(holds_twice(&disk, &program));
    alter(&disk, &program);
    assert!(!holds_twice(&disk, &program));
    let host = boot(folder.path(), &options(disk.clone(), None));
    host.serial.wait("event=data-grown", UP).unwrap();
    host.serial.wait("event=config source=\"the installed disk\" name=\"installed\"", UP).unwrap();
    let text = host.serial.text();
    assert!(!text.contains("event=ram-mode"), "{text}");
    assert_eq!(last(&text, "event=node id="), node);
    let told = host.serial.wait("event=trouble place=volumes", UP).unwrap();
    assert!(told.contains("made anew of the other copy"), "{told}");
    let told = host.serial.wait("event=trouble place=state", UP).unwrap();
    let place = told.split_once("its superblock was altered, at byte ").unwrap().1;
    assert!(ALTERED.contains(&place.split_once(' ').unwrap().0.parse().unwrap()), "{told}");
    let told = host.serial.wait("event=trouble place=update", UP).unwrap();
    assert!(told.contains("was altered on the disk and is mended by its copy"), "{told}");
    host.serial.wait("event=update state=", UP).unwrap();
    drop(host);
    assert!(holds_twice(&disk, &program));
}

/// The disk of many servers is a volume of such a controller. This firmware has no driver for it, so the CD
/// starts again; whose disk it is the variable says, and the driver finds it in its own time.
#[test]
fn onto_a_volume_of_a_raid_controller() {
    let folder = tempfile::tempdir().unwrap();
    let volume = format!(
        "if=none,id=volume,format=raw,cache=unsafe,file={}",
        blank(folder.path()).display()
    );
    let words = ["-drive", &volume, "-device", "megasas-gen2", "-device", "scsi-hd,drive=volume"];
    let host = boot(
        folder.path(),
        &HostOptions {
            medium: Medium::IsoCd,
            memory_mib: 1024,
            uplink: Uplink::None,
            // Behind an emulated one, the emulated controller loses requests now and then.
            iommu: Iommu::Absent,
            config: Some(config("[install]\nconfirm = \"unattended\"\n")),
            arguments: words.map(str::to_owned).to_vec(),
            ..HostOptions::default()
        },
    );
    host.serial.wait("event=installed disk=sda", UP).unwrap();
    let node = last(&host.serial.text(), "event=node id=").to_owned();
    host.serial.wait("event=shutdown-done action=reboot", UP).unwrap();
    let mark = host.serial.mark();
    let again = host.serial.wait_from(mark, "event=node id=", UP).unwrap();
    assert_eq!(last(&again, "event=node id="), node);
    let text = host.serial.text();
    assert!(!text[mark..].contains("event=ram-mode"), "{text}");
}

#[test]
fn but_not_over_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let disk = blank(folder.path());
    let mut file = File::options().write(true).open(&disk).unwrap();
    file.seek(SeekFrom::Start(512 << 10)).unwrap();
    file.write_all(b"precious").unwrap();
    drop(file);
    let before = fs::read(&disk).unwrap();
    let config = config("[install]\nconfirm = \"unattended\"\n");
    let host = boot(folder.path(), &options(disk.clone(), Some(config)));
    let refused = host.serial.wait("event=not-installed reason=", UP).unwrap();
    drop(host);
    assert!(refused.contains("holds data of an unknown kind in its first MiB"), "{refused}");
    assert!(refused.contains("INSTALL0"), "{refused}");
    assert!(fs::read(&disk).unwrap() == before, "the disk was written to");
}

/// Starts the server from its disk, which firmware remembers as the server's from then on.
fn start_from(disk: &Path, folder: &Path) {
    let medium = Medium::InstalledDisk(disk.to_owned());
    let host = boot(folder, &HostOptions { medium, ..options(disk.to_owned(), None) });
    host.serial.wait("event=init-ready", UP).unwrap();
}

/// A host whose firmware starts the CD before the disk.
fn beside(disk: PathBuf) -> HostOptions {
    let medium = Medium::IsoCdBeforeDisk(disk.clone());
    HostOptions { medium, ..options(disk, Some(config(""))) }
}

#[test]
fn the_medium_of_a_newer_release_updates_the_disk_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    renamed::disk(&image_folder().unwrap(), &disk, "0.0.9").unwrap();
    start_from(&disk, folder.path());
    let host = boot(folder.path(), &beside(disk));
    let serial = &host.serial;
    serial.wait("event=update-written slot=B", UP).unwrap();
    serial.wait("event=update-restart release=\"0.1.0\"", UP).unwrap();
    serial.wait("event=update-judged verdict=\"release 0.1.0 passed and stays\"", UP).unwrap();
    let text = serial.text();
    // STATE was the disk's all along: it is the same node.
    let nodes: Vec<&str> = text.lines().filter(|line| line.contains("event=node id=")).collect();
    let ids: Vec<_> = nodes.iter().map(|line| line.split("id=").nth(1)).collect();
    assert!(ids.len() == 2 && ids[0] == ids[1] && !text.contains("event=ram-mode"), "{text}");
}

#[test]
fn the_medium_of_an_older_release_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    renamed::disk(&image_folder().unwrap(), &disk, "0.2.0").unwrap();
    start_from(&disk, folder.path());
    let before = programs(&disk);
    let host = boot(folder.path(), &beside(disk.clone()));
    let told = "started from a medium with release 0.1.0; the disk has 0.2.0, which stays";
    let said = host.serial.wait(told, UP).unwrap();
    assert!(said.contains("event=update state="), "{said}");
    assert!(!host.serial.text().contains("event=ram-mode"), "{}", host.serial.text());
    drop(host);
    assert!(programs(&disk) == before, "the programs on the disk were written to");
}

/// The partition table and the partition of programs.
fn programs(disk: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(disk).unwrap().take(513 << 20).read_to_end(&mut bytes).unwrap();
    bytes
}
