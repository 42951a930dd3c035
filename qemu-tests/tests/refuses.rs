//! What a provider reads when something is wrong: a typo in the configuration is named with its
//! line, and a host that cannot keep interrupts apart rents no device.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::{Host, HostOptions, Iommu, Medium, Uplink},
    scene::{image_folder, with_rented_nvme},
};

/// From power-on to the line that says it, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A configuration that needs no network, with `first` as its second line.
fn config(first: &str) -> String {
    let key = "01".repeat(32);
    format!("version = 1\n{first}\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
}

fn boot(options: HostOptions) -> (Host, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let options = HostOptions { uplink: Uplink::None, memory_mib: 1024, ..options };
    let host = Host::start(&image_folder().unwrap(), folder.path(), &options).unwrap();
    (host, folder)
}

#[test]
fn a_typo_in_the_configuration_is_named_with_its_line() {
    let config = Some(config("nmae = \"rack 7\""));
    let (host, _folder) = boot(HostOptions { config, ..HostOptions::default() });
    let line = host.serial.wait("event=config-bad", LIMIT).unwrap();
    assert!(line.contains("nmae") && line.contains("line 2"), "{line}");
}

#[test]
fn without_interrupt_remapping_no_device_is_rented() {
    let folder = tempfile::tempdir().unwrap();
    let rented = folder.path().join("rented");
    let options = with_rented_nvme(&rented, Medium::Kernel(String::new()), "x").unwrap();
    let config = Some(config("name = \"no remapping\""));
    let iommu = Iommu::IntelNoRemapping;
    let (host, _folder) = boot(HostOptions { config, iommu, ..options });
    let line = host.serial.wait("event=device address=0000:01:00.0", LIMIT).unwrap();
    assert!(line.contains("refused") && line.contains("remapping"), "{line}");
}
