//! Virtual CPUs: what the guest sees of them, how they start, and the loop that runs them.

mod cpuid;
mod registers;

use std::sync::Arc;

use kvm_ioctls::{VcpuExit, VcpuFd};

pub use cpuid::address_bits;

use crate::{
    boot::Entry,
    machine::{Board, Ending},
    sys::{self, kvm::KvmError, memory::Ram},
};

/// Why a virtual CPU cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum VcpuError {
    #[error("cannot {what} of virtual CPU {id}")]
    Set { what: &'static str, id: u8, source: kvm_ioctls::Error },
    #[error("cannot read the host's CPU features")]
    Features { source: kvm_ioctls::Error },
    #[error("cannot write the first CPU's tables into guest memory: {0}")]
    Tables(String),
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Creates all virtual CPUs; the first starts at `entry`, the others wait to be started by it.
pub fn create(board: &Board, count: u8, entry: Entry, ram: &Ram) -> Result<Vec<VcpuFd>, VcpuError> {
    let supported = board
        .vm
        .kvm()
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(|source| VcpuError::Features { source })?;
    (0..count)
        .map(|id| {
            let vcpu = board.vm.create_vcpu(id)?;
            let features = cpuid::for_vcpu(&supported, id, count);
            let failed = |what| move |source| VcpuError::Set { what, id, source };
            vcpu.set_cpuid2(&features).map_err(failed("set the features"))?;
            registers::set_msrs(&vcpu).map_err(failed("set the model-specific registers"))?;
            registers::set_local_apic(&vcpu).map_err(failed("set the local APIC"))?;
            if id == 0 {
                registers::set_entry(&vcpu, entry, ram)?;
            }
            Ok(vcpu)
        })
        .collect()
}

/// Runs a virtual CPU until the machine ends.
pub fn run(mut vcpu: VcpuFd, board: &Arc<Board>) {
    while !board.control.is_ended() {
        if let Some(ending) = step(&mut vcpu, board) {
            board.control.end(ending);
        }
    }
}

/// Runs up to one exit. Returns how the machine ends, if it does.
fn step(vcpu: &mut VcpuFd, board: &Board) -> Option<Ending> {
    let (exit, width) = sys::vcpu::run(vcpu);
    match exit {
        // String instructions bring several accesses to the same port at once.
        Ok(VcpuExit::IoIn(port, data)) => {
            data.chunks_mut(width).for_each(|access| board.read_port(port, access));
            None
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            data.chunks(width).find_map(|access| board.write_port(port, access))
        }
        Ok(VcpuExit::MmioRead(address, data)) => {
            board.read_memory(address, data);
            None
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            board.write_memory(address, data);
            None
        }
        Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen | VcpuExit::IoapicEoi(_)) => {
            None
        }
        Ok(VcpuExit::Shutdown) => Some(Ending::guest_fault("triple fault")),
        Ok(VcpuExit::FailEntry(reason, cpu)) => Some(Ending::host_fault(format!(
            "CPU {cpu} cannot enter the guest, reason {reason:#x}"
        ))),
        Ok(VcpuExit::InternalError) => {
            let place = vcpu.get_regs().map_or(0, |registers| registers.rip);
            let what = sys::vcpu::internal_error(vcpu).map(|error| format!("{error}"));
            let what = what.unwrap_or_else(|| "an internal error".to_owned());
            Some(Ending::guest_fault(format!("KVM met {what} at {place:#x}")))
        }
        Ok(VcpuExit::SystemEvent(kind, _)) => {
            Some(Ending::guest_fault(format!("system event {kind}")))
        }
        Ok(other) => Some(Ending::host_fault(format!("KVM left the guest for {other:?}"))),
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
            vcpu.set_kvm_immediate_exit(0);
            None
        }
        Err(error) => Some(Ending::host_fault(format!("KVM cannot run the guest: {error}"))),
    }
}
