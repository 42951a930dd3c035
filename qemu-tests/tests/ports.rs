//! The tree of PCI Express ports: it tells what the host's ports tell, and devices come and go in it
//! while the guest runs.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use qemu_tests::{
    bed::{Bed, BedOptions, Opened, Plan, guest},
    harness::host::HostOptions,
};
use types::{
    topology::SparePort,
    units::Mebibytes,
    vm::{Passthrough, VfioInterface},
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a guest may take to notice a device; it waits five seconds before it lets one go.
const SOON: Duration = Duration::from_secs(90);

/// Where the harness puts the first device of a host.
const FIRST: &str = "0000:01:00.0";

/// A host that holds the usual guest.
fn bed(folder: &Path, host: HostOptions) -> Bed {
    let made = guest::make(folder).unwrap();
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

fn spare(memory: u64, prefetchable: u64) -> SparePort {
    SparePort { root: 0, memory_mib: Mebibytes(memory), prefetchable_mib: Mebibytes(prefetchable) }
}

/// A guest with two spare ports and an IOMMU, and no device yet.
fn machine_with_spare_ports(bed: &mut Bed) -> u32 {
    let files = ("/guest/kernel", "/guest/initrd");
    let mut plan = Plan::linux(1, files, "console=ttyS0 quiet iomem=relaxed");
    let iommu_fd = plan.open(Opened::Write { path: "/dev/iommu".to_owned() });
    plan.spec.passthrough = Some(Passthrough {
        interface: VfioInterface::Cdev,
        iommu_fd,
        peer_to_peer: false,
        devices: Vec::new(),
    });
    plan.spec.spare_ports = vec![spare(32, 1024), spare(2, 0)];
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    machine
}

fn attach(bed: &mut Bed, machine: u32, body: &str, path: &str) -> (u16, String) {
    let file = Opened::Write { path: path.to_owned() };
    let answer = bed.call_with(machine, ("POST", "/v1/devices"), body.as_bytes(), &[file]).unwrap();
    (answer.status, String::from_utf8_lossy(&answer.body).into_owned())
}

fn detach(bed: &mut Bed, machine: u32, target: &str) {
    let answer = bed.call(machine, ("DELETE", &format!("/v1/devices/{target}")), "").unwrap();
    assert_eq!(answer.status, 202, "{}", String::from_utf8_lossy(&answer.body));
}

/// Names and states of what is attached.
fn attached(bed: &mut Bed, machine: u32) -> Vec<(String, String)> {
    let list = bed.call(machine, ("GET", "/v1/devices"), "").unwrap().json().unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    list.as_array().unwrap().iter().map(|d| (text(&d["id"]), text(&d["state"]["is"]))).collect()
}

fn wait_attached(bed: &mut Bed, machine: u32, expected: &[(&str, &str)]) {
    let deadline = std::time::Instant::now() + SOON;
    let fits = |found: &[(String, String)]| {
        found.iter().map(|(id, state)| (id.as_str(), state.as_str())).eq(expected.iter().copied())
    };
    let mut found = attached(bed, machine);
    while !fits(&found) {
        let log = bed.log(machine).unwrap();
        assert!(std::time::Instant::now() < deadline, "{found:?}; the VMM said {log}");
        std::thread::sleep(Duration::from_millis(500));
        found = attached(bed, machine);
    }
}

const DISK_BODY: &str =
    r#"{"id": "data", "device": {"kind": "disk", "read_only": false, "serial": "late"}}"#;
const EDU_BODY: &str = r#"{"id": "edu", "device": {"kind": "pci", "address": "0000:01:00.0"}}"#;

/// Waits for a device by its vendor and device id, and goes to its folder.
fn find(ids: &str) -> String {
    format!(
        "d=; while [ -z \"$d\" ]; do sleep 1; for e in /sys/bus/pci/devices/*; do \
         [ \"$(cat $e/vendor)$(cat $e/device)\" = {ids} ] && d=$e; done; done; cd $d"
    )
}

/// Lets the device compute the factorial of five (QEMU docs/specs/edu: a register holds its name, another
/// computes).
const FACTORIAL: &str = "echo 1 > enable; bar=$(head -n 1 resource | cut -d' ' -f1); \
    devmem $((bar)) 32; devmem $((bar + 8)) 32 5; \
    while [ $(( $(devmem $((bar + 32)) 32) & 1 )) = 1 ]; do :; done; devmem $((bar + 8)) 32; cd /";

#[test]
fn devices_come_and_go_while_the_guest_runs() {
    let folder = tempfile::tempdir().unwrap();
    let host = HostOptions { devices: vec!["edu".to_owned()], ..HostOptions::default() };
    let mut bed = bed(folder.path(), host);
    let edu = bed.bind(FIRST).unwrap();
    let mut disk = b"late disk".to_vec();
    disk.resize(8 << 20, 0);
    bed.write("/run/disk", &disk).unwrap();
    let machine = machine_with_spare_ports(&mut bed);
    assert_eq!(attached(&mut bed, machine), []);

    // A disk: the guest's driver reads and writes it.
    let (status, said) = attach(&mut bed, machine, DISK_BODY, "/run/disk");
    assert_eq!(status, 202, "{said}");
    let read = "while [ ! -b /dev/vda ]; do sleep 1; done; head -c 9 /dev/vda; echo; \
                cat /sys/block/vda/serial; echo; \
                echo written | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2> /dev/null";
    assert_eq!(bed.run(machine, read, SOON).unwrap(), "late disk\nlate\n");
    wait_attached(&mut bed, machine, &[("data", "connected")]);
    assert_eq!(&bed.read("/run/disk").unwrap()[4096..4103], b"written");

    // A device of the host, into the other port: registers answer where the guest put them.
    let (status, said) = attach(&mut bed, machine, EDU_BODY, &edu);
    assert_eq!(status, 202, "{said}");
    let compute = format!("{}; {FACTORIAL}", find("0x12340x11e8"));
    let answer = bed.run(machine, &compute, SOON).unwrap();
    assert_eq!(answer.split_whitespace().collect::<Vec<_>>(), ["0x010000ED", "0x00000078"]);
    wait_attached(&mut bed, machine, &[("data", "connected"), ("edu", "connected")]);

    // Nothing is given twice, nothing goes where nothing is.
    assert_eq!(attach(&mut bed, machine, EDU_BODY, &edu).0, 409);
    let third = DISK_BODY.replace("data", "more");
    assert_eq!(attach(&mut bed, machine, &third, "/run/disk").0, 409);
    assert_eq!(bed.call(machine, ("DELETE", "/v1/devices/none"), "").unwrap().status, 404);

    // The guest is asked, and lets both go.
    detach(&mut bed, machine, "data");
    detach(&mut bed, machine, "edu");
    wait_attached(&mut bed, machine, &[]);
    let gone = "ls /sys/block | grep -c vda; grep -l 0x11e8 /sys/bus/pci/devices/*/device | wc -l";
    assert_eq!(bed.run(machine, &format!("{gone}; true"), SOON).unwrap(), "0\n0\n");

    // The same device once more, and now it is pulled.
    let (status, said) = attach(&mut bed, machine, EDU_BODY, &edu);
    assert_eq!(status, 202, "{said}");
    bed.run(machine, &compute, SOON).unwrap();
    detach(&mut bed, machine, "edu?pull=1");
    wait_attached(&mut bed, machine, &[]);
    let wait = "while grep -q 0x11e8 /sys/bus/pci/devices/*/device; do sleep 1; done; echo gone";
    assert_eq!(bed.run(machine, wait, SOON).unwrap(), "gone\n");

    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}

/// How often devices come and go.
const ROUNDS: usize = 12;
/// A network card of the host, by its vendor and device id.
const CARD: &str = "0x80860x10d3";
const CARD_BODY: &str = r#"{"id": "card", "device": {"kind": "pci", "address": "0000:01:00.0"}}"#;

/// What the VMM has of the host.
#[derive(Clone, Debug)]
struct Possessions {
    descriptors: usize,
    /// Their names, but of those that answer the control socket: a second one starts whenever two calls
    /// meet, and stays.
    threads: Vec<String>,
    answering: usize,
    mappings: usize,
    /// Of its own, in KiB.
    memory: u64,
    /// The devices that it counts for.
    counted: Vec<String>,
}

impl Possessions {
    fn of(bed: &mut Bed, machine: u32) -> Self {
        let is_number = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
        let mut processes = bed.list("/proc").unwrap();
        processes.retain(is_number);
        let mut named = |process: &String| {
            bed.text(&format!("/proc/{process}/comm")).is_ok_and(|name| name == "holdfast-vmm")
        };
        let process = processes.into_iter().find(|process| named(process)).unwrap();
        let mut threads = Vec::new();
        for task in bed.list(&format!("/proc/{process}/task")).unwrap() {
            // One that ends meanwhile is none that is left behind.
            threads.extend(bed.text(&format!("/proc/{process}/task/{task}/comm")));
        }
        threads.sort_unstable();
        let all = threads.len();
        threads.retain(|name| !name.starts_with("api"));
        let status = bed.text(&format!("/proc/{process}/status")).unwrap();
        let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let counters = bed.call(machine, ("GET", "/v1/counters"), "").unwrap().json().unwrap();
        let counted = counters["devices"].as_array().unwrap().iter();
        Self {
            descriptors: bed.list(&format!("/proc/{process}/fd")).unwrap().len(),
            answering: all - threads.len(),
            threads,
            mappings: bed.text(&format!("/proc/{process}/maps")).unwrap().lines().count(),
            memory: memory.trim().trim_end_matches(" kB").parse().unwrap(),
            counted: counted.map(|device| device["name"].as_str().unwrap().to_owned()).collect(),
        }
    }

    /// Holds these against those after the first round. What the first one made and kept, as a mapping of
    /// guest memory for devices, stays.
    fn compare(&self, first: &Self, round: usize) {
        let exact = |it: &Self| (it.descriptors, it.threads.clone(), it.counted.clone());
        assert_eq!(exact(self), exact(first), "round {round}");
        // A thread's stack, its guard, and an allocator's arena of two parts.
        let answering = 4 * self.answering.saturating_sub(first.answering);
        assert!(self.mappings <= first.mappings + answering + 2, "round {round}: {self:?}");
        assert!(self.memory <= first.memory + 1024, "round {round}: {self:?}");
    }
}

/// A card and a disk come and go, side by side: the ports are free each time, the guest finds both where
/// they were, and nothing of them is left in the VMM or in the guest.
#[test]
fn twelve_cards_and_disks_in_a_row_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["-netdev", "user,id=card"].map(str::to_owned).to_vec();
    let devices = vec!["e1000e,netdev=card,romfile=".to_owned()];
    let mut bed = bed(folder.path(), HostOptions { devices, arguments, ..HostOptions::default() });
    let card = bed.bind(FIRST).unwrap();
    bed.write("/run/disk", b"").unwrap();
    bed.grow("/run/disk", 8 << 20).unwrap();
    let machine = machine_with_spare_ports(&mut bed);
    let functions = "ls /sys/bus/pci/devices; ls /sys/bus/pci/slots";
    let before = bed.run(machine, functions, SOON).unwrap();
    let (mut first, mut places) = (None, Vec::new());
    for round in 0..ROUNDS {
        let (status, said) = attach(&mut bed, machine, CARD_BODY, &card);
        assert_eq!(status, 202, "round {round}: {said}");
        let (status, said) = attach(&mut bed, machine, DISK_BODY, "/run/disk");
        assert_eq!(status, 202, "round {round}: {said}");
        let compare = format!(
            "while [ ! -b /dev/vda ]; do sleep 1; done; echo {round} | dd of=/dev/vda conv=fsync \
             2>/dev/null; echo 3 > /proc/sys/vm/drop_caches; head -n 1 /dev/vda; {}; \
             echo 1 > enable; pwd -P; cat resource | head -n 4; cat config | wc -c",
            find(CARD)
        );
        places.push(bed.run(machine, &compare, SOON).unwrap().replacen(&round.to_string(), "", 1));
        wait_attached(&mut bed, machine, &[("card", "connected"), ("data", "connected")]);
        detach(&mut bed, machine, "card");
        detach(&mut bed, machine, "data");
        wait_attached(&mut bed, machine, &[]);
        let gone = format!("while [ -e /dev/vda ]; do sleep 1; done; {functions}");
        assert_eq!(bed.run(machine, &gone, SOON).unwrap(), before, "round {round}");
        let now = Possessions::of(&mut bed, machine);
        println!("round {round}: {now:?}");
        now.compare(first.get_or_insert(now.clone()), round);
    }
    assert!(places.iter().all(|place| *place == places[0]), "{places:#?}");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}

/// The disk's thread ends after the disk has left the bus: the machine must not end with it.
#[test]
fn nvme_disks_leave_when_their_guest_lets_go_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path(), HostOptions::default());
    bed.write("/run/disk", &vec![0; 8 << 20]).unwrap();
    let machine = machine_with_spare_ports(&mut bed);
    let body = DISK_BODY.replace("\"late\"", "\"late\", \"model\": \"nvme\"");
    for round in 0..4 {
        let (status, said) = attach(&mut bed, machine, &body, "/run/disk");
        assert_eq!(status, 202, "{said}");
        let read = "while [ ! -b /dev/nvme0n1 ]; do sleep 1; done; cat /sys/block/nvme0n1/size";
        assert_eq!(bed.run(machine, read, SOON).unwrap().trim(), "16384", "round {round}");
        detach(&mut bed, machine, "data");
        wait_attached(&mut bed, machine, &[]);
        let gone = "while [ -e /dev/nvme0n1 ]; do sleep 1; done; echo here";
        assert_eq!(bed.run(machine, gone, SOON).unwrap().trim(), "here", "round {round}");
    }
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}

/// Linux waits for a device that it wants back from whoever has it, and other devices' coming and going with it.
#[test]
fn a_device_that_the_host_wants_back_is_let_go() {
    const UNBIND: &str = "/sys/bus/pci/drivers/vfio-pci/unbind";
    let folder = tempfile::tempdir().unwrap();
    let host = HostOptions { devices: vec!["edu".to_owned()], ..HostOptions::default() };
    let mut bed = bed(folder.path(), host);
    let edu = bed.bind(FIRST).unwrap();
    let machine = machine_with_spare_ports(&mut bed);
    let (status, said) = attach(&mut bed, machine, EDU_BODY, &edu);
    assert_eq!(status, 202, "{said}");
    wait_attached(&mut bed, machine, &[("edu", "connected")]);
    // Returns when the device is free.
    bed.write(UNBIND, FIRST.as_bytes()).unwrap();
    // The kernel has it in hand, and lets nobody reset it: that is left to whoever has it next.
    wait_attached(&mut bed, machine, &[("edu", "unclean")]);
    // Its kernel may say beside it that the device is gone.
    let said = bed.run(machine, "echo goes on", SOON).unwrap();
    assert!(said.trim_end().ends_with("goes on"), "{said}");
    let events = bed.call(machine, ("GET", "/v1/events?from=0"), "").unwrap().json().unwrap();
    let kinds: Vec<_> =
        events["events"].as_array().unwrap().iter().map(|event| event["kind"].clone()).collect();
    assert!(kinds.ends_with(&["device-attached".into(), "device-failed".into()]), "{kinds:?}");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");

    // One that the guest has had from its start goes with the guest.
    let edu = bed.bind(FIRST).unwrap();
    let mut plan = Plan::linux(2, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    plan.pass(FIRST.parse().unwrap(), &edu);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    bed.write(UNBIND, FIRST.as_bytes()).unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, types::vm::exit::HOST_FAULT, "{log}");
    assert!(log.contains(&format!("the host wants {FIRST} back")), "{log}");
}

#[test]
fn a_device_that_is_still_plugged_comes_back_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let host = HostOptions { devices: vec!["edu".to_owned()], ..HostOptions::default() };
    let mut bed = bed(folder.path(), host);
    let edu = bed.bind(FIRST).unwrap();
    let machine = machine_with_spare_ports(&mut bed);
    let (status, said) = attach(&mut bed, machine, EDU_BODY, &edu);
    assert_eq!(status, 202, "{said}");
    wait_attached(&mut bed, machine, &[("edu", "connected")]);
    let no_file = bed.call(machine, ("POST", "/v1/devices"), DISK_BODY).unwrap();
    assert_eq!(no_file.status, 409);
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
    let left = BASE64.encode(bed.read(&format!("/sys/bus/pci/devices/{FIRST}/vendor")).unwrap());
    assert_eq!(left, BASE64.encode("0x1234\n"));
}
