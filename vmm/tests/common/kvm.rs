//! Whether this host's KVM runs guests at all: asked of it directly, once per test program, without a
//! line of the VMM. Where it does, a machine whose guest says nothing is the VMM's fault.
//! Source: Linux Documentation/virt/kvm/api.rst.

use std::{
    sync::{OnceLock, mpsc},
    thread,
    time::Duration,
};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Longest wait for a guest of two instructions.
const PATIENCE: Duration = Duration::from_secs(20);
/// Most exits that mean nothing before the one that counts.
const EXITS: usize = 1000;
/// Memory of the guest, and where its code lies in it.
const MEMORY: usize = 1 << 20;
const CODE: u64 = 0x1000;
/// What it writes, and to which port.
const WORD: u8 = b'A';
const PORT: u16 = 0x3f8;
/// The code of each mode: mov al, 'A'; mov dx, 0x3f8, in 32-bit code edx; out dx, al; hlt.
const REAL: &[u8] = &[0xb0, WORD, 0xba, 0xf8, 0x03, 0xee, 0xf4];
const FLAT: &[u8] = &[0xb0, WORD, 0xba, 0xf8, 0x03, 0x00, 0x00, 0xee, 0xf4];

/// How the guest starts.
#[derive(Debug, Clone, Copy)]
enum Mode {
    /// As after a reset, but for where.
    Real,
    /// 32-bit, without paging.
    Flat,
}

/// Says why this KVM cannot run the guests of tests, if it cannot.
pub(crate) fn runs_guests() -> Result<(), &'static str> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    let ask = || [Mode::Real, Mode::Flat].into_iter().try_for_each(within_patience);
    ANSWER.get_or_init(ask).as_ref().copied().map_err(String::as_str)
}

fn within_patience(mode: Mode) -> Result<(), String> {
    let (send, answer) = mpsc::channel();
    // One that hangs in KVM stays there until the program ends.
    thread::spawn(move || send.send(run(mode)));
    let late = |_| format!("a guest in mode {mode:?} did nothing for {PATIENCE:?}");
    answer.recv_timeout(PATIENCE).map_err(late)?
}

fn run(mode: Mode) -> Result<(), String> {
    let failed = |what: &'static str| {
        move |error: kvm_ioctls::Error| format!("this host's KVM cannot {what} ({mode:?}): {error}")
    };
    let kvm = Kvm::new().map_err(failed("be opened"))?;
    let vm = kvm.create_vm().map_err(failed("create a machine"))?;
    vm.set_tss_address(0xfeff_d000).map_err(failed("place the task state"))?;
    vm.create_irq_chip().map_err(failed("create interrupt controllers"))?;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)])
        .map_err(|error| format!("no memory for a guest: {error}"))?;
    let code = match mode {
        Mode::Real => REAL,
        Mode::Flat => FLAT,
    };
    memory.write_slice(code, GuestAddress(CODE)).map_err(|error| error.to_string())?;
    map(&vm, &memory).map_err(failed("map memory"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(failed("create a virtual CPU"))?;
    enter(&vcpu, mode).map_err(failed("set registers"))?;
    for _ in 0..EXITS {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, [WORD])) => return Ok(()),
            Ok(VcpuExit::Intr) => {}
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            Ok(exit) => {
                return Err(format!("this host's KVM ends a guest in mode {mode:?}: {exit:?}"));
            }
            Err(error) => return Err(failed("run a guest")(error)),
        }
    }
    Err(format!("a guest in mode {mode:?} did nothing in {EXITS} exits"))
}

#[allow(unsafe_code, reason = "memory is given to KVM by its address")]
fn map(vm: &kvm_ioctls::VmFd, memory: &GuestMemoryMmap) -> Result<(), kvm_ioctls::Error> {
    let host = memory
        .get_host_address(GuestAddress(0))
        .map_err(|_| kvm_ioctls::Error::new(libc::EFAULT))?;
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY as u64,
        userspace_addr: host as u64,
        ..Default::default()
    };
    // SAFETY: the caller keeps the memory as long as its guest runs, and nobody else uses it.
    unsafe { vm.set_user_memory_region(region) }
}

fn enter(vcpu: &VcpuFd, mode: Mode) -> Result<(), kvm_ioctls::Error> {
    let mut special = vcpu.get_sregs()?;
    match mode {
        Mode::Real => (special.cs.base, special.cs.selector) = (0, 0),
        Mode::Flat => {
            let flat = |kind, selector| kvm_segment {
                limit: u32::MAX,
                selector,
                type_: kind,
                present: 1,
                db: 1,
                s: 1,
                g: 1,
                ..Default::default()
            };
            special.cs = flat(0xb, 0x10);
            let data = flat(0x3, 0x18);
            (special.ds, special.es, special.ss) = (data, data, data);
            special.cr0 |= 1;
        }
    }
    vcpu.set_sregs(&special)?;
    vcpu.set_regs(&kvm_regs { rip: CODE, rflags: 2, rsp: 0x800, ..Default::default() })
}
