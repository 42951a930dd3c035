//! What one altered byte of a boot program does, signed or not: it is refused before anything is made of it, and
//! never signed again.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::Path;
use std::process::Command;

use image::authenticode;
use image::customise::{Changes, Lost, customise};
use image::keys::{KeyFiles, Keys};
use image::program::Parts;

/// Length of the headers of [`stub`].
const HEADERS: usize = 0x600;
/// Where the checksum of [`stub`] is: PE signature, COFF header, optional header.
const CHECKSUM: usize = 0x80 + 24 + 64;
/// Where the directory entry of its certificate table is.
const DIRECTORY: usize = 0x80 + 24 + 112 + 32;

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A PE32+ program with two sections, the second of which says that it is systemd-stub.
fn stub() -> Vec<u8> {
    let mut bytes = vec![0; HEADERS];
    bytes[..2].copy_from_slice(b"MZ");
    put(&mut bytes, 0x3c, 0x80);
    bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
    bytes[0x84..0x88].copy_from_slice(&[0x64, 0x86, 2, 0]);
    bytes[0x94] = 240;
    let optional = 0x98;
    bytes[optional..optional + 2].copy_from_slice(&[0x0b, 0x02]);
    put(&mut bytes, optional + 32, 0x1000);
    put(&mut bytes, optional + 36, 0x200);
    put(&mut bytes, optional + 56, 0x3000);
    put(&mut bytes, optional + 60, 0x600);
    put(&mut bytes, optional + 108, 16);
    let magic = b"#### LoaderInfo: systemd-stub 257 ####";
    let sections = [(&b".text\0\0\0"[..], &b"code"[..]), (b".sdmagic", magic)];
    for (index, (name, data)) in (0_u32..).zip(sections) {
        let entry = optional + 240 + 40 * usize::try_from(index).unwrap();
        bytes[entry..entry + 8].copy_from_slice(name);
        put(&mut bytes, entry + 8, u32::try_from(data.len()).unwrap());
        put(&mut bytes, entry + 12, 0x1000 * (index + 1));
        put(&mut bytes, entry + 16, 0x200);
        let pointer = u32::try_from(bytes.len()).unwrap();
        put(&mut bytes, entry + 20, pointer);
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(0x200), 0);
    }
    bytes
}

fn parts() -> Parts {
    Parts {
        stub: stub(),
        os_release: b"ID=holdfast\nVERSION_ID=1\n".to_vec(),
        cmdline: b"quiet".to_vec(),
        kernel_release: b"6.18".to_vec(),
        initrd: vec![7; 300],
        kernel: (0..900_u32).map(|n| n.to_le_bytes()[0]).collect(),
    }
}

/// Makes a key for boot programs in `folder`; `None` without openssl.
fn keys(folder: &Path) -> Option<Keys> {
    let run = |arguments: &[&str]| {
        let output = Command::new("openssl").current_dir(folder).args(arguments).output();
        output.is_ok_and(|output| output.status.success())
    };
    let made = run(&["genrsa", "-out", "k", "2048"])
        && run(&["req", "-new", "-x509", "-subj", "/CN=ours", "-key", "k", "-out", "c"]);
    if !made {
        println!("skipped: altered signed programs: openssl cannot be started");
        return None;
    }
    let files = KeyFiles {
        secure_boot_key: Some(folder.join("k")),
        secure_boot_cert: Some(folder.join("c")),
        ..KeyFiles::default()
    };
    Some(files.read().unwrap())
}

/// Every single bit, ends, and what is appended.
fn altered(whole: &[u8]) -> impl Iterator<Item = (String, Vec<u8>)> {
    let bits = (0..whole.len()).map(move |at| {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1 << (at % 8);
        (format!("byte {at} of {}", whole.len()), bytes)
    });
    let ends = (0..whole.len()).step_by(41).chain([whole.len() - 1]);
    let ends = ends.map(move |end| (format!("its first {end} bytes"), whole[..end].to_vec()));
    let longer = [vec![0], vec![0; 8], vec![1; 8], whole.to_vec()];
    let longer = longer.into_iter().map(move |more| ("longer".to_owned(), [whole, &more].concat()));
    bits.chain(ends).chain(longer)
}

/// Returns what passed of all alterations.
fn passed(whole: &[u8]) -> Vec<String> {
    Parts::of(whole).unwrap();
    let taken = altered(whole).filter(|(_, bytes)| Parts::of(bytes).is_ok());
    taken.map(|(what, _)| what).collect()
}

#[test]
fn no_byte_of_a_program_can_be_altered() {
    let program = parts().finish(&Keys::default(), 0).unwrap().bytes;
    assert_eq!(passed(&program), Vec::<String>::new());
}

#[test]
fn no_byte_of_a_signed_program_can_be_altered() {
    let folder = tempfile::tempdir().unwrap();
    let Some(keys) = keys(folder.path()) else { return };
    let program = parts().finish(&keys, 0).unwrap().bytes;
    assert_eq!(passed(&program), Vec::<String>::new());
}

/// Gives a program the checksum of its bytes, as whoever alters it on purpose can.
fn with_checksum(mut program: Vec<u8>) -> Vec<u8> {
    put(&mut program, CHECKSUM, 0);
    let words = program
        .chunks(2)
        .map(|two| u64::from(two[0]) | two.get(1).map_or(0, |high| u64::from(*high) << 8));
    let mut sum: u64 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let length = program.len();
    put(&mut program, CHECKSUM, u32::try_from(sum).unwrap() + u32::try_from(length).unwrap());
    program
}

#[test]
fn a_signed_program_that_was_altered_with_its_checksum_is_not_what_was_signed() {
    let folder = tempfile::tempdir().unwrap();
    let Some(keys) = keys(folder.path()) else { return };
    let whole = parts().finish(&keys, 0).unwrap().bytes;
    assert_eq!(with_checksum(whole.clone()), whole);
    let table = whole.len() - authenticode::certificates(&whole).unwrap().len();
    let covered = (0..table).filter(|at| {
        !(CHECKSUM..CHECKSUM + 4).contains(at) && !(DIRECTORY..DIRECTORY + 8).contains(at)
    });
    let taken = covered.filter(|at| {
        let mut bytes = whole.clone();
        bytes[*at] ^= 1 << (at % 8);
        Parts::of(&with_checksum(bytes)).is_ok()
    });
    assert_eq!(taken.collect::<Vec<_>>(), Vec::<usize>::new());
    // A signature of another program is none of this one.
    let other = Parts { cmdline: b"debug".to_vec(), ..parts() }.finish(&keys, 0).unwrap().bytes;
    assert_eq!(other.len(), whole.len());
    let swapped = with_checksum([&whole[..table], &other[table..]].concat());
    let refused = Parts::of(&swapped).unwrap_err().to_string();
    assert!(refused.contains("its bytes have another digest"), "{refused}");
    // And the signature's own number is the key's.
    let mut last = whole.clone();
    let at = whole.iter().rposition(|byte| *byte != 0).unwrap() - 40;
    last[at] ^= 1;
    let refused = Parts::of(&with_checksum(last)).unwrap_err().to_string();
    assert!(refused.contains("no certificate with it verifies"), "{refused}");
}

#[test]
fn an_altered_program_is_refused_by_name_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from.efi", "to.efi"].map(|name| folder.path().join(name));
    let mut program = parts().finish(&Keys::default(), 0).unwrap().bytes;
    let at = program.len() - 0x100;
    program[at] ^= 4;
    fs::write(&from, program).unwrap();
    let changes = Changes {
        config: format!(
            "version = 1\nname = \"n\"\n[authority]\nthreshold = 1\nkeys = [\"{}\"]\n",
            "01".repeat(32)
        ),
        authority: Vec::new(),
        threshold: None,
        channel: None,
        keys: Keys::default(),
        signatures: Lost::Refused,
    };
    let refused = customise(&from, &to, &changes).unwrap_err();
    let said = chain(&refused);
    assert!(said.contains("from.efi") && said.contains("altered; fetch it again"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// What an error says, with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
