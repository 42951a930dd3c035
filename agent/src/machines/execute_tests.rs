use types::{node::MachineShape, units::Mebibytes, vm::VfioInterface};

use super::*;
use crate::machines::plan::fixture;

/// Returns a machine of `gib` in pages of 1 GiB, which a device keeps to node 0.
fn large(number: u8, gib: u64) -> Record {
    let mut record = fixture::record();
    record.lease.id = MachineId::from_bytes([number; 16]);
    record.memory = MemoryBacking::Hugetlb1G;
    let device = "0000:01:00.0".parse().expect("an address");
    let memory_mib = Mebibytes(gib << 10);
    record.lease.shape = MachineShape { memory_mib, devices: vec![device], ..record.lease.shape };
    record
}

#[test]
fn machines_that_start_together_are_not_placed_on_the_same_pages() {
    // Nobody has fetched anything yet: both read that all pages are free.
    let root = memory::fixture::host(HugePage::Size1G, &[(500, 500), (500, 500)]);
    let device = root.path().join("sys/bus/pci/devices/0000:01:00.0");
    std::fs::create_dir_all(&device).expect("made");
    std::fs::write(device.join("numa_node"), "0\n").expect("written");
    let held = HeldPages::default();
    let placed = |number| {
        let located = locate((root.path(), &[]), &held, &large(number, 300));
        let gib = |part: &HostMemory| (part.node, part.memory_mib.0 >> 10);
        located.memory.iter().map(gib).collect::<Vec<_>>()
    };
    assert_eq!(placed(1), [(Some(0), 300)]);
    assert_eq!(placed(2), [(Some(0), 200), (Some(1), 100)]);
    assert_eq!(placed(3), [(Some(1), 300)]);
    assert_eq!(placed(4), [], "100 GiB are left");
    assert_eq!(placed(1), [(Some(0), 300)], "at its next start it has its own");
}

#[tokio::test]
async fn a_machine_is_started_when_its_place_is_kept_and_not_when_it_is_not_wanted() {
    let machine = MachineId::from_bytes([1; 16]);
    let placement = Placement { interface: Some(VfioInterface::Group), ..Placement::default() };
    let (progress, mut reports) = mpsc::channel(1);
    let report = async {
        let Some(Progress::Placed(of, place, kept)) = reports.recv().await else {
            panic!("nothing is to be kept")
        };
        assert_eq!((of, *place), (machine, placement.clone()));
        kept
    };
    let start = place(machine, placement.clone(), &progress);
    tokio::pin!(start);
    let kept = tokio::select! {
        biased;
        done = &mut start => panic!("nobody kept it: {done:?}"),
        kept = report => kept,
    };
    kept.send(()).expect("the start waits");
    start.await.expect("kept");

    let start = place(machine, placement, &progress);
    let (ended, ()) = tokio::join!(start, async { drop(reports.recv().await) });
    assert!(matches!(ended, Err(StartError::Abandoned)));
}

#[test]
fn a_configuration_for_ignition_is_handed_over_as_it_is() {
    let config = "{\"ignition\": {\"version\": \"3.4.0\"},\n \"x\": \"é\"}\n";
    let seed = Seed { user_data: Some(config.into()), ..Seed::default() };
    let mut files = Files::default();
    let fd = open_ignition(Some(&seed), &mut files).expect("made");
    assert_eq!((fd, files.0.len()), (Some(SPEC_FD + 1), 1));
    let mut handed = String::new();
    let mut file = File::from(files.0.remove(0));
    file.read_to_string(&mut handed).expect("text");
    assert_eq!(handed, config);
    assert!(file.write_all(b"x").is_err(), "it can be changed");
    // What is for cloud-init is not for Ignition.
    let script = Seed { user_data: Some("#!/bin/sh\n".into()), ..Seed::default() };
    assert!(open_ignition(Some(&script), &mut files).expect("nothing to make").is_none());
    assert!(open_ignition(None, &mut files).expect("nothing to make").is_none());
}

#[test]
fn the_disk_for_cloud_init_takes_writes_and_keeps_its_length() {
    let mut record = fixture::record();
    record.image.seed = Some(Seed::default());
    let mut files = Files::default();
    let disk = open_seed(&record, &mut files).expect("made").expect("a seed");
    assert!(!disk.read_only);
    let mut file = File::from(files.0.remove(0));
    let length = file.metadata().expect("read").len();
    file.write_all(b"x").expect("written");
    assert!(file.set_len(length + 1).is_err() && file.set_len(length - 1).is_err());
}

#[test]
fn kernels_are_told_from_other_files() {
    let mut bzimage = vec![0; KERNEL_HEAD];
    bzimage[0x202..].copy_from_slice(b"HdrS");
    assert!(is_kernel(&bzimage));
    assert!(is_kernel(b"\x7fELF\x02"));
    assert!(!is_kernel(b"#!/bin/sh\n"));
    assert!(!is_kernel(&[]));
}
