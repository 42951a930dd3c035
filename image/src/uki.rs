//! The unified kernel image: systemd-stub with our sections appended.
//!
//! Pure: bytes in, bytes out. `assemble` checks itself by reading back, with another reader, what
//! it wrote. Signing is left to whoever holds a key.
//! Source: Microsoft "PE Format", rev. of 2024, "COFF File Header", "Optional Header" and "Section
//! Table"; UAPI group specification "Unified Kernel Image" for the section names.
//!
//! | Field                          | Offset (from the PE signature) | Meaning                    |
//! |--------------------------------|--------------------------------|----------------------------|
//! | NumberOfSections               | 6, u16                         | entries in the table       |
//! | SizeOfOptionalHeader           | 20, u16                        | where the table starts     |
//! | SizeOfInitializedData          | 24 + 8, u32                    | sum over data sections     |
//! | SectionAlignment               | 24 + 32, u32                   | of addresses               |
//! | FileAlignment                  | 24 + 36, u32                   | of file offsets            |
//! | SizeOfImage                    | 24 + 56, u32                   | end of the last section    |
//! | SizeOfHeaders                  | 24 + 60, u32                   | file offset of first data  |
//! | CheckSum                       | 24 + 64, u32                   | see `checksum`             |
//!
//! | Field of a table entry (40 bytes) | Offset  |
//! |-----------------------------------|---------|
//! | Name                              | 0, [u8; 8] |
//! | VirtualSize                       | 8, u32  |
//! | VirtualAddress                    | 12, u32 |
//! | SizeOfRawData                     | 16, u32 |
//! | PointerToRawData                  | 20, u32 |
//! | Characteristics                   | 36, u32 |

use object::read::pe::PeFile64;
use object::{LittleEndian, Object, ObjectSection};

/// Size of a section table entry.
pub(crate) const ENTRY: usize = 40;
/// Size of the signature and the COFF header in front of the optional header.
pub(crate) const COFF: usize = 24;
/// PE32+ optional header magic.
const PE32_PLUS: u16 = 0x20b;
/// IMAGE_SCN_CNT_INITIALIZED_DATA | IMAGE_SCN_MEM_READ.
const READ_ONLY_DATA: u32 = 0x4000_0040;
/// Smallest alignment for our sections: firmware protects memory by 4 KiB pages.
const PAGE: u32 = 4096;
/// More sections than any stub has; bounds the loops over a foreign file.
const MAX_SECTIONS: u16 = 96;
/// What systemd-stub carries in `.sdmagic`.
const STUB_MAGIC: &[u8] = b"#### LoaderInfo: systemd-stub ";

/// A section to append.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// Name with its dot, at most eight bytes.
    pub name: &'a str,
    /// Content; must not be empty.
    pub data: &'a [u8],
}

/// Why no image came out.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum UkiError {
    #[error("the stub is no 64-bit PE file: {0}")]
    NotPe(&'static str),
    #[error("the stub is not systemd-stub: it has no .sdmagic section that says so")]
    NotSystemdStub,
    #[error("the stub already has a section {0}")]
    Taken(String),
    #[error("a section name must have 1 to 8 bytes, and `{0}` has not")]
    BadName(String),
    #[error("the section {0} is empty")]
    Empty(String),
    #[error(
        "the section table would reach {needed:#x}, but the first section is mapped at {first:#x}"
    )]
    NoRoom { needed: u32, first: u32 },
    #[error("the image would grow past 4 GiB at section {0}")]
    TooLarge(String),
    #[error(
        "the program's checksum is {said:#x}, and its bytes come to {found:#x}: it was altered; fetch it again"
    )]
    Checksum { said: u32, found: u32 },
    #[error("reading the image back: {0}")]
    ReadBack(String),
}

/// Appends `sections` to `stub` in their order.
pub fn assemble(stub: &[u8], sections: &[Section<'_>]) -> Result<Vec<u8>, UkiError> {
    let layout = Layout::of(stub)?;
    check_stub(stub)?;
    for section in sections {
        layout.check_name(stub, section)?;
    }
    let mut image = layout.make_room(stub, sections.len())?;
    let mut address = layout.end_of_image;
    for (index, section) in sections.iter().enumerate() {
        address = layout.append(&mut image, index, address, section)?;
    }
    layout.finish(&mut image, sections, address)?;
    read_back(stub, &image, sections)?;
    Ok(image)
}

/// Where the parts of a program lie.
pub(crate) struct Layout {
    /// Offset of the PE signature.
    pub(crate) pe: usize,
    /// Offset of the section table.
    pub(crate) table: usize,
    /// Entries of that table.
    pub(crate) sections: u16,
    section_alignment: u32,
    file_alignment: u32,
    /// Offset of the first section's data.
    pub(crate) headers: u32,
    first_address: u32,
    end_of_image: u32,
}

impl Layout {
    pub(crate) fn of(stub: &[u8]) -> Result<Self, UkiError> {
        let short = UkiError::NotPe("it is cut off");
        if stub.get(..2) != Some(b"MZ") {
            return Err(UkiError::NotPe("it does not start with MZ"));
        }
        let pe = get_u32(stub, 0x3c).ok_or(short.clone())? as usize;
        if stub.get(pe..pe.saturating_add(4)) != Some(b"PE\0\0") {
            return Err(UkiError::NotPe("the PE signature is missing"));
        }
        let sections = get_u16(stub, pe + 6).ok_or(short.clone())?;
        if sections == 0 || sections > MAX_SECTIONS {
            return Err(UkiError::NotPe("it has no sections, or absurdly many"));
        }
        let optional = pe + COFF;
        if get_u16(stub, optional) != Some(PE32_PLUS) {
            return Err(UkiError::NotPe("it is not PE32+"));
        }
        let table = optional + usize::from(get_u16(stub, pe + 20).ok_or(short.clone())?);
        let field = |at: usize| get_u32(stub, optional + at).ok_or(short.clone());
        let (section_alignment, file_alignment) = (field(32)?, field(36)?);
        if !section_alignment.is_power_of_two() || !file_alignment.is_power_of_two() {
            return Err(UkiError::NotPe("its alignments are no powers of two"));
        }
        let mut layout = Self {
            pe,
            table,
            sections,
            section_alignment: section_alignment.max(PAGE),
            file_alignment,
            headers: field(60)?,
            first_address: u32::MAX,
            end_of_image: 0,
        };
        for index in 0..usize::from(sections) {
            let entry = table + index * ENTRY;
            let size = get_u32(stub, entry + 8).ok_or(short.clone())?;
            let address = get_u32(stub, entry + 12).ok_or(short.clone())?;
            let end = address.checked_add(size).ok_or(UkiError::NotPe("a section wraps around"))?;
            layout.first_address = layout.first_address.min(address);
            layout.end_of_image = layout.end_of_image.max(end);
        }
        Ok(layout)
    }

    fn check_name(&self, stub: &[u8], section: &Section<'_>) -> Result<(), UkiError> {
        if section.name.is_empty() || section.name.len() > 8 {
            return Err(UkiError::BadName(section.name.to_owned()));
        }
        if section.data.is_empty() {
            return Err(UkiError::Empty(section.name.to_owned()));
        }
        let wanted = padded_name(section.name);
        let taken = (0..usize::from(self.sections)).any(|index| {
            stub.get(self.table + index * ENTRY..).is_some_and(|e| e.starts_with(&wanted))
        });
        if taken {
            return Err(UkiError::Taken(section.name.to_owned()));
        }
        Ok(())
    }

    /// Copies the stub, moving its data down when the longer section table needs the space.
    fn make_room(&self, stub: &[u8], extra: usize) -> Result<Vec<u8>, UkiError> {
        let table_end = self.table + (usize::from(self.sections) + extra) * ENTRY;
        let needed = u32::try_from(table_end)
            .ok()
            .and_then(|end| end.checked_next_multiple_of(self.file_alignment))
            .ok_or(UkiError::NotPe("its section table lies absurdly far out"))?;
        if needed > self.first_address {
            return Err(UkiError::NoRoom { needed, first: self.first_address });
        }
        let old = self.headers as usize;
        let moved_by = needed.saturating_sub(self.headers);
        let body = stub.get(old..).ok_or(UkiError::NotPe("it ends inside its headers"))?;
        let mut image = stub[..old].to_vec();
        image.resize(old + moved_by as usize, 0);
        image.extend_from_slice(body);
        // The table grows into padding, which must not hold anything.
        let old_end = self.table + usize::from(self.sections) * ENTRY;
        image[old_end..table_end].fill(0);
        for index in 0..usize::from(self.sections) {
            let at = self.table + index * ENTRY + 20;
            let pointer = get_u32(&image, at).unwrap_or(0);
            if pointer != 0 {
                put_u32(&mut image, at, pointer + moved_by);
            }
        }
        put_u32(&mut image, self.pe + COFF + 60, self.headers + moved_by);
        let aligned = image.len().next_multiple_of(self.file_alignment as usize);
        image.resize(aligned, 0);
        Ok(image)
    }

    /// Adds one section at or after `address` and returns where it ends.
    fn append(
        &self,
        image: &mut Vec<u8>,
        index: usize,
        address: u32,
        section: &Section<'_>,
    ) -> Result<u32, UkiError> {
        let too_large = || UkiError::TooLarge(section.name.to_owned());
        let start =
            address.checked_next_multiple_of(self.section_alignment).ok_or_else(too_large)?;
        let size = u32::try_from(section.data.len()).map_err(|_| too_large())?;
        let raw = size.checked_next_multiple_of(self.file_alignment).ok_or_else(too_large)?;
        let pointer = u32::try_from(image.len()).map_err(|_| too_large())?;
        let end = start.checked_add(size).ok_or_else(too_large)?;
        let entry = self.table + (usize::from(self.sections) + index) * ENTRY;
        image[entry..entry + 8].copy_from_slice(&padded_name(section.name));
        put_u32(image, entry + 8, size);
        put_u32(image, entry + 12, start);
        put_u32(image, entry + 16, raw);
        put_u32(image, entry + 20, pointer);
        put_u32(image, entry + 36, READ_ONLY_DATA);
        image.extend_from_slice(section.data);
        image.resize(pointer as usize + raw as usize, 0);
        Ok(end)
    }

    /// Writes the totals.
    fn finish(&self, image: &mut [u8], sections: &[Section<'_>], end: u32) -> Result<(), UkiError> {
        let last = || UkiError::TooLarge(sections.last().map_or("", |s| s.name).to_owned());
        let count = u16::try_from(sections.len()).map_err(|_| last())? + self.sections;
        let size = end.checked_next_multiple_of(self.section_alignment).ok_or_else(last)?;
        let optional = self.pe + COFF;
        let added: usize = sections
            .iter()
            .map(|s| s.data.len().next_multiple_of(self.file_alignment as usize))
            .sum();
        let data = u32::try_from(added)
            .ok()
            .and_then(|added| get_u32(image, optional + 8)?.checked_add(added))
            .ok_or_else(last)?;
        image[self.pe + 6..self.pe + 8].copy_from_slice(&count.to_le_bytes());
        put_u32(image, optional + 8, data);
        put_u32(image, optional + 56, size);
        put_checksum(image, optional + 64);
        Ok(())
    }
}

/// Returns a program with its first `sections` sections alone, whose data come first in the file, too.
pub(crate) fn truncated(program: &[u8], sections: usize) -> Result<Vec<u8>, UkiError> {
    let layout = Layout::of(program)?;
    let short = UkiError::NotPe("it is cut off");
    let kept = u16::try_from(sections).ok().filter(|kept| *kept < layout.sections);
    let kept = kept.ok_or(UkiError::NotPe("it has fewer sections"))?;
    let field = |index: usize, at| get_u32(program, layout.table + index * ENTRY + at);
    let cut = field(sections, 20).ok_or(short.clone())?;
    let mut image = program.get(..cut as usize).ok_or(short.clone())?.to_vec();
    let (mut end, mut gone) = (0, 0_u32);
    for index in 0..usize::from(layout.sections) {
        let (size, address) = (field(index, 8), field(index, 12));
        let (size, address) = (size.ok_or(short.clone())?, address.ok_or(short.clone())?);
        if index < sections {
            end = end.max(address.saturating_add(size));
        } else {
            gone = gone.saturating_add(field(index, 16).unwrap_or(0));
        }
    }
    let table =
        layout.table + sections * ENTRY..layout.table + usize::from(layout.sections) * ENTRY;
    image.get_mut(table).ok_or(short.clone())?.fill(0);
    image[layout.pe + 6..layout.pe + 8].copy_from_slice(&kept.to_le_bytes());
    let optional = layout.pe + COFF;
    let data = get_u32(&image, optional + 8).ok_or(short.clone())?;
    put_u32(&mut image, optional + 8, data.saturating_sub(gone));
    let size = end.checked_next_multiple_of(layout.section_alignment).ok_or(short)?;
    put_u32(&mut image, optional + 56, size);
    put_checksum(&mut image, optional + 64);
    Ok(image)
}

/// Computes the checksum of a finished program and writes it to its place.
pub(crate) fn put_checksum(image: &mut [u8], at: usize) {
    put_u32(image, at, 0);
    let sum = checksum(image);
    put_u32(image, at, sum);
}

/// The PE checksum: 16-bit words added with carry folded in, plus the file's length. The field
/// itself must be zero while it is computed.
fn checksum(image: &[u8]) -> u32 {
    let mut sum: u32 = 0;
    for pair in image.chunks(2) {
        let word = u32::from(pair[0]) | pair.get(1).map_or(0, |high| u32::from(*high) << 8);
        sum += word;
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum.wrapping_add(u32::try_from(image.len()).unwrap_or(u32::MAX))
}

/// Checks that a program's bytes come to the checksum in its header; zero is none.
pub(crate) fn check_checksum(program: &[u8], at: usize) -> Result<(), UkiError> {
    let said = get_u32(program, at).unwrap_or(0);
    let mut bare = program.to_vec();
    put_u32(&mut bare, at, 0);
    let found = checksum(&bare);
    if said == 0 || said == found { Ok(()) } else { Err(UkiError::Checksum { said, found }) }
}

fn check_stub(stub: &[u8]) -> Result<(), UkiError> {
    let file: PeFile64<'_> =
        PeFile64::parse(stub).map_err(|_| UkiError::NotPe("its headers do not parse"))?;
    let genuine = file
        .section_by_name(".sdmagic")
        .and_then(|section| section.data().ok())
        .is_some_and(|data| data.starts_with(STUB_MAGIC));
    if genuine { Ok(()) } else { Err(UkiError::NotSystemdStub) }
}

/// Reads the image with the `object` crate and compares everything that the loader relies on.
fn read_back(stub: &[u8], image: &[u8], sections: &[Section<'_>]) -> Result<(), UkiError> {
    let wrong = |what: String| UkiError::ReadBack(what);
    let new: PeFile64<'_> = PeFile64::parse(image).map_err(|e| wrong(e.to_string()))?;
    let old: PeFile64<'_> = PeFile64::parse(stub).map_err(|e| wrong(e.to_string()))?;
    let kept = old.sections().map(|s| (s.name(), s.address(), s.data()));
    let seen = new.sections().map(|s| (s.name(), s.address(), s.data()));
    if !kept.eq(seen.take(old.sections().count())) {
        return Err(wrong("a section of the stub changed".to_owned()));
    }
    let added: Vec<_> = new.sections().skip(old.sections().count()).collect();
    if added.len() != sections.len() {
        return Err(wrong(format!("{} sections instead of {}", added.len(), sections.len())));
    }
    let mut end = old.sections().map(|s| s.address() + s.size()).max().unwrap_or(0);
    for (section, expected) in added.iter().zip(sections) {
        let name = expected.name;
        if section.name() != Ok(name) || section.data() != Ok(expected.data) {
            return Err(wrong(format!("{name} has another name or content")));
        }
        if section.address() < end || !section.address().is_multiple_of(u64::from(PAGE)) {
            return Err(wrong(format!("{name} overlaps or is not aligned")));
        }
        end = section.address() + section.size();
    }
    let header = new.nt_headers().optional_header.size_of_image.get(LittleEndian);
    let base = new.relative_address_base();
    if u64::from(header) < end - base {
        return Err(wrong("SizeOfImage ends before the last section".to_owned()));
    }
    Ok(())
}

/// The content of a section of a UKI, for tests and for listing what was built.
pub fn section(image: &[u8], name: &str) -> Option<Vec<u8>> {
    let file: PeFile64<'_> = PeFile64::parse(image).ok()?;
    Some(file.section_by_name(name)?.data().ok()?.to_vec())
}

fn padded_name(name: &str) -> [u8; 8] {
    let mut padded = [0; 8];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    padded
}

fn get_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

pub(crate) fn get_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use proptest::prelude::*;

    /// A PE32+ file with two sections, the second being `.sdmagic`; `headers` is SizeOfHeaders.
    fn stub(headers: u32) -> Vec<u8> {
        let mut bytes = vec![0; headers as usize];
        bytes[..2].copy_from_slice(b"MZ");
        put_u32(&mut bytes, 0x3c, 0x80);
        bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
        bytes[0x84..0x86].copy_from_slice(&0x8664_u16.to_le_bytes());
        bytes[0x86..0x88].copy_from_slice(&2_u16.to_le_bytes());
        bytes[0x94..0x96].copy_from_slice(&240_u16.to_le_bytes());
        let optional = 0x98;
        bytes[optional..optional + 2].copy_from_slice(&PE32_PLUS.to_le_bytes());
        put_u32(&mut bytes, optional + 32, 0x1000);
        put_u32(&mut bytes, optional + 36, 0x200);
        put_u32(&mut bytes, optional + 56, 0x3000);
        put_u32(&mut bytes, optional + 60, headers);
        put_u32(&mut bytes, optional + 108, 16);
        let table = optional + 240;
        let magic = b"#### LoaderInfo: systemd-stub 257 ####";
        for (index, (name, data)) in
            [(".text", &b"code"[..]), (".sdmagic", &magic[..])].iter().enumerate()
        {
            let entry = table + index * ENTRY;
            bytes[entry..entry + 8].copy_from_slice(&padded_name(&name[..name.len().min(8)]));
            put_u32(&mut bytes, entry + 8, u32::try_from(data.len()).unwrap());
            put_u32(&mut bytes, entry + 12, 0x1000 * (u32::try_from(index).unwrap() + 1));
            put_u32(&mut bytes, entry + 16, 0x200);
            let pointer = u32::try_from(bytes.len()).unwrap();
            put_u32(&mut bytes, entry + 20, pointer);
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(0x200), 0);
        }
        bytes
    }

    #[test]
    fn sections_are_appended_and_read_back() {
        let sections = [
            Section { name: ".osrel", data: b"ID=holdfast\n" },
            Section { name: ".linux", data: &[9; 5000] },
        ];
        let image = assemble(&stub(0x400), &sections).unwrap();
        assert_eq!(section(&image, ".linux"), Some(vec![9; 5000]));
        assert_eq!(section(&image, ".osrel"), Some(b"ID=holdfast\n".to_vec()));
        assert_eq!(section(&image, ".text"), Some(b"code".to_vec()));
    }

    #[test]
    fn a_full_header_makes_room_by_moving_the_data() {
        // 0x200 bytes of headers hold the two entries of the stub and one more.
        let sections = [
            Section { name: ".osrel", data: b"a" },
            Section { name: ".cmdline", data: b"b" },
            Section { name: ".initrd", data: b"c" },
            Section { name: ".linux", data: b"d" },
        ];
        let image = assemble(&stub(0x200), &sections).unwrap();
        assert_eq!(section(&image, ".text"), Some(b"code".to_vec()));
        assert_eq!(section(&image, ".linux"), Some(b"d".to_vec()));
    }

    #[test]
    fn the_checksum_is_that_of_the_finished_file() {
        let mut image = assemble(&stub(0x400), &[Section { name: ".osrel", data: b"x" }]).unwrap();
        let at = 0x98 + 64;
        let stored = get_u32(&image, at).unwrap();
        put_u32(&mut image, at, 0);
        assert_eq!(checksum(&image), stored);
    }

    #[test]
    fn a_foreign_program_is_refused() {
        let mut bytes = stub(0x400);
        let at = bytes.len() - 0x200;
        bytes[at] = b'x';
        assert_eq!(assemble(&bytes, &[]), Err(UkiError::NotSystemdStub));
    }

    #[test]
    fn a_section_that_the_stub_has_is_refused() {
        let sections = [Section { name: ".text", data: b"x" }];
        assert_eq!(assemble(&stub(0x400), &sections), Err(UkiError::Taken(".text".to_owned())));
    }

    #[test]
    fn names_and_contents_are_checked() {
        let long = [Section { name: ".muchtoolong", data: b"x" }];
        let empty = [Section { name: ".osrel", data: b"" }];
        assert!(matches!(assemble(&stub(0x400), &long), Err(UkiError::BadName(_))));
        assert!(matches!(assemble(&stub(0x400), &empty), Err(UkiError::Empty(_))));
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_without_panic(at in 0usize..0x600, value: u8, cut in 0usize..0x800) {
            let mut bytes = stub(0x400);
            bytes[at] = value;
            bytes.truncate(bytes.len().min(cut + 0x100));
            let _ = assemble(&bytes, &[Section { name: ".osrel", data: b"x" }]);
        }
    }
}
