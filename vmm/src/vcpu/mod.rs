//! Virtual CPUs: what the guest sees of them, how they start, and the loop that runs them.

mod bus_lock;
mod caches;
mod cpuid;
mod cpus;
mod hold;
mod hyperv;
mod registers;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvm_bindings::{
    KVM_EXIT_NOTIFY, KVM_EXIT_X86_BUS_LOCK, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_SYSTEM_EVENT_CRASH,
    KVM_SYSTEM_EVENT_RESET,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use types::vm::HyperV;

pub use caches::processors;
pub use cpuid::address_bits;
pub use cpus::Cpus;
pub use hold::Registers;

use crate::{
    boot::Entry,
    counters::Exits,
    devices::pvpanic::Report,
    machine::{Board, Ending, Kind},
    sys::{
        self,
        kvm::{Controllers, KvmError},
        memory::Ram,
    },
};

/// Why a virtual CPU cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum VcpuError {
    #[error("cannot {what} of virtual CPU {id}")]
    Set { what: &'static str, id: u32, source: kvm_ioctls::Error },
    #[error("cannot write the first CPU's tables into guest memory: {0}")]
    Tables(String),
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Creates all virtual CPUs; the first starts at `entry`, the others wait to be started by it.
pub fn create(
    board: &Board,
    cpus: &Cpus,
    entry: Entry,
    ram: &Ram,
) -> Result<Vec<VcpuFd>, VcpuError> {
    let controllers = Controllers::of(cpus.id_limit());
    let locals = cpuid::local_apics(board.vm.features());
    (0..)
        .zip(cpus.ids())
        .map(|(id, apic)| {
            let vcpu = board.vm.create_vcpu(*apic)?;
            let mut features = cpuid::for_vcpu(board.vm.features(), *apic, cpus);
            let failed = |what| move |source| VcpuError::Set { what, id, source };
            if board.hyperv == HyperV::On {
                let leaves =
                    hyperv::enable(&vcpu).map_err(failed("switch on the Hyper-V interfaces"))?;
                hyperv::replace(&mut features, &leaves, (controllers, locals));
            } else if let Ok(tsc_khz) = vcpu.get_tsc_khz() {
                cpuid::tell_frequency(&mut features, tsc_khz);
            }
            vcpu.set_cpuid2(&features).map_err(failed("set the features"))?;
            registers::set_extended_state(&vcpu, cpuid::extended_state(&features))
                .map_err(failed("set the extended state"))?;
            registers::set_msrs(&vcpu, entry, board.vm.microcode())
                .map_err(failed("set the model-specific registers"))?;
            if controllers == Controllers::Split && entry != Entry::Reset {
                registers::widen_local_apic(&vcpu).map_err(failed("switch on x2APIC mode"))?;
            }
            registers::set_local_apic(&vcpu).map_err(failed("set the local APIC"))?;
            if id == 0 {
                registers::set_entry(&vcpu, entry, ram)?;
            }
            Ok(vcpu)
        })
        .collect()
}

/// How often in a row a virtual CPU is run again after KVM met an access to a device while an event
/// was being delivered. Once is enough where the event was none: KVM takes the type field of SVM's
/// EXITINTINFO for an event even when its valid bit says there is none (AMD64 APM volume 2 §15.7.2),
/// and QEMU's emulation leaves that field of the last exception behind. A second time in a row means
/// that the guest truly keeps its interrupt descriptors or its stack in a device.
const VECTORING_RETRIES: u8 = 1;
/// How long a virtual CPU that waits for INIT sleeps before it asks KVM again: too short to be noticed where hundreds
/// are started one by one, and long enough that those which are never started cost little.
const UNINITIALISED: Duration = Duration::from_micros(100);

/// Runs virtual CPU `id` until the machine ends.
pub fn run(id: u32, mut vcpu: VcpuFd, board: &Arc<Board>) {
    let nobody = Exits::default();
    let exits = usize::try_from(id).ok().and_then(|at| board.exits.get(at)).unwrap_or(&nobody);
    let mut retries = VECTORING_RETRIES;
    let mut pace = bus_lock::Pace::new(Instant::now());
    board.pauses.enlist(id);
    while !board.control.is_ended() {
        if board.pauses.is_wanted() {
            hold::wait(id, &mut vcpu, board, exits);
            continue;
        }
        match step(&mut vcpu, board, exits) {
            Step::Handled | Step::Interrupted => retries = VECTORING_RETRIES,
            Step::Vectoring(_) if retries > 0 => retries -= 1,
            Step::Vectoring(ending) | Step::Ended(ending) => board.control.end(ending),
        }
        if bus_lock::told(vcpu.get_kvm_run().flags) {
            thread::sleep(pace.wait(exits, Instant::now()));
        }
    }
}

/// What one exit came to.
enum Step {
    /// The guest can go on.
    Handled,
    /// A signal came before the guest ran or while it did; what it had asked for is complete.
    Interrupted,
    /// The guest touched a device while an event was being delivered, says KVM; running it again
    /// may do. Otherwise the machine ends like this.
    Vectoring(Ending),
    /// The machine ends.
    Ended(Ending),
}

impl From<Option<Ending>> for Step {
    fn from(ending: Option<Ending>) -> Self {
        ending.map_or(Self::Handled, Self::Ended)
    }
}

/// Runs up to one exit.
fn step(vcpu: &mut VcpuFd, board: &Board, exits: &Exits) -> Step {
    let (exit, width) = sys::vcpu::run(vcpu);
    match exit {
        // String instructions bring several accesses to the same port at once.
        Ok(VcpuExit::IoIn(port, data)) => {
            exits.port_reads.add(1);
            data.chunks_mut(width).for_each(|access| board.read_port(port, access));
            Step::Handled
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            exits.port_writes.add(1);
            data.chunks(width).find_map(|access| board.write_port(port, access)).into()
        }
        Ok(VcpuExit::MmioRead(address, data)) => {
            exits.memory_reads.add(1);
            board.read_memory(address, data);
            Step::Handled
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            exits.memory_writes.add(1);
            board.write_memory(address, data).into()
        }
        Ok(exit) if asks_for_nothing(&exit) => {
            exits.others.add(1);
            Step::Handled
        }
        Ok(VcpuExit::IoapicEoi(vector)) => {
            exits.others.add(1);
            board.end_interrupt(vector).into()
        }
        Ok(VcpuExit::Shutdown) => Step::Ended(Ending::guest_fault("triple fault")),
        Ok(VcpuExit::FailEntry(reason, cpu)) => Step::Ended(Ending::host_fault(format!(
            "CPU {cpu} cannot enter the guest, reason {reason:#x}"
        ))),
        Ok(VcpuExit::InternalError) => internal_error(vcpu),
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _)) => {
            board.note_panic(Report::Panicked);
            Step::Handled
        }
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Step::Ended(Ending {
            kind: Kind::Reset,
            reason: "the guest asked for a reset".to_owned(),
        }),
        Ok(VcpuExit::SystemEvent(kind, _)) => {
            Step::Ended(Ending::guest_fault(format!("system event {kind}")))
        }
        Ok(VcpuExit::Hyperv) => {
            exits.others.add(1);
            sys::vcpu::refuse_hypercall(vcpu);
            Step::Handled
        }
        Ok(other) => Step::Ended(unanswered(&other)),
        Err(error) if error.errno() == libc::EINTR => {
            exits.kicks.add(1);
            broken_memory(board).map_or(Step::Interrupted, Step::Ended)
        }
        Err(error) if error.errno() == libc::EAGAIN => {
            // A processor that waited for INIT was woken: by that, or by an NMI, which wakes it again and again as long
            // as it waits (arch/x86/kvm/x86.c, `kvm_arch_vcpu_ioctl_run`).
            exits.others.add(1);
            thread::sleep(UNINITIALISED);
            Step::Interrupted
        }
        Err(error) => Step::Ended(Ending::host_fault(format!("KVM cannot run the guest: {error}"))),
    }
}

/// How the machine ends when some virtual CPU touched memory that is broken.
fn broken_memory(board: &Board) -> Option<Ending> {
    let address = sys::signal::broken_memory()?;
    let place = board.ram.guest_address(address);
    let place = place.map_or_else(String::new, |at| format!(", which the guest has at {at:#x}"));
    Some(Ending::host_fault(format!("a page of the host's memory is broken{place}")))
}

/// Whether there is nothing to be done before the guest goes on. A lock of the bus is dealt with by
/// [`run`], whatever it comes with.
fn asks_for_nothing(exit: &VcpuExit<'_>) -> bool {
    matches!(
        exit,
        VcpuExit::Intr
            | VcpuExit::Hlt
            | VcpuExit::IrqWindowOpen
            | VcpuExit::Unsupported(KVM_EXIT_X86_BUS_LOCK)
    )
}

/// How the machine ends by an exit that there is no answer to.
fn unanswered(exit: &VcpuExit<'_>) -> Ending {
    if matches!(exit, VcpuExit::Unsupported(KVM_EXIT_NOTIFY)) {
        // KVM deals with all others of these by itself (`sys::kvm::modes::bound_stays`).
        return Ending::guest_fault("the guest kept all events out, and its state was lost");
    }
    Ending::host_fault(format!("KVM left the guest for {exit:?}"))
}

fn internal_error(vcpu: &mut VcpuFd) -> Step {
    let place = vcpu.get_regs().map_or(0, |registers| registers.rip);
    let error = sys::vcpu::internal_error(vcpu);
    let what = error.as_ref().map_or_else(|| "an internal error".to_owned(), ToString::to_string);
    let ending = Ending::guest_fault(format!("KVM met {what} at {place:#x}"));
    if error.is_some_and(|error| error.suberror == KVM_INTERNAL_ERROR_DELIVERY_EV) {
        return Step::Vectoring(ending);
    }
    Step::Ended(ending)
}

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use super::cpus::tests::placed;
    use super::*;

    #[test]
    fn a_lock_of_the_bus_does_not_end_the_machine_and_what_nobody_knows_does() {
        assert!(asks_for_nothing(&VcpuExit::Unsupported(33)));
        assert!(asks_for_nothing(&VcpuExit::Hlt));
        assert!(!asks_for_nothing(&VcpuExit::Unsupported(99)));
        assert!(!asks_for_nothing(&VcpuExit::Shutdown));
    }

    /// The first is that of a guest whose state was lost (Linux include/uapi/linux/kvm.h, `KVM_EXIT_NOTIFY`).
    #[test]
    fn a_guest_that_keeps_events_out_is_at_fault_and_no_other_that_nobody_knows() {
        assert!(!asks_for_nothing(&VcpuExit::Unsupported(37)));
        assert_eq!(unanswered(&VcpuExit::Unsupported(37)).kind, Kind::GuestFault);
        assert_eq!(unanswered(&VcpuExit::Unsupported(99)).kind, Kind::HostFault);
    }
}
