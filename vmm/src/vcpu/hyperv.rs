//! The interfaces that Windows knows from Hyper-V, as KVM emulates them: CPUID leaves 0x40000000
//! to 0x40000005, synthetic interrupts and timers, the reference counter page, hypercalls.
//! Source: Microsoft Hypervisor Top Level Functional Specification 6.0b, §2.4 "Hypervisor CPUID
//! Leaves"; Linux Documentation/virt/kvm/api.rst, "KVM_GET_SUPPORTED_HV_CPUID",
//! "KVM_CAP_HYPERV_SYNIC2", "KVM_CAP_HYPERV_ENFORCE_CPUID".
//!
//! | Leaf        | What the guest finds                                                      |
//! |-------------|---------------------------------------------------------------------------|
//! | 0x4000_0000 | last leaf 0x40000005, vendor "Microsoft Hv"                               |
//! | 0x4000_0001 | interface "Hv#1"                                                          |
//! | 0x4000_0002 | version, as KVM tells it                                                  |
//! | 0x4000_0003 | privileges: of what KVM has, those in [`PRIVILEGES`] and [`FEATURES`]     |
//! | 0x4000_0004 | recommendations: of what KVM has, those in [`RECOMMENDED`]; never spin    |
//! | 0x4000_0005 | limits, as KVM tells them                                                 |
//! | 0x4000_0080 | with an APIC id of 254 or more: last leaf 0x40000082, "Microsoft VS"      |
//! | 0x4000_0081 | likewise: interface "VS#1"                                                |
//! | 0x4000_0082 | likewise: eax bit 2, interrupts have destinations of 15 bits              |
//!
//! KVM's own leaves are not there: a guest that knows both would take KVM's.

use kvm_bindings::{
    CpuId, KVM_CAP_HYPERV_ENFORCE_CPUID, KVM_CAP_HYPERV_SYNIC2, kvm_cpuid_entry2, kvm_enable_cap,
};
use kvm_ioctls::VcpuFd;

use super::cpuid::LocalApics;
use crate::sys::{self, kvm::Controllers};

/// First leaf of a hypervisor, and the last that is used here.
const FIRST: u32 = 0x4000_0000;
const LAST: u32 = 0x4000_0005;
/// Leaves that belong to hypervisors: KVM's own are among them.
const HYPERVISOR_LEAVES: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4fff_ffff;

/// Leaf 3 EAX, "AccessPartitionReferenceCounter" and its neighbours.
pub(super) const PRIVILEGES: u32 = 1 << 0 // virtual processor run time
    | 1 << 1 // reference counter
    | 1 << 2 // synthetic interrupt controller
    | 1 << 3 // synthetic timers
    | 1 << 4 // interrupt control: EOI, ICR, TPR
    | 1 << 5 // hypercalls
    | 1 << 6 // virtual processor index
    | 1 << 7 // reset
    | 1 << 9 // reference TSC page
    | 1 << 11; // frequencies
/// Leaf 3 EDX. Bit 19, synthetic timers that interrupt without a message, is left out: under QEMU's
/// emulation of AMD-V they never fire. There KVM reads the guest's time-stamp counter as 0 for good, while
/// the guest's runs, so the reference counter by which KVM times them stands still; Linux, which prefers
/// them, gets no tick. Without the bit it uses the local APIC's timer.
pub(super) const FEATURES: u32 = 1 << 4 // hypercall input in XMM registers
    | 1 << 8 // frequency registers
    | 1 << 10; // registers for crash data
/// Leaf 4 EAX.
pub(super) const RECOMMENDED: u32 = 1 << 2 // flush other processors' address translations by hypercall
    | BY_REGISTERS
    | 1 << 5 // relaxed timing: no watchdogs over timer interrupts
    | 1 << 9 // no automatic end of interrupt
    | 1 << 10 // interrupt other processors by hypercall
    | 1 << 11; // sets of more than 64 processors
/// Leaf 4 EAX: control interrupts by Hyper-V's registers. Each access is an exit: cheaper than one to a local APIC in
/// memory, which KVM has to decode, and dearer than one to a virtual APIC, which is none.
pub(super) const BY_REGISTERS: u32 = 1 << 3;
/// Leaf 4 EBX: how often to try a lock before telling the hypervisor. This means never.
const NEVER_SPIN: u32 = u32::MAX;

/// First leaf of the virtualisation stack, and in eax of its third: destinations of 15 bits (Linux
/// include/hyperv/hvgdk_mini.h, HYPERV_VS_PROPERTIES_EAX_EXTENDED_IOAPIC_RTE).
const STACK: u32 = 0x4000_0080;
const WIDE_DESTINATIONS: u32 = 1 << 2;

/// Switches the interfaces of `vcpu` on, and returns the leaves that tell of them.
pub(super) fn enable(vcpu: &VcpuFd) -> Result<Vec<kvm_cpuid_entry2>, kvm_ioctls::Error> {
    let on = |cap, first| kvm_enable_cap { cap, args: [first, 0, 0, 0], ..Default::default() };
    vcpu.enable_cap(&on(KVM_CAP_HYPERV_SYNIC2, 0))?;
    let supported = sys::vcpu::supported_hyperv(vcpu)?;
    // So that what is not told does not work either. Kernels before 5.14 cannot.
    let _ = vcpu.enable_cap(&on(KVM_CAP_HYPERV_ENFORCE_CPUID, 1));
    Ok(leaves(&supported))
}

/// Puts `leaves` in the place of KVM's own.
pub(super) fn replace(
    features: &mut CpuId,
    leaves: &[kvm_cpuid_entry2],
    (pins, locals): (Controllers, LocalApics),
) {
    features.retain(|entry| !HYPERVISOR_LEAVES.contains(&entry.function));
    let wide = if pins == Controllers::Split { wide_destinations() } else { Vec::new() };
    for mut leaf in leaves.iter().chain(&wide).copied() {
        if leaf.function == FIRST + 4 && locals == LocalApics::Virtual {
            leaf.eax &= !BY_REGISTERS;
        }
        // As for the topology: a full list loses what was pushed last.
        let _ = features.push(leaf);
    }
}

/// Leaves of the virtualisation stack: the I/O APIC and messages have destinations of 15 bits.
fn wide_destinations() -> Vec<kvm_cpuid_entry2> {
    let [ebx, ecx, edx] = [*b"Micr", *b"osof", *b"t VS"].map(u32::from_le_bytes);
    let leaf = |function, eax| kvm_cpuid_entry2 { function, eax, ..Default::default() };
    let vendor = leaf(STACK, STACK + 2);
    vec![
        kvm_cpuid_entry2 { ebx, ecx, edx, ..vendor },
        leaf(STACK + 1, u32::from_le_bytes(*b"VS#1")),
        leaf(STACK + 2, WIDE_DESTINATIONS),
    ]
}

fn leaves(supported: &CpuId) -> Vec<kvm_cpuid_entry2> {
    let known = supported.as_slice().iter().filter(|e| (FIRST..=LAST).contains(&e.function));
    known.map(|entry| adapt(*entry)).collect()
}

fn adapt(mut entry: kvm_cpuid_entry2) -> kvm_cpuid_entry2 {
    match entry.function - FIRST {
        0 => {
            entry.eax = LAST;
            [entry.ebx, entry.ecx, entry.edx] =
                [*b"Micr", *b"osof", *b"t Hv"].map(u32::from_le_bytes);
        }
        1 => {
            entry.eax = u32::from_le_bytes(*b"Hv#1");
            (entry.ebx, entry.ecx, entry.edx) = (0, 0, 0);
        }
        3 => {
            entry.eax &= PRIVILEGES;
            // Partition privileges to send messages and events: there is nobody to send them to.
            entry.ebx = 0;
            entry.edx &= FEATURES;
        }
        4 => {
            entry.eax &= RECOMMENDED;
            entry.ebx = NEVER_SPIN;
        }
        _ => {}
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(function: u32) -> kvm_cpuid_entry2 {
        let all = u32::MAX;
        kvm_cpuid_entry2 { function, eax: all, ebx: all, ecx: all, edx: all, ..Default::default() }
    }

    fn supported() -> CpuId {
        let functions = (FIRST..=LAST + 1).chain([0x4000_0080, 0x4000_0082]);
        CpuId::from_entries(&functions.map(full).collect::<Vec<_>>()).expect("few")
    }

    #[test]
    fn the_guest_finds_hyper_v_and_what_was_chosen_of_it() {
        let leaves = leaves(&supported());
        let at = |function: u32| leaves.iter().find(|leaf| leaf.function == function);
        let first = at(FIRST).expect("there");
        let vendor = [first.ebx, first.ecx, first.edx].map(u32::to_le_bytes).concat();
        assert_eq!((first.eax, vendor.as_slice()), (LAST, &b"Microsoft Hv"[..]));
        assert_eq!(at(FIRST + 1).expect("there").eax.to_le_bytes(), *b"Hv#1");
        let privileges = at(FIRST + 3).expect("there");
        assert_eq!((privileges.eax, privileges.ebx), (PRIVILEGES, 0));
        assert_eq!(privileges.edx, FEATURES);
        assert_eq!(at(FIRST + 4).expect("there").ebx, NEVER_SPIN);
        assert!(at(LAST + 1).is_none() && at(0x4000_0080).is_none());
    }

    #[test]
    fn what_kvm_does_not_have_is_not_told() {
        let mut poor = supported();
        for entry in poor.as_mut_slice() {
            (entry.eax, entry.edx) = (1 << 5, 0);
        }
        let leaves = leaves(&poor);
        let privileges = leaves.iter().find(|leaf| leaf.function == FIRST + 3).expect("there");
        assert_eq!((privileges.eax, privileges.edx), (1 << 5, 0));
    }

    #[test]
    fn kvms_own_leaves_make_room() {
        let mut features =
            CpuId::from_entries(&[full(1), full(FIRST), full(FIRST + 1)]).expect("few");
        let pins = Controllers::Kernel;
        replace(&mut features, &leaves(&supported()), (pins, LocalApics::Emulated));
        let functions: Vec<u32> = features.as_slice().iter().map(|leaf| leaf.function).collect();
        assert_eq!(functions, [1, FIRST, FIRST + 1, FIRST + 2, FIRST + 3, FIRST + 4, LAST]);
        let recommended = features.as_slice()[5].eax;
        replace(&mut features, &leaves(&supported()), (pins, LocalApics::Virtual));
        assert_eq!([recommended, features.as_slice()[5].eax], [RECOMMENDED, 0xe24]);
    }

    #[test]
    fn many_cpus_are_told_of_wide_destinations() {
        let mut features = CpuId::from_entries(&[full(1)]).expect("few");
        replace(&mut features, &[], (Controllers::Split, LocalApics::Virtual));
        let told = features.as_slice().iter().map(|leaf| (leaf.function, leaf.eax));
        let leaves = [(STACK, STACK + 2), (STACK + 1, 0x3123_5356), (STACK + 2, 4)];
        assert_eq!(told.skip(1).collect::<Vec<_>>(), leaves);
    }
}
