//! virtio-vsock over vhost-vsock.
//! Source: virtio §5.10 "Socket Device"; §5.10.4 "Device configuration layout".
//!
//! | Offset | Bytes | Field     | Value here       |
//! |--------|-------|-----------|------------------|
//! | 0      | 8     | guest_cid | from the machine |
//!
//! Queues 0 and 1 are the kernel's. Queue 2 carries events, of which there are none: a machine
//! keeps its context id for life.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::{
    Activation, DeviceIdentity, Platform, VirtioDevice, VirtioError, VirtioPci,
    vhost::{Backend, Vhost, ring_features},
};
use crate::sys::io::{VsockState, set_vsock_cid, set_vsock_state};

/// Bit 1: SOCK_SEQPACKET (virtio §5.10.3).
const F_SEQPACKET: u64 = 1 << 1;
/// The first context id that is not reserved (virtio §5.10.4).
const FIRST_CID: u32 = 3;
/// Receive, transmit and event.
const QUEUES: u16 = 3;

const IDENTITY: DeviceIdentity =
    DeviceIdentity { name: "vsock", virtio_id: 19, class: [0x07, 0x80, 0x00] };

struct Kernel;

impl Backend for Kernel {
    const QUEUES: u16 = 2;
    const DEVICE: &'static str = "vsock";

    fn connect(&self, _unit: u16, vhost: BorrowedFd<'_>, _features: u64) -> io::Result<()> {
        set_vsock_state(vhost, VsockState::Running)
    }

    fn disconnect(&self, _unit: u16, vhost: BorrowedFd<'_>) -> io::Result<()> {
        set_vsock_state(vhost, VsockState::Stopped)
    }
}

/// A socket device.
pub struct Vsock {
    vhost: Vhost<Kernel>,
    features: u64,
    cid: u64,
}

/// Makes a socket device over an open `/dev/vhost-vsock`.
pub fn open(
    vsock: &types::vm::Vsock,
    vhost: OwnedFd,
    slot: u8,
    platform: &Platform,
) -> Result<VirtioPci, VirtioError> {
    if vsock.cid < FIRST_CID || vsock.cid == u32::MAX {
        let problem = format!("context id {} is reserved; expected {FIRST_CID} or more", vsock.cid);
        return Err(VirtioError::Refused { device: IDENTITY.name, problem });
    }
    let (vhost, offered) = Vhost::new(vhost, Vec::new(), Kernel, &platform.ram)?;
    let cid = u64::from(vsock.cid);
    set_vsock_cid(vhost.as_fd(), cid).map_err(|source| VirtioError::Host {
        device: IDENTITY.name,
        what: "cannot take the context id; another machine may have it",
        source,
    })?;
    let features = ring_features(offered) | (offered & F_SEQPACKET);
    VirtioPci::new(Box::new(Vsock { vhost, features, cid }), slot, platform)
}

impl VirtioDevice for Vsock {
    fn identity(&self) -> DeviceIdentity {
        IDENTITY
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_fields(&self.cid.to_le_bytes(), offset, data);
    }

    fn start(&mut self) -> Result<(), VirtioError> {
        self.vhost.start()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError> {
        self.vhost.activate(activation)
    }

    fn stop(&mut self) {
        self.vhost.stop();
    }

    fn stopped(&mut self) -> bool {
        self.vhost.stopped()
    }

    fn hold(&mut self) {
        self.vhost.hold();
    }

    fn is_held(&mut self) -> bool {
        self.vhost.is_held()
    }

    fn go_on(&mut self) {
        self.vhost.go_on();
    }

    fn signals_changed(&mut self) {
        self.vhost.look();
    }
}
