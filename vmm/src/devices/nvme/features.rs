//! Features: what a driver asks and sets of the controller.
//! Source: NVMe 1.4 §5.13 "Get Features", §5.21 "Set Features", figures 271 to 291; §7.8 "Feature
//! Values".
//!
//! | Feature | Name                    | Here                                                   |
//! |---------|-------------------------|--------------------------------------------------------|
//! | 01h     | arbitration             | kept; queues take turns whatever it says               |
//! | 02h     | power management        | state 0, the only one                                  |
//! | 04h     | temperature threshold   | two, of the one temperature there is                   |
//! | 05h     | error recovery          | kept; the namespace's                                  |
//! | 06h     | volatile write cache    | decides whether finished writes may wait for a flush   |
//! | 07h     | number of queues        | answered; what was made stays                          |
//! | 08h     | interrupt coalescing    | kept; nothing is ever coalesced                        |
//! | 09h     | vector configuration    | kept, likewise                                         |
//! | 0Ah     | write atomicity         | kept                                                   |
//! | 0Bh     | event configuration     | bit 1: temperatures become events                      |
//!
//! None is saveable: after a reset all are what they were at first.

use super::{
    admin::{Answer, EventSource},
    command::{Command, Status},
    controller::{Controller, Live},
    flight::{Flight, Transfer},
    identify::NAMESPACE,
    logs::{KELVIN, Warning},
};
use crate::devices::virtio::blk::Durability;

/// Feature identifiers (figure 271).
const ARBITRATION: usize = 0x01;
const POWER_MANAGEMENT: usize = 0x02;
const TEMPERATURE_THRESHOLD: usize = 0x04;
const ERROR_RECOVERY: usize = 0x05;
const VOLATILE_WRITE_CACHE: usize = 0x06;
const NUMBER_OF_QUEUES: usize = 0x07;
const INTERRUPT_COALESCING: usize = 0x08;
const VECTOR_CONFIGURATION: usize = 0x09;
const WRITE_ATOMICITY: usize = 0x0a;
const EVENT_CONFIGURATION: usize = 0x0b;
/// The second temperature threshold, which has no identifier of its own: that below.
const LOW_THRESHOLD: usize = 0x0c;
/// Features that are kept.
pub(super) const FEATURES: usize = 0x0d;

/// Bit 31 of dword 10 of Set Features: keep across power cycles.
const SAVE: u32 = 1 << 31;
/// Bits 10:8 of dword 10 of Get Features: which value is wanted.
const CURRENT: u32 = 0;
const DEFAULT: u32 = 1;
const SAVED: u32 = 2;
const CAPABILITIES: u32 = 3;
/// Capabilities of a feature (figure 161): it is a namespace's; it can be changed. Bit 0 would say
/// that it can be saved.
const OF_A_NAMESPACE: u32 = 1 << 1;
const CHANGEABLE: u32 = 1 << 2;
/// Bit 16 of dword 11 of vector configuration: no coalescing.
const COALESCING_DISABLED: u32 = 1 << 16;
/// Dword 11 of the temperature threshold: bits 19:16 name a sensor, 0 for the one temperature and 15
/// for all; bits 21:20 are 0 for the upper threshold and 1 for the lower.
const SENSOR: u32 = 0xf << 16;
const ALL_SENSORS: u32 = 0xf << 16;
/// Event configuration: the temperature's warning becomes an event.
const TEMPERATURE_EVENTS: u32 = 1 << 1;
/// Upper threshold at reset, in kelvin; the lower is 0 (figure 276).
const THRESHOLD_KELVIN: u32 = 343;

/// Returns the features as they are when the controller is switched on.
pub(super) fn defaults() -> [u32; FEATURES] {
    let mut features = [0; FEATURES];
    features[TEMPERATURE_THRESHOLD] = THRESHOLD_KELVIN;
    features[VOLATILE_WRITE_CACHE] = 1;
    features
}

impl Controller {
    /// Returns when a write counts as done that asks for nothing itself: with the cache, it waits for a flush.
    pub(super) fn write_cache(&self) -> Durability {
        let enabled = |live: &Live| live.features[VOLATILE_WRITE_CACHE] & 1 != 0;
        let cached = self.live.as_ref().is_none_or(enabled);
        if cached { Durability::Cached } else { Durability::Durable }
    }

    /// Returns whether the temperature is at or beyond one of its thresholds.
    pub(super) fn temperature_warning(&self) -> Warning {
        let beyond = self.live.as_ref().is_some_and(|live| {
            let threshold = |feature: usize| live.features[feature] & 0xffff;
            let kelvin = u32::from(KELVIN);
            kelvin >= threshold(TEMPERATURE_THRESHOLD) || kelvin <= threshold(LOW_THRESHOLD)
        });
        if beyond { Warning::Temperature } else { Warning::None }
    }

    pub(super) fn set_features(&mut self, command: &Command) -> Result<Answer, Status> {
        if command.dwords[0] & SAVE != 0 {
            return Err(Status::NOT_SAVEABLE);
        }
        let pairs = u32::from(self.profile.pairs) - 1;
        let (feature, value) = (feature(command)?, command.dwords[1]);
        match (feature, command.namespace) {
            (ERROR_RECOVERY, NAMESPACE | u32::MAX) => {}
            (ERROR_RECOVERY, _) => return Err(Status::INVALID_NAMESPACE),
            (_, 0 | u32::MAX) => {}
            _ => return Err(Status::NOT_OF_NAMESPACE),
        }
        let live = self.live()?;
        match feature {
            NUMBER_OF_QUEUES => {
                if live.completions.iter().skip(1).any(Option::is_some) {
                    return Err(Status::SEQUENCE);
                }
                // 65,535 of either is one more than there can be.
                if value & 0xffff == 0xffff || value >> 16 == 0xffff {
                    return Err(Status::INVALID_FIELD);
                }
                return Ok(Answer::Done(pairs | pairs << 16));
            }
            VECTOR_CONFIGURATION => {
                let slot = vector_slot(&mut live.vector_flags, value)?;
                *slot = value & COALESCING_DISABLED != 0;
            }
            // There is one power state, 0.
            POWER_MANAGEMENT if value & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            TEMPERATURE_THRESHOLD => {
                // Thresholds of sensors that are not there are kept nowhere.
                let threshold = threshold(value)?;
                if matches!(value & SENSOR, 0 | ALL_SENSORS) {
                    live.features[threshold] = value & 0xffff;
                }
            }
            VOLATILE_WRITE_CACHE => {
                let before = std::mem::replace(&mut live.features[feature], value);
                if before & !value & 1 != 0 {
                    // From then on all that was completed is durable, without a flush (§6.8).
                    self.launch(Flight::new(0, *command, Transfer::Flush));
                    return Ok(Answer::Later);
                }
            }
            _ => live.features[feature] = value,
        }
        self.warn();
        Ok(Answer::Done(0))
    }

    pub(super) fn get_features(&mut self, command: &Command) -> Result<Answer, Status> {
        let pairs = u32::from(self.profile.pairs) - 1;
        let (feature, value) = (feature(command)?, command.dwords[1]);
        if feature == ERROR_RECOVERY && command.namespace != NAMESPACE {
            return Err(Status::INVALID_NAMESPACE);
        }
        let live = self.live()?;
        let select = command.dwords[0] >> 8 & 7;
        let values = match select {
            CURRENT => live.features,
            // Where nothing is saved, the default counts (§5.13).
            DEFAULT | SAVED => defaults(),
            CAPABILITIES => return Ok(Answer::Done(capabilities(feature))),
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Answer::Done(match feature {
            NUMBER_OF_QUEUES => pairs | pairs << 16,
            VECTOR_CONFIGURATION => {
                let disabled = *vector_slot(&mut live.vector_flags, value)? && select == CURRENT;
                value & 0xffff | if disabled { COALESCING_DISABLED } else { 0 }
            }
            TEMPERATURE_THRESHOLD if value & SENSOR != 0 => 0,
            TEMPERATURE_THRESHOLD => values[threshold(value)?],
            _ => values[feature],
        }))
    }

    /// Makes an event of the temperature, when it warns and the driver wants to hear of it.
    fn warn(&mut self) {
        let warns = self.temperature_warning() == Warning::Temperature;
        let Some(live) = &mut self.live else { return };
        let wanted = live.features[EVENT_CONFIGURATION] & TEMPERATURE_EVENTS != 0;
        if warns && wanted {
            live.note(EventSource::Temperature);
        }
    }
}

/// Returns what can be done with a feature.
fn capabilities(feature: usize) -> u32 {
    if feature == ERROR_RECOVERY { CHANGEABLE | OF_A_NAMESPACE } else { CHANGEABLE }
}

/// Returns which threshold dword 11 names.
fn threshold(value: u32) -> Result<usize, Status> {
    match value >> 20 & 3 {
        0 => Ok(TEMPERATURE_THRESHOLD),
        1 => Ok(LOW_THRESHOLD),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Returns the feature that a command names.
fn feature(command: &Command) -> Result<usize, Status> {
    let feature = usize::from(command.dwords[0].to_le_bytes()[0]);
    match feature {
        ARBITRATION
        | POWER_MANAGEMENT
        | TEMPERATURE_THRESHOLD
        | ERROR_RECOVERY
        | VOLATILE_WRITE_CACHE
        | NUMBER_OF_QUEUES
        | INTERRUPT_COALESCING
        | VECTOR_CONFIGURATION
        | WRITE_ATOMICITY
        | EVENT_CONFIGURATION => Ok(feature),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn vector_slot(flags: &mut [bool], value: u32) -> Result<&mut bool, Status> {
    let index = usize::try_from(value & 0xffff).map_err(|_| Status::INVALID_FIELD)?;
    flags.get_mut(index).ok_or(Status::INVALID_FIELD)
}
