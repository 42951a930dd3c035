//! How a driver makes queues and deletes them.

use std::sync::atomic::Ordering;

use vmm::sys::memory::GuestRam;

use super::*;

#[test]
fn queues_are_made_and_deleted_in_order() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    driver.pair(1);
    let make = |driver: &mut Driver, opcode, base, dwords: [u32; 2]| {
        let mut request = Request { opcode, prps: (base, 0), ..Request::default() };
        request.dwords[..2].copy_from_slice(&dwords);
        let mut admin = driver.admin.clone();
        let status = driver.command(&mut admin, request).status;
        driver.admin = admin;
        status
    };
    let table = [
        (5, DATA, [15 << 16 | 1, 3], 0x4101),
        (5, DATA, [15 << 16, 3], 0x4101),
        (5, DATA, [15 << 16 | 3, 3], 0x4101),
        (5, DATA, [2, 3], 0x4102),
        (5, DATA, [1024 << 16 | 2, 3], 0x4102),
        (5, DATA, [15 << 16 | 2, 2], 0x4002),
        (5, DATA, [15 << 16 | 2, 3 << 16 | 3], 0x4108),
        (5, DATA + 8, [15 << 16 | 2, 3], 0x4013),
        (5, 0x4000_0000, [15 << 16 | 2, 3], 0x4004),
        (1, DATA, [15 << 16 | 2, 2 << 16 | 1], 0x4100),
        (1, DATA, [15 << 16 | 2, 1], 0x4101),
        (1, DATA, [15 << 16 | 2, 3 << 16 | 1], 0x4101),
        (4, 0, [1, 0], 0x410c),
        (4, 0, [0, 0], 0x4101),
        (4, 0, [2, 0], 0x4101),
        (0, 0, [0, 0], 0x4101),
        (0, 0, [2, 0], 0x4101),
        (0, 0, [1, 0], 0),
        (0, 0, [1, 0], 0x4101),
        (4, 0, [1, 0], 0),
    ];
    let found = table.map(|(opcode, base, dwords, _)| make(&mut driver, opcode, base, dwords));
    assert_eq!(found, table.map(|(.., status)| status));
    let mut again = driver.pair(1);
    assert_eq!(driver.command(&mut again, transfer(READ, 5, 1)).status, 0);
}

/// NVMe 1.4 §5.6: a queue is deleted when all of its commands have ended. A read of a pipe is under way until somebody
/// writes.
#[test]
fn a_queue_goes_after_the_last_of_its_commands() {
    let memory = virtio::ram();
    let (content, far_end) = rustix::pipe::pipe().unwrap();
    let engine = Engine::new(EngineChoice::Best, content.as_fd(), memory.clone(), DEPTH).unwrap();
    if engine.as_fd().is_none() {
        println!(
            "skipped: a queue with a command under way is deleted: this kernel gives no io_uring"
        );
        return;
    }
    let (mut device, shared) = nvme::controller_over(engine, &memory, Access::ReadOnly);
    // It closes before the controller ends, which waits for what is under way.
    let writer = far_end;
    let entries = 64;
    nvme::start(&mut device, &shared, entries);
    let mut admin = Pair::new(0, ASQ, ACQ, entries);
    let mut pair = Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES);
    for request in nvme::creation(1, QUEUES, 1) {
        shared.ring(0, admin.put(&memory, request).1);
        nvme::settle(&mut device);
        assert_eq!(admin.poll(&memory).unwrap().status, 0);
    }
    shared.ring(2, pair.put(&memory, transfer(READ, 0, 1)).1);
    device.turn(Instant::now());
    let mut delete = Request { opcode: 0, ..Request::default() };
    delete.dwords[0] = 1;
    shared.ring(0, admin.put(&memory, delete).1);
    // What is put behind the deletion is not taken any more.
    shared.ring(2, pair.put(&memory, transfer(READ, 0, 1)).1);
    for _ in 0..10 {
        device.turn(Instant::now());
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!((pair.poll(&memory), admin.poll(&memory)), (None, None));
    }
    rustix::io::write(&writer, &[0x5a; 512]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let deleted = loop {
        device.turn(Instant::now());
        // The queue last: what it has then was there when the answer was.
        if let Some(answer) = admin.poll(&memory) {
            break answer;
        }
        assert!(Instant::now() < deadline, "the queue stays");
    };
    let ended: Vec<_> = std::iter::from_fn(|| pair.poll(&memory)).collect();
    assert_eq!((deleted.status, ended.len(), ended[0].status), (0, 1, 0), "{ended:?}");
    let mut read = [0; 512];
    memory.read_slice(&mut read, GuestAddress(DATA)).unwrap();
    assert_eq!(read, [0x5a; 512]);
}

/// A controller over `file` that has one pair of queues.
fn with_a_pair(file: &impl AsFd, memory: &GuestRam) -> (Controller, Arc<Shared>, Pair) {
    let engine = Engine::new(EngineChoice::Plain, file.as_fd(), memory.clone(), DEPTH).unwrap();
    let (mut device, shared) = nvme::controller_over(engine, memory, Access::ReadWrite);
    nvme::start(&mut device, &shared, ENTRIES);
    let mut admin = Pair::new(0, ASQ, ACQ, ENTRIES);
    for request in nvme::creation(1, QUEUES, 1) {
        shared.ring(0, admin.put(memory, request).1);
        nvme::settle(&mut device);
        assert_eq!(admin.poll(memory).unwrap().status, 0);
    }
    (device, shared, Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES))
}

/// Linux tries a flush again that failed, and the host tells of lost writes once.
#[test]
fn no_flush_succeeds_after_one_that_failed() {
    let (memory, file) = (virtio::ram(), nvme::numbered_file());
    let (mut device, shared, mut pair) = with_a_pair(&file, &memory);
    let mut flush = || {
        let request = Request { opcode: FLUSH, namespace: 1, ..Request::default() };
        shared.ring(2, pair.put(&memory, request).1);
        nvme::settle(&mut device);
        pair.poll(&memory).unwrap().status
    };
    assert_eq!(flush(), 0);
    assert_eq!(where_syncs_fail(libc::EIO, &mut flush), 0x280);
    assert_eq!(flush(), 0x280);
}

/// NVMe 1.4 §4.1.2: a completion queue of sixteen entries holds fifteen. Its doorbell alone makes the others go on.
#[test]
fn commands_whose_completions_have_no_room_wait_for_the_doorbell() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    let fifteen = |driver: &mut Driver, pair: &mut Pair| {
        let read = transfer(READ, 7, 1);
        let tail = (0..15).map(|_| pair.put(&driver.machine.ram, read).1).last().unwrap();
        driver.ring(pair, tail);
        wait_for(|| driver.machine.platform.activity.read()[0].requests >= 15);
    };
    fifteen(&mut driver, &mut pair);
    fifteen(&mut driver, &mut pair);
    let ended: Vec<_> = (0..30).map(|_| driver.wait(&mut pair)).collect();
    let expected: Vec<(u16, u16)> = (1..=30).map(|id| (id, 0)).collect();
    let mut found: Vec<(u16, u16)> = ended.iter().map(|done| (done.id, done.status)).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
    assert_eq!(pair.poll(&driver.machine.ram), None);
}

/// The same, turn by turn: the controller waits for the doorbell, which wakes it.
#[test]
fn a_doorbell_that_makes_room_wakes_the_controller() {
    let (memory, file) = (virtio::ram(), nvme::numbered_file());
    let (mut device, shared, mut pair) = with_a_pair(&file, &memory);
    for _ in 0..2 {
        let read = transfer(READ, 7, 1);
        let tail = (0..15).map(|_| pair.put(&memory, read).1).last().unwrap();
        shared.ring(2, tail);
        nvme::settle(&mut device);
    }
    // So far it was woken by commands.
    assert!(shared.kick.read().is_ok());
    let ended = |pair: &mut Pair| std::iter::from_fn(|| pair.poll(&memory)).count();
    assert_eq!(ended(&mut pair), 15);
    shared.ring(3, pair.head());
    assert!(shared.kick.read().is_ok(), "the controller sleeps on");
    nvme::settle(&mut device);
    assert_eq!(ended(&mut pair), 15);
    // Nothing waits for room now.
    shared.ring(3, pair.head());
    assert!(shared.kick.read().is_err());
}

/// As UEFI's driver does, whatever the number of virtual CPUs.
#[test]
fn one_virtual_cpu_has_two_queue_pairs() {
    let mut driver = Driver::off(EngineChoice::Best, &spec(None), 1);
    driver.enable();
    assert_eq!(driver.admin(10, 0, &[7]), (0, 0x0001_0001));
    let mut pairs = [1, 2].map(|index| driver.pair(index));
    let read = pairs.each_mut().map(|pair| driver.command(pair, transfer(READ, 3, 1)).status);
    assert_eq!(read, [0, 0]);
}

/// NVMe 1.4 §7.5.1: without MSI-X the pin is asserted until the driver has taken every completion.
#[test]
fn without_msi_x_the_pin_calls_until_everything_was_taken() {
    let mut driver = Driver::on(EngineChoice::Plain, None);
    let line = Arc::clone(&driver.machine.interrupts.line);
    let is_high = || line.high.load(Ordering::SeqCst);
    let mut pin = [0];
    driver.function.read_config(0x3d, &mut pin);
    assert_eq!(pin, [1]);
    let mut pair = driver.pair(1);
    assert_eq!(line.raised.load(Ordering::SeqCst), 0, "MSI-X is on");

    driver.function.write_config(0x42, &0u16.to_le_bytes());
    for blocks in 1..4 {
        let (_, tail) = pair.put(&driver.machine.ram, transfer(READ, 0, blocks));
        driver.ring(&pair, tail);
    }
    wait_for(&is_high);
    let status = |driver: &mut Driver| {
        let mut status = [0; 2];
        driver.function.read_config(0x06, &mut status);
        u16::from_le_bytes(status) & 1 << 3
    };
    assert_eq!(status(&mut driver), 1 << 3);
    for more in [true, true, false] {
        driver.wait(&mut pair);
        // The last of the three may be posted after the others were taken.
        wait_for(|| is_high() == more);
    }
    assert_eq!(status(&mut driver), 0);

    // Masked, it calls when the mask goes.
    driver.write(0x0c, 4, 1 << 1);
    let (_, tail) = pair.put(&driver.machine.ram, transfer(READ, 0, 1));
    driver.ring(&pair, tail);
    wait_for(|| pair.clone().poll(&driver.machine.ram).is_some());
    assert!(!is_high());
    driver.write(0x10, 4, 1 << 1);
    wait_for(&is_high);

    // A reset of the function is the end of what was posted.
    driver.function.write_config(0x4c + 8, &[0, 0x80]);
    assert!(!is_high());
}
