//! Replays the fuzz corpora through the functions that the fuzz targets call.

use std::path::Path;

use gateway::{api::routes, directory::Directory};
use types::{ids::NodeId, node::Offer, units::UnixSeconds};

fn replay(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = std::fs::read_dir(&folder).expect("a corpus").flatten().collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        run(&std::fs::read(file.path()).expect("a corpus file"));
    }
}

#[test]
fn routes_are_found_or_refused() {
    replay("route", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let (method, path) = text.split_once('\n').unwrap_or((&text, ""));
        let _ = routes::route(method, path);
    });
}

#[test]
fn offers_are_listed_under_their_senders_name_and_not_for_ever() {
    replay("offer", |json| {
        let Ok(offer) = serde_json::from_slice::<Offer>(json) else { return };
        let (mut directory, now) = (Directory::default(), UnixSeconds(1_000_000));
        let sender = NodeId::from_bytes([1; 32]);
        if directory.handle_offer(now, sender, offer).is_ok() {
            assert!(directory.offer(now, sender).is_some());
        }
        assert!(directory.offers(now.plus(600)).is_empty());
    });
}
