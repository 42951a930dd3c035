//! Frames of zstd, of which it is known how many bytes they hold together. Their checksums are not looked at.
//! Source: RFC 8878 §3.1.1.1, "Frame Header"; §3.1.2, "Skippable Frames".
//!
//! | Offset | Bytes        | Field of the header (little-endian)                              |
//! |--------|--------------|------------------------------------------------------------------|
//! | 0      | 4            | magic number                                                     |
//! | 4      | 1            | descriptor: bits 6 and 7 the form of the content's size, bit 5 whether all is one segment, bits 0 and 1 the form of the dictionary's number |
//! | 5      | 0 or 1       | window, unless all is one segment: mantissa in bits 0 to 2, exponent above |
//! |        | 0, 1, 2 or 4 | number of the dictionary                                         |
//! |        | 0, 1, 2, 4, 8 | bytes of the content; those of two bytes count from 256 on      |
//!
//! A frame that is to be skipped has a magic number of its own, and its length, that of what follows, in four bytes.

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::{MAX_PIECE, number};

/// Largest window, in bytes: what every decoder should take (RFC 8878 §3.1.1.1.2). libzstd's default levels ask for no
/// more than the content has.
const MAX_WINDOW: u64 = 8 << 20;

/// First bytes of a frame.
const MAGIC: [u8; 4] = 0xfd2f_b528u32.to_le_bytes();

/// Bytes of a skippable frame's header, its magic number, and the bits of that which are anything.
const SKIPPED_HEADER: usize = 8;
const SKIPPED: u32 = 0x184d_2a50;
const ANY: u32 = 0xf;

/// Bit of the descriptor: there is no window but the content.
const SINGLE_SEGMENT: u8 = 1 << 5;

const _: () = assert!(MAX_PIECE <= MAX_WINDOW, "content that is one segment is its own window");

/// Appends what frames at the beginning of `packed` hold to `buffer`, which is empty, until there are `length` bytes, at
/// most [`MAX_PIECE`]: frames may follow one another (RFC 8878 §3.1). It may be less when the last one does not tell its
/// size, and is never more. The decoder holds its window and one block, however large it makes that.
pub(super) fn unpack(packed: &[u8], length: u64, buffer: &mut Vec<u8>) -> Result<(), String> {
    let mut rest = packed;
    skip(&mut rest)?;
    loop {
        unpack_frame(&mut rest, length, buffer)?;
        // What comes behind enough is another cluster's.
        if buffer.len() as u64 == length {
            return Ok(());
        }
        skip(&mut rest)?;
        if !rest.starts_with(&MAGIC) {
            return Ok(());
        }
    }
}

/// Goes on behind the frames at the beginning of `rest` that are to be skipped. Each takes bytes of it.
fn skip(rest: &mut &[u8]) -> Result<(), String> {
    while u32::from_le_bytes(number(rest, 0)) & !ANY == SKIPPED {
        let length = u32::from_le_bytes(number(rest, 4));
        let behind = rest.get(SKIPPED_HEADER..).and_then(|rest| {
            let length = usize::try_from(length).ok()?;
            rest.get(length..)
        });
        *rest = behind.ok_or_else(|| {
            format!("a frame to be skipped speaks of {length} bytes, more than there are")
        })?;
    }
    Ok(())
}

/// Appends what the frame at the beginning of `rest` holds, and goes on behind it.
fn unpack_frame(rest: &mut &[u8], length: u64, buffer: &mut Vec<u8>) -> Result<(), String> {
    let header = *rest;
    let mut decoder = FrameDecoder::new();
    decoder.init(&mut *rest).map_err(|error| error.to_string())?;
    let first = buffer.len();
    let told = check(header, length - first as u64)?;
    // Every block takes bytes of `rest`.
    while !decoder.is_finished() {
        let one = BlockDecodingStrategy::UptoBlocks(1);
        decoder.decode_blocks(&mut *rest, one).map_err(|error| error.to_string())?;
        if (buffer.len() + decoder.can_collect()) as u64 > length {
            return Err(format!("more than {length} bytes come out"));
        }
        decoder.collect_to_writer(&mut *buffer).map_err(|error| error.to_string())?;
    }
    let came = (buffer.len() - first) as u64;
    match told.filter(|told| *told != came) {
        Some(told) => Err(format!("its header speaks of {told} bytes, and {came} come out")),
        None => Ok(()),
    }
}

/// Checks what a whole header says of content, of which `length` bytes are wanted at most, and window. Returns how many
/// bytes of content it speaks of.
fn check(packed: &[u8], length: u64) -> Result<Option<u64>, String> {
    let [descriptor, window] = number::<2>(packed, 4);
    let is_single = descriptor & SINGLE_SEGMENT != 0;
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let at = 5 + usize::from(!is_single) + dictionary;
    let content = match descriptor >> 6 {
        0 if is_single => Some(u64::from(number::<1>(packed, at)[0])),
        0 => None,
        1 => Some(u64::from(u16::from_le_bytes(number(packed, at))) + 256),
        2 => Some(u64::from(u32::from_le_bytes(number(packed, at)))),
        _ => Some(u64::from_le_bytes(number(packed, at))),
    };
    if let Some(content) = content.filter(|content| *content > length) {
        return Err(format!("its header speaks of {content} bytes, more than {length}"));
    }
    let base = 1u64 << (10 + (window >> 3));
    let window = base + base / 8 * u64::from(window & 7);
    if is_single || window <= MAX_WINDOW {
        return Ok(content);
    }
    Err(format!("its window has {window} bytes, more than {MAX_WINDOW}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a frame: what its header has behind the magic number, and blocks that are the same byte so often.
    fn frame(header: &[u8], blocks: &[u32]) -> Vec<u8> {
        let block = |(index, length): (usize, &u32)| {
            let is_last = u32::from(index + 1 == blocks.len());
            let [a, b, c, _] = ((*length << 3) | (1 << 1) | is_last).to_le_bytes();
            [a, b, c, 7]
        };
        let mut frame = MAGIC.to_vec();
        frame.extend_from_slice(header);
        frame.extend(blocks.iter().enumerate().flat_map(block));
        frame
    }

    /// Unpacks frames for 4096 bytes. Returns how many come out.
    fn unpacked_all(frames: &[Vec<u8>]) -> Result<usize, String> {
        let mut packed = frames.concat();
        // The rest of its sector.
        packed.push(0);
        let mut buffer = Vec::new();
        unpack(&packed, 4096, &mut buffer)?;
        assert!(buffer.iter().all(|byte| *byte == 7));
        Ok(buffer.len())
    }

    fn unpacked(header: &[u8], blocks: &[u32]) -> Result<usize, String> {
        unpacked_all(&[frame(header, blocks)])
    }

    #[test]
    fn frames_are_unpacked_whether_their_size_is_told_or_not() {
        // Windows of 1 KiB and of 8 MiB.
        assert_eq!(unpacked(&[0, 0], &[1024; 4]), Ok(4096));
        assert_eq!(unpacked(&[0, 13 << 3], &[4096, 0]), Ok(4096));
        assert_eq!(unpacked(&[0, 0], &[1024; 3]), Ok(3072));
        // The size in two, four and eight bytes; one segment, maybe behind a dictionary's number, and a window.
        assert_eq!(unpacked(&[0x60, 0, 0x0f], &[4096]), Ok(4096));
        assert_eq!(unpacked(&[0x61, 0, 0, 0x0f], &[4096]), Ok(4096));
        assert_eq!(unpacked(&[0x80, 2 << 3, 0, 0x10, 0, 0], &[4096]), Ok(4096));
        assert_eq!(unpacked(&[0xe0, 0, 0x10, 0, 0, 0, 0, 0, 0], &[4096]), Ok(4096));
    }

    #[test]
    fn frames_follow_one_another_until_there_is_enough() {
        // 256 bytes that are told, and the rest that is not. A checksum ends the first.
        let mut first = frame(&[0x64, 0, 0], &[256]);
        first.extend_from_slice(&[1, 2, 3, 4]);
        let rest = |length| frame(&[0, 0], &[length]);
        assert_eq!(unpacked_all(&[first.clone(), rest(3840)]), Ok(4096));
        assert_eq!(unpacked_all(&[first.clone(), rest(0), rest(3840)]), Ok(4096));
        assert_eq!(unpacked_all(&[first.clone(), rest(1000)]), Ok(1256));
        assert!(unpacked_all(&[first.clone(), rest(3841)]).is_err_and(|e| e.contains("more than")));
        // What comes behind enough is another cluster's.
        assert_eq!(unpacked_all(&[first, rest(3840), rest(7)]), Ok(4096));
    }

    /// Returns a frame that is to be skipped, and says that it has `length` bytes.
    fn skipped(kind: u8, length: u32, content: &[u8]) -> Vec<u8> {
        [&[kind, 0x2a, 0x4d, 0x18][..], &length.to_le_bytes(), content].concat()
    }

    #[test]
    fn frames_that_are_to_be_skipped_are() {
        let (first, second) = (frame(&[0, 0], &[1024]), frame(&[0, 0], &[1024; 3]));
        // What is in one may look like another.
        let (empty, full) = (skipped(0x50, 0, &[]), skipped(0x5f, 4, &MAGIC));
        assert_eq!(unpacked_all(&[empty.clone(), full.clone(), first.clone()]), Ok(1024));
        assert_eq!(unpacked_all(&[first.clone(), full.clone(), second]), Ok(4096));
        assert_eq!(unpacked_all(&[first.clone(), empty.clone(), full.clone()]), Ok(1024));
        assert!(unpacked_all(&[full, empty]).is_err(), "nothing is to be unpacked");
        // With the rest of the sector it has one byte less than it says.
        let cut = skipped(0x58, 4, &[1, 2]);
        let is_cut = |told: Result<usize, String>| told.is_err_and(|e| e.contains("to be skipped"));
        assert!(is_cut(unpacked_all(std::slice::from_ref(&cut))));
        assert!(is_cut(unpacked_all(&[first.clone(), cut])));
        let header = skipped(0x50, 0, &[])[..6].to_vec();
        assert!(is_cut(unpacked_all(&[first, header])));
    }

    #[test]
    fn a_window_is_no_larger_than_every_decoder_takes() {
        let told = |window: u8| unpacked(&[0, window], &[4096]).expect_err("refused");
        assert!(told((13 << 3) | 1).contains("window has 9437184 bytes"));
        assert!(told(31 << 3).contains("window has 2199023255552 bytes"));
    }

    #[test]
    fn a_size_that_is_told_is_the_right_one() {
        let told = |header: &[u8]| unpacked(header, &[4096]).expect_err("refused");
        assert!(told(&[0x20, 255]).contains("speaks of 255 bytes, and 4096 come out"));
        assert!(told(&[0x60, 1, 0x0f]).contains("speaks of 4097 bytes"));
        assert!(told(&[0x80, 0, 0, 0, 1, 0]).contains("speaks of 65536 bytes"));
        let large = told(&[0xe0, 0, 0x10, 0, 0, 0, 0, 0, 0x10]);
        assert!(large.contains("speaks of 1152921504606851072 bytes"), "{large}");
    }

    #[test]
    fn more_than_there_may_be_ends_it() {
        let block = 128u32 << 10;
        let many = [vec![block; 65], vec![1 << 20]].concat();
        let told =
            |window: u8, blocks: &[u32]| unpacked(&[0, window], blocks).expect_err("refused");
        assert!(told(0, &[4097]).contains("more than 4096 bytes"));
        // What comes after the block that is too much, a block that is larger than any may be, is not looked at.
        assert!(told(0, &[block, 1 << 20]).contains("more than 4096 bytes"));
        assert!(told(13 << 3, &many).contains("more than 4096 bytes"));
    }
}
