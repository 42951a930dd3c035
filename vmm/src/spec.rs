//! Reading the specification: what is written down is either possible or refused here, by name.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read},
    iter,
};

use types::vm::{Boot, MAX_DISK_QUEUES, MAX_QUEUE_PAIRS, SPEC_FD, SPEC_VERSION, VmSpec};

use crate::{
    machine::{MAX_HOST_CPUS, MAX_VIRTIO, NumaError, Tree, TreeError, numa},
    sys::{populate, vfio::adopt},
    vcpu::Cpus,
};

/// Largest specification, in bytes.
pub const MAX_SPEC: usize = 1 << 20;
/// Smallest guest memory, in MiB: less than this holds no Linux.
const MIN_MEMORY_MIB: u64 = 16;
/// Smallest guest memory with UEFI firmware, in MiB: it unpacks itself at 8 MiB and wants as much
/// again several times over.
const MIN_FIRMWARE_MIB: u64 = 128;
/// Most virtual CPUs: the tables that tell of more would not fit where kernels look for them. KVM's
/// own limit depends on how the host's kernel was configured.
pub const MAX_VCPUS: u32 = 1024;

/// APIC ids are below this: KVM's most (Linux arch/x86/include/asm/kvm_host.h, KVM_MAX_VCPU_IDS).
const MAX_ID_LIMIT: u32 = 4096;

/// Why a specification cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SpecError {
    #[error("cannot read the specification from descriptor 3")]
    Read { source: io::Error },
    #[error("the specification has more than {MAX_SPEC} bytes")]
    TooLarge,
    #[error("the specification is not what this build reads: {source}")]
    Document { source: serde_json::Error },
    #[error("the specification has version {found}; this build reads version {SPEC_VERSION}")]
    Version { found: u32 },
    #[error("{field} is {found}; {right}")]
    Range { field: &'static str, found: u64, right: &'static str },
    #[error("descriptor {fd} is named twice; each descriptor has one use")]
    Repeated { fd: i32 },
    #[error("descriptor {fd} is not for devices or files; they begin at 4")]
    Reserved { fd: i32 },
    #[error("the tree of PCI ports cannot be built")]
    Tree(#[from] TreeError),
    #[error("the NUMA nodes cannot be laid out")]
    Numa(#[from] NumaError),
}

/// Reads the specification from descriptor 3, which it closes.
pub fn receive() -> Result<VmSpec, SpecError> {
    let document = adopt(SPEC_FD).map_err(|source| SpecError::Read { source })?;
    read(File::from(document))
}

/// Reads the specification from an open file.
pub fn read(file: File) -> Result<VmSpec, SpecError> {
    let mut bytes = Vec::new();
    let limit = MAX_SPEC as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(|source| SpecError::Read { source })?;
    parse(&bytes)
}

/// Parses a specification and checks that this build can run it.
pub fn parse(bytes: &[u8]) -> Result<VmSpec, SpecError> {
    if bytes.len() > MAX_SPEC {
        return Err(SpecError::TooLarge);
    }
    let spec: VmSpec =
        serde_json::from_slice(bytes).map_err(|source| SpecError::Document { source })?;
    if spec.version != SPEC_VERSION {
        return Err(SpecError::Version { found: spec.version });
    }
    let range = |field, found: u64, fits: bool, right| {
        if fits { Ok(()) } else { Err(SpecError::Range { field, found, right }) }
    };
    let vcpus = spec.vcpus;
    range("vcpus", vcpus.into(), (1..=MAX_VCPUS).contains(&vcpus), "1 to 1024 are possible")?;
    let memory = spec.memory_mib.0;
    let enough =
        memory >= MIN_MEMORY_MIB && spec.memory_mib.to_bytes().is_some_and(|b| b < 1 << 46);
    range("memory_mib", memory, enough, "16 MiB to 64 TiB are possible")?;
    let firmware = matches!(spec.boot, Boot::Uefi { .. });
    let enough = !firmware || memory >= MIN_FIRMWARE_MIB;
    range("memory_mib", memory, enough, "UEFI firmware needs at least 128 MiB")?;
    let virtio = spec.disks.len() + spec.nets.len() + usize::from(spec.vsock.is_some()) + 1;
    let right = "disks, network cards, the socket and the entropy device are at most 15 together";
    range("disks and nets", virtio as u64, virtio <= MAX_VIRTIO, right)?;
    for disk in &spec.disks {
        let openings = 1 + disk.more_fds.len() as u64;
        let right = "a disk is opened once for each of its queues, at most 4 times";
        range("disks.more_fds", openings, openings <= MAX_DISK_QUEUES.into(), right)?;
    }
    for net in &spec.nets {
        let pairs = 1 + net.more_pairs.len() as u64;
        let right = "a network card has 1 to 8 pairs of queues";
        range("nets.more_pairs", pairs, pairs <= MAX_QUEUE_PAIRS.into(), right)?;
    }
    for (passthrough, device) in
        spec.passthrough.iter().flat_map(|all| all.devices.iter().map(move |device| (all, device)))
    {
        let clique = device.p2p_clique.unwrap_or(0);
        let fits = device.p2p_clique.is_none() || passthrough.peer_to_peer && clique < 16;
        let right = "cliques are 0 to 15, and of devices with peer_to_peer";
        range("passthrough.devices.p2p_clique", clique.into(), fits, right)?;
    }
    for part in &spec.host_memory {
        let node = part.node.unwrap_or(0);
        let right = "nodes of the host are below 1024";
        range("host_memory.node", node.into(), node < populate::MAX_NODES, right)?;
        let cpu = part.cpus.iter().copied().max().unwrap_or(0);
        let right = "CPUs of the host are below 8192";
        range("host_memory.cpus", cpu.into(), cpu < populate::MAX_CPUS, right)?;
    }
    check_affinity(&spec)?;
    check_descriptors(&descriptors(&spec))?;
    Tree::new(&spec)?;
    numa::check(&spec)?;
    check_places(&spec)?;
    Ok(spec)
}

fn check_affinity(spec: &VmSpec) -> Result<(), SpecError> {
    let wrong = |field, found, right| Err(SpecError::Range { field, found, right });
    let sets = u32::try_from(spec.cpu_affinity.len()).unwrap_or(u32::MAX);
    if sets > spec.vcpus {
        return wrong("cpu_affinity", sets.into(), "one set for each virtual CPU is possible");
    }
    let last = spec.cpu_affinity.iter().flatten().copied().max().unwrap_or(0);
    if last >= MAX_HOST_CPUS {
        return wrong("cpu_affinity", last.into(), "host CPUs 0 to 1023 are possible");
    }
    Ok(())
}

fn check_places(spec: &VmSpec) -> Result<(), SpecError> {
    let wrong = |found, right| Err(SpecError::Range { field: "cpu_places", found, right });
    let places = spec.cpu_places.len();
    if places > 0 && u32::try_from(places) != Ok(spec.vcpus) {
        return wrong(places as u64, "none, or one place for each virtual CPU");
    }
    let limit = Cpus::of(spec).id_limit();
    if limit > MAX_ID_LIMIT {
        return wrong(limit.into(), "APIC ids of these packages, caches and cores are below 4096");
    }
    Ok(())
}

fn check_descriptors(all: &[i32]) -> Result<(), SpecError> {
    let mut seen = BTreeSet::new();
    for fd in all.iter().copied() {
        if fd <= SPEC_FD {
            return Err(SpecError::Reserved { fd });
        }
        if !seen.insert(fd) {
            return Err(SpecError::Repeated { fd });
        }
    }
    Ok(())
}

/// Returns every descriptor that the specification names, itself not included.
pub fn descriptors(spec: &VmSpec) -> Vec<i32> {
    let mut all = vec![spec.kvm_fd, spec.api_fd];
    match &spec.boot {
        Boot::Linux { kernel_fd, initrd_fd, .. } => {
            all.push(*kernel_fd);
            all.extend(initrd_fd);
        }
        Boot::Uefi { firmware_fd, variables_fd, .. } => all.extend([*firmware_fd, *variables_fd]),
    }
    all.extend(spec.ignition_fd);
    all.extend(spec.console_fd);
    all.extend(spec.disks.iter().flat_map(|disk| iter::once(disk.fd).chain(disk.more_fds.clone())));
    for net in &spec.nets {
        all.extend([net.tap_fd, net.vhost_fd]);
        all.extend(net.more_pairs.iter().flat_map(|pair| [pair.tap_fd, pair.vhost_fd]));
    }
    all.extend(spec.vsock.iter().map(|vsock| vsock.vhost_fd));
    if let Some(passthrough) = &spec.passthrough {
        all.push(passthrough.iommu_fd);
        all.extend(passthrough.devices.iter().map(|device| device.cdev_fd));
    }
    all
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A specification with nothing that need not be.
    pub(crate) fn minimal(vcpus: u32, memory: u64) -> VmSpec {
        parse(document(vcpus, memory, "").as_bytes()).expect("valid")
    }

    fn document(vcpus: u32, memory: u64, extra: &str) -> String {
        format!(
            "{{\"version\":1,\"machine\":\"{}\",\"uid\":1000,\"vcpus\":{vcpus},\"memory_mib\":{memory},\
             \"memory_backing\":\"memfd\",\"boot\":{{\"kind\":\"linux\",\"kernel_fd\":4,\
             \"initrd_fd\":null,\"cmdline\":\"\"}},\"disks\":[],\"nets\":[],\"vsock\":null,\
             \"passthrough\":null,\"kvm_fd\":5,\"api_fd\":6{extra}}}",
            "00".repeat(16)
        )
    }

    #[test]
    fn descriptors_are_listed() {
        let spec = parse(document(1, 64, "").as_bytes()).expect("valid");
        assert_eq!(descriptors(&spec), [5, 6, 4]);
        let spec = parse(uefi(128).as_bytes()).expect("valid");
        assert_eq!(descriptors(&spec), [5, 6, 7, 8]);
        let spec = parse(document(1, 64, ",\"ignition_fd\":9").as_bytes()).expect("valid");
        assert_eq!(descriptors(&spec), [5, 6, 4, 9]);
    }

    fn uefi(memory: u64) -> String {
        let linux = "{\"kind\":\"linux\",\"kernel_fd\":4,\"initrd_fd\":null,\"cmdline\":\"\"}";
        let uefi = "{\"kind\":\"uefi\",\"firmware_fd\":7,\"variables_fd\":8}";
        document(1, memory, "").replace(linux, uefi)
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refusal = |text: String| parse(text.as_bytes()).expect_err("refused");
        assert!(matches!(refusal(document(0, 64, "")), SpecError::Range { field: "vcpus", .. }));
        assert!(matches!(refusal(document(1025, 64, "")), SpecError::Range { field: "vcpus", .. }));
        assert!(matches!(
            refusal(document(1, 8, "")),
            SpecError::Range { field: "memory_mib", .. }
        ));
        assert!(matches!(refusal(uefi(64)), SpecError::Range { field: "memory_mib", .. }));
        assert!(matches!(refusal(document(1, 64, ",\"x\":1")), SpecError::Document { .. }));
        let twice = document(1, 64, "").replace("\"kvm_fd\":5", "\"kvm_fd\":6");
        assert!(matches!(refusal(twice), SpecError::Repeated { fd: 6 }));
        let standard = document(1, 64, "").replace("\"kvm_fd\":5", "\"kvm_fd\":2");
        assert!(matches!(refusal(standard), SpecError::Reserved { fd: 2 }));
        let part = |node: u32, cpu: u32| {
            let part = format!("{{\"node\":{node},\"memory_mib\":64,\"cpus\":[{cpu}]}}");
            document(1, 64, &format!(",\"host_memory\":[{part}]"))
        };
        parse(part(1023, 8191).as_bytes()).expect("possible");
        let field = "host_memory.node";
        assert!(matches!(refusal(part(1024, 0)), SpecError::Range { field: f, .. } if f == field));
        let field = "host_memory.cpus";
        assert!(matches!(refusal(part(0, 8192)), SpecError::Range { field: f, .. } if f == field));
        let pinned = |sets: &str| refusal(document(1, 64, &format!(",\"cpu_affinity\":{sets}")));
        let unpinnable = |error| matches!(error, SpecError::Range { field: "cpu_affinity", .. });
        assert!(unpinnable(pinned("[[0],[1]]")) && unpinnable(pinned("[[1024]]")));
        let newer = document(1, 64, "").replace("\"version\":1", "\"version\":2");
        assert!(matches!(refusal(newer), SpecError::Version { found: 2 }));
    }

    #[test]
    fn places_are_of_all_virtual_cpus_or_of_none_and_within_apic_ids() {
        let parsed = |vcpus: u32, places: &[[u32; 3]]| {
            let place = |[package, cache, core]: &[u32; 3]| {
                format!("{{\"package\":{package},\"cache\":{cache},\"core\":{core}}}")
            };
            let places: Vec<String> = places.iter().map(place).collect();
            parse(
                document(vcpus, 64, &format!(",\"cpu_places\":[{}]", places.join(","))).as_bytes(),
            )
        };
        assert!(parsed(2, &[]).is_ok() && parsed(2, &[[9, 9, 9], [8, 8, 8]]).is_ok());
        let refusal = parsed(2, &[[0; 3]]).expect_err("refused").to_string();
        assert!(refusal.contains("one place for each virtual CPU"), "{refusal}");
        // 64 packages, of which one has 65 cores: 64 times 128 ids.
        let wide: Vec<_> = (0..128).map(|at: u32| [at.saturating_sub(64), 0, at]).collect();
        let refusal = parsed(128, &wide).expect_err("refused").to_string();
        assert!(refusal.contains("below 4096") && refusal.contains("8065"), "{refusal}");
    }
}
