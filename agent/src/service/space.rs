//! Says when a volume has hardly any room left, and when it has some again.

use std::{path::Path, time::Duration};

use crate::events::Event;

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(30);
/// Parts of a volume of which one must be free.
const PARTS: u64 = 32;

/// A volume at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    bytes: u64,
    free: u64,
}

/// What was said about a volume last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    /// It has room, or nothing.
    Room,
    /// It has hardly any.
    Scarce,
}

/// Looks after the volumes mounted at `paths`, for ever.
pub(super) async fn watch(paths: &'static [&'static str]) {
    let mut told = vec![Told::Room; paths.len()];
    loop {
        for (path, told) in paths.iter().zip(&mut told) {
            let Some(room) = look(Path::new(path)) else { continue };
            if let Some(reason) = judge(path, room, told) {
                eprintln!("{}", Event::Trouble { place: "space", reason });
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn look(path: &Path) -> Option<Room> {
    let facts = rustix::fs::statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(facts.f_frsize);
    Some(Room { bytes: bytes(facts.f_blocks), free: bytes(facts.f_bavail) })
}

/// Returns what is new about a volume.
fn judge(path: &str, room: Room, told: &mut Told) -> Option<String> {
    let Room { bytes, free } = room;
    // Twice as much ends it, so that it is not said again and again.
    let (least, enough) = (bytes / PARTS, bytes / PARTS * 2);
    let mib = |bytes: u64| bytes >> 20;
    match told {
        Told::Room if free < least => {
            *told = Told::Scarce;
            Some(format!("{path} is full: {} of {} MiB are left", mib(free), mib(bytes)))
        }
        Told::Scarce if free >= enough => {
            *told = Told::Room;
            Some(format!("{path} has room again: {} of {} MiB", mib(free), mib(bytes)))
        }
        Told::Room | Told::Scarce => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_volume_is_told_once_and_so_is_its_end() {
        let mut told = Told::Room;
        let mut judge = |free_mib: u64| {
            judge("/data", Room { bytes: 320 << 20, free: free_mib << 20 }, &mut told)
        };
        assert_eq!(judge(10), None);
        assert_eq!(judge(9), Some("/data is full: 9 of 320 MiB are left".to_owned()));
        assert_eq!((judge(0), judge(19)), (None, None));
        assert_eq!(judge(20), Some("/data has room again: 20 of 320 MiB".to_owned()));
        assert_eq!(judge(12), None);
        assert!(look(Path::new("/")).is_some_and(|room| room.bytes > room.free));
    }
}
