//! What is said to an NVMe drive to erase it, and how its answers are read. Pure.
//! Source: NVM Express Base Specification 1.4: §5.14 Get Log Page, §5.14.1.16.2 Sanitize Status, §5.15
//! Identify (figures 245 and 247), §5.23 Format NVM (figures 327 and 328), §5.24 Sanitize (figure 332).
//!
//! The drive wrote the answers, and a renter's commands shaped some of them.

use std::time::Duration;

/// Length of what Identify returns, in bytes.
pub const IDENTIFY: usize = 4096;
/// Length of the Sanitize Status log, in bytes.
pub const SANITIZE_LOG: usize = 512;
/// Stands for all namespaces.
pub const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// Opcodes of the admin command set (figure 139).
const GET_LOG_PAGE: u8 = 0x02;
const IDENTIFY_OPCODE: u8 = 0x06;
const FORMAT_NVM: u8 = 0x80;
const SANITIZE: u8 = 0x84;

/// Log page of the last sanitize operation.
const SANITIZE_STATUS: u32 = 0x81;

/// How long a drive may take to say what it is: it reads its own memory.
const SHORT: Duration = Duration::from_secs(10);
/// How long it may take to accept a sanitize operation, which goes on behind the command.
const ACCEPT: Duration = Duration::from_secs(60);

/// A command of the admin queue; dwords 11 to 15 are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Its name in messages.
    pub name: &'static str,
    /// Opcode.
    pub opcode: u8,
    /// Namespace.
    pub nsid: u32,
    /// Dword 10.
    pub cdw10: u32,
    /// How long it may take.
    pub limit: Duration,
}

/// What Identify tells of, by its CNS field (figure 244).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// One namespace.
    Namespace(u32),
    /// The controller.
    Controller,
    /// The first 1,024 namespaces that are attached to it.
    Active,
    /// The first 1,024 that exist, attached or not.
    Allocated,
}

impl Command {
    /// Identify.
    pub fn identify(about: About) -> Self {
        let (nsid, cns) = match about {
            About::Namespace(nsid) => (nsid, 0x00),
            About::Controller => (0, 0x01),
            About::Active => (0, 0x02),
            About::Allocated => (0, 0x10),
        };
        Self { name: "Identify", opcode: IDENTIFY_OPCODE, nsid, cdw10: cns, limit: SHORT }
    }

    /// Get Log Page of the Sanitize Status: bits 7:0 name the page, 31:16 count dwords less one.
    pub fn sanitize_status() -> Self {
        const DWORDS: u32 = 127;
        const { assert!(SANITIZE_LOG == 4 * (DWORDS as usize + 1)) };
        let cdw10 = DWORDS << 16 | SANITIZE_STATUS;
        let name = "Get Log Page (Sanitize Status)";
        Self { name, opcode: GET_LOG_PAGE, nsid: ALL_NAMESPACES, cdw10, limit: SHORT }
    }

    /// Sanitize: bits 2:0 are the action; bit 3 lets a drive whose operation failed be used for
    /// something else than another one.
    pub fn sanitize(action: Action) -> Self {
        const UNRESTRICTED_EXIT: u32 = 1 << 3;
        let cdw10 = action.code() | UNRESTRICTED_EXIT;
        Self { name: "Sanitize", opcode: SANITIZE, nsid: 0, cdw10, limit: ACCEPT }
    }

    /// Format NVM with a secure erase, in bits 11:9, of one namespace or of [`ALL_NAMESPACES`].
    pub fn format(nsid: u32, layout: Layout, erase: Erase, limit: Duration) -> Self {
        let ses = match erase {
            Erase::UserData => 1,
            Erase::Cryptographic => 2,
        };
        let cdw10 = layout.0 | ses << 9;
        Self { name: "Format NVM", opcode: FORMAT_NVM, nsid, cdw10, limit }
    }
}

/// How a sanitize operation erases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// All blocks are erased.
    BlockErase,
    /// The key of everything on the drive is changed.
    CryptoErase,
}

impl Action {
    /// Returns its code in dword 10, bits 2:0 (figure 332).
    const fn code(self) -> u32 {
        match self {
            Self::BlockErase => 2,
            Self::CryptoErase => 4,
        }
    }
}

/// How Format NVM erases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Erase {
    /// What can be read afterwards is not what was written.
    UserData,
    /// The key of the namespace is changed.
    Cryptographic,
}

/// How a drive is erased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By a sanitize operation, which leaves nothing out.
    Sanitize(Action),
    /// By formatting its namespaces.
    Format(Erase),
}

impl Method {
    /// Returns its name in events.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sanitize(Action::BlockErase) => "sanitize-block-erase",
            Self::Sanitize(Action::CryptoErase) => "sanitize-crypto-erase",
            Self::Format(Erase::UserData) => "format-user-data-erase",
            Self::Format(Erase::Cryptographic) => "format-crypto-erase",
        }
    }
}

/// What matters of a controller.
///
/// | Bytes   | Bits | Meaning                                                              |
/// |---------|------|----------------------------------------------------------------------|
/// | 257:256 | 1    | OACS: Format NVM                                                     |
/// |         | 3    | OACS: Namespace Management: there may be some that are not attached  |
/// | 331:328 | 0    | SANICAP: crypto erase                                                |
/// |         | 1    | SANICAP: block erase                                                 |
/// | 524     | 1    | FNA: a secure erase is of all namespaces                             |
/// |         | 2    | FNA: Format NVM can erase cryptographically                          |
/// |         | 3    | FNA: Format NVM takes no [`ALL_NAMESPACES`] (specification 2.0)      |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controller {
    oacs: u16,
    sanicap: u32,
    fna: u8,
}

impl Controller {
    /// Reads what Identify returned; `None` when that is too short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let oacs = u16::from_le_bytes(*bytes.get(256..)?.first_chunk()?);
        let sanicap = u32::from_le_bytes(*bytes.get(328..)?.first_chunk()?);
        Some(Self { oacs, sanicap, fna: *bytes.get(524)? })
    }

    /// Returns the ways to erase the drive that it says it has, the best first.
    pub fn methods(self) -> Vec<Method> {
        let all = [
            (self.sanicap & 1 << 0 != 0, Method::Sanitize(Action::CryptoErase)),
            (self.sanicap & 1 << 1 != 0, Method::Sanitize(Action::BlockErase)),
            (
                self.oacs & 1 << 1 != 0 && self.fna & 1 << 2 != 0,
                Method::Format(Erase::Cryptographic),
            ),
            (self.oacs & 1 << 1 != 0, Method::Format(Erase::UserData)),
        ];
        all.into_iter().filter_map(|(has, method)| has.then_some(method)).collect()
    }

    /// Whether namespaces may exist that are not attached.
    pub fn manages_namespaces(self) -> bool {
        self.oacs & 1 << 3 != 0
    }

    /// Returns which Format NVM commands erase all of `namespaces`, each to stay in its layout.
    pub fn formats(self, namespaces: &[(u32, Layout)]) -> Vec<(u32, Layout)> {
        let of_all = self.fna & 1 << 1 != 0 && self.fna & 1 << 3 == 0;
        match namespaces {
            // Another layout than the first one's would be lost.
            [(_, first), rest @ ..] if of_all && rest.iter().all(|(_, other)| other == first) => {
                vec![(ALL_NAMESPACES, *first)]
            }
            each => each.to_vec(),
        }
    }
}

/// A namespace's layout as Format NVM takes it, in dword 10.
///
/// | Bits  | From Identify Namespace         | Meaning                                          |
/// |-------|---------------------------------|--------------------------------------------------|
/// | 3:0   | FLBAS (byte 26) 3:0             | number of the LBA format                         |
/// | 4     | FLBAS 4                         | metadata is at the end of each block             |
/// | 7:5   | DPS (byte 29) 2:0               | kind of protection information                   |
/// | 8     | DPS 3                           | it is in the first eight bytes of the metadata   |
/// | 13:12 | FLBAS 6:5 (specification 2.0)   | upper bits of the format's number; 0 before 2.0  |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout(u32);

impl Layout {
    /// Reads what Identify returned; `None` when that is too short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (flbas, dps) = (u32::from(*bytes.get(26)?), u32::from(*bytes.get(29)?));
        Some(Self(flbas & 0x1f | (dps & 0x7) << 5 | (dps >> 3 & 1) << 8 | (flbas >> 5 & 3) << 12))
    }
}

/// Reads a list of namespaces: numbers of four bytes, ascending, zero after the last. `None` when it is
/// cut short, out of order, or so full that there may be more.
pub fn namespaces(bytes: &[u8]) -> Option<Vec<u32>> {
    let (numbers, _) = bytes.get(..IDENTIFY)?.as_chunks::<4>();
    let all: Vec<u32> =
        numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).take_while(|id| *id != 0).collect();
    let ascending = all.windows(2).all(|pair| pair[0] < pair[1]);
    (ascending && all.len() < numbers.len()).then_some(all)
}

/// How the last sanitize operation of a drive went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitized {
    /// There was none.
    Never,
    /// It was done.
    Done(Action),
    /// Another one than ours was done: an overwrite.
    Otherwise,
    /// It goes on.
    Running,
    /// It failed.
    Failed,
}

impl Sanitized {
    /// Reads the Sanitize Status log: bytes 3:2 bits 2:0 are the status, bytes 7:4 dword 10 of the
    /// command. `None` when it is cut short or says what no drive can say.
    pub fn parse(log: &[u8]) -> Option<Self> {
        let status = u16::from_le_bytes(*log.get(2..)?.first_chunk()?);
        let command = u32::from_le_bytes(*log.get(4..)?.first_chunk()?);
        let done = match command & 7 {
            code if code == Action::BlockErase.code() => Self::Done(Action::BlockErase),
            code if code == Action::CryptoErase.code() => Self::Done(Action::CryptoErase),
            _ => Self::Otherwise,
        };
        match status & 7 {
            0 => Some(Self::Never),
            // 4: blocks were deallocated although nobody should have; they are erased nevertheless.
            1 | 4 => Some(done),
            2 => Some(Self::Running),
            3 => Some(Self::Failed),
            _ => None,
        }
    }
}

/// Reads `bytes` as everything that a drive answers; for the fuzz target and for its corpus.
pub fn everything(bytes: &[u8]) -> (Option<Method>, usize) {
    let controller = Controller::parse(bytes);
    let list = namespaces(bytes).unwrap_or_default();
    let layout = Layout::parse(bytes);
    Sanitized::parse(bytes);
    let each: Vec<_> = list.iter().filter_map(|id| Some((*id, layout?))).collect();
    let formats = controller.map_or(0, |controller| controller.formats(&each).len());
    (controller.and_then(|controller| controller.methods().first().copied()), formats)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controller(oacs: u16, sanicap: u32, fna: u8) -> Controller {
        let mut bytes = vec![0; IDENTIFY];
        bytes[256..258].copy_from_slice(&oacs.to_le_bytes());
        bytes[328..332].copy_from_slice(&sanicap.to_le_bytes());
        bytes[524] = fna;
        Controller::parse(&bytes).expect("long enough")
    }

    fn layout(flbas: u8, dps: u8) -> Layout {
        let mut bytes = vec![0; IDENTIFY];
        (bytes[26], bytes[29]) = (flbas, dps);
        Layout::parse(&bytes).expect("long enough")
    }

    fn log(status: u16, command: u32) -> Vec<u8> {
        let mut bytes = vec![0; SANITIZE_LOG];
        bytes[2..4].copy_from_slice(&status.to_le_bytes());
        bytes[4..8].copy_from_slice(&command.to_le_bytes());
        bytes
    }

    #[test]
    fn commands_are_what_the_specification_says() {
        let dwords = |command: Command| (command.opcode, command.nsid, command.cdw10);
        assert_eq!(dwords(Command::identify(About::Namespace(7))), (0x06, 7, 0));
        assert_eq!(dwords(Command::identify(About::Controller)), (0x06, 0, 1));
        assert_eq!(dwords(Command::identify(About::Active)), (0x06, 0, 2));
        assert_eq!(dwords(Command::identify(About::Allocated)), (0x06, 0, 0x10));
        assert_eq!(dwords(Command::sanitize_status()), (0x02, 0xffff_ffff, 0x007f_0081));
        assert_eq!(dwords(Command::sanitize(Action::BlockErase)), (0x84, 0, 0b1010));
        assert_eq!(dwords(Command::sanitize(Action::CryptoErase)), (0x84, 0, 0b1100));
        let format = |flbas, dps, erase| {
            dwords(Command::format(3, layout(flbas, dps), erase, Duration::ZERO))
        };
        assert_eq!(format(0, 0, Erase::UserData), (0x80, 3, 0x200));
        assert_eq!(format(0, 0, Erase::Cryptographic), (0x80, 3, 0x400));
        assert_eq!(format(0x12, 0b1010, Erase::UserData), (0x80, 3, 0x200 | 0x152));
        assert_eq!(format(0x65, 0, Erase::UserData), (0x80, 3, 0x200 | 0x3005));
        assert_eq!(format(0x80, 0xf0, Erase::UserData), (0x80, 3, 0x200), "reserved bits");
    }

    #[test]
    fn the_ways_that_a_drive_has_come_the_best_first() {
        let methods = |oacs, sanicap, fna| controller(oacs, sanicap, fna).methods();
        let by_key = Method::Sanitize(Action::CryptoErase);
        let blocks = Method::Sanitize(Action::BlockErase);
        let format = Method::Format(Erase::UserData);
        let format_by_key = Method::Format(Erase::Cryptographic);
        assert_eq!(methods(2, 0b111, 4), [by_key, blocks, format_by_key, format]);
        assert_eq!(methods(0, 0b110, 4), [blocks]);
        assert_eq!(methods(2, 0b100, 4), [format_by_key, format]);
        assert_eq!(methods(2, 0, 3), [format]);
        assert_eq!(methods(0, 0b100, 7), [], "an overwrite is none of ours");
    }

    #[test]
    fn each_namespace_is_formatted_in_its_own_layout() {
        let (one, other) = (layout(0, 0), layout(1, 0));
        let formats = |fna, all: &[_]| controller(2, 0, fna).formats(all);
        let same = [(1, one), (4, one)];
        assert_eq!(formats(0, &same), same);
        assert_eq!(formats(2, &same), [(ALL_NAMESPACES, one)]);
        assert_eq!(formats(2 | 8, &same), same);
        let different = [(1, one), (4, other)];
        assert_eq!(formats(2, &different), different);
        assert_eq!(formats(2, &[]), []);
    }

    #[test]
    fn lists_are_read_to_their_end_or_not_at_all() {
        let list = |ids: &[u32]| {
            let mut bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            bytes.resize(IDENTIFY, 0);
            namespaces(&bytes)
        };
        assert_eq!(list(&[]), Some(Vec::new()));
        assert_eq!(list(&[1, 5, 0, 9]), Some(vec![1, 5]));
        assert_eq!(list(&[5, 1]), None);
        assert_eq!(list(&[5, 5]), None);
        assert_eq!(list(&(1..=1024).collect::<Vec<_>>()), None, "there may be more");
        assert_eq!(list(&(1..=1023).collect::<Vec<_>>()).map(|all| all.len()), Some(1023));
        assert_eq!(namespaces(&[0; IDENTIFY - 1]), None);
    }

    #[test]
    fn the_log_tells_how_the_last_operation_went() {
        let read = |status, command| Sanitized::parse(&log(status, command));
        assert_eq!(read(0, 0), Some(Sanitized::Never));
        assert_eq!(read(0x101, 0b1100), Some(Sanitized::Done(Action::CryptoErase)));
        assert_eq!(read(4, 0b0010), Some(Sanitized::Done(Action::BlockErase)));
        assert_eq!(read(1, 0b0011), Some(Sanitized::Otherwise));
        assert_eq!(read(2, 0b1100), Some(Sanitized::Running));
        assert_eq!(read(3, 0b1100), Some(Sanitized::Failed));
        assert_eq!(read(7, 0b1100), None);
        assert_eq!(Sanitized::parse(&[0xff; SANITIZE_LOG]), None);
    }

    #[test]
    fn answers_that_are_cut_short_are_survived() {
        (0..600).for_each(|length| {
            everything(&vec![0xff; length]);
        });
        assert_eq!(Controller::parse(&[0; 524]), None);
        assert_eq!(Layout::parse(&[0; 29]), None);
        assert_eq!(Sanitized::parse(&[0; 7]), None);
        assert_eq!(everything(&[0xff; IDENTIFY]).1, 0);
    }
}
