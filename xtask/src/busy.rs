//! How long a program, and all that it started, was on a processor.

use std::{
    fs,
    io::{self, Read},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Fields of `/proc/PID/stat` behind the program's name, which ends with a parenthesis: user and system time, its own
/// and that of children which were waited for (`proc_pid_stat(5)`, fields 14 to 17).
const TIMES: std::ops::Range<usize> = 11..15;

/// Runs a program to its end. Returns its output, and its time on processors: its own, and that of all for which
/// it or one of them waited.
pub(crate) fn output(command: &mut Command) -> io::Result<(Output, Duration)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (out, errors) = (child.stdout.take(), child.stderr.take());
    let errors = thread::spawn(move || read(errors));
    let stdout = read(out)?;
    let stderr = errors.join().expect("reading panics nowhere")?;
    // A program that ended is there until somebody waits for it.
    let pid = Pid::from_child(&child);
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    let status = child.wait()?;
    Ok((Output { status, stdout, stderr }, busy(&stat)))
}

fn read(pipe: Option<impl Read>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut bytes))?;
    Ok(bytes)
}

fn busy(stat: &str) -> Duration {
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let times = fields.skip(TIMES.start).take(TIMES.len());
    let ticks: u64 = times.filter_map(|time| time.parse::<u64>().ok()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_what_a_program_waited_for_is_counted_too() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 100 20 300 4 20 0";
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert!((busy(stat).as_secs_f64() * ticks - 424.0).abs() < 1e-6);
        let run = |script: &str| output(Command::new("sh").args(["-c", script])).expect("started");
        let count = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let (found, busy) = run(&format!("sh -c '{count}'; echo out; echo err >&2; exit 3"));
        assert_eq!(
            (found.stdout.as_slice(), found.stderr.as_slice()),
            (&b"out\n"[..], &b"err\n"[..])
        );
        assert_eq!(found.status.code(), Some(3));
        assert!(busy > run("sleep 0.3").1 && busy > Duration::ZERO, "{busy:?}");
    }
}
