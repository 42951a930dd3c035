//! What a machine asks of KVM before its first virtual CPU, where KVM has it, and what CPUs KVM offers.

use kvm_bindings::{
    CpuId, KVM_BUS_LOCK_DETECTION_EXIT, KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_BUS_LOCK_EXIT,
    KVM_CAP_X86_NOTIFY_VMEXIT, KVM_MAX_CPUID_ENTRIES, KVM_PMU_CAP_DISABLE,
    KVM_X86_NOTIFY_VMEXIT_ENABLED, Msrs, kvm_enable_cap, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Error, Kvm, VmFd};

/// CPUID leaf 1, ecx: a timer that rings when the time-stamp counter reaches a deadline.
const DEADLINE_TIMER: u32 = 1 << 24;

/// Returns what CPUs of guests can do.
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_GET_SUPPORTED_CPUID`".
pub(super) fn features(kvm: &Kvm) -> Result<CpuId, Error> {
    let mut features = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    if kvm.check_extension(Cap::TscDeadlineTimer) {
        add_deadline_timer(&mut features);
    }
    Ok(features)
}

/// KVM tells of this timer by a capability, since it is of the local APIC, which can be somebody else's; older
/// releases, 6.12 among them, do not list it.
fn add_deadline_timer(features: &mut CpuId) {
    let leaves = features.as_mut_slice().iter_mut().filter(|leaf| leaf.function == 1);
    leaves.for_each(|leaf| leaf.ecx |= DEADLINE_TIMER);
}

/// Has each lock of the memory bus by a guest end `KVM_RUN`, where the CPU can say so (Intel since
/// Sapphire Rapids, AMD since Zen 5).
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_CAP_X86_BUS_LOCK_EXIT`".
pub(super) fn tell_bus_locks(kvm: &Kvm, fd: &VmFd) -> Result<(), Error> {
    enable(kvm, fd, KVM_CAP_X86_BUS_LOCK_EXIT, KVM_BUS_LOCK_DETECTION_EXIT)
}

/// Keeps performance counters from guests: without this KVM gives a guest on AMD the four that every processor
/// has had since the K7, whatever CPUID says.
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_CAP_PMU_CAPABILITY`".
pub(super) fn withhold_counters(kvm: &Kvm, fd: &VmFd) -> Result<(), Error> {
    enable(kvm, fd, KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE)
}

/// Has a processor leave the guest when that lets no event in for a while (Intel since Sapphire Rapids): KVM enters it
/// again, and what waited comes in between. Else such a guest keeps a processor of the host's from everybody. Where the
/// processor lost the guest's state on the way, there is none to enter: that ends `KVM_RUN` (`KVM_EXIT_NOTIFY`).
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_CAP_X86_NOTIFY_VMEXIT`"; arch/x86/kvm/vmx/vmx.c,
/// `handle_notify`.
pub(super) fn bound_stays(kvm: &Kvm, fd: &VmFd) -> Result<(), Error> {
    enable(kvm, fd, KVM_CAP_X86_NOTIFY_VMEXIT, KVM_X86_NOTIFY_VMEXIT_ENABLED)
}

/// The register that tells the release of a processor's microcode (`IA32_BIOS_SIGN_ID`; Linux
/// arch/x86/include/asm/msr-index.h, `MSR_AMD64_PATCH_LEVEL`).
pub const MSR_MICROCODE: u32 = 0x8b;

/// Returns the release of the host's microcode; `None` where KVM does not tell it, or there is none.
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_GET_MSRS`", as of the system.
pub(super) fn microcode(kvm: &Kvm) -> Option<u64> {
    let asked = kvm_msr_entry { index: MSR_MICROCODE, ..Default::default() };
    let mut told = Msrs::from_entries(&[asked]).ok()?;
    let read = kvm.get_msrs(&mut told).ok()?;
    told.as_slice().iter().take(read).map(|entry| entry.data).find(|release| *release != 0)
}

/// Switches `mode` of a capability on, where KVM has it.
fn enable(kvm: &Kvm, fd: &VmFd, cap: u32, mode: u32) -> Result<(), Error> {
    if !offers(kvm.check_extension_raw(cap.into()), mode) {
        return Ok(());
    }
    fd.enable_cap(&kvm_enable_cap { cap, args: [mode.into(), 0, 0, 0], ..Default::default() })
}

/// Whether KVM has a mode, by what it answers of the capability: the modes it has, nothing where it has
/// none, or an error.
fn offers(modes: i32, mode: u32) -> bool {
    u32::try_from(modes).is_ok_and(|modes| modes & mode != 0)
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    #[test]
    fn the_deadline_timer_joins_what_leaf_1_has() {
        let leaf = |function| kvm_cpuid_entry2 { function, ecx: 3, ..Default::default() };
        let mut features = CpuId::from_entries(&[leaf(0), leaf(1)]).expect("few");
        add_deadline_timer(&mut features);
        let told: Vec<u32> = features.as_slice().iter().map(|leaf| leaf.ecx).collect();
        assert_eq!(told, [3, 1 << 24 | 3]);
    }

    #[test]
    fn locks_of_the_bus_are_told_where_kvm_has_that_mode() {
        // None at all, only that they are not told, both; and an error.
        let told = [0, 1, 3, -1].map(|modes| offers(modes, KVM_BUS_LOCK_DETECTION_EXIT));
        assert_eq!(told, [false, false, true, false]);
    }
}
