//! The question at the console: the last word before a disk is written to.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    termios::{QueueSelector, tcflush},
};

use crate::init::serial;

/// How long an answer is waited for. Nobody may be there, and the node has other work.
pub const LIMIT: Duration = Duration::from_secs(600);
/// Longest answer in bytes.
const ANSWER: usize = 256;

/// What came of the question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Somebody typed the word.
    Yes,
    /// Somebody typed something else.
    No,
    /// Nobody answered in time, or there is no console.
    Silence,
}

/// Asks on every console below `root` and waits for the first line that was typed after the question was
/// there: whoever pressed a key before did not answer it.
pub fn ask(root: &Path, question: &str, word: &str, limit: Duration) -> Answer {
    forget_typed(root);
    line(root, question, limit)
        .map_or(Answer::Silence, |line| if line.trim() == word { Answer::Yes } else { Answer::No })
}

/// Shows a text on every console below `root`, and nowhere else.
pub fn show(root: &Path, text: &str) {
    show_on(consoles(root), text);
}

/// Shows a text on every console below `root` but the screen, where another program draws.
pub fn show_on_lines(root: &Path, text: &str) {
    let screen = root.join("dev/tty1");
    show_on(consoles(root).into_iter().filter(|path| *path != screen).collect(), text);
}

fn show_on(consoles: Vec<PathBuf>, text: &str) {
    for path in consoles {
        if let Ok(mut console) = File::options().write(true).open(path) {
            // One that takes no text shows none.
            let _ = write!(console, "\r\n{text}\r\n");
        }
    }
}

/// Forgets what was typed on the consoles below `root` and was read by nobody yet.
pub fn forget_typed(root: &Path) {
    for console in consoles(root).iter().filter_map(open) {
        // One that is no terminal keeps nothing.
        let _ = tcflush(&console, QueueSelector::IFlush);
    }
}

/// Asks on every console below `root` and returns the first line with something in it; a line without is
/// asked again. `None` when there is none within `limit`.
pub fn line(root: &Path, question: &str, limit: Duration) -> Option<String> {
    let mut reader = Reader::default();
    reader.ask(root, question);
    reader.wait(question, limit)
}

/// Consoles that stay open from question to question: a terminal that nobody has open forgets the line that
/// somebody is typing.
#[derive(Debug, Default)]
pub struct Reader(Vec<Asked>);

/// A console, and what was typed of a line so far.
#[derive(Debug)]
struct Asked {
    path: PathBuf,
    console: File,
    typed: Vec<u8>,
}

impl Reader {
    /// Asks on every console below `root`, and opens those that are not open.
    pub fn ask(&mut self, root: &Path, question: &str) {
        self.open(root);
        for Asked { console, .. } in &mut self.0 {
            put(console, question);
        }
    }

    /// Asks on the consoles below `root` that came since, or failed and are back. Where the question was put
    /// before, somebody may be typing the answer; an empty line shows it there again.
    pub fn ask_new(&mut self, root: &Path, question: &str) {
        let asked = self.0.len();
        self.open(root);
        for Asked { console, .. } in &mut self.0[asked..] {
            put(console, question);
        }
    }

    fn open(&mut self, root: &Path) {
        for path in consoles(root) {
            if self.0.iter().any(|asked| asked.path == path) {
                continue;
            }
            if let Some(console) = open(&path) {
                self.0.push(Asked { path, console, typed: Vec::new() });
            }
        }
    }

    /// Waits at most `limit` for a line with something in it; a line without shows `question` again. What was
    /// typed of one stays. A console that fails is closed, and the others are read on; `None` at once when
    /// there is none.
    pub fn wait(&mut self, question: &str, limit: Duration) -> Option<String> {
        let end = Instant::now() + limit;
        while !self.0.is_empty() {
            let left = end.checked_duration_since(Instant::now())?;
            let ready = self.ready(left)?;
            let mut ready = ready.into_iter();
            let mut line = None;
            self.0.retain_mut(|asked| {
                if line.is_some() || !ready.next().unwrap_or(false) {
                    return true;
                }
                let read = asked.read(question);
                let stays = read.is_ok();
                line = read.ok().flatten();
                stays
            });
            if line.is_some() {
                return line;
            }
        }
        None
    }

    /// Whether there is something to read, for each console.
    fn ready(&self, left: Duration) -> Option<Vec<bool>> {
        let mut polled: Vec<PollFd<'_>> =
            self.0.iter().map(|asked| PollFd::new(&asked.console, PollFlags::IN)).collect();
        poll(&mut polled, Timespec::try_from(left).ok().as_ref()).ok()?;
        Some(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
    }
}

impl Asked {
    /// Reads a byte; returns the line that ends with it, if something is in it. Fails when the other end is gone.
    fn read(&mut self, question: &str) -> io::Result<Option<String>> {
        let mut byte = [0; 1];
        self.console.read_exact(&mut byte)?;
        if !matches!(byte[0], b'\n' | b'\r') {
            if self.typed.len() < ANSWER {
                self.typed.push(byte[0]);
            }
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.typed)).into_owned();
        if !line.trim().is_empty() {
            return Ok(Some(line));
        }
        // Somebody looked whether the line is alive, or it sends two ends for one.
        put(&mut self.console, question);
        Ok(None)
    }
}

fn open(path: &PathBuf) -> Option<File> {
    File::options().read(true).write(true).open(path).ok()
}

fn put(console: &mut File, question: &str) {
    // One that takes no text gives no answer either.
    let _ = write!(console, "\r\n{question}\r\n> ");
}

/// The consoles that the kernel writes to, and that of firmware, where it is another.
fn consoles(root: &Path) -> Vec<PathBuf> {
    let active = fs::read_to_string(root.join(serial::ACTIVE)).unwrap_or_default();
    let device = |name: &str| match name {
        // The screen in front is the first one.
        "tty0" => root.join("dev/tty1"),
        name => root.join("dev").join(name),
    };
    let beside = serial::beside(root).map(|(port, _)| port);
    active.split_whitespace().map(device).chain(beside).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::thread;

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    /// A server with one console, and whoever sits at it.
    pub(crate) struct Seat {
        pub(crate) root: tempfile::TempDir,
        person: File,
        /// The terminal forgets what was typed when nobody has it open. A server's kernel always has the one
        /// that it writes to itself, and nobody the screen.
        kept: Option<File>,
    }

    impl Seat {
        pub(crate) fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("sys/class/tty/console")).unwrap();
            fs::create_dir(root.path().join("dev")).unwrap();
            fs::write(root.path().join("sys/class/tty/console/active"), "ttyS0\n").unwrap();
            let person = File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap());
            grantpt(&person).unwrap();
            unlockpt(&person).unwrap();
            let terminal = ptsname(&person, Vec::new()).unwrap().into_string().unwrap();
            let kept = File::options().read(true).write(true).open(&terminal).unwrap();
            std::os::unix::fs::symlink(terminal, root.path().join("dev/ttyS0")).unwrap();
            Self { root, person, kept: Some(kept) }
        }

        /// Types at once, and waits for the echo: the terminal has it then.
        pub(crate) fn type_now(&self, text: &str) {
            (&self.person).write_all(text.as_bytes()).unwrap();
            read_until(&self.person, &text.replace('\n', "\r\n"));
        }

        /// Returns what is on the console, up to this text.
        pub(crate) fn shown_until(&self, end: &str) -> String {
            read_until(&self.person, end)
        }

        /// Types each text at the next prompt. Joining returns all that was shown by then.
        pub(crate) fn type_at_prompts(&self, texts: &[&str]) -> thread::JoinHandle<String> {
            let mut person = self.person.try_clone().unwrap();
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            thread::spawn(move || {
                let mut shown = String::new();
                for text in texts {
                    shown += &read_until(&person, "\n> ");
                    person.write_all(text.as_bytes()).unwrap();
                }
                shown
            })
        }
    }

    fn read_until(mut person: &File, end: &str) -> String {
        let mut shown = Vec::new();
        while !shown.ends_with(end.as_bytes()) {
            let mut byte = [0];
            person.read_exact(&mut byte).unwrap();
            shown.extend(byte);
        }
        String::from_utf8(shown).unwrap()
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    fn asked(texts: &[&str]) -> Answer {
        let seat = Seat::new();
        let typing = seat.type_at_prompts(texts);
        let answer = ask(seat.root.path(), "Sure?", "S1", PATIENCE);
        // Who would type more finds the line gone.
        drop(seat);
        typing.join().unwrap();
        answer
    }

    #[test]
    fn only_the_word_is_a_yes() {
        assert_eq!(asked(&["S1\r"]), Answer::Yes);
        assert_eq!(asked(&[" S1 \n"]), Answer::Yes);
        assert_eq!(asked(&["yes\n"]), Answer::No);
    }

    #[test]
    fn a_line_without_anything_is_no_answer_and_asked_again() {
        assert_eq!(asked(&["\n", "  \r", "S1\n"]), Answer::Yes);
        assert_eq!(asked(&["\n", "no\n"]), Answer::No);
    }

    #[test]
    fn what_was_typed_before_the_question_does_not_answer_it() {
        let seat = Seat::new();
        seat.type_now("S1\nro");
        let typing = seat.type_at_prompts(&["S1\n"]);
        assert_eq!(ask(seat.root.path(), "Sure?", "S1", PATIENCE), Answer::Yes);
        typing.join().unwrap();
        seat.type_now("S1\n");
        let waited = Duration::from_millis(50);
        assert_eq!(ask(seat.root.path(), "Sure?", "S1", waited), Answer::Silence);
    }

    #[test]
    fn silence_is_no_answer() {
        let waited = Duration::from_millis(50);
        let seat = Seat::new();
        seat.type_now("S1");
        assert_eq!(ask(seat.root.path(), "", "S1", waited), Answer::Silence);
        assert_eq!(ask(Path::new("/nonexistent"), "", "S1", waited), Answer::Silence);
    }

    #[test]
    fn a_line_that_is_typed_slowly_arrives_whole() {
        let mut seat = Seat::new();
        let root = seat.root.path().to_owned();
        let mut reader = Reader::default();
        reader.ask(&root, "The key?");
        assert!(seat.shown_until("\n> ").contains("The key?"));
        // From now on nobody else has the terminal open.
        seat.kept = None;
        seat.type_now("abc");
        let short = Duration::from_millis(50);
        assert_eq!(reader.wait("The key?", short), None);
        reader.ask_new(&root, "The key?");
        assert_eq!(reader.wait("The key?", short), None);
        // A screen would have forgotten it otherwise.
        let mut polled = [PollFd::new(&seat.person, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).unwrap();
        assert!(!polled[0].revents().contains(PollFlags::HUP), "the terminal is open still");
        // The question was not put into the middle of the line.
        (&seat.person).write_all(b"def\n").unwrap();
        assert_eq!(seat.shown_until("def\r\n"), "def\r\n");
        assert_eq!(reader.wait("The key?", PATIENCE).as_deref(), Some("abcdef"));
        seat.type_now("\n");
        assert_eq!(reader.wait("The key?", short), None);
        assert!(seat.shown_until("\n> ").contains("The key?"), "an empty line shows it again");
    }

    #[test]
    fn a_console_that_fails_ends_nothing_on_the_others_and_comes_back() {
        let seat = Seat::new();
        let broken = Seat::new();
        let root = seat.root.path();
        let terminal = fs::read_link(broken.root.path().join("dev/ttyS0")).unwrap();
        std::os::unix::fs::symlink(terminal, root.join("dev/ttyS1")).unwrap();
        fs::write(root.join("sys/class/tty/console/active"), "ttyS1 ttyS0\n").unwrap();
        let mut reader = Reader::default();
        reader.ask(root, "The key?");
        drop(broken);
        seat.shown_until("\n> ");
        seat.type_now("abc\n");
        assert_eq!(reader.wait("The key?", PATIENCE).as_deref(), Some("abc"));
        // A process that another test starts just now may hold its other end a moment longer.
        let deadline = Instant::now() + PATIENCE;
        while reader.0.len() > 1 && Instant::now() < deadline {
            assert_eq!(reader.wait("The key?", Duration::from_millis(50)), None);
        }
        assert_eq!(reader.0.len(), 1, "the broken one is closed");
        let back = Seat::new();
        let terminal = fs::read_link(back.root.path().join("dev/ttyS0")).unwrap();
        fs::remove_file(root.join("dev/ttyS1")).unwrap();
        std::os::unix::fs::symlink(terminal, root.join("dev/ttyS1")).unwrap();
        reader.ask_new(root, "The key?");
        back.shown_until("\n> ");
        back.type_now("def\n");
        assert_eq!(reader.wait("The key?", PATIENCE).as_deref(), Some("def"));
    }
}
