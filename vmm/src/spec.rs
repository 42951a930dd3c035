//! Reading the specification: what is written down is either possible or refused here, by name.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read},
};

use types::vm::{Boot, SPEC_FD, SPEC_VERSION, VmSpec};

use crate::{
    machine::{MAX_VIRTIO, NumaError, Tree, TreeError, numa},
    sys::vfio::adopt,
};

/// Largest specification, in bytes.
pub const MAX_SPEC: usize = 1 << 20;
/// Smallest guest memory, in MiB: less than this holds no Linux.
const MIN_MEMORY_MIB: u64 = 16;
/// Most virtual CPUs: APIC ids have eight bits, and 255 means all.
const MAX_VCPUS: u32 = 254;

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
    range("vcpus", vcpus.into(), (1..=MAX_VCPUS).contains(&vcpus), "1 to 254 are possible")?;
    let memory = spec.memory_mib.0;
    let enough =
        memory >= MIN_MEMORY_MIB && spec.memory_mib.to_bytes().is_some_and(|b| b < 1 << 46);
    range("memory_mib", memory, enough, "16 MiB to 64 TiB are possible")?;
    let virtio = spec.disks.len() + spec.nets.len() + usize::from(spec.vsock.is_some()) + 1;
    let right = "disks, network cards, the socket and the entropy device are at most 15 together";
    range("disks and nets", virtio as u64, virtio <= MAX_VIRTIO, right)?;
    check_descriptors(&descriptors(&spec))?;
    Tree::new(&spec)?;
    numa::check(&spec)?;
    Ok(spec)
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
    let Boot::Linux { kernel_fd, initrd_fd, .. } = &spec.boot;
    let mut all = vec![spec.kvm_fd, spec.api_fd, *kernel_fd];
    all.extend(initrd_fd);
    all.extend(spec.disks.iter().map(|disk| disk.fd));
    all.extend(spec.nets.iter().flat_map(|net| [net.tap_fd, net.vhost_fd]));
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
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refusal = |text: String| parse(text.as_bytes()).expect_err("refused");
        assert!(matches!(refusal(document(0, 64, "")), SpecError::Range { field: "vcpus", .. }));
        assert!(matches!(refusal(document(255, 64, "")), SpecError::Range { field: "vcpus", .. }));
        assert!(matches!(
            refusal(document(1, 8, "")),
            SpecError::Range { field: "memory_mib", .. }
        ));
        assert!(matches!(refusal(document(1, 64, ",\"x\":1")), SpecError::Document { .. }));
        let twice = document(1, 64, "").replace("\"kvm_fd\":5", "\"kvm_fd\":6");
        assert!(matches!(refusal(twice), SpecError::Repeated { fd: 6 }));
        let standard = document(1, 64, "").replace("\"kvm_fd\":5", "\"kvm_fd\":2");
        assert!(matches!(refusal(standard), SpecError::Reserved { fd: 2 }));
        let newer = document(1, 64, "").replace("\"version\":1", "\"version\":2");
        assert!(matches!(refusal(newer), SpecError::Version { found: 2 }));
    }
}
