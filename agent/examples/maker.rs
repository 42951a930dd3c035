//! Plays the maker of an emulated TPM for tests: `maker SOCKET` prints its endorsement key (PEM), and
//! `maker SOCKET FILE` leaves the certificate (DER) in the file where makers leave it.

use std::os::unix::net::UnixStream;

use agent::seal::tpm::{CERTIFICATE, Question, Tpm};
use anyhow::{Context, Result, bail};
use base64::{Engine, engine::general_purpose::STANDARD};
use types::ids::NodeId;

/// A public key on P-256 up to its point (RFC 5480 §2).
const P256_KEY: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (socket, file) = match arguments.as_slice() {
        [socket] => (socket, None),
        [socket, file] => (socket, Some(file)),
        _ => bail!("expected SOCKET [FILE]"),
    };
    let stream = UnixStream::connect(socket).with_context(|| socket.clone())?;
    let mut tpm = Tpm::over(Box::new(stream));
    match file {
        Some(file) => tpm.keep(CERTIFICATE, &std::fs::read(file).with_context(|| file.clone())?)?,
        None => println!("{}", key(&mut tpm)?),
    }
    Ok(())
}

/// Returns the endorsement key as PEM has it.
fn key(tpm: &mut Tpm) -> Result<String> {
    let node = NodeId::from_bytes([0; 32]);
    let question = Question { node, qualifying: [0; 32], registers: &[0], credential: None };
    let public = tpm.quote(&question)?.endorsement_key;
    // Both coordinates are at the end, each after its length.
    let Some((_, [0, 32, x @ .., 0, 32])) = public
        .split_at_checked(public.len().saturating_sub(32))
        .and_then(|(rest, _)| rest.split_at_checked(rest.len().saturating_sub(36)))
    else {
        bail!("the key's coordinates are not of 32 bytes each");
    };
    let y = &public[public.len() - 32..];
    let key = STANDARD.encode([&P256_KEY[..], &[4], x, y].concat());
    let lines: Vec<_> = key.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    Ok(format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----", lines.join("\n")))
}
