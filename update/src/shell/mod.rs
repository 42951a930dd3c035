//! What touches the world for the core: a folder, a repository's files, and the loop between them.
//!
//! Decides nothing about trust.

mod check;
mod delta;
mod elsewhere;
mod fetch;
mod http;
mod session;
mod store;
mod stream;

pub use check::{CheckError, Checked, Checker, DOCUMENTS, Offered, Source};
pub use delta::{Base, Streamed};
pub use elsewhere::{Bytes, Elsewhere, Opening, Span, Wanted};
pub use fetch::{FetchError, Fetcher};
pub use http::{Resolve, Resolving};
pub use session::{Listed, Session, SessionError, TARGET_LIMIT, file_name};
pub use store::{Store, StoreError};
pub use stream::{Sink, SinkError};
