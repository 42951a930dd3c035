//! The packets of the simple network time protocol. Pure.
//! Source: RFC 5905 §7.3 and §14, RFC 4330 §5; random transmit timestamp as in
//! draft-ietf-ntp-data-minimization.
//!
//! | Offset | Size | Field                                             |
//! |--------|------|---------------------------------------------------|
//! | 0      | 1    | leap indicator (2 bits), version (3), mode (3)    |
//! | 1      | 1    | stratum; 0 with a code in the reference identifier |
//! | 2      | 1    | poll interval                                     |
//! | 3      | 1    | precision, a power of two of seconds              |
//! | 4      | 4    | root delay, 16.16 seconds                         |
//! | 8      | 4    | root dispersion, 16.16 seconds                    |
//! | 12     | 4    | reference identifier                              |
//! | 16     | 8    | reference timestamp                               |
//! | 24     | 8    | origin timestamp: the request's transmit timestamp |
//! | 32     | 8    | receive timestamp                                 |
//! | 40     | 8    | transmit timestamp                                |

use std::fmt;

/// Length of a packet without extensions.
pub const PACKET: usize = 48;
/// UDP port of servers.
pub const PORT: u16 = 123;

/// Seconds from 1900 to 1970.
const NTP_TO_UNIX: i128 = 2_208_988_800;
/// 2020-01-01T00:00:00Z: earlier times belong to the era after 2036.
const PIVOT: i128 = 1_577_836_800;
const ERA: i128 = 1 << 32;
const NANOS: i128 = 1_000_000_000;
/// Sources that say they may be off by more are of no use. RFC 5905 MAXDISP is 16 s.
const MAX_ERROR_NS: i128 = 16 * NANOS;
/// Nobody is believed to be better than this. RFC 5905 MINDISP.
const MIN_ERROR_NS: i128 = 5_000_000;
/// How much longer a server may say that it took than passed here: its clock and this one have steps, of a
/// sixtieth of a second on some servers, and run at different speeds while one of them is slewed.
const MAX_SURPLUS_NS: i128 = 50_000_000;
/// Leap indicator of a clock that is not set.
const UNSYNCHRONIZED: u8 = 3;
const SERVER_MODE: u8 = 4;
/// First byte of a request: version 4, client.
const REQUEST: u8 = 0b00_100_011;

/// A point in time as nanoseconds since 1970-01-01T00:00:00Z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixNanos(pub i128);

/// What one answer tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// True time minus system time, in nanoseconds.
    pub offset_ns: i128,
    /// The offset is right within this, says the source; at least 5 ms.
    pub error_ns: i128,
    /// Distance from a reference clock, 1 to 15.
    pub stratum: u8,
}

/// When a request left and its answer came, by the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The random number in the request.
    pub nonce: u64,
    /// When it left.
    pub sent: UnixNanos,
    /// When the answer came.
    pub received: UnixNanos,
}

/// Why an answer tells nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error("the answer has {found} bytes, not {PACKET} or more")]
    Length { found: usize },
    #[error("the answer is in mode {found}, not {SERVER_MODE} (server)")]
    Mode { found: u8 },
    #[error("the answer is to another request")]
    Origin,
    #[error("the server says its clock is not set")]
    Unsynchronized,
    #[error("the server {code}")]
    KissOfDeath { code: KissCode },
    #[error("the answer's times contradict each other")]
    Contradiction,
    #[error("the server says it may be off by more than 16 s")]
    Inaccurate,
}

/// Why a server tells no time, in four letters. Source: RFC 5905 §7.4, figure 13.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KissCode(pub [u8; 4]);

impl fmt::Display for KissCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match &self.0 {
            b"INIT" => "has not set its own clock yet",
            b"STEP" => "has just set its own clock, and is not sure of it yet",
            b"RATE" => "wants to be asked less often",
            b"DENY" | b"RSTR" => "refuses this node",
            _ => "tells no time",
        };
        write!(f, "{meaning} (code {})", self.0.escape_ascii())
    }
}

/// Returns a request. The server learns nothing of the local clock.
pub fn request(nonce: u64) -> [u8; PACKET] {
    let mut packet = [0; PACKET];
    packet[0] = REQUEST;
    packet[40..48].copy_from_slice(&nonce.to_be_bytes());
    packet
}

/// Reads an answer.
pub fn parse(answer: &[u8], exchange: &Exchange) -> Result<Sample, Refusal> {
    let packet: &[u8; PACKET] =
        answer.first_chunk().ok_or(Refusal::Length { found: answer.len() })?;
    let (leap, mode, stratum) = (packet[0] >> 6, packet[0] & 0b111, packet[1]);
    if mode != SERVER_MODE {
        return Err(Refusal::Mode { found: mode });
    }
    if u64_at(packet, 24) != exchange.nonce {
        return Err(Refusal::Origin);
    }
    if stratum == 0 {
        let code = KissCode([packet[12], packet[13], packet[14], packet[15]]);
        return Err(Refusal::KissOfDeath { code });
    }
    if leap == UNSYNCHRONIZED || stratum > 15 {
        return Err(Refusal::Unsynchronized);
    }
    let arrived = time(u64_at(packet, 32)).ok_or(Refusal::Contradiction)?;
    let left = time(u64_at(packet, 40)).ok_or(Refusal::Contradiction)?;
    // RFC 5905 §8: how long it was under way, and how far the clocks are apart.
    let round_trip = exchange.received.0 - exchange.sent.0;
    let delay = round_trip - (left - arrived);
    if round_trip < 0 || left < arrived || delay < -MAX_SURPLUS_NS {
        return Err(Refusal::Contradiction);
    }
    let (delay, surplus) = (delay.max(0), (-delay).max(0));
    let offset_ns = ((arrived - exchange.sent.0) + (left - exchange.received.0)) / 2;
    let root = short(packet, 4) / 2 + short(packet, 8);
    let error_ns = (delay / 2 + surplus + root).max(MIN_ERROR_NS);
    if error_ns > MAX_ERROR_NS {
        return Err(Refusal::Inaccurate);
    }
    Ok(Sample { offset_ns, error_ns, stratum })
}

/// Nanoseconds since 1970 of an NTP timestamp; `None` when it is not set.
fn time(timestamp: u64) -> Option<i128> {
    if timestamp == 0 {
        return None;
    }
    let seconds = i128::from(timestamp >> 32) - NTP_TO_UNIX;
    let seconds = if seconds < PIVOT { seconds + ERA } else { seconds };
    let fraction = (i128::from(timestamp & 0xffff_ffff) * NANOS) >> 32;
    Some(seconds * NANOS + fraction)
}

/// Nanoseconds of a 16.16 number of seconds.
fn short(packet: &[u8; PACKET], offset: usize) -> i128 {
    let value = u32::from_be_bytes([
        packet[offset],
        packet[offset + 1],
        packet[offset + 2],
        packet[offset + 3],
    ]);
    (i128::from(value) * NANOS) >> 16
}

fn u64_at(packet: &[u8; PACKET], offset: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&packet[offset..offset + 8]);
    u64::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-21T00:00:00Z.
    const NOW: i128 = 1_795_219_200;

    fn ntp(seconds: i128) -> [u8; 8] {
        let seconds = (seconds + NTP_TO_UNIX) % ERA;
        u64::try_from(seconds << 32).expect("an era").to_be_bytes()
    }

    /// An answer of a server at `time`, which took no time to answer.
    fn answer(time: i128) -> [u8; PACKET] {
        let mut packet = [0; PACKET];
        packet[0] = 0b00_100_100;
        packet[1] = 2;
        packet[4..8].copy_from_slice(&0x0000_8000_u32.to_be_bytes());
        packet[8..12].copy_from_slice(&0x0000_4000_u32.to_be_bytes());
        packet[24..32].copy_from_slice(&7_u64.to_be_bytes());
        packet[32..40].copy_from_slice(&ntp(time));
        packet[40..48].copy_from_slice(&ntp(time));
        packet
    }

    /// An exchange that took two seconds.
    fn exchange() -> Exchange {
        Exchange { nonce: 7, sent: UnixNanos(NOW * NANOS), received: UnixNanos((NOW + 2) * NANOS) }
    }

    #[test]
    fn the_offset_is_measured_from_the_middle_of_the_exchange() {
        let sample = parse(&answer(NOW + 11), &exchange()).expect("an answer");
        assert_eq!(sample.offset_ns, 10 * NANOS);
        // Half of two seconds under way, a quarter for the root's delay, and its dispersion.
        assert_eq!(sample.error_ns, NANOS + NANOS / 2);
        assert_eq!(sample.stratum, 2);
    }

    #[test]
    fn times_after_2036_belong_to_the_next_era() {
        let later = 2_500_000_000;
        let sample = parse(&answer(later), &exchange()).expect("an answer");
        assert_eq!(sample.offset_ns, (later - NOW - 1) * NANOS);
    }

    #[test]
    fn a_request_names_only_its_nonce() {
        let packet = request(7);
        assert_eq!(packet[0], 0x23);
        assert_eq!(packet[40..], 7_u64.to_be_bytes());
        assert!(packet[1..40].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_near_server_whose_clock_has_coarse_steps_is_believed_and_no_more_exact_for_it() {
        let left = |ms: u64| {
            let mut packet = answer(NOW);
            let stamp = u64::from_be_bytes(ntp(NOW)) + (ms << 32) / 1000;
            packet[40..48].copy_from_slice(&stamp.to_be_bytes());
            parse(&packet, &exchange())
        };
        // Two seconds passed here. Half a second is the root's.
        let root = NANOS / 2;
        let surplus = left(2040).expect("believed").error_ns - root;
        assert!((39_999_999..=40_000_000).contains(&surplus), "{surplus}");
        assert_eq!(left(2000).expect("believed").error_ns, root);
        assert_eq!(left(2060), Err(Refusal::Contradiction));
    }

    #[test]
    fn each_flaw_is_refused() {
        let check = |change: fn(&mut [u8; PACKET]), refusal| {
            let mut packet = answer(NOW);
            change(&mut packet);
            assert_eq!(parse(&packet, &exchange()), Err(refusal));
        };
        check(|packet| packet[0] = REQUEST, Refusal::Mode { found: 3 });
        check(|packet| packet[24] = 1, Refusal::Origin);
        check(|packet| packet[0] |= 0xc0, Refusal::Unsynchronized);
        check(|packet| packet[1] = 16, Refusal::Unsynchronized);
        check(|packet| packet[32..40].fill(0), Refusal::Contradiction);
        check(|packet| packet[8] = 1, Refusal::Inaccurate);
        check(
            |packet| {
                packet[1] = 0;
                packet[12..16].copy_from_slice(b"RATE");
            },
            Refusal::KissOfDeath { code: KissCode(*b"RATE") },
        );
        // It says that it answered three seconds after the question came; two had passed.
        check(|packet| packet[40..48].copy_from_slice(&ntp(NOW + 3)), Refusal::Contradiction);
        assert_eq!(parse(&[0; 47], &exchange()), Err(Refusal::Length { found: 47 }));
    }

    #[test]
    fn what_a_server_says_instead_of_the_time_is_told_in_words() {
        let told = |code| Refusal::KissOfDeath { code: KissCode(code) }.to_string();
        assert_eq!(told(*b"INIT"), "the server has not set its own clock yet (code INIT)");
        assert_eq!(told(*b"DENY"), "the server refuses this node (code DENY)");
        assert_eq!(told([b'X', 0, 0x1b, b'\n']), r"the server tells no time (code X\x00\x1b\n)");
    }
}
