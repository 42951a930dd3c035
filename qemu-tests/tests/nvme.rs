//! A disk that looks like an NVMe controller works under the guest's own driver.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::bed::{Bed, BedOptions, Plan, guest};
use types::vm::DiskModel;

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

/// Writes blocks that hold their number and a salt, in an order that jumps, and reads them back
/// past the cache (2: for reading and writing; 0: for reading).
const PATTERN: &str = r#"perl -e '$n = 512; $b = 4096; sysopen(D, "/dev/nvme0n1", 2) or die $!; sub block { pack("N", $_[0] * 2654435761 % 4294967296) x ($b / 4) } for ($i = 0; $i < $n; $i++) { $k = $i * 197 % $n; sysseek(D, $k * $b, 0); syswrite(D, block($k)) == $b or die "write $k: $!" } close D; open(C, ">", "/proc/sys/vm/drop_caches"); print C 3; close C; sysopen(D, "/dev/nvme0n1", 0) or die $!; $bad = 0; for ($i = 0; $i < $n; $i++) { $k = $i * 61 % $n; sysseek(D, $k * $b, 0); sysread(D, $got, $b); $bad++ if $got ne block($k) } print "blocks $n bad $bad\n"'"#;

#[test]
fn linux_finds_and_uses_an_nvme_disk() {
    let folder = tempfile::tempdir().unwrap();
    let made = guest::make(folder.path()).unwrap();
    let mut options = BedOptions::default();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    options.files.push(("guest/kernel".to_owned(), made.kernel));
    options.files.push(("guest/initrd".to_owned(), made.initrd));
    options.files.push(("guest/disk".to_owned(), disk));
    let mut bed = Bed::start(folder.path(), options).unwrap();
    let mut plan = Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    let disk = plan.disk("/guest/disk");
    disk.model = DiskModel::Nvme;
    disk.serial = "holdfast-nvme".to_owned();
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();

    let facts = bed
        .run(
            machine,
            "cd /sys/class/nvme/nvme0; cat serial model state; cat nvme0n1/size nvme0n1/wwid \
             nvme0n1/queue/write_cache nvme0n1/queue/max_hw_sectors_kb; cd /",
            SOON,
        )
        .unwrap();
    let lines: Vec<&str> = facts.lines().map(str::trim).collect();
    assert_eq!(lines[..4], ["holdfast-nvme", "Holdfast NVMe disk", "live", "16384"], "{facts}");
    assert!(lines[4].starts_with("nvme.1b36-686f6c6466617374"), "{facts}");
    assert_eq!(lines[5..7], ["write back", "1024"], "{facts}");

    let pattern = bed.run(machine, PATTERN, SOON).unwrap();
    assert_eq!(pattern, "blocks 512 bad 0\n");
    let sync = "dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=2 conv=fsync 2>/dev/null && echo done";
    assert_eq!(bed.run(machine, sync, SOON).unwrap(), "done\n");
    // A reset of the controller, after which the driver finds everything again.
    let reset = "echo 1 > /sys/class/nvme/nvme0/reset_controller; sleep 1; \
                 cat /sys/class/nvme/nvme0/state; dd if=/dev/nvme0n1 bs=4k count=1 skip=1 \
                 2>/dev/null | od -An -tx1 | head -n1";
    let found = bed.run(machine, reset, SOON).unwrap();
    assert!(found.starts_with("live\n 00 00 00 00"), "{found}");
    let interrupts = bed.run(machine, "grep -c nvme0q /proc/interrupts", SOON).unwrap();
    assert_eq!(interrupts, "2\n", "one vector for the admin queue and one for the I/O queue");
    let patience = bed.run(machine, "dmesg | grep -c 'nvme.* set to 60 seconds'", SOON);
    assert_eq!(patience.unwrap(), "2\n", "it waits for a shutdown as long as it is told to");
    assert_eq!(complaints(&mut bed, machine), "0\n");

    // A power-off goes through the controller's shutdown.
    end(&mut bed, machine);

    // Without messages the driver has the pin alone, and no storm of interrupts.
    let files = ("/guest/kernel", "/guest/initrd");
    let mut plan = Plan::linux(2, files, "console=ttyS0 quiet pci=nomsi");
    plan.disk("/guest/disk").model = DiskModel::Nvme;
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    assert_eq!(bed.run(machine, PATTERN, SOON).unwrap(), "blocks 512 bad 0\n");
    let count = "grep nvme0q /proc/interrupts | tr -s ' ' | cut -d ' ' -f 3";
    let found = bed.run(machine, "grep nvme0q /proc/interrupts", SOON).unwrap();
    assert!(found.contains("IO-APIC") && found.lines().count() == 1, "{found}");
    let interrupts: u64 = bed.run(machine, count, SOON).unwrap().trim().parse().unwrap();
    assert!((100..5000).contains(&interrupts), "{found}");
    assert_eq!(complaints(&mut bed, machine), "0\n");
    end(&mut bed, machine);
}

/// How many lines of the guest's kernel complain of the disk or of a storm of interrupts. That it
/// waits 60 seconds for a shutdown is no complaint: the disk asks for it.
fn complaints(bed: &mut Bed, machine: u32) -> String {
    let count = "dmesg | grep -iE 'nobody cared|nvme.*(fail|timeout|error|warn)' | \
                 grep -cv ' set to 60 seconds'; true";
    bed.run(machine, count, SOON).unwrap()
}

fn end(bed: &mut Bed, machine: u32) {
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
