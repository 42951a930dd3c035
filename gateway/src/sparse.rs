//! A new file in which blocks of zeroes take no room. What it holds, and whether that is true, is not decided here.

use std::{
    io::{self, SeekFrom},
    ops::Range,
};

use tokio::{
    fs::File,
    io::{AsyncSeekExt, AsyncWriteExt},
};

/// Zeroes are found in these, as the file is divided into them: what file systems give room by.
const BLOCK: usize = 4096;

/// A file that began without a byte.
#[derive(Debug)]
pub(crate) struct Sparse {
    file: File,
    /// Where the file stands: what is written next goes there.
    stands: u64,
}

impl Sparse {
    pub(crate) fn new(file: File) -> Self {
        Self { file, stands: 0 }
    }

    /// Puts `bytes` at offset `at`, where nothing was put yet.
    pub(crate) async fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        for run in runs(at, bytes) {
            let start = at + run.start as u64;
            if self.stands != start {
                self.file.seek(SeekFrom::Start(start)).await?;
            }
            self.stands = at + run.end as u64;
            self.file.write_all(&bytes[run]).await?;
        }
        Ok(())
    }

    /// Gives the file its length in bytes, and returns when all of it is on the disk.
    pub(crate) async fn finish(mut self, length: u64) -> io::Result<()> {
        // Only this tells that the last write failed.
        self.file.flush().await?;
        self.file.set_len(length).await?;
        self.file.sync_all().await
    }
}

/// Returns where in `bytes`, which begin at offset `at` of a file, there is anything but zeroes, by blocks of the file;
/// neighbours are put together.
fn runs(at: u64, bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let within = usize::try_from(at % BLOCK as u64).unwrap_or(0);
    let (mut from, mut to) = (0, (BLOCK - within).min(bytes.len()));
    while from < to {
        if !is_zero(&bytes[from..to]) {
            match runs.last_mut() {
                Some(last) if last.end == from => last.end = to,
                Some(_) | None => runs.push(from..to),
            }
        }
        (from, to) = (to, (to + BLOCK).min(bytes.len()));
    }
    runs
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Begin and end of each run.
    fn found(at: u64, bytes: &[u8]) -> Vec<(usize, usize)> {
        runs(at, bytes).into_iter().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn runs_are_whole_blocks_of_the_file() {
        let mut bytes = vec![0; 20_480];
        assert_eq!((found(0, &bytes), found(7, &bytes), found(0, &[])), (vec![], vec![], vec![]));
        (bytes[4096], bytes[12_287]) = (1, 1);
        assert_eq!(found(0, &bytes), [(4096, 12_288)]);
        // Of the block that the first bytes are in, four are here.
        assert_eq!(found(4092, &bytes), [(4, 4100), (8196, 12_292)]);
        assert_eq!(found(4095, &[1, 0, 0]), [(0, 1)]);
        assert_eq!(found(4095, &[0, 0, 1]), [(1, 3)]);
    }

    #[tokio::test]
    async fn a_file_holds_what_was_put_there_and_zeroes_take_no_room() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut bytes = vec![0; 4 << 20];
        (bytes[5], bytes[1 << 20]) = (1, 2);
        let opened = File::create(file.path()).await.expect("opened");
        let mut sparse = Sparse::new(opened);
        for (index, piece) in bytes.chunks(100_001).enumerate() {
            let at = index as u64 * 100_001;
            sparse.write(at, piece).await.expect("written");
        }
        sparse.finish(bytes.len() as u64).await.expect("on the disk");
        let facts = file.as_file().metadata().expect("read");
        assert!(std::fs::read(file.path()).expect("read") == bytes);
        assert!(facts.blocks() * 512 < 1 << 20, "{} blocks are held", facts.blocks());
    }
}
