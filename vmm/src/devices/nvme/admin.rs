//! The admin command set.
//! Source: NVMe 1.4 §5 "Admin Command Set": §5.1 Abort, §5.2 Asynchronous Event Request, §5.3 to
//! §5.6 queues, §5.14 Get Log Page, §5.15 Identify. Features are in `features`.

use super::{
    command::{COMPLETION_SIZE, Command, SUBMISSION_SIZE, Status},
    controller::{Controller, Live},
    identify::{MAX_EVENT_REQUESTS, MAX_TRANSFER, NAMESPACE},
    prp,
    queue::{CompletionQueue, Place, SubmissionQueue},
    registers::MAX_ENTRIES,
};
use crate::sys::memory::GuestRam;

const DELETE_SUBMISSION_QUEUE: u8 = 0x00;
const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
const GET_LOG_PAGE: u8 = 0x02;
const DELETE_COMPLETION_QUEUE: u8 = 0x04;
const CREATE_COMPLETION_QUEUE: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const ABORT: u8 = 0x08;
const SET_FEATURES: u8 = 0x09;
const GET_FEATURES: u8 = 0x0a;
const ASYNCHRONOUS_EVENT_REQUEST: u8 = 0x0c;

const LOG_ERRORS: u8 = 0x01;
const LOG_HEALTH: u8 = 0x02;
const LOG_FIRMWARE: u8 = 0x03;

const IDENTIFY_NAMESPACE: u32 = 0x00;
const IDENTIFY_CONTROLLER: u32 = 0x01;
const IDENTIFY_ACTIVE: u32 = 0x02;
const IDENTIFY_DESCRIPTORS: u32 = 0x03;

/// Bit 15 of dword 10 of Get Log Page: events stay masked.
const RETAIN_EVENT: u32 = 1 << 15;
/// Dword 11 of queue creation: the queue lies in one piece.
const CONTIGUOUS: u32 = 1 << 0;
/// Dword 11 of Create I/O Completion Queue: the driver wants interrupts.
const INTERRUPTS: u32 = 1 << 1;
/// Dword 0 of Abort's completion: nothing was aborted.
const NOT_ABORTED: u32 = 1;

/// How an admin command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Now, with this in dword 0.
    Done(u32),
    /// When something has happened.
    Later,
}

/// What an asynchronous event tells (figure 148).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSource {
    /// A doorbell of a queue that is not there was written.
    InvalidDoorbell,
    /// A doorbell was written with a value outside its queue.
    InvalidDoorbellValue,
    /// The temperature is not between its thresholds.
    Temperature,
}

impl EventSource {
    /// Returns dword 0 of the completion: type (0 error, 1 health), information, log page (figures
    /// 147 to 150).
    pub fn result(self) -> u32 {
        let (kind, information) = match self {
            Self::InvalidDoorbell => (0, 0),
            Self::InvalidDoorbellValue => (0, 1),
            Self::Temperature => (1, 1),
        };
        kind | information << 8 | u32::from(self.log_page()) << 16
    }

    /// Returns the log page that tells more; events of its kind wait until it is read (§5.2).
    pub fn log_page(self) -> u8 {
        match self {
            Self::InvalidDoorbell | Self::InvalidDoorbellValue => LOG_ERRORS,
            Self::Temperature => LOG_HEALTH,
        }
    }
}

impl Controller {
    /// Carries out an admin command.
    pub(super) fn carry_out(&mut self, command: &Command) -> Result<Answer, Status> {
        if !command.is_plain() {
            return Err(Status::INVALID_FIELD);
        }
        match command.opcode {
            DELETE_SUBMISSION_QUEUE => self.delete_submission_queue(command),
            CREATE_SUBMISSION_QUEUE => self.create_submission_queue(command),
            GET_LOG_PAGE => self.get_log_page(command),
            DELETE_COMPLETION_QUEUE => self.delete_completion_queue(command),
            CREATE_COMPLETION_QUEUE => self.create_completion_queue(command),
            IDENTIFY => self.identify(command),
            ABORT => self.abort(command),
            SET_FEATURES => self.set_features(command),
            GET_FEATURES => self.get_features(command),
            ASYNCHRONOUS_EVENT_REQUEST => self.request_event(command),
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Forgets a submission queue.
    pub(super) fn remove_submission_queue(&mut self, queue: u16) {
        let Some(live) = &mut self.live else { return };
        let removed = live.submissions.get_mut(usize::from(queue)).and_then(Option::take);
        let to = removed.map(|queue| usize::from(queue.completions));
        if let Some(Some(completions)) = to.and_then(|to| live.completions.get_mut(to)) {
            completions.users = completions.users.saturating_sub(1);
        }
    }

    pub(super) fn live(&mut self) -> Result<&mut Live, Status> {
        self.live.as_mut().ok_or(Status::SEQUENCE)
    }

    fn create_completion_queue(&mut self, command: &Command) -> Result<Answer, Status> {
        if !self.shared.control().completion_size_set() {
            return Err(Status::QUEUE_SIZE);
        }
        let vectors = self.shared.vector_count();
        let (index, place) = new_queue(command)?;
        let vector = command.dwords[1].to_le_bytes();
        let vector = u16::from_le_bytes([vector[2], vector[3]]);
        let wanted = command.dwords[1] & INTERRUPTS != 0;
        let ram = self.ram.clone();
        let slot = free_slot(&mut self.live()?.completions, index)?;
        if usize::from(vector) >= vectors {
            return Err(Status::INTERRUPT_VECTOR);
        }
        check_place(&place, COMPLETION_SIZE, &ram)?;
        let vector = wanted.then_some(vector);
        *slot = Some(CompletionQueue::new(place, vector));
        self.shared.pin.made(index, place.entries, vector);
        Ok(Answer::Done(0))
    }

    fn create_submission_queue(&mut self, command: &Command) -> Result<Answer, Status> {
        if !self.shared.control().submission_size_set() {
            return Err(Status::QUEUE_SIZE);
        }
        let (index, place) = new_queue(command)?;
        let [_, _, low, high] = command.dwords[1].to_le_bytes();
        let to = u16::from_le_bytes([low, high]);
        let ram = self.ram.clone();
        let live = self.live()?;
        let slot = free_slot(&mut live.submissions, index)?;
        let completions = live.completions.get_mut(usize::from(to)).filter(|_| to != 0);
        let completions = completions.ok_or(Status::QUEUE_IDENTIFIER)?;
        let completions = completions.as_mut().ok_or(Status::COMPLETION_QUEUE)?;
        check_place(&place, SUBMISSION_SIZE, &ram)?;
        completions.users += 1;
        *slot = Some(SubmissionQueue::new(place, to));
        Ok(Answer::Done(0))
    }

    /// Takes no more commands from the queue; the answer comes when those in flight have ended.
    fn delete_submission_queue(&mut self, command: &Command) -> Result<Answer, Status> {
        let index = queue_index(command);
        let live = self.live()?;
        let there = live.submissions.get(usize::from(index)).is_some_and(Option::is_some);
        let going = live.deletions.iter().any(|(queue, _)| *queue == index);
        if index == 0 || !there || going {
            return Err(Status::QUEUE_IDENTIFIER);
        }
        live.deletions.push((index, *command));
        Ok(Answer::Later)
    }

    fn delete_completion_queue(&mut self, command: &Command) -> Result<Answer, Status> {
        let index = queue_index(command);
        let live = self.live()?;
        let slot = live.completions.get_mut(usize::from(index)).filter(|_| index != 0);
        let Some(slot) = slot else { return Err(Status::QUEUE_IDENTIFIER) };
        match slot {
            None => Err(Status::QUEUE_IDENTIFIER),
            Some(queue) if queue.users > 0 => Err(Status::QUEUE_DELETION),
            Some(_) => {
                *slot = None;
                self.shared.pin.gone(index);
                Ok(Answer::Done(0))
            }
        }
    }

    fn identify(&mut self, command: &Command) -> Result<Answer, Status> {
        let data = match command.dwords[0] & 0xff {
            IDENTIFY_CONTROLLER => self.profile.controller(),
            IDENTIFY_NAMESPACE if command.namespace == NAMESPACE => self.profile.namespace(),
            IDENTIFY_DESCRIPTORS if command.namespace == NAMESPACE => self.profile.descriptors(),
            // The two largest identifiers name no namespace to go on behind.
            IDENTIFY_ACTIVE if command.namespace < u32::MAX - 1 => {
                self.profile.active_namespaces(command.namespace)
            }
            IDENTIFY_NAMESPACE | IDENTIFY_DESCRIPTORS | IDENTIFY_ACTIVE => {
                return Err(Status::INVALID_NAMESPACE);
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        prp::write(&self.ram, (command.prp1, command.prp2), &data[..])?;
        Ok(Answer::Done(0))
    }

    /// Copies a part of a log: as many bytes as were asked for and are there. What a driver asks for behind the end
    /// is undefined (§5.14, NUMDL): its memory is left as it is.
    fn get_log_page(&mut self, command: &Command) -> Result<Answer, Status> {
        let [page, ..] = command.dwords[0].to_le_bytes();
        let log = match page {
            // All are the controller's, not a namespace's (§5.14; LPA bit 0).
            LOG_ERRORS | LOG_HEALTH | LOG_FIRMWARE
                if !matches!(command.namespace, 0 | u32::MAX) =>
            {
                return Err(Status::INVALID_FIELD);
            }
            LOG_ERRORS => self.logs.error_log(),
            LOG_HEALTH => self.logs.health_log(self.temperature_warning()).to_vec(),
            LOG_FIRMWARE => self.profile.firmware_log().to_vec(),
            _ => return Err(Status::LOG_PAGE),
        };
        let length = (u64::from(command.dwords[0] >> 16 | command.dwords[1] << 16) + 1) * 4;
        if length > MAX_TRANSFER {
            return Err(Status::INVALID_FIELD);
        }
        let offset = u64::from(command.dwords[2]) | u64::from(command.dwords[3]) << 32;
        let from = usize::try_from(offset).map_err(|_| Status::INVALID_FIELD)?;
        let rest = log.get(from..).filter(|_| offset.is_multiple_of(4));
        let rest = rest.ok_or(Status::INVALID_FIELD)?;
        let there = usize::try_from(length).unwrap_or(usize::MAX).min(rest.len());
        // Whether PRP2 is a page or a list follows from what was asked for, not from what is there (§4.3).
        prp::write_front(&self.ram, (command.prp1, command.prp2), length, &rest[..there])?;
        if command.dwords[0] & RETAIN_EVENT == 0 {
            self.live()?.unmask(page);
        }
        Ok(Answer::Done(0))
    }

    /// Ends a request that waits for an event; all other commands end soon, and are left to (§5.1).
    fn abort(&mut self, command: &Command) -> Result<Answer, Status> {
        let [_, _, low, high] = command.dwords[0].to_le_bytes();
        let (queue, id) = (queue_index(command), u16::from_le_bytes([low, high]));
        let ram = self.ram.clone();
        let live = self.live()?;
        let there = live.submissions.get(usize::from(queue)).is_some_and(Option::is_some);
        if !there {
            return Err(Status::INVALID_FIELD);
        }
        let waits = |request: &u16| queue == 0 && *request == id;
        let Some(at) = live.event_requests.iter().position(waits) else {
            return Ok(Answer::Done(NOT_ABORTED));
        };
        // Its completion comes before this command's, or not at all.
        if !live.answer_request(at, &ram, Status::ABORTED, 0) {
            return Ok(Answer::Done(NOT_ABORTED));
        }
        Ok(Answer::Done(0))
    }

    /// Keeps the request until there is an event.
    fn request_event(&mut self, command: &Command) -> Result<Answer, Status> {
        let live = self.live()?;
        if live.event_requests.len() >= MAX_EVENT_REQUESTS {
            return Err(Status::EVENT_LIMIT);
        }
        live.event_requests.push_back(command.id);
        // It takes no room in the completion queue until it is answered, or a driver with a queue
        // of two entries could do nothing else.
        if let Some(Some(queue)) = live.submissions.first_mut() {
            queue.outstanding = queue.outstanding.saturating_sub(1);
        }
        if let Some(Some(queue)) = live.completions.first_mut() {
            queue.owed = queue.owed.saturating_sub(1);
        }
        Ok(Answer::Later)
    }
}

fn queue_index(command: &Command) -> u16 {
    let [low, high, ..] = command.dwords[0].to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Returns identifier and place of a queue to be made.
fn new_queue(command: &Command) -> Result<(u16, Place), Status> {
    let last = command.dwords[0] >> 16;
    if last == 0 || last >= MAX_ENTRIES {
        return Err(Status::QUEUE_SIZE);
    }
    if command.dwords[1] & CONTIGUOUS == 0 {
        return Err(Status::INVALID_FIELD);
    }
    Ok((queue_index(command), Place { base: command.prp1, entries: last + 1 }))
}

/// Returns the slot of an I/O queue that is not there yet.
fn free_slot<Q>(slots: &mut [Option<Q>], index: u16) -> Result<&mut Option<Q>, Status> {
    let slot = slots.get_mut(usize::from(index)).filter(|slot| index != 0 && slot.is_none());
    slot.ok_or(Status::QUEUE_IDENTIFIER)
}

fn check_place(place: &Place, size: u32, ram: &GuestRam) -> Result<(), Status> {
    if !place.base.is_multiple_of(prp::PAGE) {
        return Err(Status::PRP_OFFSET);
    }
    if place.is_memory(ram, size) { Ok(()) } else { Err(Status::DATA_TRANSFER) }
}
