//! virtio-blk over a raw file or block device, several queues, each with a thread of its own.
//! Source: virtio §5.2 "Block Device"; §5.2.4 "Device configuration layout".
//!
//! | Offset | Bytes | Field                    | Value here                              |
//! |--------|-------|--------------------------|-----------------------------------------|
//! | 0      | 8     | capacity                 | whole 512-byte sectors of the file      |
//! | 8      | 4     | size_max                 | not offered, 0                          |
//! | 12     | 4     | seg_max                  | ring size less header and status        |
//! | 16     | 4     | geometry                 | not offered, 0                          |
//! | 20     | 4     | blk_size                 | the device's logical block, 512 of files|
//! | 24     | 1     | physical_block_exp       | log2(physical / logical block)          |
//! | 25     | 1     | alignment_offset         | 0                                       |
//! | 26     | 2     | min_io_size              | one physical block, in logical blocks   |
//! | 28     | 4     | opt_io_size              | 0, unknown                              |
//! | 32     | 1     | writeback                | not offered, 0                          |
//! | 34     | 2     | num_queues               | 1..=4                                   |
//! | 36     | 4     | max_discard_sectors      | [`MAX_RANGE_SECTORS`]                   |
//! | 40     | 4     | max_discard_seg          | 1                                       |
//! | 44     | 4     | discard_sector_alignment | one physical block, in sectors          |
//! | 48     | 4     | max_write_zeroes_sectors | [`MAX_RANGE_SECTORS`]                   |
//! | 52     | 4     | max_write_zeroes_seg     | 1                                       |
//! | 56     | 1     | write_zeroes_may_unmap   | 1 when discard is offered               |

pub mod engine;
pub(in crate::devices) mod flight;
pub mod losses;
pub mod queue;
pub mod request;
mod sealed;
mod syncs;
mod transfer;

use std::{
    io, iter,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use engine::{Engine, EngineChoice};
use losses::Losses;
use queue::{BlockQueue, Job};
use request::{Access, ID_SIZE, MAX_RANGE_SECTORS, Rules, SECTOR, Support};
use types::{disk_key::DiskKey, vm::MAX_DISK_QUEUES};

use super::{
    Activation, DeviceIdentity, F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, MAX_RING_SIZE, Platform,
    VirtioDevice, VirtioError, VirtioPci, worker::Worker,
};
use crate::{
    counters::Activity,
    devices::{
        backing::{BackingError, Geometry},
        throttle::Limits,
    },
    events::Events,
    sandbox::ThreadKind,
    sys::memory::GuestRam,
};

const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_BLK_SIZE: u64 = 1 << 6;
const F_FLUSH: u64 = 1 << 9;
const F_TOPOLOGY: u64 = 1 << 10;
const F_MQ: u64 = 1 << 12;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;

/// Data segments of one request: a full ring less header and status.
const SEG_MAX: u32 = 254;
const CONFIG_SIZE: usize = 60;

const IDENTITY: DeviceIdentity =
    DeviceIdentity { name: "blk", virtio_id: 2, class: [0x01, 0x80, 0x00] };

/// When a change of a disk counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// When the host has it; a later flush makes it durable.
    Cached,
    /// When it is on the medium.
    Durable,
}

/// A block device.
pub struct Block {
    file: OwnedFd,
    /// The same, opened again.
    more: Vec<OwnedFd>,
    losses: Losses,
    ram: GuestRam,
    geometry: Geometry,
    id: [u8; ID_SIZE],
    key: Option<DiskKey>,
    queues: u16,
    engine: EngineChoice,
    limits: Limits,
    workers: Vec<Worker<Job>>,
    activity: Arc<Activity>,
}

/// Makes a block device over `file`, which was opened `more` times. It gets a queue per virtual CPU, at most
/// [`MAX_DISK_QUEUES`].
pub fn open(
    disk: &types::vm::Disk,
    (file, more): (OwnedFd, Vec<OwnedFd>),
    vcpus: u32,
    slot: u8,
    platform: &Platform,
) -> Result<VirtioPci, VirtioError> {
    let queues = u16::try_from(vcpus).unwrap_or(MAX_DISK_QUEUES).clamp(1, MAX_DISK_QUEUES);
    let block = Block::new(disk, file, queues, EngineChoice::Best, platform.ram.clone())?;
    let block = block.within(&platform.limits).counted(platform.activity.device(IDENTITY.name));
    let losses = Losses::of(&disk.serial, platform.events.clone());
    let block = block.opened_again(more).recording(losses);
    VirtioPci::new(Box::new(block), slot, platform)
}

impl Block {
    /// Returns the device, which counts what it does in `activity`.
    pub fn counted(self, activity: Arc<Activity>) -> Self {
        Self { activity, ..self }
    }

    /// Returns the device, which keeps to `limits` too.
    pub fn within(self, limits: &Limits) -> Self {
        Self { limits: self.limits.and(limits), ..self }
    }

    /// Returns the device, which notes what is lost in `losses`.
    pub fn recording(self, losses: Losses) -> Self {
        Self { losses, ..self }
    }

    /// Returns the device, whose file was opened `more` times. The kernel tells each opening of a file once of what is
    /// lost (Linux `include/linux/errseq.h`): with one for each queue, each hears of it by itself. With fewer, queues
    /// share them, and one may end a flush well while another is being told.
    pub fn opened_again(self, more: Vec<OwnedFd>) -> Self {
        Self { more, ..self }
    }

    /// Returns the device, not started.
    pub fn new(
        disk: &types::vm::Disk,
        file: OwnedFd,
        queues: u16,
        engine: EngineChoice,
        ram: GuestRam,
    ) -> Result<Self, VirtioError> {
        let mut id = [0; ID_SIZE];
        let serial = disk.serial.as_bytes();
        let Some(place) = id.get_mut(..serial.len()) else {
            return Err(refused(format!(
                "serial number \"{}\" has {} bytes, at most {ID_SIZE} fit",
                disk.serial,
                serial.len()
            )));
        };
        place.copy_from_slice(serial);
        let access = if disk.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let geometry = Geometry::of(&file, access).map_err(backing)?;
        let limits = Limits::new(disk.limit, Instant::now());
        let (workers, activity) = (Vec::new(), Arc::default());
        let key = disk.key.clone();
        let losses = Losses::of(&disk.serial, Events::default());
        Ok(Self {
            file,
            more: Vec::new(),
            losses,
            ram,
            geometry,
            id,
            key,
            queues,
            engine,
            limits,
            workers,
            activity,
        })
    }

    fn config(&self) -> [u8; CONFIG_SIZE] {
        let Geometry { sectors, logical_block, physical_block, .. } = self.geometry;
        let ratio = (physical_block / logical_block).max(1);
        let exponent = u8::try_from(ratio.ilog2()).unwrap_or(0);
        let minimum = u16::try_from(ratio).unwrap_or(1);
        let alignment = u32::try_from(u64::from(physical_block) / SECTOR).unwrap_or(1);
        let unmap = u8::from(self.geometry.discard == Support::Yes);
        let mut config = [0; CONFIG_SIZE];
        let fields: [(usize, &[u8]); 12] = [
            (0, &sectors.to_le_bytes()),
            (12, &SEG_MAX.to_le_bytes()),
            (20, &logical_block.to_le_bytes()),
            (24, &[exponent, 0]),
            (26, &minimum.to_le_bytes()),
            (34, &self.queues.to_le_bytes()),
            (36, &MAX_RANGE_SECTORS.to_le_bytes()),
            (40, &1u32.to_le_bytes()),
            (44, &alignment.to_le_bytes()),
            (48, &MAX_RANGE_SECTORS.to_le_bytes()),
            (52, &1u32.to_le_bytes()),
            (56, &[unmap]),
        ];
        for (offset, bytes) in fields {
            if let Some(place) = config.get_mut(offset..offset + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        }
        config
    }

    fn rules(&self, features: u64) -> Rules {
        let agreed = |bit, support| if features & bit != 0 { support } else { Support::No };
        Rules {
            sectors: self.geometry.sectors,
            access: self.geometry.access,
            discard: agreed(F_DISCARD, self.geometry.discard),
            zero: agreed(F_WRITE_ZEROES, self.geometry.zero),
        }
    }
}

impl VirtioDevice for Block {
    fn identity(&self) -> DeviceIdentity {
        IDENTITY
    }

    fn features(&self) -> u64 {
        let offer = |bit, offered| if offered { bit } else { 0 };
        let Geometry { access, discard, zero, .. } = self.geometry;
        let common = F_RING_INDIRECT_DESC | F_RING_EVENT_IDX;
        common
            | F_SEG_MAX
            | F_BLK_SIZE
            | F_FLUSH
            | F_TOPOLOGY
            | offer(F_RO, access == Access::ReadOnly)
            | offer(F_MQ, self.queues > 1)
            | offer(F_DISCARD, discard == Support::Yes)
            | offer(F_WRITE_ZEROES, zero == Support::Yes)
    }

    fn queue_count(&self) -> u16 {
        self.queues
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_fields(&self.config(), offset, data);
    }

    fn start(&mut self) -> Result<(), VirtioError> {
        let files = iter::once(&self.file).chain(&self.more).cycle();
        for (index, file) in (0..self.queues).zip(files) {
            let losses = self.losses.clone();
            let file = file.try_clone().map_err(host("cannot duplicate the disk"))?;
            let (ram, choice, id) = (self.ram.clone(), self.engine, self.id);
            let (key, punching) = (self.key.clone(), self.geometry.discard);
            let prepare = move || {
                let engine = Engine::new(choice, file.as_fd(), ram.clone(), MAX_RING_SIZE)?;
                let engine = engine.sealed(key.as_ref(), ram, MAX_RING_SIZE).sharing(losses);
                Ok(BlockQueue::new(engine, MAX_RING_SIZE, id).punching(punching))
            };
            let worker = Worker::spawn(
                format!("blk-{index}"),
                ThreadKind::Block,
                prepare,
                |queue: BlockQueue, inbox| queue.serve(&inbox),
            )
            .map_err(host("cannot start a thread"))?;
            self.workers.push(worker);
        }
        Ok(())
    }

    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError> {
        let rules = self.rules(activation.features);
        // Without flush the driver has no way to ask for durability, so every change has it.
        let durability = if activation.features & F_FLUSH != 0 {
            Durability::Cached
        } else {
            Durability::Durable
        };
        for queue in activation.queues {
            let Some(worker) = self.workers.get(usize::from(queue.index)) else {
                return Err(refused(format!("queue {} was not started", queue.index)));
            };
            let distress = activation.distress.clone();
            let (activity, limits) = (Arc::clone(&self.activity), self.limits.clone());
            worker.run(Job { queue, rules, durability, distress, limits, activity });
        }
        Ok(())
    }

    fn stop(&mut self) {
        self.workers.iter().for_each(Worker::stop);
    }

    fn stopped(&mut self) -> bool {
        self.workers.iter().all(Worker::is_idle)
    }

    fn hold(&mut self) {
        self.workers.iter().for_each(Worker::hold);
    }

    fn is_held(&mut self) -> bool {
        self.workers.iter().all(Worker::is_held)
    }

    fn go_on(&mut self) {
        self.workers.iter().for_each(Worker::go_on);
    }
}

fn host(what: &'static str) -> impl Fn(io::Error) -> VirtioError {
    move |source| VirtioError::Host { device: IDENTITY.name, what, source }
}

fn backing(error: BackingError) -> VirtioError {
    match error {
        BackingError::Host { what, source } => host(what)(source),
        BackingError::Refused { problem } => refused(problem),
    }
}

fn refused(problem: String) -> VirtioError {
    VirtioError::Refused { device: IDENTITY.name, problem }
}
