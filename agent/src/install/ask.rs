//! The question at the console: the last word before a disk is written to.

use std::{
    fs::{self, File},
    io::{Read, Write},
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
    let mut consoles: Vec<File> = consoles(root).iter().filter_map(open).collect();
    for console in &mut consoles {
        put(console, question);
    }
    first_line(&mut consoles, question, limit)
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

fn first_line(consoles: &mut [File], question: &str, limit: Duration) -> Option<String> {
    let end = Instant::now() + limit;
    let mut lines = vec![Vec::new(); consoles.len()];
    loop {
        let left = end.checked_duration_since(Instant::now())?;
        if consoles.is_empty() {
            return None;
        }
        let mut polled: Vec<PollFd<'_>> =
            consoles.iter().map(|console| PollFd::new(console, PollFlags::IN)).collect();
        poll(&mut polled, Timespec::try_from(left).ok().as_ref()).ok()?;
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (at, console) in consoles.iter_mut().enumerate().filter(|(at, _)| ready[*at]) {
            let mut byte = [0; 1];
            match console.read(&mut byte) {
                Ok(1) if matches!(byte[0], b'\n' | b'\r') => {
                    let line = String::from_utf8_lossy(&lines[at]).into_owned();
                    if !line.trim().is_empty() {
                        return Some(line);
                    }
                    // Somebody looked whether the line is alive, or it sends two ends for one.
                    lines[at].clear();
                    put(console, question);
                }
                Ok(1) if lines[at].len() < ANSWER => lines[at].push(byte[0]),
                Ok(1) => {}
                // Its other end is gone.
                Ok(_) | Err(_) => return None,
            }
        }
    }
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
        /// The terminal forgets what was typed when nobody has it open, and a server's kernel always has.
        _kept: File,
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
            Self { root, person, _kept: kept }
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
}
