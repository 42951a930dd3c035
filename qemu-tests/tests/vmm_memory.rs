//! Guest memory: on the host's nodes that the specification names, refused by name when a node has
//! too little, and never with another tenant's bytes in it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::host::HostOptions,
};
use types::{
    units::Mebibytes,
    vm::{HostMemory, MemoryBacking, exit},
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

/// What one tenant leaves in memory, as long as 16 bytes so that it lies at multiples of them.
const SECRET: &str = "a-tenants-secret";
/// Writes 48 MiB of it.
const LEAVE: &str = r#"perl -e '$text = "a-tenants-secret" x 3145728; print length $text, "\n"'"#;
/// Least places at which it is then found: two thirds of what was written, one in 64 bytes.
const LEFT: u64 = 32 << 20 >> 6;

const NODE_PAGES: &str = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB";
const NODE_GIGABYTES: &str = "/sys/devices/system/node/node1/hugepages/hugepages-1048576kB";

/// A host of two nodes with the usual guest: 1 GiB, and as many as are asked for.
fn two_nodes(folder: &Path, second_gib: u32, words: &str) -> Bed {
    let made = guest::make(folder).unwrap();
    let node = |id: u32| {
        let gib = if id == 0 { 1 } else { second_gib };
        let memory = format!("memory-backend-ram,size={gib}G,id=node{id}");
        let node =
            format!("node,nodeid={id},memdev=node{id}{}", if id == 0 { ",cpus=0" } else { "" });
        ["-object".to_owned(), memory, "-numa".to_owned(), node]
    };
    let arguments = [node(0), node(1)].concat();
    let host =
        HostOptions { memory_mib: 1024 * (1 + second_gib), arguments, ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    let words = words.to_owned();
    Bed::start(folder, BedOptions { files, host, words, ..BedOptions::default() }).unwrap()
}

/// A machine whose memory is in these parts, by node and in MiB.
fn plan(number: u8, backing: MemoryBacking, parts: &[(u32, u64)]) -> Plan {
    let kernel = ("/guest/kernel", "/guest/initrd");
    let mut plan = Plan::linux(number, kernel, "console=ttyS0 quiet");
    plan.spec.memory_backing = backing;
    let part = |&(node, mib): &(u32, u64)| HostMemory {
        node: Some(node),
        memory_mib: Mebibytes(mib),
        cpus: vec![0],
    };
    plan.spec.host_memory = parts.iter().map(part).collect();
    plan.spec.memory_mib = Mebibytes(parts.iter().map(|(_, mib)| mib).sum());
    plan
}

fn free_pages(bed: &mut Bed, pages: &str) -> u64 {
    bed.text(&format!("{pages}/free_hugepages")).unwrap().parse().unwrap()
}

/// How much of guests' ordinary memory the host's kernel gave in pages of 2 MiB.
fn large_pages_mib(bed: &mut Bed) -> u64 {
    let told = bed.text("/proc/meminfo").unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix("ShmemHugePages:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() >> 10
}

/// Runs a guest that leaves the secret in its memory, then another, and returns how often the
/// secret is found while either runs.
fn two_tenants(bed: &mut Bed, backing: MemoryBacking, mib: u64) -> (u64, u64) {
    let first = bed.launch(&plan(1, backing, &[(1, mib)])).unwrap();
    bed.wait_console(first, guest::READY, GUEST_LIMIT).unwrap();
    assert_eq!(bed.run(first, LEAVE, SOON).unwrap(), "50331648\n");
    let (left, _) = bed.search(SECRET).unwrap();
    bed.type_line(first, "poweroff -f").unwrap();
    bed.wait_exit(first, SOON).unwrap();

    let second = bed.launch(&plan(2, backing, &[(1, mib)])).unwrap();
    bed.wait_console(second, guest::READY, GUEST_LIMIT).unwrap();
    let (found, bytes) = bed.search(SECRET).unwrap();
    assert_eq!(bytes, mib << 20);
    bed.type_line(second, "poweroff -f").unwrap();
    bed.wait_exit(second, SOON).unwrap();
    (left, found)
}

#[test]
fn memory_comes_from_its_node_and_goes_back_without_what_was_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = two_nodes(folder.path(), 1, "");
    // Just as many as one machine takes: the second machine gets the very pages of the first.
    bed.write(&format!("{NODE_PAGES}/nr_hugepages"), b"128").unwrap();
    assert_eq!(free_pages(&mut bed, NODE_PAGES), 128);

    let elsewhere = bed.launch(&plan(3, MemoryBacking::Hugetlb2M, &[(0, 64), (1, 192)])).unwrap();
    let (status, log) = bed.wait_exit(elsewhere, SOON).unwrap();
    assert_eq!(status, exit::REFUSED, "{log}");
    let reason = "node 0 of the host lacks 32 of the 32 2 MiB huge pages";
    assert!(log.contains(reason), "{log}");
    assert_eq!(free_pages(&mut bed, NODE_PAGES), 128);

    let (left, found) = two_tenants(&mut bed, MemoryBacking::Hugetlb2M, 256);
    assert!(left > LEFT, "the first tenant's bytes lie at {left} places only");
    assert_eq!(found, 0);
    assert_eq!(free_pages(&mut bed, NODE_PAGES), 128);

    let (left, found) = two_tenants(&mut bed, MemoryBacking::Memfd, 256);
    assert!(left > LEFT, "the first tenant's bytes lie at {left} places only");
    assert_eq!(found, 0);

    // Ordinary memory is large pages, too: the VMM asks for them, and the kernel is one that hears it.
    assert_eq!(large_pages_mib(&mut bed), 0);
    let third = bed.launch(&plan(4, MemoryBacking::Memfd, &[(1, 256)])).unwrap();
    bed.wait_console(third, guest::READY, GUEST_LIMIT).unwrap();
    let large = large_pages_mib(&mut bed);
    assert!((48..=256).contains(&large), "{large} MiB are in large pages");

    // A page that breaks ends the machine that touches it, which says what came, and nobody else.
    bed.run(third, "printf 'a-page-that-%s' broke > /mark", SOON).unwrap();
    assert!(bed.break_pages("a-page-that-broke").unwrap() > 0);
    bed.type_line(third, "cat /mark").unwrap();
    let (status, log) = bed.wait_exit(third, SOON).unwrap();
    assert_eq!(status, exit::HOST_FAULT, "{log}");
    assert!(
        log.contains("a page of the host's memory is broken, which the guest has at 0x"),
        "{log}"
    );
}

#[test]
fn a_page_of_one_gib_is_a_tenants_whole_memory_and_the_next_ones_without_what_was_in_it() {
    let folder = tempfile::tempdir().unwrap();
    // There is one, on the second node: reserved at the start, of memory that nothing else takes then. The
    // kernel would lie anywhere, and what it allocates first lies at the node's end.
    let mut bed = two_nodes(folder.path(), 3, "nokaslr hugepagesz=1G hugepages=1:1");
    assert_eq!(free_pages(&mut bed, NODE_GIGABYTES), 1);
    let backing = MemoryBacking::Hugetlb1G;
    let larger = bed.launch(&plan(3, backing, &[(1, 2048)])).unwrap();
    let (status, log) = bed.wait_exit(larger, SOON).unwrap();
    assert_eq!(status, exit::REFUSED, "{log}");
    let reason = "node 1 of the host lacks 1 of the 2 1 GiB huge pages";
    assert!(log.contains(reason), "{log}");

    let (left, found) = two_tenants(&mut bed, backing, 1024);
    assert!(left > LEFT, "the first tenant's bytes lie at {left} places only");
    assert_eq!(found, 0);
    assert_eq!(free_pages(&mut bed, NODE_GIGABYTES), 1);
}
