//! A node whose STATE or DATA is locked: it says so, and waits for the recovery key, from somebody at a console
//! or from a configuration on a volume. It serves nothing meanwhile, and never writes to the disk
//! without the key.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use types::volumes::{EscrowedKey, Protection};
use update::disk::layout;

use super::{
    check,
    recovery::RecoveryKey,
    unlock,
    volume::{self, Volume},
};
use crate::{
    config, events::Event, init::partitions, install::ask, machines::init::Init, spawn::Console,
};

/// Time between two signs of life, and between two looks at the volumes.
const TICK: Duration = Duration::from_secs(2);
/// Time between two looks for consoles that came late, or failed and are back.
const CONSOLES: Duration = Duration::from_secs(10);
/// Time after which the question is put again, where nobody sees that somebody may be typing: whoever opens a
/// serial line late reads it.
const AGAIN: Duration = Duration::from_secs(300);
/// Where the volumes belong.
const PLACES: [(&str, &str); 2] = [(layout::STATE, "/state"), (layout::DATA, "/data")];

/// Returns why a volume is locked; `None` when none is.
pub fn reason(root: &Path) -> Option<String> {
    let reports = unlock::report(root);
    PLACES.into_iter().find_map(|(name, _)| {
        if volume::mapped(root, name).is_some() {
            return None;
        }
        let report = reports.iter().find(|report| report.name == name);
        match report.map(|report| &report.protection) {
            Some(Protection::Locked { reason }) => Some(format!("{name}: {reason}")),
            // No report: the program that opens volumes failed, and left its reason in the log.
            None if is_encrypted(name) => Some(format!("{name}: it was not opened; see the log")),
            Some(
                Protection::Sealed { .. }
                | Protection::Unsealed { .. }
                | Protection::Recovered { .. }
                | Protection::Plain,
            )
            | None => None,
        }
    })
}

fn is_encrypted(name: &str) -> bool {
    let device = partitions::find(name);
    device.is_some_and(|device| !matches!(Volume::open(Path::new(&device)), Ok(None)))
}

/// Waits for the recovery key, opens the volumes and ends the program: init starts it again, and it
/// finds the node as it was.
pub async fn wait(init: &Init, reason: &str) -> ! {
    if let Err(error) = init.give_console(Console::Agent) {
        let reason = crate::init::boot::chain(&error);
        eprintln!("{}", Event::Trouble { place: "screen", reason });
    }
    eprintln!("{}", Event::Locked { reason: reason.to_owned() });
    for EscrowedKey { operator, sealed } in unlock::escrowed(Path::new("/")) {
        let sealed = STANDARD.encode(sealed);
        eprintln!("{}", Event::Escrowed { operator, sealed });
    }
    let question = format!(
        "The disk of this server is encrypted and locked:\r\n{reason}.\r\nNothing on it was changed. \
         Restart the server when the reason is gone, or type the recovery key and Enter, or put \
         it\r\nas recovery_key into section [disk] of \
         holdfast.toml on a volume labelled HOLDFAST."
    );
    let (sender, mut typed) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        let root = Path::new("/");
        // Its consoles stay open: the screen would forget the half of a key.
        let mut reader = ask::Reader::default();
        reader.ask(root, &question);
        let again =
            format!("{question}\r\nWhat was typed of the key so far counts; Ctrl-U takes it back.");
        let mut asked = Instant::now();
        loop {
            let begin = Instant::now();
            if let Some(line) = reader.wait(&question, CONSOLES) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
                reader.ask(root, &question);
                asked = Instant::now();
                continue;
            }
            if asked.elapsed() >= AGAIN {
                reader.ask(root, &again);
                asked = Instant::now();
            }
            // No console, or a broken one; volumes are looked at all the same.
            std::thread::sleep(TICK.saturating_sub(begin.elapsed()));
            reader.ask_new(root, &question);
        }
    });
    let mut tried = Vec::new();
    let mut tick = tokio::time::interval(TICK);
    loop {
        let given = tokio::select! {
            Some(line) = typed.recv() => Some(line),
            _ = tick.tick() => {
                if init.alive(Vec::new()).is_err() {
                    std::process::exit(1);
                }
                let given = tokio::task::spawn_blocking(|| given(Path::new("/"))).await;
                next(&mut tried, given.unwrap_or_default())
            }
        };
        let Some(text) = given.filter(|text| !text.trim().is_empty()) else { continue };
        let opened = tokio::task::spawn_blocking(move || open(&text)).await;
        match opened {
            // Init starts the agent again.
            Ok(Ok(())) => std::process::exit(0),
            Ok(Err(reason)) => refuse(&reason),
            Err(error) => refuse(&error.to_string()),
        }
    }
}

fn refuse(reason: &str) {
    eprintln!("{}", Event::Locked { reason: format!("the recovery key was not taken: {reason}") });
    ask::show(Path::new("/"), &format!("That did not open the disk: {reason}."));
}

/// Returns the keys in the document that counts and in those on all volumes: whoever wrote to a disk of this
/// server may have put a volume before the one with the key.
fn given(root: &Path) -> Vec<String> {
    let found = std::iter::once_with(|| config::load(root)).chain(config::volumes(root));
    found.filter_map(|found| found.spec.ok()?.disk?.recovery_key).collect()
}

/// Returns the first key that was not tried since it came; those that are not given any more are forgotten.
fn next(tried: &mut Vec<String>, given: Vec<String>) -> Option<String> {
    tried.retain(|text| given.contains(text));
    let text = given.into_iter().find(|text| !text.trim().is_empty() && !tried.contains(text))?;
    tried.push(text.clone());
    Some(text)
}

/// Opens the volumes and puts them where they belong.
fn open(text: &str) -> Result<(), String> {
    let key = RecoveryKey::parse(text).map_err(|error| error.to_string())?;
    unlock::recover(Path::new("/"), &key)?;
    check::all(Path::new("/"));
    for (name, place) in PLACES.into_iter() {
        let Some(device) = volume::mapped(Path::new("/"), name) else { continue };
        // What is in memory there was made by nobody yet.
        let _ = unmount(place, UnmountFlags::DETACH);
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(&device, place, "ext4", flags, None)
            .map_err(|error| format!("{} cannot be mounted: {error}", device.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_is_given_is_tried_once() {
        let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        let mut tried = Vec::new();
        let mut next = |given: &[&str]| next(&mut tried, keys(given));
        let given = ["a renter's", " ", "a renter's", "the provider's"];
        assert_eq!(next(&given).as_deref(), Some("a renter's"));
        assert_eq!(next(&given).as_deref(), Some("the provider's"));
        assert_eq!(next(&given), None);
        // The stick is pulled, and put in again.
        assert_eq!(next(&given[..1]), None);
        assert_eq!(next(&given).as_deref(), Some("the provider's"));
    }
}
