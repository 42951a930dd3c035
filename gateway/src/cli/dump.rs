//! Saves a guest's memory as it comes. A dump that breaks off is removed, also when a signal ends the command: half
//! of memory is no dump.

use std::{fs::File, io::Write, path::Path};

use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use serde_json::json;

use super::{CliError, Context, calls::Call, terminal};
use crate::whole::{self, Whole};

/// Returns the exit status.
pub(super) async fn save(context: &Context, call: &Call, out: &Path) -> Result<u8, CliError> {
    // The guest is not to wait for a dump that has no place.
    whole::free(out).map_err(|source| failed("make", out, source))?;
    let body = context.client.begin(call, Some(&context.key()?)).await?.into_body();
    // Memory may hold secrets: nobody else reads it.
    let made = Whole::begin_new(out, 0o600).map_err(|source| failed("make", out, source))?;
    let saved = tokio::select! {
        saved = copy(context, body, made.file(), out) => saved?,
        status = terminal::signalled(None) => return status,
    };
    made.finish().map_err(|source| failed("write", out, source))?;
    let shown = json!({ "file": out.display().to_string(), "bytes": saved });
    let text = |_: &_| format!("{saved} bytes in {}\n", out.display());
    context.print(&shown, text).map(|()| 0)
}

async fn copy(
    context: &Context,
    mut body: Incoming,
    mut file: &File,
    out: &Path,
) -> Result<u64, CliError> {
    let expected = body.size_hint().exact();
    let mut written = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| context.client.broken(&error))?;
        if let Some(bytes) = frame.data_ref() {
            file.write_all(bytes).map_err(|source| failed("write", out, source))?;
            written += bytes.len() as u64;
        }
    }
    if expected.is_none_or(|expected| expected == written) {
        return Ok(written);
    }
    let message = format!("the dump broke off after {written} bytes");
    Err(CliError::Usage { message })
}

fn failed(operation: &'static str, out: &Path, source: std::io::Error) -> CliError {
    CliError::File { operation, path: out.to_owned(), source }
}
