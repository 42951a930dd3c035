//! The recovery key's way to a person: on the consoles, and in no log, which gateways and metrics may
//! get to see. Who said the last word at a console types its last group back; where nobody is asked it
//! stays on the consoles for a while.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use types::install::Confirm;

use super::ask;
use crate::seal::recovery::RecoveryKey;

/// How long the recovery key is on the consoles before the restart takes it away, where nobody has to say
/// that it was written down: long enough to photograph it and to notice that there is something to note.
pub const SHOWN: Duration = Duration::from_secs(30);

/// How long the installation logs nothing before it shows the key and after: on a serial console a line would come
/// between its letters. The text takes 0.4 s at 9600 Bd.
const APART: Duration = Duration::from_millis(500);

/// What became of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handed {
    /// Somebody typed its last group.
    Confirmed,
    /// It is on the consoles.
    Shown,
    /// Nobody typed its last group in time, or there is no console.
    Unanswered,
}

/// Shows the key on every console below `root`, before the disk is written to. With [`Confirm::Console`]
/// waits until somebody types its last group, at most for `limit`.
pub fn hand_over(root: &Path, key: &RecoveryKey, confirm: Confirm, limit: Duration) -> Handed {
    if confirm == Confirm::Unattended {
        show_apart(root, &text(key));
        return Handed::Shown;
    }
    ask::forget_typed(root);
    let end = Instant::now() + limit;
    let mut question = format!(
        "{}\r\nType its last group, the four letters behind the last hyphen, and Enter when you have \
         it.",
        text(key)
    );
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match ask::line(root, &question, left) {
            Some(typed) if typed.trim().to_lowercase() == key.last_group() => {
                return Handed::Confirmed;
            }
            Some(_) => {
                question = format!(
                    "That is not its last group; look at what you wrote down.\r\n{}\r\nType its last \
                     group, the four letters behind the last hyphen, and Enter.",
                    text(key)
                );
            }
            None => break,
        }
    }
    Handed::Unanswered
}

/// Shows the key once more, right before the restart, and says when that is.
pub fn show_again(root: &Path, key: &RecoveryKey) {
    let when = format!("The server restarts from its disk in {} seconds.", SHOWN.as_secs());
    show_apart(root, &format!("{}\r\n{when}", text(key)));
}

fn show_apart(root: &Path, text: &str) {
    thread::sleep(APART);
    ask::show(root, text);
    thread::sleep(APART);
}

/// What a person has to write down.
fn text(key: &RecoveryKey) -> String {
    format!(
        "The disk of this server will be encrypted. Its recovery key is\r\n\r\n    {}\r\n\r\nWrite it \
         down now: it is not shown again after this installation, and without it nobody\r\nopens the \
         disk when the TPM does not (after a new mainboard, for instance).",
        key.as_str()
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::{super::ask::tests::Seat, *};

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn who_confirms_at_the_console_types_the_last_group() {
        let key = RecoveryKey::generate().unwrap();
        let last = format!(" {}\n", key.as_str().rsplit('-').next().unwrap().to_uppercase());
        let seat = Seat::new();
        seat.type_now("cccc\n");
        let typing = seat.type_at_prompts(&["\n", "none of it\n", &last]);
        let handed = hand_over(seat.root.path(), &key, Confirm::Console, PATIENCE);
        drop(seat);
        let shown = typing.join().unwrap();
        assert_eq!(handed, Handed::Confirmed);
        assert_eq!(shown.matches(key.as_str()).count(), 3, "{shown}");
        assert!(shown.contains("That is not its last group"), "{shown}");
    }

    #[test]
    fn nobody_is_waited_for_longer_than_the_limit() {
        let key = RecoveryKey::generate().unwrap();
        let waited = Duration::from_millis(50);
        let hand = |root: &Path| hand_over(root, &key, Confirm::Console, waited);
        assert_eq!(hand(Seat::new().root.path()), Handed::Unanswered);
        assert_eq!(hand(Path::new("/nonexistent")), Handed::Unanswered);
    }

    #[test]
    fn unattended_it_is_shown_at_once_and_again() {
        let key = RecoveryKey::generate().unwrap();
        let seat = Seat::new();
        let handed = hand_over(seat.root.path(), &key, Confirm::Unattended, PATIENCE);
        assert_eq!(handed, Handed::Shown);
        show_again(seat.root.path(), &key);
        let shown = seat.shown_until(" seconds.");
        assert_eq!(shown.matches(key.as_str()).count(), 2, "{shown}");
    }
}
