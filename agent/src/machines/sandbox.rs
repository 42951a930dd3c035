//! What /proc says of a VMM's sandbox, as one line of facts.

use std::{fs, path::Path};

/// Returns `uid=… cap_eff=… no_new_privs=… seccomp=… root_entries=… fds=…` of a process; `?` where
/// the kernel does not tell. `cap_eff` is hexadecimal without leading zeroes.
pub fn facts(proc: &Path, pid: i32) -> String {
    let process = proc.join(pid.to_string());
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        value.and_then(|value| value.split_whitespace().next()).unwrap_or("?").to_owned()
    };
    let capabilities = field("CapEff:");
    let capabilities = match capabilities.trim_start_matches('0') {
        "" => "0",
        rest => rest,
    };
    let count = |path: &str| {
        let entries = fs::read_dir(process.join(path));
        entries.map_or("?".to_owned(), |entries| entries.count().to_string())
    };
    format!(
        "uid={} cap_eff={capabilities} no_new_privs={} seccomp={} root_entries={} fds={}",
        field("Uid:"),
        field("NoNewPrivs:"),
        field("Seccomp:"),
        count("root"),
        count("fd"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_described() {
        let proc = tempfile::tempdir().expect("a directory");
        let process = proc.path().join("42");
        fs::create_dir_all(process.join("root")).expect("made");
        fs::create_dir_all(process.join("fd/0")).expect("made");
        let status =
            "Uid:\t100001\t100001\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
        fs::write(process.join("status"), status).expect("written");
        assert_eq!(
            facts(proc.path(), 42),
            "uid=100001 cap_eff=0 no_new_privs=1 seccomp=2 root_entries=0 fds=1"
        );
        assert!(facts(proc.path(), 43).starts_with("uid=? cap_eff=?"));
    }
}
