//! A guest's SMBIOS tables as dmidecode reads them. The guest's kernel gives the bytes; the program is
//! Debian's, of whose reading of the specification nobody here wrote a line, and runs here.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use super::packages;

/// Where structures begin in a dump, behind the entry point (dmidecode(8), "BINARY DUMP FILE FORMAT").
const STRUCTURES: u8 = 0x20;
/// What dmidecode says of a field that the specification does not allow, and of tables that end early.
const COMPLAINTS: [&str; 5] = ["<OUT OF SPEC>", "<BAD INDEX>", "<TRUNCATED>", "Invalid", "Wrong"];

/// One structure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// Its type.
    pub kind: u8,
    /// What its fields say, by dmidecode's names. Lists are joined by commas.
    pub fields: BTreeMap<String, String>,
}

impl Structure {
    /// Returns what a field says; nothing if it is not there.
    pub fn says(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
    }
}

/// Reads the tables whose entry point and structures a kernel shows below `/sys/firmware/dmi/tables`.
/// Works in `folder`. Fails when dmidecode finds fault with anything.
pub fn decode(folder: &Path, entry_point: &[u8], structures: &[u8]) -> Result<Vec<Structure>> {
    let dump = folder.join("dmi.bin");
    fs::write(&dump, joined(entry_point, structures)?)?;
    let output = Command::new(packages::dmidecode()?)
        .arg("--from-dump")
        .arg(&dump)
        .output()
        .context("cannot start dmidecode")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let complains = COMPLAINTS.iter().any(|complaint| said.contains(complaint));
    if !output.status.success() || !output.stderr.is_empty() || complains {
        bail!("dmidecode: {}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    parse(&said)
}

/// Puts both into one file, and the address of the one into the other.
fn joined(entry_point: &[u8], structures: &[u8]) -> Result<Vec<u8>> {
    let mut dump = entry_point.to_vec();
    ensure!(dump.len() == 24 && dump.starts_with(b"_SM3_"), "no 64-bit entry point: {dump:x?}");
    let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    ensure!(sum(&dump) == 0, "the entry point's checksum is wrong: {dump:x?}");
    dump[16..].copy_from_slice(&u64::from(STRUCTURES).to_le_bytes());
    dump[5] = dump[5].wrapping_sub(sum(&dump));
    dump.resize(usize::from(STRUCTURES), 0);
    dump.extend(structures);
    Ok(dump)
}

fn parse(said: &str) -> Result<Vec<Structure>> {
    let mut found = Vec::new();
    for block in said.split("\n\n") {
        let mut lines = block.lines();
        let Some(kind) = lines.next().and_then(|line| line.split("DMI type ").nth(1)) else {
            continue;
        };
        let kind = kind.split(',').next().unwrap_or_default().parse()?;
        let (mut fields, mut last) = (BTreeMap::<String, String>::new(), String::new());
        for line in lines.skip(1) {
            if let Some(more) = line.strip_prefix("\t\t") {
                let value = fields.entry(last.clone()).or_default();
                let comma = if value.is_empty() { "" } else { ", " };
                value.push_str(&format!("{comma}{more}"));
            } else if let Some((name, value)) = line.trim().split_once(':') {
                last = name.to_owned();
                fields.insert(last.clone(), value.trim().to_owned());
            }
        }
        found.push(Structure { kind, fields });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_lists_are_read() {
        let said = "SMBIOS 3.6.0 present.\n\nHandle 0x0900, DMI type 9, 24 bytes\n\
                    System Slot Information\n\tID: 2\n\tCharacteristics:\n\t\tone\n\t\ttwo\n\
                    \tBus Address: 0000:83:00.0\n\nHandle 0x7F00, DMI type 127, 4 bytes\nEnd Of Table\n";
        let found = parse(said).expect("it is well-formed");
        assert_eq!(found.iter().map(|structure| structure.kind).collect::<Vec<_>>(), [9, 127]);
        let fields = ["ID", "Characteristics", "Bus Address", "Length"].map(|f| found[0].says(f));
        assert_eq!(fields, ["2", "one, two", "0000:83:00.0", ""]);
    }

    #[test]
    fn the_dump_says_where_its_structures_are_and_sums_to_zero() {
        let mut entry_point = *b"_SM3_\0\x18\x03\x06\0\x01\0\x04\0\0\0\0\xe0\x0f\0\0\0\0\0";
        let sum = entry_point.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        entry_point[5] = 0u8.wrapping_sub(sum);
        let dump = joined(&entry_point, b"abcd").expect("it is one");
        assert_eq!((&dump[16..24], &dump[32..]), (&[0x20, 0, 0, 0, 0, 0, 0, 0][..], &b"abcd"[..]));
        assert_eq!(dump[..24].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        entry_point[7] ^= 1;
        assert!(joined(&entry_point, b"").is_err());
    }
}
