//! What no Linux guest asks of Hyper-V, asked by a guest of its own: a hypercall and a wrong one, synthetic timers
//! that send their messages once and again and again, and the counters. On the bed.
//!
//! Source: Microsoft Hypervisor Top Level Functional Specification 6.0b, §3 "Hypercall Interface", §11 "Virtual
//! Interrupts and Inter-Processor Communication", §12 "Timers".

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(
    unsafe_code,
    reason = "the guest is assembled here and never run here; the linker knows where it lies"
)]

use std::time::Duration;

use qemu_tests::bed::{Bed, BedOptions, Plan};
use types::vm::HyperV;

#[path = "../../vmm/tests/common/pvh.rs"]
mod pvh;

/// How long the guest may take.
const SOON: Duration = Duration::from_secs(90);

// Says a letter for each thing that is as the specification says, `!` for the first that is not, and a dot at its end.
// It has no interrupt table and takes no interrupts: messages are looked for.
std::arch::global_asm!(
    r#"
    .pushsection .rodata.hyperv_guest, "a"
    .code32
    .macro put register, low, high=0
        mov ecx, \register
        mov eax, \low
        mov edx, \high
        wrmsr
    .endm
    .macro get register
        mov ecx, \register
        rdmsr
    .endm
    .macro say letter
        mov edx, 0x3f8
        mov al, \letter
        out dx, al
    .endm

hyperv_guest:
    cld
    mov esp, 0x304000
    // Nobody may make hypercalls who does not say what he is; then the page with the instructions.
    put 0x40000000, 0x1000, 0x8100
    put 0x40000001, 0x300001
    get 0x40000001
    cmp eax, 0x300001
    jne 99f
    // HvCallFlushVirtualAddressSpace of all processors, all spaces: its parameters lie in memory.
    mov edi, 0x301000
    mov ecx, 6
    xor eax, eax
    rep stosd
    mov dword ptr [0x301008], 3
    mov eax, 0x0002
    xor edx, edx
    xor ebx, ebx
    mov ecx, 0x301000
    xor edi, edi
    xor esi, esi
    mov ebp, 0x300000
    call ebp
    test ax, ax
    jnz 99f
    say 'H'
    // One that there is not: HV_STATUS_INVALID_HYPERCALL_CODE.
    mov eax, 0x7777
    xor edx, edx
    xor ebx, ebx
    mov ecx, 0x301000
    call ebp
    cmp ax, 2
    jne 99f
    say 'U'
    // Index of the processor, and frequencies of counter and interrupt controller.
    get 0x40000002
    or eax, edx
    jnz 99f
    get 0x40000022
    or eax, edx
    jz 99f
    get 0x40000023
    or eax, edx
    jz 99f
    say 'F'
    // The reference counter does not stand still.
    get 0x40000020
    mov esi, eax
    mov edi, edx
    mov ebx, 10000000
2:  dec ebx
    jz 99f
    get 0x40000020
    cmp eax, esi
    jne 3f
    cmp edx, edi
    je 2b
3:  say 'R'

    // The local APIC is on, or nobody takes what a source sends. The synthetic interrupt controller, its page of
    // messages, and source 2 with vector 0x30.
    mov dword ptr [0xfee000f0], 0x1ff
    put 0x40000080, 1
    put 0x40000083, 0x302001
    put 0x40000092, 0x30
    // Timer 0 begins when it is told a time (AutoEnable), and tells source 2: in 10 ms, in units of 100 ns.
    put 0x400000b0, 0x20008
    get 0x40000020
    add eax, 100000
    adc edx, 0
    mov [0x303000], eax
    mov [0x303004], edx
    mov ecx, 0x400000b1
    wrmsr
    call 50f
    // HvMessageTimerExpired: of timer 0, for that time, and not before it.
    cmp dword ptr [0x302210], 0
    jne 99f
    mov eax, [0x302218]
    mov edx, [0x30221c]
    cmp eax, [0x303000]
    jne 99f
    cmp edx, [0x303004]
    jne 99f
    mov esi, [0x302220]
    mov edi, [0x302224]
    sub esi, eax
    sbb edi, edx
    js 99f
    call 60f
    // It ended with that.
    get 0x400000b0
    test eax, 1
    jnz 99f
    say 'T'

    // Timer 3 again and again, each millisecond.
    put 0x400000b6, 0x20002
    put 0x400000b7, 10000
    put 0x400000b6, 0x20003
    mov ebp, 10
4:  call 50f
    cmp dword ptr [0x302210], 3
    jne 99f
    call 60f
    dec ebp
    jnz 4b
    put 0x400000b6, 0
    say 'P'
    jmp 98f

// Waits for a message of source 2.
50: get 0x40000020
    mov esi, eax
    mov edi, edx
    // Ten seconds by the reference counter.
    add esi, 100000000
    adc edi, 0
51: cmp dword ptr [0x302200], 0x80000010
    je 52f
    get 0x40000020
    cmp edx, edi
    ja 99f
    jb 51b
    cmp eax, esi
    jb 51b
    jmp 99f
52: ret

// Makes room for the next one, and says so if it waits.
60: mov dword ptr [0x302200], 0
    test byte ptr [0x302205], 1
    jz 61f
    put 0x40000084, 0
61: ret

99: say '!'
98: say '.'
97: hlt
    jmp 97b
hyperv_guest_end:
    .purgem put
    .purgem get
    .purgem say
    .code64
    .popsection
    "#
);

/// Returns the guest's instructions.
fn code() -> &'static [u8] {
    unsafe extern "C" {
        static hyperv_guest: u8;
        static hyperv_guest_end: u8;
    }
    let (begin, end) = (&raw const hyperv_guest, &raw const hyperv_guest_end);
    // SAFETY: both labels are above, in one section that nobody writes to.
    unsafe { std::slice::from_raw_parts(begin, end as usize - begin as usize) }
}

#[test]
fn hypercalls_are_answered_and_synthetic_timers_send_messages() {
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("kernel");
    std::fs::write(&kernel, pvh::elf(code())).unwrap();
    let mut options = BedOptions::default();
    options.files.push(("guest/kernel".to_owned(), kernel));
    let mut bed = Bed::start(folder.path(), options).unwrap();
    let mut plan = Plan::linux_alone(1, "/guest/kernel", "");
    plan.spec.hyperv = HyperV::On;
    let machine = bed.launch(&plan).unwrap();
    let said = bed.wait_console(machine, ".", SOON).unwrap();
    assert_eq!(said, "HUFRTP.");
}
