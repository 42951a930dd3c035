use vm_memory::GuestMemoryMmap;

use super::*;

const RULES: Rules =
    Rules { sectors: 100, access: Access::ReadWrite, discard: Support::Yes, zero: Support::Yes };
const STATUS: u64 = 0x8000;

fn ram() -> GuestRam {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).expect("memory")
}

fn segment(address: u64, length: u32) -> Segment {
    Segment { address: GuestAddress(address), length }
}

/// Parses a request with this header, these readable and writable parts, and a status byte.
fn parsed(
    kind: u32,
    sector: u64,
    readable: &[Segment],
    writable: &[Segment],
    rules: Rules,
) -> Work {
    let ram = ram();
    write_header(&ram, 0x1000, kind, sector);
    let chain = Chain {
        head: 3,
        readable: [&[segment(0x1000, 16)], readable].concat(),
        writable: [writable, &[segment(STATUS, 1)]].concat(),
    };
    let request = parse(chain, &ram, &rules).expect("a status");
    assert_eq!((request.head, request.status), (3, GuestAddress(STATUS)));
    request.work
}

fn write_header(ram: &GuestRam, at: u64, kind: u32, sector: u64) {
    ram.write_obj(kind, GuestAddress(at)).expect("inside");
    ram.write_obj(0u32, GuestAddress(at + 4)).expect("inside");
    ram.write_obj(sector, GuestAddress(at + 8)).expect("inside");
}

const FAILED: Work = Work::Answer(Status::Failed);
const UNSUPPORTED: Work = Work::Answer(Status::Unsupported);

#[test]
fn reads_and_writes_name_bytes_of_the_file() {
    let data = segment(0x2000, 1024);
    let read = parsed(0, 98, &[], &[data], RULES);
    assert_eq!(read, Work::Read { offset: 98 * 512, into: vec![data] });
    let write = parsed(1, 0, &[data], &[], RULES);
    assert_eq!(write, Work::Write { offset: 0, from: vec![data] });
}

#[test]
fn transfers_past_the_end_fail() {
    let two = segment(0x2000, 1024);
    let table = [(99, two), (100, two), (u64::MAX, two), (u64::MAX / 512, two), (1 << 55, two)];
    assert_eq!(table.map(|(sector, data)| parsed(0, sector, &[], &[data], RULES)), [FAILED; 5]);
    assert_eq!(table.map(|(sector, data)| parsed(1, sector, &[data], &[], RULES)), [FAILED; 5]);
}

#[test]
fn transfers_of_no_or_broken_sectors_fail() {
    let table = [segment(0x2000, 511), segment(0x2000, 513), segment(0x2000, 1)];
    assert_eq!(table.map(|data| parsed(0, 0, &[], &[data], RULES)), [FAILED; 3]);
    assert_eq!(parsed(0, 0, &[], &[], RULES), FAILED);
    assert_eq!(parsed(1, 0, &[], &[], RULES), FAILED);
}

#[test]
fn lengths_that_add_up_to_more_than_32_bits_fail() {
    let huge = [segment(0, u32::MAX), segment(0, u32::MAX), segment(0, u32::MAX)];
    assert_eq!(parsed(0, 0, &[], &huge, RULES), FAILED);
}

#[test]
fn a_read_only_disk_takes_no_change() {
    let rules = Rules { access: Access::ReadOnly, ..RULES };
    assert_eq!(parsed(1, 0, &[segment(0x2000, 512)], &[], rules), FAILED);
    assert_eq!(parsed(11, 0, &[segment(0x3000, 16)], &[], rules), FAILED);
    assert_eq!(parsed(13, 0, &[segment(0x3000, 16)], &[], rules), FAILED);
    assert_eq!(parsed(4, 0, &[], &[], rules), Work::Flush);
}

#[test]
fn unknown_requests_are_not_supported() {
    assert_eq!(
        [2, 3, 5, 10, 14, u32::MAX].map(|kind| parsed(kind, 0, &[], &[], RULES)),
        [UNSUPPORTED; 6]
    );
    let rules = Rules { discard: Support::No, zero: Support::No, ..RULES };
    assert_eq!(
        [11, 13].map(|kind| parsed(kind, 0, &[segment(0x3000, 16)], &[], rules)),
        [UNSUPPORTED; 2]
    );
}

/// Parses a discard or write-zeroes of one range.
fn range_work(kind: u32, sector: u64, count: u32, flags: u32, length: u32) -> Work {
    let ram = ram();
    write_header(&ram, 0x1000, kind, 0);
    ram.write_obj(sector, GuestAddress(0x1010)).expect("inside");
    ram.write_obj(count, GuestAddress(0x1018)).expect("inside");
    ram.write_obj(flags, GuestAddress(0x101c)).expect("inside");
    // Header and range in one descriptor, and the status behind an empty payload.
    let chain = Chain {
        head: 0,
        readable: vec![segment(0x1000, 16 + length)],
        writable: vec![segment(STATUS, 1)],
    };
    parse(chain, &ram, &RULES).expect("a status").work
}

#[test]
fn ranges_are_checked_like_transfers() {
    let whole = Work::Discard { offset: 0, length: 51200 };
    assert_eq!(range_work(11, 0, 100, 0, 16), whole);
    let zero = Work::Zero { offset: 512, length: 512, unmap: true };
    assert_eq!(range_work(13, 1, 1, 1, 16), zero);
    let outside = [(0, 101), (100, 1), (u64::MAX, 1), (1 << 55, 1), (0, u32::MAX), (1, 1 << 21)];
    assert_eq!(outside.map(|(sector, count)| range_work(11, sector, count, 0, 16)), [FAILED; 6]);
}

#[test]
fn ranges_have_one_segment_and_known_flags() {
    assert_eq!(range_work(11, 0, 1, 1, 16), UNSUPPORTED);
    assert_eq!(range_work(13, 0, 1, 2, 16), UNSUPPORTED);
    assert_eq!([0, 15, 17, 32].map(|length| range_work(11, 0, 1, 0, length)), [FAILED; 4]);
    assert_eq!(range_work(11, 5, 0, 0, 16), Work::Answer(Status::Done));
}

#[test]
fn descriptors_may_cut_the_request_anywhere() {
    let ram = ram();
    write_header(&ram, 0x1000, 1, 7);
    let chain = Chain {
        head: 0,
        readable: vec![segment(0x1000, 3), segment(0x1003, 12), segment(0x100f, 513)],
        writable: vec![segment(STATUS - 4, 5)],
    };
    let request = parse(chain, &ram, &RULES).expect("a status");
    assert_eq!(request.status, GuestAddress(STATUS));
    assert_eq!(request.work, Work::Write { offset: 7 * 512, from: vec![segment(0x1010, 512)] });
}

#[test]
fn a_short_or_misplaced_header_fails() {
    let ram = ram();
    let work = |readable| {
        let chain = Chain { head: 0, readable, writable: vec![segment(STATUS, 1)] };
        parse(chain, &ram, &RULES).expect("a status").work
    };
    assert_eq!(work(vec![]), FAILED);
    assert_eq!(work(vec![segment(0x1000, 15)]), FAILED);
    assert_eq!(work(vec![segment(0xfff8, 16)]), FAILED);
    assert_eq!(work(vec![segment(u64::MAX - 7, 16)]), FAILED);
}

#[test]
fn without_room_for_a_status_the_queue_is_broken() {
    let ram = ram();
    let refusal = |writable| {
        let chain = Chain { head: 9, readable: vec![segment(0x1000, 16)], writable };
        parse(chain, &ram, &RULES).err()
    };
    assert_eq!(refusal(vec![]), Some(RequestError::NoStatus { head: 9 }));
    let outside = Some(RequestError::StatusOutside { head: 9, address: 0x10000 });
    assert_eq!(refusal(vec![segment(0x10000, 1)]), outside);
    assert_eq!(refusal(vec![segment(u64::MAX, 2)]), Some(RequestError::NoStatus { head: 9 }));
}
