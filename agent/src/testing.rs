//! What unit tests of several modules share.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    thread,
    time::Duration,
};

/// Makes a folder with these files, as a stand-in for the root of a server.
pub(crate) fn root(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, bytes) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, bytes).expect("written");
    }
    root
}

/// Returns a record of the kernel's log as `/dev/kmsg` hands it out: `head`, a semicolon, and what was
/// written, escaped as the kernel does (kernel/printk/printk.c, `msg_add_ext_text`).
pub(crate) fn kmsg(head: &str, written: &str) -> Vec<u8> {
    let mut record = format!("{head};");
    for byte in written.bytes() {
        match byte {
            b'\\' => record.push_str("\\x5c"),
            b' '..=b'~' => record.push(char::from(byte)),
            _ => record.push_str(&format!("\\x{byte:02x}")),
        }
    }
    record.push('\n');
    record.into_bytes()
}

/// Numbers that a seed decides: splitmix64, by Sebastiano Vigna, in the public domain.
pub(crate) struct Random(u64);

impl Random {
    /// Begins with the seed that this variable of the environment holds, or with one that is made up, and
    /// prints it.
    pub(crate) fn start(variable: &str) -> Self {
        let seed = setting(variable).unwrap_or_else(|| {
            let mut seed = [0; 8];
            getrandom::fill(&mut seed).expect("random numbers");
            u64::from_le_bytes(seed)
        });
        println!("{variable}={seed}");
        Self(seed)
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).expect("it is below a usize")
    }
}

/// Returns what a variable of the environment says, if it is there and says something of this kind.
pub(crate) fn setting<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

/// How often, and after which pause, a file system in use is unmounted again.
const BUSY_ATTEMPTS: u32 = 50;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// A file system that is unmounted in the end.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    /// Has the kernel mount the ext4 that a file holds; `None` where it is not to be had.
    pub(crate) fn ext4(volume: &Path, at: &Path) -> Option<Self> {
        Self::new(&["-t", "ext4", "-o", "loop"], volume, at)
    }

    /// Mounts memory of `mib`; `None` where that is not to be had.
    pub(crate) fn memory(mib: u32, at: &Path) -> Option<Self> {
        Self::new(&["-t", "tmpfs", "-o", &format!("size={mib}m")], Path::new("none"), at)
    }

    /// Leaves no room. Returns the file that takes it.
    pub(crate) fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).expect("made");
        while file.write_all(&[7; 4096]).is_ok() {}
        path
    }

    fn new(words: &[&str], what: &Path, at: &Path) -> Option<Self> {
        fs::create_dir_all(at).expect("made");
        let mounted = Command::new("mount").args(words).arg(what).arg(at).output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What another test starts has this one's open files until its own program begins.
        let is_gone = || {
            let unmounted = Command::new("umount").arg(&self.0).status();
            unmounted.is_ok_and(|status| status.success())
        };
        for _ in 0..BUSY_ATTEMPTS {
            if is_gone() {
                return;
            }
            thread::sleep(BUSY_PAUSE);
        }
        // What stays mounted shows when its folder cannot be removed.
    }
}
