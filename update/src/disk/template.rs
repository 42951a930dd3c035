//! An empty file system, as the blocks that its maker wrote.
//!
//! The node has no program that makes ext4 file systems. The image's builder makes one of the
//! smallest length and keeps what was written, which is little; the installer writes that to the
//! start of a partition, and the kernel grows the file system to the partition's length when it is
//! first mounted. What the maker left alone may hold anything, also what an earlier owner of the
//! disk left there.
//!
//! | Field                    | Bytes                                    |
//! |--------------------------|------------------------------------------|
//! | `HFFS`, version (1)      | 4, 4                                     |
//! | length of the volume     | 8, in blocks of 4 KiB                    |
//! | runs, each:              |                                          |
//! | … first block            | 8                                        |
//! | … blocks                 | 4, at least 1                            |
//! | … kind                   | 4: 0 the blocks follow, 1 they are zeros |
//!
//! All numbers are little-endian; runs ascend and do not overlap.

use std::io::{self, Read, Seek, SeekFrom, Write};

/// Bytes of a block.
pub const BLOCK: usize = 4096;

const MAGIC: [u8; 4] = *b"HFFS";
const VERSION: u32 = 1;
const DATA: u32 = 0;
const ZEROS: u32 = 1;
/// What the builder fills a volume with before it makes a file system there.
pub const FILL: u8 = 0xa5;
/// Longest piece that is written at once, in bytes.
const PIECE: usize = 1 << 20;

/// Why bytes are no template, or could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum TemplateError {
    #[error("this is no template of a file system: it does not start with HFFS and version 1")]
    Unknown,
    #[error("the template ends at byte {at}, in the middle of a run")]
    Short { at: usize },
    #[error("the run at byte {at} names blocks {first}+{blocks} of {length}")]
    Run { at: usize, first: u64, blocks: u32, length: u64 },
    #[error("the run at byte {at} is of kind {kind}; 0 and 1 are known")]
    Kind { at: usize, kind: u32 },
    #[error("the file system needs {wanted} bytes, and the partition has {bytes}")]
    TooLarge { wanted: u64, bytes: u64 },
    #[error("cannot write the file system")]
    Write(#[from] io::Error),
}

/// Keeps what was written of a volume that was full of [`FILL`] before. A partial block at the end
/// is not looked at.
pub fn capture(volume: &[u8]) -> Vec<u8> {
    let blocks: Vec<&[u8]> = volume.chunks_exact(BLOCK).collect();
    let mut template = MAGIC.to_vec();
    template.extend(VERSION.to_le_bytes());
    template.extend((blocks.len() as u64).to_le_bytes());
    let mut at = 0;
    while let Some(block) = blocks.get(at) {
        let Some(kind) = kind(block) else {
            at += 1;
            continue;
        };
        let run = blocks[at..].iter().take_while(|block| self::kind(block) == Some(kind)).count();
        template.extend((at as u64).to_le_bytes());
        template.extend(u32::try_from(run).unwrap_or(u32::MAX).to_le_bytes());
        template.extend(kind.to_le_bytes());
        if kind == DATA {
            template.extend(blocks[at..at + run].concat());
        }
        at += run;
    }
    template
}

/// Returns what kind of run a block belongs to; `None` for one that nobody wrote.
fn kind(block: &[u8]) -> Option<u32> {
    if block.iter().all(|&byte| byte == FILL) {
        None
    } else if block.iter().all(|&byte| byte == 0) {
        Some(ZEROS)
    } else {
        Some(DATA)
    }
}

/// Writes a template to the start of `volume`, which has `bytes`. Everything is checked before the
/// first byte is written.
pub fn apply<V: Write + Seek>(
    template: &[u8],
    volume: &mut V,
    bytes: u64,
) -> Result<(), TemplateError> {
    let wanted = length(template)?.saturating_mul(BLOCK as u64);
    if wanted > bytes {
        return Err(TemplateError::TooLarge { wanted, bytes });
    }
    for run in runs(template)? {
        volume.seek(SeekFrom::Start(run.first * BLOCK as u64))?;
        match run.content {
            Some(content) => content.chunks(PIECE).try_for_each(|piece| volume.write_all(piece))?,
            None => zeros(volume, u64::from(run.blocks) * BLOCK as u64)?,
        }
    }
    Ok(())
}

/// Writes `bytes` zeros.
pub fn zeros<V: Write>(volume: &mut V, bytes: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(bytes), &mut io::BufWriter::with_capacity(PIECE, volume))?;
    Ok(())
}

struct Run<'a> {
    first: u64,
    blocks: u32,
    /// `None` for zeros.
    content: Option<&'a [u8]>,
}

/// Returns how long a template's volume is, in blocks.
fn length(template: &[u8]) -> Result<u64, TemplateError> {
    let header = template.get(..16).ok_or(TemplateError::Unknown)?;
    if header[..4] != MAGIC || header[4..8] != VERSION.to_le_bytes() {
        return Err(TemplateError::Unknown);
    }
    Ok(u64::from_le_bytes(array(&header[8..])))
}

fn runs(template: &[u8]) -> Result<Vec<Run<'_>>, TemplateError> {
    let length = length(template)?;
    let (mut at, mut next, mut runs) = (16, 0, Vec::new());
    while at < template.len() {
        let short = TemplateError::Short { at };
        let header = template.get(at..at + 16).ok_or(short)?;
        let first = u64::from_le_bytes(array(&header[..8]));
        let blocks = u32::from_le_bytes(array(&header[8..12]));
        let kind = u32::from_le_bytes(array(&header[12..]));
        let end = first.checked_add(u64::from(blocks)).filter(|&end| end <= length);
        let Some(end) = end.filter(|_| blocks > 0 && first >= next) else {
            return Err(TemplateError::Run { at, first, blocks, length });
        };
        next = end;
        let content_at = at + 16;
        let content = match kind {
            DATA => {
                let bytes = blocks as usize * BLOCK;
                let content = template.get(content_at..content_at.saturating_add(bytes));
                Some(content.ok_or(TemplateError::Short { at })?)
            }
            ZEROS => None,
            kind => return Err(TemplateError::Kind { at, kind }),
        };
        at = content_at + content.map_or(0, <[u8]>::len);
        runs.push(Run { first, blocks, content });
    }
    Ok(runs)
}

/// Copies the first bytes of a slice that is long enough; what is missing is zero.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    array
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    fn volume() -> Vec<u8> {
        let mut volume = vec![FILL; 8 * BLOCK];
        volume[BLOCK..3 * BLOCK].fill(0);
        volume[3 * BLOCK + 5] = 1;
        volume[7 * BLOCK..].fill(9);
        volume
    }

    #[test]
    fn what_was_written_comes_back_over_anything() {
        let template = capture(&volume());
        let mut disk = vec![0x33; 10 * BLOCK];
        apply(&template, &mut Cursor::new(&mut disk), 10 * BLOCK as u64).unwrap();
        let mut wanted = volume();
        for block in wanted.chunks_exact_mut(BLOCK).filter(|block| kind(block).is_none()) {
            block.fill(0x33);
        }
        assert_eq!(disk[..8 * BLOCK], wanted);
        assert_eq!(disk[8 * BLOCK..], vec![0x33; 2 * BLOCK]);
    }

    #[test]
    fn nothing_is_written_of_a_template_that_is_wrong() {
        let good = capture(&volume());
        let wrong = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut template = good.clone();
            change(&mut template);
            let mut disk = vec![0x33; 8 * BLOCK];
            let error =
                apply(&template, &mut Cursor::new(&mut disk), 8 * BLOCK as u64).unwrap_err();
            assert_eq!(disk, vec![0x33; 8 * BLOCK]);
            error.to_string()
        };
        assert!(wrong(&|t| t[0] = 0).contains("HFFS"));
        assert!(wrong(&|t| t.truncate(t.len() - 1)).contains("in the middle"));
        assert!(wrong(&|t| t[16] = 200).contains("names blocks"));
        assert!(wrong(&|t| t[24] = 0).contains("names blocks"));
        assert!(wrong(&|t| t[28] = 7).contains("of kind 7"));
        assert!(wrong(&|t| t[8] = 9).contains("the partition has"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if bytes.len() > 8 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = apply(&bytes, &mut Cursor::new(Vec::new()), 1 << 20);
        }
    }
}
