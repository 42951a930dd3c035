//! The question at the console: the last word before a disk is written to.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

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

/// Asks on every console below `root` and waits for the first line.
pub fn ask(root: &Path, question: &str, word: &str, limit: Duration) -> Answer {
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

/// Asks on every console below `root` and returns the first line; `None` when there is none in time.
pub fn line(root: &Path, question: &str, limit: Duration) -> Option<String> {
    let open = |path: &PathBuf| File::options().read(true).write(true).open(path).ok();
    let mut consoles: Vec<File> = consoles(root).iter().filter_map(open).collect();
    for console in &mut consoles {
        // One that takes no text gives no answer either.
        let _ = write!(console, "\r\n{question}\r\n> ");
    }
    first_line(&mut consoles, limit)
}

/// The consoles that the kernel writes to, as its command line or firmware chose them.
fn consoles(root: &Path) -> Vec<PathBuf> {
    let active = fs::read_to_string(root.join("sys/class/tty/console/active")).unwrap_or_default();
    let device = |name: &str| match name {
        // The screen in front is the first one.
        "tty0" => root.join("dev/tty1"),
        name => root.join("dev").join(name),
    };
    active.split_whitespace().map(device).collect()
}

fn first_line(consoles: &mut [File], limit: Duration) -> Option<String> {
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
                    return Some(String::from_utf8_lossy(&lines[at]).into_owned());
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
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    /// A console, and its other end, at which `typed` was typed.
    fn root(typed: &'static str) -> (tempfile::TempDir, File) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("sys/class/tty/console")).unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        fs::write(root.path().join("sys/class/tty/console/active"), "ttyS0\n").unwrap();
        let mut person = File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap());
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        let terminal = ptsname(&person, Vec::new()).unwrap().into_string().unwrap();
        std::os::unix::fs::symlink(terminal, root.path().join("dev/ttyS0")).unwrap();
        person.write_all(typed.as_bytes()).unwrap();
        (root, person)
    }

    #[test]
    fn only_the_word_is_a_yes() {
        let asked = |typed| {
            let (root, _person) = root(typed);
            ask(root.path(), "", "S1", Duration::from_secs(5))
        };
        assert_eq!(asked("S1\r"), Answer::Yes);
        assert_eq!(asked(" S1 \n"), Answer::Yes);
        assert_eq!(asked("yes\n"), Answer::No);
        assert_eq!(asked("\n"), Answer::No);
    }

    #[test]
    fn silence_is_no_answer() {
        let waited = Duration::from_millis(50);
        let (root, _person) = root("S1");
        assert_eq!(ask(root.path(), "", "S1", waited), Answer::Silence);
        assert_eq!(ask(Path::new("/nonexistent"), "", "S1", waited), Answer::Silence);
    }
}
