//! Packet sockets for a DHCP client, which talks before it has an address, for ARP, and for questions in a
//! guest's name.
//! Source: `packet(7)`, Linux `Documentation/networking/filter.rst`.

use std::{
    io, mem,
    net::Ipv4Addr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use tokio::io::unix::AsyncFd;

/// Destination that every station on a link receives.
const BROADCAST: [u8; 6] = [0xff; 6];

/// Numbers of Ethernet protocols as `sockaddr_ll` wants them.
const IPV4: u16 = 0x0800_u16.to_be();
const ARP: u16 = 0x0806_u16.to_be();
/// Where the kernel shows a filter whose a packet is, and on which interface it came: `SKF_AD_OFF +
/// SKF_AD_PKTTYPE` and `SKF_AD_OFF + SKF_AD_IFINDEX`.
const WHOSE: u32 = u32::from_ne_bytes((-0x1000_i32 + 4).to_ne_bytes());
const INTERFACE: u32 = u32::from_ne_bytes((-0x1000_i32 + 8).to_ne_bytes());
/// `PACKET_OTHERHOST`: to another station, or in a VLAN that has no interface here.
const ANOTHERS: u32 = 3;
/// Room for filters' results.
const ALL: u32 = u32::MAX;

/// Opens a socket that receives the IPv4 packets for UDP port 68 on the interface and nothing else.
///
/// Packets have no link header. Must be called inside a tokio runtime.
pub(crate) fn open(index: u32) -> io::Result<AsyncFd<OwnedFd>> {
    open_for(IPV4, index, &mut dhcp())
}

/// Opens a socket that receives the ARP packets on the interface whose sender says that it has one of these
/// addresses, at most 64, and nothing else.
///
/// Packets have no link header. Must be called inside a tokio runtime.
pub(crate) fn open_arp(index: u32, senders: &[Ipv4Addr]) -> io::Result<AsyncFd<OwnedFd>> {
    open_for(ARP, index, &mut arp_from(index, senders)?)
}

fn open_for(
    protocol: u16,
    index: u32,
    filter: &mut [libc::sock_filter],
) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: takes integers only.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // The filter comes first: protocol 0 receives nothing before `bind` names one.
    attach_filter(&socket, filter)?;
    let address = libc::sockaddr_ll { sll_protocol: protocol, ..address(index, [0; 6])? };
    // SAFETY: the address outlives the call and the length is its own.
    let ret = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), address_len()) };
    check(ret as isize)?;
    // SAFETY: an `OwnedFd` names the same open file until it is dropped, which is after it was
    // taken out of the reactor.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// Broadcasts an IPv4 packet on the interface that the socket was opened for.
pub(crate) fn broadcast(socket: &OwnedFd, index: u32, packet: &[u8]) -> io::Result<()> {
    send(socket, &address(index, BROADCAST)?, packet)
}

/// Sends a frame, from its Ethernet header on, through an interface.
pub(crate) fn send_frame(index: u32, frame: &[u8]) -> io::Result<()> {
    // Protocol 0: the socket receives nothing.
    // SAFETY: takes integers only.
    let fd = unsafe {
        libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut to = address(index, [0; 6])?;
    // The frame says its own destination and protocol.
    to.sll_protocol = 0;
    send(&socket, &to, frame)
}

fn send(socket: &OwnedFd, to: &libc::sockaddr_ll, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: bytes and address outlive the call, and the lengths are their own.
    let ret = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            0,
            std::ptr::from_ref(to).cast(),
            address_len(),
        )
    };
    check(ret)
}

const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    // BPF opcodes have sixteen bits.
    #[allow(clippy::cast_possible_truncation, reason = "the constants fit")]
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Lets through what is UDP to port 68 and no later fragment.
fn dhcp() -> [libc::sock_filter; 9] {
    [
        op(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, 9), // IPv4 protocol
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 6, 17), // is UDP
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 6), // fragment offset
        op(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 4, 0, 0x1fff), // is zero
        op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 0), // header length
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 2), // destination port
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 68), // is the client's
        op(libc::BPF_RET | libc::BPF_K, 0, 0, ALL),              // all of it
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),                // nothing
    ]
}

/// Lets through ARP on the interface itself, not in a VLAN of it, whose sender's address, at offset 14, is one
/// of these.
fn arp_from(index: u32, senders: &[Ipv4Addr]) -> io::Result<Vec<libc::sock_filter>> {
    let is = |value, jt, jf| op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, value);
    let word = |at| op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at);
    let nothing = op(libc::BPF_RET | libc::BPF_K, 0, 0, 0);
    let mut program = vec![word(WHOSE), is(ANOTHERS, 2, 0), word(INTERFACE), is(index, 1, 0)];
    program.extend([nothing, word(14)]);
    for (place, sender) in senders.iter().enumerate() {
        let to_the_end = u8::try_from(senders.len() - place);
        let to_the_end = to_the_end.map_err(|_| io::ErrorKind::InvalidInput)?;
        program.push(is(sender.to_bits(), to_the_end, 0));
    }
    program.extend([nothing, op(libc::BPF_RET | libc::BPF_K, 0, 0, ALL)]);
    Ok(program)
}

fn attach_filter(socket: &OwnedFd, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let filter = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which with its descriptor outlives the call.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            socklen(mem::size_of::<libc::sock_fprog>()),
        )
    };
    check(ret as isize)
}

fn address(index: u32, destination: [u8; 6]) -> io::Result<libc::sockaddr_ll> {
    // SAFETY: every bit pattern of zeroes is a valid `sockaddr_ll`, which holds integers only.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(|_| io::ErrorKind::InvalidInput)?;
    address.sll_protocol = IPV4;
    address.sll_ifindex = i32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
    address.sll_halen = 6;
    address.sll_addr[..6].copy_from_slice(&destination);
    Ok(address)
}

fn address_len() -> libc::socklen_t {
    socklen(mem::size_of::<libc::sockaddr_ll>())
}

#[allow(clippy::cast_possible_truncation, reason = "sizes of C structures are small")]
fn socklen(size: usize) -> libc::socklen_t {
    size as libc::socklen_t
}

fn check(ret: isize) -> io::Result<()> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
