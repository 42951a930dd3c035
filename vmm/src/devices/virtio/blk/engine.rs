//! Carries out disk commands: by io_uring, or one after the other where the host has none.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use crate::sys::{
    io::{DiskCommand, DiskRing, disk_command},
    memory::GuestRam,
};

/// Which engine to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring if the host lets us, otherwise plain calls.
    Best,
    /// Plain calls.
    Plain,
}

/// Carries out disk commands on one file.
pub enum Engine {
    /// Up to `depth` commands at once.
    Ring(Box<DiskRing>),
    /// One at a time, done when [`Engine::queue`] returns.
    Plain {
        /// The file.
        file: OwnedFd,
        /// Guest memory.
        ram: GuestRam,
        /// Results not taken yet.
        done: VecDeque<(u16, io::Result<u32>)>,
    },
}

impl Engine {
    /// Makes an engine for up to `depth` commands in flight.
    pub fn new(
        choice: EngineChoice,
        file: BorrowedFd<'_>,
        ram: GuestRam,
        depth: u16,
    ) -> io::Result<Self> {
        if choice == EngineChoice::Best
            && let Ok(ring) = DiskRing::new(file, ram.clone(), depth)
        {
            return Ok(Self::Ring(Box::new(ring)));
        }
        Ok(Self::Plain { file: file.try_clone_to_owned()?, ram, done: VecDeque::new() })
    }

    /// Returns the descriptor that is readable while completions wait, if the engine has one.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Ring(ring) => Some(ring.as_fd()),
            Self::Plain { .. } => None,
        }
    }

    /// Starts a command. An error means that it was not started.
    pub fn queue(&mut self, token: u16, command: DiskCommand<'_>) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.queue(token, command),
            Self::Plain { file, ram, done } => {
                done.push_back((token, disk_command(file.as_fd(), ram, command)));
                Ok(())
            }
        }
    }

    /// Hands started commands to the kernel; returns whether it took all of them.
    pub fn submit(&mut self) -> io::Result<bool> {
        match self {
            Self::Ring(ring) => ring.submit(),
            Self::Plain { .. } => Ok(true),
        }
    }

    /// Waits until a command in flight has completed.
    pub fn wait(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.wait(),
            Self::Plain { .. } => Ok(()),
        }
    }

    /// Returns the next completed command: its token, and its bytes or its error.
    pub fn complete(&mut self) -> Option<(u16, io::Result<u32>)> {
        match self {
            Self::Ring(ring) => ring.complete(),
            Self::Plain { done, .. } => done.pop_front(),
        }
    }
}
