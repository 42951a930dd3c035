//! Small real-mode guests on the host's KVM. Where there is none that runs them, each test says so.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "common/kvm.rs"]
mod kvm;

use std::{
    fs::OpenOptions,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use kvm_bindings::kvm_regs;
use types::{
    ids::MachineId,
    vm::{HyperV, MemoryBacking, exit},
};
use vm_memory::{Bytes, GuestAddress};
use vmm::{
    console::Console,
    counters::{Exits, Registry},
    devices::{
        power::{self, Power},
        serial::{self, Serial},
    },
    events::Events,
    machine::{Board, Chipset, Control, Ending, Pauses},
    pci::bus::Bus,
    sys::{kvm::Vm, memory::Ram},
    vcpu,
};

/// Where the code goes and starts.
const CODE: u64 = 0x1000;
/// Where a guest finds its text.
const TEXT: u64 = 0x2000;

/// Runs `code` to its end, with `text` in memory, or says why it cannot.
fn run(code: &[u8], text: &[u8]) -> Option<(Ending, Vec<u8>)> {
    let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).unwrap();
    run_in(&ram, code, text)
}

/// The same in memory of the caller's.
fn run_in(ram: &Ram, code: &[u8], text: &[u8]) -> Option<(Ending, Vec<u8>)> {
    // What is wrong is ours where the host's KVM runs guests.
    let skip = |reason: String| {
        assert!(kvm::runs_guests().is_err(), "this host's KVM runs guests, but not ours: {reason}");
        println!("skipped: real-mode guest: {reason}");
        None
    };
    let kvm = match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(kvm) => OwnedFd::from(kvm),
        Err(error) => return skip(format!("/dev/kvm: {error}")),
    };
    let vm = match Vm::new(kvm, 1, 1) {
        Ok(vm) => vm,
        Err(error) => return skip(error.to_string()),
    };
    ram.memory.write_slice(code, GuestAddress(CODE)).unwrap();
    ram.memory.write_slice(text, GuestAddress(TEXT)).unwrap();
    let ram_slots = match vm.map_ram(ram) {
        Ok(slots) => slots,
        Err(error) => return skip(error.to_string()),
    };
    let fd = vm.create_vcpu(0).unwrap();
    let mut special = fd.get_sregs().unwrap();
    (special.cs.base, special.cs.selector) = (0, 0);
    fd.set_sregs(&special).unwrap();
    fd.set_regs(&kvm_regs { rip: CODE, rflags: 2, rsp: 0x800, ..Default::default() }).unwrap();
    let console = Console::default();
    let serial_line = vm.isa_line(serial::GSI).unwrap();
    let sci = vm.isa_line(power::SCI).unwrap();
    let board = Arc::new(Board {
        machine: MachineId::from_bytes([1; 16]),
        vm,
        control: Control::default(),
        console: console.clone(),
        bus: RwLock::new(Bus::default()),
        serial: Mutex::new(Serial::new(serial_line, console.clone())),
        power: Mutex::new(Power::new(sci)),
        chipset: Chipset::new(&[], 0),
        built: Instant::now(),
        ram_slots,
        hotplug: vmm::machine::hotplug::Hotplug::absent(),
        ram: ram.clone(),
        events: Events::default(),
        exits: vec![Exits::default()],
        apic_ids: vec![0],
        activity: Registry::default(),
        hyperv: HyperV::Off,
        pauses: Pauses::default(),
        alarms: None,
        dump: Mutex::default(),
        pit: None,
        turn: Mutex::default(),
    });
    vcpu::run(0, fd, &board);
    let ending = board.control.wait(Duration::MAX).unwrap();
    if ending.status() == exit::HOST_FAULT {
        return skip(ending.reason);
    }
    Some((ending, console.read(0, 4096, Duration::ZERO).bytes))
}

#[test]
fn output_reaches_the_console_and_the_keyboard_controller_resets() {
    // mov dx,0x3f8; mov al,'h'; out dx,al; mov al,'i'; out dx,al; mov al,0xfe; out 0x64,al; hlt
    let code = [0xba, 0xf8, 0x03, 0xb0, b'h', 0xee, 0xb0, b'i', 0xee, 0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    let Some((ending, console)) = run(&code, &[]) else { return };
    assert_eq!((ending.status(), console.as_slice()), (exit::RESET, &b"hi"[..]));
}

#[test]
fn string_output_arrives_byte_by_byte() {
    // mov si,0x2000; mov cx,5; mov dx,0x3f8; cld; rep outsb; mov dx,0xcf9; mov al,6; out dx,al; hlt
    let code = [
        0xbe, 0x00, 0x20, 0xb9, 0x05, 0x00, 0xba, 0xf8, 0x03, 0xfc, 0xf3, 0x6e, 0xba, 0xf9, 0x0c,
        0xb0, 0x06, 0xee, 0xf4,
    ];
    let Some((ending, console)) = run(&code, b"hello") else { return };
    assert_eq!((ending.status(), console.as_slice()), (exit::RESET, &b"hello"[..]));
}

#[test]
fn sleep_state_five_powers_off() {
    // mov dx,0x604; mov ax,0x2000; out dx,ax; hlt
    let code = [0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4];
    let Some((ending, _)) = run(&code, &[]) else { return };
    assert_eq!(ending.status(), exit::POWERED_OFF);
}

#[test]
fn what_nobody_answers_reads_as_ones() {
    // mov dx,0x5000; in al,dx; mov dx,0x3f8; out dx,al; mov al,0xfe; out 0x64,al; hlt
    let code = [0xba, 0x00, 0x50, 0xec, 0xba, 0xf8, 0x03, 0xee, 0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    let Some((ending, console)) = run(&code, &[]) else { return };
    assert_eq!((ending.status(), console.as_slice()), (exit::RESET, &[0xff][..]));
}

#[test]
fn the_keyboard_controller_reads_as_absent_and_ready_to_reset() {
    // in al,0x64; mov dx,0x3f8; out dx,al; mov al,0xfe; out 0x64,al; hlt
    let code = [0xe4, 0x64, 0xba, 0xf8, 0x03, 0xee, 0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    let Some((ending, console)) = run(&code, &[]) else { return };
    assert_eq!((ending.status(), console.as_slice()), (exit::RESET, &[0xc0][..]));
}

#[test]
fn a_triple_fault_is_the_guests() {
    // lidt [0x2000] with limit 0; int3
    let code = [0x0f, 0x01, 0x1e, 0x00, 0x20, 0xcc];
    let Some((ending, _)) = run(&code, &[0; 6]) else { return };
    assert_eq!(ending.status(), exit::GUEST_FAULT);
}

/// The host's counters of 2 MiB pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

fn huge_pages(counter: &str) -> u64 {
    let text = std::fs::read_to_string(format!("{HUGE_PAGES}/{counter}")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

#[test]
fn huge_pages_are_taken_and_given_back_and_too_few_are_told() {
    let before = huge_pages("nr_hugepages");
    let reserve = |count: u64| {
        std::fs::write(format!("{HUGE_PAGES}/nr_hugepages"), format!("{count}\n")).is_ok()
    };
    if !reserve(before + 2) || huge_pages("free_hugepages") < 2 {
        println!("skipped: guest on huge pages: none can be reserved here");
        return;
    }
    let free = huge_pages("free_hugepages");
    let ram = Ram::new(&[(0, 4 << 20)], MemoryBacking::Hugetlb2M).unwrap();
    assert_eq!(huge_pages("free_hugepages"), free - 2);
    // mov si,0x2000; mov cx,5; mov dx,0x3f8; cld; rep outsb; mov dx,0xcf9; mov al,6; out dx,al; hlt
    let code = [
        0xbe, 0x00, 0x20, 0xb9, 0x05, 0x00, 0xba, 0xf8, 0x03, 0xfc, 0xf3, 0x6e, 0xba, 0xf9, 0x0c,
        0xb0, 0x06, 0xee, 0xf4,
    ];
    if let Some((ending, console)) = run_in(&ram, &code, b"large") {
        assert_eq!((ending.status(), console.as_slice()), (exit::RESET, &b"large"[..]));
    }
    drop(ram);
    assert_eq!(huge_pages("free_hugepages"), free);
    let refusal = Ram::new(&[(0, (free + 8) << 21)], MemoryBacking::Hugetlb2M).unwrap_err();
    let said = format!("{refusal}: {:?}", std::error::Error::source(&refusal));
    assert!(said.contains("huge pages") && !said.contains("Bad address"), "{said}");
    reserve(before);
}
