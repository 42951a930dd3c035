//! Where the threads of a program are that says nothing: the last words of one that is about to be killed.
//! Source: proc_pid_task(5), proc_pid_wchan(5), proc_pid_stat(5).

use std::{fs, path::Path};

/// Most threads that are told.
const MAX_THREADS: usize = 24;

/// Returns a word for each thread of the process whose folder in `/proc` this is: its name, its state, and the
/// kernel's function that it waits in, as `tokio-rt:S:futex_do_wait`. What cannot be read is a `?`.
pub(super) fn threads(process: &Path) -> String {
    let mut tasks: Vec<_> =
        fs::read_dir(process.join("task")).into_iter().flatten().flatten().collect();
    tasks.sort_by_key(|task| task.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    let more = tasks.len().saturating_sub(MAX_THREADS);
    let told = tasks.iter().take(MAX_THREADS).map(|task| thread(&task.path()));
    let mut words: Vec<String> = told.collect();
    if more > 0 {
        words.push(format!("and {more} more"));
    }
    words.join(" ")
}

fn thread(task: &Path) -> String {
    let read = |name| fs::read_to_string(task.join(name)).ok();
    let word = |text: &str| {
        let plain = text.trim().chars().filter(char::is_ascii_graphic).take(32).collect::<String>();
        Some(plain).filter(|plain| !plain.is_empty())
    };
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "?".to_owned());
    let name = or_unknown(read("comm").and_then(|comm| word(&comm)));
    // The state is behind the name, which may hold any character, in parentheses.
    let state = read("stat").and_then(|stat| word(stat.rsplit_once(") ")?.1.get(..1)?));
    let place = read("wchan").and_then(|place| word(&place)).filter(|place| place != "0");
    format!("{name}:{}:{}", or_unknown(state), or_unknown(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_is_told_with_what_it_waits_for() {
        let process = tempfile::tempdir().expect("a directory");
        let add = |id: &str, files: &[(&str, &str)]| {
            let task = process.path().join("task").join(id);
            fs::create_dir_all(&task).expect("made");
            for (name, text) in files {
                fs::write(task.join(name), text).expect("written");
            }
        };
        add("9", &[("comm", "agent\n"), ("stat", "9 (agent) D 1 9"), ("wchan", "io_schedule")]);
        add("11", &[("comm", "a b) R\n"), ("stat", "11 (a b) R) S 1 9"), ("wchan", "0")]);
        add("100", &[]);
        let told = threads(process.path());
        assert_eq!(told, "agent:D:io_schedule ab)R:S:? ?:?:?");
        for id in 200..300 {
            add(&id.to_string(), &[]);
        }
        assert!(threads(process.path()).ends_with("?:?:? and 79 more"));
        assert_eq!(threads(Path::new("/nonexistent")), "");
    }

    #[test]
    fn a_real_process_has_threads() {
        let told = threads(Path::new("/proc/self"));
        assert!(told.contains(":R:") || told.contains(":S:"), "{told}");
    }
}
