#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::io::{Cursor, SeekFrom};

use fatfs::{FatType, FileSystem, FormatVolumeOptions, FsOptions};

use super::*;
use crate::{
    channel::Sha256,
    disk::{esp, gpt::BlockSize},
    slots::Program,
};

/// A disk that remembers what was written, and in which order.
struct Recorder {
    bytes: Cursor<Vec<u8>>,
    /// Writes since the beginning; `None` is a synchronisation.
    log: Vec<Option<(u64, Vec<u8>)>>,
    /// Flips a bit of what is written there.
    faulty_at: Option<u64>,
}

impl Recorder {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Cursor::new(bytes), log: Vec::new(), faulty_at: None }
    }
}

impl Read for Recorder {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(buffer)
    }
}

impl Write for Recorder {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let at = self.bytes.position();
        let mut bytes = buffer.to_vec();
        if let Some(faulty) = self.faulty_at.filter(|f| (at..at + bytes.len() as u64).contains(f)) {
            bytes[usize::try_from(faulty - at).unwrap()] ^= 1;
        }
        self.log.push(Some((at, bytes.clone())));
        self.bytes.write(&bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Recorder {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.bytes.seek(to)
    }
}

impl Storage for Recorder {
    fn sync(&mut self) -> io::Result<()> {
        self.log.push(None);
        Ok(())
    }

    fn forget(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn program(number: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| number.wrapping_add(u8::try_from(at / 512 % 256).unwrap())).collect()
}

fn sha256(bytes: &[u8]) -> Sha256 {
    Program::of(bytes).sha256
}

/// As the installer leaves it, but smaller: FAT32 with clusters of one sector.
fn installed(block: BlockSize) -> Vec<u8> {
    let unit = u16::try_from(block.bytes()).unwrap();
    // FAT32 begins at 65,525 clusters.
    let mut bytes = vec![0; 70_000 * usize::from(unit)];
    let options = FormatVolumeOptions::new().bytes_per_sector(unit);
    let options = options.bytes_per_cluster(unit.into()).fat_type(FatType::Fat32);
    fatfs::format_volume(Cursor::new(&mut bytes), options).unwrap();
    let fs = FileSystem::new(Cursor::new(&mut bytes), FsOptions::new()).unwrap();
    for path in [esp::FALLBACK, esp::SLOT_A] {
        let (folders, name) = path.rsplit_once('/').unwrap();
        let mut folder = fs.root_dir();
        for part in folders.split('/') {
            folder = folder.create_dir(part).unwrap();
        }
        folder.create_file(name).unwrap().write_all(&program(0, 30_000)).unwrap();
    }
    fs.unmount().unwrap();
    bytes
}

/// The partition as the installer formats it.
#[test]
fn the_installers_volume_is_one() {
    let mut bytes = vec![0; usize::try_from(crate::disk::layout::ESP_BYTES).unwrap()];
    let paths = [esp::FALLBACK, esp::SLOT_A];
    esp::write(Cursor::new(&mut bytes), BlockSize::B512, &program(4, 70_000), &paths).unwrap();
    let mut volume = Volume::open(Recorder::new(bytes)).unwrap();
    assert_eq!(read(&mut volume, esp::SLOT_A), Some(program(4, 70_000)));
    assert!(volume.begin(esp::SLOT_B, 500 << 20).is_ok());
}

fn replace(volume: &mut Volume<Recorder>, path: &str, bytes: &[u8]) -> Result<(), FatError> {
    let mut writing = volume.begin(path, bytes.len() as u64)?;
    for piece in bytes.chunks(7001) {
        volume.append(&mut writing, piece)?;
    }
    volume.finish(writing, sha256(bytes))
}

fn read(volume: &mut Volume<Recorder>, path: &str) -> Option<Vec<u8>> {
    volume.read(path, 1 << 20).unwrap()
}

#[test]
fn files_are_replaced_and_others_read_them() {
    for block in [BlockSize::B512, BlockSize::B4096] {
        let mut volume = Volume::open(Recorder::new(installed(block))).unwrap();
        assert_eq!(read(&mut volume, esp::SLOT_A), Some(program(0, 30_000)));
        assert_eq!(read(&mut volume, esp::SLOT_B), None);
        for (number, path) in [(1, esp::SLOT_B), (2, esp::FALLBACK), (3, esp::SLOT_B)] {
            replace(&mut volume, path, &program(number, 50_000)).unwrap();
        }
        let bytes = volume.into_inner().bytes.into_inner();
        let seen = |path| esp::read(Cursor::new(bytes.clone()), path, 1 << 20).unwrap();
        assert_eq!(seen(esp::SLOT_A), program(0, 30_000));
        assert_eq!(seen(esp::SLOT_B), program(3, 50_000));
        assert_eq!(seen(esp::FALLBACK), program(2, 50_000));
    }
}

#[test]
fn little_more_than_the_program_is_written() {
    let mut volume = Volume::open(Recorder::new(installed(BlockSize::B512))).unwrap();
    let length = 4_000_000;
    replace(&mut volume, esp::SLOT_B, &program(1, length)).unwrap();
    let log = volume.into_inner().log;
    let written: usize = log.iter().flatten().map(|(_, bytes)| bytes.len()).sum();
    assert!(written < length / 100 * 102, "{written} bytes");
}

/// What is tried in the second slot becomes the fallback path's, and that the first slot's.
const PROMOTED: (&str, &str, &str) = (esp::SLOT_B, esp::FALLBACK, esp::SLOT_A);

#[test]
fn a_file_takes_the_place_of_another_without_being_written() {
    for block in [BlockSize::B512, BlockSize::B4096] {
        let mut volume = Volume::open(Recorder::new(installed(block))).unwrap();
        for number in 1..4 {
            let new = program(number, 4_000_000);
            replace(&mut volume, esp::SLOT_B, &new).unwrap();
            volume.storage.log.clear();
            assert!(volume.promote(PROMOTED, sha256(&program(9, 9))).is_err());
            assert!(volume.storage.log.is_empty());
            volume.promote(PROMOTED, sha256(&new)).unwrap();
            let log = std::mem::take(&mut volume.storage.log);
            let written: usize = log.iter().flatten().map(|(_, bytes)| bytes.len()).sum();
            assert!(written < 200_000, "{written} bytes");
            let old = program(number - 1, if number == 1 { 30_000 } else { 4_000_000 });
            let held = |volume: &mut Volume<_>, path| volume.read(path, 8 << 20).unwrap();
            assert_eq!(held(&mut volume, esp::FALLBACK), Some(new));
            assert_eq!(held(&mut volume, esp::SLOT_A), Some(old));
            assert_eq!(held(&mut volume, esp::SLOT_B), None);
        }
        // No name, no file, and no harm.
        volume.remove(esp::SLOT_B).unwrap();
        assert!(matches!(
            volume.promote(PROMOTED, sha256(&[])),
            Err(FatError::Missing { path }) if path == esp::SLOT_B
        ));
        let bytes = volume.into_inner().bytes.into_inner();
        let seen = esp::read(Cursor::new(bytes), esp::FALLBACK, 8 << 20).unwrap();
        assert!(seen == program(3, 4_000_000));
    }
}

#[test]
fn a_second_name_for_a_file_is_found_and_taken_away() {
    let mut volume = Volume::open(Recorder::new(installed(BlockSize::B512))).unwrap();
    replace(&mut volume, esp::SLOT_B, &program(1, 40_000)).unwrap();
    let entry = volume.find(esp::SLOT_B).unwrap().unwrap();
    volume.switch(esp::FALLBACK, entry.first, entry.length).unwrap();
    assert!(volume.is_shared(esp::SLOT_B, esp::FALLBACK).unwrap());
    assert!(!volume.is_shared(esp::SLOT_A, esp::FALLBACK).unwrap());
    volume.remove(esp::SLOT_B).unwrap();
    assert!(!volume.is_shared(esp::SLOT_B, esp::FALLBACK).unwrap());
    assert_eq!(read(&mut volume, esp::FALLBACK), Some(program(1, 40_000)));
    // What takes the name again takes no clusters of the other one.
    replace(&mut volume, esp::SLOT_B, &program(2, 60_000)).unwrap();
    assert_eq!(read(&mut volume, esp::FALLBACK), Some(program(1, 40_000)));
}

#[test]
fn what_lies_behind_a_folders_end_is_not_in_it_when_a_file_takes_the_end() {
    let mut bytes = installed(BlockSize::B512);
    let of_a = bytes.windows(11).position(|window| window == b"A       EFI").unwrap();
    // The entry before it ends the folder.
    bytes[of_a - 32] = 0;
    let mut volume = Volume::open(Recorder::new(bytes)).unwrap();
    assert_eq!(read(&mut volume, esp::SLOT_A), None);
    replace(&mut volume, esp::SLOT_B, &program(1, 40_000)).unwrap();
    assert_eq!(read(&mut volume, esp::SLOT_A), None);
    assert_eq!(read(&mut volume, esp::SLOT_B), Some(program(1, 40_000)));
    // It may come back as any other file.
    replace(&mut volume, esp::SLOT_A, &program(2, 40_000)).unwrap();
    assert_eq!(read(&mut volume, esp::SLOT_A), Some(program(2, 40_000)));
    assert_eq!(read(&mut volume, esp::SLOT_B), Some(program(1, 40_000)));
}

#[test]
fn nothing_is_written_where_a_folder_and_a_file_share_clusters() {
    let mut bytes = installed(BlockSize::B512);
    let of_folder = bytes.windows(11).position(|window| window == b"HOLDFAST   ").unwrap();
    let folder = bytes[of_folder + 26..of_folder + 28].to_vec();
    let of_fallback = bytes.windows(11).position(|window| window == b"BOOTX64 EFI").unwrap();
    bytes[of_fallback + 26..of_fallback + 28].copy_from_slice(&folder);
    let mut volume = Volume::open(Recorder::new(bytes)).unwrap();
    let refused = replace(&mut volume, esp::SLOT_B, &program(1, 40_000)).unwrap_err();
    let is_named = |path: &str| ["BOOTX64 EFI", "HOLDFAST   "].contains(&path);
    assert!(matches!(&refused, FatError::Damaged { path } if is_named(path)), "{refused}");
    assert!(volume.into_inner().log.is_empty());
}

#[test]
fn no_cluster_is_lost_however_often_it_is_cut() {
    let mut bytes = installed(BlockSize::B512);
    // Each one is left before it is finished, with its clusters marked.
    for number in 0..3 {
        let mut volume = Volume::open(Recorder::new(bytes)).unwrap();
        let mut writing = volume.begin(esp::SLOT_B, 20 << 20).unwrap();
        volume.append(&mut writing, &program(number, 4096)).unwrap();
        volume.table.link(&writing.clusters);
        volume.table.write(&mut volume.storage, &volume.geometry).unwrap();
        bytes = volume.into_inner().bytes.into_inner();
    }
    let mut volume = Volume::open(Recorder::new(bytes)).unwrap();
    replace(&mut volume, esp::SLOT_B, &program(9, 30_000)).unwrap();
    let uses = volume.uses().unwrap();
    let marked = volume.table.unused(&uses);
    assert!(marked.iter().all(|cluster| volume.table.chain(*cluster).is_none()));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let mut volume = Volume::open(Recorder::new(installed(BlockSize::B512))).unwrap();
    let refused = volume.begin(esp::SLOT_B, 40 << 20).unwrap_err();
    assert!(refused.to_string().contains("is full"), "{refused}");
    assert!(matches!(volume.begin("EFI/NONE/A.EFI", 1), Err(FatError::NoFolder { .. })));
    assert!(volume.storage.log.is_empty());
}

#[test]
fn a_disk_that_does_not_keep_its_data_is_found_out() {
    let mut volume = Volume::open(Recorder::new(installed(BlockSize::B512))).unwrap();
    let writing = volume.begin(esp::SLOT_A, 30_000).unwrap();
    volume.storage.faulty_at = Some(volume.geometry.place(writing.clusters[3]) + 5);
    let refused = replace(&mut volume, esp::SLOT_A, &program(5, 30_000));
    assert!(matches!(refused, Err(FatError::Differs { .. })));
    assert_eq!(read(&mut volume, esp::SLOT_A), Some(program(0, 30_000)));
}

/// Cuts the power after every sector that is written, with what was written since the last
/// synchronisation kept, lost, or kept in part and in another order.
#[test]
fn a_cut_leaves_the_old_file_or_the_new_one() {
    let before = installed(BlockSize::B512);
    let mut volume = Volume::open(Recorder::new(before.clone())).unwrap();
    replace(&mut volume, esp::SLOT_A, &program(1, 40_000)).unwrap();
    replace(&mut volume, esp::SLOT_B, &program(2, 30_000)).unwrap();
    volume.promote(PROMOTED, sha256(&program(2, 30_000))).unwrap();
    let log: Vec<Option<(u64, Vec<u8>)>> = sectors(volume.into_inner().log);
    let mut disk = Recorder::new(before);
    // A few for every place, and as many more as somebody asks for.
    let asked = std::env::var("HOLDFAST_CUT_POINTS").ok().and_then(|text| text.parse().ok());
    let seeds = asked.unwrap_or(0_u64).div_ceil(log.len() as u64).max(4);
    let mut checked = 0;
    let mut durable = 0;
    for cut in 0..=log.len() {
        let since: Vec<_> = log[durable..cut].iter().flatten().collect();
        for seed in 0..seeds {
            let kept = since.iter().enumerate().filter(|(index, _)| match seed {
                0 => true,
                seed => hash(seed, *index).is_multiple_of(2),
            });
            let undo = apply(&mut disk, kept.map(|(_, write)| *write));
            check(&mut disk, cut == log.len() && seed == 0);
            undo.iter().rev().for_each(|(at, old)| put(&mut disk, *at, old));
            checked += 1;
        }
        if let Some(None) = log.get(cut) {
            apply(&mut disk, since.into_iter());
            durable = cut + 1;
        }
    }
    println!("{checked} cut points of two replacements and a promotion were checked");
    assert!(checked > 500, "{checked}");
}

fn check(disk: &mut Recorder, done: bool) {
    let bytes = std::mem::replace(&mut disk.bytes, Cursor::new(Vec::new()));
    let mut volume = Volume::open(Recorder { bytes, log: Vec::new(), faulty_at: None }).unwrap();
    let a = read(&mut volume, esp::SLOT_A).unwrap();
    assert!(a == program(0, 30_000) || a == program(1, 40_000));
    let b = read(&mut volume, esp::SLOT_B);
    assert!(b.is_none() || b == Some(program(2, 30_000)));
    let fallback = read(&mut volume, esp::FALLBACK).unwrap();
    assert!(fallback == program(0, 30_000) || fallback == program(2, 30_000));
    // What the fallback path was is not lost before it is what was promoted.
    assert!(fallback == program(0, 30_000) || a == program(0, 30_000));
    let is_shared = |volume: &mut Volume<_>, slot| volume.is_shared(slot, esp::FALLBACK).unwrap();
    let shared = [esp::SLOT_A, esp::SLOT_B].map(|slot| is_shared(&mut volume, slot));
    assert!(shared != [true, true], "one name at a time");
    // And the next replacement finds room.
    assert!(volume.begin(esp::SLOT_B, 30 << 20).is_ok());
    let end = (program(0, 30_000), program(2, 30_000), None, [false; 2]);
    assert!(!done || (a, fallback, b, shared) == end);
    disk.bytes = volume.into_inner().bytes;
}

fn sectors(log: Vec<Option<(u64, Vec<u8>)>>) -> Vec<Option<(u64, Vec<u8>)>> {
    let mut all = Vec::new();
    for entry in log {
        let Some((mut at, bytes)) = entry else {
            all.push(None);
            continue;
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let within = usize::try_from(512 - at % 512).unwrap().min(rest.len());
            let (piece, more) = rest.split_at(within);
            all.push(Some((at, piece.to_vec())));
            (at, rest) = (at + within as u64, more);
        }
    }
    all
}

fn put(disk: &mut Recorder, at: u64, bytes: &[u8]) {
    let at = usize::try_from(at).unwrap();
    disk.bytes.get_mut()[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes, and returns what was there.
fn apply<'a>(
    disk: &mut Recorder,
    writes: impl Iterator<Item = &'a (u64, Vec<u8>)>,
) -> Vec<(u64, Vec<u8>)> {
    let mut undo = Vec::new();
    for (at, bytes) in writes {
        let start = usize::try_from(*at).unwrap();
        undo.push((*at, disk.bytes.get_ref()[start..start + bytes.len()].to_vec()));
        put(disk, *at, bytes);
    }
    undo
}

fn hash(seed: u64, index: usize) -> u64 {
    (seed + index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}
