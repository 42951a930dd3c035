//! Devices that come while the guest runs: the same steps as at the start, one device at a time.

use std::{os::fd::OwnedFd, sync::Arc};

use types::node::Bdf;

use super::{
    alarms::{Alarms, Since},
    assign::{AssignError, Assigned, Closer, Function, Host, listen_to, start_resetters},
    bind::Binding,
    device::Device,
    dma::{self, AddressSpace},
    neighbours::Neighbours,
    places::Places,
    reset,
};
use crate::{
    irq::PinRoute,
    sys::{iommu::Interface, kvm::Vm, memory::Ram, vfio::VfioDevice},
};

/// Takes devices.
pub struct Plug {
    pub(super) space: Arc<dyn Interface>,
    pub(super) neighbours: Neighbours,
    pub(super) alarms: Alarms,
    pub(super) places: Arc<Places>,
    pub(super) ram: Ram,
    pub(super) vm: Arc<Vm>,
}

impl Plug {
    /// Returns where the kernel's alarms of all devices come out, also of those that come later.
    pub fn alarms(&self) -> Alarms {
        self.alarms.clone()
    }

    /// Takes the device in `fd`, resets it, and makes a function of it whose pin goes by `route`.
    /// Returns what takes it back too.
    pub fn open(
        &self,
        address: Bdf,
        fd: OwnedFd,
        route: PinRoute,
    ) -> Result<(Assigned, Closer), AssignError> {
        let bound = [(address, Arc::new(Binding::begin(address, fd, &self.space)?.finish()?))];
        let mut resetters = start_resetters(&bound, &self.neighbours)?;
        reset::clean(&resetters)?;
        let [(_, device)] = bound;
        let watch = listen_to(&self.alarms, address, Since::Later, &*device)?;
        self.space
            .admit(&device)
            .map_err(|source| AssignError::Attach { device: address, source })?;
        let space: Arc<dyn AddressSpace> = Arc::<dyn Interface>::clone(&self.space);
        dma::map_ram(&*space, &self.ram)?;
        let device: Arc<dyn Device> = Arc::<VfioDevice>::clone(&device);
        let host = Host {
            interrupts: Arc::<Vm>::clone(&self.vm),
            slots: Arc::new(Arc::clone(&self.vm)),
            places: Arc::clone(&self.places),
            route,
            clique: None,
        };
        let resetter = resetters.remove(0);
        let assigned = Function::open(address, Arc::clone(&device), host, Arc::clone(&resetter))?;
        let in_use = vec![self.neighbours.admit(address)];
        let (devices, resetters) = (vec![device], vec![resetter]);
        let watches = vec![watch];
        let closer =
            Closer { devices, resetters, _watches: watches, _in_use: in_use, _space: space };
        Ok((assigned, closer))
    }
}
