//! Where foreign bytes enter the overlay, for the fuzz targets and for the replay of their
//! corpora.

#![allow(dead_code, reason = "each fuzz target uses one of these")]

use std::time::Duration;

use overlay::{
    Role, SigningKey,
    identity::Identity,
    membership::{Limits, LinkId, Membership, Settings, Side, Strict},
    sealed::{self, Opener, Purpose},
    session::Session,
    tunnel::TunnelReceiver,
    wire::{Answer, Hello, Letter, Opening},
};

fn identity(seed: u8) -> Identity {
    Identity::new(SigningKey::from_bytes(&[seed; 32]))
}

/// A link's bytes, from the first one on, as far as a neighbour can bring them.
pub(crate) fn link(bytes: &[u8]) {
    let now = Duration::from_secs(1);
    let mut session = Session::new(now);
    let fault = session.handle_bytes(now, bytes).is_err();
    let settings = Settings {
        role: Role::Provider,
        limits: Limits::for_role(Role::Provider),
        addresses: Vec::new(),
        seeds: Vec::new(),
        epoch: 1,
        seed: 1,
    };
    let mut core = Membership::new(identity(1), settings, Box::new(Strict));
    let observed = ([192, 0, 2, 1], 4000).into();
    let hello = Hello { role: Role::Provider, neighbours: 0, observed };
    core.handle_link_up(now, LinkId(1), identity(2).id(), (Side::Accepted, hello));
    while let Some(frame) = session.poll_frame().filter(|_| !fault) {
        if core.handle_frame(now, LinkId(1), frame).is_err() {
            return;
        }
    }
    core.handle_timeout(now);
    while core.poll_event().is_some() {}
}

/// The first frame of a stream, of its answer, and of what is inside a parcel.
pub(crate) fn opening(bytes: &[u8]) {
    let _ = Opening::decode(bytes);
    let _ = Answer::decode(bytes);
    let _ = Letter::decode(bytes);
}

/// A sealed message.
pub(crate) fn sealed(bytes: &[u8]) {
    let opened = sealed::open(&identity(1), identity(2).id(), Purpose::Request, bytes);
    // Only the corpus holds one that opens.
    assert!(opened.is_err() || opened == Ok(b"hello".to_vec()));
}

/// The sealed chunks of a relayed stream: 32 bytes of encapsulated key, then chunks.
pub(crate) fn tunnel(bytes: &[u8]) {
    let Some((key, chunks)) = bytes.split_at_checked(32) else { return };
    let opener = Opener::new(&identity(1), identity(2).id(), Purpose::StreamForward, key);
    let Ok(opener) = opener else { return };
    let mut receiver = TunnelReceiver::new(opener);
    for piece in chunks.chunks(7) {
        if receiver.handle_bytes(piece).is_err() {
            return;
        }
    }
    let _ = receiver.handle_end();
}

/// What comes while a node waits to be claimed, and what a claimant hears.
pub(crate) fn claim(bytes: &[u8]) {
    let _ = overlay::claim::everything(bytes);
}
