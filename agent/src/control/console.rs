//! A console that is followed, and typed at: one long-lived stream in both directions.
//!
//! A followed console asks its machine's process one question at a time, whatever is typed meanwhile, and hangs up
//! when its stream ends. What is typed waits for a guest that does not read, up to [`TYPED`] bytes.

use std::{collections::VecDeque, io, pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::{
    FutureExt,
    future::{Fuse, FusedFuture},
};
use overlay::OverlayStream;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::Notify,
    time::Instant,
};
use types::{forward::StreamAnswer, ids::MachineId};

use super::{Control, routes::Follow};
use crate::{
    machines::{
        keeper::State,
        last_console,
        vmm::{self, VmmError},
    },
    tasks::frames,
};

/// Longest wait for console output before asking again, in milliseconds.
const WAIT_MS: u32 = vmm::MAX_WAIT_MS;

/// Pause before a machine's process is asked again that gave nothing at once: it is at work for others, or ends.
const PAUSE: Duration = Duration::from_millis(250);

/// Least time between two questions when the first gave little: a guest that prints byte by byte must not have a
/// question asked for each. Nobody sees the difference: a terminal is drawn less often.
const GATHER: Duration = Duration::from_millis(25);

/// Bytes that are not little.
const MUCH: usize = 4096;

/// How long a machine that restarts may take.
const RESTART: Duration = Duration::from_secs(60);

/// Bytes typed that wait for the guest here, beside those that its serial port keeps: as many as Linux keeps of
/// a line (`N_TTY_BUF_SIZE`).
const TYPED: usize = 4096;

/// Bytes typed that are passed on at a time.
const PIECE: usize = 1024;

/// A guest that took nothing for so long while all room was taken reads nothing: what waits for it is let go.
const DEAF: Duration = Duration::from_secs(10);

/// Bytes of output that a terminal is shown of what was before it.
const TAIL: u64 = 4096;

/// What tells whoever types that it was in vain (ECMA-48 §8.3.3, BEL), as terminals do whose line is full.
const BELL: &[u8] = b"\x07";

/// From where a console is read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// From this byte, counted from the guest's start.
    At(u64),
    /// From now, behind the last lines before.
    Now,
}

impl Control {
    /// Shows a console, and types at it what comes, until the machine or the stream ends.
    pub(super) async fn follow_console(
        &self,
        mut stream: OverlayStream,
        machine: MachineId,
        (start, follow): (Start, Follow),
    ) -> io::Result<()> {
        frames::write(&mut stream, &StreamAnswer::Open { length: None }).await?;
        let (reader, writer) = tokio::io::split(stream);
        let bell = Notify::new();
        // Each goes on while the other waits: a guest that prints much can be interrupted, and one that reads
        // nothing is seen.
        tokio::select! {
            shown = self.show(writer, machine, (start, follow), &bell) => shown,
            ended = listen(reader, machine, &bell) => ended,
        }
    }

    async fn show(
        &self,
        mut writer: impl AsyncWrite + Unpin,
        machine: MachineId,
        (start, follow): (Start, Follow),
        bell: &Notify,
    ) -> io::Result<()> {
        let mut from = match start {
            Start::At(from) => from,
            Start::Now => begin(&mut writer, machine).await?,
        };
        let wait_ms = if follow == Follow::Yes { WAIT_MS } else { 0 };
        let mut process = last_console::process(machine);
        let mut asked = Instant::now();
        let mut poll = pin!(vmm::console(machine, from, wait_ms));
        loop {
            let answer = tokio::select! {
                answer = &mut poll => answer,
                () = bell.notified() => {
                    writer.write_all(BELL).await?;
                    writer.flush().await?;
                    continue;
                }
            };
            let pause = match answer {
                Ok(piece) => {
                    writer.write_all(&piece.bytes).await?;
                    writer.flush().await?;
                    from = piece.end;
                    if follow == Follow::No {
                        return writer.shutdown().await;
                    }
                    match piece.bytes.len() {
                        0 => PAUSE,
                        1..MUCH => GATHER,
                        _ => Duration::ZERO,
                    }
                }
                Err(error) => {
                    // A machine that restarts has a new process in a moment, whose output begins anew.
                    if follow == Follow::No || !self.comes_back(machine).await {
                        return writer.shutdown().await;
                    }
                    if matches!(error, VmmError::Connect { .. } | VmmError::Http { .. }) {
                        from = 0;
                    }
                    PAUSE
                }
            };
            tokio::time::sleep(pause.saturating_sub(asked.elapsed())).await;
            // A reader may be so slow that the machine restarts between two questions.
            let next = last_console::process(machine);
            if next != process {
                (process, from) = (next, 0);
            }
            asked = Instant::now();
            poll.set(vmm::console(machine, from, wait_ms));
        }
    }

    async fn comes_back(&self, machine: MachineId) -> bool {
        let mut snapshot = self.parts.machines.snapshot();
        let alive = snapshot.wait_for(|snapshot| {
            let view = snapshot.machines.iter().find(|view| view.record.lease.id == machine);
            view.is_none_or(|view| view.state != State::Starting && view.state != State::Stopping)
        });
        let Ok(Ok(snapshot)) = tokio::time::timeout(RESTART, alive).await else {
            return false;
        };
        let view = snapshot.machines.iter().find(|view| view.record.lease.id == machine);
        view.is_some_and(|view| view.state == State::Running)
    }
}

/// Shows the last lines so far; returns from where what is new begins.
async fn begin(writer: &mut (impl AsyncWrite + Unpin), machine: MachineId) -> io::Result<u64> {
    // An answer from beyond the end says where the end is. A machine that is just being started has said nothing.
    let Ok(next) = vmm::console(machine, u64::MAX, 0).await else { return Ok(0) };
    let Ok(last) = vmm::console(machine, next.from.saturating_sub(TAIL), 0).await else {
        return Ok(next.from);
    };
    let line = last.bytes.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let whole = if last.from == 0 { &last.bytes[..] } else { &last.bytes[line..] };
    writer.write_all(plain(whole).as_bytes()).await?;
    writer.flush().await?;
    Ok(last.end)
}

/// Returns output as text alone. A terminal answers some commands by itself (ECMA-48 §8.3.35, DSR), and the guest
/// that asked may be long past reading the answer: it would be typed at whatever asks now.
fn plain(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text.chars());
    while let Some(c) = rest.next() {
        match c {
            '\x1b' => skip_escape(&mut rest),
            '\n' | '\r' | '\t' | '\x08' => plain.push(c),
            c if c.is_control() => {}
            c => plain.push(c),
        }
    }
    plain
}

/// Skips the rest of an escape sequence.
fn skip_escape(rest: &mut std::str::Chars<'_>) {
    match rest.next() {
        // A control sequence ends with a byte of columns 4 to 7 (ECMA-48 §5.4).
        Some('[') => {
            rest.find(|c| matches!(c, '@'..='~'));
        }
        // A control string ends with ST, which is an escape sequence too (§5.6); xterm takes BEL as well.
        Some('P' | 'X' | ']' | '^' | '_') => {
            if rest.find(|c| matches!(c, '\x07' | '\x1b')) == Some('\x1b') {
                rest.next();
            }
        }
        Some(_) | None => {}
    }
}

/// Types at a guest what comes, until no more does.
async fn listen(
    mut reader: impl AsyncRead + Unpin,
    machine: MachineId,
    bell: &Notify,
) -> io::Result<()> {
    let mut typed = Typed::new(Instant::now());
    let mut input = [0; PIECE];
    let mut offer = pin!(Fuse::terminated());
    loop {
        let room = typed.room().min(input.len());
        let kept = tokio::select! {
            count = reader.read(&mut input[..room]), if room > 0 => match count? {
                0 => return Ok(()),
                count => typed.put(Instant::now(), &input[..count]),
            },
            outcome = &mut offer => typed.offered(Instant::now(), outcome),
        };
        if kept == Kept::Some {
            bell.notify_one();
        }
        if offer.is_terminated()
            && let Some(piece) = typed.next()
        {
            offer.set(pass_on(machine, piece).fuse());
        }
    }
}

/// What became of a piece that was offered to a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offered {
    /// It has all of it.
    Taken,
    /// It has no room for it.
    Full,
    /// There is no guest, or whether it has the piece is not known: it must not be offered again.
    Lost,
}

async fn pass_on(machine: MachineId, piece: Bytes) -> Offered {
    match vmm::type_in(machine, piece).await {
        Ok(()) => Offered::Taken,
        Err(VmmError::Status { status: 429, .. }) => {
            tokio::time::sleep(PAUSE).await;
            Offered::Full
        }
        Err(_) => Offered::Lost,
    }
}

/// Whether all is kept that was typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    All,
    Some,
}

/// What was typed and waits for the guest. It is told what happened and when, and does nothing by itself.
struct Typed {
    /// Behind what is offered.
    waiting: VecDeque<u8>,
    /// What is offered to the guest.
    offered: Bytes,
    /// When the guest took something last, or something began to wait for it.
    moved: Instant,
    /// Whether the guest reads nothing: only what was typed last waits then.
    deaf: bool,
}

impl Typed {
    fn new(now: Instant) -> Self {
        Self { waiting: VecDeque::new(), offered: Bytes::new(), moved: now, deaf: false }
    }

    /// Returns how many bytes may be typed.
    fn room(&self) -> usize {
        if self.deaf { TYPED } else { TYPED.saturating_sub(self.waiting.len()) }
    }

    /// Adds what was typed.
    fn put(&mut self, now: Instant, bytes: &[u8]) -> Kept {
        if self.offered.is_empty() {
            self.moved = now;
        }
        let lost = self.deaf && !self.waiting.is_empty();
        if self.deaf {
            self.waiting.clear();
        }
        self.waiting.extend(bytes);
        if lost { Kept::Some } else { Kept::All }
    }

    /// Returns what is to be offered now: the same until it was taken, or lost.
    fn next(&mut self) -> Option<Bytes> {
        if self.offered.is_empty() {
            let count = PIECE.min(self.waiting.len());
            self.offered = self.waiting.drain(..count).collect();
        }
        (!self.offered.is_empty()).then(|| self.offered.clone())
    }

    /// Takes note of what became of it.
    fn offered(&mut self, now: Instant, outcome: Offered) -> Kept {
        match outcome {
            Offered::Taken => {
                self.offered = Bytes::new();
                (self.moved, self.deaf) = (now, false);
                Kept::All
            }
            Offered::Full if self.room() == 0 && now.duration_since(self.moved) >= DEAF => {
                self.lose();
                self.deaf = true;
                Kept::Some
            }
            Offered::Full => Kept::All,
            // What comes next is not the guest, or not the question, that this was meant for.
            Offered::Lost => {
                self.lose();
                Kept::Some
            }
        }
    }

    fn lose(&mut self) {
        self.waiting.clear();
        self.offered = Bytes::new();
        self.deaf = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn what_is_refused_is_offered_again_until_it_is_taken() {
        let start = Instant::now();
        let mut typed = Typed::new(start);
        assert_eq!(typed.put(start, b"ab"), Kept::All);
        assert_eq!(typed.next().as_deref(), Some(&b"ab"[..]));
        assert_eq!(typed.put(start, b"c"), Kept::All);
        assert_eq!(typed.offered(after(start, 60), Offered::Full), Kept::All);
        assert_eq!(typed.next().as_deref(), Some(&b"ab"[..]));
        assert_eq!(typed.offered(after(start, 61), Offered::Taken), Kept::All);
        assert_eq!(typed.next().as_deref(), Some(&b"c"[..]));
        assert_eq!(typed.offered(after(start, 61), Offered::Taken), Kept::All);
        assert_eq!(typed.next(), None);
    }

    #[test]
    fn what_no_guest_reads_is_let_go() {
        let start = Instant::now();
        let mut typed = Typed::new(start);
        typed.put(start, &[b'x'; PIECE]);
        typed.next();
        typed.put(start, &[b'x'; TYPED]);
        assert_eq!(typed.room(), 0);
        assert_eq!(typed.offered(after(start, 9), Offered::Full), Kept::All);
        assert_eq!(typed.offered(after(start, 10), Offered::Full), Kept::Some);
        assert_eq!((typed.room(), typed.next()), (TYPED, None));
        // From then on what was typed last waits, so that a guest that comes back is not typed at by the past.
        assert_eq!(typed.put(after(start, 11), b"first"), Kept::All);
        assert_eq!(typed.next().as_deref(), Some(&b"first"[..]));
        assert_eq!(typed.put(after(start, 12), b"second"), Kept::All);
        assert_eq!(typed.put(after(start, 13), b"third"), Kept::Some);
        typed.offered(after(start, 14), Offered::Taken);
        assert_eq!(typed.next().as_deref(), Some(&b"third"[..]));
    }

    #[test]
    fn what_may_have_been_taken_is_not_typed_twice() {
        let start = Instant::now();
        let mut typed = Typed::new(start);
        typed.put(start, b"pass");
        typed.next();
        typed.put(start, b"word");
        assert_eq!(typed.offered(start, Offered::Lost), Kept::Some);
        assert_eq!(typed.next(), None);
    }

    #[test]
    fn what_was_before_is_shown_as_text() {
        let shown =
            plain(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07a\x1b]0;title\x1b\\b\x1b[6n\x1bc\r\n\x07");
        assert_eq!(shown, "red ab\r\n");
        assert_eq!(plain("caf\u{e9}\u{9b}6n".as_bytes()), "caf\u{e9}6n");
        assert_eq!(plain(b"cut \x1b["), "cut ");
        assert_eq!(plain(b"\xc3cut"), "\u{fffd}cut");
    }

    proptest::proptest! {
        #[test]
        fn nothing_that_was_before_commands_a_terminal(
            bytes: Vec<u8>,
            escapes in "(\x1b|[\\[\\]P;0m\x07\\\\a\u{9b}]){0,40}",
        ) {
            let allowed = |c: char| matches!(c, '\n' | '\r' | '\t' | '\x08');
            for shown in [plain(&bytes), plain(escapes.as_bytes())] {
                let text = shown.chars().all(|c| !c.is_control() || allowed(c));
                proptest::prop_assert!(text, "{shown:?}");
            }
        }
    }
}
