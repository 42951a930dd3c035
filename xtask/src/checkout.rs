//! Copies of a checkout that stay where they are, in which what does not change keeps its age. Cargo knows crates by
//! their place and by the age of their files: what it compiled there is as good for whatever has the same in it.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::run;

/// Tells a program in a copy which checkout it is of.
const ORIGIN: &str = "HOLDFAST_ORIGIN";

/// Runs this program again, and says how that ended, in a copy in the cache that all runs of CI share: there every
/// checkout is fresh, at whatever place, and would be compiled from nothing. `None` outside CI, and in the copy.
///
/// # Errors
/// When the copy cannot be made, or the program not be started.
pub(crate) fn run_in_copy() -> Result<Option<ExitCode>> {
    if env::var_os("CI").is_none() || env::var_os(ORIGIN).is_some() {
        return Ok(None);
    }
    let (root, place) = (run::root(), run::cache().join("checkout"));
    fs::create_dir_all(&place).with_context(|| format!("{}", place.display()))?;
    let _mine = wait_for(&place.with_extension("lock"))?;
    // What was compiled for earlier versions, which had no copy: many GB that nobody uses any more.
    fs::remove_dir_all(run::cache().join("target")).ok();
    copy(&root, &place)?;
    println!("this checkout is compiled and tested in {}", place.display());
    let mut again = run::cargo(&["run", "--quiet", "--package", "xtask", "--"]);
    again.args(env::args_os().skip(1)).current_dir(&place).env(ORIGIN, root);
    // What it would take for a second build of what changed is more than that build.
    again.env("CARGO_INCREMENTAL", "0");
    let status = again.status().context("cannot start cargo")?;
    Ok(Some(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// Locks the file at `path` for as long as the answer lives, after whoever has it.
fn wait_for(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("{}", path.display()))?;
    let mut outcome = flock(&file, FlockOperation::NonBlockingLockExclusive);
    if outcome == Err(Errno::WOULDBLOCK) {
        println!("another run has {}; waiting for its end", path.display());
        outcome = flock(&file, FlockOperation::LockExclusive);
    }
    outcome.with_context(|| format!("{}", path.display()))?;
    Ok(file)
}

/// Makes `place` the same as the checkout at `root` is now: its commit and history, and what is not committed. What
/// is the same already keeps its age, and what git ignores stays.
///
/// # Errors
/// With what git said, or with the file that cannot be copied.
pub(crate) fn copy(root: &Path, place: &Path) -> Result<()> {
    if !place.join(".git").exists() {
        fs::create_dir_all(place).with_context(|| format!("{}", place.display()))?;
        git(place, ["init", "--quiet", "--initial-branch", "main"])?;
    }
    let fetch = ["fetch", "--quiet", "--no-tags", "--update-shallow"].map(OsStr::new);
    git(place, fetch.into_iter().chain([root.as_os_str(), OsStr::new("HEAD")]))?;
    git(place, ["reset", "--quiet", "--hard", "FETCH_HEAD"])?;
    git(place, ["clean", "--quiet", "--force", "-d"])?;
    let mut changed = git(root, ["diff", "-z", "--name-only", "--no-renames", "HEAD"])?;
    changed += &git(root, ["ls-files", "-z", "--others", "--exclude-standard"])?;
    for path in changed.split_terminator('\0').map(PathBuf::from) {
        let (from, to) = (root.join(&path), place.join(&path));
        if !from.exists() {
            fs::remove_file(&to).ok();
            continue;
        }
        fs::create_dir_all(to.parent().context("a file in a folder")?)?;
        fs::copy(&from, &to).with_context(|| format!("{}", from.display()))?;
    }
    Ok(())
}

/// Runs git in `folder`, and returns what it says.
fn git(folder: &Path, arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> Result<String> {
    let mut command = Command::new("git");
    let output = command.arg("-C").arg(folder).args(arguments).output().context("git")?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    fn commit(root: &Path) {
        git(root, ["add", "--all"]).unwrap();
        let who = ["-c", "user.name=a", "-c", "user.email=a@localhost"];
        git(root, who.into_iter().chain(["commit", "--quiet", "--message", "a"])).unwrap();
    }

    #[test]
    fn what_is_the_same_keeps_its_age_and_the_rest_becomes_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (root, place) = (folder.path().join("from"), folder.path().join("a/copy"));
        let write = |path: &str, content: &str| {
            fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            fs::write(root.join(path), content).unwrap();
        };
        let read = |path: &str| fs::read_to_string(place.join(path)).unwrap();
        for path in ["same", "a/changed", "a/gone", "modified", "staged", "removed"] {
            write(path, path);
        }
        write(".gitignore", "/target\n");
        git(&root, ["init", "--quiet"]).unwrap();
        commit(&root);
        copy(&root, &place).unwrap();
        assert_eq!(read("a/gone"), "a/gone");

        let age = |path: &str| fs::metadata(place.join(path)).unwrap().modified().unwrap();
        let before = ["same", "a/changed", "modified"].map(age);
        fs::create_dir(place.join("target")).unwrap();
        fs::write(place.join("target/compiled"), "kept").unwrap();
        fs::write(place.join("left over"), "by another checkout").unwrap();
        fs::remove_dir_all(root.join("a")).unwrap();
        write("a/changed", "a/CHANGED");
        commit(&root);
        write("staged", "and not committed");
        git(&root, ["add", "staged"]).unwrap();
        write("modified", "and not committed");
        write("new", "and not committed");
        fs::remove_file(root.join("removed")).unwrap();
        // As a clone somewhere else, whose files are all younger.
        copy(&root, &place).unwrap();
        let after = ["same", "a/changed", "modified"].map(age);
        assert_eq!(before[0], after[0]);
        assert!(before[1] < after[1] && before[2] < after[2]);
        assert_eq!((read("a/changed"), read("modified")), ("a/CHANGED".into(), read("new")));
        assert_eq!(read("staged"), read("new"));
        assert_eq!(read("target/compiled"), "kept");
        for gone in ["a/gone", "removed", "left over"] {
            assert!(!place.join(gone).exists(), "{gone}");
        }
        let head = |folder| git(folder, ["rev-parse", "HEAD"]).unwrap();
        assert_eq!(head(&root), head(&place));

        // What was not committed is so no longer.
        fs::remove_file(root.join("new")).unwrap();
        git(&root, ["reset", "--quiet", "--hard"]).unwrap();
        copy(&root, &place).unwrap();
        assert_eq!((read("modified"), read("removed")), ("modified".into(), "removed".into()));
        assert!(!place.join("new").exists());
    }

    #[test]
    fn what_is_no_checkout_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = copy(&missing, &folder.path().join("copy")).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }

    #[test]
    fn one_run_waits_for_the_end_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = wait_for(&path).unwrap();
        let (done, ended) = mpsc::channel();
        let second = thread::spawn(move || {
            let _mine = wait_for(&path).unwrap();
            done.send(()).unwrap();
        });
        assert!(ended.recv_timeout(Duration::from_millis(50)).is_err());
        drop(first);
        ended.recv().unwrap();
        second.join().unwrap();
    }
}
