//! Running a virtual CPU.
//! Source: Linux Documentation/virt/kvm/api.rst, "The kvm_run structure".

use std::fmt;

use kvm_bindings::{KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO, kvm_run};
use kvm_ioctls::{Error, VcpuExit, VcpuFd};

/// Runs up to one exit. Beside it returns the width of one access when the exit is one of ports,
/// whose data may hold several; at least 1.
pub fn run(vcpu: &mut VcpuFd) -> (Result<VcpuExit<'_>, Error>, usize) {
    let shared: *const kvm_run = vcpu.get_kvm_run();
    let exit = vcpu.run();
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
