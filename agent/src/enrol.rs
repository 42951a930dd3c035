//! Gives the operator's keys to a firmware that is in its setup mode.
//!
//! The keys travel as signed updates beside the boot program on the medium. They are written only when
//! they would accept the very program that runs: a server that refuses its own medium after the next
//! start is worth less than one without Secure Boot. So is one that no longer sees the drives behind its
//! cards: where firmware's log tells of drivers of cards (option ROMs), `db` must trust somebody who may have signed
//! them. Sources: UEFI Specification 2.10 §32.3 (modes and
//! variables); the kernel's Documentation/filesystems/efivarfs.rst.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use lease::attestation::{Driver, MAX_LOG, drivers};
use types::{node::Bdf, secure_boot::OptionRoms, status::Trust};
use update::secure_boot::{self, Variable};

use crate::{attest, efivars, install::source, local};

/// Why firmware did not get the keys.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum EnrolError {
    #[error("this firmware has no Secure Boot, or the node was not started by it")]
    NoSecureBoot,
    #[error(
        "the firmware has keys already, and Secure Boot is off; switch it on in the firmware's setup, or clear its keys there to enrol ours"
    )]
    HasKeys,
    #[error(
        "no disk, stick or CD of this server holds the running release; attach the medium that the node was started from; what Ventoy starts is a file on its stick, which is not found: write the image itself to a stick"
    )]
    NoMedium,
    #[error(
        "{medium} carries no {path}; build the image with --secure-boot-key and --secure-boot-cert"
    )]
    NoUpdate { medium: String, path: String },
    #[error(
        "only the installed disk {disk} holds the running release, and an installed disk has no keys beside it; attach the medium with the keys, and start the server from it"
    )]
    OnlyInstalled { disk: String },
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error("the firmware still has {0}; clear its keys in the firmware's setup")]
    Leftover(&'static str),
    #[error("the firmware refused {variable}")]
    Refused { variable: &'static str, source: io::Error },
    #[error("cannot make the firmware's variables writable")]
    Variables { source: io::Error },
}

/// Why keys are not enrolled, though there are some.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum KeysError {
    #[error("{path} on {medium} is no update of firmware's keys")]
    BadUpdate { medium: String, path: String },
    #[error(
        "the keys on {medium} would refuse the release that runs from it: it is signed by none of them; keys and boot program must come from one build"
    )]
    WouldRefuse { medium: String },
    #[error(
        "the keys on {medium} would refuse the option ROMs of {devices}, and the firmware would not see the drives and networks behind them any more; build or customise the image with --db-cert and the certificate of who signed them (mostly Microsoft's UEFI CA), or say option_roms = \"lose\" in [secure_boot] if the server does not start from there"
    )]
    OptionRoms { medium: String, devices: String },
}

/// Keys that were enrolled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolled {
    /// The device they came from.
    pub from: String,
    /// What could not be checked before.
    pub unknown: Option<String>,
}

/// What there is to do, by what firmware says of itself.
#[derive(Debug, PartialEq, Eq)]
enum Mode {
    /// Secure Boot is on; whoever did that had keys.
    Done,
    /// Keys can be written.
    Open,
}

fn mode(trust: &Trust) -> Result<Mode, EnrolError> {
    match (trust.setup_mode, trust.secure_boot) {
        (Some(true), _) => Ok(Mode::Open),
        (_, Some(true)) => Ok(Mode::Done),
        (Some(false), _) => Err(EnrolError::HasKeys),
        (None, _) => Err(EnrolError::NoSecureBoot),
    }
}

/// Enrols the keys of the medium that the node runs from. Returns what they came from; `None` when
/// Secure Boot is on already. Blocks: it reads disks.
pub fn enrol(root: &Path, roms: OptionRoms) -> Result<Option<Enrolled>, EnrolError> {
    if mode(&local::host::trust(root))? == Mode::Done {
        return Ok(None);
    }
    let release = fs::read_to_string(root.join("etc/os-release")).unwrap_or_default();
    let (name, program, updates) = medium(root, source::media(root, &release))?;
    accepts(&name, &updates, &program)?;
    let unknown = match roms {
        OptionRoms::Keep => keeps_option_roms(root, &name, &updates)?,
        OptionRoms::Lose => None,
    };
    let folder = Path::new(efivars::FOLDER);
    let written = efivars::writable(folder, || write(folder, &updates));
    written.map_err(|source| EnrolError::Variables { source })??;
    Ok(Some(Enrolled { from: name, unknown }))
}

/// Returns the first device that has an update of each variable beside the running release: its name, the
/// release, and the updates. Where none has, what is wrong with the first one that can be taken away.
fn medium(
    root: &Path,
    media: impl Iterator<Item = (String, Vec<u8>)>,
) -> Result<(String, Vec<u8>, Updates), EnrolError> {
    let mut missing = None;
    for (name, program) in media {
        match updates(root, &name) {
            Ok(updates) => return Ok((name, program, updates)),
            Err(_) if source::is_installed(root, &name) => {
                missing.get_or_insert(EnrolError::OnlyInstalled { disk: name });
            }
            Err(error) if matches!(missing, None | Some(EnrolError::OnlyInstalled { .. })) => {
                missing = Some(error);
            }
            Err(_) => {}
        }
    }
    Err(missing.unwrap_or(EnrolError::NoMedium))
}

/// An update of each variable, in the order of [`Variable::ALL`].
struct Updates([Vec<u8>; 3]);

fn updates(root: &Path, name: &str) -> Result<Updates, EnrolError> {
    let medium = root.join("dev").join(name).display().to_string();
    let read = |variable: Variable| {
        let path = variable.path();
        source::beside(root, name, &path, secure_boot::LIMIT)
            .ok_or(EnrolError::NoUpdate { medium: medium.clone(), path })
    };
    let [first, second, third] = Variable::ALL.map(read);
    Ok(Updates([first?, second?, third?]))
}

/// Checks that a firmware with these keys starts the program.
fn accepts(medium: &str, updates: &Updates, program: &[u8]) -> Result<(), KeysError> {
    let parsed = Variable::ALL.iter().zip(&updates.0).map(|(variable, update)| {
        let bad = || KeysError::BadUpdate { medium: medium.to_owned(), path: variable.path() };
        secure_boot::certificates(update).filter(|found| !found.is_empty()).ok_or_else(bad)
    });
    let parsed = parsed.collect::<Result<Vec<_>, _>>()?;
    let signatures = secure_boot::signatures_of(program).unwrap_or_default();
    let signed_by = |certificate: &[u8]| {
        signatures.windows(certificate.len().max(1)).any(|window| window == certificate)
    };
    let accepted = parsed.first().is_some_and(|db| db.iter().any(|one| signed_by(one)));
    if accepted { Ok(()) } else { Err(KeysError::WouldRefuse { medium: medium.to_owned() }) }
}

/// Checks that a firmware with these keys trusts somebody besides the image's builder, when it has loaded
/// drivers from cards. Returns what is not known where its log cannot be read.
fn keeps_option_roms(
    root: &Path,
    medium: &str,
    updates: &Updates,
) -> Result<Option<String>, KeysError> {
    let [db, ..] = &updates.0;
    if secure_boot::certificates(db).is_some_and(|trusted| trusted.len() > 1) {
        return Ok(None);
    }
    let unknown = |why: String| {
        Some(format!(
            "whether add-in cards have option ROMs, which the enrolled keys refuse, is not known: {why}"
        ))
    };
    let mut log = Vec::new();
    let file = fs::File::open(root.join(attest::LOG));
    if let Err(error) = file.and_then(|file| file.take(MAX_LOG as u64 + 1).read_to_end(&mut log)) {
        return Ok(unknown(format!("the firmware's log of what it measured: {error}")));
    }
    let drivers = match drivers(&log) {
        Ok(drivers) => drivers,
        Err(error) => return Ok(unknown(format!("the firmware's log cannot be read: {error}"))),
    };
    let mut devices: Vec<String> = drivers.iter().map(|driver| device(root, driver)).collect();
    devices.sort();
    devices.dedup();
    if devices.is_empty() {
        return Ok(None);
    }
    let (medium, devices) = (medium.to_owned(), devices.join(", "));
    Err(KeysError::OptionRoms { medium, devices })
}

/// Returns the PCI address of where a driver came from, or what the log says of it.
fn device(root: &Path, driver: &Driver) -> String {
    if let Some(address) = address(root, driver) {
        return address;
    }
    match driver.path.as_str() {
        "" => "a device that the firmware's log does not name".to_owned(),
        path => path.to_owned(),
    }
}

/// Follows a path down the kernel's tree of PCI devices, from the root whose ACPI UID it names.
fn address(root: &Path, driver: &Driver) -> Option<String> {
    let wanted = driver.root?;
    let roots = fs::read_dir(root.join("sys/devices")).ok()?.filter_map(Result::ok);
    let is_it = |folder: &PathBuf| {
        let name = folder.file_name().and_then(|name| name.to_str());
        let uid = fs::read_to_string(folder.join("firmware_node/uid"));
        name.is_some_and(|name| name.starts_with("pci"))
            && uid.is_ok_and(|uid| uid.trim().parse() == Ok(wanted))
    };
    let mut at = roots.map(|entry| entry.path()).find(is_it)?;
    let mut found = None;
    for (device, function) in &driver.hops {
        let end = format!(":{device:02x}.{function:x}");
        let mut below = fs::read_dir(&at).ok()?.filter_map(Result::ok);
        let name = below.find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            (name.parse::<Bdf>().is_ok() && name.ends_with(&end)).then_some(name)
        })?;
        at = at.join(&name);
        found = Some(name);
    }
    found
}

/// Writes the variables below `folder`, the one that closes the door last.
fn write(folder: &Path, updates: &Updates) -> Result<(), EnrolError> {
    let file = |variable: Variable| -> PathBuf {
        folder.join(format!("{}-{}", variable.name(), variable.vendor()))
    };
    if let Some(there) = Variable::ALL.into_iter().find(|variable| file(*variable).exists()) {
        return Err(EnrolError::Leftover(there.name()));
    }
    for (variable, update) in Variable::ALL.into_iter().zip(&updates.0) {
        // The kernel wants attributes and content in one piece.
        let bytes = [&secure_boot::ATTRIBUTES.to_le_bytes()[..], update].concat();
        fs::write(file(variable), bytes)
            .map_err(|source| EnrolError::Refused { variable: variable.name(), source })?;
    }
    Ok(())
}

/// Says how far firmware and kernel are locked, as [`crate::events::Event::Trust`] has it.
pub fn secure_boot_word(trust: &Trust) -> &'static str {
    match (trust.secure_boot, trust.setup_mode) {
        (Some(true), _) => "on",
        (_, Some(true)) => "setup",
        (Some(false), _) => "off",
        (None, _) => "unknown",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use update::disk::{
        Slice, esp,
        gpt::BlockSize,
        layout::{self, Identities},
    };

    use super::*;

    fn trust(setup_mode: Option<bool>, secure_boot: Option<bool>) -> Trust {
        Trust { setup_mode, secure_boot, ..Trust::default() }
    }

    fn updates(db: &[u8]) -> Updates {
        let update = |certificate: &[u8]| {
            let content = secure_boot::list(certificate);
            secure_boot::update(&secure_boot::time(2026, [1; 5]), b"signature", &content)
        };
        Updates([update(db), update(b"owner"), update(b"owner")])
    }

    /// A program whose certificate table holds these bytes.
    fn program(table: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 0x200];
        bytes[0x3c] = 0x80;
        bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
        let entry = 0x80 + 24 + 112 + 4 * 8;
        bytes[entry..entry + 4].copy_from_slice(&0x200_u32.to_le_bytes());
        bytes[entry + 4] = u8::try_from(table.len()).unwrap();
        bytes.extend(table);
        bytes
    }

    #[test]
    fn keys_are_for_setup_mode_only() {
        assert_eq!(mode(&trust(Some(true), Some(false))).unwrap(), Mode::Open);
        assert_eq!(mode(&trust(Some(false), Some(true))).unwrap(), Mode::Done);
        let refused = |setup, secure| mode(&trust(setup, secure)).unwrap_err();
        assert!(matches!(refused(Some(false), Some(false)), EnrolError::HasKeys));
        assert!(matches!(refused(None, None), EnrolError::NoSecureBoot));
        let words =
            [(Some(false), Some(true)), (Some(true), Some(false)), (Some(false), Some(false))];
        let said = words.map(|(setup, secure)| secure_boot_word(&trust(setup, secure)));
        assert_eq!(said, ["on", "setup", "off"]);
    }

    #[test]
    fn keys_that_would_refuse_the_running_program_are_refused() {
        let signed = program(b"xx our certificate xx");
        accepts("sr0", &updates(b"our certificate"), &signed).unwrap();
        let refused =
            |updates: &Updates, program: &[u8]| accepts("sr0", updates, program).unwrap_err();
        let other = refused(&updates(b"another certificate"), &signed);
        assert!(matches!(other, KeysError::WouldRefuse { .. }));
        let unsigned = refused(&updates(b"our certificate"), &program(b""));
        assert!(matches!(unsigned, KeysError::WouldRefuse { .. }));
        let mut broken = updates(b"our certificate");
        broken.0[1].pop();
        let refusal = refused(&broken, &signed);
        assert!(refusal.to_string().contains("loader/keys/auto/KEK.auth"), "{refusal}");
    }

    /// A firmware's log with these drivers of cards, by device and function below the root with UID 0.
    fn log(drivers: &[(u8, u8)]) -> Vec<u8> {
        let banks = [&1_u32.to_le_bytes()[..], &[0x0b, 0, 32, 0, 0]].concat();
        let head = [&b"Spec ID Event03\0"[..], &[0, 0, 0, 0, 0, 2, 0, 2], &banks].concat();
        let begin = [&[0, 0, 0, 0, 3, 0, 0, 0][..], &[0; 20]].concat();
        let mut log = [&begin[..], &33_u32.to_le_bytes(), &head].concat();
        for (device, function) in drivers {
            let acpi = [2, 1, 12, 0, 0xd0, 0x41, 0x03, 0x0a, 0, 0, 0, 0];
            let pci = [1, 1, 6, 0, *function, *device];
            let path = [&acpi[..], &pci, &[1, 1, 6, 0, 0, 0], &[0x7f, 0xff, 4, 0]].concat();
            let data = [&[0; 32][..], &path].concat();
            log.extend([2_u32, 0x8000_0004, 1].map(u32::to_le_bytes).concat());
            log.extend([&[0x0b, 0][..], &[9; 32]].concat());
            log.extend(u32::try_from(data.len()).unwrap().to_le_bytes());
            log.extend(data);
        }
        log
    }

    #[test]
    fn keys_that_would_take_the_drivers_of_cards_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let judge = |updates: &Updates| keeps_option_roms(root, "sdb", updates);
        let ours = updates(b"ours");
        // Nothing is known: as before, and it is said.
        let said = judge(&ours).unwrap().unwrap();
        assert!(said.contains("option ROMs") && said.contains("not known"), "{said}");
        let path = root.join(attest::LOG);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"rubbish").unwrap();
        assert!(judge(&ours).unwrap().unwrap().contains("cannot be read"));
        fs::write(&path, log(&[])).unwrap();
        assert_eq!(judge(&ours).unwrap(), None);

        fs::write(&path, log(&[(1, 0), (0x1d, 4), (1, 0)])).unwrap();
        let card = root.join("sys/devices/pci0000:00/0000:00:01.0/0000:0a:00.0");
        fs::create_dir_all(&card).unwrap();
        let node = root.join("sys/devices/pci0000:00/firmware_node");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("uid"), "0\n").unwrap();
        let refusal = judge(&ours).unwrap_err().to_string();
        let devices = "option ROMs of 0000:0a:00.0, PciRoot(0x0)/Pci(0x1d,0x4)/Pci(0x0,0x0), and";
        assert!(refusal.contains(devices), "{refusal}");
        assert!(refusal.contains("--db-cert") && refusal.contains("option_roms"), "{refusal}");

        let both = [secure_boot::list(b"ours"), secure_boot::list(b"theirs")].concat();
        let time = secure_boot::time(2026, [1; 5]);
        let mut trusting = updates(b"ours");
        trusting.0[0] = secure_boot::update(&time, b"signature", &both);
        assert_eq!(judge(&trusting).unwrap(), None);
    }

    #[test]
    fn the_platform_key_is_written_last_and_nothing_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let updates = updates(b"db");
        write(folder.path(), &updates).unwrap();
        let name = format!("PK-{}", update::efi::GLOBAL);
        let written = fs::read(folder.path().join(&name)).unwrap();
        assert_eq!(written[..4], [0x27, 0, 0, 0]);
        assert_eq!(written[4..], updates.0[2]);
        let again = write(folder.path(), &updates).unwrap_err();
        assert!(matches!(again, EnrolError::Leftover("db")), "{again}");
        let nowhere = write(&folder.path().join("none"), &updates).unwrap_err();
        assert!(matches!(nowhere, EnrolError::Refused { variable: "db", .. }), "{nowhere}");
    }

    /// Makes a device below `root`, with these files of the keys beside its release.
    fn device(root: &Path, name: &str, keys: &[Variable]) {
        fs::create_dir_all(root.join("dev")).unwrap();
        let disk = fs::File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(root.join("dev").join(name))
            .unwrap();
        let table = layout::smallest(Identities::random(), BlockSize::B512).unwrap();
        disk.set_len(table.bytes).unwrap();
        let (start, partition) = &table.placed[0];
        let volume = || Slice::new(&disk, *start, partition.bytes);
        esp::write(volume(), BlockSize::B512, b"release", &[esp::FALLBACK]).unwrap();
        for variable in keys {
            esp::put(volume(), &variable.path(), name.as_bytes()).unwrap();
        }
        for (offset, bytes) in table.writes() {
            std::os::unix::fs::FileExt::write_all_at(&disk, &bytes, offset).unwrap();
        }
    }

    #[test]
    fn keys_come_from_the_medium_that_has_all_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        device(root, "sda", &[]);
        device(root, "sdb", &Variable::ALL[..1]);
        device(root, "sdc", &Variable::ALL);
        // The first of them is an installed disk.
        let part = root.join("sys/class/block/sda/sda2");
        fs::create_dir_all(&part).unwrap();
        fs::write(part.join("uevent"), format!("PARTNAME={}\n", layout::STATE)).unwrap();
        let found = |names: &[&str]| {
            let media: Vec<_> = names.iter().map(|name| ((*name).to_owned(), vec![1])).collect();
            medium(root, media.into_iter()).map(|(name, _, updates)| (name, updates.0))
        };
        let (name, updates) = found(&["sda", "sdb", "sdc"]).unwrap();
        assert_eq!(name, "sdc");
        assert_eq!(updates, [b"sdc", b"sdc", b"sdc"].map(|bytes| bytes.to_vec()));
        let refused = |names: &[&str]| found(names).unwrap_err();
        assert!(matches!(refused(&["sda"]), EnrolError::OnlyInstalled { disk } if disk == "sda"));
        let incomplete = refused(&["sda", "sdb"]);
        assert!(incomplete.to_string().contains("sdb carries no"), "{incomplete}");
        assert!(matches!(refused(&[]), EnrolError::NoMedium));
    }
}
