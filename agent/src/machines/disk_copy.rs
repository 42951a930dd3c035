//! Copies an image to a machine's new disk, encrypts it on the way and checks it beside that: on the CPUs that the
//! machine was promised, which have nothing else to do before it runs, so that a start takes nothing from its
//! neighbours.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use rustix::thread::{CpuSet, sched_setaffinity};
use sha2::{Digest, Sha256};
use types::{
    disk_key::{SECTOR, SectorCipher},
    ids::ContentId,
};

/// What a thread takes at a time.
const TURN: usize = 1 << 20;
/// Pieces that hold only zeroes stay holes.
pub(super) const PIECE: usize = 64 << 10;
const _: () = assert!(TURN.is_multiple_of(PIECE) && PIECE.is_multiple_of(SECTOR));
/// Most threads: eight encrypt as much as a drive takes.
const MAX_THREADS: usize = 8;

/// What a disk begins as.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// The file.
    pub path: &'a Path,
    /// CPUs that have time for copying it; none for threads anywhere, as few as it can do with.
    pub cpus: &'a [u32],
    /// What it has to be, where nobody has looked before.
    pub unchecked: Option<ContentId>,
}

/// Why an image was not copied.
#[derive(Debug)]
pub(super) enum CopyError {
    /// It cannot be read.
    Image(io::Error),
    /// It is not what it was.
    Altered(ContentId),
    /// The disk does not take it.
    Disk(io::Error),
}

/// Copies `image`, which is open as `from`, to `to`, which is empty.
pub(super) fn copy(
    image: &Image<'_>,
    from: &File,
    to: &File,
    cipher: &SectorCipher,
) -> Result<(), CopyError> {
    if image.unchecked.is_none() {
        return copy_on(image.cpus, from, to, cipher);
    }
    let look = || {
        // Elsewhere it is slower, not wrong.
        let _ = image.cpus.first().map(|cpu| run_on(*cpu));
        check(image, from)
    };
    let (copied, checked) = thread::scope(|scope| {
        let looks = thread::Builder::new().name("check".to_owned()).spawn_scoped(scope, look);
        let copied = copy_on(image.cpus, from, to, cipher);
        let checked = looks.map_or_else(
            // The host has no thread for it.
            |_| check(image, from),
            |looks| looks.join().unwrap_or_else(|_| Err(CopyError::Image(failed()))),
        );
        (copied, checked)
    });
    copied.and(checked)
}

/// Checks that `image`, which is open as `from`, is what it has to be.
pub(super) fn check(image: &Image<'_>, from: &File) -> Result<(), CopyError> {
    let Some(wanted) = image.unchecked else { return Ok(()) };
    let found = digest_of(from).map_err(CopyError::Image)?;
    if found == wanted { Ok(()) } else { Err(CopyError::Altered(found)) }
}

fn failed() -> io::Error {
    io::Error::other("a thread failed")
}

/// Returns the digest of a file.
pub(super) fn digest_of(file: &File) -> io::Result<ContentId> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; TURN];
    let mut at = 0;
    loop {
        match file.read_at(&mut buffer, at)? {
            0 => return Ok(ContentId::from_bytes(digest.finalize().into())),
            count => {
                digest.update(&buffer[..count]);
                at += count as u64;
            }
        }
    }
}

/// Copies on these CPUs. The first error of any thread ends all of it.
fn copy_on(cpus: &[u32], from: &File, to: &File, cipher: &SectorCipher) -> Result<(), CopyError> {
    let length = from.metadata().map_err(CopyError::Image)?.len();
    let next = AtomicU64::new(0);
    let work = || {
        let result = take_turns(from, to, cipher, (&next, length));
        if result.is_err() {
            next.store(length, Ordering::Relaxed);
        }
        result
    };
    let pay = usize::try_from(length / TURN as u64).unwrap_or(MAX_THREADS).min(MAX_THREADS);
    thread::scope(|scope| {
        let start = |cpu: &u32| {
            let (work, cpu) = (&work, *cpu);
            let part = move || {
                // Elsewhere it is slower, not wrong.
                let _ = run_on(cpu);
                work()
            };
            // Where the host gives no more threads, those that it gave do all of it.
            thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, part).ok()
        };
        let threads: Vec<_> = cpus.iter().take(pay).filter_map(start).collect();
        let own = if threads.is_empty() { work() } else { Ok(()) };
        let all = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(CopyError::Disk(failed()))));
        all.fold(own, |before, result| before.and(result))
    })
}

/// Copies what nobody else has begun, until nothing is left.
fn take_turns(
    from: &File,
    to: &File,
    cipher: &SectorCipher,
    (next, length): (&AtomicU64, u64),
) -> Result<(), CopyError> {
    let mut turn = vec![0; TURN];
    loop {
        let start = next.fetch_add(TURN as u64, Ordering::Relaxed);
        if start >= length {
            return Ok(());
        }
        let count = usize::try_from((TURN as u64).min(length - start)).unwrap_or(turn.len());
        from.read_exact_at(&mut turn[..count], start).map_err(CopyError::Image)?;
        // Disks are whole sectors, images need not be.
        let whole = count.next_multiple_of(SECTOR);
        turn[count..whole].fill(0);
        for (at, piece) in (start..).step_by(PIECE).zip(turn[..whole].chunks_mut(PIECE)) {
            if !is_zero(piece) {
                cipher.encrypt(at / SECTOR as u64, piece);
                to.write_all_at(piece, at).map_err(CopyError::Disk)?;
            }
        }
    }
}

/// Whether all bytes are zeroes.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

/// Lets the calling thread run on one CPU only.
fn run_on(cpu: u32) -> io::Result<()> {
    let cpu = usize::try_from(cpu).unwrap_or(usize::MAX);
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use types::disk_key::DiskKey;

    use super::*;

    fn cipher() -> SectorCipher {
        SectorCipher::new(&DiskKey::from_bytes([7; 64]))
    }

    fn image<'a>(cpus: &'a [u32], unchecked: Option<&[u8]>) -> Image<'a> {
        let unchecked = unchecked.map(|bytes| ContentId::from_bytes(Sha256::digest(bytes).into()));
        Image { path: Path::new("/"), cpus, unchecked }
    }

    /// Copies by threads on so many CPUs, and returns what is read of the copy, and its blocks.
    fn copied(bytes: &[u8], cpus: &[u32]) -> (Vec<u8>, u64) {
        let (from, to) =
            (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("one"));
        from.write_all_at(bytes, 0).expect("written");
        copy(&image(cpus, Some(bytes)), &from, &to, &cipher()).expect("copied");
        let blocks = to.metadata().expect("a file").blocks();
        let whole = bytes.len().next_multiple_of(SECTOR);
        to.set_len(whole as u64).expect("as long as the disk");
        let mut found = vec![0; whole];
        to.read_exact_at(&mut found, 0).expect("read");
        cipher().decrypt_sparse(0, &mut found);
        (found, blocks)
    }

    #[test]
    fn by_however_many_threads_it_is_the_same() {
        let turn = TURN;
        for length in [0, 1, SECTOR, PIECE + 1, turn, 5 * turn + 3 * PIECE + 700] {
            let bytes: Vec<u8> =
                (0..length).map(|at| u8::try_from(at / 251 % 256).expect("a byte")).collect();
            // The last CPU is one that no host has.
            for cpus in [&[][..], &[0], &[0, 1, 0, 1], &[u32::MAX, 5000, 0]] {
                let (found, _) = copied(&bytes, cpus);
                assert!(found[..length] == bytes, "{length} bytes on {cpus:?}");
                assert!(is_zero(&found[length..]));
            }
        }
    }

    #[test]
    fn zeroes_stay_holes() {
        let mut bytes = vec![0; 4 * TURN];
        bytes[2 * TURN + PIECE] = 1;
        let (found, blocks) = copied(&bytes, &[0, 1]);
        assert!(found == bytes);
        assert!(blocks * 512 <= PIECE as u64 * 2, "{blocks} blocks");
    }

    #[test]
    fn an_error_of_one_thread_is_the_copys() {
        let (from, full) =
            (tempfile::tempfile().expect("a file"), File::options().write(true).open("/dev/full"));
        from.write_all_at(&vec![1; 8 * TURN], 0).expect("written");
        let full = full.expect("a device that takes nothing");
        for cpus in [&[][..], &[0, 1, 0]] {
            let error = copy(&image(cpus, None), &from, &full, &cipher());
            let full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
            assert!(matches!(&error, Err(CopyError::Disk(error)) if full(error)), "{error:?}");
        }
    }

    #[test]
    fn an_image_that_is_another_one_is_told() {
        let (from, to) =
            (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("one"));
        let bytes = vec![1; 3 * TURN + 5];
        from.write_all_at(&bytes, 0).expect("written");
        let digest = digest_of(&from).expect("read");
        assert_eq!(digest, ContentId::from_bytes(Sha256::digest(&bytes).into()));
        for cpus in [&[][..], &[0, 1]] {
            let copied = copy(&image(cpus, Some(b"another")), &from, &to, &cipher());
            assert!(matches!(copied, Err(CopyError::Altered(found)) if found == digest));
        }
        let folder = File::open("/").expect("a folder, which cannot be read");
        let copied = copy(&image(&[], Some(b"")), &folder, &to, &cipher());
        assert!(matches!(copied, Err(CopyError::Image(_))), "{copied:?}");
    }

    #[test]
    fn zeroes_are_told_from_the_rest() {
        for length in [0, 1, 15, 16, 17, 100] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes));
            for at in 0..length {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "byte {at} of {length}");
                bytes[at] = 0;
            }
        }
    }
}
