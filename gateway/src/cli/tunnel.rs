//! `holdfast tunnel` and `holdfast ssh`.

use std::{ffi::OsString, io::Read, os::unix::ffi::OsStringExt};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use lease::request::CARRIED_FIELDS;
use tokio::{io::AsyncWriteExt, process::Command, sync::mpsc};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error as WsError, Message,
        client::IntoClientRequest,
        http::HeaderValue,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};
use types::{forward::ForwardedRequest, ids::MachineId};

use super::{CliError, Context, connection::Wire, http};

/// Bytes moved at a time.
const CHUNK: usize = 32 << 10;

/// Connects standard input and output with a port of the guest until the guest ends it.
pub(super) async fn tunnel(
    context: &Context,
    machine: MachineId,
    port: u16,
) -> Result<(), CliError> {
    let socket = connect(context, &format!("/v1/machines/{machine}/tunnel/{port}")).await?;
    carry(context, socket).await
}

/// Opens a WebSocket, signed.
pub(super) async fn connect(
    context: &Context,
    target: &str,
) -> Result<WebSocketStream<Box<dyn Wire>>, CliError> {
    let mut request = ForwardedRequest {
        method: "GET".into(),
        target: target.to_owned(),
        headers: Vec::new(),
        body: Vec::new(),
    };
    http::sign_now(&context.key()?, &mut request)?;
    let client = &context.client;
    let authority = client.place()?.authority();
    let mut upgrade = format!("ws://{authority}{target}")
        .into_client_request()
        .map_err(|error| client.answer(error))?;
    for name in CARRIED_FIELDS {
        if let Some(value) = request.header(name) {
            let value = HeaderValue::from_str(value).map_err(|error| client.answer(error))?;
            upgrade.headers_mut().insert(name, value);
        }
    }
    let stream = client.connect().await?;
    let upgraded = tokio_tungstenite::client_async(upgrade, stream);
    let upgraded = tokio::time::timeout(http::ANSWER, upgraded)
        .await
        .map_err(|_| client.unreachable("no answer within 60 s"))?;
    let (socket, _) = upgraded.map_err(|error| {
        if let WsError::Http(answer) = &error {
            let body = answer.body().as_deref().unwrap_or_default();
            return client.refused(answer.status(), body);
        }
        client.unreachable(error)
    })?;
    Ok(socket)
}

/// Reads standard input until it ends, on a thread that nobody waits for: a read that still waits does not keep the
/// process.
pub(super) fn input() -> mpsc::Receiver<Bytes> {
    let (pieces, input) = mpsc::channel(2);
    std::thread::spawn(move || {
        let (mut stdin, mut chunk) = (std::io::stdin().lock(), vec![0; CHUNK]);
        loop {
            let length = match stdin.read(&mut chunk) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // An input that cannot be read is one that ended.
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            if pieces.blocking_send(Bytes::copy_from_slice(&chunk[..length])).is_err() {
                return;
            }
        }
    });
    input
}

async fn carry(context: &Context, socket: WebSocketStream<Box<dyn Wire>>) -> Result<(), CliError> {
    let (mut to_guest, mut from_guest) = socket.split();
    let up = async {
        let mut input = input();
        while let Some(bytes) = input.recv().await {
            if to_guest.send(Message::Binary(bytes)).await.is_err() {
                return;
            }
        }
        // The empty frame ends our direction. Whether it arrives, the other direction tells.
        let _ = to_guest.send(Message::Binary(Bytes::new())).await;
    };
    let lost = |why: &dyn std::fmt::Display| {
        context.client.unreachable(format!("the tunnel broke off: {why}"))
    };
    let down = async {
        let mut output = tokio::io::stdout();
        while let Some(message) = from_guest.next().await {
            match message.map_err(|error| lost(&error))? {
                Message::Binary(bytes) => {
                    let written = output.write_all(&bytes).await;
                    written.map_err(|source| CliError::Output { source })?;
                    output.flush().await.map_err(|source| CliError::Output { source })?;
                }
                Message::Close(frame) => {
                    return broke_off(frame.as_ref()).map_or(Ok(()), |why| Err(lost(&why)));
                }
                Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_) => {}
            }
        }
        Err(lost(&"the gateway ended it without a word"))
    };
    tokio::pin!(up, down);
    tokio::select! {
        result = &mut down => result,
        () = &mut up => down.await,
    }
}

/// Returns why a tunnel broke off, if that is what its end says; without a code it is an end like others.
fn broke_off(frame: Option<&CloseFrame>) -> Option<String> {
    let frame = frame.filter(|frame| frame.code != CloseCode::Normal)?;
    Some(match frame.reason.as_str() {
        "" => format!("the gateway ended it with code {}", u16::from(frame.code)),
        reason => reason.to_owned(),
    })
}

/// Runs OpenSSH through a tunnel to port 22 and returns its exit status.
pub(super) async fn ssh(
    context: &Context,
    machine: MachineId,
    arguments: &[String],
) -> Result<u8, CliError> {
    let own = std::env::current_exe().map_err(|source| CliError::File {
        operation: "find",
        path: "holdfast".into(),
        source,
    })?;
    let key = context.key_path.as_deref().unwrap_or(std::path::Path::new(""));
    // The key is read here once so that a mistake is told plainly, not by ssh.
    context.key()?;
    let key = std::path::absolute(key).unwrap_or_else(|_| key.to_owned());
    let url = context.client.place()?.url();
    let mut words: Vec<OsString> =
        vec![own.into(), "--gateway".into(), url.into(), "--key".into(), key.into()];
    if let Some(file) = context.client.authorities() {
        words.extend(["--ca-file".into(), file.into()]);
    }
    let machine_words = ["tunnel".to_owned(), machine.to_string(), "22".to_owned()];
    words.extend(machine_words.map(OsString::from));
    let status = Command::new("ssh")
        .arg("-o")
        .arg(proxy_command(&words))
        // OpenSSH reads options after the host's name too, up to the command.
        .arg(format!("holdfast-{}", machine))
        .args(arguments)
        .status()
        .await
        .map_err(|source| CliError::Ssh { source })?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255))
}

/// Returns ssh's option that connects by a command of these words. They are bytes: a path may be no text. ssh
/// itself puts the shell's `exec` before it.
fn proxy_command(words: &[OsString]) -> OsString {
    let mut option = b"ProxyCommand=".to_vec();
    for (number, word) in words.iter().enumerate() {
        option.extend_from_slice(if number == 0 { b"'" } else { b" '" });
        for byte in word.as_encoded_bytes() {
            match byte {
                b'\'' => option.extend_from_slice(b"'\\''"),
                // ssh takes this for a token of its own (ssh_config(5), "TOKENS").
                b'%' => option.extend_from_slice(b"%%"),
                _ => option.push(*byte),
            }
        }
        option.push(b'\'');
    }
    OsString::from_vec(option)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_end_that_says_so_is_a_failure() {
        let end = |code: u16, reason: &'static str| {
            broke_off(Some(&CloseFrame { code: code.into(), reason: reason.into() }))
        };
        assert_eq!(broke_off(None), None);
        assert_eq!(end(1000, "the guest ended it"), None);
        assert_eq!(end(1011, "the node is gone").as_deref(), Some("the node is gone"));
        assert!(end(1001, "").is_some_and(|why| why.contains("1001")));
    }

    #[test]
    fn a_path_reaches_ssh_as_it_is() {
        let path = OsString::from_vec(b"/a b/it's 100%/\xff".to_vec());
        let option = proxy_command(&["x".into(), path]).into_vec();
        assert_eq!(option, b"ProxyCommand='x' '/a b/it'\\''s 100%%/\xff'");
    }
}
