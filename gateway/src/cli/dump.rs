//! Saves a guest's memory as it comes. A dump that breaks off is removed, also when a signal ends the command: half
//! of memory is no dump.

use std::{fs::File, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use serde_json::json;

use super::{CliError, Context, calls::Call, terminal};

/// Returns the exit status.
pub(super) async fn save(context: &Context, call: &Call, out: &Path) -> Result<u8, CliError> {
    let body = context.client.begin(call, Some(&context.key()?)).await?.into_body();
    // Memory may hold secrets: nobody else reads it.
    let file = File::options().write(true).create_new(true).mode(0o600).open(out);
    let mut file = file.map_err(|source| failed("make", out, source))?;
    let saved = tokio::select! {
        saved = copy(context, body, &mut file, out) => saved.map(Ok),
        status = terminal::signalled(None) => status.map(Err),
    };
    if let Ok(Ok(bytes)) = saved {
        let shown = json!({ "file": out, "bytes": bytes });
        let text = |_: &_| format!("{bytes} bytes in {}\n", out.display());
        return context.print(&shown, text).map(|()| 0);
    }
    // What is there helps nobody.
    let _ = std::fs::remove_file(out);
    saved.map(|saved| saved.err().unwrap_or_default())
}

async fn copy(
    context: &Context,
    mut body: Incoming,
    file: &mut File,
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
