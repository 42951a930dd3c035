//! The power button, as the kernel's ACPI events tell it over generic netlink.
//! Source: drivers/acpi/event.c (`struct acpi_genl_event`), Documentation of generic netlink.

use std::{io, os::fd::OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
    netlink::{GENERIC, SocketAddrNetlink},
};

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
/// Bytes of `struct nlmsghdr` and `struct genlmsghdr` before a message's attributes.
const HEADERS: usize = 16 + 4;
/// `device_class` of a power button's event.
const POWER_BUTTON: &[u8] = b"button/power";

/// Joins the kernel's ACPI events; an error when this kernel has none.
pub fn listen() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    rustix::net::send(&socket, &family_request(b"acpi_event\0"), SendFlags::empty())?;
    // The kernel answers a request before `send` returns.
    let answer = receive(&socket)?;
    let group = first_group(&answer)
        .filter(|group| (1..=32).contains(group))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the kernel has no ACPI events"))?;
    drop(socket);
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 1 << (group - 1)))?;
    Ok(socket)
}

/// Reads one event; whether it says that the power button was pressed.
pub fn read(socket: &OwnedFd) -> io::Result<Pressed> {
    let event = receive(socket)?;
    let pressed = event.windows(POWER_BUTTON.len()).any(|window| window == POWER_BUTTON);
    Ok(if pressed { Pressed::Yes } else { Pressed::No })
}

/// Whether the power button was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressed {
    /// It was.
    Yes,
    /// Something else happened.
    No,
}

fn receive(socket: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 8192];
    let (length, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty())?;
    buffer.truncate(length);
    Ok(buffer)
}

fn family_request(name: &[u8]) -> Vec<u8> {
    let attribute = 4 + name.len();
    let length = HEADERS + attribute.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(GENL_ID_CTRL.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([CTRL_CMD_GETFAMILY, 1, 0, 0]);
    bytes.extend(u16::try_from(attribute).unwrap_or(u16::MAX).to_ne_bytes());
    bytes.extend(CTRL_ATTR_FAMILY_NAME.to_ne_bytes());
    bytes.extend(name);
    bytes.resize(length, 0);
    bytes
}

/// Returns the number of the family's first multicast group.
fn first_group(message: &[u8]) -> Option<u32> {
    let groups = attribute(message.get(HEADERS..)?, CTRL_ATTR_MCAST_GROUPS)?;
    // One nested attribute per group, numbered from 1.
    let group = attribute(groups, 1)?;
    let id = attribute(group, CTRL_ATTR_MCAST_GRP_ID)?;
    Some(u32::from_ne_bytes(id.get(..4)?.try_into().ok()?))
}

/// Returns the payload of the first attribute of this type.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    while bytes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & 0x3fff;
        if kind == wanted {
            return bytes.get(4..length);
        }
        bytes = bytes.get(length.next_multiple_of(4).max(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_in_the_kernels_answer() {
        let mut message = vec![0; HEADERS];
        // Family name, then groups { 1: { name, id 5 } }.
        message.extend([8, 0, 2, 0, b'a', b'c', b'p', 0]);
        message.extend([24, 0, 7, 0, 20, 0, 1, 0, 8, 0, 1, 0, b'm', b'c', 0, 0]);
        message.extend([8, 0, 2, 0, 5, 0, 0, 0]);
        assert_eq!(first_group(&message), Some(5));
        assert_eq!(first_group(&message[..30]), None);
        assert_eq!(first_group(&[]), None);
    }
}
