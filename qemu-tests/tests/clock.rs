//! A hardware clock that is ten years ahead: one time source puts node and hardware clock right, also after the
//! node ran by that clock before any source answered.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium},
    saboteur::Saboteur,
    scene::{self, JOIN_LIMIT, Scene},
    time::TimeServers,
};
use serde_json::json;

const AHEAD: &str = "base=2036-11-01T00:00:00";
/// How long a source may take to be asked again and believed, and the kernel to write the hardware clock.
const SOON: Duration = Duration::from_secs(120);
/// Long enough for the node to record what its clock says, which it does every five seconds.
const RECORDED: Duration = Duration::from_secs(12);
/// Between two looks.
const AGAIN: Duration = Duration::from_secs(1);
/// The year from which `struct tm` counts.
const TM_YEAR: i64 = 1900;

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// The year of the hardware clock.
fn hardware_year(host: &mut Host) -> i64 {
    let property = json!({ "path": "/machine", "property": "rtc-time" });
    host.qmp.execute("qom-get", property).unwrap()["tm_year"].as_i64().unwrap() + TM_YEAR
}

#[test]
fn a_hardware_clock_that_is_years_ahead_is_put_right_by_one_source_even_when_it_came_late() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let time = TimeServers::start().unwrap();
    let image = scene::image_folder().unwrap();
    let files = folder.path().join("late");
    let disk = folder.path().join("disk.img");
    std::fs::copy(image.join("holdfast.img"), &disk).unwrap();
    let mut arguments = Saboteur::arguments(&files);
    let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
    arguments.extend(["-drive".to_owned(), drive]);
    arguments.extend(["-device", "nvme,drive=disk,serial=HOLDFAST0"].map(str::to_owned));
    let medium: Medium = Saboteur::medium(&image, &files).unwrap();
    let config = Some(scene.node_config("late", &time.section_of_one()));
    let rtc = Some(AHEAD.to_owned());
    let options = HostOptions { medium, arguments, config, rtc, ..HostOptions::default() };

    time.go_silent();
    let mut host = Host::start(&image, &files, &options).unwrap();
    host.serial.wait("event=agent-ready", JOIN_LIMIT).unwrap();
    std::thread::sleep(RECORDED);
    let mut saboteur = Saboteur::connect(&files).unwrap();
    assert_eq!(saboteur.run("date +%Y", SOON).unwrap(), "2036\n");
    assert_eq!(hardware_year(&mut host), 2036);
    host.cut_power().unwrap();

    time.answer_again();
    let mut host = Host::start(&image, &files, &options).unwrap();
    host.serial.wait("event=agent-ready", JOIN_LIMIT).unwrap();
    let mut saboteur = Saboteur::connect(&files).unwrap();
    let deadline = Instant::now() + SOON;
    loop {
        let told: u64 = saboteur.run("date +%s", SOON).unwrap().trim().parse().unwrap();
        if told.abs_diff(now()) < 10 && hardware_year(&mut host) < 2036 {
            break;
        }
        assert!(Instant::now() < deadline, "{told}:\n{}", host.serial.tail(40));
        std::thread::sleep(AGAIN);
    }
}
