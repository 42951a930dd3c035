//! A node's look at its repository, and a program that comes from mirrors which break off, lie, or
//! cannot resume.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use jiff::Timestamp;
use update::{
    channel::{Decision, Release},
    delta::Chunks,
    shell::{Base, Checked, Checker, Fetcher, SessionError, Sink, SinkError, Source, Streamed},
};

/// How a mirror serves what is longer than a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Well,
    /// Each answer ends after so many bytes.
    Breaks(usize),
    /// The same, and every answer begins at the start.
    BreaksWithoutRange(usize),
    /// Another byte in the middle.
    Lies,
    /// More bytes than there are.
    NeverEnds,
}

/// Files up to this length are documents.
const DOCUMENT: usize = 64 << 10;

#[derive(Clone)]
struct Mirror {
    url: String,
    requests: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl Mirror {
    fn start(root: &Path, manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let mirror = Self { url, requests: Arc::default(), bytes: Arc::default() };
        let (root, serving) = (root.to_owned(), mirror.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (root, serving) = (root.clone(), serving.clone());
                std::thread::spawn(move || serving.serve(stream, &root, manner));
            }
        });
        mirror
    }

    fn serve(&self, mut stream: TcpStream, root: &Path, manner: Manner) -> Option<()> {
        let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
        loop {
            let first = lines.next()?.ok()?;
            let path = root.join(first.split(' ').nth(1)?.trim_start_matches('/'));
            let (mut from, mut to) = (0, usize::MAX);
            for line in lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()) {
                if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
                    let (first, last) = range.split_once('-')?;
                    from = first.parse().ok()?;
                    to = last.parse().map_or(usize::MAX, |last: usize| last + 1);
                }
            }
            self.requests.fetch_add(1, Ordering::SeqCst);
            let Ok(file) = fs::read(&path) else {
                stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok()?;
                continue;
            };
            let sent = self.answer(&mut stream, file, (from, to), manner)?;
            self.bytes.fetch_add(sent, Ordering::SeqCst);
        }
    }

    /// Returns the bytes that were sent; `None` when the connection ends.
    fn answer(
        &self,
        stream: &mut TcpStream,
        mut file: Vec<u8>,
        (from, to): (usize, usize),
        manner: Manner,
    ) -> Option<usize> {
        let manner = if file.len() > DOCUMENT { manner } else { Manner::Well };
        let (from, to) = if matches!(manner, Manner::BreaksWithoutRange(_)) {
            (0, usize::MAX)
        } else {
            (from, to)
        };
        if manner == Manner::Lies {
            let middle = file.len() / 2;
            file[middle] ^= 1;
        }
        if manner == Manner::NeverEnds {
            file.extend_from_slice(&vec![0; 1 << 20]);
        }
        let all = file.len();
        file.truncate(to);
        let (end, length) = (file.len() - 1, file.len());
        let range = format!("206 Partial Content\r\nContent-Range: bytes {from}-{end}/{all}");
        let head = if from == 0 && length == all { "200 OK".to_owned() } else { range };
        let head = format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\n\r\n", length - from);
        stream.write_all(head.as_bytes()).ok()?;
        match manner {
            Manner::Breaks(limit) | Manner::BreaksWithoutRange(limit) => {
                stream.write_all(&file[from..(from + limit).min(length)]).ok()?;
                None
            }
            Manner::Well | Manner::Lies | Manner::NeverEnds => {
                stream.write_all(&file[from..]).ok()?;
                Some(length - from)
            }
        }
    }
}

struct Bench {
    folder: tempfile::TempDir,
    program: Vec<u8>,
}

impl Bench {
    /// A repository with release 1.1.0 in the channel `stable`.
    fn new() -> Self {
        let program = noise(1, 900_000);
        let bench = Self { folder: tempfile::tempdir().expect("a folder"), program };
        let write = |name: &str, bytes: &[u8]| {
            fs::write(bench.path(name), bytes).expect("a file");
        };
        write("passphrase", b"p\n");
        write("uki", &bench.program);
        write("sbom", b"{}");
        let key = bench.path("key").display().to_string();
        bench.release(&["key", "new", &key]);
        let channel = format!("stable={key}");
        let keys = ["--root", &key, "--targets", &key, "--online", &key, "--channel", &channel];
        let once = ["--root-threshold", "1", "--targets-threshold", "1"];
        bench.release(&[&["init"][..], &keys, &once].concat());
        bench.publish(&key);
        bench.add("1.1.0");
        bench
    }

    /// Publishes another release of the same program.
    fn add(&self, release: &str) {
        let path = |name| self.path(name).display().to_string();
        let what = ["stage", "--channel", "stable", "--release", release];
        self.release(&[&what[..], &["--uki", &path("uki"), "--sbom", &path("sbom")]].concat());
        self.publish(&path("key"));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn release(&self, arguments: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
        command.arg("--repository").arg(self.path("repository"));
        command.arg("--passphrase-file").arg(self.path("passphrase"));
        let done = command.args(arguments).output().expect("release runs");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{arguments:?}: {said}");
    }

    fn publish(&self, key: &str) {
        self.release(&["sign", "--key", key]);
        self.release(&["publish", "--key", key]);
    }

    fn mirror(&self, manner: Manner) -> Mirror {
        Mirror::start(&self.path("repository"), manner)
    }

    fn checker(&self, mirrors: &[&Mirror]) -> Checker {
        Checker {
            store: self.path("store"),
            root: fs::read(self.path("repository/metadata/1.root.json")).expect("a root"),
            sources: mirrors.iter().map(|mirror| Source::below(&mirror.url)).collect(),
            channel: "stable".to_owned(),
            node: vec![7; 32],
            floor: None,
        }
    }
}

/// Keeps what it takes.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    restarts: usize,
}

impl Sink for Kept {
    fn take(&mut self, bytes: &[u8]) -> Result<(), SinkError> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn restart(&mut self) {
        self.bytes.clear();
        self.restarts += 1;
    }
}

fn release(text: &str) -> Release {
    text.parse().expect("a release")
}

async fn check(checker: &Checker, running: &str) -> Checked {
    let fetcher = || Fetcher::new(None);
    checker.check(&fetcher, release(running), Timestamp::now()).await.expect("a look")
}

/// Streams the offered program from the mirrors.
async fn stream(bench: &Bench, manners: &[Manner]) -> (Result<(), SessionError>, Kept) {
    let well = bench.mirror(Manner::Well);
    let mut checked = check(&bench.checker(&[&well]), "1.0.0").await;
    let target = checked.program.clone().expect("an offer").target;
    let mirrors: Vec<Mirror> = manners.iter().map(|manner| bench.mirror(*manner)).collect();
    let bases: Vec<String> = mirrors.iter().map(|m| format!("{}/targets", m.url)).collect();
    let mut kept = Kept::default();
    let streamed = checked.session.stream(&target, &bases, &mut kept).await;
    (streamed.expect("the sink takes everything"), kept)
}

#[tokio::test]
async fn an_unchanged_channel_costs_two_requests() {
    let bench = Bench::new();
    let mirror = bench.mirror(Manner::Well);
    let checker = bench.checker(&[&mirror]);
    let first = check(&checker, "1.0.0").await;
    assert_eq!(first.decision, Decision::Update(release("1.1.0")));
    drop(first);
    let count = || (mirror.requests.load(Ordering::SeqCst), mirror.bytes.load(Ordering::SeqCst));
    for running in ["1.0.0", "1.1.0"] {
        let (requests, bytes) = count();
        drop(check(&checker, running).await);
        let (after, more) = count();
        assert!(after - requests <= 2, "{} requests", after - requests);
        assert!(more - bytes <= 2048, "{} bytes", more - bytes);
    }
    assert_eq!(check(&checker, "1.1.0").await.decision, Decision::Stay);
}

/// A small file system in memory; it is unmounted at the end.
struct Small(PathBuf);

impl Small {
    /// Mounts it; `None` where only root may.
    fn mount(at: &Path) -> Option<Self> {
        fs::create_dir_all(at).expect("a folder");
        let options = ["-t", "tmpfs", "-o", "size=1m", "none"];
        let mounted = Command::new("mount").args(options).arg(at).output().ok()?;
        mounted.status.success().then(|| Self(at.to_owned()))
    }

    /// Leaves no room.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).expect("a file");
        while file.write_all(&[7; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // What stays mounted goes with its folder's file system.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// What an error says, with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or(error.to_string(), |source| format!("{error}: {}", chain(source)))
}

#[tokio::test]
async fn a_store_without_room_says_so_and_goes_on_when_there_is_some() {
    let bench = Bench::new();
    let mirror = bench.mirror(Manner::Well);
    let checker = bench.checker(&[&mirror]);
    let Some(small) = Small::mount(&checker.store) else {
        println!("skipped: a store without room: only root mounts a small file system");
        return;
    };
    drop(check(&checker, "1.0.0").await);
    bench.add("1.2.0");
    small.fill();
    let fetcher = || Fetcher::new(None);
    let looked = checker.check(&fetcher, release("1.0.0"), Timestamp::now()).await;
    let said = chain(&looked.expect_err("there is no room"));
    assert!(said.contains("No space left on device"), "{said}");
    assert!(said.contains(&checker.store.display().to_string()), "{said}");
    fs::remove_file(small.0.join("filler")).expect("removed");
    let checked = check(&checker, "1.0.0").await;
    assert_eq!(checked.decision, Decision::Update(release("1.2.0")));
    drop(checked);
}

#[tokio::test]
async fn a_node_goes_below_its_floor_for_no_channel() {
    let bench = Bench::new();
    let mirror = bench.mirror(Manner::Well);
    let checker =
        |floor: &str| Checker { floor: Some(release(floor)), ..bench.checker(&[&mirror]) };
    for (floor, running, decision, too_old) in [
        ("1.1.0", "1.0.0", Decision::Replace(release("1.1.0")), None),
        ("1.0.0", "1.0.0", Decision::Update(release("1.1.0")), None),
        ("1.2.0", "1.0.0", Decision::Stranded, Some(release("1.1.0"))),
        ("1.2.0", "1.2.0", Decision::Stay, Some(release("1.1.0"))),
    ] {
        let checked = check(&checker(floor), running).await;
        assert_eq!((checked.decision, checked.too_old), (decision, too_old), "{floor} {running}");
        assert_eq!(checked.minimum, None);
    }
}

#[tokio::test]
async fn the_next_mirror_is_asked_when_one_is_silent() {
    let bench = Bench::new();
    let gone = Mirror { url: "http://127.0.0.1:1".to_owned(), ..bench.mirror(Manner::Well) };
    let well = bench.mirror(Manner::Well);
    let checked = check(&bench.checker(&[&gone, &well]), "1.0.0").await;
    assert!(checked.program.is_some());
}

#[tokio::test]
async fn what_breaks_off_goes_on_where_it_was() {
    let bench = Bench::new();
    let (result, kept) = stream(&bench, &[Manner::Breaks(400_000)]).await;
    assert!(result.is_ok(), "{result:?}");
    assert!(kept.bytes == bench.program && kept.restarts == 0);
}

#[tokio::test]
async fn a_mirror_that_cannot_resume_gives_way_to_one_that_can() {
    let bench = Bench::new();
    let manners = [Manner::BreaksWithoutRange(400_000), Manner::Well];
    let (result, kept) = stream(&bench, &manners).await;
    assert!(result.is_ok(), "{result:?}");
    assert!(kept.bytes == bench.program && kept.restarts > 0);
}

#[tokio::test]
async fn a_mirror_that_lies_gives_way_to_one_that_does_not() {
    let bench = Bench::new();
    for liar in [Manner::Lies, Manner::NeverEnds] {
        let (result, kept) = stream(&bench, &[liar, Manner::Well]).await;
        assert!(result.is_ok(), "{result:?}");
        assert!(kept.bytes == bench.program && kept.restarts == 1);
        let (result, _) = stream(&bench, &[liar]).await;
        assert!(matches!(result, Err(SessionError::Target { .. })), "{result:?}");
    }
}

/// Bytes without a pattern.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[6]
    };
    (0..length).map(|_| next()).collect()
}

/// What a node runs that has most of the new program.
fn older(program: &[u8]) -> Vec<u8> {
    [&noise(9, 5000), &program[..500_000], &noise(10, 100_000), &program[600_000..]].concat()
}

/// Streams the offered program from mirrors over the one that runs.
async fn stream_over(
    bench: &Bench,
    manners: &[Manner],
    list: Option<Vec<u8>>,
    program: &[u8],
) -> (Result<Streamed, SessionError>, Kept) {
    let well = bench.mirror(Manner::Well);
    let mut checked = check(&bench.checker(&[&well]), "1.0.0").await;
    let offered = checked.program.clone().expect("an offer");
    let chunks = offered.chunks.expect("a list of chunks");
    let file = checked.session.get(&chunks, bench.folder.path()).await.expect("the list");
    let list = list.unwrap_or_else(|| fs::read(file).expect("the list's bytes"));
    let mirrors: Vec<Mirror> = manners.iter().map(|manner| bench.mirror(*manner)).collect();
    let bases: Vec<String> = mirrors.iter().map(|m| format!("{}/targets", m.url)).collect();
    let mut kept = Kept::default();
    let base = Base { list: &list, program };
    let target = &offered.target;
    let streamed = checked.session.stream_over(target, &bases, base, &mut kept).await;
    (streamed.expect("the sink takes everything"), kept)
}

#[tokio::test]
async fn only_what_is_new_is_fetched() {
    let bench = Bench::new();
    let old = older(&bench.program);
    let (result, kept) = stream_over(&bench, &[Manner::Well], None, &old).await;
    let fetched = result.expect("streamed").fetched;
    assert!(kept.bytes == bench.program && kept.restarts == 0);
    assert!((100_000..250_000).contains(&fetched), "{fetched}");
    let mirror = bench.mirror(Manner::Well);
    assert_eq!(mirror.bytes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn pieces_that_break_off_come_from_the_next_mirror() {
    let bench = Bench::new();
    let manners = [Manner::Breaks(30_000), Manner::Well];
    let (result, kept) = stream_over(&bench, &manners, None, &older(&bench.program)).await;
    assert!(result.expect("streamed").fetched < 250_000);
    assert!(kept.bytes == bench.program && kept.restarts == 0);
}

#[tokio::test]
async fn whatever_is_wrong_with_pieces_the_whole_is_fetched() {
    let bench = Bench::new();
    let old = older(&bench.program);
    let length = bench.program.len() as u64;
    // A list that is damaged, of another program, or of chunks that are not what they are said to be.
    let mut altered = bench.program.clone();
    altered[300_000] ^= 1;
    let cases = [
        (b"rubbish".to_vec(), old.clone()),
        (Chunks::of(&old).bytes(), old.clone()),
        (Chunks::of(&altered).bytes(), altered),
    ];
    for (list, program) in cases {
        let (result, kept) = stream_over(&bench, &[Manner::Well], Some(list), &program).await;
        assert!(result.expect("streamed").fetched >= length);
        assert!(kept.bytes == bench.program);
    }
    // A mirror without ranges, and one that lies about pieces.
    for manner in [Manner::BreaksWithoutRange(usize::MAX / 2), Manner::Lies] {
        let manners = [manner, Manner::Well];
        let (result, kept) = stream_over(&bench, &manners, None, &old).await;
        assert!(result.is_ok(), "{result:?}");
        assert!(kept.bytes == bench.program);
    }
}
