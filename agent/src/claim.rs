//! Waits to be claimed: a node without any configuration shows a code on its consoles, and whoever types
//! it on another computer (`holdfast node claim`) gives the node a configuration over the network. The
//! messages are `overlay::claim`'s; what comes is judged like the document on a volume, and kept in STATE.
//!
//! The code is on consoles and the screen only, never in the log. It ends with the first claim.

use std::{
    fs::{self, File},
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use overlay::claim::{Claimable, Code, MAX_MESSAGE, Verdict};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Mutex, Semaphore},
    time::timeout,
};
use types::{
    config::{NodeSpec, Overlay},
    ids::NodeId,
};

use crate::{config, events::Event, init::boot::chain, install::ask};

/// Connections at a time; a further one waits.
const CONNECTIONS: usize = 8;
/// How long one may take in all.
const LIMIT: Duration = Duration::from_secs(20);
/// How long the answer to a wrong code takes. Codes are too long to be tried; this bounds what it costs.
const WRONG: Duration = Duration::from_secs(1);
/// How often the consoles show the code: they are attached late.
const SHOWN: Duration = Duration::from_secs(30);

/// A node that can be claimed.
#[derive(Debug)]
pub struct Waiting {
    node: NodeId,
    code: Code,
    /// Folder of the state.
    state: PathBuf,
    /// Taken for good by the first claim.
    claimed: Mutex<bool>,
}

impl Waiting {
    /// Makes a node claimable, under a new code.
    pub fn new(node: NodeId, state: PathBuf) -> io::Result<Self> {
        let mut random = [0; 20];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        Ok(Self { node, code: Code::from_random(&random), state, claimed: Mutex::default() })
    }

    /// Returns the code for a screen.
    pub fn code(&self) -> String {
        self.code.shown()
    }

    /// Shows on the serial consoles below `root` how the node is claimed, from time to time.
    pub async fn show(&self, root: &Path, addresses: impl Fn() -> Vec<String>) {
        loop {
            if *self.claimed.lock().await {
                return;
            }
            let at = addresses();
            let (root, text) = (root.to_owned(), instructions(&self.code.shown(), &at));
            let shown = tokio::task::spawn_blocking(move || ask::show_on_lines(&root, &text));
            if let Err(error) = shown.await {
                eprintln!("{}", Event::Trouble { place: "claim", reason: error.to_string() });
            }
            // Sooner while there is no address yet, which is what somebody waits for.
            let pause = if at.is_empty() { SHOWN / 10 } else { SHOWN };
            tokio::time::sleep(pause).await;
        }
    }

    /// Serves claims until one counts.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    eprintln!("{}", Event::Trouble { place: "claim", reason: error.to_string() });
                    tokio::time::sleep(WRONG).await;
                    continue;
                }
            };
            if *self.claimed.lock().await {
                return;
            }
            let waiting = Arc::clone(&self);
            tokio::spawn(async move {
                let served = timeout(LIMIT, waiting.converse(stream)).await;
                let reason = match served {
                    Ok(Ok(None)) => None,
                    Ok(Ok(Some(refusal))) => Some(refusal),
                    Ok(Err(error)) => Some(chain(&error)),
                    Err(_) => Some(format!("it took longer than {} seconds", LIMIT.as_secs())),
                };
                match reason {
                    None => eprintln!("{}", Event::Claimed { from }),
                    Some(reason) => eprintln!("{}", Event::ClaimRefused { from, reason }),
                }
                drop(place);
            });
        }
    }

    /// Talks to one claimant. Returns why it was refused, if it was.
    async fn converse(&self, mut stream: TcpStream) -> io::Result<Option<String>> {
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let end = Claimable::new(self.node, &random);
        send(&mut stream, end.hello()).await?;
        let message = receive(&mut stream).await?;
        let (document, reply) = match end.open(&self.code, &message) {
            Ok(opened) => opened,
            Err(error) => {
                tokio::time::sleep(WRONG).await;
                send(&mut stream, &[]).await?;
                return Ok(Some(error.to_string()));
            }
        };
        let taken = self.take(&document).await;
        let verdict = match &taken {
            Ok(detail) => Verdict { accepted: true, detail: detail.clone() },
            Err(detail) => Verdict { accepted: false, detail: detail.clone() },
        };
        let answer = reply.seal(&verdict).map_err(io::Error::other)?;
        send(&mut stream, &answer).await?;
        stream.shutdown().await?;
        Ok(taken.err())
    }

    /// Keeps the configuration, if it is one and the first. Returns what happens now.
    async fn take(&self, document: &[u8]) -> Result<String, String> {
        let mut claimed = self.claimed.lock().await;
        if *claimed {
            return Err("the node was claimed already".to_owned());
        }
        let spec = NodeSpec::parse(document).map_err(|error| chain(&error))?;
        keep(&self.state, document)
            .map_err(|error| format!("the node cannot keep the configuration: {error}"))?;
        *claimed = true;
        let name = if spec.name.is_empty() { "without a name" } else { &spec.name };
        Ok(format!("the node, {name}, starts with this configuration now"))
    }
}

/// Listens where the overlay does later, over TCP.
pub async fn listen() -> io::Result<TcpListener> {
    let port = Overlay::DEFAULT_PORT;
    match TcpListener::bind(SocketAddr::from(([0_u16; 8], port))).await {
        Ok(listener) => Ok(listener),
        // A kernel or a site without IPv6.
        Err(_) => TcpListener::bind(SocketAddr::from(([0_u8; 4], port))).await,
    }
}

fn keep(state: &Path, document: &[u8]) -> io::Result<()> {
    let partial = state.join("claimed.new");
    let options = File::options().write(true).create(true).truncate(true).mode(0o600).to_owned();
    let mut file = options.open(&partial)?;
    file.write_all(document)?;
    file.sync_all()?;
    fs::rename(&partial, state.join(config::CLAIMED))?;
    File::open(state)?.sync_all()
}

/// A length of four bytes, big-endian, and as many bytes.
async fn send(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    stream.write_u32(u32::try_from(message.len()).unwrap_or(u32::MAX)).await?;
    stream.write_all(message).await?;
    stream.flush().await
}

async fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE {
        let reason = format!("a message of {length} bytes; at most {MAX_MESSAGE} are read");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// What a person in front of the server has to know.
fn instructions(code: &str, addresses: &[String]) -> String {
    let address = addresses.first().map_or("ADDRESS", |address| address.as_str());
    let address = address.split('/').next().unwrap_or(address);
    let missing = match addresses {
        [] => "\r\nIt has no address yet: is a network cable plugged in, and is there DHCP?",
        _ => "",
    };
    format!(
        "This server has no configuration. Give it one from another computer:\r\n\r\n    \
         holdfast node claim {address} --code {code} --config holdfast.toml\r\n\r\nor plug in a FAT \
         volume labelled HOLDFAST with holdfast.toml on it. The code counts once, and until the \
         next start.{missing}"
    )
}

#[cfg(test)]
mod tests {
    use overlay::claim::{ClaimError, claim};

    use super::*;

    const NODE: NodeId = NodeId::from_bytes([4; 32]);

    async fn waiting(state: &Path) -> (Arc<Waiting>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("bound");
        let waiting = Arc::new(Waiting::new(NODE, state.to_owned()).expect("made"));
        tokio::spawn(Arc::clone(&waiting).serve(listener));
        (waiting, address)
    }

    async fn ask(to: SocketAddr, code: &Code, document: &str) -> Result<Verdict, ClaimError> {
        let mut stream = TcpStream::connect(to).await.expect("connected");
        let hello = receive(&mut stream).await.expect("a hello");
        let (message, waiting) = claim(&hello, code, document.as_bytes(), &[3; 32])?;
        assert_eq!(waiting.node, NODE);
        send(&mut stream, &message).await.expect("sent");
        waiting.open(&receive(&mut stream).await.expect("an answer"))
    }

    fn document(name: &str) -> String {
        let key = "01".repeat(32);
        format!("version = 1\nname = \"{name}\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
    }

    #[tokio::test]
    async fn the_first_who_knows_the_code_claims_the_node() {
        let root = crate::testing::root(&[("state/x", b"")]);
        let state = root.path().join("state");
        let (node, address) = waiting(&state).await;
        let other = Code::from_random(&[0; 20]);
        assert_eq!(ask(address, &other, &document("a")).await, Err(ClaimError::PeerRefused));
        // A mistake in the document is told by line, and the code still counts.
        let typo = ask(address, &node.code, "version = 1\nnmae = 1\n").await.expect("an answer");
        assert!(!typo.accepted && typo.detail.contains("nmae"), "{}", typo.detail);
        assert!(!state.join(config::CLAIMED).exists());
        let taken = ask(address, &node.code, &document("rack 7")).await.expect("an answer");
        assert!(taken.accepted && taken.detail.contains("rack 7"), "{}", taken.detail);
        let found = config::load(root.path());
        assert_eq!(found.source, config::Source::Claimed);
        assert_eq!(found.spec.expect("valid").name, "rack 7");
        // The code is dead, also for a connection that was open before.
        assert_eq!(
            node.take(document("b").as_bytes()).await,
            Err("the node was claimed already".into())
        );
        assert_eq!(config::load(root.path()).spec.expect("valid").name, "rack 7");
    }

    #[tokio::test]
    async fn long_messages_are_not_read() {
        let root = crate::testing::root(&[("state/x", b"")]);
        let (_node, address) = waiting(&root.path().join("state")).await;
        let mut stream = TcpStream::connect(address).await.expect("connected");
        receive(&mut stream).await.expect("a hello");
        stream.write_u32(u32::MAX).await.expect("sent");
        assert!(receive(&mut stream).await.is_err(), "it hangs up");
    }

    #[test]
    fn people_are_told_what_to_type() {
        let text = instructions("abcde", &["192.0.2.7/24".to_owned()]);
        assert!(text.contains("node claim 192.0.2.7 --code abcde --config"), "{text}");
        assert!(instructions("abcde", &[]).contains("no address yet"));
    }
}
