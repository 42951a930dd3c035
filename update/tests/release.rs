//! A repository's life: made, signed by offline keys, published, read by clients, keys changed, a
//! release withdrawn.

#[path = "python/environment.rs"]
mod environment;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use jiff::Timestamp;
use update::channel::{Channel, Decision, Manifest, Release};

/// A folder with a repository, key files, and files to release.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { folder: tempfile::tempdir().expect("a folder") };
        fs::write(bench.path("passphrase"), "correct horse\n").expect("a file");
        fs::write(bench.path("holdfast.efi"), vec![7; 3_000_000]).expect("a file");
        fs::write(bench.path("sbom.json"), "{}").expect("a file");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn key(&self, name: &str) -> String {
        let path = self.path(name).display().to_string();
        if !Path::new(&path).exists() {
            self.release(&["key", "new", &path]);
        }
        path
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
        command.arg("--repository").arg(self.path("repository"));
        command.arg("--passphrase-file").arg(self.path("passphrase"));
        command.args(arguments).output().expect("release runs")
    }

    fn release(&self, arguments: &[&str]) -> String {
        let done = self.run(arguments);
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        text(&done.stdout)
    }

    /// Makes a repository with 2-of-3 root and targets and one channel, all in key files.
    fn init(&self, channel_key: &str) {
        let keys = ["a", "b", "c"].map(|name| self.key(name));
        let [a, b, c] = keys.each_ref().map(String::as_str);
        let (online, channel) = (self.key("online"), format!("stable={channel_key}"));
        let offline = ["--root", a, "--root", b, "--root", c];
        let targets = ["--targets", a, "--targets", b, "--targets", c];
        let rest = ["--online", &online, "--channel", &channel];
        self.release(&[&["init"][..], &offline, &targets, &rest].concat());
    }

    fn stage(&self, release: &str, more: &[&str]) {
        let (uki, sbom) = (self.path("holdfast.efi"), self.path("sbom.json"));
        let files =
            ["--uki", uki.to_str().expect("UTF-8"), "--sbom", sbom.to_str().expect("UTF-8")];
        let what = ["stage", "--channel", "stable", "--release", release];
        self.release(&[&what[..], &files, more].concat());
    }

    fn sign(&self, keys: &[&str]) {
        for key in keys {
            self.release(&["sign", "--key", key]);
        }
    }

    fn publish(&self) -> String {
        self.release(&["publish", "--key", &self.key("online")])
    }

    fn update(&self, arguments: &[&str]) -> Output {
        let url = |folder: &str| format!("file://{}", self.path(folder).display());
        Command::new(env!("CARGO_BIN_EXE_holdfast-update"))
            .arg("--root")
            .arg(self.path("repository/metadata/1.root.json"))
            .args(["--metadata-url", &url("repository/metadata")])
            .args(["--targets-url", &url("repository/targets")])
            .arg("--store")
            .arg(self.path("store"))
            .args(arguments)
            .output()
            .expect("holdfast-update runs")
    }

    fn get(&self, target: &str) -> Vec<u8> {
        let into = self.path("downloads");
        fs::create_dir_all(&into).expect("a folder");
        let done = self.update(&["get", "--into", into.to_str().expect("UTF-8"), target]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        fs::read(text(&done.stdout).trim_end()).expect("the target's file")
    }

    fn decide(&self, running: &str) -> Decision {
        let channel = Channel::parse(&self.get("stable/channel.json")).expect("a channel");
        channel.decide(b"node", number(running), Timestamp::now())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn number(release: &str) -> Release {
    release.parse().expect(release)
}

#[test]
fn releases_reach_clients_and_withdrawn_ones_are_left() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    assert_eq!(bench.publish(), "published root, stable, targets, timestamp\n");

    bench.stage("1.0.0", &[]);
    bench.sign(&[&channel]);
    bench.publish();
    bench.stage("1.1.0", &["--minimum", "1.0.0", "--waves", "0=1000"]);
    bench.sign(&[&channel]);
    assert_eq!(bench.publish(), "published stable, timestamp\n");

    assert_eq!(bench.decide("1.0.0"), Decision::Update(number("1.1.0")));
    assert_eq!(bench.decide("0.9.0"), Decision::Replace(number("1.1.0")));
    let manifest = Manifest::parse(&bench.get("stable/1.1.0/manifest.json")).expect("a manifest");
    let uki = &manifest.files["uki"];
    assert_eq!((uki.target.as_str(), uki.length), ("stable/1.1.0/holdfast.efi", 3_000_000));
    assert_eq!(bench.get(&uki.target), vec![7; 3_000_000]);

    bench.release(&["withdraw", "--channel", "stable", "--release", "1.1.0"]);
    bench.sign(&[&channel]);
    bench.publish();
    assert_eq!(bench.decide("1.1.0"), Decision::Replace(number("1.0.0")));
    assert_eq!(bench.update(&["get", "stable/1.1.0/holdfast.efi"]).status.code(), Some(10));
    let listed = text(&bench.update(&["list"]).stdout);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    let release = ["holdfast.efi", "manifest.json", "sbom.json", "uki-chunks"];
    let release = release.map(|name| format!("stable/1.0.0/{name}"));
    assert_eq!(names[..4], release);
    assert_eq!(names[4..], ["stable/channel.json"]);
    assert_eq!(bench.release(&["verify"]).lines().count(), 5);
}

#[test]
fn keys_change_and_too_few_signatures_publish_nothing() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.sign(&[&bench.key("a"), &channel]);
    let online = bench.key("online");
    let refused = bench.run(&["publish", "--key", &online]);
    assert!(text(&refused.stderr).contains("signed by 1 of the 2 keys"), "{refused:?}");
    assert!(!bench.path("repository/metadata/timestamp.json").exists());
    bench.sign(&[&bench.key("b")]);
    bench.publish();

    let old = text(&bench.run(&["key", "show", &bench.key("c")]).stdout);
    let old = old.lines().next().expect("an id");
    bench.release(&["rotate", "root", "--add", &bench.key("d"), "--remove", old]);
    bench.sign(&[&bench.key("a"), &bench.key("d")]);
    assert!(!bench.run(&["publish", "--key", &online]).status.success());
    bench.sign(&[&bench.key("b")]);
    assert_eq!(bench.publish(), "published root, timestamp\n");

    let old = text(&bench.run(&["key", "show", &channel]).stdout);
    let old = old.lines().next().expect("an id");
    let next = bench.key("next");
    bench.release(&["rotate", "stable", "--add", &next, "--remove", old]);
    bench.sign(&[&bench.key("a"), &bench.key("b")]);
    let refused = bench.run(&["publish", "--key", &online]);
    assert!(text(&refused.stderr).contains("clients would refuse"), "{}", text(&refused.stderr));
    bench.stage("1.0.0", &[]);
    bench.sign(&[&next]);
    assert_eq!(bench.publish(), "published stable, targets, timestamp\n");
    assert_eq!(bench.decide("0.1.0"), Decision::Update(number("1.0.0")));
}

#[test]
fn damage_in_the_repository_is_found() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.stage("1.0.0", &[]);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    bench.publish();
    let folder = bench.path("repository/targets/stable/1.0.0");
    let mut files =
        fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path());
    let uki = files.find(|path| path.to_str().is_some_and(|p| p.ends_with(".efi")));
    let mut bytes = fs::read(uki.as_ref().expect("the UKI")).expect("the UKI");
    bytes[1_000_000] ^= 1;
    fs::write(uki.expect("the UKI"), bytes).expect("the UKI");
    let found = bench.run(&["verify"]);
    assert!(text(&found.stderr).contains("holdfast.efi"), "{found:?}");
    assert_eq!(bench.update(&["get", "stable/1.0.0/holdfast.efi"]).status.code(), Some(11));
}

#[test]
fn a_publication_that_was_cut_off_is_done_again() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    bench.publish();
    bench.release(&["rotate", "timestamp", "--add", &bench.key("next")]);
    bench.stage("1.0.0", &[]);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    let before = ["staged/root.json", "staged/stable.json", "metadata/timestamp.json"];
    let before = before.map(|name| {
        let path = bench.path("repository").join(name);
        let bytes = fs::read(&path).expect("a file");
        (path, bytes)
    });
    bench.publish();
    // As if the power had gone before the timestamp was written.
    for (path, bytes) in before {
        fs::write(path, bytes).expect("a file");
    }
    assert_eq!(bench.publish(), "published root, stable, timestamp\n");
    assert_eq!(bench.decide("0.1.0"), Decision::Update(number("1.0.0")));
}

#[test]
fn a_token_signs_a_channel() {
    let library = "/usr/lib/softhsm/libsofthsm2.so";
    if !Path::new(library).exists() {
        println!("skipped: a token signs a channel: softhsm2 is not installed");
        return;
    }
    let bench = Bench::new();
    let tokens = bench.path("tokens");
    fs::create_dir(&tokens).expect("a folder");
    let config = bench.path("softhsm2.conf");
    fs::write(&config, format!("directories.tokendir = {}\n", tokens.display())).expect("a file");
    fs::write(bench.path("pin"), "1234\n").expect("a file");
    make_token_key(&config, &bench.path("key.pem"));
    let pin = bench.path("pin");
    let uri = format!(
        "pkcs11:token=holdfast;object=stable?module-path={library}&pin-source={}",
        pin.display()
    );
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
        command.env("SOFTHSM2_CONF", &config).arg("--repository").arg(bench.path("repository"));
        command.arg("--passphrase-file").arg(bench.path("passphrase")).args(arguments);
        let done = command.output().expect("release runs");
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        text(&done.stdout)
    };
    let (a, online) = (bench.key("a"), bench.key("online"));
    let (one, channel) =
        (["--root-threshold", "1", "--targets-threshold", "1"], format!("stable={uri}"));
    let keys = ["--root", &a, "--targets", &a, "--online", &online, "--channel", &channel];
    run(&[&["init"][..], &keys, &one].concat());
    run(&["sign", "--key", &a]);
    assert_eq!(run(&["sign", "--key", &uri]), "signed stable\n");
    run(&["publish", "--key", &online]);
    assert!(Channel::parse(&bench.get("stable/channel.json")).is_ok());
}

/// Makes a token with a P-256 key.
fn make_token_key(config: &Path, pem: &Path) {
    let run = |program: &str, arguments: &[&str]| {
        let done = Command::new(program).env("SOFTHSM2_CONF", config).args(arguments).output();
        let done = done.unwrap_or_else(|error| panic!("{program}: {error}"));
        assert!(done.status.success(), "{program}: {}", text(&done.stderr));
    };
    let pem = pem.to_str().expect("UTF-8");
    let pins = ["--so-pin", "1234", "--pin", "1234"];
    let token = ["--init-token", "--free", "--label", "holdfast"];
    run("softhsm2-util", &[&token[..], &pins].concat());
    let curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", pem];
    run("openssl", &[&["genpkey"][..], &curve].concat());
    let import = ["--import", pem, "--token", "holdfast", "--label", "stable", "--id", "01"];
    run("softhsm2-util", &[&import[..], &["--pin", "1234"]].concat());
}

#[test]
fn python_tuf_reads_what_the_release_tool_makes() {
    let Some(mut python) = environment::python("python-tuf's client on our repository") else {
        return;
    };
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.stage("1.0.0", &[]);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    bench.publish();
    bench.release(&["rotate", "timestamp", "--add", &bench.key("online2")]);
    bench.sign(&[&bench.key("a"), &bench.key("c")]);
    bench.publish();
    let targets = ["stable/1.0.0/holdfast.efi", "stable/channel.json", "stable/none"];
    let script = environment::script("ngclient.py");
    let done = python.arg(script).arg(bench.path("repository")).args(targets).output();
    let done = done.expect("python runs");
    let manifest = Manifest::parse(&bench.get("stable/1.0.0/manifest.json")).expect("a manifest");
    let uki = String::from(manifest.files["uki"].sha256);
    let said = text(&done.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{}", text(&done.stderr));
    assert_eq!(lines[0], format!("stable/1.0.0/holdfast.efi {uki}"));
    assert!(lines[1].starts_with("stable/channel.json "));
    assert_eq!(lines[2], "stable/none missing");
}

#[test]
fn a_reader_that_has_enough_ends_what_is_printed_without_a_word() {
    let bench = Bench::new();
    let key = bench.key("a");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
    command.args(["key", "show", &key]).stdout(writer).stderr(std::process::Stdio::piped());
    let done = command.spawn().and_then(std::process::Child::wait_with_output);
    let done = done.expect("release runs");
    assert_eq!((done.status.code(), text(&done.stderr)), (Some(141), String::new()));
}

#[test]
fn what_nodes_could_not_read_is_not_staged() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.stage("1.0.0", &[]);
    let (uki, sbom) = (bench.path("holdfast.efi"), bench.path("sbom.json"));
    let files = ["--uki", uki.to_str().expect("UTF-8"), "--sbom", sbom.to_str().expect("UTF-8")];
    let refused = |waves: &str| {
        let what = ["stage", "--channel", "stable", "--release", "1.0.1", "--waves", waves];
        let done = bench.run(&[&what[..], &files].concat());
        assert_eq!(done.status.code(), Some(1), "{waves}");
        text(&done.stderr)
    };
    for waves in ["0=2000", "0", "0=x"] {
        let told = refused(waves);
        assert!(told.contains("--waves") && told.contains("SECONDS=PERMILLE"), "{told}");
    }
    assert!(refused("10=500,0=100").contains("waves must rise"));
    // The channel is as it was: the next one is staged on it.
    bench.stage("1.0.1", &["--waves", "0=0,10=1000"]);
    bench.sign(&[&bench.key("a"), &bench.key("b"), &channel]);
    bench.publish();
}

#[test]
fn refusals_say_what_to_do_and_leave_nothing() {
    let bench = Bench::new();
    let refused = |arguments: &[&str]| {
        let done = bench.run(arguments);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
        text(&done.stderr)
    };
    for command in [&["verify"][..], &["publish"], &["rotate", "root", "--threshold", "1"]] {
        let told = refused(command);
        assert!(told.contains("holds no repository") && told.contains("--repository"), "{told}");
    }
    assert!(!bench.path("repository").exists());
    let key = bench.key("a");
    assert!(refused(&["key", "new", &key]).contains("is there already"));
    fs::write(bench.path("passphrase"), "another\n").expect("a file");
    fs::create_dir_all(bench.path("repository/staged")).expect("a folder");
    let told = refused(&["sign", "--key", &key]);
    assert!(told.contains(&key) && told.contains("the passphrase is wrong"), "{told}");
    fs::write(bench.path("passphrase"), "\n").expect("a file");
    let new = bench.path("new.key").display().to_string();
    assert!(refused(&["key", "new", &new]).contains("the passphrase is empty"));
    assert!(!Path::new(&new).exists());
}

#[test]
fn what_is_not_there_is_neither_withdrawn_nor_removed() {
    let bench = Bench::new();
    let channel = bench.key("channel");
    bench.init(&channel);
    bench.stage("1.0.0", &[]);
    let refused = |arguments: &[&str]| text(&bench.run(arguments).stderr);
    let told = refused(&["withdraw", "--channel", "stable", "--release", "2.0.0"]);
    assert!(told.contains("stable has no release 2.0.0"), "{told}");
    assert!(refused(&["rotate", "root", "--remove", "00"]).contains("root has no key 00"));
    assert!(refused(&["rotate", "root"]).contains("nothing is to change"));
    assert!(
        refused(&["rotate", "beta", "--threshold", "1"]).contains("no role or channel \"beta\"")
    );
    bench.release(&["withdraw", "--channel", "stable", "--release", "1.0.0"]);
}

#[test]
fn output_that_nobody_takes_is_told() {
    let bench = Bench::new();
    let key = bench.key("a");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
    let done = command.args(["key", "show", &key]).stdout(full).output().expect("release runs");
    assert_eq!(done.status.code(), Some(1));
    assert!(
        text(&done.stderr).contains("cannot write to standard output"),
        "{}",
        text(&done.stderr)
    );
}
