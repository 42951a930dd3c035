//! System calls that no crate wraps safely. Everything unsafe of this crate is here.

pub(crate) mod block;
pub(crate) mod child;
pub(crate) mod clock;
pub(crate) mod descriptor;
pub(crate) mod dm;
pub(crate) mod nvme;
pub(crate) mod observe;
pub(crate) mod packet;
pub(crate) mod screen;
pub(crate) mod tap;
pub(crate) mod udp;
pub(crate) mod watchdog;
