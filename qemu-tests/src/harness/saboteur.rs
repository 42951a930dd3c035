//! Somebody inside a host who can do harm: a root shell on its second serial port, which the image that
//! we ship does not have. Kernel, initramfs and root are the image's, byte by byte; an archive beside the
//! initramfs holds Debian's busybox, which starts first, leaves a child behind, and becomes init.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use image::{
    Artifacts,
    cpio::{self, Entry, Kind},
};

use super::{guest, host::Medium, packages};

/// What is process 1 first. It has nothing mounted yet, so what it gives its child as an empty input is
/// the file that lies there.
const FIRST: &str = "/saboteur/bin/sh /saboteur/listen &\nexec /init\n";
/// What the child does.
const LISTEN: &str = "\
cd /saboteur
./bin/busybox mount -t proc none proc
./bin/busybox mount -t devtmpfs none dev
exec ./bin/busybox chroot . /bin/sh /obey
";
/// What it does then.
const OBEY: &str = "\
/bin/busybox --install -s /bin
export PATH=/bin
exec </dev/ttyS1 >/dev/ttyS1 2>&1
stty raw -echo
while read -r line; do sh -c \"$line\"; done
";
/// How long it may take to listen, from power-on.
const UP: Duration = Duration::from_secs(120);
/// Time between two tries until it does.
const AGAIN: Duration = Duration::from_secs(1);
/// Where the shell sees what the node's programs see.
const NODE: &str = "/proc/1/root";
/// How long it may take to write to what a volume has left.
const FILLED: Duration = Duration::from_secs(60);

/// A line to a shell inside a host.
pub struct Saboteur {
    line: BufReader<UnixStream>,
    asked: u32,
}

impl Saboteur {
    /// Writes the initramfs of a host with one to `folder`; returns what that host starts from.
    pub fn medium(image: &Path, folder: &Path) -> Result<Medium> {
        let artifacts = Artifacts::in_folder(image);
        let folder_of =
            |name: &str| Entry { name: name.into(), mode: 0o755, kind: Kind::Directory };
        let file = |name: &str, content: Vec<u8>| Entry {
            name: name.to_owned(),
            mode: 0o755,
            kind: Kind::File(content),
        };
        let found = guest::find(&packages::guest_root()?, "busybox").context("no busybox")?;
        let busybox = fs::read(found)?;
        let entries = [
            folder_of("dev"),
            file("dev/null", Vec::new()),
            folder_of("saboteur"),
            folder_of("saboteur/bin"),
            folder_of("saboteur/dev"),
            folder_of("saboteur/proc"),
            file("saboteur/bin/busybox", busybox.clone()),
            file("saboteur/bin/sh", busybox),
            file("saboteur/first", FIRST.into()),
            file("saboteur/listen", LISTEN.into()),
            file("saboteur/obey", OBEY.into()),
        ];
        fs::create_dir_all(folder)?;
        let initrd = folder.join("initrd");
        let mut whole = File::create(&initrd)?;
        io::copy(&mut File::open(image.join("pxe/initrd"))?, &mut whole)?;
        // Archives begin at multiples of four bytes.
        let odd = whole.metadata()?.len() % 4;
        whole.write_all(&[0; 3][..usize::try_from((4 - odd) % 4)?])?;
        whole.write_all(&cpio::write(&entries)?)?;
        let words = fs::read_to_string(artifacts.cmdline)?;
        let cmdline = format!("{} rdinit=/saboteur/bin/sh -- /saboteur/first", words.trim());
        Ok(Medium::Own { kernel: image.join("pxe/vmlinuz"), initrd, cmdline })
    }

    fn socket(folder: &Path) -> PathBuf {
        folder.join("saboteur.sock")
    }

    /// Returns QEMU's arguments for the second serial port of a host that lives in `folder`.
    pub fn arguments(folder: &Path) -> Vec<String> {
        let socket = Self::socket(folder);
        let line = format!("socket,id=saboteur,server=on,wait=off,path={}", socket.display());
        let port = "isa-serial,chardev=saboteur,index=1";
        ["-chardev", &line, "-device", port].map(str::to_owned).to_vec()
    }

    /// Speaks to the one in the host that was just started in `folder`.
    pub fn connect(folder: &Path) -> Result<Self> {
        let stream = UnixStream::connect(Self::socket(folder)).context("no second serial port")?;
        stream.set_read_timeout(Some(AGAIN))?;
        let mut saboteur = Self { line: BufReader::new(stream), asked: 0 };
        let deadline = Instant::now() + UP;
        while saboteur.run("true", AGAIN).is_err() {
            if Instant::now() > deadline {
                bail!("nobody listens at the second serial port");
            }
        }
        Ok(saboteur)
    }

    /// Takes the space of the node's volume at `path`, but for `left` bytes; all of it when that is 0.
    pub fn fill(&mut self, path: &str, left: u64) -> Result<()> {
        let free = format!("cd {NODE}{path} && set -- $(stat -f -c '%a %S' .)");
        let most = format!("fallocate -l $(($1 * $2 - {left})) filler");
        // What only root may use is written to its end, which is an error.
        let rest =
            if left == 0 { "dd if=/dev/zero of=filler.rest bs=4096 2>&1; true" } else { "true" };
        self.run(&format!("({free} && {{ {most}; {rest}; }})"), FILLED).map(drop)
    }

    /// Gives back what [`Self::fill`] took.
    pub fn clear(&mut self, path: &str) -> Result<()> {
        self.run(&format!("rm -f {NODE}{path}/filler {NODE}{path}/filler.rest"), FILLED).map(drop)
    }

    /// Has a line of shell run; returns its output, and fails when it does not end with status 0 in time.
    pub fn run(&mut self, command: &str, limit: Duration) -> Result<String> {
        self.asked += 1;
        let mark = format!("@{}@", self.asked);
        let line = format!("{{ {command}; }}; echo {mark} $?\n");
        self.line.get_mut().write_all(line.as_bytes())?;
        let deadline = Instant::now() + limit;
        let (mut output, mut read) = (String::new(), String::new());
        loop {
            match self.line.read_line(&mut read) {
                Ok(0) => bail!("the second serial port is gone"),
                Ok(_) => {
                    let said = std::mem::take(&mut read);
                    match said.trim_end().strip_prefix(&mark) {
                        Some(" 0") => return Ok(output),
                        Some(status) => bail!("{command}: status{status}: {output}"),
                        None => output.push_str(&said),
                    }
                }
                // What was read of a line so far stays in it.
                Err(_) if Instant::now() < deadline => {}
                Err(_) => bail!("{command}: no answer within {limit:?}: {output}"),
            }
        }
    }
}
