//! Values of the hardware's schemas.

use lease::hardware::{
    Attach, Attachment, AttachmentState, Attachments, DiskWanted, Hardware, MemoryPlace, Placement,
};
use types::{
    ids::ContentId,
    node::Bdf,
    units::Mebibytes,
    vm::{DiskModel, HyperV, MemoryBacking, Rate, RateLimit, VfioInterface},
};

const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };

pub(crate) const LIMIT: RateLimit =
    RateLimit { bytes: Some(Rate { per_second: 9, burst: 9 }), operations: None };

pub(crate) const BACKINGS: [MemoryBacking; 3] =
    [MemoryBacking::Memfd, MemoryBacking::Hugetlb2M, MemoryBacking::Hugetlb1G];

pub(crate) fn chosen() -> Hardware {
    Hardware {
        disk_model: DiskModel::Nvme,
        hyperv: HyperV::On,
        disk_mib: Some(Mebibytes(8)),
        spare_ports: 2,
        plugged_later: vec![DEVICE],
    }
}

pub(crate) fn placement() -> Placement {
    let place = |backing| MemoryPlace { node: Some(1), memory_mib: Mebibytes(2), backing };
    Placement {
        cpus: vec![4, 12],
        memory: BACKINGS.map(place).to_vec(),
        numa_nodes: 2,
        interface: Some(VfioInterface::Group),
        peer_to_peer: true,
        cliques: vec![vec![DEVICE]],
        notes: vec!["a reason".into()],
    }
}

pub(crate) fn attached() -> [Attach; 2] {
    let disk = DiskWanted {
        name: "data".into(),
        size_mib: Some(Mebibytes(8)),
        model: DiskModel::Nvme,
        content: Some(ContentId::from_bytes([3; 32])),
    };
    [Attach::Disk(disk), Attach::Pci { address: DEVICE }]
}

pub(crate) fn states() -> [AttachmentState; 6] {
    use AttachmentState::{Attached, Detached, Failed, Leaving, Pending, Waiting};
    // A state that is added must be added here: this match is checked to be complete.
    let listed = |state| match state {
        Pending | Waiting | Attached | Leaving | Detached | Failed => state,
    };
    [Pending, Waiting, Attached, Leaving, Detached, Failed].map(listed)
}

pub(crate) fn attachments() -> Attachments {
    let describe = |device: Attach| Attachment {
        id: device.id(),
        device,
        state: AttachmentState::Failed,
        detail: "why".into(),
    };
    Attachments { devices: attached().map(describe).to_vec() }
}
