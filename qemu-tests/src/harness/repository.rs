//! A repository of releases, made with the program that publishers use, and a server for it that
//! counts what it is asked.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result, bail};

use super::programs::program;

/// A repository with one channel, `stable`, and one key for each role.
pub struct Repository {
    folder: PathBuf,
    served: Served,
}

/// What the server was asked.
#[derive(Debug, Clone, Default)]
pub struct Served {
    requests: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
    silent: Arc<AtomicBool>,
    port: u16,
}

impl Repository {
    /// Makes a repository in `folder` and serves it on the loopback interface.
    pub fn start(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("passphrase"), "a test's\n")?;
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let served = Served { port: listener.local_addr()?.port(), ..Served::default() };
        let repository = Self { folder: folder.to_owned(), served: served.clone() };
        let key = repository.key();
        repository.release(&["key", "new", &key])?;
        let channel = format!("stable={key}");
        let once = ["--root-threshold", "1", "--targets-threshold", "1"];
        let keys = ["--root", &key, "--targets", &key, "--online", &key, "--channel", &channel];
        repository.release(&[&["init"][..], &keys, &once].concat())?;
        repository.publish()?;
        let root = folder.join("repository");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if served.silent.load(Ordering::SeqCst) {
                    continue;
                }
                let (root, served) = (root.clone(), served.clone());
                std::thread::spawn(move || serve(stream, &root, &served));
            }
        });
        Ok(repository)
    }

    fn key(&self) -> String {
        self.folder.join("key").display().to_string()
    }

    fn release(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(program("release")?);
        command.arg("--repository").arg(self.folder.join("repository"));
        command.arg("--passphrase-file").arg(self.folder.join("passphrase"));
        let done = command.args(arguments).output().context("cannot start release")?;
        if !done.status.success() {
            bail!("release {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        }
        Ok(())
    }

    fn publish(&self) -> Result<()> {
        self.release(&["sign", "--key", &self.key()])?;
        self.release(&["publish", "--key", &self.key()])
    }

    /// Publishes a release.
    pub fn add(&self, release: &str, program: &[u8]) -> Result<()> {
        let (uki, sbom) = (self.folder.join("uki"), self.folder.join("sbom"));
        fs::write(&uki, program)?;
        fs::write(&sbom, "{}")?;
        let (uki, sbom) = (uki.display().to_string(), sbom.display().to_string());
        let what = ["stage", "--channel", "stable", "--release", release];
        self.release(&[&what[..], &["--uki", &uki, "--sbom", &sbom]].concat())?;
        self.publish()
    }

    /// Returns the section of a configuration that lets a node at `host` of the test machine follow
    /// this repository, with `extra` lines.
    pub fn section(&self, host: &str, extra: &str) -> Result<String> {
        let root = fs::read_to_string(self.folder.join("repository/metadata/1.root.json"))?;
        let port = self.served.port;
        Ok(format!("[updates]\nmirrors = [\"http://{host}:{port}\"]\nroot = '''{root}'''\n{extra}"))
    }

    /// Takes the server off the network: it hangs up on whoever comes.
    pub fn go_silent(&self) {
        self.served.silent.store(true, Ordering::SeqCst);
    }

    /// Brings the server back.
    pub fn answer_again(&self) {
        self.served.silent.store(false, Ordering::SeqCst);
    }

    /// Returns the folder that mirrors serve, and that sticks carry.
    pub fn root(&self) -> PathBuf {
        self.folder.join("repository")
    }

    /// Returns how many requests the server has had, and how many bytes of files it has sent.
    pub fn served(&self) -> (u64, u64) {
        let Served { requests, bytes, .. } = &self.served;
        (requests.load(Ordering::SeqCst), bytes.load(Ordering::SeqCst))
    }
}

/// Answers the requests of one connection.
fn serve(stream: TcpStream, root: &Path, served: &Served) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
        let path = line.split(' ').nth(1)?.trim_start_matches('/').to_owned();
        let (mut from, mut to) = (0, u64::MAX);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok().filter(|length| *length > 0)?;
            let header = header.trim_end().to_ascii_lowercase();
            if let Some(range) = header.strip_prefix("range: bytes=") {
                let (first, last) = range.split_once('-')?;
                from = first.parse().ok()?;
                to = last.parse().map_or(u64::MAX, |last: u64| last + 1);
            }
            if header.is_empty() {
                break;
            }
        }
        served.requests.fetch_add(1, Ordering::SeqCst);
        answer(&mut stream, &root.join(path), (from, to), served)?;
    }
}

fn answer(
    stream: &mut TcpStream,
    path: &Path,
    (from, to): (u64, u64),
    served: &Served,
) -> Option<()> {
    let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    let Some(mut file) = fs::File::open(path).ok().filter(|_| plain && path.is_file()) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok();
    };
    let length = file.metadata().ok()?.len();
    let end = to.min(length);
    let left = end.saturating_sub(from);
    file.seek(SeekFrom::Start(from)).ok()?;
    let head = match (from, left) {
        (0, left) if left == length => "HTTP/1.1 200 OK\r\n".to_owned(),
        _ => format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{length}\r\n",
            end.saturating_sub(1)
        ),
    };
    stream.write_all(format!("{head}Content-Length: {left}\r\n\r\n").as_bytes()).ok()?;
    served.bytes.fetch_add(left, Ordering::SeqCst);
    std::io::copy(&mut file.take(left), stream).ok()?;
    Some(())
}
