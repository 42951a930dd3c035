//! Boot entries as firmware keeps them: the variables `Boot####` and `BootOrder`.
//!
//! Pure: bytes in, bytes out. Sources: UEFI Specification 2.10, §3.1.3 (load options), §3.3
//! (globally defined variables), §10.3.5.1 (hard drive) and §10.3.5.4 (file path).

use uuid::Uuid;

/// Vendor of the variables that the specification defines.
pub const GLOBAL: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";
/// Kept without power, and known to firmware as well as to the running system.
pub const ATTRIBUTES: u32 = 0x7;
/// The option may be tried.
const ACTIVE: u32 = 1;
/// Longest option that is read, in bytes.
const LIMIT: usize = 4096;

/// Where a program lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Number of its partition, from 1.
    pub number: u32,
    /// First block of the partition.
    pub first: u64,
    /// Its length in blocks.
    pub blocks: u64,
    /// Its identity.
    pub partition: Uuid,
    /// Path of the program in it, with slashes.
    pub path: &'static str,
}

/// Writes a load option that starts the program at `place`.
pub fn load_option(description: &str, place: &Place) -> Vec<u8> {
    let mut drive = vec![0x04, 0x01, 42, 0];
    drive.extend(place.number.to_le_bytes());
    drive.extend(place.first.to_le_bytes());
    drive.extend(place.blocks.to_le_bytes());
    drive.extend(place.partition.to_bytes_le());
    // The table is a GPT, and the signature a GUID.
    drive.extend([2, 2]);
    let path = utf16(&format!("/{}", place.path).replace('/', "\\"));
    let length = u16::try_from(path.len() + 4).unwrap_or(u16::MAX);
    let mut file = vec![0x04, 0x04];
    file.extend(length.to_le_bytes());
    file.extend(path);
    let nodes = [drive, file, vec![0x7f, 0xff, 4, 0]].concat();
    let mut option = ACTIVE.to_le_bytes().to_vec();
    option.extend(u16::try_from(nodes.len()).unwrap_or(u16::MAX).to_le_bytes());
    option.extend(utf16(description));
    option.extend(nodes);
    option
}

/// Returns what a load option is called; `None` when the bytes are none.
pub fn description(option: &[u8]) -> Option<String> {
    let text = option.get(6..option.len().min(LIMIT))?;
    let units: Vec<u16> = text
        .chunks_exact(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
        .take_while(|unit| *unit != 0)
        .collect();
    String::from_utf16(&units).ok()
}

/// What a load option starts: a file on a partition of a GPT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Whether the option may be tried.
    pub active: bool,
    /// Identity of the partition.
    pub partition: Uuid,
    /// Path of the program, as it is written there: mostly with backslashes.
    pub path: String,
}

/// Returns what a load option starts. Firmware may write the way to the disk before the partition, and data of
/// its own behind everything; `None` when the bytes are no option, or one that starts something else.
pub fn target(option: &[u8]) -> Option<Target> {
    let option = &option[..option.len().min(LIMIT)];
    let active = u32::from_le_bytes(*option.first_chunk()?) & ACTIVE != 0;
    let length = usize::from(u16::from_le_bytes(option.get(4..6)?.try_into().ok()?));
    let end = option.get(6..)?.chunks_exact(2).position(|pair| pair == [0, 0])?;
    let begin = 6 + 2 * (end + 1);
    let mut nodes = option.get(begin..begin.checked_add(length)?)?;
    let (mut partition, mut path) = (None, String::new());
    while let Some(([kind, sort, low, high], _)) = nodes.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (node, rest) = nodes.split_at_checked(length).filter(|(node, _)| node.len() >= 4)?;
        match (*kind, *sort) {
            // A partition; the last two bytes say that its table is a GPT and its signature a GUID.
            (0x04, 0x01) if node.len() == 42 && node[40..] == [2, 2] => {
                partition = Some(Uuid::from_bytes_le(*node.get(24..)?.first_chunk()?));
            }
            (0x04, 0x04) => {
                // A path may come in pieces.
                let units = node[4..].chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]]));
                let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
                path.push_str(&String::from_utf16(&units).ok()?);
            }
            (0x7f, _) => break,
            _ => {}
        }
        nodes = rest;
    }
    partition.map(|partition| Target { active, partition, path })
}

/// Reads `BootOrder`: numbers of options, the first one first.
pub fn order(bytes: &[u8]) -> Vec<u16> {
    let pairs = bytes.chunks_exact(2).take(LIMIT);
    pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// Writes `BootOrder` with `first` before all others, each of which stays once, where it was.
pub fn order_with(first: u16, old: &[u16]) -> Vec<u8> {
    let mut new = vec![first];
    for &number in old {
        if !new.contains(&number) {
            new.push(number);
        }
    }
    new.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Returns the lowest number that no option of `taken` has.
pub fn free_number(taken: &[u16]) -> Option<u16> {
    (0..=u16::MAX).find(|number| !taken.contains(number))
}

/// Returns the number of an option's variable, as in `Boot0007`; `None` for other names.
pub fn option_number(name: &str) -> Option<u16> {
    let digits = name.strip_prefix("Boot").filter(|digits| digits.len() == 4)?;
    u16::from_str_radix(digits, 16).ok()
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_option_is_laid_out_as_specified() {
        let place = Place {
            number: 1,
            first: 2048,
            blocks: 0x10_0000,
            partition: Uuid::from_u128(0x00112233_4455_6677_8899_aabbccddeeff),
            path: "EFI/A.EFI",
        };
        let option = load_option("Hf", &place);
        let wanted = [
            &[1, 0, 0, 0, 72, 0, b'H', 0, b'f', 0, 0, 0][..],
            &[4, 1, 42, 0, 1, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0],
            &[0x33, 0x22, 0x11, 0, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd],
            &[0xee, 0xff, 2, 2, 4, 4, 26, 0],
            &[b'\\', 0, b'E', 0, b'F', 0, b'I', 0, b'\\', 0, b'A', 0, b'.', 0, b'E', 0],
            &[b'F', 0, b'I', 0, 0, 0],
            &[0x7f, 0xff, 4, 0],
        ]
        .concat();
        assert_eq!(option, wanted);
        assert_eq!(description(&option).as_deref(), Some("Hf"));
    }

    #[test]
    fn a_target_is_found_however_firmware_writes_it() {
        let partition = Uuid::from_u128(7);
        let place = Place { number: 1, first: 2048, blocks: 9, partition, path: "EFI/A.EFI" };
        let option = load_option("Hf", &place);
        let wanted = Target { active: true, partition, path: "\\EFI\\A.EFI".to_owned() };
        assert_eq!(target(&option), Some(wanted.clone()));
        // The way to the disk before it, other attributes, data behind it.
        let mut long = option.clone();
        long[..4].copy_from_slice(&0x0102_u32.to_le_bytes());
        long.splice(12..12, [1, 1, 6, 0, 0, 4]);
        long[4] += 6;
        long.extend(b"firmware's");
        assert_eq!(target(&long), Some(Target { active: false, ..wanted }));
        // A disk without a GPT, a cut option, none.
        let mut other = option.clone();
        other[12 + 40] = 1;
        assert_eq!(target(&other), None);
        assert_eq!(
            (target(&option[..option.len() - 1]), target(&[]), target(&[0; 9])),
            (None, None, None)
        );
    }

    proptest::proptest! {
        #[test]
        fn rubbish_makes_nothing_panic(at in 0_usize..90, byte in 0_u8..=255, cut in 0_usize..120) {
            let partition = Uuid::from_u128(7);
            let place = Place { number: 1, first: 2048, blocks: 9, partition, path: "EFI/A.EFI" };
            let mut option = load_option("Hf", &place);
            let at = at % option.len();
            option[at] = byte;
            option.truncate(cut);
            let _ = (target(&option), description(&option));
        }
    }

    #[test]
    fn ours_comes_first_and_nothing_is_lost() {
        let old = order(&[3, 0, 1, 0, 7, 0, 1, 0]);
        assert_eq!(order(&order_with(7, &old)), [7, 3, 1]);
        assert_eq!(free_number(&[0, 1, 3]), Some(2));
        assert_eq!(option_number("Boot00ff"), Some(0xff));
        assert_eq!(option_number("BootOrder"), None);
    }

    #[test]
    fn what_is_no_option_has_no_description() {
        assert_eq!(description(&[1, 2, 3]), None);
        assert_eq!(description(&[0, 0, 0, 0, 0, 0, 0, 0xd8]), None);
    }
}
