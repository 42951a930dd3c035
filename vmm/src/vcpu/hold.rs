//! What a virtual CPU does when somebody wants it to wait.
//! Source: Linux Documentation/virt/kvm/api.rst, "KVM_RUN" and "The kvm_run structure"
//! (`immediate_exit`; when guest state is consistent), "KVM_KVMCLOCK_CTRL".

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::{Step, step};
use crate::{counters::Exits, machine::Board};

/// MSR that swaps with the base of GS when a kernel is entered.
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// Accesses that a virtual CPU completes before it waits. One instruction makes few; one that makes
/// more, as a long string instruction, is tried again after it ran on.
const MAX_SETTLE: usize = 64;

/// The registers of a virtual CPU that a dump tells.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Registers {
    /// General registers.
    pub general: kvm_regs,
    /// Segments and control registers.
    pub special: kvm_sregs,
    /// Base of GS in the kernel, or in user space while the kernel runs.
    pub kernel_gs_base: u64,
}

/// Completes what the guest had asked for, then waits.
pub(super) fn wait(id: u32, vcpu: &mut VcpuFd, board: &Board, exits: &Exits) {
    if !settle(vcpu, board, exits) {
        return;
    }
    // A CPU that cannot be read is no reason to run on; the dump shows zeroes.
    board.pauses.park(id, read(vcpu).unwrap_or_default());
    // So that the guest's watchdogs do not take the pause for a lockup. A guest that does not use
    // KVM's clock has none to tell.
    let _ = vcpu.kvmclock_ctrl();
}

/// Enters KVM, without running the guest, until no answer of ours is pending.
fn settle(vcpu: &mut VcpuFd, board: &Board, exits: &Exits) -> bool {
    vcpu.set_kvm_immediate_exit(1);
    let mut settled = false;
    for _ in 0..MAX_SETTLE {
        match step(vcpu, board, exits) {
            Step::Interrupted => {
                settled = true;
                break;
            }
            Step::Handled | Step::Vectoring(_) => {}
            Step::Ended(ending) => {
                board.control.end(ending);
                break;
            }
        }
    }
    vcpu.set_kvm_immediate_exit(0);
    settled
}

fn read(vcpu: &VcpuFd) -> Result<Registers, kvm_ioctls::Error> {
    let entry = kvm_msr_entry { index: KERNEL_GS_BASE, ..Default::default() };
    let mut msrs =
        Msrs::from_entries(&[entry]).map_err(|_| kvm_ioctls::Error::new(libc::ENOMEM))?;
    let read = vcpu.get_msrs(&mut msrs)?;
    let kernel_gs_base = msrs.as_slice().first().filter(|_| read == 1).map_or(0, |msr| msr.data);
    Ok(Registers { general: vcpu.get_regs()?, special: vcpu.get_sregs()?, kernel_gs_base })
}
