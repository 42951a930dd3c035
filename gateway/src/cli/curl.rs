//! `--curl`: requests as command lines of curl, signed and ready to run. A signature counts once,
//! and for as long as `lease::request::MAX_AGE_S` says.

use super::{
    CliError, Context,
    calls::{Call, Signing},
    http, quoted,
};

/// Returns the command line that sends a request.
pub(super) fn line(context: &Context, call: &Call) -> Result<String, CliError> {
    let mut request = call.request.clone();
    if call.signing == Signing::Key {
        http::sign_now(&context.key()?, &mut request)?;
    }
    let mut words = vec!["curl -sS --fail-with-body".to_owned()];
    if request.target.ends_with("?follow=1") {
        words.push("--no-buffer".to_owned());
    }
    // An upload is a PUT by itself.
    if request.method != "GET" && call.file.is_none() {
        words.push(format!("-X {}", request.method));
    }
    for (name, value) in &request.headers {
        words.push(format!("-H {}", quoted(&format!("{name}: {value}"))));
    }
    if !request.body.is_empty() {
        // Bodies are JSON that was made here, so none begins with the @ that curl would follow.
        let body = String::from_utf8_lossy(&request.body);
        words.push(format!("--data-binary {}", quoted(&body)));
    }
    if let Some(file) = &call.file {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.clone());
        words.push(format!("-T {}", quoted(&file.display().to_string())));
    }
    if let Some(file) = context.client.authorities() {
        words.push(format!("--cacert {}", quoted(&file.display().to_string())));
    }
    let url = format!("{}{}", context.client.place()?.url(), request.target);
    words.push(quoted(&url));
    Ok(words.join(" "))
}
