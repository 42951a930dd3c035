//! A node on a disk follows its repository: a good release stays, and one that does not come up is
//! left by itself and not tried again. The first comes on a stick while no mirror answers, and only what
//! is new of it is read; the panic of the second is shown at the next start.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, TEST_MACHINE},
    recording::Recording,
    renamed,
    repository::Repository,
    scene::image_folder,
    volume,
};

/// From one step to the next on a busy machine that emulates everything.
const STEP: Duration = Duration::from_secs(240);

/// The releases that follow the image's here.
const RELEASES: [&str; 2] = ["0.1.1", "0.1.2"];

fn config(repository: &Repository) -> String {
    let key = "01".repeat(32);
    let section = repository.section(&TEST_MACHINE.to_string(), "check_s = 5\ngate_s = 120\n");
    format!(
        "version = 1\nname = \"updates\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{}",
        section.unwrap()
    )
}

/// Puts what the repository has now on a stick; returns how QEMU plugs it in.
fn stick(folder: &Path, repository: &Repository) -> Vec<String> {
    let stick = folder.join("stick.img");
    volume::write_folder(&stick, &repository.root(), "holdfast-updates").unwrap();
    let drive = format!("if=none,id=stick,format=raw,readonly=on,file={}", stick.display());
    let plugged = ["-drive", &drive, "-device", "qemu-xhci", "-device", "usb-storage,drive=stick"];
    plugged.map(str::to_owned).to_vec()
}

/// How much of the program was not there before, as the node says.
fn fetched(text: &str) -> usize {
    let line = text.lines().find(|line| line.contains("event=update-written")).unwrap();
    line.split("fetched=").nth(1).unwrap().trim().parse().unwrap()
}

#[test]
fn a_good_release_stays_and_one_that_panics_is_left() {
    let begin = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let image = image_folder().unwrap();
    let program = fs::read(image.join("holdfast.efi")).unwrap();
    let repository = Repository::start(&folder.path().join("releases")).unwrap();
    let good = renamed::program(&program, RELEASES[0]);
    repository.add(RELEASES[0], &good).unwrap();
    repository.go_silent();
    let stick = stick(folder.path(), &repository);
    let disk = folder.path().join("disk.img");
    let blank = image.join("holdfast.img");
    fs::copy(&blank, &disk).unwrap();
    let record = folder.path().join("record");
    let mut recording = Recording::begin(&record, &disk, Some(&blank)).unwrap();
    recording.installed().unwrap();
    recording.program("fallback", &[&program, &good]).unwrap();
    recording.program("a", &[&program]).unwrap();
    let options = |disk| HostOptions {
        medium: Medium::InstalledDisk(disk),
        memory_mib: 1024,
        config: Some(config(&repository)),
        arguments: stick.clone(),
        ..HostOptions::default()
    };
    let recorded = HostOptions { recorded: Some(recording.log()), ..options(disk) };
    let host = Host::start(&image, folder.path(), &recorded).unwrap();
    let serial = &host.serial;
    // Firmware knows nothing yet and starts the fallback path.
    serial.wait(&format!("event=update-written slot=B bytes={}", good.len()), STEP).unwrap();
    recording.program("b", &[&good]).unwrap();
    recording.node(node_id(&serial.text())).unwrap();
    serial.wait("event=update-restart release=\"0.1.1\"", STEP).unwrap();
    serial.wait("event=update-judged verdict=\"release 0.1.1 passed and stays\"", STEP).unwrap();
    serial.wait("event=update state=\"up to date\"", STEP).unwrap();
    assert!(fetched(&serial.text()) < good.len() / 2, "{}", serial.text());
    assert_eq!(repository.served().0, 0);
    println!("release 0.1.1 stays after {:?}", begin.elapsed());

    // The stick stays where it is, and says nothing new.
    let mark = serial.mark();
    recording.program("fallback", &[&good]).unwrap();
    recording.program("a", &[]).unwrap();
    repository.answer_again();
    // Its init is no program: the kernel panics.
    let broken = renamed::with_init(&renamed::program(&program, RELEASES[1]), &[0]).unwrap();
    repository.add(RELEASES[1], &broken).unwrap();
    serial.wait_from(mark, "event=update-written slot=A", STEP).unwrap();
    serial.wait_from(mark, "Kernel panic", STEP).unwrap();
    let crash = "event=crash-kept file=\"000000.txt\" reason=\"Kernel panic - not syncing";
    serial.wait_from(mark, crash, STEP).unwrap();
    let failed = "event=update-judged verdict=\"release 0.1.2 failed: it did not come up";
    serial.wait_from(mark, failed, STEP).unwrap();
    let rest = "event=update state=\"release 0.1.2 failed here and is not tried again";
    serial.wait_from(mark, rest, STEP).unwrap();
    let text = serial.text();
    assert!(text[mark..].contains("release=\"0.1.1\""), "{text}");
    println!("release 0.1.2 is left after {:?}", begin.elapsed());

    goes_on_looking(&repository);
    assert_eq!(serial.text().matches("event=update-restart").count(), 2);
    drop(host);
    recording.boot(options).unwrap();
    recording.judge().unwrap();
}

/// A node asks again and again and fetches no program.
fn goes_on_looking(repository: &Repository) {
    let begin = Instant::now();
    let (before, bytes) = repository.served();
    while repository.served().0 < before + 6 {
        assert!(begin.elapsed() < STEP, "the node does not look any more");
        std::thread::sleep(Duration::from_secs(1));
    }
    let (after, more) = repository.served();
    assert!(more - bytes < (after - before) * 2048, "{} bytes", more - bytes);
}

/// Returns the node's name from its console.
fn node_id(text: &str) -> &str {
    text.rsplit_once("event=node id=").unwrap().1.split_whitespace().next().unwrap()
}
