//! Commands and completions as they lie in queues.
//! Source: NVMe 1.4 §4.2 "Submission Queue Entry – Command Format", figure 104; §4.6 "Completion
//! Queue Entry", figures 121 to 124; §4.6.1 "Status Field Definition", figures 126 to 129.
//!
//! | Byte of a command | Field                                                  |
//! |-------------------|--------------------------------------------------------|
//! | 0                 | opcode                                                 |
//! | 1                 | bits 1:0 fused operation, bits 7:6 PRP or SGL          |
//! | 2..4              | command identifier                                     |
//! | 4..8              | namespace identifier                                   |
//! | 16..24            | metadata pointer, unused: no namespace has metadata    |
//! | 24..32            | PRP entry 1                                            |
//! | 32..40            | PRP entry 2                                            |
//! | 40..64            | command dwords 10 to 15                                |

/// Bytes of a submission queue entry.
pub const SUBMISSION_SIZE: u32 = 64;
/// Bytes of a completion queue entry.
pub const COMPLETION_SIZE: u32 = 16;

/// Command identifier, namespace and the rest of one command, copied out of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Opcode.
    pub opcode: u8,
    /// Fused operation and pointer kind.
    pub flags: u8,
    /// Command identifier, the driver's.
    pub id: u16,
    /// Namespace identifier.
    pub namespace: u32,
    /// PRP entry 1.
    pub prp1: u64,
    /// PRP entry 2.
    pub prp2: u64,
    /// Command dwords 10 to 15.
    pub dwords: [u32; 6],
}

impl Command {
    /// Returns the command that `bytes` hold.
    pub fn from_bytes(bytes: &[u8; SUBMISSION_SIZE as usize]) -> Self {
        let dword = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let wide = |at: usize| u64::from(dword(at)) | u64::from(dword(at + 4)) << 32;
        Self {
            opcode: bytes[0],
            flags: bytes[1],
            id: u16::from_le_bytes([bytes[2], bytes[3]]),
            namespace: dword(4),
            prp1: wide(24),
            prp2: wide(32),
            dwords: [dword(40), dword(44), dword(48), dword(52), dword(56), dword(60)],
        }
    }

    /// Returns whether the command stands alone and names its memory by PRPs, the only kind here
    /// (figure 105: FUSE, PSDT).
    pub fn is_plain(&self) -> bool {
        self.flags & 0b1100_0011 == 0
    }

    /// Returns the starting LBA of a command that has one (dwords 10 and 11).
    pub fn starting_block(&self) -> u64 {
        u64::from(self.dwords[0]) | u64::from(self.dwords[1]) << 32
    }
}

/// A status code with its type (bits 10:8) and Do Not Retry (bit 14), as bits 15:1 of the
/// completion's status field hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(u16);

/// Trying again cannot help.
const DO_NOT_RETRY: u16 = 1 << 14;

impl Status {
    /// Generic 00h.
    pub const SUCCESS: Self = Self(0x000);
    /// Generic 01h, Invalid Command Opcode.
    pub const INVALID_OPCODE: Self = Self(0x001 | DO_NOT_RETRY);
    /// Generic 02h, Invalid Field in Command.
    pub const INVALID_FIELD: Self = Self(0x002 | DO_NOT_RETRY);
    /// Generic 04h, Data Transfer Error.
    pub const DATA_TRANSFER: Self = Self(0x004 | DO_NOT_RETRY);
    /// Generic 06h, Internal Error.
    pub const INTERNAL: Self = Self(0x006);
    /// Generic 07h, Command Abort Requested.
    pub const ABORTED: Self = Self(0x007);
    /// Generic 0Bh, Invalid Namespace or Format.
    pub const INVALID_NAMESPACE: Self = Self(0x00b | DO_NOT_RETRY);
    /// Generic 0Ch, Command Sequence Error.
    pub const SEQUENCE: Self = Self(0x00c | DO_NOT_RETRY);
    /// Generic 13h, PRP Offset Invalid.
    pub const PRP_OFFSET: Self = Self(0x013 | DO_NOT_RETRY);
    /// Generic 20h, Namespace is Write Protected.
    pub const WRITE_PROTECTED: Self = Self(0x020 | DO_NOT_RETRY);
    /// Generic 80h, LBA Out of Range.
    pub const OUT_OF_RANGE: Self = Self(0x080 | DO_NOT_RETRY);
    /// Command specific 00h, Completion Queue Invalid.
    pub const COMPLETION_QUEUE: Self = Self(0x100 | DO_NOT_RETRY);
    /// Command specific 01h, Invalid Queue Identifier.
    pub const QUEUE_IDENTIFIER: Self = Self(0x101 | DO_NOT_RETRY);
    /// Command specific 02h, Invalid Queue Size.
    pub const QUEUE_SIZE: Self = Self(0x102 | DO_NOT_RETRY);
    /// Command specific 05h, Asynchronous Event Request Limit Exceeded.
    pub const EVENT_LIMIT: Self = Self(0x105 | DO_NOT_RETRY);
    /// Command specific 08h, Invalid Interrupt Vector.
    pub const INTERRUPT_VECTOR: Self = Self(0x108 | DO_NOT_RETRY);
    /// Command specific 09h, Invalid Log Page.
    pub const LOG_PAGE: Self = Self(0x109 | DO_NOT_RETRY);
    /// Command specific 0Ch, Invalid Queue Deletion.
    pub const QUEUE_DELETION: Self = Self(0x10c | DO_NOT_RETRY);
    /// Command specific 0Dh, Feature Identifier Not Saveable.
    pub const NOT_SAVEABLE: Self = Self(0x10d | DO_NOT_RETRY);
    /// Command specific 0Fh, Feature Not Namespace Specific.
    pub const NOT_OF_NAMESPACE: Self = Self(0x10f | DO_NOT_RETRY);
    /// Media 80h, Write Fault.
    pub const WRITE_FAULT: Self = Self(0x280);
    /// Media 81h, Unrecovered Read Error.
    pub const READ_ERROR: Self = Self(0x281);

    /// Whether what the data is kept on failed.
    pub fn is_of_media(self) -> bool {
        self == Self::READ_ERROR || self == Self::WRITE_FAULT
    }

    /// Returns the 15 bits.
    pub fn bits(self) -> u16 {
        self.0
    }
}

/// What a completion says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Dword 0, with a meaning for some commands.
    pub result: u32,
    /// Where the submission queue's head is now.
    pub head: u16,
    /// The submission queue.
    pub queue: u16,
    /// The command.
    pub command: u16,
    /// How it ended.
    pub status: Status,
}

impl Completion {
    /// Returns the first three dwords, and the last one, which makes the entry valid: its bit 16
    /// is the phase tag.
    pub fn encode(&self, phase: u16) -> ([u8; 12], u32) {
        let mut front = [0; 12];
        front[..4].copy_from_slice(&self.result.to_le_bytes());
        front[8..10].copy_from_slice(&self.head.to_le_bytes());
        front[10..].copy_from_slice(&self.queue.to_le_bytes());
        let status = u32::from(self.status.bits()) << 1 | u32::from(phase & 1);
        (front, u32::from(self.command) | status << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_figure_puts_them() {
        let mut bytes = [0; 64];
        for (index, byte) in (0u8..).zip(bytes.iter_mut()) {
            *byte = index;
        }
        let command = Command::from_bytes(&bytes);
        assert_eq!((command.opcode, command.flags, command.id), (0, 1, 0x0302));
        assert_eq!(command.namespace, 0x0706_0504);
        assert_eq!(command.prp1, 0x1f1e_1d1c_1b1a_1918);
        assert_eq!(command.prp2, 0x2726_2524_2322_2120);
        assert_eq!(command.dwords[0], 0x2b2a_2928);
        assert_eq!(command.dwords[5], 0x3f3e_3d3c);
        assert_eq!(command.starting_block(), 0x2f2e_2d2c_2b2a_2928);
    }

    #[test]
    fn fused_commands_and_scatter_gather_lists_are_not_plain() {
        let plain = |flags| {
            Command::from_bytes(&{
                let mut bytes = [0; 64];
                bytes[1] = flags;
                bytes
            })
            .is_plain()
        };
        assert_eq!(
            [0, 1, 2, 0x40, 0x80, 0x3c].map(plain),
            [true, false, false, false, false, true]
        );
    }

    #[test]
    fn completions_carry_status_and_phase_in_the_last_dword() {
        let completion = Completion {
            result: 0x0102_0304,
            head: 0x0506,
            queue: 0x0708,
            command: 0x090a,
            status: Status::OUT_OF_RANGE,
        };
        let (front, last) = completion.encode(1);
        assert_eq!(front, [4, 3, 2, 1, 0, 0, 0, 0, 6, 5, 8, 7]);
        assert_eq!(last, 0x8101_090a);
        assert_eq!(completion.encode(0).1, 0x8100_090a);
    }
}
