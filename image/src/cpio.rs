//! The initramfs archive, in the "newc" form that Linux unpacks.
//!
//! Pure and deterministic: no time, owner or inode of the building machine gets in.
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`.
//!
//! | Field (8 hex digits each, after `070701`) | Here                                |
//! |-------------------------------------------|-------------------------------------|
//! | c_ino                                     | counts from 1                       |
//! | c_mode                                    | type and permissions                |
//! | c_uid, c_gid                              | 0                                   |
//! | c_nlink                                   | 1                                   |
//! | c_mtime                                   | 0                                   |
//! | c_filesize                                | length of the data                  |
//! | c_maj, c_min, c_rmaj, c_rmin              | 0                                   |
//! | c_namesize                                | length of the name with its NUL     |
//! | c_chksum                                  | 0 (unused in this form)             |

/// Type bits of a regular file.
const REGULAR: u32 = 0o100_000;
/// Type bits of a directory.
const DIRECTORY: u32 = 0o040_000;
/// Name of the entry that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// One entry of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path without a leading slash.
    pub name: String,
    /// Permission bits, at most 0o777.
    pub mode: u32,
    /// What it is.
    pub kind: Kind,
}

/// The kinds of entry that the initramfs needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A regular file with its content.
    File(Vec<u8>),
}

/// Why an entry cannot be written, or an archive not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum CpioError {
    #[error(
        "the initramfs entry `{name}` must be a relative path without `..`, doubled slashes or NUL"
    )]
    BadName { name: String },
    #[error("the initramfs entry `{name}` has mode {mode:o}; at most 777 is allowed")]
    BadMode { name: String, mode: u32 },
    #[error("the initramfs entry `{name}` has {length} bytes; the format ends at 4 GiB")]
    TooLong { name: String, length: usize },
    #[error("the archive is damaged at byte {offset}: {what}")]
    Damaged { offset: usize, what: &'static str },
}

/// Writes `entries` in their order, then the trailer.
pub fn write(entries: &[Entry]) -> Result<Vec<u8>, CpioError> {
    let mut out = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        check_name(&entry.name)?;
        if entry.mode > 0o777 {
            return Err(CpioError::BadMode { name: entry.name.clone(), mode: entry.mode });
        }
        let (kind, data) = match &entry.kind {
            Kind::Directory => (DIRECTORY, &[][..]),
            Kind::File(data) => (REGULAR, data.as_slice()),
        };
        put(&mut out, index + 1, &entry.name, kind | entry.mode, data)?;
    }
    put(&mut out, 0, TRAILER, 0, &[])?;
    Ok(out)
}

fn check_name(name: &str) -> Result<(), CpioError> {
    let clean = name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if clean && !name.contains('\0') && name != TRAILER {
        Ok(())
    } else {
        Err(CpioError::BadName { name: name.to_owned() })
    }
}

fn put(out: &mut Vec<u8>, ino: usize, name: &str, mode: u32, data: &[u8]) -> Result<(), CpioError> {
    let length = u32::try_from(data.len())
        .map_err(|_| CpioError::TooLong { name: name.to_owned(), length: data.len() })?;
    let header = format!(
        "070701{ino:08x}{mode:08x}{zero:08x}{zero:08x}{links:08x}{zero:08x}{length:08x}\
         {zero:08x}{zero:08x}{zero:08x}{zero:08x}{name_length:08x}{zero:08x}",
        zero = 0,
        links = 1,
        name_length = name.len() + 1,
    );
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(data);
    pad(out);
    Ok(())
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Reads an archive that `write` made, to check it.
pub fn read(archive: &[u8]) -> Result<Vec<Entry>, CpioError> {
    let mut entries = Vec::new();
    let mut offset = 0;
    loop {
        let damaged = |what| CpioError::Damaged { offset, what };
        let header = archive.get(offset..offset + 110).ok_or(damaged("it ends inside a header"))?;
        if &header[..6] != b"070701" {
            return Err(damaged("this is no newc header"));
        }
        let field = |index: usize| -> Result<usize, CpioError> {
            let digits = &header[6 + index * 8..14 + index * 8];
            std::str::from_utf8(digits)
                .ok()
                .and_then(|text| usize::from_str_radix(text, 16).ok())
                .ok_or(damaged("a field is not hexadecimal"))
        };
        let (mode, size, name_size) = (field(1)?, field(6)?, field(11)?);
        let name_end = offset + 110 + name_size;
        let name = archive
            .get(offset + 110..name_end)
            .and_then(|bytes| bytes.strip_suffix(&[0]))
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .ok_or(damaged("the name is cut off or not UTF-8"))?;
        if name == TRAILER {
            return Ok(entries);
        }
        let data_start = name_end.next_multiple_of(4);
        let data =
            archive.get(data_start..data_start + size).ok_or(damaged("it ends inside a file"))?;
        let mode = u32::try_from(mode).map_err(|_| damaged("the mode is too large"))?;
        entries.push(Entry {
            name: name.to_owned(),
            mode: mode & 0o777,
            kind: if mode & 0o170_000 == DIRECTORY {
                Kind::Directory
            } else {
                Kind::File(data.to_vec())
            },
        });
        offset = (data_start + size).next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn file(name: &str, mode: u32, data: &[u8]) -> Entry {
        Entry { name: name.to_owned(), mode, kind: Kind::File(data.to_vec()) }
    }

    #[test]
    fn the_header_is_the_documented_one() {
        let archive = write(&[file("init", 0o755, b"abc")]).unwrap();
        let expected = concat!(
            "070701", "00000001", "000081ed", "00000000", "00000000", "00000001", "00000000",
            "00000003", "00000000", "00000000", "00000000", "00000000", "00000005", "00000000",
            "init\0\0"
        );
        assert_eq!(&archive[..116], expected.as_bytes());
        assert_eq!(&archive[116..120], b"abc\0");
    }

    #[test]
    fn what_was_written_is_read_back() {
        let entries = vec![
            Entry { name: "dev".to_owned(), mode: 0o755, kind: Kind::Directory },
            file("init", 0o755, b"x"),
            file("root.erofs", 0o444, &[7; 4097]),
        ];
        assert_eq!(read(&write(&entries).unwrap()), Ok(entries));
    }

    #[test]
    fn an_absolute_or_climbing_name_is_refused() {
        for name in ["/init", "a/../b", "", "a//b", "a\0b", "TRAILER!!!"] {
            assert!(matches!(write(&[file(name, 0o644, b"")]), Err(CpioError::BadName { .. })));
        }
    }

    #[test]
    fn a_setuid_mode_is_refused() {
        assert!(matches!(write(&[file("a", 0o4755, b"")]), Err(CpioError::BadMode { .. })));
    }

    #[test]
    fn a_cut_archive_is_damaged() {
        let archive = write(&[file("init", 0o755, b"abc")]).unwrap();
        assert!(matches!(read(&archive[..archive.len() - 200]), Err(CpioError::Damaged { .. })));
    }
}
