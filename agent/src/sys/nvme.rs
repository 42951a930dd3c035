//! Commands to an NVMe controller's admin queue, through the kernel's driver.
//! Source: `linux/nvme_ioctl.h`, `struct nvme_passthru_cmd` and `NVME_IOCTL_ADMIN_CMD`.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `NVME_IOCTL_ADMIN_CMD`, `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const ADMIN: libc::c_ulong = 0xc048_4e41;

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct Passthrough {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_length: u32,
    data_length: u32,
    cdw10: u32,
    cdw11_15: [u32; 5],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<Passthrough>() == 72);

/// A command without data that goes to the controller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Admin {
    /// Its opcode.
    pub(crate) opcode: u8,
    /// The namespace that it is about.
    pub(crate) nsid: u32,
    /// Its dword 10; dwords 11 to 15 are zero.
    pub(crate) cdw10: u32,
    /// How long the kernel waits for it, in milliseconds. One that takes longer is aborted, which may
    /// take as long again.
    pub(crate) timeout_ms: u32,
}

/// Sends a command and waits until it completed; what it returns is read into `data`. Returns its status:
/// 0 for success, else bits 10:0 are status code type and status code.
pub(crate) fn admin(
    controller: BorrowedFd<'_>,
    command: Admin,
    data: &mut [u8],
) -> io::Result<u16> {
    let Admin { opcode, nsid, cdw10, timeout_ms } = command;
    let data_length = u32::try_from(data.len()).map_err(io::Error::other)?;
    let address = if data.is_empty() { 0 } else { data.as_mut_ptr() as u64 };
    let mut request = Passthrough {
        opcode,
        nsid,
        address,
        data_length,
        cdw10,
        timeout_ms,
        ..Passthrough::default()
    };
    // SAFETY: the kernel reads and writes the request and writes at most `data_length` bytes at `address`;
    // both live across the call, are borrowed mutably, and are laid out as the kernel's header says.
    let result = unsafe { libc::ioctl(controller.as_raw_fd(), ADMIN, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    u16::try_from(result).map_err(io::Error::other)
}
