//! The agent's end of the socket to init.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{mpsc, oneshot},
};
use types::ids::MachineId;

use crate::spawn::{
    self, Action, Answer, Console, Due, Ending, Known, PacketError, Request, SpawnOrder,
};

/// init answers at once; an answer that takes this long will not come.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// What init tells without being asked.
#[derive(Debug)]
pub enum Notice {
    /// A machine's process ended, with the last line that it wrote.
    Exited(MachineId, Ending, String),
    /// The node goes down.
    ShuttingDown(Action),
    /// init is gone or speaks another language: the agent has to end.
    Lost(PacketError),
}

/// Why init did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum InitError {
    #[error("init did not take the request")]
    Send(#[source] PacketError),
    #[error("init refused: {reason}")]
    Refused { reason: String },
    #[error("init did not answer within {} s", ANSWER_LIMIT.as_secs())]
    Silent,
}

/// A handle to init. Clones share it.
#[derive(Debug, Clone)]
pub struct Init {
    socket: Arc<UnixStream>,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Debug, Default)]
struct Waiting {
    spawns: BTreeMap<MachineId, oneshot::Sender<Result<i32, String>>>,
    list: Option<oneshot::Sender<Vec<Known>>>,
}

impl Init {
    /// Starts listening to init. Must be called inside a tokio runtime.
    pub fn start(socket: OwnedFd) -> std::io::Result<(Self, mpsc::Receiver<Notice>)> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let (notices, inbox) = mpsc::channel(spawn::MAX_MACHINES);
        let init = Self {
            socket: Arc::new(UnixStream::from_std(socket.into())?),
            waiting: Arc::new(Mutex::new(Waiting::default())),
        };
        tokio::spawn(init.clone().listen(notices));
        Ok((init, inbox))
    }

    /// Says whose the first console is.
    pub fn give_console(&self, console: Console) -> Result<(), InitError> {
        self.send(&Request::Screen { console }, &[])
    }

    /// Starts a machine's process. Returns its process id.
    pub async fn spawn(&self, order: SpawnOrder, files: &[OwnedFd]) -> Result<i32, InitError> {
        let (sender, answer) = oneshot::channel();
        self.with_waiting(|waiting| waiting.spawns.insert(order.machine, sender));
        self.send(&Request::Spawn(order), files)?;
        match tokio::time::timeout(ANSWER_LIMIT, answer).await {
            Ok(Ok(result)) => result.map_err(|reason| InitError::Refused { reason }),
            Ok(Err(_)) | Err(_) => Err(InitError::Silent),
        }
    }

    /// Lists what init knows.
    pub async fn list(&self) -> Result<Vec<Known>, InitError> {
        let (sender, answer) = oneshot::channel();
        self.with_waiting(|waiting| waiting.list = Some(sender));
        self.send(&Request::List, &[])?;
        match tokio::time::timeout(ANSWER_LIMIT, answer).await {
            Ok(Ok(machines)) => Ok(machines),
            Ok(Err(_)) | Err(_) => Err(InitError::Silent),
        }
    }

    /// Kills a machine's process; its end comes as a notice.
    pub fn kill(&self, machine: MachineId) -> Result<(), InitError> {
        self.send(&Request::Kill { machine }, &[])
    }

    /// Takes the node down.
    pub fn shutdown(&self, action: Action) -> Result<(), InitError> {
        self.send(&Request::Shutdown { action }, &[])
    }

    /// Tells init that the agent is at work, and when machines that run have to end.
    pub fn alive(&self, ends: Vec<Due>) -> Result<(), InitError> {
        self.send(&Request::Alive { ends }, &[])
    }

    /// Tells init that what runs is on trial no longer.
    pub fn settled(&self) -> Result<(), InitError> {
        self.send(&Request::Settled, &[])
    }

    fn send(&self, request: &Request, files: &[OwnedFd]) -> Result<(), InitError> {
        spawn::send(&*self.socket, request, files).map_err(InitError::Send)
    }

    fn with_waiting<T>(&self, act: impl FnOnce(&mut Waiting) -> T) -> T {
        act(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn listen(self, notices: mpsc::Sender<Notice>) {
        loop {
            if self.socket.readable().await.is_err() {
                return;
            }
            let received = self.socket.try_io(Interest::READABLE, || {
                match spawn::receive::<Answer>(&*self.socket) {
                    Ok(None) => Err(std::io::ErrorKind::WouldBlock.into()),
                    other => Ok(other),
                }
            });
            // Only the wish to wait again comes out as an error.
            let Ok(received) = received else { continue };
            let notice = match received {
                Ok(None) => None,
                Ok(Some((answer, _))) => self.handle(answer),
                Err(error) => Some(Notice::Lost(error)),
            };
            let Some(notice) = notice else { continue };
            let lost = matches!(notice, Notice::Lost(_));
            if notices.send(notice).await.is_err() || lost {
                return;
            }
        }
    }

    fn handle(&self, answer: Answer) -> Option<Notice> {
        // An answer that nobody waits for any more is of no use to anybody.
        match answer {
            Answer::Spawned { machine, pid } => {
                let sender = self.with_waiting(|waiting| waiting.spawns.remove(&machine));
                let _ = sender.map(|sender| sender.send(Ok(pid)));
                None
            }
            Answer::Refused { machine, reason } => {
                let sender = self.with_waiting(|waiting| waiting.spawns.remove(&machine));
                let _ = sender.map(|sender| sender.send(Err(reason)));
                None
            }
            Answer::Machines { machines } => {
                let sender = self.with_waiting(|waiting| waiting.list.take());
                let _ = sender.map(|sender| sender.send(machines));
                None
            }
            Answer::Exited { machine, status, said } => Some(Notice::Exited(machine, status, said)),
            Answer::ShuttingDown { action, .. } => Some(Notice::ShuttingDown(action)),
        }
    }
}
