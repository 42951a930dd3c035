//! `holdfast console -i`: the machine's console on this terminal, which is raw meanwhile, so that every key goes to
//! the guest. Input that is no terminal is typed as it is; where it ends, the console is shown on.

use std::{
    io::IsTerminal,
    os::fd::{AsFd, OwnedFd},
    sync::Mutex,
    time::Duration,
};

use futures_util::{Sink, SinkExt, Stream, StreamExt};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::{
    io::AsyncWriteExt,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_tungstenite::tungstenite::{
    Error as WsError, Message, protocol::frame::coding::CloseCode,
};
use types::ids::MachineId;

use super::{CliError, Context, arguments::EscapeKey, tunnel};

/// A gateway asks three times meanwhile whether we are there; one from which nothing came is gone.
const GONE: Duration = Duration::from_secs(90);

/// Status of a process that a signal ended, as shells count it: this and the signal's number.
const SIGNALLED: u8 = 128;

/// Shows the console, and types what is typed here, until either ends. Returns the exit status.
pub(super) async fn run(
    context: &Context,
    machine: MachineId,
    escape: EscapeKey,
) -> Result<u8, CliError> {
    let socket = tunnel::connect(context, &format!("/v1/machines/{machine}/terminal")).await?;
    let (to_guest, from_guest) = socket.split();
    let stdin = std::io::stdin();
    let terminal = stdin.is_terminal();
    let escape = if terminal { escape } else { EscapeKey(None) };
    if terminal {
        eprintln!("holdfast: this is the console of machine {machine}{}", leaving(escape));
    }
    let raw = if terminal { Some(enter(stdin.as_fd())?) } else { None };
    let ended = tokio::select! {
        ended = typed(to_guest, Keys::new(escape)) => ended,
        ended = shown(context, from_guest) => ended,
        status = signalled(raw.as_ref()) => status.map(Ended::Signalled),
    };
    drop(raw);
    let said = match ended? {
        Ended::Signalled(status) => return Ok(status),
        Ended::Left => "left the console; the machine goes on".to_owned(),
        Ended::Over(reason) => format!("the console ended: {}", super::show::harmless(&reason)),
    };
    // Output may have left the cursor anywhere in a line.
    eprintln!("\nholdfast: {said}");
    Ok(0)
}

fn leaving(escape: EscapeKey) -> String {
    escape.0.map_or_else(String::new, |key| {
        let key = char::from(key);
        format!("; {key}. at the start of a line leaves it, {key}? tells more")
    })
}

/// How it ended.
enum Ended {
    /// By the escape.
    Left,
    /// By the machine; why, in the gateway's words.
    Over(String),
    /// By a signal; the exit status.
    Signalled(u8),
}

/// Sends what is typed.
async fn typed(mut guest: impl Sink<Message> + Unpin, mut keys: Keys) -> Result<Ended, CliError> {
    let mut input = tunnel::input();
    while let Some(bytes) = input.recv().await {
        let pressed = keys.press(&bytes);
        if pressed.help {
            help(keys.escape);
        }
        let sent = Message::Binary(pressed.typed.into());
        if guest.send(sent).await.is_err() {
            break;
        }
        if pressed.leave {
            // The gateway sees it by the connection's end too.
            let _ = guest.close().await;
            return Ok(Ended::Left);
        }
    }
    // Nothing more is typed; the other direction says how it ends.
    std::future::pending().await
}

fn help(EscapeKey(key): EscapeKey) {
    let key = key.map_or('~', char::from);
    eprint!(
        "\r\n{key}.  leaves the console; the machine goes on\r\n{key}{key}  types {key}\r\n{key}?  \
         shows this\r\nEach at the start of a line.\r\n"
    );
}

/// Prints what the console shows.
async fn shown(
    context: &Context,
    mut guest: impl Stream<Item = Result<Message, WsError>> + Unpin,
) -> Result<Ended, CliError> {
    let mut output = tokio::io::stdout();
    let lost = |why: &dyn std::fmt::Display| {
        context.client.unreachable(format!("the connection to the console was lost: {why}"))
    };
    loop {
        let message = match tokio::time::timeout(GONE, guest.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(error))) => return Err(lost(&error)),
            Ok(None) => return Err(lost(&"the gateway ended it without a word")),
            Err(_) => {
                let seconds = GONE.as_secs();
                return Err(lost(&format!("nothing came for {seconds} s")));
            }
        };
        match message {
            Message::Binary(bytes) => {
                let written = output.write_all(&bytes).await;
                written.map_err(|source| CliError::Output { source })?;
                output.flush().await.map_err(|source| CliError::Output { source })?;
            }
            Message::Close(Some(frame)) if frame.code == CloseCode::Normal => {
                return Ok(Ended::Over(frame.reason.to_string()));
            }
            Message::Close(frame) => {
                let reason = frame.map(|frame| frame.reason.to_string());
                return Err(lost(&reason.unwrap_or_else(|| "the gateway gave no reason".into())));
            }
            Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_) => {}
        }
    }
}

/// Waits for a signal that ends the command, so that the terminal is given back first; returns the exit status.
/// After a stop the terminal is made raw again: the shell has used it meanwhile.
pub(super) async fn signalled(raw: Option<&Raw>) -> Result<u8, CliError> {
    let listen = |kind| signal(kind).map_err(|source| CliError::Terminal { source });
    let mut hangup = listen(SignalKind::hangup())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut quit = listen(SignalKind::quit())?;
    let mut terminate = listen(SignalKind::terminate())?;
    // SIGCONT has no name in tokio.
    let number = rustix::process::Signal::CONT.as_raw();
    let mut resumed: Signal = listen(SignalKind::from_raw(number))?;
    loop {
        let kind = tokio::select! {
            _ = hangup.recv() => SignalKind::hangup(),
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = quit.recv() => SignalKind::quit(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = resumed.recv() => {
                if let Some(raw) = raw {
                    raw.again();
                }
                continue;
            }
        };
        let number = u8::try_from(kind.as_raw_value()).unwrap_or(0);
        return Ok(SIGNALLED.saturating_add(number));
    }
}

/// What the terminal is given back as: its descriptor and settings. A panic's hook finds it here, since a release
/// aborts on panic and drops nothing.
static BEFORE: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

/// A terminal that is raw until this is dropped.
pub(super) struct Raw {
    settings: Termios,
}

/// Makes a terminal raw: each key comes at once, unchanged, and is not echoed (termios(3), "Raw mode").
fn enter(terminal: impl AsFd) -> Result<Raw, CliError> {
    let failed = |source| CliError::Terminal { source };
    let before = tcgetattr(&terminal).map_err(|error| failed(error.into()))?;
    let own = terminal.as_fd().try_clone_to_owned().map_err(failed)?;
    let mut settings = before.clone();
    settings.make_raw();
    let kept = BEFORE.lock().map(|mut kept| kept.replace((own, before)));
    if let Ok(None) = kept {
        let told = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            told(panic);
        }));
    }
    let raw = Raw { settings };
    tcsetattr(terminal, OptionalActions::Now, &raw.settings)
        .map_err(|error| failed(error.into()))?;
    Ok(raw)
}

impl Raw {
    fn again(&self) {
        if let Ok(kept) = BEFORE.lock()
            && let Some((terminal, _)) = &*kept
        {
            // A terminal that is gone ends the command by SIGHUP.
            let _ = tcsetattr(terminal, OptionalActions::Now, &self.settings);
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back as it was found, once.
fn give_back() {
    // The lock is held for moments; a panic in one of them must not wait for itself.
    if let Ok(mut kept) = BEFORE.try_lock()
        && let Some((terminal, before)) = kept.take()
    {
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(terminal, OptionalActions::Now, &before);
    }
}

/// Finds escapes in what is typed: a key at the start of a line, and a second one.
struct Keys {
    escape: EscapeKey,
    place: Place,
}

/// Where in a line the next key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Start,
    Escaped,
    Middle,
}

/// What keys came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pressed {
    /// What goes to the guest.
    typed: Vec<u8>,
    help: bool,
    /// Whether the console is left; what came behind is dropped.
    leave: bool,
}

impl Keys {
    fn new(escape: EscapeKey) -> Self {
        Self { escape, place: Place::Start }
    }

    fn press(&mut self, bytes: &[u8]) -> Pressed {
        let mut pressed = Pressed::default();
        for byte in bytes {
            let is_escape = Some(*byte) == self.escape.0;
            match (self.place, byte) {
                (Place::Start, _) if is_escape => {
                    self.place = Place::Escaped;
                    continue;
                }
                (Place::Escaped, b'.') => {
                    pressed.leave = true;
                    return pressed;
                }
                (Place::Escaped, b'?') => {
                    pressed.help = true;
                    self.place = Place::Start;
                    continue;
                }
                // It was meant for the guest after all.
                (Place::Escaped, _) if !is_escape => pressed.typed.extend(self.escape.0),
                (Place::Escaped | Place::Start | Place::Middle, _) => {}
            }
            pressed.typed.push(*byte);
            self.place = if matches!(byte, b'\r' | b'\n') { Place::Start } else { Place::Middle };
        }
        pressed
    }
}

#[cfg(test)]
mod tests {
    use rustix::{
        fs::{Mode, OFlags},
        pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
        termios::LocalModes,
    };

    use super::*;

    fn press(keys: &mut Keys, bytes: &[u8]) -> Vec<u8> {
        let pressed = keys.press(bytes);
        assert!(!pressed.help && !pressed.leave, "{pressed:?}");
        pressed.typed
    }

    #[test]
    fn the_escape_leaves_at_the_start_of_a_line_alone() {
        let mut keys = Keys::new(EscapeKey(Some(b'~')));
        assert_eq!(press(&mut keys, b"a~."), b"a~.");
        assert_eq!(press(&mut keys, b"\r"), b"\r");
        assert_eq!(press(&mut keys, b"~"), b"");
        assert!(keys.press(b".").leave);
        let mut keys = Keys::new(EscapeKey(Some(b'~')));
        let pressed = keys.press(b"ls\n~.more");
        assert_eq!((pressed.typed.as_slice(), pressed.leave), (&b"ls\n"[..], true));
    }

    #[test]
    fn the_escape_key_itself_can_be_typed() {
        let mut keys = Keys::new(EscapeKey(Some(b'~')));
        assert_eq!(press(&mut keys, b"~~."), b"~.");
        assert_eq!(press(&mut keys, b"\n~/x"), b"\n~/x");
        assert_eq!(press(&mut keys, b"\r~\r~\r"), b"\r~\r~\r");
        let mut none = Keys::new(EscapeKey(None));
        assert_eq!(press(&mut none, b"~.\n~?"), b"~.\n~?");
    }

    #[test]
    fn help_types_nothing() {
        let mut keys = Keys::new(EscapeKey(Some(b'~')));
        let help = Pressed { help: true, ..Pressed::default() };
        assert_eq!(keys.press(b"~?"), help);
        assert!(keys.press(b"~.").leave);
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&main).expect("granted");
        unlockpt(&main).expect("unlocked");
        let name = ptsname(&main, Vec::new()).expect("named");
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let terminal = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).expect("opened");
        let cooked = || {
            let modes = tcgetattr(&terminal).expect("settings").local_modes;
            modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
        };
        assert!(cooked());
        let raw = enter(&terminal).expect("raw");
        assert!(!cooked());
        let panicked = std::panic::catch_unwind(|| panic!("as a test"));
        assert!(panicked.is_err() && cooked());
        // What is given back is not taken again.
        raw.again();
        drop(raw);
        assert!(cooked());
    }
}
