//! Has the disk's volumes opened and checked before they are mounted: by another program, so that nothing
//! that a TPM or a disk says reaches PID 1, and within a deadline.

use std::{
    io,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::watchdog::Watchdogs;

/// What is asked of the agent's program.
pub const WORD: &str = "unlock";
/// Longest time that it may take. It has limits of its own for each thing that it does.
const LIMIT: Duration = Duration::from_secs(3700);
/// Time between two looks.
const POLL: Duration = Duration::from_millis(5);

/// Runs `program` to open the volumes and to check them, and waits for it. A program that fails leaves its own
/// lines in the log, and the volumes locked or as they are.
pub fn run(program: &Path, mut watchdogs: Option<&mut Watchdogs>) -> io::Result<()> {
    let mut child = Command::new(program)
        .arg(WORD)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()?;
    let begin = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(io::Error::other(format!("{WORD} ended with {status}"))),
            None if begin.elapsed() > LIMIT => {
                child.kill()?;
                // One that waits for a disk that hangs is reaped later.
                return Err(io::ErrorKind::TimedOut.into());
            }
            None => {
                if let Some(watchdogs) = &mut watchdogs {
                    watchdogs.feed();
                }
                std::thread::sleep(POLL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_told_from_one_that_does_its_work() {
        assert!(run(Path::new("/bin/true"), None).is_ok());
        let failed = run(Path::new("/bin/false"), None).expect_err("it fails");
        assert!(failed.to_string().contains("exit status: 1"), "{failed}");
        assert!(run(Path::new("/nonexistent"), None).is_err());
    }
}
