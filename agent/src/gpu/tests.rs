use std::{
    io::{self, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use types::gpu::ReadingError;

use super::{
    guests::{GuestError, GuestReadings},
    show::{self, Told},
    *,
};
use crate::local::exposition::Exposition;

/// A document in the form that an H200's has, written down by hand: no GPU said it.
pub(crate) const RECORDED: &[u8] = include_bytes!("../../tests/data/h200.json");

pub(crate) fn recorded() -> GpuReading {
    GpuReading::parse(RECORDED).expect("the recorded document")
}

/// Tells what a document says, from its second GPU on that it does not answer.
#[derive(Clone)]
struct Written {
    told: GpuReading,
    count: u32,
    failures: Vec<Xid>,
    gone: bool,
}

impl Library for Written {
    fn origin(&self) -> Origin {
        Origin::Recorded
    }

    fn versions(&self) -> Result<(String, String), LibraryError> {
        Ok((self.told.driver.clone(), self.told.cuda.clone()))
    }

    fn count(&self) -> Result<u32, LibraryError> {
        Ok(self.count)
    }

    fn gpu(&self, index: u32) -> Result<Gpu, LibraryError> {
        if self.gone {
            return Err(LibraryError::Gone { reason: "unloaded".to_owned() });
        }
        let found = self.told.gpus.iter().find(|gpu| gpu.index == index).cloned();
        found.ok_or(LibraryError::Gpu { index, reason: "lost".to_owned() })
    }

    fn failures(&mut self) -> Vec<Xid> {
        std::mem::take(&mut self.failures)
    }
}

fn written() -> Written {
    Written { told: recorded(), count: 2, failures: Vec::new(), gone: false }
}

/// Reads what `library` tells at this time, as it is then.
fn reader(
    library: &std::cell::RefCell<Written>,
) -> Reader<Written, impl FnMut() -> Result<Written, LibraryError>> {
    Reader::new(|| Ok(library.borrow().clone()))
}

#[test]
fn a_gpu_that_is_lost_does_not_silence_the_others() {
    let library = written().into();
    let mut reader = reader(&library);
    let reading = reader.read(UnixSeconds(7)).expect("read");
    assert_eq!(reading.gpus.len(), 2);
    assert_eq!(reading.gpus[0], recorded().gpus[0]);
    let silent = Gpu { index: 1, error: Some("lost".to_owned()), ..Gpu::default() };
    assert_eq!(reading.gpus[1], silent);
    let bytes = serde_json::to_vec(&reading).expect("written");
    assert_eq!(GpuReading::parse(&bytes), Ok(reading));
}

#[test]
fn a_gpu_that_falls_silent_keeps_its_name() {
    let library = written().into();
    let mut reader = reader(&library);
    reader.read(UnixSeconds(7)).expect("read");
    reader.library.as_mut().expect("loaded").told.gpus.clear();
    let reading = reader.read(UnixSeconds(8)).expect("read");
    let (gpu, before) = (&reading.gpus[0], &recorded().gpus[0]);
    assert_eq!((&gpu.uuid, &gpu.address), (&before.uuid, &before.address));
    assert_eq!((gpu.error.as_deref(), gpu.power_mw), (Some("lost"), None));
    assert_eq!(show::one(gpu), "0 NVIDIA H200: no answer: lost");
    let mut out = Exposition::default();
    show::metrics(&mut out, &[Told { machine: "", reading: &reading }]);
    let text = out.finish();
    assert!(text.contains("gpu_answers{machine=\"\",gpu=\"0\"} 0\n"), "{text}");
}

#[test]
fn a_library_whose_driver_went_is_loaded_anew() {
    let library = Written { gone: true, count: 1, ..written() }.into();
    let mut reader = reader(&library);
    let xid = Xid { at: UnixSeconds(5), gpu: "GPU-1".to_owned(), code: 79 };
    library.borrow_mut().failures.push(xid.clone());
    assert!(matches!(reader.read(UnixSeconds(7)), Err(LibraryError::Gone { .. })));
    assert!(reader.library.is_none(), "it is still loaded");
    *library.borrow_mut() = written();
    let reading = reader.read(UnixSeconds(8)).expect("read");
    assert_eq!(reading.gpus[0], recorded().gpus[0]);
    // What happened before is not forgotten with it.
    assert_eq!(reading.xids, [xid]);
}

#[test]
fn failures_are_remembered_up_to_a_bound() {
    let library = written().into();
    let mut reader = reader(&library);
    reader.read(UnixSeconds(0)).expect("read");
    for at in 0..=200 {
        let xid = |code| Xid { at: UnixSeconds(at), gpu: format!("GPU-{at}"), code };
        reader.library.as_mut().expect("loaded").failures = vec![xid(31), xid(79)];
        let reading = reader.read(UnixSeconds(at + 10)).expect("read");
        assert!(reading.xids.len() <= MAX_XIDS);
        let codes: Vec<_> = reading.xids.iter().rev().take(2).map(|xid| xid.code).collect();
        assert_eq!(codes, [79, 31], "a burst is told whole");
        assert_eq!(reading.xids.last().map(|xid| xid.at.0), Some(at), "when it was");
    }
}

#[test]
fn people_read_it_in_a_line() {
    let reading = recorded();
    let line = show::one(&reading.gpus[0]);
    let wanted = "0 NVIDIA H200: 87 % busy, 92.0 GiB of 140.4 GiB, 61 C, 612 W, 1980 MHz";
    assert_eq!(line, wanted);
    let lines = show::lines(&reading).join("\n");
    for wanted in [
        "1 of 2 NVLinks work",
        "cannot be replaced",
        "when the GPU is reset",
        "sw-power-cap",
        "divided into 1 parts",
        "Xid 94",
    ] {
        assert!(lines.contains(wanted), "{wanted} is not in\n{lines}");
    }
}

#[test]
fn prometheus_reads_who_says_what() {
    let reading = recorded();
    let mut out = Exposition::default();
    show::metrics(&mut out, &[Told { machine: "m1", reading: &reading }]);
    let text = out.finish();
    let gpu = "machine=\"m1\",gpu=\"0\"";
    let uuid = "GPU-00000000-0000-0000-0000-000000000001";
    let address = "address=\"00000000:02:00.0\",driver=\"535.261.03\"";
    for line in [
        format!("holdfast_gpu_info{{{gpu},uuid=\"{uuid}\",model=\"NVIDIA H200\",{address}}} 1"),
        format!("holdfast_gpu_power_watts{{{gpu}}} 612.345"),
        format!("holdfast_gpu_clock_hertz{{{gpu}}} 1980000000"),
        format!("holdfast_gpu_nvlinks{{{gpu}}} 1"),
        format!("holdfast_gpu_memory_temperature_celsius{{{gpu}}} 74"),
        format!("holdfast_gpu_rows_uncorrected{{{gpu}}} 2"),
        format!("holdfast_gpu_rows_failed{{{gpu}}} 1"),
        format!("holdfast_gpu_nvlink_errors_total{{{gpu},kind=\"crc\"}} 3"),
        format!("holdfast_gpu_xids{{{gpu},xid=\"94\"}} 1"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn errors_that_no_link_counts_are_not_told() {
    let mut reading = recorded();
    let text = |reading: &GpuReading| {
        let mut out = Exposition::default();
        show::metrics(&mut out, &[Told { machine: "", reading }]);
        out.finish()
    };
    let kind =
        |kind: &str| format!("gpu_nvlink_errors_total{{machine=\"\",gpu=\"0\",kind=\"{kind}\"}}");
    assert!(text(&reading).contains(&format!("{} 0", kind("replay"))));
    reading.gpus[0].nvlinks[0].replays = None;
    assert!(!text(&reading).contains(&kind("replay")));
    assert!(text(&reading).contains(&format!("{} 3", kind("crc"))));
    reading.gpus[0].nvlinks[0].recoveries = None;
    reading.gpus[0].nvlinks[0].crc_errors = None;
    assert!(!text(&reading).contains("gpu_nvlink_errors_total"));
    assert!(text(&reading).contains("gpu_nvlinks{machine=\"\",gpu=\"0\"} 1"));
}

#[test]
fn guests_are_heard_within_bounds() {
    let readings = GuestReadings::default();
    readings.take(100_001, RECORDED).expect("taken");
    let (age, reading) = readings.newest(100_001).expect("kept");
    assert_eq!((reading, age.as_secs()), (recorded(), 0));
    assert!(readings.newest(100_002).is_none());
    assert!(matches!(readings.take(100_001, RECORDED), Err(GuestError::TooOften)));
    assert!(matches!(readings.take(100_002, io::repeat(b' ')), Err(GuestError::TooLarge)));
    let refusal = readings.take(100_002, &b"{}"[..]);
    let document = |error: &GuestError| {
        matches!(error, GuestError::Guest { source: ReadingError::Document { .. } })
    };
    assert!(refusal.as_ref().is_err_and(document), "{refusal:?}");
}

/// Waits until something is so.
fn soon<T>(what: impl Fn() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(Instant::now() < deadline, "it does not become so");
        std::thread::yield_now();
    }
}

#[test]
fn a_guest_that_hangs_keeps_no_other_from_being_heard() {
    let readings = GuestReadings::default();
    let speak = |cid| {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        readings.hear(cid, theirs.into()).map(|()| ours)
    };
    let silent = [speak(100_001).expect("a place"), speak(100_001).expect("a place")];
    assert!(matches!(speak(100_001), Err(GuestError::Hurry)));
    let mut other = speak(100_002).expect("a place");
    other.write_all(RECORDED).expect("written");
    drop(other);
    soon(|| readings.newest(100_002));
    // Who hangs up gives its place back.
    drop(silent);
    drop(soon(|| speak(100_001).ok()));
    let many: Vec<_> = (0..7).flat_map(|cid| [speak(cid), speak(cid)]).collect();
    assert!(many.iter().all(Result::is_ok));
    let more: Vec<_> = (7..10).map(speak).collect();
    assert!(matches!(more.last(), Some(Err(GuestError::Busy))));
}

#[test]
fn why_a_reading_was_not_taken_is_told() {
    const LIFE: Duration = Duration::from_secs(3600);
    let readings = GuestReadings::default();
    assert_eq!(readings.refused(100_001, LIFE), None);
    let refused = |said: &[u8], count| {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        readings.hear(100_001, theirs.into()).expect("a place");
        ours.write_all(said).expect("written");
        drop(ours);
        soon(|| readings.refused(100_001, LIFE).filter(|refused| refused.count == count)).reason
    };
    let reason = refused(b"{\"version\":2}", 1);
    assert!(reason.contains("version 2; this release reads version 1"), "{reason}");
    let reason = refused(b"{}", 2);
    assert!(reason.contains("missing field `version`"), "{reason}");
    // What its context id's last owner said is not its word.
    assert_eq!(readings.refused(100_001, Duration::ZERO), None);
    assert_eq!(readings.refused(100_001, LIFE), None);
    assert_eq!(readings.refused(100_002, LIFE), None);
}

#[test]
fn refusals_that_are_remembered_are_bounded() {
    let readings = GuestReadings::default();
    (0..1000).for_each(|cid| readings.refuse(cid, &GuestError::TooOften));
    let kept = (0..1000).filter(|cid| readings.refused(*cid, Duration::MAX).is_some());
    assert_eq!(kept.collect::<Vec<_>>(), (1000 - 256..1000).collect::<Vec<_>>());
}
