//! Admin commands that suites look at closely.

use super::*;

/// NVMe 1.4 §5.1: what is aborted ends first, with Command Abort Requested.
#[test]
fn a_request_for_events_is_aborted_and_nothing_else() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut admin = driver.admin.clone();
    let event = Request { opcode: 0x0c, ..Request::default() };
    let (request, _) = admin.put(&driver.machine.ram, event);
    let mut abort = Request { opcode: 8, ..Request::default() };
    abort.dwords[0] = u32::from(request) << 16;
    let (first, tail) = admin.put(&driver.machine.ram, abort);
    driver.ring(&admin, tail);
    let done = [driver.wait(&mut admin), driver.wait(&mut admin)];
    assert_eq!(
        done.map(|done| (done.id, done.status, done.result)),
        [(request, 7, 0), (first, 0, 0)]
    );
    driver.admin = admin;
    // It is gone; there is no such command in a queue that is there; there is no such queue.
    assert_eq!(driver.admin(8, 0, &[u32::from(request) << 16]), (0, 1));
    assert_eq!(driver.admin(8, 0, &[1]).0, 0x4002);
    driver.pair(1);
    assert_eq!(driver.admin(8, 0, &[u32::from(request) << 16 | 1]), (0, 1));
    // As many may wait as before.
    let mut admin = driver.admin.clone();
    let tail = (0..5).map(|_| admin.put(&driver.machine.ram, event).1).last().unwrap();
    driver.ring(&admin, tail);
    assert_eq!(driver.wait(&mut admin).status, 0x4105);
}

/// NVMe 1.4 §5.14 (logs of the controller have no namespace), figure 247 (MDTS, 1 MiB here).
#[test]
fn logs_are_the_controllers_and_no_longer_than_a_transfer() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    for page in 1..=3 {
        for namespace in [0, u32::MAX] {
            assert_eq!(driver.admin(2, namespace, &[127 << 16 | page]).0, 0, "{page}");
        }
        assert_eq!(driver.admin(2, 1, &[127 << 16 | page]).0, 0x4002, "{page}");
        let most = u32::try_from(MAX_TRANSFER / 4 - 1).unwrap();
        let status = |driver: &mut Driver, dwords: u32| {
            driver.admin(2, 0, &[dwords << 16 | page, dwords >> 16]).0
        };
        assert_eq!(status(&mut driver, most), 0, "{page}");
        assert_eq!(status(&mut driver, most + 1), 0x4002, "{page}");
    }
}

/// NVMe 1.4 §4.3: what PRP2 is follows from the length that was asked for. §5.14: behind the end of a log nothing is
/// defined; here nothing is written.
#[test]
fn a_log_that_is_shorter_than_asked_for_goes_to_the_pages_asked_for() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let wrong = [0x7f; 5].map(|opcode| driver.admin(opcode, 0, &[]).0);
    assert_eq!(wrong, [0x4001; 5]);
    let (list, pages) = (DATA + 0x8000, [3, 1, 2].map(|page| DATA + 0x1000 * page));
    let entries = pages.map(u64::to_le_bytes).concat();
    driver.machine.ram.write_slice(&entries, GuestAddress(list)).unwrap();
    driver.machine.ram.write_slice(&[0xee; 0x1000], GuestAddress(pages[0])).unwrap();
    let mut request = Request { opcode: 2, prps: (DATA + 0xf00, list), ..Request::default() };
    request.dwords[0] = ((12 << 10) / 4 - 1) << 16 | 1;
    let mut admin = driver.admin.clone();
    assert_eq!(driver.command(&mut admin, request).status, 0);
    // Entries of 64 bytes, the newest first: four lie in the first page.
    let numbers = [DATA + 0xf00, DATA + 0xfc0, pages[0]].map(|at| driver.memory(at, 1)[0]);
    assert_eq!(numbers, [5, 2, 1]);
    assert_eq!(driver.memory(pages[0] + 0x2ff, 2), [0, 0xee]);
    assert_eq!(driver.memory(list, 24), entries);
}

/// NVMe 1.4 §3.1.5: a reset leaves the places of the admin queues alone, and nothing else.
#[test]
fn a_reset_unmasks_interrupts() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    driver.write(0x0c, 4, 1);
    assert_eq!(driver.read(0x0c, 4), 1);
    driver.write(0x14, 4, 0);
    assert_eq!((driver.read(0x0c, 4), driver.read(0x28, 8)), (0, ASQ));
}

/// Each range of Dataset Management is work for the host: it counts against the limit as one operation.
#[test]
fn each_range_that_is_given_back_has_its_turn() {
    let rate = Rate { per_second: 50, burst: 1 };
    let limit = RateLimit { bytes: None, operations: Some(rate) };
    let mut driver = Driver::on(EngineChoice::Best, Some(limit));
    let mut pair = driver.pair(1);
    let ranges = |count: u32| {
        let mut request =
            Request { opcode: 9, namespace: 1, prps: (DATA, 0), ..Request::default() };
        request.dwords[..2].copy_from_slice(&[count - 1, 4]);
        request
    };
    let range = [[0, 0, 0, 0, 1, 0, 0, 0], [0; 8]].concat();
    driver.machine.ram.write_slice(&range.repeat(11), GuestAddress(DATA)).unwrap();
    assert_eq!(driver.command(&mut pair, ranges(1)).status, 0);
    let start = Instant::now();
    assert_eq!(driver.command(&mut pair, ranges(11)).status, 0);
    assert!(start.elapsed() >= Duration::from_millis(180), "{:?}", start.elapsed());
}

/// A host that gives back no space, as a disk without discard (fallocate(2), EOPNOTSUPP; a file of procfs has no such
/// call at all): the driver's hint is not taken, and zeroes are written, which fails here, too.
#[test]
fn where_no_space_is_given_back_a_hint_succeeds() {
    let memory = virtio::ram();
    let file =
        fs::OpenOptions::new().read(true).write(true).open("/proc/self/oom_score_adj").unwrap();
    let engine = Engine::new(EngineChoice::Plain, file.as_fd(), memory.clone(), DEPTH).unwrap();
    let (mut device, shared) = nvme::controller_over(engine, &memory, Access::ReadWrite);
    nvme::start(&mut device, &shared, 64);
    let mut admin = Pair::new(0, ASQ, ACQ, 64);
    let mut pair = Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES);
    for request in nvme::creation(1, QUEUES, 1) {
        shared.ring(0, admin.put(&memory, request).1);
        nvme::settle(&mut device);
        assert_eq!(admin.poll(&memory).unwrap().status, 0);
    }
    memory
        .write_slice(&[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], GuestAddress(DATA))
        .unwrap();
    let mut hint = Request { opcode: 9, namespace: 1, prps: (DATA, 0), ..Request::default() };
    hint.dwords[1] = 4;
    let mut zeroes = Request { opcode: 8, namespace: 1, ..Request::default() };
    zeroes.dwords[2] = 1 << 25;
    let status = [hint, zeroes].map(|request| {
        shared.ring(2, pair.put(&memory, request).1);
        nvme::settle(&mut device);
        pair.poll(&memory).unwrap().status
    });
    assert_eq!(status, [0, 6]);
}
