//! A start that hangs ends by itself. Before init arms the watchdogs, the kernel's own, which feeds itself
//! for only so long, restarts the server; when the node's service never lives, init does; when it lives and
//! reaches nobody, it does so itself. After a release that was on trial firmware starts the slot before,
//! which says what happened. A release that an operator holds back is not tried before the operator's word.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    time::{Duration, Instant},
};

use image::{
    Artifacts,
    cpio::{self, Entry, Kind},
};
use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, TEST_MACHINE, Uplink},
    programs::Cli,
    renamed,
    repository::Repository,
    scene::{Scene, image_folder},
};

/// From power-on to the kernel's first program, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(120);
/// The kernel's patience and what its watchdog waits then, in seconds; three minutes and one otherwise.
const PATIENCE: &str = "watchdog.open_timeout=12 softdog.soft_margin=12";

/// From one step of an update to the next, on a busy machine that emulates everything.
const STEP: Duration = Duration::from_secs(240);
/// How long a release may take until other nodes are reached, among others; the least that can be configured.
const GATE: &str = "check_s = 5\ngate_s = 30\n";
/// Time between two tries to reach a node that has just started.
const AGAIN: Duration = Duration::from_secs(1);
/// How long init waits for the service of a release on trial; twenty minutes otherwise.
const TRIAL: &str = "holdfast.trial_s=60";

/// A program that sleeps for ever: pause(), and again.
/// Source: the System V ABI, chapters 4 and 5 (ELF; one segment to load, which is the whole file).
fn sleeper() -> Vec<u8> {
    const ADDRESS: u64 = 0x40_0000;
    const HEAD: u64 = 0x78;
    const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let size = HEAD + CODE.len() as u64;
    [
        &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &[2_u16, 62].map(u16::to_le_bytes).concat(),
        &1_u32.to_le_bytes(),
        &[ADDRESS + HEAD, 0x40, 0].map(u64::to_le_bytes).concat(),
        &0_u32.to_le_bytes(),
        &[0x40_u16, 0x38, 1, 0x40, 0, 0].map(u16::to_le_bytes).concat(),
        &[1_u32, 5].map(u32::to_le_bytes).concat(),
        &[0, ADDRESS, ADDRESS, size, size, 0x1000].map(u64::to_le_bytes).concat(),
        &CODE,
    ]
    .concat()
}

#[test]
fn a_start_without_a_living_init_ends_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let image = image_folder().unwrap();
    let entry = |name: &str, mode, kind| Entry { name: name.to_owned(), mode, kind };
    let init = Kind::File(sleeper());
    let initrd = folder.path().join("initrd");
    fs::write(&initrd, cpio::write(&[entry("init", 0o755, init)]).unwrap()).unwrap();
    let words = fs::read_to_string(Artifacts::in_folder(&image).cmdline).unwrap();
    // What the release says, but for the length of the wait.
    assert!(words.contains("softdog.soft_active_on_boot=1"), "{words}");
    let options = HostOptions {
        medium: Medium::Own {
            kernel: image.join("pxe/vmlinuz"),
            initrd,
            cmdline: format!("{} {PATIENCE} loglevel=7", words.trim()),
        },
        memory_mib: 512,
        uplink: Uplink::None,
        ..HostOptions::default()
    };
    let host = Host::start(&image, folder.path(), &options).unwrap();
    let serial = &host.serial;
    serial.wait("Run /init as init process", UP).unwrap();
    let mark = serial.mark();
    serial.wait_from(mark, "Initiating system reboot", UP).unwrap();
    serial.wait_from(mark, "Run /init as init process", UP).unwrap();
}

#[test]
fn releases_that_hang_or_reach_nobody_are_left_for_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let image = image_folder().unwrap();
    let program = fs::read(image.join("holdfast.efi")).unwrap();
    let repository = Repository::start(&folder.path().join("releases")).unwrap();
    let disk = folder.path().join("disk.img");
    fs::copy(image.join("holdfast.img"), &disk).unwrap();
    let section = repository.section(&TEST_MACHINE.to_string(), GATE).unwrap();
    let options = HostOptions {
        medium: Medium::InstalledDisk(disk),
        memory_mib: 1024,
        config: Some(scene.node_config("hangs", &section)),
        ..HostOptions::default()
    };
    let (host, node) = scene.boot("hangs", options).unwrap();
    let serial = &host.serial;
    serial.wait("event=update state=\"up to date\"", STEP).unwrap();

    // Its init lives, and its service is no program.
    let silent = renamed::without(&program, "/usr/bin/agent", folder.path()).unwrap();
    let silent = renamed::with_words(&renamed::program(&silent, "0.1.1"), TRIAL).unwrap();
    repository.add("0.1.1", &silent).unwrap();
    let mark = serial.mark();
    serial.wait_from(mark, "event=update-restart release=\"0.1.1\"", STEP).unwrap();
    serial.wait_from(mark, "event=shutdown action=reboot because=trial", STEP).unwrap();
    is_left(&host, mark, ("0.1.1", SILENT));

    // Its kernel starts nothing that lives.
    let dead = renamed::with_init(&program, &sleeper()).unwrap();
    let dead = renamed::with_words(&renamed::program(&dead, "0.1.2"), PATIENCE).unwrap();
    repository.add("0.1.2", &dead).unwrap();
    let mark = serial.mark();
    serial.wait_from(mark, "event=update-restart release=\"0.1.2\"", STEP).unwrap();
    leaves_no_sign(&host, mark, "0.1.2");

    // Nothing is wrong with it; but it waits for its operator, and by then there is nobody else.
    let operator = scene.cli.with_key(&scene.operator.file);
    tell(&operator, "hold", &node);
    let mark = serial.mark();
    repository.add("0.1.3", &renamed::program(&program, "0.1.3")).unwrap();
    let held =
        "event=update state=\"held by an operator; release 0.1.3 waits for the word `resume`\"";
    serial.wait_from(mark, held, STEP).unwrap();
    assert!(!serial.text()[mark..].contains("event=update-written"), "it was fetched");
    tell(&operator, "resume", &node);
    serial.wait_from(mark, "event=update-restart release=\"0.1.3\"", STEP).unwrap();
    let Scene { gateway, .. } = scene;
    drop(gateway);
    is_left(&host, mark, ("0.1.3", "after 30 s: no other node was reached"));
    let ran = format!("event=node id={node} release=\"0.1.3\"");
    assert!(serial.text()[mark..].contains(&ran), "it never ran");
    // Each was started once, and the one without a sign of a start twice; the last one started the one before itself.
    assert_eq!(serial.text().matches("event=update-restart release=\"0.1.").count(), 4);
}

/// What is said of a release that never said anything itself.
const SILENT: &str = "it did not come up";

/// Tells the node about its updates, as soon as it is reached.
fn tell(operator: &Cli, word: &str, node: &str) {
    let deadline = Instant::now() + STEP;
    while let Err(error) = operator.text(&["node", "update", word, node]) {
        assert!(Instant::now() < deadline, "{error:#}");
        std::thread::sleep(AGAIN);
    }
}

/// The node runs what it ran before, says why, and rests.
fn is_left(host: &Host, mark: usize, (release, reason): (&str, &str)) {
    let wait = |pattern: &str| host.serial.wait_from(mark, pattern, STEP).unwrap();
    wait(&format!("event=update-judged verdict=\"release {release} failed: {reason}"));
    wait(&format!("event=update state=\"release {release} failed here and is not tried again"));
    runs_the_one_before(host);
}

/// Nobody can tell a kernel that hangs from one that firmware did not start: it is tried twice.
fn leaves_no_sign(host: &Host, mark: usize, release: &str) {
    let judged = format!("event=update-judged verdict=\"release {release} left no sign of a start");
    let again = host.serial.wait_from(mark, &judged, STEP).unwrap();
    assert!(again.contains("it is tried once more"), "{again}");
    let mark = mark + host.serial.text()[mark..].find(&again).unwrap() + again.len();
    let restart = format!("event=update-restart release=\"{release}\"");
    host.serial.wait_from(mark, &restart, STEP).unwrap();
    let left = host.serial.wait_from(mark, &judged, STEP).unwrap();
    assert!(left.contains("it is left"), "{left}");
    let rest = format!("event=update state=\"release {release} left no sign of a start, twice");
    host.serial.wait_from(mark, &rest, STEP).unwrap();
    runs_the_one_before(host);
}

fn runs_the_one_before(host: &Host) {
    let text = host.serial.text();
    let runs = text.rsplit_once("event=node id=").unwrap().1.lines().next().unwrap();
    assert!(runs.contains("release=\"0.1.0\""), "{runs}");
}
