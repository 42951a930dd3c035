//! A guest that takes commands: lines of shell typed into its console.

use std::path::Path;

use anyhow::Result;

use crate::harness::guest::{self, Guest};

/// What the guest says when it takes commands.
pub const READY: &str = "bed: the guest takes commands";
/// What the guest says after each command, before its exit status.
pub const END: &str = "bed: end of command, status ";
/// Command after which the guest does not power off when somebody presses its button; see `guest/init`.
pub const DEAF: &str = "killall dd";
/// Command after which it does again.
pub const HEARS: &str =
    "(dd if=/dev/input/event0 of=/dev/null bs=24 count=1 2>/dev/null && poweroff -f) &";

/// What the guest says before the content of a seed, compressed and in base64.
pub const SEED: &str = "bed: seed ";
/// Blocks of 512 bytes of a seed: no other disk is as small.
const SEED_BLOCKS: u32 = 4096;

/// Makes a guest in `folder` of Debian's cloud kernel, busybox and perl.
pub fn make(folder: &Path) -> Result<Guest> {
    taking_commands(folder, "")
}

/// The same, which first tells what is on the disk that is meant for cloud-init.
pub fn make_telling_its_seed(folder: &Path) -> Result<Guest> {
    let tell = format!(
        "for disk in /sys/block/vd*; do [ $(cat $disk/size) = {SEED_BLOCKS} ] && \
         echo \"{SEED}$(gzip -c /dev/${{disk##*/}} | base64 | tr -d '\\n')\"; done\n"
    );
    taking_commands(folder, &tell)
}

fn taking_commands(folder: &Path, first: &str) -> Result<Guest> {
    let script = format!(
        "#!/bin/sh\nstty -echo < /dev/ttyS0\n{first}echo '{READY}'\n\
         while read -r line; do eval \"$line\"; echo \"{END}$?\"; done < /dev/ttyS0\n"
    );
    guest::make_with_perl(folder, &script)
}

/// Returns the output and the status of the command that follows the first `before` ones, when it
/// has ended.
pub(super) fn output(console: &str, before: usize) -> Option<(&str, &str)> {
    let mut rest = console.split_once(READY)?.1;
    for _ in 0..before {
        rest = rest.split_once(END)?.1;
        rest = rest.split_once('\n')?.1;
    }
    let (output, after) = rest.split_once(END)?;
    let (status, _) = after.split_once('\n')?;
    Some((output.trim_start_matches('\n'), status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_apart() {
        let console = format!("noise\n{READY}\none\n{END}0\ntwo\n{END}1\nthr");
        assert_eq!(output(&console, 0), Some(("one\n", "0")));
        assert_eq!(output(&console, 1), Some(("two\n", "1")));
        assert_eq!(output(&console, 2), None);
    }
}
