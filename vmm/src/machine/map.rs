//! The address map of one machine: what `holes` lays out, with what this host's CPUs and IOMMU say.

use std::sync::Arc;

use kvm_bindings::CpuId;
use types::vm::{MemoryBacking, VmSpec};

use super::{build::BuildError, start};
use crate::{
    holes::{self, HYPERTRANSPORT, HoleError, Holes, Peers},
    pci::allocate::{PlaceError, Plan},
    sys::kvm::Vm,
    vcpu,
    vfio::assign::Claim,
};

/// Why memory and BARs do not fit the address space.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MapError {
    #[error(transparent)]
    Memory(#[from] HoleError),
    #[error(transparent)]
    Bars(#[from] PlaceError),
}

/// Where memory lies, and where BARs may.
pub(super) struct AddressMap {
    /// Pieces of guest memory: address and length, ascending.
    pub(super) ram: Vec<(u64, u64)>,
    /// First address of 32-bit PCI memory.
    pub(super) low: u64,
    /// Physical address bits of the host's CPUs.
    pub(super) bits: u8,
    /// Where neither may.
    pub(super) holes: Holes,
    peers: Peers,
}

impl AddressMap {
    /// Lays out `bytes` of memory.
    pub(super) fn new(
        bytes: u64,
        spec: &VmSpec,
        claim: Option<&Claim>,
        vm: &Arc<Vm>,
    ) -> Result<Self, BuildError> {
        let supported = vm.features();
        let mut holes = claim.map(Claim::holes).transpose()?.unwrap_or_default();
        // Also without a device: one may be attached later, when memory cannot move any more.
        if has_hypertransport(supported) {
            holes = holes.and(HYPERTRANSPORT);
        }
        if let Some(hole) = start::hole(&spec.boot) {
            holes = holes.and(hole);
        }
        let page = match spec.memory_backing {
            MemoryBacking::Memfd => 4096,
            MemoryBacking::Hugetlb2M => 2 << 20,
            MemoryBacking::Hugetlb1G => 1 << 30,
        };
        let ram = holes::ram(bytes, page, &holes).map_err(MapError::Memory)?;
        let peers = claim.map_or(Peers::Apart, Claim::peers);
        let (low, bits) = (start::low(&spec.boot), vcpu::address_bits(supported));
        Ok(Self { ram, low, bits, holes, peers })
    }

    /// Places BARs behind memory; `place` places them from an address on.
    pub(super) fn place(
        &self,
        place: impl Fn(u64) -> Result<Plan, PlaceError>,
    ) -> Result<Plan, BuildError> {
        let end = holes::end_of(&self.ram);
        let plan = holes::place_around(end, &self.holes, self.peers, place);
        Ok(plan.map_err(MapError::Bars)?)
    }
}

/// Whether the host has AMD's reserved addresses: the vendor of leaf 0 is AMD's or Hygon's.
fn has_hypertransport(supported: &CpuId) -> bool {
    let vendors = [*b"AuthenticAMD", *b"HygonGenuine"];
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0);
    leaf.is_some_and(|leaf| {
        let mut vendor = [0; 12];
        for (at, register) in [leaf.ebx, leaf.edx, leaf.ecx].into_iter().enumerate() {
            vendor[4 * at..4 * at + 4].copy_from_slice(&register.to_le_bytes());
        }
        vendors.contains(&vendor)
    })
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    #[test]
    fn only_amd_and_its_licensee_have_hypertransport() {
        let leaf = |ebx, edx, ecx| kvm_cpuid_entry2 { ebx, edx, ecx, ..Default::default() };
        let has = |leaf| has_hypertransport(&CpuId::from_entries(&[leaf]).expect("one"));
        assert!(has(leaf(0x6874_7541, 0x6974_6e65, 0x444d_4163)));
        assert!(!has(leaf(0x756e_6547, 0x4965_6e69, 0x6c65_746e)));
    }
}
