//! A node of which parts fail: its service and a machine's process are killed or hang, its network card and
//! its disk are pulled out, its disk is full or fails for a while, its clock is ten years off, its memory runs
//! out. Machines that need nothing of what failed go on, leases end when they end, and the node says what
//! happened.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use qemu_tests::harness::{
    host::{Host, HostOptions, USER_NETWORK, Uplink},
    saboteur::Saboteur,
    scene::{self, GUEST_LIMIT, JOIN_LIMIT, LeaseRequest, PushedGuest, Scene},
    time::TimeServers,
};
use serde_json::{Value, json};

/// How long the node may take to notice something, and to answer.
const SOON: Duration = Duration::from_secs(90);
/// How long the kernel may take to let go of a part that leaves, after which its slot has no power.
const UNPLUGGED: Duration = Duration::from_secs(60);
/// Time between two tries to reach a machine.
const AGAIN: Duration = Duration::from_secs(1);
/// Long enough for a machine's process to start on a slow server.
const SHORT_LEASE_S: u64 = 60;
/// The same for a process that is found to be silent, too.
const HUNG_LEASE_S: u64 = SHORT_LEASE_S + 15;
/// How long before a lease's end the service stops saying anything: less than init waits for it.
const HUNG_BEFORE_S: u64 = 30;
/// How late init may end what the service did not, and a little for this program.
const LATE_S: u64 = 25;
/// Bytes that are left of a volume on which content finds no room any more.
const TOO_LITTLE: u64 = 32 << 20;
/// What the hardware clock says: ten years ahead, and behind.
const AHEAD: &str = "base=2036-11-01T00:00:00";
const BEHIND: &str = "base=2016-11-01T00:00:00";
/// Memory of a server that has hardly room for the node, in MiB.
const SMALL_MIB: u32 = 512;

/// What the disk's data lies on: a file, and the same where every read and write fails.
const WORKS: &str = "works";
const FAILS: &str = "fails";

/// The disk, on one of them.
fn on(file: &str) -> Value {
    json!({ "driver": "raw", "node-name": "disk", "file": file })
}

/// The card that is the node's uplink.
const CARD: &str = "virtio-net-pci,id=card,netdev=net0,bus=cardport,romfile=";

/// QEMU's arguments for a disk that can fail and a network card, both of which can be pulled out, as servers'
/// slots allow.
fn pluggable(disk: &Path) -> Vec<String> {
    let file = json!({
        "driver": "file", "node-name": WORKS, "filename": disk, "cache": { "no-flush": true },
    });
    // From the beginning on, each read and write ends in EIO. QEMU flushes a disk before it gets another file.
    let fails = ["read", "write"].map(|kind| json!({ "event": "none", "iotype": kind }));
    let failing = json!({
        "driver": "blkdebug", "node-name": FAILS, "image": WORKS, "inject-error": fails,
    });
    let (file, failing, disk) = (file.to_string(), failing.to_string(), on(WORKS).to_string());
    let network = format!("user,id=net0,net={USER_NETWORK}");
    let words = [
        // Slots are the kernel's own affair, not ACPI's.
        ["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"],
        ["-blockdev", &file],
        ["-blockdev", &failing],
        ["-blockdev", &disk],
        ["-device", "pcie-root-port,id=diskport,chassis=20,slot=20"],
        ["-device", "nvme,id=disk0,drive=disk,serial=HOLDFAST0,bus=diskport"],
        ["-netdev", &network],
        ["-device", "pcie-root-port,id=cardport,chassis=21,slot=21"],
        ["-device", CARD],
    ];
    words.concat().into_iter().map(str::to_owned).collect()
}

/// Presses the button of a part's slot, and waits until the part is gone.
fn pull_out(host: &mut Host, part: &str) {
    let deadline = Instant::now() + UNPLUGGED;
    host.qmp.execute("device_del", json!({ "id": part })).unwrap();
    let path = json!({ "path": "/machine/peripheral" });
    let there =
        |listed: &Value| listed.as_array().unwrap().iter().any(|property| property["name"] == part);
    while there(&host.qmp.execute("qom-list", path.clone()).unwrap()) {
        assert!(Instant::now() < deadline, "{part} does not leave:\n{}", host.serial.tail(40));
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn put_back_the_card(host: &mut Host) {
    let part: serde_json::Map<String, Value> = CARD
        .split(',')
        .map(|word| word.split_once('=').unwrap_or(("driver", word)))
        .map(|(key, value)| (key.to_owned(), value.into()))
        .collect();
    host.qmp.execute("device_add", part.into()).unwrap();
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A node with a machine that needs neither disk nor network.
struct Faulty {
    scene: Scene,
    node: String,
    guest: PushedGuest,
    /// The machine, which runs as long as the test does, and the start of its lease.
    machine: String,
    start: u64,
}

impl Faulty {
    /// Makes a lease and its machine; returns its id when its process was started.
    fn create(&self, host: &Host, request: &LeaseRequest<'_>) -> String {
        let (lease, id) = self.scene.lease(request).unwrap();
        self.scene.create(&lease, &self.guest).unwrap();
        let started = format!("event=machine-started machine={id}");
        host.serial.wait(&started, GUEST_LIMIT).unwrap();
        id
    }

    /// Renews the machine's lease; an error is the node's refusal.
    fn renew(&self, serial: u64) -> anyhow::Result<Value> {
        let request = LeaseRequest {
            name: "renewed",
            node: &self.node,
            id: Some(&self.machine),
            start: Some(self.start),
            seconds: 7200 + serial,
            serial,
            disk_mib: 16,
            ..LeaseRequest::default()
        };
        let (lease, _) = self.scene.lease(&request)?;
        let lease = lease.to_str().unwrap();
        self.scene.renter().json(&["machines", "renew", &self.machine, "--lease", lease])
    }

    /// The device that is free to rent.
    fn device(&self) -> String {
        let free = |nodes: &Value| scene::free_device(nodes, &self.node).is_some();
        let nodes = self.scene.cli.wait(&["nodes"], SOON, free).unwrap();
        scene::free_device(&nodes, &self.node).unwrap()
    }

    /// The guest is the one that ran before, and answers.
    fn still_runs(&self) {
        let deadline = Instant::now() + JOIN_LIMIT;
        loop {
            match self.scene.ssh(&self.machine, "test -e /run/before") {
                Ok(_) => return,
                Err(error) if Instant::now() > deadline => panic!("{error:#}"),
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
    }
}

/// The process that ran a machine.
fn process_of(host: &Host, machine: &str) -> String {
    let started = format!("event=machine-started machine={machine} pid=");
    let line = host.serial.wait(&started, SOON).unwrap();
    line.split(&started).nth(1).unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
fn parts_of_a_node_fail_and_its_machines_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let scene = Scene::start(folder.path()).unwrap();
    let time = TimeServers::start().unwrap();
    let image = scene::image_folder().unwrap();
    let disk = folder.path().join("disk.img");
    std::fs::copy(image.join("holdfast.img"), &disk).unwrap();
    let files = folder.path().join("faulty");
    let rented = folder.path().join("rented");
    let medium = Saboteur::medium(&image, &files).unwrap();
    let mut options = scene::with_rented_nvme(&rented, medium, "x").unwrap();
    options.arguments.extend(pluggable(&disk));
    options.arguments.extend(Saboteur::arguments(&files));
    options.uplink = Uplink::None;
    // One CPU carries them all here.
    let sections = format!("{}\n[machines]\nvcpus = 4\n", time.section());
    options.config = Some(scene.node_config("faulty", &sections));
    let (mut host, node) = scene.boot("faulty", options.clone()).unwrap();
    let mut saboteur = Saboteur::connect(&files).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let mut faulty = Faulty { scene, node, guest, machine: String::new(), start: now() };
    let request = LeaseRequest {
        node: &faulty.node,
        disk_mib: 16,
        start: Some(faulty.start),
        ..LeaseRequest::default()
    };
    let machine = faulty.create(&host, &request);
    faulty.scene.wait_for_console(&machine, "guest: ready", GUEST_LIMIT).unwrap();
    faulty.scene.ssh(&machine, "touch /run/before").unwrap();
    faulty.machine = machine;
    println!("a machine runs after {:?}", begin.elapsed());

    the_service_is_killed(&faulty, &host, &mut saboteur);
    println!("the service was killed after {:?}", begin.elapsed());
    a_machines_process_hangs_and_so_does_the_service(&faulty, &host, &mut saboteur);
    println!("the service hung after {:?}", begin.elapsed());
    the_memory_of_the_node_is_full(&faulty, &mut saboteur);
    println!("STATE was full after {:?}", begin.elapsed());
    what_the_disk_altered_is_fetched_anew(&faulty, &host, &mut saboteur);
    an_image_that_the_disk_altered_is_fetched_anew(&faulty, &host, &mut saboteur);
    a_machines_process_is_killed(&faulty, &host, &mut saboteur);
    println!("a machine's process was killed after {:?}", begin.elapsed());
    the_card_leaves_and_returns(&faulty, &mut host, &mut saboteur);
    println!("the card was away after {:?}", begin.elapsed());
    the_disk_leaves(&faulty, &mut host, &mut saboteur);
    println!("the disk was away after {:?}", begin.elapsed());
    drop(saboteur);
    host.cut_power().unwrap();
    let serial = the_clock_is_years_ahead(&faulty, &options, &time);
    println!("the clock was ahead after {:?}", begin.elapsed());
    the_clock_is_years_behind(&faulty, &options, (&time, serial));
    println!("the clock was behind after {:?}", begin.elapsed());
}

fn the_service_is_killed(faulty: &Faulty, host: &Host, saboteur: &mut Saboteur) {
    let mark = host.serial.mark();
    saboteur.run("kill -9 $(pidof agent)", SOON).unwrap();
    host.serial.wait_from(mark, "event=agent-exited status=signal-9", SOON).unwrap();
    let adopted = format!("event=machine-adopted machine={}", faulty.machine);
    host.serial.wait_from(mark, &adopted, SOON).unwrap();
    faulty.still_runs();
}

/// A process that answers nothing is told of. A service that says nothing is ended and started again, and a
/// lease that ends meanwhile ends all the same.
fn a_machines_process_hangs_and_so_does_the_service(
    faulty: &Faulty,
    host: &Host,
    saboteur: &mut Saboteur,
) {
    let start = now();
    let end = start + HUNG_LEASE_S;
    let request = LeaseRequest {
        name: "hung",
        node: &faulty.node,
        start: Some(start),
        seconds: HUNG_LEASE_S,
        ..LeaseRequest::default()
    };
    let mark = host.serial.mark();
    let machine = faulty.create(host, &request);
    let process = process_of(host, &machine);
    saboteur.run(&format!("kill -STOP {process}"), SOON).unwrap();
    let silent = format!("event=machine-silent machine={machine} silent_s=");
    host.serial.wait_from(mark, &silent, SOON).unwrap();
    let renter = faulty.scene.renter();
    let told = |shown: &Value| shown["detail"].as_str().unwrap().contains("answers nothing");
    renter.wait(&["machines", "show", &machine], SOON, told).unwrap();
    let refused = format!("{:#}", renter.text(&["machines", "restart", &machine]).unwrap_err());
    assert!(refused.contains("stop the machine, which ends it by force"), "{refused}");

    std::thread::sleep(Duration::from_secs((end - HUNG_BEFORE_S).saturating_sub(now())));
    saboteur.run("kill -STOP $(pidof agent)", SOON).unwrap();
    let overdue = format!("event=machine-overdue machine={machine}");
    host.serial.wait_from(mark, &overdue, SOON).unwrap();
    let late = now().saturating_sub(end);
    assert!(late <= LATE_S, "init ended it {late} s after its lease");
    let silent = host.serial.wait_from(mark, "event=agent-silent silent_s=", SOON).unwrap();
    assert!(silent.contains("threads=\"agent:T:"), "where it stands is not told: {silent}");
    host.serial.wait_from(mark, "event=agent-exited status=signal-9", SOON).unwrap();
    let adopted = format!("event=machine-adopted machine={}", faulty.machine);
    host.serial.wait_from(mark, &adopted, SOON).unwrap();
    host.serial.wait_from(mark, &format!("event=machine-ended machine={machine}"), SOON).unwrap();
    let text = host.serial.text();
    let place = |event: &str| mark + text[mark..].find(event).unwrap();
    assert!(place(&overdue) < place("event=agent-exited"), "the service ended it");
    faulty.still_runs();
}

/// What cannot be remembered is refused, with the reason; the same is accepted when there is room again.
fn the_memory_of_the_node_is_full(faulty: &Faulty, saboteur: &mut Saboteur) {
    let request = LeaseRequest {
        name: "full",
        node: &faulty.node,
        memory_mib: 64,
        ..LeaseRequest::default()
    };
    let (lease, machine) = faulty.scene.lease(&request).unwrap();
    saboteur.fill("/state", 0).unwrap();
    let refused = format!("{:#}", faulty.scene.create(&lease, &faulty.guest).unwrap_err());
    assert!(refused.contains("STATE is full"), "{refused}");
    faulty.still_runs();
    saboteur.clear("/state").unwrap();
    let deadline = Instant::now() + SOON;
    while let Err(error) = faulty.scene.create(&lease, &faulty.guest) {
        assert!(Instant::now() < deadline, "{error:#}");
        std::thread::sleep(AGAIN);
    }
    faulty.scene.renter().text(&["machines", "delete", &machine]).unwrap();
}

/// The next machine that starts from it gets what its renter named, as soon as there is room for it.
fn what_the_disk_altered_is_fetched_anew(faulty: &Faulty, host: &Host, saboteur: &mut Saboteur) {
    saboteur.fill("/data", TOO_LITTLE).unwrap();
    let kernel = &faulty.guest.kernel;
    let file = format!("/proc/1/root/data/content/{kernel}");
    let flip = format!("printf X | dd of={file} bs=1 seek=70000 conv=notrunc 2>/dev/null");
    saboteur.run(&flip, SOON).unwrap();
    let mark = host.serial.mark();
    let request = LeaseRequest { name: "altered", node: &faulty.node, ..LeaseRequest::default() };
    let (lease, machine) = faulty.scene.lease(&request).unwrap();
    faulty.scene.create(&lease, &faulty.guest).unwrap();
    host.serial.wait_from(mark, "event=trouble place=content", SOON).unwrap();
    let failed = format!("event=machine-failed machine={machine} reason=\"content {kernel} has ");
    let failed = host.serial.wait_from(mark, &failed, SOON).unwrap();
    assert!(failed.contains("DATA has room for "), "{failed}");
    saboteur.clear("/data").unwrap();
    let fetched = format!("event=content-fetched content={kernel}");
    host.serial.wait_from(mark, &fetched, SOON).unwrap();
    let started = format!("event=machine-started machine={machine}");
    host.serial.wait_from(mark, &started, GUEST_LIMIT).unwrap();
    faulty.scene.renter().text(&["machines", "delete", &machine]).unwrap();
}

/// An image is looked at while it is copied; the disk that was begun is made anew of what is fetched.
fn an_image_that_the_disk_altered_is_fetched_anew(
    faulty: &Faulty,
    host: &Host,
    saboteur: &mut Saboteur,
) {
    const WORDS: &[u8] = b"what a disk begins as";
    let image = [WORDS.repeat(100_000), vec![0; 1 << 20]].concat();
    let content = faulty.scene.push("image", &image).unwrap();
    let start = |name: &str| {
        let request =
            LeaseRequest { name, node: &faulty.node, disk_mib: 16, ..LeaseRequest::default() };
        let (lease, machine) = faulty.scene.lease(&request).unwrap();
        let mark = host.serial.mark();
        faulty.scene.create_with(&lease, &faulty.guest, &["--disk-image", &content]).unwrap();
        let started = format!("event=machine-started machine={machine}");
        host.serial.wait_from(mark, &started, GUEST_LIMIT).unwrap();
        let log = host.serial.text();
        (machine, log[mark..].matches("event=content-fetched").count())
    };
    let (first, fetched) = start("first-image");
    assert_eq!(fetched, 1);
    let flip = format!(
        "printf X | dd of=/proc/1/root/data/content/{content} bs=1 seek=1900000 conv=notrunc 2>/dev/null"
    );
    saboteur.run(&flip, SOON).unwrap();
    let mark = host.serial.mark();
    let (second, fetched) = start("altered-image");
    assert_eq!(fetched, 1, "{}", host.serial.tail(40));
    host.serial.wait_from(mark, "event=trouble place=content", SOON).unwrap();
    let failed = format!("event=machine-failed machine={second} reason=\"the image that it begins");
    host.serial.wait_from(mark, &failed, SOON).unwrap();
    faulty.scene.wait_for_console(&second, "guest: ready", GUEST_LIMIT).unwrap();
    let read = format!("head -c {} /dev/vda | sha256sum", image.len());
    let read = faulty.scene.ssh(&second, &read).unwrap();
    assert_eq!(read.split(' ').next(), Some(&*content));
    for machine in [first, second] {
        faulty.scene.renter().text(&["machines", "delete", &machine]).unwrap();
    }
}

/// Its renter is told, and the device that it had is reset before anybody else gets it.
fn a_machines_process_is_killed(faulty: &Faulty, host: &Host, saboteur: &mut Saboteur) {
    let device = faulty.device();
    let devices = [device.as_str()];
    let request = LeaseRequest {
        name: "killed",
        node: &faulty.node,
        devices: &devices,
        ..LeaseRequest::default()
    };
    let machine = faulty.create(host, &request);
    let mark = host.serial.mark();
    let process = process_of(host, &machine);
    saboteur.run(&format!("kill -9 {process}"), SOON).unwrap();
    let exited = format!("event=machine-exited machine={machine} status=signal-9");
    host.serial.wait_from(mark, &exited, SOON).unwrap();
    let renter = faulty.scene.renter();
    let stopped = |machine: &Value| machine["state"] == "stopped";
    let shown = renter.wait(&["machines", "show", &machine], SOON, stopped).unwrap();
    assert!(shown["detail"].as_str().unwrap().contains("ended by force"), "{shown:#}");
    renter.text(&["machines", "delete", &machine]).unwrap();
    host.serial.wait_from(mark, &format!("event=device-reset address={device}"), SOON).unwrap();
    assert_eq!(faulty.device(), device);
    faulty.still_runs();
}

/// A lease that ends meanwhile ends on the second, also when its machine's process hangs.
fn the_card_leaves_and_returns(faulty: &Faulty, host: &mut Host, saboteur: &mut Saboteur) {
    let device = faulty.device();
    let devices = [device.as_str()];
    let request = LeaseRequest {
        name: "unplugged",
        node: &faulty.node,
        devices: &devices,
        seconds: SHORT_LEASE_S,
        ..LeaseRequest::default()
    };
    let mark = host.serial.mark();
    let machine = faulty.create(host, &request);
    let process = process_of(host, &machine);
    saboteur.run(&format!("kill -STOP {process}"), SOON).unwrap();
    pull_out(host, "card");
    let limit = Duration::from_secs(SHORT_LEASE_S) + SOON;
    let ended = format!("event=machine-ended machine={machine}");
    let ended = host.serial.wait_from(mark, &ended, limit).unwrap();
    assert!(ended.contains("late_s=0") || ended.contains("late_s=1"), "{ended}");
    host.serial.wait_from(mark, &format!("event=device-reset address={device}"), SOON).unwrap();
    put_back_the_card(host);
    faulty.still_runs();
}

/// The node goes on answering, acknowledges nothing that it could forget, and its renters still see and
/// reach what runs.
fn the_disk_leaves(faulty: &Faulty, host: &mut Host, saboteur: &mut Saboteur) {
    let mark = host.serial.mark();
    pull_out(host, "disk0");
    let told = host.serial.wait_from(mark, "event=trouble place=disk", SOON).unwrap();
    assert!(told.contains("nothing is remembered any more"), "{told}");
    let request = LeaseRequest {
        name: "diskless",
        node: &faulty.node,
        memory_mib: 64,
        ..LeaseRequest::default()
    };
    let (lease, _) = faulty.scene.lease(&request).unwrap();
    let refused = format!("{:#}", faulty.scene.create(&lease, &faulty.guest).unwrap_err());
    assert!(refused.contains("store"), "{refused}");
    let process = process_of(host, &faulty.machine);
    saboteur.run(&format!("kill -0 {process}"), SOON).unwrap();
    let exited = format!("event=machine-exited machine={}", faulty.machine);
    assert!(!host.serial.text().contains(&exited), "{}", host.serial.tail(60));
    let nodes = faulty.scene.cli.json(&["nodes"]).unwrap();
    assert_eq!(nodes[0]["node"], faulty.node, "{nodes}");
    let shown = faulty.scene.renter().json(&["machines", "show", &faulty.machine]).unwrap();
    assert_eq!(shown["state"], "running", "{shown}");
    faulty.still_runs();
}

/// The node says so and its machine goes on. What was acknowledged before is kept, and what cannot be kept
/// is refused. Returns the latest serial that was acknowledged.
fn the_disk_fails_for_a_while(faulty: &Faulty, host: &mut Host) -> u64 {
    let deadline = Instant::now() + SOON;
    // The node has just started, and finds its gateway.
    while let Err(error) = faulty.renew(2) {
        assert!(Instant::now() < deadline, "{error:#}");
        std::thread::sleep(AGAIN);
    }
    let mark = host.serial.mark();
    let reopen = |host: &mut Host, file| {
        let options = json!({ "options": [on(file)] });
        host.qmp.execute("blockdev-reopen", options).unwrap();
    };
    reopen(host, FAILS);
    let refused = format!("{:#}", faulty.renew(3).unwrap_err());
    assert!(refused.contains("store"), "{refused}");
    let told = host.serial.wait_from(mark, "event=trouble place=disk", SOON).unwrap();
    assert!(told.contains("nothing is remembered any more"), "{told}");
    // The guest's disk fails, too, of which provider and renter hear.
    let write = "dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2> /dev/null; true";
    faulty.scene.ssh(&faulty.machine, write).unwrap();
    let storage = format!("event=machine-storage machine={}", faulty.machine);
    host.serial.wait_from(mark, &storage, SOON).unwrap();
    let shown = faulty.scene.renter().json(&["machines", "show", &faulty.machine]).unwrap();
    assert!(shown.to_string().contains("the server's storage failed "), "{shown}");
    reopen(host, WORKS);
    let serial = if faulty.renew(4).is_ok() { 4 } else { 2 };
    faulty.scene.ssh(&faulty.machine, "true").unwrap();
    assert!(!host.serial.text()[mark..].contains("event=machine-exited"));
    assert!(!host.serial.text()[mark..].contains("event=agent-exited"));
    serial
}

/// A clock that only this server has ends leases, but destroys nothing; when two sources agree on
/// another time, what that ended goes on. Returns the latest serial of its lease that was acknowledged.
fn the_clock_is_years_ahead(faulty: &Faulty, options: &HostOptions, time: &TimeServers) -> u64 {
    time.go_silent();
    let options = HostOptions { rtc: Some(AHEAD.to_owned()), ..options.clone() };
    let folder = faulty.scene.folder.join("faulty");
    let mut host = Host::start(&scene::image_folder().unwrap(), &folder, &options).unwrap();
    host.serial.wait(&format!("event=node id={}", faulty.node), JOIN_LIMIT).unwrap();
    let ended = format!("event=machine-ended machine={}", faulty.machine);
    host.serial.wait(&ended, JOIN_LIMIT).unwrap();
    let mut saboteur = Saboteur::connect(&folder).unwrap();
    let year = saboteur.run("date +%Y", SOON).unwrap();
    assert_eq!(year, "2036\n");
    let mark = host.serial.mark();
    time.answer_again();
    let started = format!("event=machine-started machine={}", faulty.machine);
    host.serial.wait_from(mark, &started, JOIN_LIMIT).unwrap();
    assert!(!host.serial.text().contains("event=machine-destroyed"), "{}", host.serial.tail(60));
    let told: u64 = saboteur.run("date +%s", SOON).unwrap().trim().parse().unwrap();
    assert!(told.abs_diff(now()) < 10, "{told}");
    faulty.scene.wait_for_console(&faulty.machine, "guest: ready", GUEST_LIMIT).unwrap();
    let serial = the_disk_fails_for_a_while(faulty, &mut host);
    host.cut_power().unwrap();
    serial
}

/// What the node knows of the time is more than its clock says, and of the lease what it acknowledged.
fn the_clock_is_years_behind(
    faulty: &Faulty,
    options: &HostOptions,
    (time, serial): (&TimeServers, u64),
) {
    time.go_silent();
    let options = HostOptions { rtc: Some(BEHIND.to_owned()), ..options.clone() };
    let folder = faulty.scene.folder.join("faulty");
    let host = Host::start(&scene::image_folder().unwrap(), &folder, &options).unwrap();
    let started = format!("event=machine-started machine={}", faulty.machine);
    host.serial.wait(&started, JOIN_LIMIT + GUEST_LIMIT).unwrap();
    let mut saboteur = Saboteur::connect(&folder).unwrap();
    let told: u64 = saboteur.run("date +%s", SOON).unwrap().trim().parse().unwrap();
    assert!(told.abs_diff(now()) < 600, "{told}");
    time.answer_again();
    let known = |shown: &Value| shown["serial"].as_u64() >= Some(serial);
    faulty.scene.renter().wait(&["machines", "show", &faulty.machine], JOIN_LIMIT, known).unwrap();
}

#[test]
fn a_server_with_hardly_any_memory_joins_refuses_and_survives_who_takes_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let files = folder.path().join("small");
    let medium = Saboteur::medium(&scene::image_folder().unwrap(), &files).unwrap();
    let arguments = Saboteur::arguments(&files);
    let options =
        HostOptions { medium, arguments, memory_mib: SMALL_MIB, ..HostOptions::default() };
    let (host, node) = scene.boot("small", options).unwrap();
    let mut saboteur = Saboteur::connect(&files).unwrap();
    let request = LeaseRequest { node: &node, memory_mib: 384, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    let guest = scene.push_guest_under(&lease, None).unwrap();
    let refused = format!("{:#}", scene.create(&lease, &guest).unwrap_err());
    assert!(refused.contains("wants 384 MiB of memory"), "{refused}");
    assert!(refused.contains("are free on this node"), "{refused}");

    let agent = saboteur.run("pidof agent", SOON).unwrap();
    // It keeps what has no end of line; the kernel ends it, and nobody else.
    let greedy = saboteur.run("tail /dev/zero", SOON).unwrap_err().to_string();
    assert!(greedy.contains("status 137"), "{greedy}");
    assert_eq!(saboteur.run("pidof agent", SOON).unwrap(), agent);
    let shown = scene.cli.text(&["node", "show", &node]).unwrap();
    assert!(shown.contains("small"), "{shown}");
    assert!(!host.serial.text().contains("event=agent-exited"), "{}", host.serial.tail(40));
}
