//! Makes and maintains a repository: the library behind the `release` command.
//!
//! A repository is a folder: `metadata` and `targets` are what mirrors serve; `staged` holds
//! documents that are not published yet, with the signatures that they have so far. That folder is
//! what travels to offline keys and back. Nothing that clients would refuse is published: before
//! the first file is written, the client of this crate reads the whole repository as it would be.

mod keys;
mod pkcs11;
mod publish;
mod repository;
mod write;

pub use keys::{KeyError, KeyFile, PublicKey, Signer};

pub use pkcs11::{TokenError, TokenKey};
pub use publish::TIMESTAMP_DAYS;
pub use repository::{Plan, Refusal, ReleaseError, Repository, Rotation, Staging, TopKeys};
