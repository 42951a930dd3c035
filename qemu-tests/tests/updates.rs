//! A node on a disk follows its repository: a good release stays, and one that does not come up is
//! left by itself and not tried again. The first comes on a stick while no mirror answers, and only what
//! is new of it is read; the panic of the second is shown at the next start. Where there is no room for a
//! release, the node says so and goes on, and the release comes once there is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use image::disk::{gpt::ALIGNMENT, layout};

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
    // From here on it may go to the fallback path.
    recording.program("b", &[]).unwrap();
    serial.wait("event=update-judged verdict=\"release 0.1.1 passed and stays\"", STEP).unwrap();
    serial.wait("event=update state=\"up to date\"", STEP).unwrap();
    assert!(fetched(&serial.text()) < good.len() / 2, "{}", serial.text());
    assert_eq!(repository.served().0, 0);
    println!("release 0.1.1 stays after {:?}", begin.elapsed());

    // The stick stays where it is, and says nothing new.
    let mark = serial.mark();
    recording.program("fallback", &[&good]).unwrap();
    // The release took the place of the one before, which is spare; it was written once.
    assert!(serial.text().contains("event=update-promoted slot=B"), "{}", serial.tail(40));
    let (written, length) = (recording.boot_bytes().unwrap(), good.len() as u64);
    println!("{written} bytes were written for a release of {length}");
    assert!((length..length / 10 * 11).contains(&written), "{written} bytes");
    repository.answer_again();
    // Its init is no program: the kernel panics.
    let broken = renamed::with_init(&renamed::program(&program, RELEASES[1]), &[0]).unwrap();
    repository.add(RELEASES[1], &broken).unwrap();
    serial.wait_from(mark, "event=update-written slot=B", STEP).unwrap();
    serial.wait_from(mark, "Kernel panic", STEP).unwrap();
    let crash = "event=crash-kept file=\"000000.txt\" reason=\"Kernel panic - not syncing";
    serial.wait_from(mark, crash, STEP).unwrap();
    let failed = "event=update-judged verdict=\"release 0.1.2 failed: it did not come up";
    serial.wait_from(mark, failed, STEP).unwrap();
    let rest = "event=update state=\"release 0.1.2 failed here and is not tried again";
    serial.wait_from(mark, rest, STEP).unwrap();
    let text = serial.text();
    assert!(text[mark..].contains("release=\"0.1.1\""), "{text}");

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

/// Bytes of a file that somebody put on the EFI system partition: what it leaves is less than a release.
const FOREIGN: u64 = layout::ESP_BYTES - (56 << 20);

/// Has mtools do something with the EFI system partition of a disk.
fn on_partition(disk: &Path, tool: &str, words: &[&str]) {
    let volume = format!("{}@@{ALIGNMENT}", disk.display());
    let mut command = Command::new(tool);
    let done = command.env("MTOOLS_SKIP_CHECK", "1").arg("-i").arg(volume).args(words).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{tool}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Has debugfs do something with STATE of a disk.
fn on_state(disk: &Path, request: &str) {
    let at = ALIGNMENT + layout::ESP_BYTES;
    let volume = format!("{}?offset={at}", disk.display());
    let done = Command::new("debugfs").args(["-w", "-R", request]).arg(volume).output().unwrap();
    println!("debugfs {request}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn without_room_a_node_says_so_stays_as_it_is_and_goes_on_when_there_is_some() {
    let begin = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let image = image_folder().unwrap();
    let program = fs::read(image.join("holdfast.efi")).unwrap();
    let repository = Repository::start(&folder.path().join("releases")).unwrap();
    repository.add(RELEASES[0], &renamed::program(&program, RELEASES[0])).unwrap();
    let disk = folder.path().join("disk.img");
    fs::copy(image.join("holdfast.img"), &disk).unwrap();
    let foreign = folder.path().join("foreign.bin");
    File::create(&foreign).unwrap().set_len(FOREIGN).unwrap();
    on_partition(&disk, "mcopy", &[foreign.to_str().unwrap(), "::/foreign.bin"]);
    let options = HostOptions {
        medium: Medium::InstalledDisk(disk.clone()),
        memory_mib: 1024,
        config: Some(config(&repository)),
        ..HostOptions::default()
    };
    let host = Host::start(&image, folder.path(), &options).unwrap();
    let full = "reason=\"the EFI system partition is full: EFI/HOLDFAST/B.EFI takes ";
    let full = format!("event=trouble place=update {full}");
    let told = host.serial.wait(&full, STEP).unwrap();
    assert!(told.contains("remove what others have put there"), "{told}");
    host.serial.wait("event=update state=\"the EFI system partition is full", STEP).unwrap();
    assert!(!host.serial.text().contains("event=update-restart"), "{}", host.serial.tail(40));
    // Nobody tells the node.
    on_partition(&disk, "mdel", &["::/foreign.bin"]);
    let verdict = "event=update-judged verdict=\"release 0.1.1 passed and stays\"";
    host.serial.wait(verdict, STEP).unwrap();
    host.serial.wait("event=update state=\"up to date\"", STEP).unwrap();
    println!("the partition was full, and release 0.1.1 stays after {:?}", begin.elapsed());
    host.cut_power().unwrap();

    repository.add(RELEASES[1], &renamed::program(&program, RELEASES[1])).unwrap();
    let filler = folder.path().join("filler");
    fs::write(&filler, vec![7; usize::try_from(layout::STATE_BYTES).unwrap()]).unwrap();
    // Whatever the journal holds is not lost by what is written beside it.
    let volume = format!("{}?offset={}", disk.display(), ALIGNMENT + layout::ESP_BYTES);
    Command::new("e2fsck").args(["-fy", &volume]).output().unwrap();
    on_state(&disk, &format!("write {} filler", filler.display()));
    let host = Host::start(&image, folder.path(), &options).unwrap();
    host.serial.wait("event=trouble place=space reason=\"/state is full: 0 of ", STEP).unwrap();
    let told =
        "; STATE is full: the node stays on the release that runs, and goes on when there is room";
    host.serial.wait(told, STEP).unwrap();
    std::thread::sleep(Duration::from_secs(15));
    let text = host.serial.text();
    assert!(text.contains("event=agent-ready") && text.contains("release=\"0.1.1\""), "{text}");
    assert!(!text.contains("event=update-written"), "{text}");
    host.cut_power().unwrap();

    Command::new("e2fsck").args(["-fy", &volume]).output().unwrap();
    on_state(&disk, "rm filler");
    let host = Host::start(&image, folder.path(), &options).unwrap();
    let verdict = "event=update-judged verdict=\"release 0.1.2 passed and stays\"";
    host.serial.wait(verdict, STEP).unwrap();
    println!("STATE was full, and release 0.1.2 stays after {:?}", begin.elapsed());
}
