//! Replays the fuzz corpora through the functions that the fuzz targets call.

use std::path::Path;

use lease::hardware::{Attach, Hardware};
use types::node::MachineShape;

fn replay(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = std::fs::read_dir(&folder).expect("a corpus").flatten().collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        run(&std::fs::read(file.path()).expect("a corpus file"));
    }
}

#[test]
fn envelopes() {
    replay("envelope", |bytes| {
        let _ = lease::document::Envelope::from_json(bytes).map(|e| e.unverified_lease().is_ok());
    });
}

#[test]
fn leases() {
    replay("lease", |bytes| {
        let read = lease::document::Lease::from_bytes(bytes);
        assert!(
            read.is_err() || read.is_ok_and(|lease| lease.to_bytes().is_ok_and(|b| b == bytes))
        );
    });
}

#[test]
fn receipts() {
    replay("receipts", |bytes| {
        if let Ok(answer) = serde_json::from_slice::<lease::api::Receipts>(bytes) {
            answer.receipts.iter().for_each(|signed| drop(lease::metering::verify(signed)));
        }
    });
}

#[test]
fn signatures() {
    replay("signature_fields", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let (input, signature) = text.split_once('\n').unwrap_or((&text, ""));
        let _ = lease::request::parse(input, signature);
    });
}

#[test]
fn attestation() {
    let understood = std::cell::Cell::new(0);
    replay("attestation", |bytes| {
        understood.set(understood.get() + u32::from(lease::attestation::everything(bytes)));
    });
    assert_eq!(understood.get(), 1, "one file is whole evidence");
}

#[test]
fn firmware_logs() {
    let understood = std::cell::Cell::new(0);
    replay("firmware_log", |bytes| {
        understood.set(understood.get() + u32::from(lease::attestation::judge_log(bytes)));
    });
    assert_eq!(understood.get(), 3, "three files are whole logs");
}

#[test]
fn certificates() {
    let vouched = std::cell::Cell::new(0);
    replay("certificate", |bytes| {
        vouched.set(vouched.get() + u32::from(lease::attestation::judge_certificate(bytes)));
    });
    assert_eq!(vouched.get(), 3, "in three files the authority vouches for the TPM");
}

#[test]
fn hardware() {
    replay("hardware", |bytes| {
        if let Ok((shape, hardware)) = serde_json::from_slice::<(MachineShape, Hardware)>(bytes)
            && hardware.check(&shape).is_ok()
        {
            assert!(hardware.own_disk(&shape) <= shape.disk_mib);
            let later = hardware.plugged_later.len();
            assert!(hardware.cold_devices(&shape).len() + later <= shape.devices.len());
        }
        if let Ok(wanted) = serde_json::from_slice::<Attach>(bytes)
            && wanted.check().is_ok()
        {
            let id = wanted.id();
            assert!(!id.is_empty() && !id.contains('/') && !id.starts_with(".."));
            assert!(id.len() <= 20);
        }
    });
}
