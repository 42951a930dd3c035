//! What touches the world for the core: a folder, a repository's files, and the loop between them.
//!
//! Decides nothing about trust.

mod fetch;
mod http;
mod session;
mod store;

pub use fetch::{FetchError, Fetcher};
pub use session::{Listed, Session, SessionError, TARGET_LIMIT, file_name};
pub use store::{Store, StoreError};
