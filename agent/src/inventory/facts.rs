//! What PCI and sysfs tell of a device that no driver of the host holds: its link, BARs, power,
//! errors, ways to reset it, and its vital product data. Reads and changes nothing.
//! Source: Documentation/ABI/testing/sysfs-bus-pci and sysfs-bus-pci-devices-aer_stats; PCI Local
//! Bus Specification 3.0 appendix I (vital product data).

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use types::{
    node::Bdf,
    status::{DeviceFacts, LinkErrors},
};

/// BARs of a function.
const BARS: usize = 6;

/// Most of the vital product data that is read, in bytes: its address has 15 bits.
const MAX_VPD: u64 = 32 << 10;

/// Longest word of it that is shown, in bytes.
const MAX_WORD: usize = 64;

/// Most ways to reset a device that are shown.
const MAX_METHODS: usize = 8;

/// Reads what is known of a device below `root`, except for its vital product data, which
/// [`vital`] reads: that takes long, and the device must be nobody's then.
pub fn read(root: &Path, device: Bdf) -> DeviceFacts {
    let path = folder(root, device);
    DeviceFacts {
        driver: super::link_name(&path.join("driver")),
        link_mts: speed(&path.join("current_link_speed")),
        link_mts_max: speed(&path.join("max_link_speed")),
        link_width: lanes(&path.join("current_link_width")),
        link_width_max: lanes(&path.join("max_link_width")),
        bars: bars(&super::text(&path.join("resource")).unwrap_or_default()),
        power_state: super::text(&path.join("power_state")),
        reset_methods: super::text(&path.join("reset_method"))
            .map(|text| text.split_whitespace().take(MAX_METHODS).map(str::to_owned).collect())
            .unwrap_or_default(),
        link_errors: link_errors(&path),
        serial: None,
        product: None,
    }
}

fn folder(root: &Path, device: Bdf) -> PathBuf {
    root.join("sys/bus/pci/devices").join(device.to_string())
}

/// Reads a link's speed, `8.0 GT/s PCIe`, in MT/s.
fn speed(path: &Path) -> Option<u32> {
    let text = super::text(path)?;
    let (whole, part) = text.split(' ').next()?.split_once('.')?;
    let (whole, part): (u32, u32) = (whole.parse().ok()?, part.get(..1)?.parse().ok()?);
    whole.checked_mul(1000)?.checked_add(part * 100)
}

/// Reads a link's width. The kernel says 255 where there is no link, and 0 where it is down.
fn lanes(path: &Path) -> Option<u32> {
    super::text(path)?.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

/// Returns sizes of BARs from lines of `0xSTART 0xEND 0xFLAGS`.
fn bars(text: &str) -> Vec<u64> {
    let size = |line: &str| {
        let mut numbers = line
            .split(' ')
            .map(|word| u64::from_str_radix(word.strip_prefix("0x").unwrap_or(word), 16).ok());
        let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
        if flags == 0 { None } else { end.checked_sub(start)?.checked_add(1) }
    };
    text.lines().take(BARS).map(|line| size(line).unwrap_or(0)).collect()
}

fn link_errors(path: &Path) -> Option<LinkErrors> {
    let total = |file: &str, name: &str| {
        let text = super::text(&path.join(file))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|count| count.trim().parse().ok())
    };
    Some(LinkErrors {
        correctable: total("aer_dev_correctable", "TOTAL_ERR_COR")?,
        nonfatal: total("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL")?,
        fatal: total("aer_dev_fatal", "TOTAL_ERR_FATAL")?,
    })
}

/// Reads product and serial number. A device in a deep sleep answers nothing, which is no error.
pub fn vital(root: &Path, device: Bdf) -> (Option<String>, Option<String>) {
    let mut bytes = Vec::new();
    // What came before an error is as good as it was.
    let _ = read_vital(root, device, &mut bytes);
    words(&bytes)
}

/// Reads vital product data, which are empty where there are none, and tells whether these are all.
pub(super) fn vital_data(root: &Path, device: Bdf) -> (Vec<u8>, io::Result<()>) {
    let mut bytes = Vec::new();
    let read = match read_vital(root, device, &mut bytes) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        read => read,
    };
    (bytes, read)
}

fn read_vital(root: &Path, device: Bdf, bytes: &mut Vec<u8>) -> io::Result<()> {
    let file = File::open(folder(root, device).join("vpd"))?;
    file.take(MAX_VPD).read_to_end(bytes).map(drop)
}

/// Finds product (identifier string) and serial number (keyword `SN`) in vital product data.
pub fn words(bytes: &[u8]) -> (Option<String>, Option<String>) {
    /// Tags of large resources, and of the small one that ends them.
    const IDENTIFIER: u8 = 0x82;
    const READ_ONLY: u8 = 0x90;
    let (mut product, mut serial) = (None, None);
    let mut rest = bytes;
    while let [tag, low, high, after @ ..] = rest {
        if tag & 0x80 == 0 {
            break;
        }
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let Some((body, next)) = after.split_at_checked(length) else { break };
        match *tag {
            IDENTIFIER if product.is_none() => product = word(body),
            READ_ONLY if serial.is_none() => serial = keyword(body, *b"SN"),
            _ => {}
        }
        rest = next;
    }
    (product, serial)
}

fn keyword(mut body: &[u8], wanted: [u8; 2]) -> Option<String> {
    while let [first, second, length, after @ ..] = body {
        let (value, next) = after.split_at_checked(usize::from(*length))?;
        if [*first, *second] == wanted {
            return word(value);
        }
        body = next;
    }
    None
}

/// Returns printable ASCII only: a device writes what it likes.
fn word(bytes: &[u8]) -> Option<String> {
    let printable = bytes.iter().filter(|byte| (0x20..0x7f).contains(*byte)).take(MAX_WORD);
    let text: String = printable.map(|byte| char::from(*byte)).collect();
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Vital product data with an identifier, a part number and a serial number.
    fn vpd() -> Vec<u8> {
        let mut bytes = vec![0x82, 6, 0];
        bytes.extend(b"H200\x1b ");
        let body = b"PN\x03900SN\x071234567";
        bytes.extend([0x90, u8::try_from(body.len()).expect("short"), 0]);
        bytes.extend(body);
        bytes.push(0x78);
        bytes
    }

    #[test]
    fn a_device_without_a_driver_is_described() {
        let root = tempfile::tempdir().expect("a directory");
        let device: Bdf = "0000:02:00.0".parse().expect("an address");
        let path = root.path().join("sys/bus/pci/devices/0000:02:00.0");
        fs::create_dir_all(&path).expect("made");
        let resource = "0x00000000e0000000 0x00000000e0ffffff 0x0000000000040200\n\
                        0x0000002000000000 0x0000003fffffffff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        for (file, text) in [
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
            ("max_link_width", "255\n"),
            ("resource", resource),
            ("power_state", "D0\n"),
            ("reset_method", "flr bus\n"),
            ("aer_dev_correctable", "RxErr 1\nTOTAL_ERR_COR 3\n"),
            ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 0\n"),
            ("aer_dev_fatal", "TOTAL_ERR_FATAL 1\n"),
        ] {
            fs::write(path.join(file), text).expect("written");
        }
        fs::write(path.join("vpd"), vpd()).expect("written");
        let facts = read(root.path(), device);
        assert_eq!((facts.link_mts, facts.link_mts_max), (Some(2500), Some(32_000)));
        assert_eq!((facts.link_width, facts.link_width_max), (Some(16), None));
        assert_eq!(facts.bars, [16 << 20, 128 << 30, 0]);
        assert_eq!(facts.reset_methods, ["flr", "bus"]);
        let errors = LinkErrors { correctable: 3, nonfatal: 0, fatal: 1 };
        assert_eq!(facts.link_errors, Some(errors));
        let (product, serial) = vital(root.path(), device);
        assert_eq!((product.as_deref(), serial.as_deref()), (Some("H200"), Some("1234567")));
        assert_eq!(read(root.path(), "0000:03:00.0".parse().expect("one")), DeviceFacts::default());
    }

    #[test]
    fn damaged_product_data_is_survived() {
        let whole = vpd();
        for length in 0..whole.len() {
            let _ = words(&whole[..length]);
        }
        assert_eq!(words(&[0x82, 0xff, 0xff, b'x']), (None, None));
        assert_eq!(words(&[0xff; 64]), (None, None));
        assert_eq!(words(&whole[..9]), (Some("H200".to_owned()), None));
    }
}
