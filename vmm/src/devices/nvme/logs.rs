//! The logs: errors, and what a health check reads.
//! Source: NVMe 1.4 §5.14.1.1 "Error Information", figure 193; §5.14.1.2 "SMART / Health
//! Information", figure 194.

use std::collections::VecDeque;

use super::{
    command::{Command, Status},
    identify::ERROR_ENTRIES,
};

/// Bytes of an error log entry.
const ENTRY_SIZE: usize = 64;
/// Bytes of the health log.
const HEALTH_SIZE: usize = 512;
/// 37 °C, in kelvin: nobody measures.
pub const KELVIN: u16 = 310;
/// Data units are counted in thousands of 512 bytes.
const DATA_UNIT: u64 = 512_000;

/// Bit 1 of the critical warning: the temperature is beyond a threshold.
const TEMPERATURE: u8 = 1 << 1;

/// What the health log warns of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warning {
    /// Nothing.
    None,
    /// The temperature.
    Temperature,
}

/// Counters and the latest errors.
#[derive(Debug, Default)]
pub struct Logs {
    errors: VecDeque<[u8; ENTRY_SIZE]>,
    error_count: u64,
    reads: u64,
    writes: u64,
    read_bytes: u64,
    written_bytes: u64,
    media_errors: u64,
}

impl Logs {
    /// Counts a read of `bytes`.
    pub fn read(&mut self, bytes: u64) {
        self.reads = self.reads.saturating_add(1);
        self.read_bytes = self.read_bytes.saturating_add(bytes);
    }

    /// Counts a write of `bytes`.
    pub fn write(&mut self, bytes: u64) {
        self.writes = self.writes.saturating_add(1);
        self.written_bytes = self.written_bytes.saturating_add(bytes);
    }

    /// Notes a command of `queue` that failed.
    pub fn error(&mut self, queue: u16, command: &Command, status: Status) {
        self.error_count = self.error_count.saturating_add(1);
        if status.is_of_media() {
            self.media_errors = self.media_errors.saturating_add(1);
        }
        let mut entry = [0; ENTRY_SIZE];
        entry[..8].copy_from_slice(&self.error_count.to_le_bytes());
        entry[8..10].copy_from_slice(&queue.to_le_bytes());
        entry[10..12].copy_from_slice(&command.id.to_le_bytes());
        entry[12..14].copy_from_slice(&(status.bits() << 1).to_le_bytes());
        // No parameter in particular is to blame.
        entry[14..16].copy_from_slice(&u16::MAX.to_le_bytes());
        // Commands of the admin queue name no block.
        let block = if queue == 0 { 0 } else { command.starting_block() };
        entry[16..24].copy_from_slice(&block.to_le_bytes());
        entry[24..28].copy_from_slice(&command.namespace.to_le_bytes());
        self.errors.truncate(ERROR_ENTRIES - 1);
        self.errors.push_front(entry);
    }

    /// Returns the error log, newest first.
    pub fn error_log(&self) -> Vec<u8> {
        let mut log: Vec<u8> = self.errors.iter().flatten().copied().collect();
        log.resize(ENTRY_SIZE * ERROR_ENTRIES, 0);
        log
    }

    /// Returns the health log.
    pub fn health_log(&self, warning: Warning) -> [u8; HEALTH_SIZE] {
        let mut log = [0; HEALTH_SIZE];
        log[0] = if warning == Warning::Temperature { TEMPERATURE } else { 0 };
        log[1..3].copy_from_slice(&KELVIN.to_le_bytes());
        // Available spare and its threshold, in percent.
        log[3..5].copy_from_slice(&[100, 10]);
        let counters = [
            (32, self.read_bytes.div_ceil(DATA_UNIT)),
            (48, self.written_bytes.div_ceil(DATA_UNIT)),
            (64, self.reads),
            (80, self.writes),
            // Power cycles.
            (112, 1),
            (160, self.media_errors),
            (176, self.error_count),
        ];
        for (offset, value) in counters {
            log[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        }
        log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(id: u16) -> Command {
        Command {
            opcode: 2,
            flags: 0,
            id,
            namespace: 1,
            prp1: 0,
            prp2: 0,
            dwords: [9, 0, 0, 0, 0, 0],
        }
    }

    #[test]
    fn the_newest_errors_come_first_and_old_ones_go() {
        let mut logs = Logs::default();
        assert_eq!(logs.error_log(), [0; 1024]);
        for id in 0..20 {
            logs.error(3, &command(id), Status::OUT_OF_RANGE);
        }
        let log = logs.error_log();
        assert_eq!((log.len(), log[0], log[8], log[10], log[16], log[24]), (1024, 20, 3, 19, 9, 1));
        assert_eq!(log[12..14], (0x4080u16 << 1).to_le_bytes());
        assert_eq!((log[960], log[970]), (5, 4));
    }

    #[test]
    fn errors_of_admin_commands_name_no_block() {
        let mut logs = Logs::default();
        logs.error(0, &command(7), Status::INVALID_FIELD);
        assert_eq!((logs.error_log()[10], &logs.error_log()[16..24]), (7, &[0; 8][..]));
    }

    #[test]
    fn health_counts_what_was_done() {
        let mut logs = Logs::default();
        logs.read(512);
        logs.read(1 << 20);
        logs.write(4096);
        logs.error(1, &command(1), Status::READ_ERROR);
        let log = logs.health_log(Warning::None);
        assert_eq!((log[0], logs.health_log(Warning::Temperature)[0]), (0, 2));
        assert_eq!((log[3], log[4], log[32], log[48], log[64], log[80]), (100, 10, 3, 1, 2, 1));
        assert_eq!((log[160], log[176]), (1, 1));
    }
}
