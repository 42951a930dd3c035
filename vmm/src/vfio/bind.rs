//! Takes devices from the kernel, by their descriptors: each is reset and claimed on a thread of its own, for the
//! kernel may hang in it.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread,
};

use types::{
    node::Bdf,
    vm::{Passthrough as Spec, PassthroughDevice, VfioInterface},
};

use super::{assign::AssignError, reset::DEADLINE};
use crate::sys::{
    iommu::{Container, Interface, Iommufd, Taking},
    vfio::{VfioDevice, adopt},
};

/// Opens the address space that the devices are to have.
pub(super) fn interface(spec: &Spec) -> io::Result<Arc<dyn Interface>> {
    let fd = adopt(spec.iommu_fd)?;
    Ok(match spec.interface {
        VfioInterface::Cdev => Arc::new(Iommufd::new(fd)?),
        VfioInterface::Group => Arc::new(Container::new(fd)),
    })
}

/// Binds all devices: at once where they do not depend on each other, for each takes a reset.
pub(super) fn bind_all(
    wanted: &[PassthroughDevice],
    space: &Arc<dyn Interface>,
) -> Result<Vec<(Bdf, Arc<VfioDevice>)>, AssignError> {
    let at_a_time = match space.taking() {
        Taking::AtOnce => wanted.len().max(1),
        Taking::InTurn => 1,
    };
    let mut bound = Vec::new();
    for some in wanted.chunks(at_a_time) {
        let mut binding = Vec::new();
        for device in some {
            let PassthroughDevice { address, cdev_fd, .. } = *device;
            let fd = adopt(cdev_fd).map_err(|source| AssignError::Descriptor {
                what: format!("cdev_fd of {address}"),
                fd: cdev_fd,
                source,
            })?;
            binding.push(Binding::begin(address, fd, space)?);
        }
        for one in binding {
            bound.push((one.address, Arc::new(one.finish()?)));
        }
    }
    Ok(bound)
}

/// A device that is being bound on a thread of its own: the kernel resets it meanwhile, and may hang
/// in it.
pub(super) struct Binding {
    address: Bdf,
    inbox: mpsc::Receiver<io::Result<VfioDevice>>,
}

impl Binding {
    /// Begins to bind the device in `fd`.
    pub(super) fn begin(
        address: Bdf,
        fd: OwnedFd,
        space: &Arc<dyn Interface>,
    ) -> Result<Self, AssignError> {
        let space = Arc::clone(space);
        let (outbox, inbox) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name(format!("bind {address}"))
            .spawn(move || {
                let _ = outbox.send(space.take(address, fd));
            })
            .map_err(|source| AssignError::Bind { device: address, source })?;
        Ok(Self { address, inbox })
    }

    /// Waits until it is bound.
    pub(super) fn finish(self) -> Result<VfioDevice, AssignError> {
        let device = self.address;
        match self.inbox.recv_timeout(DEADLINE) {
            Ok(result) => result.map_err(|source| AssignError::Bind { device, source }),
            Err(_) => Err(AssignError::BindDeadline { device }),
        }
    }
}
