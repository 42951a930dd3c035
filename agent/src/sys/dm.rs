//! Encrypted block devices of the kernel's device mapper; their keys travel by its keyring and are on
//! no line that anybody can read.
//! Sources: `linux/dm-ioctl.h`; Documentation/admin-guide/device-mapper/dm-crypt.rst; keyrings(7).

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `_IOWR(0xfd, n, struct dm_ioctl)` without its number.
const IOCTL: libc::c_ulong = 0xc138_fd00;
const DEV_CREATE: libc::c_ulong = IOCTL | 3;
const DEV_REMOVE: libc::c_ulong = IOCTL | 4;
const DEV_SUSPEND: libc::c_ulong = IOCTL | 6;
const TABLE_LOAD: libc::c_ulong = IOCTL | 9;

/// `KEY_SPEC_PROCESS_KEYRING`, and the operation that takes a key out of a keyring.
const PROCESS_KEYRING: libc::c_long = -2;
const UNLINK: libc::c_long = 9;

/// Bytes of a request: head, one target, parameters.
const REQUEST: usize = 2048;
/// `struct dm_ioctl`, `struct dm_target_spec`.
const HEAD: usize = 312;
const TARGET: usize = 40;
/// Longest parameters, with the zero behind them.
const PARAMETERS: usize = REQUEST - HEAD - TARGET;

/// A device to be made.
#[derive(Debug)]
pub(crate) struct Crypt<'a> {
    /// Its name, at most 127 bytes.
    pub(crate) name: &'a str,
    /// Numbers of the device underneath.
    pub(crate) below: (u32, u32),
    /// Where the encrypted bytes begin there, in sectors of 512 bytes.
    pub(crate) start: u64,
    /// How many sectors there are.
    pub(crate) sectors: u64,
    /// The key.
    pub(crate) key: &'a [u8; 64],
}

/// A request as the kernel's header lays it out, in bytes.
struct Request([u8; REQUEST]);

impl Request {
    fn new(name: &str) -> io::Result<Self> {
        let mut request = Self([0; REQUEST]);
        let size = u32::try_from(REQUEST).map_err(io::Error::other)?;
        // Version 4.0.0 is enough for all of these.
        for (at, value) in [(0, 4_u32), (12, size), (16, 312)] {
            request.put(at, &value.to_ne_bytes());
        }
        if name.len() > 127 || name.bytes().any(|byte| byte == 0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        request.put(48, name.as_bytes());
        Ok(request)
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Sends it. The kernel's answer replaces it.
    fn send(&mut self, control: BorrowedFd<'_>, request: libc::c_ulong) -> io::Result<()> {
        // SAFETY: The buffer is as long as its own field `data_size` says, and lives across the call;
        // the kernel reads and writes no more of it.
        let result = unsafe { libc::ioctl(control.as_raw_fd(), request, self.0.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Makes a device over an encrypted one. `control` is `/dev/mapper/control`.
pub(crate) fn create(control: BorrowedFd<'_>, crypt: &Crypt<'_>) -> io::Result<()> {
    let description = CString::new(format!("holdfast:{}", crypt.name))?;
    let key = add_key(&description, crypt.key)?;
    let made = try_create(control, crypt, &description);
    // dm-crypt has a copy.
    unlink_key(key);
    made
}

fn try_create(control: BorrowedFd<'_>, crypt: &Crypt<'_>, description: &CStr) -> io::Result<()> {
    Request::new(crypt.name)?.send(control, DEV_CREATE)?;
    let (major, minor) = crypt.below;
    let parameters = format!(
        "aes-xts-plain64 :64:logon:{} 0 {major}:{minor} {} 4 sector_size:4096 allow_discards \
         no_read_workqueue no_write_workqueue",
        description.to_string_lossy(),
        crypt.start
    );
    let result = load(control, crypt, &parameters).and_then(|()| {
        // Suspending without its flag is resuming: the table goes live.
        Request::new(crypt.name)?.send(control, DEV_SUSPEND)
    });
    if result.is_err() {
        // The first error is the one to tell.
        let _ = remove(control, crypt.name);
    }
    result
}

fn load(control: BorrowedFd<'_>, crypt: &Crypt<'_>, parameters: &str) -> io::Result<()> {
    if parameters.len() >= PARAMETERS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut request = Request::new(crypt.name)?;
    let size = u32::try_from(TARGET + PARAMETERS).map_err(io::Error::other)?;
    request.put(20, &1_u32.to_ne_bytes());
    request.put(HEAD + 8, &crypt.sectors.to_ne_bytes());
    request.put(HEAD + 20, &size.to_ne_bytes());
    request.put(HEAD + 24, b"crypt");
    request.put(HEAD + TARGET, parameters.as_bytes());
    request.send(control, TABLE_LOAD)
}

/// Removes a device. Fails with `EBUSY` while it is in use.
pub(crate) fn remove(control: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    Request::new(name)?.send(control, DEV_REMOVE)
}

fn add_key(description: &CStr, key: &[u8]) -> io::Result<libc::c_long> {
    // SAFETY: All three pointers are valid for the call, and the length is the key's.
    let result = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            c"logon".as_ptr(),
            description.as_ptr(),
            key.as_ptr(),
            key.len(),
            PROCESS_KEYRING,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn unlink_key(key: libc::c_long) {
    // SAFETY: The call takes numbers only. The keyring goes with the process if it fails.
    unsafe { libc::syscall(libc::SYS_keyctl, UNLINK, key, PROCESS_KEYRING) };
}
