//! The guest that tests and demo rent machines for is made from Debian's packages.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use qemu_tests::harness::guest;

#[test]
fn a_guest_has_a_kernel_an_initramfs_and_the_renters_key() {
    let folder = tempfile::tempdir().unwrap();
    let made = guest::make(folder.path(), "ssh-ed25519 AAAA renter", None).unwrap();
    let kernel = std::fs::read(made.kernel).unwrap();
    assert_eq!(&kernel[0x202..0x206], b"HdrS");
    let entries = image::cpio::read(&std::fs::read(made.initrd).unwrap()).unwrap();
    let named = |name: &str| entries.iter().any(|entry| entry.name == name);
    assert!(named("init") && named("bin/busybox") && named("modules/virtio_blk.ko"));
    assert!(named("root/.ssh/authorized_keys"));
}
