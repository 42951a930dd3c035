//! What is installed is encrypted: this server's TPM opens it, for releases of the publisher that installed
//! it and for no others; whoever takes the disk away needs the recovery key, and nothing of the node is on the disk in clear. The same TPM proves to others which
//! release the node runs, and its maker vouches for it. A recovery key that was sealed to an operator is opened by
//! that operator only, and opens the disk of a server whose TPM is gone.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use image::{
    customise::{Changes, Lost, customise},
    keys::{KeyFiles, Keys},
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    programs::Cli,
    scene::{JOIN_LIMIT, Scene, image_folder},
    tpm::{Maker, Tpm},
};
use serde_json::Value;

/// From power-on to the agent's answer, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(300);
const DISK: u64 = 2 << 30;
/// The node's name, which is in the document on STATE and nowhere else on the disk.
const NAME: &str = "a-name-nobody-else-has";

fn config(section: &str) -> String {
    let key = "01".repeat(32);
    format!(
        "version = 1\nname = \"{NAME}\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{section}"
    )
}

fn boot(folder: &Path, disk: PathBuf, config: Option<String>, tpm: Option<&Tpm>) -> Host {
    start(folder, (disk, Uplink::None), config, tpm)
}

fn start(
    folder: &Path,
    (disk, uplink): (PathBuf, Uplink),
    config: Option<String>,
    tpm: Option<&Tpm>,
) -> Host {
    let options = HostOptions {
        medium: Medium::IsoCdAndDisk(disk),
        memory_mib: 1024,
        uplink,
        config,
        arguments: tpm.map(Tpm::arguments).unwrap_or_default(),
        ..HostOptions::default()
    };
    Host::start(&folder.join("signed"), folder, &options).unwrap()
}

/// The publisher's key for what TPMs measure, made when it is used first.
fn publisher(folder: &Path) -> Keys {
    let path = folder.join("pcr.key");
    if !path.exists() {
        let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&path).arg("2048").output();
        assert!(made.unwrap().status.success());
    }
    KeyFiles { pcr_key: Some(path), ..KeyFiles::default() }.read().unwrap()
}

/// Makes a release of the built one, in a folder of its own: another document in it makes another
/// measurement. Returns what describes it.
fn release(folder: &Path, name: &str, keys: Keys) -> Value {
    fs::create_dir(folder.join(name)).unwrap();
    let changes = Changes {
        config: config("").replace(NAME, name),
        authority: Vec::new(),
        threshold: None,
        channel: None,
        keys,
        signatures: Lost::Refused,
    };
    let built = image_folder().unwrap().join("holdfast.iso");
    let described = customise(&built, &folder.join(name).join("holdfast.iso"), &changes).unwrap();
    fs::write(folder.join(name).join("measurements.json"), described.to_string()).unwrap();
    described
}

/// Starts the server, whose firmware forgot everything before the first time, with its disk from a CD with one
/// of the releases, and returns what becomes of STATE.
fn started_with(folder: &Path, name: &str, disk: &Path) -> String {
    let tpm = Tpm::start(&folder.join("tpm")).unwrap();
    let drive = format!("if=none,id=disk,format=raw,cache=unsafe,file={}", disk.display());
    let nvme = ["-drive", &drive, "-device", "nvme,drive=disk,serial=INSTALL0"].map(str::to_owned);
    let options = HostOptions {
        medium: Medium::IsoCd,
        memory_mib: 1024,
        uplink: Uplink::None,
        arguments: tpm.arguments().into_iter().chain(nvme).collect(),
        ..HostOptions::default()
    };
    let host = Host::start(&folder.join(name), &folder.join("forgetful"), &options).unwrap();
    host.serial.wait("event=volume name=holdfast-state", UP).unwrap()
}

fn last<'a>(text: &'a str, key: &str) -> &'a str {
    text.rsplit_once(key).unwrap().1.split_whitespace().next().unwrap()
}

/// Letters of a recovery key: eight groups of eight and one of four, with hyphens between.
const KEY: usize = 8 * 8 + 4 + 8;

/// Returns the recovery key, which is shown twice. A line of the kernel's may come between it and the words before,
/// and even between its letters.
fn recovery_key(text: &str) -> &str {
    let is_key = |word: &&str| {
        word.len() == KEY && word.chars().all(|letter| "cbdefghijklnrtuv-".contains(letter))
    };
    let shown = text.split("Its recovery key is").skip(1);
    let mut keys = shown.filter_map(|behind| behind.split_whitespace().find(is_key));
    keys.next().unwrap_or_else(|| panic!("no whole key in {text:?}"))
}

/// Whether a sparse file holds some bytes. Pieces that are all zeros are not searched: the file is long.
fn holds(path: &Path, wanted: &[u8]) -> bool {
    const PIECE: usize = 64 << 10;
    let zeros = vec![0; PIECE];
    let mut file = File::open(path).unwrap();
    let mut window = Vec::new();
    let mut piece = vec![0; PIECE];
    loop {
        let count = file.read(&mut piece).unwrap();
        if count == 0 {
            return false;
        }
        if piece[..count] == zeros[..count] {
            window.clear();
            continue;
        }
        window.extend_from_slice(&piece[..count]);
        let begins = |at: &usize| window[*at..].starts_with(wanted);
        let places = window.iter().enumerate().filter(|(_, byte)| **byte == wanted[0]);
        if places.map(|(at, _)| at).any(|at| begins(&at)) {
            return true;
        }
        window.drain(..window.len() - wanted.len().min(window.len()));
    }
}

/// The node that has just joined proves which release it runs, to whoever knows what that measures.
fn proves(scene: &Scene) {
    let node = scene.wait_for_node(NAME).unwrap();
    let described = scene.folder.join("../signed/measurements.json");
    let attest = |file: &Path| {
        scene.cli.json(&["node", "attest", &node, "--measurements", file.to_str().unwrap()])
    };
    let mut release: Value = serde_json::from_slice(&fs::read(&described).unwrap()).unwrap();
    let shown = attest(&described).unwrap();
    let attested = &shown["attested"];
    let version = release["release"]["version"].as_str().unwrap();
    assert!(attested["release"].as_str().unwrap().starts_with(version), "{shown}");
    assert_eq!(attested["endorsed"], true);
    assert_eq!(attested["registers"]["11"], release["tpm"]["pcr11_sha256"]);
    assert_eq!(attested["volumes"][0]["protection"]["is"], "sealed", "{shown}");
    // Firmware's log yields what the TPM signed, and says that this firmware checks no programs.
    let firmware = &attested["firmware"];
    let explained = firmware["explained"].as_array().unwrap();
    let whole =
        [0, 1, 2, 3, 4, 5, 6, 7, 11].iter().all(|one| explained.contains(&Value::from(*one)));
    assert!(whole && firmware["secure_boot"] == false, "{firmware}");
    // Another release is not this one.
    release["tpm"]["pcr11_sha256"] = "ab".repeat(32).into();
    let other = scene.folder.join("other.json");
    fs::write(&other, release.to_string()).unwrap();
    let refused = format!("{:#}", attest(&other).unwrap_err());
    assert!(refused.contains("no release that is known"), "{refused}");
}

/// The gateway's settings: it asks for this release, by TPMs that the maker vouches for.
fn asks_for(release: &Path, maker: &Maker) -> String {
    let (release, maker) = (release.join("measurements.json"), maker.authority());
    format!(
        "[attestation]\nreleases = [{release:?}]\ntpm_authorities = [{maker:?}]\nevery_s = 10\n\
         required = true\n"
    )
}

/// What the gateway found of the node, once that is so.
fn found(scene: &Scene, node: &str, accept: impl Fn(&Value) -> bool) -> Value {
    let shown =
        scene.cli.wait(&["node", "show", node], JOIN_LIMIT, |shown| accept(&shown["attestation"]));
    shown.unwrap()["attestation"].clone()
}

/// The TPM's maker vouches for it, to gateway and command, and a stranger does not.
fn is_vouched_for(scene: &mut Scene, release: &Path, [maker, stranger]: [&Maker; 2]) {
    let node = scene.wait_for_node(NAME).unwrap();
    let seen = found(scene, &node, |found| found["certificate"]["is"] == "checked");
    assert_eq!(seen["certificate"]["authority"], "CN=Emulations,O=Test", "{seen}");
    assert_eq!(seen["certificate"]["tpm"], "TEST Emulated id:00010002", "{seen}");
    let described = release.join("measurements.json");
    let attest = |maker: &Maker| {
        let authority = maker.authority();
        let files = [described.to_str().unwrap(), authority.to_str().unwrap()];
        let ask = ["node", "attest", &node, "--measurements", files[0]];
        scene.cli.json(&[&ask[..], &["--tpm-authority", files[1]]].concat())
    };
    let shown = attest(maker).unwrap();
    assert_eq!(shown["attested"]["certificate"], seen["certificate"], "{shown}");
    assert_eq!(shown["attested"]["endorsed"], true, "{shown}");
    let refused = format!("{:#}", attest(stranger).unwrap_err());
    assert!(refused.contains("CN=Emulations,O=Test, is none of the authorities"), "{refused}");
    scene.gateway.restart(&asks_for(release, stranger)).unwrap();
    let seen = found(scene, &node, |found| found["refused"].is_string());
    let reason = seen["refused"].as_str().unwrap();
    assert!(reason.contains("is none of the authorities that were named"), "{seen}");
    assert_eq!(seen["release"], Value::Null, "{seen}");
}

/// A TPM that breaks is told to whoever asks for its proof, and takes nothing from a node that runs.
fn goes_on_without_its_tpm(scene: &Scene, host: &Host, tpm: Tpm) {
    let mark = host.serial.mark();
    drop(tpm);
    let node = scene.wait_for_node(NAME).unwrap();
    let described = scene.folder.join("../signed/measurements.json");
    let ask = ["node", "attest", &node, "--measurements", described.to_str().unwrap()];
    let refused = format!("{:#}", scene.cli.json(&ask).unwrap_err());
    assert!(refused.contains("TPM"), "{refused}");
    let shown = scene.cli.json(&["nodes"]).unwrap();
    assert_eq!(shown[0]["node"], node, "{shown}");
    let since = &host.serial.text()[mark..];
    assert!(!since.contains("event=agent-exited"), "{since}");
}

/// Nor does it open without any TPM, until its owner gives the recovery key.
fn opens_without_a_tpm(folder: &Path, disk: PathBuf, [recovery, node]: [&str; 2]) {
    let right = format!("[disk]\nrecovery_key = \"{recovery}\"\n");
    let host = boot(folder, disk, Some(config(&right)), None);
    host.serial.wait("event=locked reason=", UP).unwrap();
    host.serial.wait("event=volume name=holdfast-state protection=recovered", UP).unwrap();
    host.serial.wait(&format!("event=node id={node}"), UP).unwrap();
}

#[test]
fn to_the_tpm_and_to_the_recovery_key() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, tpm_folder) = (folder.path().join("disk.img"), folder.path().join("tpm"));
    File::create(&disk).unwrap().set_len(DISK).unwrap();
    let makers = ["Emulations", "Strangers"];
    let [maker, stranger] = makers.map(|name| Maker::new(&folder.path().join(name), name).unwrap());
    maker.make(&tpm_folder).unwrap();
    let tpm = Tpm::start(&tpm_folder).unwrap();
    let section = "[install]\nconfirm = \"unattended\"\n[install.disk]\nserial = \"INSTALL0\"\n";
    let first = release(folder.path(), "signed", publisher(folder.path()));
    let signed = folder.path().join("signed");
    let settings = asks_for(&signed, &maker);
    let mut scene = Scene::start_with(&folder.path().join("scene"), &settings).unwrap();
    let document = scene.node_config(NAME, section);
    let host = start(folder.path(), (disk.clone(), Uplink::User), Some(document), Some(&tpm));
    host.serial.wait("event=installed disk=nvme0n1", UP).unwrap();
    // The same host starts again from the disk, and the TPM opens it.
    host.serial.wait("event=volume name=holdfast-state protection=sealed notice", UP).unwrap();
    host.serial.wait("event=volume name=holdfast-data protection=sealed notice", UP).unwrap();
    host.serial.wait("event=config source=", UP).unwrap();
    // What outlasts this disk is in the TPM, too.
    host.serial.wait("release=any held=tpm", UP).unwrap();
    proves(&scene);
    is_vouched_for(&mut scene, &signed, [&maker, &stranger]);
    let text = host.serial.text();
    let node = last(&text, "event=node id=").to_owned();
    let recovery = recovery_key(&text).to_owned();
    let events = text.lines().filter(|line| line.contains("event="));
    assert!(!events.into_iter().any(|line| line.contains(&recovery)), "the key is in the log");
    goes_on_without_its_tpm(&scene, &host, tpm);
    drop(host);
    assert!(!holds(&disk, NAME.as_bytes()), "the configuration is on the disk in clear");

    // The same publisher's next release opens it; one that carries no signature does not, in the same server.
    let next = release(folder.path(), "next", publisher(folder.path()));
    assert_ne!(next["tpm"]["pcr11_sha256"], first["tpm"]["pcr11_sha256"]);
    assert_eq!(next["tpm"]["key_sha256"], first["tpm"]["key_sha256"]);
    // Firmware does not know any more whose disk it is; the TPM does.
    let opened = started_with(folder.path(), "next", &disk);
    assert!(opened.contains("protection=sealed notice"), "{opened}");
    release(folder.path(), "unsigned", Keys::default());
    let locked = started_with(folder.path(), "unsigned", &disk);
    assert!(locked.contains("protection=locked"), "{locked}");
    assert!(locked.contains("carries no signature"), "{locked}");

    // Somebody puts the disk into another server, whose TPM never saw it.
    let other = Tpm::start(&folder.path().join("other-tpm")).unwrap();
    let wrong = "[disk]\nrecovery_key = \"cbdefghi\"\n";
    let host = boot(folder.path(), disk.clone(), Some(config(wrong)), Some(&other));
    host.serial.wait("event=volume name=holdfast-state protection=locked", UP).unwrap();
    let refused =
        host.serial.wait("event=locked reason=\"the recovery key was not taken", UP).unwrap();
    assert!(refused.contains("68 letters, not 8"), "{refused}");
    assert!(!host.serial.text().contains(&node), "another server is this node");
    // Somebody stands at its console and types, first something else. What opens it seals it there.
    host.serial.wait("or type the recovery key and Enter", UP).unwrap();
    let mut host = host;
    let before = host.serial.mark();
    host.type_line(&recovery.chars().rev().collect::<String>()).unwrap();
    let refused = host.serial.wait_from(before, "That did not open the disk: ", UP).unwrap();
    assert!(!refused.contains(&recovery), "{refused}");
    host.type_line(&recovery).unwrap();
    host.serial.wait("event=volume name=holdfast-state protection=recovered", UP).unwrap();
    host.serial.wait(&format!("event=node id={node}"), UP).unwrap();
    drop(host);
    drop(other);

    opens_without_a_tpm(folder.path(), disk, [&recovery, &node]);
}

#[test]
fn to_an_operator() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    File::create(&disk).unwrap().set_len(DISK).unwrap();
    let tpm = Tpm::start(&folder.path().join("tpm")).unwrap();
    release(folder.path(), "signed", publisher(folder.path()));
    let scene = Scene::start(&folder.path().join("scene")).unwrap();
    let section = format!(
        "[install]\nconfirm = \"unattended\"\nescrow = [\"{}\"]\n\
         [install.disk]\nserial = \"INSTALL0\"\n",
        scene.operator.public
    );
    let document = scene.node_config(NAME, &section);
    let host = start(folder.path(), (disk.clone(), Uplink::User), Some(document), Some(&tpm));
    host.serial.wait("event=installed disk=nvme0n1", UP).unwrap();
    host.serial.wait("event=volume name=holdfast-state protection=sealed notice", UP).unwrap();
    let node = scene.wait_for_node(NAME).unwrap();
    let text = host.serial.text();
    assert!(!text.contains("Its recovery key is"), "a console showed the recovery key");
    // The node gives the sealed key to its operator, and to nobody else.
    let operator = scene.cli.with_key(&scene.operator.file);
    let opened = operator.json(&["node", "recovery-key", &node]).unwrap();
    let recovery = opened["recovery_key"].as_str().unwrap().to_owned();
    let refused = scene.renter().json(&["node", "recovery-key", &node]).unwrap_err();
    assert!(format!("{refused:#}").contains("operator"), "{refused:#}");
    let shown = text.contains(&recovery);
    assert!(!shown, "the recovery key is on the serial line");
    drop(host);
    drop(tpm);

    // The TPM is gone with its mainboard. The locked node says what the operator needs, to open it elsewhere.
    let mut host = boot(folder.path(), disk, Some(config("")), None);
    host.serial.wait("event=volume name=holdfast-state protection=locked", UP).unwrap();
    let offered = format!("event=recovery-key operator={} sealed=", scene.operator.public);
    let sealed = host.serial.wait(&offered, UP).unwrap();
    let sealed = last(&sealed, "sealed=").to_owned();
    let open = |cli: &Cli| cli.json(&["node", "recovery-key", "--sealed", &sealed]);
    assert_eq!(open(&operator).unwrap(), opened);
    let refused = open(&scene.renter()).unwrap_err();
    assert!(format!("{refused:#}").contains("does not open"), "{refused:#}");
    host.serial.wait("or type the recovery key and Enter", UP).unwrap();
    host.type_line(&recovery).unwrap();
    host.serial.wait("event=volume name=holdfast-state protection=recovered", UP).unwrap();
    host.serial.wait(&format!("event=node id={node}"), UP).unwrap();
}
