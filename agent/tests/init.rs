//! PID 1 for real, in a namespace of its own: it collects orphans, restarts an agent that crashes
//! after bounded delays, and goes down in bounded steps although the agent does not want to.
//!
//! This program plays every part. Without arguments it is the test; as `init FOLDER` it is PID 1;
//! called `FOLDER/crashing/agent` or `FOLDER/stubborn/agent` it is that agent.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    env, fs,
    io::{BufRead, BufReader},
    os::unix::{fs::symlink, process::ExitStatusExt},
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use agent::init::{
    agent::Agent,
    serve::{self, Programs},
    shutdown::{AGENT_GRACE, AGENT_KILL, SYNC_LIMIT},
    unlock,
    watchdog::Watchdogs,
};
use rustix::event::{PollFd, PollFlags, poll};

/// How long anything may take that has no deadline of its own, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Children that the crashing agent leaves behind each time.
const ORPHANS: usize = 5;

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let own = Path::new(&arguments[0]);
    let part = own.parent().and_then(Path::file_name).unwrap_or_default();
    if own.file_name().is_some_and(|name| name == "agent") {
        match part.to_str() {
            Some("crashing") => crash(),
            Some("gone") => std::process::exit(9),
            _ => stay(),
        }
        return;
    }
    if arguments.get(1).is_some_and(|word| word == "init") {
        let agent = Path::new(&arguments[2]).join("agent");
        let waiting = (Path::new(&arguments[2]).ends_with("gone")).then(|| ended(&agent));
        let programs = Programs { agent: &agent, waiting, dashboard: None };
        serve::run(Watchdogs::default(), programs);
    }
    if let Some(reason) = missing() {
        println!("skipped: init: {reason}");
        return;
    }
    std::thread::spawn(|| {
        std::thread::sleep(4 * LIMIT);
        eprintln!("init said nothing more within {:?}", 4 * LIMIT);
        std::process::exit(1);
    });
    a_crashing_agent_is_restarted_and_its_orphans_are_collected();
    println!("test a_crashing_agent_is_restarted_and_its_orphans_are_collected ... ok");
    a_stubborn_agent_does_not_keep_the_node_up();
    println!("test a_stubborn_agent_does_not_keep_the_node_up ... ok");
    an_agent_that_ended_before_it_could_go_on_is_started_again();
    println!("test an_agent_that_ended_before_it_could_go_on_is_started_again ... ok");
}

/// Starts the agent, and waits until it has ended.
fn ended(program: &Path) -> Agent {
    let agent = Agent::launch(program, Some(unlock::WORD)).unwrap();
    poll(&mut [PollFd::new(&agent.pidfd, PollFlags::IN)], None).unwrap();
    agent
}

/// Leaves children behind that end when nobody waits for them any more, and fails.
fn crash() {
    for _ in 0..ORPHANS {
        Command::new("/bin/sh").args(["-c", "sleep 0.3 & echo left $!"]).status().unwrap();
    }
    std::process::exit(9);
}

/// Ignores what it is asked: a shell that ignores SIGTERM takes its place.
fn stay() {
    use std::os::unix::process::CommandExt;
    let script = "trap '' TERM; echo staying; while true; do sleep 1; done";
    let error = Command::new("/bin/sh").args(["-c", script]).exec();
    panic!("no shell: {error}");
}

/// Returns why namespaces cannot be had here.
fn missing() -> Option<String> {
    let tried = Command::new("unshare").args(NAMESPACES).arg("true").output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("cannot start unshare: {error}")),
    }
}

const NAMESPACES: [&str; 6] =
    ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"];

/// PID 1 in a namespace, and the `unshare` that started it.
struct Init {
    starter: Child,
    lines: std::io::Lines<BufReader<ChildStderr>>,
    seen: Vec<String>,
}

impl Init {
    fn start(folder: &Path, agent: &str) -> Self {
        let part = folder.join(agent);
        fs::create_dir_all(&part).unwrap();
        symlink(env::current_exe().unwrap(), part.join("agent")).unwrap();
        let mut starter = Command::new("unshare")
            .args(NAMESPACES)
            .arg(env::current_exe().unwrap())
            .arg("init")
            .arg(&part)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(starter.stderr.take().unwrap()).lines();
        Self { starter, lines, seen: Vec::new() }
    }

    /// Returns the next line that contains `pattern`.
    fn wait(&mut self, pattern: &str) -> String {
        loop {
            let line = self.lines.next().unwrap_or_else(|| {
                panic!("init ended without {pattern:?} after\n{}", self.seen.join("\n"))
            });
            let line = line.unwrap();
            self.seen.push(line.clone());
            if line.contains(pattern) {
                return line;
            }
        }
    }

    /// Returns PID 1's process id outside of its namespace.
    fn pid(&self) -> u32 {
        let path = format!("/proc/{0}/task/{0}/children", self.starter.id());
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    fn wait_for_end(mut self) -> ExitStatus {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.starter.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "init is still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        // With `--kill-child` the namespace goes with it.
        self.starter.kill().ok();
        self.starter.wait().ok();
    }
}

/// Returns how many children of `parent` have ended and were not collected.
fn zombies(parent: u32) -> usize {
    let stat = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("stat")).ok();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let is_one = |stat: &String| {
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        fields.next() == Some("Z") && fields.next() == Some(&parent.to_string())
    };
    entries.filter_map(stat).filter(is_one).count()
}

fn a_crashing_agent_is_restarted_and_its_orphans_are_collected() {
    let folder = tempfile::tempdir().unwrap();
    let mut init = Init::start(folder.path(), "crashing");
    for (starts, delay_ms) in [(1, 250), (2, 500), (3, 1000), (4, 2000)] {
        let started = init.wait("event=agent-started");
        assert!(started.ends_with(&format!("starts={starts}")), "{started}");
        let began = Instant::now();
        let exited = init.wait("event=agent-exited");
        assert!(exited.ends_with(&format!("status=exit-9 restart_ms={delay_ms}")), "{exited}");
        assert!(began.elapsed() < LIMIT);
    }
    let orphans = init.seen.iter().filter(|line| line.contains("agent: left ")).count();
    assert_eq!(orphans, 4 * ORPHANS, "{}", init.seen.join("\n"));
    // The last orphans end during the delay before the next start.
    init.wait("event=agent-started");
    let pid = init.pid();
    assert!(zombies(pid) <= 1, "ended children were not collected");
}

fn a_stubborn_agent_does_not_keep_the_node_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut init = Init::start(folder.path(), "stubborn");
    init.wait("agent: staying");
    let begin = Instant::now();
    init.signal("INT");
    let said = init.wait("event=shutdown ");
    assert!(said.contains("action=reboot because=ctrl-alt-del"), "{said}");
    let killed = init.wait("event=agent-exited");
    assert!(killed.contains("status=signal-9"), "{killed}");
    assert!(begin.elapsed() >= AGENT_GRACE, "it was not asked first");
    init.wait("event=shutdown-done");
    let limit = AGENT_GRACE + AGENT_KILL + SYNC_LIMIT + Duration::from_secs(5);
    assert!(begin.elapsed() < limit, "{:?}", begin.elapsed());
    // A reboot from within a PID namespace ends its PID 1 by SIGHUP (reboot(2)).
    let status = init.wait_for_end();
    let hangup = rustix::process::Signal::HUP.as_raw();
    assert!(status.signal() == Some(hangup) || status.code() == Some(128 + hangup), "{status}");
}

fn an_agent_that_ended_before_it_could_go_on_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut init = Init::start(folder.path(), "gone");
    for (starts, delay_ms) in [(1, 250), (2, 500)] {
        let started = init.wait("event=agent-started");
        assert!(started.ends_with(&format!("starts={starts}")), "{started}");
        let exited = init.wait("event=agent-exited");
        assert!(exited.ends_with(&format!("status=exit-9 restart_ms={delay_ms}")), "{exited}");
    }
}
