//! Running a virtual CPU.
//! Source: Linux Documentation/virt/kvm/api.rst, "The kvm_run structure".

use kvm_bindings::{KVM_EXIT_IO, kvm_run};
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
