//! Carries out disk commands: by io_uring, or one after the other where the host has none.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
};

use types::disk_key::DiskKey;

use super::{flight::PAUSE, losses::Losses, sealed::Seal, syncs::Syncs};
use crate::sys::{
    io::{DiskCommand, DiskRing, disk_command, disk_write},
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
pub struct Engine {
    means: Means,
    seal: Option<Seal>,
    losses: Losses,
    syncs: Syncs,
}

enum Means {
    /// Up to `depth` commands at once.
    Ring(Box<DiskRing>),
    /// One at a time, done when [`Engine::queue`] returns.
    Plain {
        file: OwnedFd,
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
        let ring = match choice {
            EngineChoice::Best => DiskRing::new(file, ram.clone(), depth).ok(),
            EngineChoice::Plain => None,
        };
        let means = match ring {
            Some(ring) => Means::Ring(Box::new(ring)),
            None => Means::Plain { file: file.try_clone_to_owned()?, ram, done: VecDeque::new() },
        };
        Ok(Self { means, seal: None, losses: Losses::default(), syncs: Syncs::default() })
    }

    /// Encrypts what goes to the file, and decrypts what comes from it, if there is a key. `depth`
    /// and `ram` are those of [`Self::new`].
    pub fn sealed(mut self, key: Option<&DiskKey>, ram: GuestRam, depth: u16) -> Self {
        self.seal = key.map(|key| Seal::new(key, ram, depth));
        self
    }

    /// Shares what the disk has lost with the engines of its other queues.
    pub fn sharing(self, losses: Losses) -> Self {
        Self { losses, ..self }
    }

    /// Returns the descriptor that is readable while completions wait, if the engine has one.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.means {
            Means::Ring(ring) => Some(ring.as_fd()),
            Means::Plain { .. } => None,
        }
    }

    /// Starts a command, or has a sync wait for the one under way. An error means that it was not started.
    pub fn queue(&mut self, token: u16, command: DiskCommand<'_>) -> io::Result<()> {
        match (&mut self.seal, command) {
            (_, DiskCommand::Sync) => {
                if self.syncs.ask(token) {
                    self.means
                        .queue(token, DiskCommand::Sync)
                        .inspect_err(|_| self.syncs.forget())?;
                }
                return Ok(());
            }
            (Some(seal), DiskCommand::Write { offset, from }) => {
                let bytes = seal.encrypt(token, offset, from)?;
                let started = self.means.write(token, offset, bytes);
                if started.is_err() {
                    seal.forget(token);
                }
                return started;
            }
            (Some(seal), DiskCommand::Read { offset, into }) => {
                seal.begin_read(token, offset, into)?;
            }
            (Some(_) | None, _) => {}
        }
        let started = self.means.queue(token, command);
        if let (Err(_), Some(seal)) = (&started, &mut self.seal) {
            seal.forget(token);
        }
        started
    }

    /// Returns whether another command may begin; what is left of one that has begun always may.
    pub fn has_room(&self) -> bool {
        self.seal.as_ref().is_none_or(Seal::has_room)
    }

    /// Hands started commands to the kernel; returns whether it took all of them.
    pub fn submit(&mut self) -> io::Result<bool> {
        match &mut self.means {
            Means::Ring(ring) => ring.submit(),
            Means::Plain { .. } => Ok(true),
        }
    }

    /// Hands started commands to the kernel and waits as [`DiskRing::wait`] does. An error comes after a moment:
    /// what the kernel has got goes on, ends, and writes guest memory until then, so whoever waits for its end has
    /// to ask again.
    pub fn wait(&mut self) -> io::Result<()> {
        let waited = match &mut self.means {
            Means::Ring(ring) => ring.wait(),
            Means::Plain { .. } => Ok(()),
        };
        if waited.is_err() {
            thread::sleep(PAUSE);
        }
        waited
    }

    /// Returns the next completed command: its token, and its bytes or its error. The sync that others wait for is
    /// started here, and has to be submitted.
    pub fn complete(&mut self) -> Option<(u16, io::Result<u32>)> {
        if let Some(served) = self.syncs.served() {
            return Some(served);
        }
        let (token, result) = match &mut self.means {
            Means::Ring(ring) => ring.complete(),
            Means::Plain { done, .. } => done.pop_front(),
        }?;
        if self.syncs.is_under_way(token) {
            let next = self.syncs.end(self.losses.judge(result));
            if let Some(Err(error)) = next.map(|next| self.means.queue(next, DiskCommand::Sync)) {
                self.syncs.end(Err(error));
            }
            return self.syncs.served();
        }
        let result = match (&mut self.seal, result) {
            (Some(seal), Ok(moved)) => seal.finish(token, moved),
            (Some(seal), Err(error)) => {
                seal.forget(token);
                Err(error)
            }
            (None, result) => result,
        };
        Some((token, result))
    }
}

impl Means {
    /// Starts a command on the guest's own bytes, or on none.
    fn queue(&mut self, token: u16, command: DiskCommand<'_>) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.queue(token, command),
            Self::Plain { file, ram, done } => {
                done.push_back((token, disk_command(file.as_fd(), ram, command)));
                Ok(())
            }
        }
    }

    /// Starts a write of bytes that are the engine's own.
    fn write(&mut self, token: u16, offset: u64, bytes: Box<[u8]>) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.queue_write(token, offset, bytes),
            Self::Plain { file, done, .. } => {
                done.push_back((token, disk_write(file.as_fd(), offset, &bytes)));
                Ok(())
            }
        }
    }
}
