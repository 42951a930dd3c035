//! What the kernel tells of the server: memory, load, file systems, watchdogs, how far it can be
//! trusted, and devices without a driver. Reads and changes nothing.
//!
//! Every function takes the root under which `sys` and `proc` are, so tests use directories.

use std::{fs, path::Path};

use types::{
    status::{Traffic, Trust, VolumeView, WatchdogView},
    volumes::{Bound, Protection, Starts},
};

use crate::seal::unlock;

/// File systems that keep something of the node's.
const VOLUMES: [&str; 2] = ["/state", "/data"];

/// Variables of the firmware (UEFI 2.10 §3.3).
const GLOBAL: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What could be had without swapping.
    pub available: u64,
    /// What is set aside as huge pages.
    pub huge: u64,
    /// What of it is free.
    pub huge_free: u64,
}

/// Reads memory.
pub fn memory(root: &Path) -> Memory {
    let text = text(root, "proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        number.unwrap_or(0).saturating_mul(1024)
    };
    let (huge, huge_free) = huge_pages(root);
    Memory { total: kib("MemTotal:"), available: kib("MemAvailable:"), huge, huge_free }
}

/// Returns memory set aside as huge pages of any size, and what of it is free.
fn huge_pages(root: &Path) -> (u64, u64) {
    let folder = root.join("sys/kernel/mm/hugepages");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.fold((0, 0), |(all, free), entry| {
        let name = entry.file_name();
        let size = name.to_str().and_then(|name| {
            name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()
        });
        let bytes = size.unwrap_or(0).saturating_mul(1024);
        let count = |file: &str| number(&entry.path(), file).unwrap_or(0).saturating_mul(bytes);
        (all + count("nr_hugepages"), free + count("free_hugepages"))
    })
}

/// Reads the load average over a minute, in thousandths.
pub fn load_milli(root: &Path) -> u64 {
    let text = text(root, "proc/loadavg").unwrap_or_default();
    let (whole, part) =
        text.split(' ').next().and_then(|load| load.split_once('.')).unwrap_or_default();
    let (whole, part) = (whole.parse::<u64>().unwrap_or(0), part.parse::<u64>().unwrap_or(0));
    whole.saturating_mul(1000).saturating_add(part.saturating_mul(10))
}

/// Reads how much memory this process has, in bytes.
pub fn own_memory(root: &Path) -> u64 {
    let text = text(root, "proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Reads the file systems that keep something.
pub fn volumes(root: &Path) -> Vec<VolumeView> {
    let mounts = text(root, "proc/self/mountinfo").unwrap_or_default();
    let kind = |path: &str| {
        let lines = mounts.lines().rev().filter_map(|line| line.split_once(" - "));
        let mut found = lines.filter(|(front, _)| front.split(' ').nth(4) == Some(path));
        found.next().and_then(|(_, back)| back.split(' ').next()).map(str::to_owned)
    };
    let volume = |path: &str| {
        let facts = rustix::fs::statvfs(root.join(path.trim_start_matches('/'))).ok()?;
        Some(VolumeView {
            path: path.to_owned(),
            kind: kind(path)?,
            size_bytes: facts.f_blocks.saturating_mul(facts.f_frsize),
            free_bytes: facts.f_bavail.saturating_mul(facts.f_frsize),
        })
    };
    VOLUMES.into_iter().filter_map(volume).collect()
}

/// Reads the watchdogs that the kernel knows; their names as init reports them.
pub fn watchdogs(root: &Path) -> Vec<WatchdogView> {
    let folder = root.join("sys/class/watchdog");
    let mut paths: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let watchdog = |path: &std::path::PathBuf| WatchdogView {
        name: text(path, "identity").unwrap_or_else(|| "unknown".to_owned()),
        armed: text(path, "state").is_some_and(|state| state == "active"),
        timeout_s: number(path, "timeout").unwrap_or(0),
    };
    paths.iter().map(watchdog).collect()
}

/// Whether every volume of the disk is sealed to this machine and to signed releases, whatever else the
/// firmware would start.
fn is_sealed(root: &Path) -> bool {
    let reports = unlock::report(root);
    let wanted = Protection::Sealed { bound: Bound::Release };
    !reports.is_empty() && reports.iter().all(|report| report.protection == wanted)
}

/// Reads how far the machine can be trusted.
pub fn trust(root: &Path) -> Trust {
    let trust = Trust {
        secure_boot: variable(root, "SecureBoot"),
        setup_mode: variable(root, "SetupMode"),
        lockdown: text(root, "sys/kernel/security/lockdown").and_then(|text| chosen(&text)),
        tpm: text(root, "sys/class/tpm/tpm0/tpm_version_major"),
        measured: text(root, "sys/class/tpm/tpm0/pcr-sha256/11")
            .map(|register| register.to_ascii_lowercase()),
        sealed: is_sealed(root),
        notice: String::new(),
    };
    let mut notices: Vec<_> = unlock::report(root)
        .iter()
        .map(|volume| volume.protection.notice(trust.starts()))
        .collect();
    notices.extend(additions(root));
    notices.retain(|notice| !notice.is_empty());
    // Volumes of one disk are mostly protected alike.
    notices.dedup();
    Trust { notice: notices.join("; "), ..trust }
}

/// Registers that systemd-stub extends by what it is given besides its program, and by nothing else: words of a
/// command line and credentials, and extensions. Source: systemd-stub(7), "TPM PCR Notes".
const ADDITIONS: [u8; 2] = [12, 13];

/// Returns, in words, that the release was started with something that nobody signed, on firmware that starts
/// signed programs only. A BMC can do that: the stub takes words from SMBIOS, whoever wrote them.
pub fn additions(root: &Path) -> Option<String> {
    let is_used = |register: &u8| {
        let value = text(root, &format!("sys/class/tpm/tpm0/pcr-sha256/{register}"));
        value.is_some_and(|value| value.bytes().any(|digit| digit != b'0'))
    };
    let register = ADDITIONS.iter().find(|register| is_used(register))?;
    let signed = starts(root) == Starts::Signed;
    signed.then(|| {
        format!(
            "PCR {register} is not zero: the release was started with words or files that its publisher did not \
             sign; take them away (SMBIOS strings io.systemd.stub.kernel-cmdline-extra in the BMC, options of \
             the boot entry, files beside the program) and restart"
        )
    })
}

/// Reads what the firmware starts.
pub fn starts(root: &Path) -> Starts {
    Trust { secure_boot: variable(root, "SecureBoot"), ..Trust::default() }.starts()
}

/// Reads a variable of the firmware that is 0 or 1. Its file begins with four bytes of attributes.
fn variable(root: &Path, name: &str) -> Option<bool> {
    let path = root.join(format!("sys/firmware/efi/efivars/{name}-{GLOBAL}"));
    match fs::read(path).ok()?[..] {
        [_, _, _, _, value] => Some(value == 1),
        _ => None,
    }
}

/// Returns the word in brackets, which is the one that counts.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// Reads what passed a network interface.
pub fn traffic(root: &Path, interface: &str) -> Traffic {
    if interface.is_empty() || interface.contains('/') || interface.starts_with('.') {
        return Traffic::default();
    }
    let folder = root.join("sys/class/net").join(interface).join("statistics");
    let count = |name: &str| number(&folder, name).unwrap_or(0);
    Traffic {
        received_bytes: count("rx_bytes"),
        sent_bytes: count("tx_bytes"),
        receive_errors: count("rx_errors"),
        send_errors: count("tx_errors"),
        receive_drops: count("rx_dropped"),
    }
}

fn text(root: &Path, path: &str) -> Option<String> {
    let text = fs::read(root.join(path)).ok()?;
    Some(String::from_utf8_lossy(&text).trim().to_owned())
}

fn number(root: &Path, path: &str) -> Option<u64> {
    text(root, path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use types::volumes::VolumeReport;

    use super::*;
    use crate::testing::root as server;

    #[test]
    fn memory_and_load_are_read() {
        let root = server(&[
            ("proc/meminfo", b"MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n"),
            ("proc/loadavg", b"1.07 0.50 0.10 2/300 1234\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"4\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"1\n"),
        ]);
        let wanted =
            Memory { total: 2 << 20, available: 1 << 20, huge: 8 << 20, huge_free: 2 << 20 };
        assert_eq!(memory(root.path()), wanted);
        assert_eq!(load_milli(root.path()), 1070);
    }

    #[test]
    fn trust_is_what_firmware_and_kernel_say() {
        let secure = format!("sys/firmware/efi/efivars/SecureBoot-{GLOBAL}");
        let root = server(&[
            (secure.as_str(), &[6, 0, 0, 0, 1]),
            ("sys/kernel/security/lockdown", b"none [integrity] confidentiality\n"),
            ("sys/class/tpm/tpm0/tpm_version_major", b"2\n"),
            ("sys/class/tpm/tpm0/pcr-sha256/11", b"00FF\n"),
        ]);
        let trust = trust(root.path());
        assert_eq!((trust.secure_boot, trust.setup_mode), (Some(true), None));
        assert_eq!(trust.lockdown.as_deref(), Some("integrity"));
        assert_eq!(trust.tpm.as_deref(), Some("2"));
        assert_eq!(trust.measured.as_deref(), Some("00ff"));
        assert_eq!(super::trust(Path::new("/nonexistent")), Trust::default());
    }

    #[test]
    fn a_seal_without_secure_boot_says_what_it_does_not_keep_out() {
        let report = |secure_boot: u8| {
            let secure = format!("sys/firmware/efi/efivars/SecureBoot-{GLOBAL}");
            let volume = |name: &str| VolumeReport {
                name: name.to_owned(),
                protection: Protection::Sealed { bound: Bound::Release },
            };
            let volumes = serde_json::to_vec(&[volume("state"), volume("data")]).expect("JSON");
            let root = server(&[
                (secure.as_str(), &[6, 0, 0, 0, secure_boot]),
                (unlock::REPORT, &volumes),
            ]);
            trust(root.path())
        };
        let (on, off) = (report(1), report(0));
        assert!(on.sealed && off.sealed);
        assert_eq!(on.notice, "");
        assert_eq!(off.notice.matches("switch Secure Boot on").count(), 1, "{}", off.notice);
    }

    #[test]
    fn words_that_nobody_signed_are_told_where_only_signed_programs_start() {
        let told = |secure_boot: u8, register: &str, value: &str| {
            let secure = format!("sys/firmware/efi/efivars/SecureBoot-{GLOBAL}");
            let path = format!("sys/class/tpm/tpm0/pcr-sha256/{register}");
            let root = server(&[
                (secure.as_str(), &[6, 0, 0, 0, secure_boot]),
                (path.as_str(), format!("{value}\n").as_bytes()),
            ]);
            (additions(root.path()), trust(root.path()).notice)
        };
        let (zero, used) = ("0".repeat(64), format!("{}A", "0".repeat(63)));
        for register in ["12", "13"] {
            let (words, notice) = told(1, register, &used);
            let words = words.expect("told");
            assert!(words.starts_with(&format!("PCR {register} is not zero")), "{words}");
            assert_eq!(notice, words);
            assert_eq!(told(1, register, &zero), (None, String::new()));
            assert_eq!(told(0, register, &used).0, None);
        }
        assert_eq!(told(1, "11", &used).0, None);
    }

    #[test]
    fn watchdogs_and_traffic_are_read() {
        let root = server(&[
            ("sys/class/watchdog/watchdog0/identity", b"i6300ESB timer\n"),
            ("sys/class/watchdog/watchdog0/state", b"active\n"),
            ("sys/class/watchdog/watchdog0/timeout", b"60\n"),
            ("sys/class/net/eth0/statistics/rx_bytes", b"77\n"),
        ]);
        let wanted = WatchdogView { name: "i6300ESB timer".into(), armed: true, timeout_s: 60 };
        assert_eq!(watchdogs(root.path()), [wanted]);
        assert_eq!(traffic(root.path(), "eth0").received_bytes, 77);
        assert_eq!(traffic(root.path(), "../net/eth0"), Traffic::default());
    }
}
