//! Test programs, several at a time: much of what they do is wait.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    busy, run,
    summary::{Counts, Reader},
};

/// File in the cache that holds what each test program took when it last ran.
const RECORD: &str = "test-durations";

/// How much of the processors is given out. The rest is for what starts and ends programs, and for programs that
/// take more than the last time.
const FILLED: f64 = 0.95;

/// A test program and how it is run.
pub(crate) struct Job {
    /// What it is called in the output, and from one run to the next.
    pub(crate) name: String,
    pub(crate) command: Command,
}

/// How many programs run at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtOnce {
    /// So many.
    Count(usize),
    /// As many as fill these processors by what each took of them the last time, at most `most`, and `unknown` of
    /// those that have never run.
    Filling { processors: usize, unknown: usize, most: usize },
}

impl AtOnce {
    fn most(self) -> usize {
        match self {
            Self::Count(most) | Self::Filling { most, .. } => most,
        }
    }

    /// Returns how much of the processors a program is counted for.
    fn share(self, took: Option<Took>) -> f64 {
        let Self::Filling { processors, unknown, .. } = self else { return 0.0 };
        match took {
            Some(took) => took.busy_s as f64 / took.seconds.max(1) as f64,
            None => processors as f64 * FILLED / unknown as f64,
        }
    }

    /// Whether a program with this share can start beside those that run, which have `busy` together. Alone,
    /// any can.
    fn has_room(self, running: usize, busy: f64, share: f64) -> bool {
        let Self::Filling { processors, .. } = self else { return true };
        // Thirds that were added up are a little more than their sum.
        running == 0 || busy + share <= processors as f64 * FILLED + 1e-6
    }
}

/// What a test program took when it last ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Took {
    /// From its start to its end, in seconds.
    seconds: u64,
    /// Time on a processor, of it and of all that it started and waited for, in seconds.
    busy_s: u64,
}

/// What every test program took.
#[derive(Debug, Default, PartialEq, Eq)]
struct Record(BTreeMap<String, Took>);

impl Record {
    /// Reads a file of lines that hold seconds, seconds on a processor, and a name; others say nothing.
    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let mut parts = line.splitn(3, ' ');
            let mut number = || parts.next()?.parse().ok();
            let took = Took { seconds: number()?, busy_s: number()? };
            Some((parts.next()?.to_owned(), took))
        };
        Self(text.lines().filter_map(line).collect())
    }

    fn text(&self) -> String {
        let line =
            |(name, took): (&String, &Took)| format!("{} {} {name}\n", took.seconds, took.busy_s);
        self.0.iter().map(line).collect()
    }

    /// Puts the longest first, so that none of them is left to run alone at the end. What has never
    /// run may be the longest of all.
    fn order(&self, jobs: &mut [Job]) {
        jobs.sort_by_key(|job| {
            Reverse(self.0.get(&job.name).map_or(u64::MAX, |took| took.seconds))
        });
    }
}

/// Programs that wait, and those that run.
struct Queue {
    waiting: Vec<Job>,
    running: usize,
    /// How much of the processors those that run are counted for.
    busy: f64,
    record: Record,
    counts: Counts,
}

impl Queue {
    /// Takes the first program that has room, and its share. `None` while none has.
    fn take(&mut self, at_once: AtOnce) -> Option<(Job, f64)> {
        let share = |job: &Job| at_once.share(self.record.0.get(&job.name).copied());
        let fits = |job: &Job| at_once.has_room(self.running, self.busy, share(job));
        let place = self.waiting.iter().position(fits)?;
        let share = share(&self.waiting[place]);
        self.running += 1;
        self.busy += share;
        Some((self.waiting.remove(place), share))
    }

    /// Gives up what waits still when it is too late to begin it. It runs first the next time, as what has
    /// never run.
    fn give_up(&mut self, until: Option<Instant>) {
        if until.is_none_or(|until| Instant::now() < until) {
            return;
        }
        for Job { name, .. } in self.waiting.drain(..) {
            self.record.0.remove(&name);
            let reason =
                format!("{name}: this machine is too slow to run it in the time that there is");
            println!("\nleft out: {reason}");
            self.counts.left_out.push(reason);
        }
    }

    /// Notes that a program ended.
    fn end(&mut self, name: String, share: f64, took: Took, counts: Counts) {
        self.running -= 1;
        self.busy -= share;
        self.record.0.insert(name, took);
        self.counts.add(counts);
    }
}

/// Runs test programs, several at a time, and prints the output of each when it has ended. None begins after
/// `until`. Returns what they found together.
pub(crate) fn run(mut jobs: Vec<Job>, at_once: AtOnce, until: Option<Instant>) -> Result<Counts> {
    let path = run::cache().join(RECORD);
    let record = Record::parse(&fs::read_to_string(&path).unwrap_or_default());
    record.order(&mut jobs);
    let queue = Queue { waiting: jobs, running: 0, busy: 0.0, record, counts: Counts::default() };
    let (queue, ended) = (Mutex::new(queue), Condvar::new());
    thread::scope(|scope| {
        for _ in 0..at_once.most() {
            scope.spawn(|| work(&queue, &ended, (at_once, until), &path));
        }
    });
    let Queue { record, counts, .. } = queue.into_inner().unwrap_or_else(PoisonError::into_inner);
    fs::write(&path, record.text()).with_context(|| format!("{}", path.display()))?;
    Ok(counts)
}

/// Runs one program after the other until none is left. What each took is kept in the file at `path`, also for
/// whoever runs them after this run was broken off.
fn work(
    queue: &Mutex<Queue>,
    ended: &Condvar,
    (at_once, until): (AtOnce, Option<Instant>),
    path: &Path,
) {
    let mut locked = queue.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        locked.give_up(until);
        if locked.waiting.is_empty() {
            break;
        }
        let Some((job, share)) = locked.take(at_once) else {
            locked = ended.wait(locked).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(locked);
        let name = job.name.clone();
        let (counts, took) = one(job);
        locked = queue.lock().unwrap_or_else(PoisonError::into_inner);
        locked.end(name, share, took, counts);
        // The run's end says what is wrong with the file.
        let _ = fs::write(path, locked.record.text());
        ended.notify_all();
    }
}

/// Runs one test program and returns what it found and took; one that cannot be run has failed.
fn one(Job { name, mut command }: Job) -> (Counts, Took) {
    let start = Instant::now();
    // A failed check names its place; what is wanted beyond that is what the test printed.
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    let (mut counts, busy) = match busy::output(&mut command) {
        Ok((output, busy)) => (read(&name, start, &output), busy),
        Err(error) => {
            let evidence = vec![format!("{name} cannot be run: {error}")];
            (Counts { failed: 1, evidence, ..Counts::default() }, Duration::ZERO)
        }
    };
    if counts.failed > 0 {
        counts.evidence.insert(0, format!("in {name}:"));
    }
    (counts, Took { seconds: start.elapsed().as_secs(), busy_s: busy.as_secs() })
}

/// Prints what a test program said, as far as it is worth showing, and counts.
fn read(name: &str, start: Instant, output: &Output) -> Counts {
    let mut reader = Reader::default();
    let text = String::from_utf8_lossy(&output.stdout);
    let mut shown = format!("\n{name}: {:.0} s\n", start.elapsed().as_secs_f64());
    for line in text.lines().filter(|line| reader.read(line)) {
        shown.push_str(line);
        shown.push('\n');
    }
    print!("{shown}");
    let mut counts = reader.counts;
    if !output.status.success() && counts.failed == 0 {
        counts.failed = 1;
        let errors = String::from_utf8_lossy(&output.stderr);
        counts.evidence.extend(errors.lines().map(str::to_owned));
        counts.evidence.push(output.status.to_string());
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job { name: name.to_owned(), command }
    }

    #[test]
    fn the_longest_program_starts_first() {
        let record =
            Record::parse("12 3 --test short\n9 of an earlier release\n700 9 --test long\n");
        let mut jobs = ["--test short", "--test long", "--test new"].map(|name| job(name, ""));
        record.order(&mut jobs);
        assert_eq!(jobs.map(|job| job.name), ["--test new", "--test long", "--test short"]);
        assert_eq!(Record::parse(&record.text()), record);
    }

    #[test]
    fn programs_fill_the_processors_and_what_waits_lets_others_pass() {
        let at_once = AtOnce::Filling { processors: 2, unknown: 3, most: 5 };
        let record = Record::parse("100 100 all\n90 90 much\n80 8 little\n70 7 less\n");
        let names = ["new", "all", "much", "little", "less"];
        let waiting = names.map(|name| job(name, "")).into();
        let mut queue = Queue { waiting, running: 0, busy: 0.0, record, counts: Counts::default() };
        let mut next = |ended: Option<(&str, f64)>| {
            if let Some((name, share)) = ended {
                queue.end(name.to_owned(), share, Took::default(), Counts::default());
            }
            queue.take(at_once).map(|(job, share)| (job.name, (share * 10.0).round()))
        };
        let of = |name: &str, share| Some((name.to_owned(), share));
        assert_eq!([next(None), next(None)], [of("new", 6.0), of("all", 10.0)]);
        assert_eq!(
            [next(None), next(None), next(None)],
            [of("little", 1.0), of("less", 1.0), None]
        );
        assert_eq!(next(Some(("all", 1.0))), of("much", 10.0));
        let three = [(0, 0.0), (1, 0.6), (2, 1.2), (3, 1.8)];
        let room = three.map(|(running, busy)| at_once.has_room(running, busy, 0.6));
        assert_eq!(room, [true, true, true, false]);
        assert!(at_once.has_room(0, 0.0, 9.0), "alone, any can");
    }

    #[test]
    fn every_program_runs_whatever_it_takes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("took");
        let jobs = || {
            (0..9).map(|number| {
                job(&number.to_string(), "echo 'test result: ok. 1 passed; 0 failed'")
            })
        };
        let record =
            Record::parse(&(0..9).map(|number| format!("1 9 {number}\n")).collect::<String>());
        for at_once in [AtOnce::Count(4), AtOnce::Filling { processors: 1, unknown: 1, most: 4 }] {
            let (waiting, record) = (jobs().collect(), Record(record.0.clone()));
            let queue = Queue { waiting, running: 0, busy: 0.0, record, counts: Counts::default() };
            let (queue, ended) = (Mutex::new(queue), Condvar::new());
            thread::scope(|scope| {
                for _ in 0..at_once.most() {
                    scope.spawn(|| work(&queue, &ended, (at_once, None), &path));
                }
            });
            let queue = queue.into_inner().expect("whole");
            assert_eq!(queue.counts.passed, 9);
            // The last that ended has kept what all took.
            let kept = fs::read_to_string(&path).expect("kept");
            assert_eq!(Record::parse(&kept), queue.record);
        }
    }

    #[test]
    fn what_would_begin_too_late_is_told_and_comes_first_the_next_time() {
        let waiting = vec![job("a", "exit 1"), job("b", "exit 1")];
        let record = Record::parse("700 9 a\n1 1 c\n");
        let counts = Counts::default();
        let mut queue = Queue { waiting, running: 0, busy: 0.0, record, counts };
        let now = Instant::now();
        queue.give_up(None);
        queue.give_up(Some(now + Duration::from_secs(3600)));
        assert_eq!(queue.waiting.len(), 2);
        queue.give_up(Some(now));
        assert!(queue.waiting.is_empty());
        let Counts { passed: 0, failed: 0, left_out, .. } = queue.counts else { panic!() };
        assert!(left_out.len() == 2 && left_out[0].starts_with("a: "), "{left_out:?}");
        let mut jobs = ["c", "a"].map(|name| job(name, ""));
        queue.record.order(&mut jobs);
        assert_eq!(jobs.map(|job| job.name), ["a", "c"]);
    }

    #[test]
    fn what_cannot_be_run_or_ends_without_a_summary_has_failed() {
        let one = |job| one(job).0;
        let passed = one(job("a", "echo 'test result: ok. 3 passed; 0 failed'"));
        assert_eq!((passed.passed, passed.failed), (3, 0));
        let killed = one(job("b", "echo lost >&2; kill -9 $$"));
        assert_eq!((killed.passed, killed.failed), (0, 1));
        assert!(killed.evidence.concat().contains("lost") && killed.evidence[0].contains("in b"));
        let command = Command::new("/nonexistent/program");
        assert_eq!(one(Job { name: "c".to_owned(), command }).failed, 1);
    }
}
