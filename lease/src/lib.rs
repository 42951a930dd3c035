//! Leases: what they say, when they count, what follows from them.
//!
//! `document` is the lease and its DSSE envelope; `threshold` decides whether enough authority
//! keys signed it; `authority` signs; `lifecycle` says which lease may take another's place;
//! `metering` counts and signs what was used; `request` signs and verifies what renters ask
//! for; `api` holds the JSON bodies that renter, gateway and node exchange; `attestation` judges what a
//! node's TPM says of the release that it runs.
//!
//! Nothing here owns a clock, a file, a socket or a thread: time and randomness are arguments.

#![forbid(unsafe_code)]

pub mod api;
pub mod attestation;
pub mod authority;
pub mod canonical;
pub mod document;
pub mod hardware;
pub mod lifecycle;
pub mod metering;
pub mod problem;
pub mod request;
pub mod threshold;

pub use ed25519_dalek::SigningKey;
