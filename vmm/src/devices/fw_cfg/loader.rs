//! ACPI tables as firmware takes them: two files whose addresses it chooses, and a script that
//! says which fields to adjust then.
//! Source: QEMU hw/acpi/bios-linker-loader.c; edk2 OvmfPkg/Include/IndustryStandard/
//! QemuLoader.h; ACPI 6.5 §5.2.5.3 (RSDP), §5.2.8 (XSDT), §5.2.9 (FADT).
//!
//! | Offset | Bytes | Field of a command of 128 bytes, little-endian                    |
//! |--------|-------|-------------------------------------------------------------------|
//! | 0      | 4     | 1 allocate, 2 add pointer, 3 add checksum                         |
//! | 4      | 56    | file: the one to place, with the pointer, or with the checksum    |
//! | 60     |       | allocate: alignment (4), zone (1): 1 anywhere, 2 below 1 MiB      |
//! | 60     |       | pointer: file it points into (56), offset (4), bytes (1)          |
//! | 60     |       | checksum: its offset (4), first byte covered (4), length (4)      |

use crate::acpi::Table;

/// Name of the file with the script.
pub const SCRIPT_FILE: &str = "etc/table-loader";
/// Name of the file with the root pointer.
pub const ROOT_FILE: &str = "etc/acpi/rsdp";
/// Name of the file with all other tables.
pub const TABLES_FILE: &str = "etc/acpi/tables";

const COMMAND: usize = 128;
const ALLOCATE: u32 = 1;
const ADD_POINTER: u32 = 2;
const ADD_CHECKSUM: u32 = 3;
const ZONE_ANYWHERE: u8 = 1;
const ZONE_FIRMWARE: u8 = 2;
/// Offset of the checksum in a table's header.
const CHECKSUM: usize = 9;
/// Bytes of a table's header; entries of the XSDT follow.
const HEADER: usize = 36;
/// Pointers of the FADT, (offset, bytes): FACS, DSDT, and DSDT again with 64 bits.
const FADT_POINTERS: [(usize, usize); 3] = [(36, 4), (40, 4), (140, 8)];
/// Offsets in the root pointer: XSDT address, checksum of all 36 bytes.
const ROOT_XSDT: usize = 24;
const ROOT_CHECKSUM: usize = 32;

/// Why tables cannot be told to firmware.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ACPI table at {table:#x} points to {target:#x}, where no table is")]
pub struct AcpiLoaderError {
    table: u64,
    target: u64,
}

/// The files that go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcpiFiles {
    /// [`ROOT_FILE`].
    pub root: Vec<u8>,
    /// [`TABLES_FILE`].
    pub tables: Vec<u8>,
    /// [`SCRIPT_FILE`].
    pub script: Vec<u8>,
}

/// Makes the files of `tables`, of which the first is the root pointer and all have addresses.
pub fn acpi_files(tables: &[Table]) -> Result<AcpiFiles, AcpiLoaderError> {
    let (root, others) = tables.split_first().map_or((None, tables), |(root, o)| (Some(root), o));
    let base = others.iter().map(|table| table.address).min().unwrap_or(0);
    let mut files = AcpiFiles {
        root: root.map(|table| table.bytes.clone()).unwrap_or_default(),
        tables: Vec::new(),
        script: Vec::new(),
    };
    files.allocate(ROOT_FILE, 16, ZONE_FIRMWARE);
    files.allocate(TABLES_FILE, 64, ZONE_ANYWHERE);
    for table in others {
        let at = place(table.address, base);
        let end = at + table.bytes.len();
        files.tables.resize(files.tables.len().max(end), 0);
        files.tables[at..end].copy_from_slice(&table.bytes);
    }
    for table in others {
        let pointers = pointers(&table.bytes);
        for (offset, bytes) in &pointers {
            let target = read(&table.bytes[*offset..*offset + *bytes]);
            if !others.iter().any(|other| other.address == target) {
                return Err(AcpiLoaderError { table: table.address, target });
            }
            let at = place(table.address, base) + offset;
            write(&mut files.tables[at..at + bytes], target - base);
            files.add_pointer(TABLES_FILE, at, *bytes);
        }
        if !pointers.is_empty() {
            let start = place(table.address, base);
            files.tables[start + CHECKSUM] = 0;
            files.add_checksum(TABLES_FILE, start + CHECKSUM, start..start + table.bytes.len());
        }
    }
    if let Some(root) = root {
        let target = read(&files.root[ROOT_XSDT..ROOT_XSDT + 8]);
        if !others.iter().any(|other| other.address == target) {
            return Err(AcpiLoaderError { table: root.address, target });
        }
        write(&mut files.root[ROOT_XSDT..ROOT_XSDT + 8], target - base);
        files.root[ROOT_CHECKSUM] = 0;
        files.add_pointer(ROOT_FILE, ROOT_XSDT, 8);
        files.add_checksum(ROOT_FILE, ROOT_CHECKSUM, 0..root.bytes.len());
    }
    Ok(files)
}

/// Returns where in its file a table at `address` lies.
fn place(address: u64, base: u64) -> usize {
    usize::try_from(address - base).unwrap_or(usize::MAX)
}

/// Returns the pointers in a table: (offset, bytes).
fn pointers(table: &[u8]) -> Vec<(usize, usize)> {
    match table.get(..4) {
        Some(b"FACP") => FADT_POINTERS.to_vec(),
        Some(b"XSDT") => (HEADER..table.len()).step_by(8).map(|at| (at, 8)).collect(),
        Some(_) | None => Vec::new(),
    }
}

fn read(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn write(bytes: &mut [u8], value: u64) {
    let length = bytes.len();
    bytes.copy_from_slice(&value.to_le_bytes()[..length]);
}

impl AcpiFiles {
    fn allocate(&mut self, file: &str, alignment: u32, zone: u8) {
        let command = self.command(ALLOCATE, file);
        command[60..64].copy_from_slice(&alignment.to_le_bytes());
        command[64] = zone;
    }

    fn add_pointer(&mut self, file: &str, offset: usize, bytes: usize) {
        let command = self.command(ADD_POINTER, file);
        command[60..60 + TABLES_FILE.len()].copy_from_slice(TABLES_FILE.as_bytes());
        command[116..120].copy_from_slice(&small(offset).to_le_bytes());
        command[120] = bytes.to_le_bytes()[0];
    }

    fn add_checksum(&mut self, file: &str, at: usize, covered: std::ops::Range<usize>) {
        let command = self.command(ADD_CHECKSUM, file);
        command[60..64].copy_from_slice(&small(at).to_le_bytes());
        command[64..68].copy_from_slice(&small(covered.start).to_le_bytes());
        command[68..72].copy_from_slice(&small(covered.len()).to_le_bytes());
    }

    fn command(&mut self, number: u32, file: &str) -> &mut [u8] {
        let start = self.script.len();
        self.script.resize(start + COMMAND, 0);
        let command = &mut self.script[start..];
        command[..4].copy_from_slice(&number.to_le_bytes());
        command[4..4 + file.len()].copy_from_slice(file.as_bytes());
        command
    }
}

fn small(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::acpi::{Platform, tables};

    fn number(bytes: &[u8]) -> usize {
        usize::try_from(read(bytes)).expect("small")
    }

    /// Does what firmware does: puts the files somewhere, follows the script, then the pointers. Returns
    /// the tables by their signatures: those of the XSDT, then the FACS and the DSDT.
    pub(crate) fn follow(files: AcpiFiles) -> Vec<(String, Vec<u8>)> {
        let (root, placed) = run(files, 0x7f00_0000);
        let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!((sum(&root[..20]), sum(&root)), (0, 0));
        let table = |address: &[u8]| {
            let at = place(read(address), 0x7f00_0000);
            placed[at..at + number(&placed[at + 4..at + 8])].to_vec()
        };
        let xsdt = table(&root[24..32]);
        assert_eq!((&xsdt[..4], sum(&xsdt)), (&b"XSDT"[..], 0));
        let mut all: Vec<Vec<u8>> = xsdt[HEADER..].chunks(8).map(table).collect();
        let fadt = all.iter().find(|table| table.starts_with(b"FACP")).expect("there").clone();
        assert_eq!(fadt[40..44], fadt[140..144]);
        all.push(table(&fadt[36..40]));
        all.push(table(&fadt[140..148]));
        assert!(all.iter().all(|table| sum(table) == 0 || table.starts_with(b"FACS")));
        let named = |table: Vec<u8>| (String::from_utf8_lossy(&table[..4]).into_owned(), table);
        all.into_iter().map(named).collect()
    }

    /// Puts the tables at this address and follows the script.
    fn run(files: AcpiFiles, tables_at: u64) -> (Vec<u8>, Vec<u8>) {
        let AcpiFiles { mut root, mut tables, script } = files;
        for command in script.chunks(COMMAND) {
            let is_root = command[4..].starts_with(ROOT_FILE.as_bytes());
            let file = if is_root { &mut root } else { &mut tables };
            match number(&command[..4]) {
                2 => {
                    let (at, bytes) = (number(&command[116..120]), usize::from(command[120]));
                    let old = read(&file[at..at + bytes]);
                    write(&mut file[at..at + bytes], old + tables_at);
                }
                3 => {
                    let at = number(&command[60..64]);
                    let (start, length) = (number(&command[64..68]), number(&command[68..72]));
                    let sum =
                        file[start..start + length].iter().fold(0u8, |s, b| s.wrapping_add(*b));
                    file[at] = file[at].wrapping_sub(sum);
                }
                other => assert_eq!(other, 1),
            }
        }
        (root, tables)
    }

    #[test]
    fn following_the_script_gives_sound_tables_anywhere() {
        let platform = Platform {
            cpus: crate::vcpu::Cpus::in_one_package(2),
            roots: Vec::new(),
            nodes: Vec::new(),
            ecam: 0xe000_0000,
        };
        let files = acpi_files(&tables(&platform)).expect("sound");
        let names: Vec<String> = follow(files).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["FACP", "APIC", "MCFG", "PPTT", "SPCR", "WAET", "FACS", "DSDT"]);
    }

    #[test]
    fn pointers_to_nowhere_are_refused() {
        let platform = Platform {
            cpus: crate::vcpu::Cpus::in_one_package(2),
            roots: Vec::new(),
            nodes: Vec::new(),
            ecam: 0xe000_0000,
        };
        let mut tables = tables(&platform);
        tables.retain(|table| !table.bytes.starts_with(b"DSDT"));
        assert!(acpi_files(&tables).is_err());
    }
}
