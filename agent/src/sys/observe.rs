//! Packet sockets that watch how addresses of a link are given and claimed: DHCP, and ARP and IPv6
//! neighbour discovery as far as they say whose an address is.
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
/// Where the kernel shows a filter which way a frame goes, and whether it had a VLAN tag, which is not
/// in the frame any more: `SKF_AD_OFF + SKF_AD_PKTTYPE` and `SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT`.
const WAY: u32 = u32::from_ne_bytes((-0x1000_i32 + 4).to_ne_bytes());
const IS_TAGGED: u32 = u32::from_ne_bytes((-0x1000_i32 + 48).to_ne_bytes());
/// `PACKET_OUTGOING`.
const OUTGOING: u32 = 4;

/// What a socket sees. Frames with a VLAN tag are for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watched {
    /// DHCP both ways, in order: UDP to port 67 or 68 that is no later fragment. And solicitations from
    /// no address (ICMPv6 type 135).
    Claims,
    /// What the interface sends of neighbours' advertisements (136), of solicitations from no address, and
    /// of ARP's answers: nobody at its other end can crowd it out.
    Defences,
    /// What the interface receives of neighbours' solicitations (135) and advertisements (136): their
    /// sources, and what is advertised, are in use at its other end.
    Uses,
}

/// Which way a packet passed the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The interface received it.
    In,
    /// It was sent through the interface.
    Out,
}

/// Opens a socket that sees what `watched` says, and nothing else.
///
/// Frames begin with their Ethernet header. Must be called inside a tokio runtime.
pub(crate) fn open(index: u32, watched: Watched) -> io::Result<AsyncFd<OwnedFd>> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes integers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    check(fd as isize)?;
    // SAFETY: the descriptor was just made and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // The filter comes first: protocol 0 receives nothing before `bind` names one.
    attach_filter(&socket, &mut program(watched))?;
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

/// Returns how many frames the kernel dropped since the last question, because they came faster than
/// they were read (`PACKET_STATISTICS`).
pub(crate) fn lost(socket: &OwnedFd) -> io::Result<u32> {
    // `struct tpacket_stats`: frames that came, and of them the dropped ones.
    let mut statistics = [0_u32; 2];
    let size = mem::size_of_val(&statistics);
    let mut size = libc::socklen_t::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel writes at most `size` bytes to the statistics; both outlive the call.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut statistics).cast(),
            &raw mut size,
        )
    };
    check(ret as isize)?;
    Ok(statistics[1])
}

const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    // BPF opcodes have sixteen bits.
    #[allow(clippy::cast_possible_truncation, reason = "the constants fit")]
    libc::sock_filter { code: code as u16, jt, jf, k }
}

const fn word(at: u32) -> libc::sock_filter {
    op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
}

const fn half(at: u32) -> libc::sock_filter {
    op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, at)
}

const fn byte(at: u32) -> libc::sock_filter {
    op(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, at)
}

const fn is(value: u32, jt: u8, jf: u8) -> libc::sock_filter {
    op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, value)
}

/// The end of every program: an IPv6 source of no address, and the two verdicts. It is entered at its
/// first instruction, or at one of the last two.
const END: [libc::sock_filter; 10] = [
    word(22), // 0: the source
    is(0, 0, 7),
    word(26), // 2
    is(0, 0, 5),
    word(30), // 4
    is(0, 0, 3),
    word(34),                                   // 6
    is(0, 0, 1),                                // 7: falls to 8 when zero, else to 9
    op(libc::BPF_RET | libc::BPF_K, 0, 0, ALL), // 8: all of it
    op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),   // 9: nothing
];

/// Offsets are those of frames: an Ethernet header of fourteen bytes comes first.
fn program(watched: Watched) -> Vec<libc::sock_filter> {
    let begin: &[libc::sock_filter] = match watched {
        Watched::Claims => &[
            word(IS_TAGGED),
            is(0, 0, 24),      // 1: it is not
            half(12),          // 2: protocol
            is(0x86dd, 9, 0),  // 3: IPv6 goes on at 13
            is(0x0800, 0, 21), // 4: not even IPv4
            byte(23),          // 5: IPv4 protocol
            is(17, 0, 19),     // 6: is UDP
            half(20),          // 7: fragment offset
            op(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 17, 0, 0x1fff), // 8: is zero
            op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14), // 9: header length
            op(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 16), // 10: destination port
            is(67, 13, 0),     // 11: is a server's
            is(68, 12, 13),    // 12: is a client's
            byte(20),          // 13: next header
            is(58, 0, 11),     // 14: is ICMPv6
            byte(54),          // 15: its type
            is(135, 0, 9),     // 16: asks; END is at 17
        ],
        Watched::Defences => &[
            word(WAY),
            is(OUTGOING, 0, 21), // 1: to whoever is at the other end
            word(IS_TAGGED),
            is(0, 0, 19), // 3: it is not
            half(12),
            is(0x86dd, 3, 0),  // 5: IPv6 goes on at 9
            is(0x0806, 0, 16), // 6: not even ARP
            half(20),
            is(2, 13, 14), // 8: somebody answers
            byte(20),
            is(58, 0, 12), // 10: is ICMPv6
            byte(54),
            is(136, 9, 0), // 12: somebody has it
            is(135, 0, 9), // 13: somebody asks; END is at 14
        ],
        Watched::Uses => &[
            word(WAY),
            is(OUTGOING, 18, 0), // 1: from whoever is at the other end
            word(IS_TAGGED),
            is(0, 0, 16), // 3: it is not
            half(12),
            is(0x86dd, 0, 14), // 5: is IPv6
            byte(20),
            is(58, 0, 12), // 7: is ICMPv6
            byte(54),
            is(136, 9, 0), // 9: answers
            is(135, 8, 9), // 10: asks; END is at 11
        ],
    };
    [begin, &END[..]].concat()
}

fn attach_filter(socket: &OwnedFd, program: &mut [libc::sock_filter]) -> io::Result<()> {
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
