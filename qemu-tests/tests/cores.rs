//! Two machines never run on one core at the same time: core scheduling, on a host whose cores have two threads
//! each. On the bed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use qemu_tests::bed::{Bed, BedOptions, Plan, protocol::Thread};
use types::vm::CoreScheduling;

#[path = "../../vmm/tests/common/pvh.rs"]
mod pvh;

/// How long a VMM may take to its threads.
const SOON: Duration = Duration::from_secs(60);
/// `hlt` again and again.
const IDLE: &[u8] = &[0xf4, 0xeb, 0xfd];

fn host(folder: &Path) -> Bed {
    let kernel = folder.join("kernel");
    std::fs::write(&kernel, pvh::elf(IDLE)).unwrap();
    let mut options = BedOptions::default();
    options.files.push(("guest/kernel".to_owned(), kernel));
    let processors = ["-smp", "4,sockets=1,cores=2,threads=2,maxcpus=4"];
    options.host.arguments = processors.map(str::to_owned).to_vec();
    let mut bed = Bed::start(folder, options).unwrap();
    assert_eq!(bed.text("/sys/devices/system/cpu/smt/active").unwrap().trim(), "1");
    bed
}

/// Starts a machine with two processors and returns the threads of its process, once both are there.
fn start(bed: &mut Bed, number: u8, scheduling: CoreScheduling) -> Vec<Thread> {
    let known: BTreeSet<u32> = bed.threads().unwrap().iter().map(|thread| thread.process).collect();
    let mut plan = Plan::linux_alone(number, "/guest/kernel", "");
    plan.spec.vcpus = 2;
    plan.spec.core_scheduling = scheduling;
    let machine = bed.launch(&plan).unwrap();
    let deadline = Instant::now() + SOON;
    loop {
        let threads = bed.threads().unwrap();
        let new = threads.iter().filter(|thread| !known.contains(&thread.process));
        let second = new.clone().find(|thread| thread.name == "vcpu1").map(|thread| thread.process);
        if let Some(process) = second {
            return new.filter(|thread| thread.process == process).cloned().collect();
        }
        let log = bed.log(machine).unwrap();
        assert!(Instant::now() < deadline, "no second processor: {threads:?}, {log}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn each_machine_has_its_cores_to_itself() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = host(folder.path());
    let cookies = |threads: Vec<Thread>| {
        assert!(threads.len() > 3, "{threads:?}");
        threads.into_iter().map(|thread| thread.cookie).collect::<BTreeSet<_>>()
    };
    let own = CoreScheduling::Own;
    let [one, other] = [1, 2].map(|number| cookies(start(&mut bed, number, own)));
    // All threads of a machine have the same, and no other has it.
    assert_eq!((one.len(), other.len()), (1, 1), "{one:?} {other:?}");
    assert!(one.is_disjoint(&other) && !one.contains(&0) && !other.contains(&0));
    let shared = cookies(start(&mut bed, 3, CoreScheduling::Shared));
    assert_eq!(shared, BTreeSet::from([0]));
    let hosts = bed.threads().unwrap().into_iter().filter(|thread| thread.process == 1);
    assert_eq!(hosts.map(|thread| thread.cookie).collect::<BTreeSet<_>>(), BTreeSet::from([0]));
}
