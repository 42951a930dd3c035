//! Packet sockets that watch how addresses of a link are given and claimed: DHCP answers, and IPv6
//! neighbour discovery as far as it says whose an address is.
//! Source: `packet(7)`, Linux `Documentation/networking/filter.rst`.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use tokio::io::unix::AsyncFd;

/// All protocols, as `sockaddr_ll` wants it: only such sockets see what the node sends, too.
const EVERYTHING: u16 = 0x0003_u16.to_be();
/// Room for programs' results.
const ALL: u32 = u32::MAX;
/// Where the kernel shows a frame's protocol to a filter: `SKF_AD_OFF + SKF_AD_PROTOCOL`.
const PROTOCOL: u32 = u32::from_ne_bytes((-0x1000_i32).to_ne_bytes());

/// Which way a packet passed the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The interface received it.
    In,
    /// It was sent through the interface.
    Out,
}

/// Opens a socket that sees, in both directions, what the module's first line names, and nothing else.
///
/// Packets have no link header. Must be called inside a tokio runtime.
pub(crate) fn open(index: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes integers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    check(fd as isize)?;
    // SAFETY: the descriptor was just made and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // The filter comes first: protocol 0 receives nothing before `bind` names one.
    attach_filter(&socket)?;
    // SAFETY: every bit pattern of zeroes is a valid `sockaddr_ll`, which holds integers only.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(|_| io::ErrorKind::InvalidInput)?;
    address.sll_protocol = EVERYTHING;
    address.sll_ifindex = i32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the address outlives the call and the length is its own.
    let ret = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) };
    check(ret as isize)?;
    // SAFETY: an `OwnedFd` names the same open file until it is dropped, which is after it was
    // taken out of the reactor.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// Reads one packet. Returns its length, which may be more than there was room for, and its way.
pub(crate) fn read(socket: &OwnedFd, packet: &mut [u8]) -> io::Result<(usize, Passed)> {
    // SAFETY: every bit pattern of zeroes is a valid `sockaddr_ll`, which holds integers only.
    let mut from: libc::sockaddr_ll = unsafe { mem::zeroed() };
    let mut length = LENGTH;
    // SAFETY: the kernel writes at most `packet.len()` bytes to the buffer and `length` bytes to the
    // address; both outlive the call.
    let ret = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            packet.as_mut_ptr().cast(),
            packet.len(),
            0,
            (&raw mut from).cast(),
            &raw mut length,
        )
    };
    check(ret)?;
    let way = if from.sll_pkttype == libc::PACKET_OUTGOING { Passed::Out } else { Passed::In };
    Ok((usize::try_from(ret).unwrap_or(0), way))
}

#[allow(clippy::cast_possible_truncation, reason = "a sockaddr_ll has twenty bytes")]
const LENGTH: libc::socklen_t = mem::size_of::<libc::sockaddr_ll>() as libc::socklen_t;

/// Lets through UDP to port 68 that is no later fragment; solicitations from no address (ICMPv6 type
/// 135); and advertisements of neighbours (136).
fn attach_filter(socket: &OwnedFd) -> io::Result<()> {
    const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        // BPF opcodes have sixteen bits.
        #[allow(clippy::cast_possible_truncation, reason = "the constants fit")]
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    const fn word(at: u32) -> libc::sock_filter {
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
    }
    const fn byte(at: u32) -> libc::sock_filter {
        op(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, at)
    }
    const fn is(value: u32, jt: u8, jf: u8) -> libc::sock_filter {
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, value)
    }
    let mut program = [
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, PROTOCOL),
        is(0x86dd, 8, 0),  // 1: IPv6 goes on at 10
        is(0x0800, 0, 21), // 2: not even IPv4
        byte(9),           // 3: IPv4 protocol
        is(17, 0, 19),     // 4: is UDP
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 6), // 5: fragment offset
        op(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 17, 0, 0x1fff), // 6: is zero
        op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 0), // 7: header length
        op(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 2), // 8: destination port
        is(68, 13, 14),    // 9: is the client's
        byte(6),           // 10: next header
        is(58, 0, 12),     // 11: is ICMPv6
        byte(40),          // 12: its type
        is(136, 9, 0),     // 13: somebody has it
        is(135, 0, 9),     // 14: somebody asks
        word(8),           // 15: from no address
        is(0, 0, 7),
        word(12),
        is(0, 0, 5),
        word(16),
        is(0, 0, 3),
        word(20),                                   // 21
        is(0, 0, 1),                                // 22: falls to 23 when zero, else to 24
        op(libc::BPF_RET | libc::BPF_K, 0, 0, ALL), // 23: all of it
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),   // 24: nothing
    ];
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let filter = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let size = mem::size_of::<libc::sock_fprog>();
    let size = libc::socklen_t::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel copies the program, which with its descriptor outlives the call.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            size,
        )
    };
    check(ret as isize)
}

fn check(ret: isize) -> io::Result<()> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
