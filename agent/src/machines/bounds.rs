//! What a machine's process may take of the host: its cgroup's bounds, from its specification. They end no process
//! that is sound, and keep one that is not from hurting its neighbours.

use std::collections::BTreeSet;

use types::vm::{MAX_DISK_QUEUES, MAX_DISK_WORKERS, MAX_QUEUE_PAIRS, MemoryBacking, VmSpec};

use crate::spawn::SpawnOrder;

/// Threads of a process whatever its devices are: those of the API, which are 32 at most, some that wait for
/// something, entropy and vsock, and what KVM and vhost have beside them.
const BASE_TASKS: u32 = 64;

/// Of them, threads that fetch memory before there are vCPUs: as many as keep the memory of a node busy,
/// and far from the limit.
pub(super) const FETCHING: u32 = BASE_TASKS / 2;

/// Tasks of a disk: a thread for each queue, and the kernel's workers for that thread's ring, which count as tasks
/// of the process. A ring whose worker cannot be made fails its requests.
/// Source: Linux io_uring/io-wq.c, `create_io_worker`.
const DISK_TASKS: u32 = MAX_DISK_QUEUES as u32 * (1 + MAX_DISK_WORKERS);

/// Tasks of a network card: its thread, and vhost's for each pair of queues, which is a task of the process, too.
/// Source: Linux kernel/vhost_task.c, `vhost_task_create`.
const NET_TASKS: u32 = 1 + MAX_QUEUE_PAIRS;

/// Tasks of a passed-through device: one while it is reset.
const DEVICE_TASKS: u32 = 1;

/// Bytes beside the guest's memory: the process itself, pages of its disks that the kernel keeps, and the kernel's
/// tables for it.
const BASE_BYTES: u64 = 128 << 20;

/// The same for a guest of huge pages, which do not count. A guest of other pages has room for more of its disks'
/// where it did not touch its memory.
const BASE_BYTES_HUGE: u64 = 384 << 20;

/// Returns the order to start the process of `spec`.
pub(super) fn order(spec: &VmSpec) -> SpawnOrder {
    SpawnOrder {
        machine: spec.machine,
        memory_bytes: memory_bytes(spec),
        tasks: tasks(spec),
        cpus: cpus(spec).into_iter().collect(),
    }
}

/// Returns how many bytes may count against the process. Huge pages do not (Linux
/// Documentation/admin-guide/cgroup-v2.rst, "memory_hugetlb_accounting"); of a guest that has them, the tables do
/// that KVM and the IOMMU may need for pages of 4 KiB, 8 bytes for each in either.
fn memory_bytes(spec: &VmSpec) -> u64 {
    let memory = spec.memory_mib.to_bytes().unwrap_or(u64::MAX);
    match spec.memory_backing {
        MemoryBacking::Memfd => memory.saturating_add(memory / 16).saturating_add(BASE_BYTES),
        MemoryBacking::Hugetlb2M | MemoryBacking::Hugetlb1G => {
            (memory / 256).saturating_add(BASE_BYTES_HUGE)
        }
    }
}

fn tasks(spec: &VmSpec) -> u32 {
    let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
    let devices = spec.passthrough.as_ref().map_or(0, |passed| passed.devices.len());
    // A spare port may have either.
    let spare = count(spec.spare_ports.len());
    let disks = count(spec.disks.len()).saturating_add(spare).saturating_mul(DISK_TASKS);
    let nets = count(spec.nets.len()).saturating_mul(NET_TASKS);
    let devices = count(devices).saturating_add(spare).saturating_mul(DEVICE_TASKS);
    [spec.vcpus, disks, nets, devices].into_iter().fold(BASE_TASKS, u32::saturating_add)
}

/// Returns the CPUs that the process may run on: those promised to the machine, whatever its threads do, and where
/// it has memory on a node without any, those that fetch it.
fn cpus(spec: &VmSpec) -> BTreeSet<u32> {
    let promised = spec.cpu_affinity.iter().flatten();
    let fetching = spec.host_memory.iter().flat_map(|part| &part.cpus);
    // Without a promise there is no bound.
    let all = promised.chain(fetching).copied();
    if spec.cpu_affinity.is_empty() { BTreeSet::new() } else { all.collect() }
}

#[cfg(test)]
mod tests {
    use types::vm::HostMemory;

    use super::*;

    fn spec(vcpus: u32, disks: usize, spare: usize) -> VmSpec {
        let machine = types::ids::MachineId::from_bytes([7; 16]);
        let disk =
            serde_json::json!({"fd": 9, "read_only": false, "serial": "a", "model": "virtio-blk"});
        let port = serde_json::json!({"memory_mib": 1, "prefetchable_mib": 0});
        let text = serde_json::json!({
            "version": 1, "machine": machine, "uid": 100_000, "vcpus": vcpus, "memory_mib": 1024,
            "memory_backing": "memfd", "boot": {"kind": "linux", "kernel_fd": 4, "initrd_fd": null, "cmdline": ""},
            "disks": vec![disk; disks], "nets": [], "vsock": null, "passthrough": null,
            "spare_ports": vec![port; spare], "kvm_fd": 5, "api_fd": 6,
        });
        serde_json::from_value(text).expect("a specification")
    }

    /// Each queue of each disk has its thread and its workers, also of those that come later.
    #[test]
    fn every_queue_of_every_disk_can_have_its_workers() {
        let order = order(&spec(8, 2, 8));
        assert!(order.tasks >= 8 + 32 + 10 * 4 * 3, "{order:?}");
        assert_eq!(order.memory_bytes, (1 << 30) + (1 << 26) + (128 << 20));
    }

    /// Otherwise one tenant's disks would fill the little memory that huge pages leave to all.
    #[test]
    fn huge_pages_do_not_count() {
        let mut spec = spec(1, 1, 0);
        spec.memory_backing = MemoryBacking::Hugetlb2M;
        assert_eq!(order(&spec).memory_bytes, (4 << 20) + (384 << 20));
    }

    #[test]
    fn a_process_runs_where_its_machine_has_cpus_and_fetches_memory() {
        let mut spec = spec(2, 0, 0);
        assert!(order(&spec).cpus.is_empty(), "nothing was promised");
        spec.cpu_affinity = vec![vec![6], vec![2]];
        assert_eq!(order(&spec).cpus, [2, 6]);
        let memory_mib = spec.memory_mib;
        spec.host_memory = vec![HostMemory { node: Some(1), memory_mib, cpus: vec![9, 6] }];
        assert_eq!(order(&spec).cpus, [2, 6, 9]);
    }
}
