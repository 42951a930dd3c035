//! Configuration spaces as lspci reads them. A kernel gives the bytes; the program is Debian's, of whose
//! reading of the specification nobody here wrote a line, and runs here.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use anyhow::{Context, Result, bail};

use super::tools::Tool;

/// Bytes on a line of a dump.
const LINE: usize = 16;

/// What lspci says of a function: by capability (none for the header's registers) and field.
pub type Listing = BTreeMap<(String, String), String>;

/// Has `lspci -vvv` read configuration spaces, by address. Works in `folder`.
pub fn decode(
    folder: &Path,
    functions: &BTreeMap<String, Vec<u8>>,
) -> Result<BTreeMap<String, Listing>> {
    let dump = folder.join("lspci.txt");
    fs::write(&dump, text(functions)?)?;
    let output = Tool::lspci()?
        .command()?
        .args(["-D", "-n", "-vvv", "-F"])
        .arg(&dump)
        .output()
        .context("cannot start lspci")?;
    // It complains, and goes on, where this machine has no kernel modules that it could name.
    if !output.status.success() {
        bail!("lspci: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Writes what `lspci -xxxx` writes (lspci(8), "-F").
fn text(functions: &BTreeMap<String, Vec<u8>>) -> Result<String> {
    let mut all = String::new();
    for (address, config) in functions {
        writeln!(all, "{address} function")?;
        for (line, bytes) in config.chunks(LINE).enumerate() {
            write!(all, "{:02x}:", line * LINE)?;
            bytes.iter().try_for_each(|byte| write!(all, " {byte:02x}"))?;
            all.push('\n');
        }
        all.push('\n');
    }
    Ok(all)
}

fn parse(said: &str) -> Result<BTreeMap<String, Listing>> {
    let mut all = BTreeMap::<String, Listing>::new();
    let (mut address, mut capability, mut field) = (String::new(), String::new(), String::new());
    for line in said.lines().filter(|line| !line.is_empty()) {
        let text = line.trim_start_matches('\t');
        let depth = line.len() - text.len();
        let value = match (depth, text.split_once(':')) {
            (0, _) => {
                let (name, rest) = text.split_once(' ').context(line.to_owned())?;
                (address, capability, field) = (name.to_owned(), String::new(), String::new());
                rest
            }
            (1, Some(("Capabilities", rest))) => {
                // "[40] MSI-X: Enable+ …", "[100 v2] Advanced Error Reporting".
                let (_, rest) = rest.split_once("] ").context(line.to_owned())?;
                let name = rest.split([':', '(']).next().unwrap_or(rest).trim();
                (capability, field) = (name.to_owned(), String::new());
                rest
            }
            (1 | 2, Some((name, rest))) if !name.contains(' ') || depth == 1 => {
                field = name.to_owned();
                rest
            }
            _ => text,
        };
        let listing = all.entry(address.clone()).or_default();
        let told = listing.entry((capability.clone(), field.clone())).or_default();
        for word in value.split_whitespace() {
            if !told.is_empty() {
                told.push(' ');
            }
            told.push_str(word);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_told_apart_by_capability() {
        let said = "0000:01:00.0 0108: 1b36:0010 (rev 02)\n\tControl: I/O- Mem+\n\t\
                    Capabilities: [40] MSI-X: Enable+ Count=65\n\t\tPBA: BAR=0 offset=00003000\n\t\
                    Capabilities: [80] Express (v2) Endpoint, MSI 00\n\t\t\
                    DevCap:\tMaxPayload 128 bytes\n\t\t\tExtTag- RBE+\n\n\
                    0000:02:00.0 0200: 8086:10d3\n";
        let all = parse(said).expect("a listing");
        let field = |address: &str, capability: &str, field: &str| {
            all[address].get(&(capability.to_owned(), field.to_owned())).map(String::as_str)
        };
        assert_eq!(field("0000:01:00.0", "", ""), Some("0108: 1b36:0010 (rev 02)"));
        assert_eq!(field("0000:01:00.0", "", "Control"), Some("I/O- Mem+"));
        assert_eq!(field("0000:01:00.0", "MSI-X", ""), Some("MSI-X: Enable+ Count=65"));
        assert_eq!(field("0000:01:00.0", "MSI-X", "PBA"), Some("BAR=0 offset=00003000"));
        let capability = "MaxPayload 128 bytes ExtTag- RBE+";
        assert_eq!(field("0000:01:00.0", "Express", "DevCap"), Some(capability));
        assert_eq!(field("0000:02:00.0", "", ""), Some("0200: 8086:10d3"));
        assert_eq!(field("0000:02:00.0", "", "Control"), None);
    }

    #[test]
    fn a_dump_has_sixteen_bytes_on_a_line() {
        let config = (0u8..32).collect();
        let written =
            text(&BTreeMap::from([("0000:00:00.0".to_owned(), config)])).expect("written");
        let expected = "0000:00:00.0 function\n\
                        00: 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f\n\
                        10: 10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f\n\n";
        assert_eq!(written, expected);
    }
}
