//! A firmware's log of what it measured, as a node sends it: the bytes as they are, and the bytes as a list
//! of records with right lengths, so that the fuzzer need not find those.
//!
//! A record: register, kind, length of its data, and the data.

#![no_main]

use lease::attestation::{drivers, judge_log};

fn built(mut rest: &[u8]) -> Vec<u8> {
    let mut log = vec![0, 0, 0, 0, 3, 0, 0, 0];
    log.extend([0; 20]);
    log.extend([33, 0, 0, 0]);
    log.extend(b"Spec ID Event03\0");
    log.extend([0, 0, 0, 0, 0, 2, 0, 2, 1, 0, 0, 0, 0x0b, 0, 32, 0, 0]);
    while let [register, kind, length, data @ ..] = rest {
        let (data, more) = data.split_at(usize::from(*length).min(data.len()));
        // Kinds of UEFI's have the highest bit.
        let kind = u32::from(*kind & 0x7f) | u32::from(*kind >> 7) << 31;
        log.extend(u32::from(*register % 24).to_le_bytes());
        log.extend(kind.to_le_bytes());
        log.extend([1, 0, 0, 0, 0x0b, 0]);
        log.extend([*register; 32]);
        log.extend(u32::try_from(data.len()).unwrap_or(0).to_le_bytes());
        log.extend(data);
        rest = more;
    }
    log
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = (judge_log(bytes), drivers(bytes));
    let bytes = &bytes[..bytes.len().min(4096)];
    assert!(judge_log(&built(bytes)), "a log of whole records is read");
    assert!(drivers(&built(bytes)).is_ok(), "and so are its drivers");
});
