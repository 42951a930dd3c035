//! Has the disk's volumes opened and checked before they are mounted: by the agent's process, before it
//! becomes the node's service, so that nothing that a TPM or a disk says reaches PID 1, and within a deadline.

use std::{
    io,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, WaitId, WaitIdOptions, waitid},
};

use super::{
    agent::Agent,
    watchdog::{self, Watchdogs},
};
use crate::spawn::{self, Milestone};

/// What is asked of the agent's program.
pub const WORD: &str = "unlock";
/// Longest time that it may take. It has limits of its own for each thing that it does.
const LIMIT: Duration = Duration::from_secs(3700);
/// How long one that says nothing any more may take to end. What waits for a disk that hangs is reaped later.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Runs `program` to open the volumes and to check them, and waits for it. Returns its process, which goes on
/// as the node's service when it is told that they are mounted.
///
/// # Errors
/// When it ended before, or took too long. It leaves its own lines in the log, and the volumes locked or as
/// they are.
pub fn run(program: &Path, mut watchdogs: Option<&mut Watchdogs>) -> io::Result<Agent> {
    let mut agent = Agent::launch(program, Some(WORD))?;
    let begin = Instant::now();
    while let Some(socket) = &agent.socket {
        match spawn::receive::<Milestone>(socket) {
            Ok(Some((Milestone::VolumesOpen, _))) => return Ok(agent),
            Ok(None) if begin.elapsed() > LIMIT => {
                agent.signal(Signal::KILL);
                return Err(io::ErrorKind::TimedOut.into());
            }
            Ok(None) => {}
            Ok(Some((Milestone::VolumesMounted, _))) | Err(_) => agent.socket = None,
        }
        if let Some(watchdogs) = &mut watchdogs {
            watchdogs.feed();
        }
        wait(&agent, watchdog::INTERVAL);
        agent.log_output();
    }
    // Nothing comes of it any more, whatever it still does.
    agent.signal(Signal::KILL);
    Err(io::Error::other(end_of(&mut agent)))
}

/// Waits until the agent says something, or ends, and for `limit` at most.
fn wait(agent: &Agent, limit: Duration) {
    let files = [agent.socket.as_ref(), agent.output.as_ref(), Some(&agent.pidfd)];
    let mut polled: Vec<_> = files
        .into_iter()
        .flatten()
        .map(|file| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN))
        .collect();
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(0),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // One that failed is a look too early.
    let _ = poll(&mut polled, Some(&limit));
}

/// Collects a process that ends, and says how it did.
fn end_of(agent: &mut Agent) -> String {
    let begin = Instant::now();
    while begin.elapsed() < END_LIMIT {
        wait(agent, END_LIMIT - begin.elapsed());
        agent.log_output();
        let id = WaitId::PidFd(agent.pidfd.as_fd());
        if let Ok(Some(status)) = waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            return match status.exit_status() {
                Some(code) => format!("{WORD} ended with exit status {code}"),
                None => format!("{WORD} was ended by a signal"),
            };
        }
    }
    format!("{WORD} gave up, and waits for something that does not answer")
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn run_script(script: &str) -> io::Result<Agent> {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("agent");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("set");
        run(&program, None)
    }

    #[test]
    fn a_process_that_opened_the_volumes_goes_on_and_one_that_ends_is_told() {
        let said = r#"test $1 = unlock && printf '"volumes-open"' >&3; exec sleep 60"#;
        let agent = run_script(said).expect("it says that they are open");
        assert!(agent.socket.is_some());
        agent.signal(Signal::KILL);

        let failed = run_script("exit 7").expect_err("it ended");
        assert!(failed.to_string().contains("exit status 7"), "{failed}");
        // What it says is nothing that it could have to say.
        for wrong in [r#"printf '"volumes-mounted"' >&3"#, "printf x >&3"] {
            let failed = run_script(&format!("{wrong}; exec sleep 60")).expect_err("not that");
            assert!(failed.to_string().contains("by a signal"), "{failed}");
        }
        assert!(run(Path::new("/nonexistent"), None).is_err());
    }
}
