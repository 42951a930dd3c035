//! `holdfast node claim`: gives a node that has no configuration one, with the code on its console. It speaks
//! to the node itself; no gateway is needed.

use std::{io, time::Duration};

use axum::http::StatusCode;
use overlay::claim::{ClaimError, Code, MAX_MESSAGE, Verdict, claim};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use types::{
    config::{NodeSpec, Overlay},
    forward::Problem,
    ids::NodeId,
};

use super::{CliError, Context, Peer, arguments::ClaimArguments, files, show};

/// How long the node may take to each answer.
const LIMIT: Duration = Duration::from_secs(15);

pub(super) async fn run(context: &Context, wanted: &ClaimArguments) -> Result<(), CliError> {
    let path = &wanted.config;
    let document = files::bytes(path, files::SMALL)?;
    // Mistakes are told before anything is sent; the node looks itself, too.
    NodeSpec::parse(&document)
        .map_err(|error| refused(format!("{} is no configuration", path.display()), error))?;
    let code = Code::parse(&wanted.code)
        .map_err(|error| refused("the claim code cannot be right".to_owned(), error))?;
    let address = with_port(&wanted.address);
    let (node, verdict) = converse(&address, &code, &document).await?;
    if !verdict.accepted {
        return Err(turned_down(format!("node {node} refused"), verdict.detail));
    }
    let shown = json!({ "node": node, "address": address, "detail": verdict.detail });
    context.print(&shown, |_| format!("{node}\n{}\n", show::harmless(&verdict.detail)))
}

/// What the node refuses, as gateways tell it.
fn turned_down(title: String, detail: String) -> CliError {
    let (kind, status) = ("about:blank".to_owned(), StatusCode::UNPROCESSABLE_ENTITY.as_u16());
    CliError::Refused { problem: Problem { kind, title, status, detail } }
}

/// Whose fault it is that a server was not claimed.
fn unclaimed(address: &str, error: ClaimError) -> CliError {
    match error {
        ClaimError::PeerRefused => {
            turned_down(format!("the server at {address} was not claimed"), error.to_string())
        }
        ClaimError::PeerHello { .. } | ClaimError::PeerAltered | ClaimError::PeerAnswer { .. } => {
            let (peer, url) = (Peer::Node, address.to_owned());
            CliError::Answer { peer, url, message: error.to_string() }
        }
        ClaimError::CodeLength { .. } | ClaimError::CodeLetter { .. } => {
            refused(format!("the server at {address} was not claimed"), error)
        }
    }
}

fn refused(what: String, source: impl std::error::Error + Send + Sync + 'static) -> CliError {
    CliError::Lease { what, source: Box::new(source) }
}

/// Adds the usual port to an address that has none.
fn with_port(address: &str) -> String {
    let bare = address.trim_start_matches('[').trim_end_matches(']');
    match (bare.parse::<std::net::Ipv6Addr>(), address.rsplit_once(':')) {
        (Ok(address), _) => format!("[{address}]:{}", Overlay::DEFAULT_PORT),
        (Err(_), Some(_)) => address.to_owned(),
        (Err(_), None) => format!("{address}:{}", Overlay::DEFAULT_PORT),
    }
}

async fn converse(
    address: &str,
    code: &Code,
    document: &[u8],
) -> Result<(NodeId, Verdict), CliError> {
    let unreachable = |error: io::Error| CliError::Unreachable {
        peer: Peer::Node,
        url: address.to_owned(),
        message: format!(
            "{error}; only a node that has no configuration at all waits to be claimed, and its \
             console says where"
        ),
    };
    let talk = async {
        let mut stream = limited(TcpStream::connect(address)).await?;
        let hello = limited(receive(&mut stream)).await?;
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let (message, waiting) = match claim(&hello, code, document, &random) {
            Ok(claimed) => claimed,
            Err(error) => return Ok(Err(error)),
        };
        stream.write_u32(u32::try_from(message.len()).unwrap_or(u32::MAX)).await?;
        stream.write_all(&message).await?;
        stream.flush().await?;
        let answer = limited(receive(&mut stream)).await?;
        Ok(waiting.open(&answer).map(|verdict| (waiting.node, verdict)))
    };
    let answered: Result<(NodeId, Verdict), ClaimError> = talk.await.map_err(unreachable)?;
    answered.map_err(|error| unclaimed(address, error))
}

async fn limited<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(LIMIT, work).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE {
        return Err(io::Error::other("what answers there speaks another language"));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_refuses_is_its_refusal_and_no_mistake_of_the_command_line() {
        assert_eq!(unclaimed("192.0.2.7:4600", ClaimError::PeerRefused).status(), 3);
        let strange = unclaimed("192.0.2.7:4600", ClaimError::PeerAltered);
        assert_eq!(strange.status(), 4);
        assert!(strange.to_string().starts_with("the node at 192.0.2.7:4600"), "{strange}");
    }

    #[tokio::test]
    async fn a_node_that_cannot_be_reached_is_not_called_a_gateway() {
        // Port 1 (tcpmux) is nobody's any more.
        let address = "127.0.0.1:1";
        let code = Code::from_random(&[7; 20]);
        let error = converse(address, &code, b"").await.expect_err("nobody is there");
        assert_eq!(error.status(), 4);
        assert!(error.to_string().starts_with("cannot reach the node at"), "{error}");
    }

    #[test]
    fn the_port_may_be_left_out() {
        assert_eq!(with_port("192.0.2.7"), "192.0.2.7:4600");
        assert_eq!(with_port("192.0.2.7:99"), "192.0.2.7:99");
        assert_eq!(with_port("rack7.example"), "rack7.example:4600");
        assert_eq!(with_port("2001:db8::7"), "[2001:db8::7]:4600");
        assert_eq!(with_port("[2001:db8::7]"), "[2001:db8::7]:4600");
        assert_eq!(with_port("[2001:db8::7]:99"), "[2001:db8::7]:99");
    }
}
