//! Running a virtual CPU.
//! Source: Linux Documentation/virt/kvm/api.rst, "The kvm_run structure".

use std::{fmt, io, os::fd::AsRawFd};

use kvm_bindings::{
    CpuId, KVM_EXIT_HYPERV, KVM_EXIT_HYPERV_HCALL, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO,
    KVM_MAX_CPUID_ENTRIES, kvm_run,
};
use kvm_ioctls::{Error, VcpuExit, VcpuFd};

use super::signal;

/// `KVM_GET_SUPPORTED_HV_CPUID`: both ways, 8 bytes, type 0xae, number 0xc1.
const GET_SUPPORTED_HV_CPUID: libc::c_ulong = 0xc008_aec1;
/// Status of a hypercall that does not exist (Hyper-V TLFS, appendix B).
const INVALID_HYPERCALL_CODE: u64 = 2;

/// `ARCH_REQ_XCOMP_GUEST_PERM` (Linux arch/x86/include/uapi/asm/prctl.h), and the component of the
/// extended state that holds the data of tiles (Intel SDM vol. 1 §13.1, "XSAVE-Supported Features").
const REQUEST_GUEST_STATE: libc::c_ulong = 0x1025;
const TILE_DATA: libc::c_ulong = 18;

/// Whether guests of this process may have AMX, Intel's matrices of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiles {
    /// KVM keeps their state, and says so in leaf 0xd of CPUID.
    Kept,
    /// The CPU has none, or the kernel is older than Linux 5.17.
    Absent,
}

/// Asks that guests may have the state of AMX tiles: 8 KiB for each virtual CPU, which KVM therefore
/// keeps only for a process that wants it. Must come before the first virtual CPU. Asking again
/// changes nothing. Source: Linux Documentation/arch/x86/xstate.rst, "Dynamic features for virtual
/// machines".
///
/// # Errors
/// `EBUSY` when there is a virtual CPU already.
pub fn ask_for_tiles() -> io::Result<Tiles> {
    // SAFETY: the request takes a number and returns none.
    let ret = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_GUEST_STATE, TILE_DATA) };
    if ret == 0 {
        return Ok(Tiles::Kept);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A kernel that does not know the request; one that does, and a CPU without tiles.
        Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(Tiles::Absent),
        _ => Err(error),
    }
}

/// Runs up to one exit. Beside it returns the width of one access when the exit is one of ports,
/// whose data may hold several; at least 1.
pub fn run(vcpu: &mut VcpuFd) -> (Result<VcpuExit<'_>, Error>, usize) {
    let shared: *const kvm_run = vcpu.get_kvm_run();
    let exit = signal::in_guest(|| vcpu.run());
    // SAFETY: the structure is mapped as long as `vcpu`, which `exit` borrows; only this thread runs
    // the CPU, so the kernel does not write to it now. The size is no part of the data in `exit`,
    // and it is what the union holds at this reason.
    let width = unsafe {
        match (*shared).exit_reason {
            KVM_EXIT_IO => (&raw const (*shared).__bindgen_anon_1.io.size).read(),
            _ => 1,
        }
    };
    (exit, usize::from(width.max(1)))
}

/// Returns the Hyper-V leaves of CPUID that KVM can emulate for `vcpu`.
pub fn supported_hyperv(vcpu: &VcpuFd) -> Result<CpuId, Error> {
    let mut leaves = CpuId::new(KVM_MAX_CPUID_ENTRIES).map_err(|_| Error::new(libc::ENOMEM))?;
    // SAFETY: the structure says how many entries it has room for, and the kernel writes no more.
    let ret = unsafe {
        libc::ioctl(vcpu.as_raw_fd(), GET_SUPPORTED_HV_CPUID, leaves.as_mut_fam_struct_ptr())
    };
    if ret < 0 { Err(Error::last()) } else { Ok(leaves) }
}

/// Answers a hypercall that KVM left to us: there is none that we know.
pub fn refuse_hypercall(vcpu: &mut VcpuFd) {
    let run = vcpu.get_kvm_run();
    // SAFETY: it is what the union holds at this reason, and plain numbers.
    unsafe {
        let exit = &mut run.__bindgen_anon_1.hyperv;
        if run.exit_reason == KVM_EXIT_HYPERV && exit.type_ == KVM_EXIT_HYPERV_HCALL {
            exit.u.hcall.result = INVALID_HYPERCALL_CODE;
        }
    }
}

/// What KVM says of a guest that it cannot go on with (`KVM_EXIT_INTERNAL_ERROR`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalError {
    /// Number of the error, as `KVM_INTERNAL_ERROR_EMULATION`.
    pub suberror: u32,
    /// What belongs to it, by its number.
    pub data: Vec<u64>,
}

impl fmt::Display for InternalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.suberror {
            kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => "an instruction that it cannot emulate",
            kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions at once",
            kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while delivering an event",
            kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an exit it does not know",
            _ => "an error it does not name",
        };
        write!(f, "{what} (suberror {}, data", self.suberror)?;
        for value in &self.data {
            write!(f, " {value:#x}")?;
        }
        f.write_str(")")
    }
}

/// Returns what KVM said at the last exit, when that was an internal error.
pub fn internal_error(vcpu: &mut VcpuFd) -> Option<InternalError> {
    let run = vcpu.get_kvm_run();
    if run.exit_reason != KVM_EXIT_INTERNAL_ERROR {
        return None;
    }
    // SAFETY: it is what the union holds at this reason, and plain numbers.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let count = usize::try_from(internal.ndata).unwrap_or(usize::MAX).min(internal.data.len());
    Some(InternalError { suberror: internal.suberror, data: internal.data[..count].to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ARCH_GET_XCOMP_GUEST_PERM`: which components guests may have.
    const GUEST_STATE: libc::c_ulong = 0x1024;

    #[test]
    fn tiles_are_kept_exactly_where_the_kernel_says_that_guests_may_have_them() {
        for _ in 0..2 {
            let told = ask_for_tiles().expect("no virtual CPU is there");
            let mut allowed: u64 = 0;
            // SAFETY: the request writes 8 bytes to the pointer, or nothing.
            unsafe { libc::syscall(libc::SYS_arch_prctl, GUEST_STATE, &raw mut allowed) };
            assert_eq!(told == Tiles::Kept, allowed & 1 << TILE_DATA != 0, "{allowed:#x}");
        }
    }
}
