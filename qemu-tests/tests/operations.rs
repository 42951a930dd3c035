//! What a running Linux guest shows of what is done to it from outside: pause, interrupt, panic
//! report, and the interfaces of another hypervisor. On the bed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use qemu_tests::bed::{Bed, BedOptions, Plan, guest};
use types::vm::{CoreScheduling, HyperV, exit};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(90);
/// How long a guest has to end by itself: to wake, to see the next press, and to power off.
const GRACE_MS: u64 = 60_000;
/// How long a guest is left asleep.
const ASLEEP: Duration = Duration::from_secs(15);

/// A host and a guest that takes commands, after `change` to its specification.
fn running(folder: &Path, change: impl FnOnce(&mut Plan)) -> (Bed, u32) {
    let made = guest::make(folder).unwrap();
    let mut options = BedOptions::default();
    options.files.push(("guest/kernel".to_owned(), made.kernel));
    options.files.push(("guest/initrd".to_owned(), made.initrd));
    let mut bed = Bed::start(folder, options).unwrap();
    let mut plan =
        Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet panic=-1");
    change(&mut plan);
    bed.write("/run/disk", b"").unwrap();
    bed.grow("/run/disk", 16 << 20).unwrap();
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    (bed, machine)
}

fn post(bed: &mut Bed, machine: u32, target: &str, body: &str) -> u16 {
    bed.call(machine, ("POST", target), body).unwrap().status
}

fn get(bed: &mut Bed, machine: u32, target: &str) -> serde_json::Value {
    bed.call(machine, ("GET", target), "").unwrap().json().unwrap()
}

#[test]
fn a_guest_is_paused_and_says_that_it_failed() {
    let folder = tempfile::tempdir().unwrap();
    // The machine's cores are its own, as the node asks for.
    let own = |plan: &mut Plan| plan.spec.core_scheduling = CoreScheduling::Own;
    let (mut bed, machine) = running(folder.path(), own);
    let count = "(while :; do echo tick; sleep 0.05; done) & sleep 1; echo started";
    let said = bed.run(machine, count, SOON).unwrap();
    assert!(said.contains("tick") && said.contains("started"), "{said}");

    assert_eq!(post(&mut bed, machine, "/v1/pause", ""), 202);
    let end = |bed: &mut Bed| get(bed, machine, "/v1/state")["console_end"].clone();
    let before = end(&mut bed);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(end(&mut bed), before, "a paused guest went on");
    assert_eq!(get(&mut bed, machine, "/v1/state")["phase"], "paused");
    assert_eq!(post(&mut bed, machine, "/v1/resume", ""), 202);
    bed.run(machine, "kill %1 || kill $!; echo over", SOON).unwrap();
    let complaints =
        bed.run(machine, "dmesg | grep -ci 'soft lockup\\|stall' || true", SOON).unwrap();
    assert_eq!(complaints, "0\n");

    // The driver finds the panic device as ACPI tells of it.
    let device = "cat /sys/bus/acpi/devices/QEMU0001:00/path; cat /proc/ioports | grep -i 0505";
    let device = bed.run(machine, device, SOON).unwrap();
    assert!(device.contains("PEVT") && device.contains("QEMU0001"), "{device}");
    let stay = "cd /proc/sys/kernel; echo 0 > panic; echo 1 > unknown_nmi_panic; echo set";
    bed.run(machine, stay, SOON).unwrap();
    let next = get(&mut bed, machine, "/v1/events")["next"].clone();
    assert_eq!(post(&mut bed, machine, "/v1/power", r#"{"action":"nmi"}"#), 202);
    bed.wait_console(machine, "Kernel panic", SOON).unwrap();
    let target = format!("/v1/events?from={next}");
    let events = get(&mut bed, machine, &target)["events"].clone();
    assert_eq!(events[0]["kind"], "interrupted", "{events}");
    assert_eq!(events[1]["kind"], "guest-panicked", "{events}");
    assert_eq!(get(&mut bed, machine, "/v1/state")["phase"], "panicked");
    assert_eq!(post(&mut bed, machine, "/v1/power", r#"{"action":"reset"}"#), 202);
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, exit::RESET, "{log}");
}

#[test]
fn linux_finds_hyper_v_and_keeps_time_by_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bed, machine) = running(folder.path(), |plan| {
        plan.spec.hyperv = HyperV::On;
        plan.spec.vcpus = 2;
    });
    let said = bed.run(machine, "dmesg | grep -i 'hyper-\\?v\\|hypervisor'", SOON).unwrap();
    for told in [
        "Hypervisor detected: Microsoft Hyper-V",
        // Every privilege of the table in the VMM's `hyperv.rs`, and no other.
        "privilege flags low 0xaff, high 0x0, hints 0xe2c, misc 0x510",
        "Using hypercall for remote TLB flush",
        "Using IPI hypercalls",
        // QEMU's processor has no virtual APICs.
        "Using enlightened APIC",
        "Switched to clocksource hyperv_clocksource_tsc_page",
    ] {
        assert!(said.contains(told), "{told} is not said: {said}");
    }
    // A shell on one processor starts and ends programs on the other: it interrupts the other by hypercall.
    let count = "mount -t tracefs none /sys/kernel/tracing; cd /sys/kernel/tracing; \
        echo 1 > events/hyperv/enable; before=$(awk '/^RES/{print $2+$3}' /proc/interrupts); \
        for i in 1 2 3 4 5 6 7 8; do taskset 1 true; taskset 2 true; sleep 0.1; done; \
        after=$(awk '/^RES/{print $2+$3}' /proc/interrupts); \
        echo $(grep -c hyperv_send_ipi trace) $((after - before))";
    let counted = bed.run(machine, count, SOON).unwrap();
    let counted: Vec<u32> = counted.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(counted[0] > 0 && counted[1] > 0, "sent and got: {counted:?}");
    let passed =
        bed.run(machine, "a=$(date +%s); sleep 3; echo $(($(date +%s) - a))", SOON).unwrap();
    assert!(["3\n", "4\n"].contains(&passed.as_str()), "{passed}");
}

/// Two virtual processors that are busy share one of the host: what each does not get is stolen.
#[test]
fn a_guest_is_told_of_time_that_it_did_not_get() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bed, machine) = running(folder.path(), |plan| {
        plan.spec.vcpus = 2;
        plan.spec.cpu_affinity = vec![vec![0], vec![0]];
    });
    // In ticks of 10 ms (proc(5)): what all processors did for the guest, and what was stolen.
    let busy = "stat() { awk '/^cpu /{print $2+$3+$4, $9}' /proc/stat; }; set -- $(stat); \
        for cpu in 1 2; do taskset $cpu timeout 5 sh -c 'while :; do :; done' & done; sleep 5; wait; \
        echo $* $(stat)";
    let said = bed.run(machine, busy, SOON).unwrap();
    let ticks: Vec<u32> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let (worked, stolen) = (ticks[2] - ticks[0], ticks[3] - ticks[1]);
    println!("{worked} {stolen}");
    assert!(stolen > worked / 2, "{stolen} of {worked} ticks were stolen: {said}");
}

/// A machine has no sleep but the one in which its processors idle: no S3 or S1 is offered, from which
/// nothing here would wake it. The power button wakes it.
#[test]
fn a_guest_that_sleeps_is_woken_by_the_power_button() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bed, machine) = running(folder.path(), |plan| {
        plan.disk("/run/disk");
        plan.vsock(5);
        plan.spec.vcpus = 2;
    });
    assert_eq!(bed.run(machine, "cat /sys/power/state", SOON).unwrap(), "freeze mem disk\n");
    assert_eq!(bed.run(machine, "cat /sys/power/mem_sleep", SOON).unwrap(), "[s2idle]\n");
    let refused = bed.run(machine, "echo standby > /sys/power/state", SOON);
    assert!(refused.unwrap_err().to_string().contains("Invalid argument"));
    // A kernel that sees the press before its own handler did wakes by it and passes it on as well.
    bed.run(machine, guest::DEAF, SOON).unwrap();
    for kind in ["mem", "freeze"] {
        let over = format!("awake again\n{}0", guest::END);
        let awake = |bed: &mut Bed| bed.console(machine).unwrap().matches(&over).count();
        let before = awake(&mut bed);
        bed.type_line(machine, &format!("echo {kind} > /sys/power/state && echo awake again"))
            .unwrap();
        // Long enough for a guest that does not sleep at all, or not for long, to say so.
        std::thread::sleep(ASLEEP);
        assert_eq!(awake(&mut bed), before, "{kind}: the guest does not stay asleep");
        assert_eq!(get(&mut bed, machine, "/v1/state")["phase"], "sleeping", "{kind}");
        // A pause and its end leave it asleep.
        assert_eq!(post(&mut bed, machine, "/v1/pause", ""), 202);
        assert_eq!(post(&mut bed, machine, "/v1/resume", ""), 202);
        assert_eq!(get(&mut bed, machine, "/v1/state")["phase"], "sleeping", "{kind}");
        assert_eq!(post(&mut bed, machine, "/v1/power", r#"{"action":"button"}"#), 202);
        let deadline = std::time::Instant::now() + SOON;
        while awake(&mut bed) == before {
            assert!(std::time::Instant::now() < deadline, "{kind}: the guest does not wake");
            std::thread::sleep(Duration::from_millis(200));
        }
        // Each device works as before.
        let disk =
            "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=64k count=16 2>/dev/null | wc -c";
        assert_eq!(bed.run(machine, disk, SOON).unwrap(), "1048576\n", "{kind}");
        assert_eq!(get(&mut bed, machine, "/v1/state")["phase"], "running", "{kind}");
        assert_eq!(bed.run(machine, "head -c 64 /dev/hwrng | wc -c", SOON).unwrap(), "64\n");
        assert_eq!(bed.run(machine, "nproc", SOON).unwrap(), "2\n");
        let bad =
            bed.run(machine, "dmesg | grep -ci 'lockup\\|stall\\|failed to resume' || true", SOON);
        assert_eq!(bad.unwrap(), "0\n");
    }
    // One that sleeps when its end is near is woken first and asked again, and ends by itself.
    bed.run(machine, guest::HEARS, SOON).unwrap();
    bed.type_line(machine, "echo freeze > /sys/power/state").unwrap();
    std::thread::sleep(ASLEEP);
    let state = get(&mut bed, machine, "/v1/state");
    assert_eq!(state["phase"], "sleeping");
    let at = state["boot_ms"].as_u64().unwrap() + GRACE_MS;
    let deadline = format!(r#"{{"at_boot_ms":{at},"grace_ms":{GRACE_MS}}}"#);
    assert_eq!(bed.call(machine, ("PUT", "/v1/deadline"), &deadline).unwrap().status, 202);
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, exit::POWERED_OFF, "{log}");
    assert_eq!(log.matches("the deadline is near").count(), 1, "{log}");
}
