//! Which system calls each kind of thread may make, and why. Anything else kills the process.
//!
//! Threads run their filter after they have started: what glibc does at thread start is here only for kinds that
//! start others, which begin behind their filter; what it does on the way out is here for all.

use std::collections::BTreeMap;

use libc::sock_filter;

use super::{
    ThreadKind::{self, Api, Block, Event, Main, Plug, Reset, Timer, Vcpu},
    filter::{self, Verdicts},
};

/// One allowed system call.
#[derive(Debug, Clone, Copy)]
pub struct Syscall {
    /// Its number.
    pub number: libc::c_long,
    /// Who may make it.
    pub kinds: &'static [ThreadKind],
    /// With which arguments.
    pub arguments: Arguments,
    /// What it is needed for.
    pub reason: &'static str,
}

/// What the arguments of an allowed system call must look like.
#[derive(Debug, Clone, Copy)]
pub enum Arguments {
    /// Anything.
    Any,
    /// Argument 2 is a protection without execution.
    NotExecutable,
    /// Argument 0 is this process.
    OwnProcess,
    /// Argument 1 is one of the requests.
    Request(&'static [u32]),
    /// Argument `.0` has the value `.1`, as far as the kernel takes it: its lower 32 bits.
    Equals(u8, u32),
}

const ALL: &[ThreadKind] = &[Main, Vcpu, Block, Api, Event, Plug, Reset, Timer];
const DEVICES: &[ThreadKind] = &[Main, Vcpu, Block, Api, Event, Plug, Timer];

/// KVM: run the virtual CPU, read and write its state.
const KVM_VCPU: &[u32] = &[
    0xae80,      // KVM_RUN
    0x8090_ae81, // KVM_GET_REGS, for the report of a fault
    0x8138_ae83, // KVM_GET_SREGS, likewise
    0xc008_ae88, // KVM_GET_MSRS, for a dump
    0xaead,      // KVM_KVMCLOCK_CTRL, after a pause
];
/// KVM: BARs that move, vectors that are routed, doorbells.
const KVM_MACHINE: &[u32] = &[
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0x4008_ae6a, // KVM_SET_GSI_ROUTING
    0x4020_ae76, // KVM_IRQFD
    0x4040_ae79, // KVM_IOEVENTFD
];
/// KVM: a device's line changes its level.
const KVM_LINE: &[u32] = &[
    0x4008_ae61, // KVM_IRQ_LINE
];
/// KVM: the interrupt button, and lines when the I/O APIC is ours.
const KVM_MESSAGE: &[u32] = &[
    0x4020_aea5, // KVM_SIGNAL_MSI
];
/// VFIO: the guest switches interrupts on and off.
const VFIO_INTERRUPTS: &[u32] = &[
    0x3b6e, // VFIO_DEVICE_SET_IRQS
];
/// VFIO and iommufd: devices reach each other's BARs where the guest has placed them.
const VFIO_PEERS: &[u32] = &[
    0x3b75, // VFIO_DEVICE_FEATURE: export part of a BAR
    0x3b8f, // IOMMU_IOAS_MAP_FILE
    0x3b86, // IOMMU_IOAS_UNMAP
    0x3b71, // VFIO_IOMMU_MAP_DMA; of a device, VFIO_DEVICE_PCI_HOT_RESET
    0x3b72, // VFIO_IOMMU_UNMAP_DMA
];
/// VFIO: devices are reset.
const VFIO_RESET: &[u32] = &[
    0x3b6f, // VFIO_DEVICE_RESET
    0x3b71, // VFIO_DEVICE_PCI_HOT_RESET
];
/// vhost and tap: a driver in the guest starts and stops its queues. What takes the descriptors over is done
/// before the filter.
const VHOST: &[u32] = &[
    0x4008_af00, // VHOST_SET_FEATURES
    0x4008_af10, // VHOST_SET_VRING_NUM
    0x4028_af11, // VHOST_SET_VRING_ADDR
    0x4008_af12, // VHOST_SET_VRING_BASE
    0x4008_af20, // VHOST_SET_VRING_KICK
    0x4008_af21, // VHOST_SET_VRING_CALL
    0x4008_af22, // VHOST_SET_VRING_ERR
    0x4008_af30, // VHOST_NET_SET_BACKEND
    0x4004_af61, // VHOST_VSOCK_SET_RUNNING
    0x4004_54d0, // TUNSETOFFLOAD
    0x4004_54d9, // TUNSETQUEUE
];
const PLUG: &[ThreadKind] = &[Plug];
/// Kinds that start threads behind their filter.
const STARTERS: &[ThreadKind] = &[Api, Plug];
/// What glibc's `pthread_create` asks `clone` for. Source: glibc sysdeps/unix/sysv/linux/clone-internal.c
/// and nptl/pthread_create.c; clone(2).
const THREAD_FLAGS: u32 = 0x003d_0f00;
/// VFIO and iommufd: a device is taken, looked at, and given guest memory.
const VFIO_DEVICES: &[u32] = &[
    0x3b66, // VFIO_SET_IOMMU
    0x3b67, // VFIO_GROUP_GET_STATUS
    0x3b68, // VFIO_GROUP_SET_CONTAINER
    0x3b6a, // VFIO_GROUP_GET_DEVICE_FD
    0x3b6b, // VFIO_DEVICE_GET_INFO
    0x3b6c, // VFIO_DEVICE_GET_REGION_INFO
    0x3b6d, // VFIO_DEVICE_GET_IRQ_INFO
    0x3b70, // VFIO_DEVICE_GET_PCI_HOT_RESET_INFO, VFIO_IOMMU_GET_INFO
    0x3b71, // VFIO_DEVICE_PCI_HOT_RESET, VFIO_IOMMU_MAP_DMA
    0x3b76, // VFIO_DEVICE_BIND_IOMMUFD
    0x3b77, // VFIO_DEVICE_ATTACH_IOMMUFD_PT
    0x3b84, // IOMMU_IOAS_IOVA_RANGES
    0x3b85, // IOMMU_IOAS_MAP
    0x3b8f, // IOMMU_IOAS_MAP_FILE
];
/// Block devices: their size and their blocks.
const DISK: &[u32] = &[
    0x8008_1272, // BLKGETSIZE64
    0x1268,      // BLKSSZGET
    0x127b,      // BLKPBSZGET
];

/// The whole table. A call that several rows allow is allowed if one of them matches.
pub const SYSCALLS: &[Syscall] = &[
    // Memory.
    row(libc::SYS_brk, ALL, Arguments::Any, "allocator"),
    row(libc::SYS_mmap, ALL, Arguments::NotExecutable, "allocator, stacks"),
    row(libc::SYS_mprotect, ALL, Arguments::NotExecutable, "allocator"),
    row(libc::SYS_mremap, ALL, Arguments::Any, "allocator, large buffers that grow"),
    row(libc::SYS_munmap, ALL, Arguments::Any, "allocator, stacks of threads that end"),
    row(libc::SYS_madvise, ALL, Arguments::Any, "allocator, stacks of threads that end"),
    // Threads and time.
    row(libc::SYS_futex, ALL, Arguments::Any, "locks, channels, joining"),
    row(libc::SYS_sched_yield, ALL, Arguments::Any, "contended locks and channels"),
    row(libc::SYS_nanosleep, ALL, Arguments::Any, "bounded waits"),
    row(libc::SYS_clock_nanosleep, ALL, Arguments::Any, "bounded waits"),
    row(libc::SYS_clock_gettime, ALL, Arguments::Any, "time, where the vDSO cannot tell it"),
    row(libc::SYS_getpid, ALL, Arguments::Any, "raising a signal, as abort does"),
    row(libc::SYS_gettid, ALL, Arguments::Any, "raising a signal, as abort does"),
    row(libc::SYS_tgkill, ALL, Arguments::OwnProcess, "kicking virtual CPUs out of KVM_RUN"),
    row(libc::SYS_rt_sigprocmask, ALL, Arguments::Any, "signal masks, also on thread exit"),
    row(libc::SYS_rt_sigaction, ALL, Arguments::Any, "abort puts back the default action"),
    row(libc::SYS_rt_sigreturn, ALL, Arguments::Any, "return of the kick's handler"),
    row(libc::SYS_sigaltstack, ALL, Arguments::Any, "thread exit gives back its signal stack"),
    row(libc::SYS_restart_syscall, ALL, Arguments::Any, "waits that a signal interrupted"),
    row(libc::SYS_rseq, ALL, Arguments::Any, "thread exit"),
    row(libc::SYS_exit, ALL, Arguments::Any, "thread exit"),
    row(libc::SYS_exit_group, ALL, Arguments::Any, "end of the process"),
    row(libc::SYS_getrandom, ALL, Arguments::Any, "hash seeds, virtio-rng"),
    // Descriptors that are open already.
    row(libc::SYS_read, ALL, Arguments::Any, "eventfds, timers, sockets"),
    row(libc::SYS_write, ALL, Arguments::Any, "eventfds, sockets, log lines"),
    row(libc::SYS_close, ALL, Arguments::Any, "connections that end"),
    row(libc::SYS_fstat, &[Api], Arguments::Any, "how much of guest memory has pages"),
    row(libc::SYS_lseek, PLUG, Arguments::Any, "size of disks"),
    row(
        libc::SYS_pread64,
        &[Main, Vcpu, Api, Plug, Reset],
        Arguments::Any,
        "registers of devices, guest memory for a dump",
    ),
    row(libc::SYS_pwrite64, &[Main, Vcpu, Plug], Arguments::Any, "registers of devices"),
    row(libc::SYS_preadv, &[Block, Plug], Arguments::Any, "disks"),
    row(libc::SYS_pwritev, &[Block, Plug], Arguments::Any, "disks"),
    row(
        libc::SYS_fdatasync,
        &[Vcpu, Block, Plug],
        Arguments::Any,
        "flushes, variables of firmware",
    ),
    row(libc::SYS_fallocate, &[Block, Plug], Arguments::Any, "virtio-blk discard"),
    row(libc::SYS_io_uring_enter, &[Block, Plug], Arguments::Any, "virtio-blk queues"),
    row(libc::SYS_eventfd2, &[Main, Vcpu, Plug], Arguments::Any, "vectors, doorbells"),
    row(
        libc::SYS_fcntl,
        ALL,
        Arguments::Equals(1, 1),
        "F_GETFD: debug builds look before they close",
    ),
    row(
        libc::SYS_fcntl,
        &[Main, Vcpu, Plug],
        Arguments::Equals(1, 1030),
        "F_DUPFD_CLOEXEC of eventfds",
    ),
    // Waiting.
    row(
        libc::SYS_ppoll,
        &[Block, Event, Plug, Api],
        Arguments::Any,
        "waits for orders, doorbells, completions; whether a client is still there",
    ),
    // The API socket.
    row(libc::SYS_recvmsg, &[Api], Arguments::Any, "API requests, with devices' descriptors"),
    row(libc::SYS_accept4, &[Api], Arguments::Any, "API connections"),
    row(libc::SYS_sendto, &[Api], Arguments::Any, "API responses"),
    row(libc::SYS_setsockopt, &[Api], Arguments::Any, "deadlines of API connections"),
    row(libc::SYS_shutdown, &[Api], Arguments::Equals(1, 1), "SHUT_WR: nothing follows a refusal"),
    row(libc::SYS_lseek, &[Api], Arguments::Any, "holes in guest memory, for a dump"),
    // Threads of disks, of resets, and of more connections.
    row(libc::SYS_clone, STARTERS, Arguments::Equals(0, THREAD_FLAGS), "threads, nothing else"),
    row(libc::SYS_clone3, STARTERS, Arguments::Any, "answered by ENOSYS: its flags are in memory"),
    row(libc::SYS_set_robust_list, STARTERS, Arguments::Any, "thread start"),
    row(libc::SYS_sched_getaffinity, STARTERS, Arguments::Any, "thread start"),
    row(libc::SYS_prctl, STARTERS, Arguments::Equals(0, 15), "PR_SET_NAME at thread start"),
    // Devices of the kernel.
    row(libc::SYS_ioctl, &[Vcpu], Arguments::Request(KVM_VCPU), "running the virtual CPU"),
    row(
        libc::SYS_ioctl,
        &[Main, Vcpu, Plug],
        Arguments::Request(KVM_MACHINE),
        "BARs, vectors, doorbells",
    ),
    row(libc::SYS_ioctl, DEVICES, Arguments::Request(KVM_LINE), "interrupt lines"),
    row(libc::SYS_ioctl, DEVICES, Arguments::Request(KVM_MESSAGE), "interrupts as messages"),
    row(
        libc::SYS_ioctl,
        &[Main, Vcpu, Plug],
        Arguments::Request(VFIO_INTERRUPTS),
        "VFIO interrupts",
    ),
    row(libc::SYS_ioctl, &[Main, Vcpu, Plug], Arguments::Request(VFIO_PEERS), "BARs of peers"),
    row(libc::SYS_ioctl, &[Main, Plug, Reset], Arguments::Request(VFIO_RESET), "VFIO reset"),
    row(libc::SYS_ioctl, &[Event], Arguments::Request(VHOST), "vhost queues start and stop"),
    // Devices that come later: their threads' filters, their rings, their descriptors.
    row(libc::SYS_prctl, PLUG, Arguments::Equals(0, 38), "PR_SET_NO_NEW_PRIVS before a filter"),
    row(libc::SYS_seccomp, PLUG, Arguments::Equals(0, 1), "filters of the threads it starts"),
    row(libc::SYS_io_uring_setup, PLUG, Arguments::Any, "rings of disks"),
    row(libc::SYS_io_uring_register, PLUG, Arguments::Any, "rings of disks are restricted"),
    row(libc::SYS_fstat, PLUG, Arguments::Any, "size of disks"),
    row(libc::SYS_fcntl, PLUG, Arguments::Equals(1, 3), "F_GETFL of disks"),
    row(libc::SYS_prlimit64, PLUG, Arguments::Any, "the limit on locked memory, for its message"),
    row(libc::SYS_ioctl, PLUG, Arguments::Request(DISK), "size of disks"),
    row(libc::SYS_ioctl, PLUG, Arguments::Request(VFIO_DEVICES), "devices that are taken"),
];

const fn row(
    number: libc::c_long,
    kinds: &'static [ThreadKind],
    arguments: Arguments,
    reason: &'static str,
) -> Syscall {
    Syscall { number, kinds, arguments, reason }
}

/// Translates the rows of `kind` for the kernel, into filters to install in this order.
pub(super) fn compile(kind: ThreadKind) -> Vec<Vec<sock_filter>> {
    let starts = STARTERS.contains(&kind);
    starts.then(refuse_clone3).into_iter().chain([allow(kind)]).collect()
}

/// A filter that says that there is no `clone3`: the flags of `clone`, which glibc then takes, can be
/// looked at. Of the answers of several filters the strictest counts, so the other one has to allow it.
fn refuse_clone3() -> Vec<sock_filter> {
    let absent = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let calls = BTreeMap::from([(number(libc::SYS_clone3), vec![Arguments::Any])]);
    filter::program(&calls, Verdicts { listed: absent, other: libc::SECCOMP_RET_ALLOW })
}

fn allow(kind: ThreadKind) -> Vec<sock_filter> {
    let mut calls: BTreeMap<u32, Vec<Arguments>> = BTreeMap::new();
    for row in SYSCALLS.iter().filter(|row| row.kinds.contains(&kind)) {
        calls.entry(number(row.number)).or_default().push(row.arguments);
    }
    let other = libc::SECCOMP_RET_KILL_PROCESS;
    filter::program(&calls, Verdicts { listed: libc::SECCOMP_RET_ALLOW, other })
}

/// A call's number as the kernel has it, which libc gives as signed.
fn number(number: libc::c_long) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_compiles_below_the_kernels_limit() {
        for kind in ALL {
            for program in compile(*kind) {
                assert!(program.len() < 4096, "{kind:?}: {}", program.len());
            }
        }
    }

    #[test]
    fn nothing_that_opens_starts_or_attaches_is_allowed() {
        let never = [
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_process_vm_readv,
            libc::SYS_unshare,
            libc::SYS_setns,
        ];
        assert!(SYSCALLS.iter().all(|row| !never.contains(&row.number)));
        // What attaching a device takes is for the thread that does it alone.
        let plug = [libc::SYS_seccomp, libc::SYS_io_uring_setup, libc::SYS_io_uring_register];
        let theirs = SYSCALLS.iter().filter(|row| plug.contains(&row.number));
        assert!(theirs.into_iter().all(|row| row.kinds == PLUG));
        let clones = [libc::SYS_clone, libc::SYS_clone3];
        let starting = SYSCALLS.iter().filter(|row| clones.contains(&row.number));
        assert!(starting.into_iter().all(|row| row.kinds == STARTERS));
    }

    #[test]
    fn whoever_starts_threads_may_do_what_they_do() {
        let mine = |kind: ThreadKind| SYSCALLS.iter().filter(move |row| row.kinds.contains(&kind));
        for row in mine(Block).chain(mine(Reset)) {
            assert!(row.kinds.contains(&Plug), "{}", row.reason);
        }
    }
}
