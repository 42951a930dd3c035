//! Looks into the memory of every running guest, from outside, and breaks some of it.

use std::{
    fs::{self, File},
    io::Read,
};

use anyhow::Result;
use qemu_tests::bed::protocol::Answer;

use super::sys;

/// What the VMM calls its guest's memory.
const NAME: &str = "/memfd:guest-memory";
/// Distance between places that are looked at.
const STEP: usize = 64;
/// How much is read at once.
const PIECE: usize = 2 << 20;

/// Counts the places, at multiples of 64 bytes, where `needle` lies.
pub(crate) fn search(needle: &str) -> Result<Answer> {
    let mut places = 0;
    let mut bytes = 0;
    for mut memory in memories()? {
        let (found, looked_at) = search_file(&mut memory, needle.as_bytes())?;
        places += u64::try_from(found.len())?;
        bytes += looked_at;
    }
    Ok(Answer::Found { places, bytes })
}

/// Breaks the pages that hold such places.
pub(crate) fn break_pages(needle: &str) -> Result<Answer> {
    let mut places = 0;
    let mut bytes = 0;
    for mut memory in memories()? {
        let (found, looked_at) = search_file(&mut memory, needle.as_bytes())?;
        for place in &found {
            sys::break_page(&memory, *place)?;
        }
        places += u64::try_from(found.len())?;
        bytes += looked_at;
    }
    Ok(Answer::Found { places, bytes })
}

/// Opens the memory of each running guest.
fn memories() -> Result<Vec<File>> {
    let mut memories = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        for file in files.flatten() {
            let target = fs::read_link(file.path()).unwrap_or_default();
            if target.to_string_lossy().starts_with(NAME) {
                memories.push(File::open(file.path())?);
            }
        }
    }
    Ok(memories)
}

/// Returns the places, and how many bytes there are.
fn search_file(file: &mut File, needle: &[u8]) -> Result<(Vec<u64>, u64)> {
    let mut piece = vec![0; PIECE];
    let (mut places, mut bytes) = (Vec::new(), 0);
    loop {
        let length = file.read(&mut piece)?;
        if length == 0 {
            return Ok((places, bytes));
        }
        for (at, chunk) in (0u64..).zip(piece[..length].chunks(STEP)) {
            if chunk.starts_with(needle) {
                places.push(bytes + at * u64::try_from(STEP)?);
            }
        }
        bytes += u64::try_from(length)?;
    }
}
