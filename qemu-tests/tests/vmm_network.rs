//! A network card with several pairs of queues: an unmodified guest finds as many as the tap has, uses them
//! all, and turns them on and off; and the host puts nothing where nobody looks.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use qemu_tests::{
    bed::{
        Bed, BedOptions, Plan, guest,
        network::{self, PORT},
    },
    harness::{host::HostOptions, pace::Pace},
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);
/// How long an exchange of bytes takes, in seconds: a few hundred round trips.
const EXCHANGE_S: f64 = 0.4;
/// How long a guest is left asleep.
const ASLEEP: Duration = Duration::from_secs(20);

/// `channels` prints most and current pairs; `channels N` has N used from now on. Source: Linux
/// include/uapi/linux/ethtool.h, `struct ethtool_channels`: its command and eight numbers, of which the
/// fifth and the last are the most and the current number of combined channels.
const CHANNELS: &str = r#"channels() { perl -e '
    socket(S, 2, 2, 0) or die "socket: $!";
    sub ask { my $request = pack("a16 P36 x16", "eth0", $_[0]); ioctl(S, 0x8946, $request) or die "refused: $!\n"; }
    my $now = pack("L9", 0x3c, (0) x 8);
    ask($now);
    my @all = unpack("L9", $now);
    if (@ARGV) { $all[0] = 0x3d; $all[8] = $ARGV[0]; ask(pack("L9", @all)); } else { print "$all[4] $all[8]\n"; }
' "$@"; }"#;

/// The guest's queues.
const QUEUES: &str = "ls -1 /sys/class/net/eth0/queues";

/// `came N`: how many interrupts the guest took for receive queue N.
const CAME: &str = r#"came() { awk -v name="input.$1" '$NF ~ name { for (i = 2; i < NF; i++) if ($i ~ /^[0-9]+$/) n += $i } END { print n + 0 }' /proc/interrupts; }"#;

fn bed(folder: &Path) -> Bed {
    let made = guest::make(folder).unwrap();
    let made = network::with_wire(&made, folder).unwrap();
    // Guests give each processor ten seconds to come up, which an emulator that is busy may not have.
    let host = HostOptions { pace: Pace::SLOW, ..HostOptions::default() };
    let mut files = network::files().unwrap();
    files.push(("guest/kernel".to_owned(), made.kernel));
    files.push(("guest/initrd".to_owned(), made.initrd));
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

/// A machine with two virtual CPUs on network `number`.
fn plan(number: u8, queues: u32) -> Plan {
    let (kernel, initrd) = ("/guest/kernel", "/guest/initrd");
    let mut plan = Plan::linux(number, (kernel, initrd), "console=ttyS0 quiet");
    plan.spec.vcpus = 2;
    plan.net(&network::ends(number).0, queues);
    plan
}

/// Returns the queues of the host's side that take frames.
fn queues_of_host(bed: &mut Bed, number: u8) -> Vec<String> {
    let (tap, _) = network::ends(number);
    let all = bed.list(&format!("/sys/class/net/{tap}/queues")).unwrap();
    all.into_iter().filter(|name| name.starts_with("tx-")).collect()
}

/// Sends from each processor in turn and returns how many interrupts both receive queues got by it.
fn exchange(bed: &mut Bed, machine: u32, number: u8) -> [u32; 2] {
    let (_, host) = network::ends(number);
    let count = |bed: &mut Bed| {
        let text = bed.run(machine, "came 0; came 1", SOON).unwrap();
        let counts: Vec<u32> = text.lines().map(|line| line.trim().parse().unwrap()).collect();
        [counts[0], counts[1]]
    };
    let before = count(bed);
    for mask in [1, 2] {
        let trips = format!("taskset {mask} wire trips {host}:{PORT} {EXCHANGE_S} 1");
        let trips = bed.run(machine, &trips, SOON).unwrap();
        println!("from processor {mask}: {} round trips each second", trips.trim());
        assert!(trips.trim().parse::<u32>().unwrap() > 0, "{trips}");
    }
    let after = count(bed);
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn each_processor_has_queues_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path());
    bed.network(1, 2).unwrap();
    let machine = bed.launch(&plan(1, 2)).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    bed.run(machine, &CHANNELS.replace('\n', " "), SOON).unwrap();
    bed.run(machine, CAME, SOON).unwrap();
    let run = |bed: &mut Bed, command: &str| {
        bed.run(machine, command, SOON).unwrap().trim().replace('\n', " ")
    };
    assert_eq!(run(&mut bed, QUEUES), "rx-0 rx-1 tx-0 tx-1");
    assert_eq!(run(&mut bed, "channels"), "2 2");
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0", "tx-1"]);
    let came = exchange(&mut bed, machine, 1);
    println!("interrupts of the receive queues: {came:?}");
    assert!(came.iter().all(|count| *count > 10), "{came:?}");

    // Turned off: the host steers around it, and traffic of both processors goes on.
    run(&mut bed, "channels 1");
    assert_eq!(run(&mut bed, "channels"), "2 1");
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0"]);
    let came = exchange(&mut bed, machine, 1);
    assert!(came[0] > 10 && came[1] == 0, "{came:?}");
    // On again, with what the driver had put into the rings before.
    run(&mut bed, "channels 2");
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0", "tx-1"]);
    let came = exchange(&mut bed, machine, 1);
    assert!(came.iter().all(|count| *count > 10), "{came:?}");

    // A pause takes the rings from the kernel; a new driver starts with one pair and asks again.
    assert_eq!(bed.call(machine, ("POST", "/v1/pause"), "").unwrap().status, 202);
    assert_eq!(bed.call(machine, ("POST", "/v1/resume"), "").unwrap().status, 202);
    let came = exchange(&mut bed, machine, 1);
    assert!(came.iter().all(|count| *count > 10), "{came:?}");
    // Asleep, the guest gives the rings back, and has them again when the power button wakes it. A kernel
    // that sees the press before its own handler did passes it on as well, and nobody is to power off.
    run(&mut bed, guest::DEAF);
    let asleep = "echo mem > /sys/power/state; echo awake";
    bed.type_line(machine, asleep).unwrap();
    std::thread::sleep(ASLEEP);
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0"]);
    let button = r#"{"action":"button"}"#;
    assert_eq!(bed.call(machine, ("POST", "/v1/power"), button).unwrap().status, 202);
    bed.wait_console(machine, &format!("awake\n{}0", guest::END), SOON).unwrap();
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0", "tx-1"]);
    let came = exchange(&mut bed, machine, 1);
    assert!(came.iter().all(|count| *count > 10), "{came:?}");
    run(&mut bed, "cd /sys/bus/virtio/drivers/virtio_net && card=$(ls -d virtio*)");
    run(&mut bed, "echo $card > unbind");
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0"]);
    run(&mut bed, "echo $card > bind; ip link set eth0 up; udhcpc -i eth0 -q -n -s /etc/udhcpc.sh");
    assert_eq!(run(&mut bed, QUEUES), "rx-0 rx-1 tx-0 tx-1");
    assert_eq!(queues_of_host(&mut bed, 1), ["tx-0", "tx-1"]);
    let came = exchange(&mut bed, machine, 1);
    assert!(came.iter().all(|count| *count > 10), "{came:?}");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");

    one_descriptor_is_one_pair(&mut bed);
}

/// `vector N`: gives queue 0 vector N, and prints which it has then. The card's registers are the driver's; the window
/// to them in its configuration space (virtio 1.2 §4.1.4.9: a vendor's capability of type 5, with BAR, offset, length
/// and data) is not. At 0x16 and 0x1a of BAR 0 are queue_select and queue_msix_vector (§4.1.4.3).
const VECTOR: &str = r#"vector() { perl -e '
    open(F, "+<", "/sys/class/net/eth0/device/../config") or die "config: $!";
    sub get { sysseek(F, $_[0], 0); sysread(F, my $bytes, $_[1]); $bytes }
    sub put { sysseek(F, $_[0], 0); syswrite(F, $_[1]); }
    my $at = ord get(0x34, 1);
    $at = ord get($at + 1, 1) until ord(get($at, 1)) == 9 && ord(get($at + 3, 1)) == 5;
    sub look { put($at + 4, "\0"); put($at + 8, pack("L", $_[0])); put($at + 12, pack("L", 2)); }
    look(0x16); put($at + 16, pack("S", 0));
    look(0x1a); put($at + 16, pack("S", $ARGV[0]));
    print unpack("S", get($at + 16, 2)), "\n";
' "$@"; }"#;

/// A driver may choose a queue's vector at any time (virtio 1.2 §4.1.5.1.2.1). Linux' does not, so its back is used:
/// the receive queue, number 0 with vector 1, gets the vector of the other one, whose handler has nothing to do then;
/// what came meanwhile is found when the queue has its own again.
fn vectors_are_followed(bed: &mut Bed, machine: u32, host: &str) {
    let mut run = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    run(&VECTOR.replace('\n', " "));
    let events = "awk '/output.0/ { print $2 + $3 }' /proc/interrupts";
    let ping = format!("ping -c 2 -W 2 {host} > /dev/null; echo $?");
    assert_eq!(run(&ping), "0");
    let before: u32 = run(events).parse().unwrap();
    assert_eq!(run("vector 2"), "2");
    assert_eq!(run(&ping), "1", "nobody looks at what comes");
    let after: u32 = run(events).parse().unwrap();
    assert!(after > before, "{before} {after}");
    assert_eq!(run("vector 1"), "1");
    assert_eq!(run(&ping), "0");
}

/// `offload NAME` prints whether a feature of the card is on; `offload NAME 0` has it off before. Source: Linux
/// include/uapi/linux/ethtool.h: ETHTOOL_GSTRINGS of ETH_SS_FEATURES names them, ETHTOOL_GFEATURES has four words for
/// each 32, the third of them what is on, and ETHTOOL_SFEATURES two, which are to change and to what.
const OFFLOAD: &str = r#"offload() { perl -e '
    my ($name, $on) = @ARGV;
    socket(S, 2, 2, 0) or die "socket: $!";
    sub ask { my $request = pack("a16 P4108 x16", "eth0", $_[0]); ioctl(S, 0x8946, $request) or die "refused: $!\n"; }
    my $names = pack("L3 x4096", 0x1b, 4, 0);
    ask($names);
    my ($at) = grep { unpack("Z32", substr($names, 12 + 32 * $_, 32)) eq $name } 0 .. 127;
    my $all = pack("L2 x4100", 0x3a, 4);
    ask($all);
    my $words = unpack("x4 L", $all);
    if (defined $on) {
        my @blocks = (0) x (2 * $words);
        my $block = 2 * int($at / 32);
        ($blocks[$block], $blocks[$block + 1]) = (1 << $at % 32, $on << $at % 32);
        my $some = pack("L* x4096", 0x3b, $words, @blocks);
        ask($some);
        ask($all);
    }
    print unpack("L", substr($all, 16 + 16 * int($at / 32), 4)) >> $at % 32 & 1, "\n";
' "$@"; }"#;

/// Linux' driver says by the control queue that it takes no unsegmented frames any more, and later that it does
/// again (virtio 1.2 §5.1.6.5, "Offloads State Configuration"). It reports what it was refused.
fn offloads_are_switched(bed: &mut Bed, machine: u32, host: &str) {
    let run =
        |bed: &mut Bed, command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    let trips = format!("wire trips {host}:{PORT} {EXCHANGE_S} 1");
    run(bed, &OFFLOAD.replace('\n', " "));
    assert_eq!(run(bed, "offload rx-gro-hw"), "1");
    assert_eq!(run(bed, "offload rx-gro-hw 0"), "0");
    assert!(run(bed, &trips).parse::<u32>().unwrap() > 0);
    // A pause takes the rings from the kernel, and gives them back with the offloads that are left.
    assert_eq!(bed.call(machine, ("POST", "/v1/pause"), "").unwrap().status, 202);
    assert_eq!(bed.call(machine, ("POST", "/v1/resume"), "").unwrap().status, 202);
    assert!(run(bed, &trips).parse::<u32>().unwrap() > 0);
    assert_eq!(run(bed, "offload rx-gro-hw 1"), "1");
    assert!(run(bed, &trips).parse::<u32>().unwrap() > 0);
}

/// A document that names one descriptor makes a card with one pair, however many processors there are.
fn one_descriptor_is_one_pair(bed: &mut Bed) {
    bed.network(2, 1).unwrap();
    let machine = bed.launch(&plan(2, 1)).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let run = |bed: &mut Bed, command: &str| {
        bed.run(machine, command, SOON).unwrap().trim().replace('\n', " ")
    };
    assert_eq!(run(bed, QUEUES), "rx-0 tx-0");
    // Feature bits 2, 17 and 22: offloads that can be switched, the control queue, several pairs.
    let features = "cut -c3,18,23 /sys/class/net/eth0/device/features";
    assert_eq!(run(bed, features), "110");
    let (_, host) = network::ends(2);
    let trips = run(bed, &format!("wire trips {host}:{PORT} {EXCHANGE_S} 1"));
    assert!(trips.parse::<u32>().unwrap() > 0, "{trips}");
    vectors_are_followed(bed, machine, &host);
    offloads_are_switched(bed, machine, &host);
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
