//! The image boots from every medium it ships on, checks its own mounts, and powers off in bounded
//! steps when the button is pressed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::PathBuf, time::Duration};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    scene::image_folder,
};

/// From power-on to the agent serving, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(120);
/// Memory of a small server, in MiB: the node itself must fit into it.
const MEMORY_MIB: u32 = 512;
/// From the power button to the machine being off.
const DOWN: Duration = Duration::from_secs(120);

/// Boots `medium` and returns the running host with the folder of its files.
fn boot(medium: Medium, options: HostOptions) -> (Host, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let options = HostOptions { medium, memory_mib: MEMORY_MIB, uplink: Uplink::None, ..options };
    let host = Host::start(&image_folder().unwrap(), folder.path(), &options).unwrap();
    (host, folder)
}

fn comes_up(host: &Host) {
    host.serial.wait("event=mounts-verified", UP).unwrap();
    host.serial.wait("event=watchdog-armed", UP).unwrap();
    host.serial.wait("event=node id=", UP).unwrap();
    assert!(!host.serial.text().contains("event=mount-wrong"));
}

#[test]
fn from_the_iso_as_a_cd_and_down_again() {
    let (mut host, _folder) = boot(Medium::IsoCd, HostOptions::default());
    comes_up(&host);
    host.serial.wait("event=ram-mode path=/state", UP).unwrap();
    host.press_power_button().unwrap();
    host.serial.wait("event=shutdown-done", DOWN).unwrap();
    host.wait_for_end(DOWN).unwrap();
}

#[test]
fn from_the_iso_on_a_usb_stick() {
    let (host, _folder) = boot(Medium::IsoUsb, HostOptions::default());
    comes_up(&host);
}

#[test]
fn from_the_disk_image_with_its_own_state_and_all_of_the_disk() {
    let disk = tempfile::tempdir().unwrap();
    let copy: PathBuf = disk.path().join("disk.img");
    fs::copy(image_folder().unwrap().join("holdfast.img"), &copy).unwrap();
    fs::File::options().write(true).open(&copy).unwrap().set_len(2 << 40).unwrap();
    let (host, _folder) = boot(Medium::Disk(copy), HostOptions::default());
    comes_up(&host);
    // What the image's other partitions and tables leave of 2 TiB.
    let data = (2_u64 << 40) - (770 << 20);
    host.serial.wait(&format!("event=data-grown bytes={data}"), UP).unwrap();
    assert!(!host.serial.text().contains("event=ram-mode"));
}

#[test]
fn from_the_pxe_set_with_either_iommu() {
    let amd =
        HostOptions { iommu: qemu_tests::harness::host::Iommu::Amd, ..HostOptions::default() };
    let (host, _folder) = boot(Medium::Kernel(String::new()), amd);
    comes_up(&host);
}
