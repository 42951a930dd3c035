//! A Python environment with python-tuf, made once below the build folder from pinned packages.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

/// Returns a file of this folder.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(name)
}

/// Returns the interpreter, or says what is skipped and why.
pub(crate) fn python(what: &str) -> Option<Command> {
    match prepare() {
        Ok(interpreter) => {
            let mut command = Command::new(interpreter);
            command.env("PYTHONDONTWRITEBYTECODE", "1");
            Some(command)
        }
        Err(reason) => {
            println!("skipped: {what}: {reason}");
            None
        }
    }
}

fn prepare() -> Result<PathBuf, String> {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = cache.join("python-tuf");
    let wanted = fs::read(script("requirements.txt")).map_err(|error| error.to_string())?;
    let mark = folder.join("installed");
    let lock = File::create(cache.join("python-tuf.lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    let interpreter = folder.join("bin/python");
    if fs::read(&mark).is_ok_and(|found| found == wanted) {
        return Ok(interpreter);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let requirements = script("requirements.txt");
    let pip = ["-m", "pip", "install", "--quiet", "--only-binary=:all:", "--require-hashes", "-r"];
    run(Command::new(&interpreter).args(pip).arg(requirements))?;
    fs::write(&mark, wanted).map_err(|error| error.to_string())?;
    Ok(interpreter)
}

fn run(command: &mut Command) -> Result<(), String> {
    let done = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(format!("{command:?}: {}", said.lines().last().unwrap_or("it failed")))
}
