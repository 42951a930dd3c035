//! System calls that fail while a disk is written: `updates::injected` lets them. Whatever fails, the
//! disk is empty for the next try, which then succeeds, or it holds an installation that is whole.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    collections::BTreeSet,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use update::disk::{
    Slice, esp,
    gpt::{ALIGNMENT, BlockSize},
    layout::{self, Identities},
    medium,
    template::{self, BLOCK},
};

use super::{
    probe,
    write::{self, Content},
};
use crate::{
    seal::{
        keys::{NewVolumes, Sealer},
        tpm::TpmError,
    },
    updates::injected::{Failure, Scenario, Teller},
};

/// The scenario. It makes hundreds of calls, so not each third of them fails.
pub(crate) const INSTALL: Scenario =
    Scenario { name: "install", stride: 61, prepare: blank, work: install, verify: can_go_on };

/// The file that is the disk.
const DISK: &str = "disk";

fn open(folder: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).open(folder.join(DISK))
}

fn blank(folder: &Path) {
    File::create(folder.join(DISK)).unwrap().set_len(layout::SMALLEST_DISK).unwrap();
}

fn program() -> Vec<u8> {
    vec![5; 30_000]
}

fn install(folder: &Path, told: Teller) -> Result<(), Failure> {
    let tpm = Err(TpmError::Absent { path: "dev/tpmrm0".into() });
    let volumes = NewVolumes::invent(&mut Sealer { tpm, release: None, additions: None }, &[])?;
    let (program, empty) = (program(), template::capture(&vec![1; 4 * BLOCK]));
    let content = Content { program: &program, state: &empty, data: &empty, volumes: &volumes };
    let disk = open(folder)?;
    let place = (BlockSize::B512, disk.metadata()?.len());
    write::write(&disk, place, Identities::random(), content, &mut |_| ())?;
    told.tell("installed");
    Ok(())
}

fn part(mut disk: &File, at: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    disk.seek(SeekFrom::Start(at)).unwrap();
    disk.take(ALIGNMENT).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Returns what the next start finds.
fn found(disk: &File) -> probe::Content {
    let programs = medium::esp_partitions(disk, BlockSize::B512);
    // The kernel names partitions by the same table.
    let named: Vec<_> = programs.iter().map(|_| layout::ESP.to_owned()).collect();
    probe::content(&part(disk, 0), &part(disk, layout::SMALLEST_DISK - ALIGNMENT), &named)
}

fn is_whole(disk: &File) {
    for (start, bytes) in medium::esp_partitions(disk, BlockSize::B512) {
        for path in [esp::FALLBACK, esp::SLOT_A] {
            let read = esp::read(Slice::new(disk, start, bytes), path, 1 << 20).unwrap();
            assert!(read == program(), "{path}");
        }
    }
}

fn can_go_on(folder: &Path, told: &BTreeSet<String>) {
    let disk = open(folder).unwrap();
    let content = found(&disk);
    match content {
        probe::Content::Holdfast => {}
        probe::Content::Nothing if told.is_empty() => install(folder, Teller(|_| ())).unwrap(),
        probe::Content::Nothing | probe::Content::Something(_) | probe::Content::Unreadable(_) => {
            panic!("the next try finds {content}, after {told:?}")
        }
    }
    assert_eq!(found(&disk), probe::Content::Holdfast);
    is_whole(&disk);
}
