//! Registers at the first instruction.
//! Source: Linux Documentation/arch/x86/boot.rst "64-bit Boot Protocol"; Xen docs/misc/pvh.pandoc
//! "x86 protocol"; Intel SDM vol. 3A §2.5, §3.4.5, "Local Vector Table"; vol. 4 (MSRs).

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::VcpuError;
use crate::{
    boot::Entry,
    layout,
    sys::{kvm::MSR_MICROCODE, memory::Ram},
};

const CR0_PROTECTED: u64 = 1 << 0;
const CR0_EXTENSION: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8;
const EFER_LONG_ACTIVE: u64 = 1 << 10;
/// Flags: bit 1 is always set, interrupts are off.
const FLAGS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1a0;
/// Fast strings; neither branch trace store nor precise event-based sampling.
const MISC_ENABLE: u64 = 1 | 1 << 11 | 1 << 12;
const MSR_MTRR_DEFAULT: u32 = 0x2ff;
/// MTRRs on, everything write-back.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// Local vector table registers and the delivery modes of a PC's two lines.
const APIC_LVT0: usize = 0x350;
const APIC_LVT1: usize = 0x360;
const DELIVERY_NMI: u8 = 4;
const DELIVERY_EXTERNAL: u8 = 7;

/// Descriptors: code and data where boot.rst wants them (__BOOT_CS, __BOOT_DS), then the task state.
const CODE: u16 = 2;
const DATA: u16 = 3;
const TASK: u16 = 4;

/// Page table entry: present, writable.
const PRESENT: u64 = 3;
/// Page directory entry: a 2 MiB page.
const LARGE: u64 = 1 << 7;

/// Sets what registers have at a start by `start`, on a host whose processors have the release `microcode` of
/// theirs, if that is known.
pub(super) fn set_msrs(
    vcpu: &VcpuFd,
    start: Entry,
    microcode: Option<u64>,
) -> Result<(), kvm_ioctls::Error> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let mut entries = vec![entry(MSR_MISC_ENABLE, MISC_ENABLE)];
    entries.extend(microcode.map(|release| entry(MSR_MICROCODE, release)));
    // Firmware sets the memory types itself.
    if start != Entry::Reset {
        entries.push(entry(MSR_MTRR_DEFAULT, MTRR_WRITE_BACK));
    }
    for entry in entries {
        let one = Msrs::from_entries(&[entry]).map_err(|_| kvm_ioctls::Error::new(libc::ENOMEM))?;
        // A host CPU without the register has no use for its value.
        vcpu.set_msrs(&one)?;
    }
    Ok(())
}

/// Switches all of the extended state on, as a kernel does first thing. A kernel that does not see
/// a difference: leaf 13 of CPUID tells the size of what is switched on, and QEMU's emulation of
/// SVM lets a guest's XSETBV pass without an exit, so that KVM would go on telling the size at
/// reset, and put XCR0 back to that at each entry.
pub(super) fn set_extended_state(
    vcpu: &VcpuFd,
    state: Option<u64>,
) -> Result<(), kvm_ioctls::Error> {
    let Some(value) = state else { return Ok(()) };
    let mut registers = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    registers.xcrs[0].value = value;
    vcpu.set_xcrs(&registers)
}

/// Bit 10 of the APIC base register: ids of 32 bits, registers by MSR.
const X2APIC: u64 = 1 << 10;

/// Switches x2APIC mode on, as firmware does where some processor has an id that eight bits do not
/// hold (Intel SDM vol. 3A, "x2APIC State Transitions").
pub(super) fn widen_local_apic(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut special = vcpu.get_sregs()?;
    special.apic_base |= X2APIC;
    vcpu.set_sregs(&special)
}

/// LINT0 takes the PIC's interrupts and LINT1 NMIs, as firmware leaves them.
pub(super) fn set_local_apic(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut apic = vcpu.get_lapic()?;
    for (register, mode) in [(APIC_LVT0, DELIVERY_EXTERNAL), (APIC_LVT1, DELIVERY_NMI)] {
        // Delivery mode: bits 10:8. Bit 16 would mask.
        apic.regs[register + 1] = mode.cast_signed();
        apic.regs[register + 2] = 0;
    }
    vcpu.set_lapic(&apic)
}

pub(super) fn set_entry(vcpu: &VcpuFd, entry: Entry, ram: &Ram) -> Result<(), VcpuError> {
    let failed = |what| move |source| VcpuError::Set { what, id: 0, source };
    let code = match entry {
        Entry::Reset => return Ok(()),
        Entry::Linux64 { .. } => 0x00af_9b00_0000_ffff,
        Entry::Pvh { .. } => 0x00cf_9b00_0000_ffff,
    };
    write_tables(code, ram)?;
    let mut special = vcpu.get_sregs().map_err(failed("read the special registers"))?;
    special.gdt.base = layout::GDT;
    special.gdt.limit = 8 * 5 - 1;
    special.idt.limit = 0;
    let data = segment(DATA, 0x3, 0);
    (special.ds, special.es, special.fs, special.gs, special.ss) = (data, data, data, data, data);
    special.tr = segment(TASK, 0xb, 0);
    let (address, regs) = match entry {
        Entry::Reset => return Ok(()),
        Entry::Linux64 { address } => {
            special.cs = segment(CODE, 0xb, 1);
            special.cr0 = CR0_PROTECTED | CR0_EXTENSION | CR0_PAGING;
            special.cr3 = layout::PAGE_TABLES;
            special.cr4 = CR4_PAE;
            special.efer = EFER_LONG_MODE | EFER_LONG_ACTIVE;
            (address, kvm_regs { rsi: layout::ZERO_PAGE, ..Default::default() })
        }
        Entry::Pvh { address } => {
            special.cs = segment(CODE, 0xb, 0);
            special.cr0 = CR0_PROTECTED | CR0_EXTENSION;
            special.cr4 = 0;
            special.efer = 0;
            (address, kvm_regs { rbx: layout::PVH_START_INFO, ..Default::default() })
        }
    };
    vcpu.set_sregs(&special).map_err(failed("set the special registers"))?;
    let regs =
        kvm_regs { rip: address, rsp: layout::STACK, rbp: layout::STACK, rflags: FLAGS, ..regs };
    vcpu.set_regs(&regs).map_err(failed("set the registers"))
}

/// A flat segment: descriptor `index`, of `kind`, 64-bit code if `long` is 1.
fn segment(index: u16, kind: u8, long: u8) -> kvm_segment {
    let is_tss = index == TASK;
    kvm_segment {
        base: 0,
        limit: if is_tss { 0x67 } else { 0xffff_ffff },
        selector: index * 8,
        type_: kind,
        present: 1,
        dpl: 0,
        db: if long == 1 || is_tss { 0 } else { 1 },
        s: u8::from(!is_tss),
        l: long,
        g: u8::from(!is_tss),
        ..Default::default()
    }
}

/// The descriptor table that the registers above stand for, and an identity map of the first GiB.
fn write_tables(code: u64, ram: &Ram) -> Result<(), VcpuError> {
    let table = [0, 0, code, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067];
    let put = |address: u64, value: u64| {
        ram.memory
            .write_obj(value, GuestAddress(address))
            .map_err(|error| VcpuError::Tables(error.to_string()))
    };
    for (index, descriptor) in (0u64..).zip(table) {
        put(layout::GDT + 8 * index, descriptor)?;
    }
    let (top, middle, bottom) =
        (layout::PAGE_TABLES, layout::PAGE_TABLES + 0x1000, layout::PAGE_TABLES + 0x2000);
    put(top, middle | PRESENT)?;
    put(middle, bottom | PRESENT)?;
    for page in 0..512u64 {
        put(bottom + 8 * page, page << 21 | LARGE | PRESENT)?;
    }
    Ok(())
}
