//! A node gets a release from another node: real metadata, two real overlays, no mirror.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{collections::BTreeMap, fs, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use ed25519_dalek::SigningKey;
use jiff::Timestamp;
use overlay::{Inbox, Overlay, OverlayConfig, Role};
use types::{forward::StreamHeader, ids::NodeId};
use update::{
    channel::Release,
    disk::{esp, gpt::BlockSize, layout},
    release::{KeyFile, Plan, Repository, Signer, Staging, TopKeys},
    shell::{Checked, Checker, Fetcher, Sink, SinkError, Source, Span},
    slots::{Contents, Place, Program, firmware},
};

use super::{
    fetch::STORE,
    partition::Partition,
    places::{Places, nodes},
    shelf::Shelf,
};
use crate::tasks::frames;

const RELEASE: Release = Release { major: 1, minor: 1, patch: 0 };
const BEFORE: Release = Release { major: 1, minor: 0, patch: 0 };

/// A repository with one release; returns its root metadata.
fn publish(folder: &Path, program: &[u8]) -> Vec<u8> {
    let (uki, sbom) = (folder.join("holdfast.efi"), folder.join("sbom"));
    fs::write(&uki, program).unwrap();
    fs::write(&sbom, b"{}").unwrap();
    let file = KeyFile::generate(b"p").unwrap();
    let key = file.public().unwrap();
    let signer: Box<dyn Signer> = file.open(b"p").unwrap();
    let now = Timestamp::now();
    let one = (vec![key.clone()], 1);
    let keys = TopKeys { root: one.clone(), targets: one.clone(), online: vec![key] };
    let channels = BTreeMap::from([("stable".to_owned(), one)]);
    let repository = Repository::open(&folder.join("repository")).unwrap();
    repository.init(&Plan { keys, channels }, now).unwrap();
    repository.sign(signer.as_ref()).unwrap();
    repository.publish(std::slice::from_ref(&signer), 2, now).unwrap();
    let files = BTreeMap::from([("uki".to_owned(), uki), ("sbom".to_owned(), sbom)]);
    let channel = "stable".to_owned();
    let staging = Staging { channel, release: RELEASE, files, minimum: None, waves: None };
    repository.stage(&staging, now).unwrap();
    repository.sign(signer.as_ref()).unwrap();
    repository.publish(&[signer], 2, now).unwrap();
    fs::read(folder.join("repository/metadata/1.root.json")).unwrap()
}

async fn overlay(byte: u8, seeds: Vec<(NodeId, SocketAddr)>) -> (Overlay, Inbox) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let key = SigningKey::from_bytes(&[byte; 32]);
    Overlay::start(OverlayConfig { key, listen, seeds, role: Role::Provider }).await.unwrap()
}

/// Serves what other nodes ask for, as the agent does.
async fn serve(mut inbox: Inbox, shelf: Arc<Shelf>) {
    while let Some(mut inbound) = inbox.streams.recv().await {
        let header = frames::read(&mut inbound.stream).await.unwrap();
        let StreamHeader::Release { path, from, to } = header else { panic!("{header:?}") };
        shelf.serve(inbound.stream, &path, Span { from, to }).await;
    }
}

/// A node's partition with a program in slot A.
fn partition(folder: &Path, program: &[u8]) -> Partition {
    let device = folder.join("esp");
    let file = fs::File::options().create_new(true).read(true).write(true).open(&device).unwrap();
    file.set_len(layout::ESP_BYTES).unwrap();
    esp::write(&file, BlockSize::B512, program, &[esp::SLOT_A]).unwrap();
    let id = "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap();
    let place = firmware::Partition { number: 1, first: 0, blocks: 1, id };
    Partition { device, place, from: None }
}

fn checker(root: &[u8], store: &Path, sources: Vec<Source>) -> Checker {
    let (store, root) = (store.to_owned(), root.to_vec());
    let (channel, node) = ("stable".to_owned(), vec![7; 32]);
    Checker { store, root, sources, channel, node, floor: None }
}

async fn check(checker: &Checker, places: Option<Arc<Places>>) -> Checked {
    let fetcher = || match &places {
        Some(places) => Fetcher::new(None).with_elsewhere(places.clone()),
        None => Fetcher::new(None),
    };
    checker.check(&fetcher, BEFORE, Timestamp::now()).await.unwrap()
}

struct Kept(Vec<u8>);

impl Sink for Kept {
    fn take(&mut self, bytes: &[u8]) -> Result<(), SinkError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn restart(&mut self) {
        self.0.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_comes_from_another_node() {
    let folder = tempfile::tempdir().unwrap();
    let program: Vec<u8> = (0..700_000_u32).map(|at| at.to_le_bytes()[1]).collect();
    let root = publish(folder.path(), &program);

    // The first node knows the repository, and holds the release in a slot.
    let mirror = Source::below(&format!("file://{}/repository", folder.path().display()));
    let state = folder.path().join("state");
    drop(check(&checker(&root, &state.join(STORE), vec![mirror]), None).await);
    let shelf = Shelf::new(&state);
    shelf.open(partition(folder.path(), &program));
    let mut contents = Contents::default();
    contents.set(Place::ALL[0], Some(Program::of(&program)));
    shelf.stock(&contents);
    let (first, inbox) = overlay(1, Vec::new()).await;
    tokio::spawn(serve(inbox, Arc::new(shelf)));

    // The second has nothing but the root that its configuration says.
    let (second, _inbox) = overlay(2, vec![(first.node_id(), first.local_addr())]).await;
    let joined = async {
        while second.members().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), joined).await.unwrap();
    let sources = nodes(&second.members(), 0);
    assert_eq!(sources, [Source::below(&format!("node://{}", first.node_id()))]);
    let places = Arc::new(Places::new(second.clone(), Path::new("/nonexistent")));
    let store = folder.path().join("second");
    let mut checked = check(&checker(&root, &store, sources.clone()), Some(places)).await;
    let offered = checked.program.clone().unwrap();
    let bases: Vec<String> = sources.into_iter().map(|source| source.targets).collect();
    let mut kept = Kept(Vec::new());
    checked.session.stream(&offered.target, &bases, &mut kept).await.unwrap().unwrap();
    assert!(kept.0 == program);
    // What the first node does not have it says it has not.
    let sbom = checked.session.look_up("stable/1.1.0/sbom").await.unwrap();
    let refused = checked.session.stream(&sbom, &bases, &mut kept).await.unwrap();
    assert!(refused.is_err());
}
