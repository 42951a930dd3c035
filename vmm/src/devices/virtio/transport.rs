//! The common configuration structure of virtio over PCI, as a register machine.
//! Source: virtio §4.1.4.3 "Common configuration structure layout"; §2.1 "Device Status Field";
//! §3.1.1 "Driver Requirements: Device Initialization".
//!
//! | Offset | Bytes | Access | Register              | Writes count                             |
//! |--------|-------|--------|-----------------------|------------------------------------------|
//! | 0x00   | 4     | rw     | device_feature_select | always                                   |
//! | 0x04   | 4     | r      | device_feature        |                                          |
//! | 0x08   | 4     | rw     | driver_feature_select | always                                   |
//! | 0x0c   | 4     | rw     | driver_feature        | until FEATURES_OK                        |
//! | 0x10   | 2     | rw     | config_msix_vector    | always                                   |
//! | 0x12   | 2     | r      | num_queues            |                                          |
//! | 0x14   | 1     | rw     | device_status         | bits are only added; 0 resets            |
//! | 0x15   | 1     | r      | config_generation     |                                          |
//! | 0x16   | 2     | rw     | queue_select          | always                                   |
//! | 0x18   | 2     | rw     | queue_size            | until the queue is enabled or DRIVER_OK  |
//! | 0x1a   | 2     | rw     | queue_msix_vector     | always                                   |
//! | 0x1c   | 2     | rw     | queue_enable          | 1 only, once, before DRIVER_OK           |
//! | 0x1e   | 2     | r      | queue_notify_off      |                                          |
//! | 0x20   | 8     | rw     | queue_desc            | until the queue is enabled or DRIVER_OK  |
//! | 0x28   | 8     | rw     | queue_driver          | until the queue is enabled or DRIVER_OK  |
//! | 0x30   | 8     | rw     | queue_device          | until the queue is enabled or DRIVER_OK  |
//! | 0x38   | 2     | r      | queue_notify_data     | reads 0, the feature is not offered      |
//! | 0x3a   | 2     | r      | queue_reset           | reads 0, the feature is not offered      |
//!
//! What the queue code trusts is [`QueueLayout`]: size and addresses are checked and latched when the
//! driver enables the queue, and nothing written later reaches it. The vector is followed as it is written.

use super::{F_VERSION_1, MAX_RING_SIZE};

/// Bytes of the structure.
pub const COMMON_CONFIG_SIZE: u16 = 0x3c;

/// "No vector" in the two vector registers (virtio §4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;

/// The guest has noticed the device (virtio §2.1).
pub const STATUS_ACKNOWLEDGE: u8 = 1;
/// The guest knows how to drive the device.
pub const STATUS_DRIVER: u8 = 2;
/// The driver is ready.
pub const STATUS_DRIVER_OK: u8 = 4;
/// Features are agreed on.
pub const STATUS_FEATURES_OK: u8 = 8;
/// The device cannot go on until it is reset. Only the device sets it.
pub const STATUS_NEEDS_RESET: u8 = 64;
/// The guest gave up on the device.
pub const STATUS_FAILED: u8 = 128;

/// Bits of the status that the driver may set.
const STATUS_DRIVER_BITS: u8 =
    STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_DRIVER_OK | STATUS_FEATURES_OK | STATUS_FAILED;

/// Tells the transport whether a ring lies in guest memory.
pub trait RingMemory {
    /// Returns whether `length` bytes at `address` are memory, all in one region.
    fn contains(&self, address: u64, length: u64) -> bool;
}

/// Size and addresses of one queue, checked and latched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLayout {
    /// Entries, a power of two, at most [`MAX_RING_SIZE`].
    pub size: u16,
    /// Descriptor table, 16-byte aligned.
    pub descriptors: u64,
    /// Available ring (driver area), 2-byte aligned.
    pub available: u64,
    /// Used ring (device area), 4-byte aligned.
    pub used: u64,
}

impl QueueLayout {
    /// Returns whether size, alignment (virtio §2.7) and place are right.
    fn is_valid(&self, memory: &impl RingMemory) -> bool {
        let entries = u64::from(self.size);
        self.size.is_power_of_two()
            && self.size <= MAX_RING_SIZE
            && self.descriptors.is_multiple_of(16)
            && self.available.is_multiple_of(2)
            && self.available != 0
            && self.used.is_multiple_of(4)
            && memory.contains(self.descriptors, 16 * entries)
            && memory.contains(self.available, 6 + 2 * entries)
            && memory.contains(self.used, 6 + 8 * entries)
    }
}

/// What the shell has to do after a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The driver is ready: hand these queues, by index, to the device.
    Activate(Vec<(u16, QueueLayout)>),
    /// The driver wants a reset. The status keeps its value until [`Transport::finish_reset`].
    Reset,
}

/// Registers of one queue.
#[derive(Debug, Clone, Copy)]
struct QueueRegisters {
    layout: QueueLayout,
    /// MSI-X vector, or [`NO_VECTOR`]. It is no part of where the ring is: drivers may choose it
    /// when the queue is enabled, and when the device is running (virtio §4.1.5.1.2.1 knows no order).
    vector: u16,
    enabled: bool,
}

impl Default for QueueRegisters {
    fn default() -> Self {
        Self {
            layout: QueueLayout { size: MAX_RING_SIZE, descriptors: 0, available: 0, used: 0 },
            vector: NO_VECTOR,
            enabled: false,
        }
    }
}

/// The register machine.
#[derive(Debug, Clone)]
pub struct Transport {
    offered: u64,
    vectors: u16,
    status: u8,
    needs_reset: bool,
    resetting: bool,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl Transport {
    /// Returns the registers after reset, of a device that offers `features` on `queues` queues
    /// and has `vectors` MSI-X vectors.
    pub fn new(features: u64, queues: u16, vectors: u16) -> Self {
        Self {
            offered: features | F_VERSION_1,
            vectors,
            status: 0,
            needs_reset: false,
            resetting: false,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            queue_select: 0,
            queues: vec![QueueRegisters::default(); usize::from(queues)],
        }
    }

    /// Returns the device status, without DEVICE_NEEDS_RESET.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// The device cannot go on: the status says so until the next reset.
    pub fn set_needs_reset(&mut self) {
        self.needs_reset = true;
    }

    /// Returns whether the driver has said DRIVER_OK.
    pub fn is_live(&self) -> bool {
        self.status & STATUS_DRIVER_OK != 0
    }

    /// Returns whether a reset was asked for and is not finished.
    pub fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Returns the features both sides agreed on.
    pub fn features(&self) -> u64 {
        self.driver_features
    }

    /// Returns the vector of configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config_vector
    }

    /// Returns the vector of a queue.
    pub fn queue_vector(&self, index: u16) -> u16 {
        self.queues.get(usize::from(index)).map_or(NO_VECTOR, |queue| queue.vector)
    }

    /// The device has let go of its queues: every register takes its initial value.
    pub fn finish_reset(&mut self) {
        let queues = u16::try_from(self.queues.len()).unwrap_or(0);
        *self = Self::new(self.offered, queues, self.vectors);
    }

    /// Reads `data.len()` bytes at `offset`. Any width is answered; past the end are zeroes.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let image = self.image();
        for (index, byte) in (0u64..).zip(data.iter_mut()) {
            *byte = offset
                .checked_add(index)
                .and_then(|at| usize::try_from(at).ok())
                .and_then(|at| image.get(at).copied())
                .unwrap_or(0);
        }
    }

    /// Writes a register. Writes that do not match a register's offset and width (virtio
    /// §4.1.3.1), that come at the wrong time or that make no sense change nothing.
    pub fn write(&mut self, offset: u64, data: &[u8], memory: &impl RingMemory) -> Effect {
        if self.resetting {
            return Effect::None;
        }
        match (offset, data) {
            (0x00, &[a, b, c, d]) => self.device_feature_select = u32::from_le_bytes([a, b, c, d]),
            (0x08, &[a, b, c, d]) => self.driver_feature_select = u32::from_le_bytes([a, b, c, d]),
            (0x0c, &[a, b, c, d]) => self.write_driver_feature(u32::from_le_bytes([a, b, c, d])),
            (0x10, &[a, b]) => self.config_vector = self.checked_vector(u16::from_le_bytes([a, b])),
            (0x14, &[status]) => return self.write_status(status),
            (0x16, &[a, b]) => self.queue_select = u16::from_le_bytes([a, b]),
            (0x18..=0x37, _) => self.write_queue(offset, data, memory),
            _ => {}
        }
        Effect::None
    }

    /// Returns the whole structure as it reads now.
    fn image(&self) -> [u8; COMMON_CONFIG_SIZE as usize] {
        let queue = self.queues.get(usize::from(self.queue_select));
        // A queue that does not exist has size 0 (virtio §4.1.4.3) and no vector.
        let absent = QueueLayout { size: 0, descriptors: 0, available: 0, used: 0 };
        let layout = queue.map_or(absent, |queue| queue.layout);
        let vector = queue.map_or(NO_VECTOR, |queue| queue.vector);
        let enabled = queue.is_some_and(|queue| queue.enabled);
        let notify_offset = queue.map_or(0, |_| self.queue_select);
        let queue_count = u16::try_from(self.queues.len()).unwrap_or(0);

        let mut image = [0; COMMON_CONFIG_SIZE as usize];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            for byte in bytes {
                if let Some(slot) = image.get_mut(at) {
                    *slot = *byte;
                }
                at += 1;
            }
        };
        put(&self.device_feature_select.to_le_bytes());
        put(&feature_word(self.offered, self.device_feature_select).to_le_bytes());
        put(&self.driver_feature_select.to_le_bytes());
        put(&feature_word(self.driver_features, self.driver_feature_select).to_le_bytes());
        put(&self.config_vector.to_le_bytes());
        put(&queue_count.to_le_bytes());
        let distress = if self.needs_reset { STATUS_NEEDS_RESET } else { 0 };
        put(&[self.status | distress, 0]);
        put(&self.queue_select.to_le_bytes());
        put(&layout.size.to_le_bytes());
        put(&vector.to_le_bytes());
        put(&u16::from(enabled).to_le_bytes());
        put(&notify_offset.to_le_bytes());
        put(&layout.descriptors.to_le_bytes());
        put(&layout.available.to_le_bytes());
        put(&layout.used.to_le_bytes());
        image
    }

    fn write_driver_feature(&mut self, value: u32) {
        if self.status & STATUS_FEATURES_OK != 0 {
            return;
        }
        let low = self.driver_features & 0xffff_ffff;
        let high = self.driver_features >> 32;
        self.driver_features = match self.driver_feature_select {
            0 => (high << 32) | u64::from(value),
            1 => (u64::from(value) << 32) | low,
            _ => return,
        };
    }

    /// A vector that is not in the table reads back as "no vector" (virtio §4.1.5.1.2).
    fn checked_vector(&self, vector: u16) -> u16 {
        if vector < self.vectors { vector } else { NO_VECTOR }
    }

    /// Adds bits to the status, in the order of virtio §3.1.1. Bits that would come too early are
    /// left out; set bits stay.
    fn write_status(&mut self, value: u8) -> Effect {
        if value == 0 {
            self.resetting = true;
            return Effect::Reset;
        }
        let was_live = self.is_live();
        let mut status = self.status | (value & STATUS_DRIVER_BITS);
        if status & STATUS_ACKNOWLEDGE == 0 {
            status &= !STATUS_DRIVER;
        }
        let agreed = self.driver_features & !self.offered == 0
            && self.driver_features & F_VERSION_1 != 0
            && status & STATUS_DRIVER != 0;
        if !agreed {
            status &= !STATUS_FEATURES_OK;
        }
        if status & STATUS_FEATURES_OK == 0 || (!was_live && status & STATUS_FAILED != 0) {
            status &= !STATUS_DRIVER_OK;
        }
        self.status = status;
        if !was_live && self.is_live() {
            return Effect::Activate(self.enabled_queues());
        }
        Effect::None
    }

    fn enabled_queues(&self) -> Vec<(u16, QueueLayout)> {
        (0u16..)
            .zip(&self.queues)
            .filter(|(_, queue)| queue.enabled)
            .map(|(index, queue)| (index, queue.layout))
            .collect()
    }

    fn write_queue(&mut self, offset: u64, data: &[u8], memory: &impl RingMemory) {
        let live = self.is_live();
        let vector = match data {
            &[a, b] => self.checked_vector(u16::from_le_bytes([a, b])),
            _ => NO_VECTOR,
        };
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        let layout = &mut queue.layout;
        match (offset, data) {
            (0x1a, &[_, _]) => queue.vector = vector,
            _ if queue.enabled || live => {}
            (0x18, &[a, b]) => {
                let size = u16::from_le_bytes([a, b]);
                if size.is_power_of_two() && size <= MAX_RING_SIZE {
                    layout.size = size;
                }
            }
            (0x1c, &[1, 0]) => queue.enabled = layout.is_valid(memory),
            (0x20..=0x27, _) => write_address(&mut layout.descriptors, offset - 0x20, data),
            (0x28..=0x2f, _) => write_address(&mut layout.available, offset - 0x28, data),
            (0x30..=0x37, _) => write_address(&mut layout.used, offset - 0x30, data),
            _ => {}
        }
    }
}

/// Returns the 32 bits of `features` that `select` names.
fn feature_word(features: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

/// Writes one half of an address, or all of it.
fn write_address(address: &mut u64, offset: u64, data: &[u8]) {
    let low = *address & 0xffff_ffff;
    let high = *address >> 32;
    match (offset, data) {
        (0, &[a, b, c, d]) => {
            *address = (high << 32) | u64::from(u32::from_le_bytes([a, b, c, d]));
        }
        (4, &[a, b, c, d]) => {
            *address = (u64::from(u32::from_le_bytes([a, b, c, d])) << 32) | low;
        }
        (0, &[a, b, c, d, e, f, g, h]) => *address = u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => {}
    }
}

#[cfg(test)]
#[path = "transport_tests.rs"]
mod tests;
