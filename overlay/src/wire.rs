//! What nodes say to each other, as bytes.
//!
//! CBOR (RFC 8949) with integer keys, definite lengths and no floats, so that equal values have
//! equal bytes; unknown keys are skipped, so that old and new nodes understand each other. On a
//! QUIC stream each value travels as a frame: four bytes of length, big endian, then the value.
//! Signed statements keep the very bytes that were signed.

use std::{fmt, net::SocketAddr};

use minicbor::{Decode, Encode};
use types::ids::NodeId;

use crate::identity::{self, Identity, IdentityError, SIGNATURE_LEN};

/// Longest frame on a link between neighbours: four of the longest statements.
pub const LINK_FRAME: usize = 256 * 1024;
/// Longest frame that opens a stream or answers it: a sealed message and its names.
pub const MESSAGE_FRAME: usize = MESSAGE + 1024;
/// Longest request or answer before it is sealed: a forwarded HTTP request whose body of at most
/// 1 MiB is base64 inside JSON.
pub const MESSAGE: usize = 2 * 1024 * 1024;
/// Longest payload of a broadcast.
pub const PAYLOAD: usize = 60 * 1024;
/// Addresses that one node states at most.
pub const ADDRESSES: usize = 8;
/// Neighbours that one node states at most.
pub const NEIGHBOURS: usize = 8;
/// Contacts in one frame at most.
pub const CONTACTS: usize = 16;
/// Longest reason given in words.
pub const REASON: usize = 200;

/// Why bytes are not what a peer may say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum WireError {
    #[error("a frame of {length} bytes; at most {limit} here")]
    PeerLength { length: usize, limit: usize },
    #[error("not a {expected}: {reason}")]
    PeerValue { expected: &'static str, reason: String },
    #[error("{count} {what} in one value; at most {limit}")]
    PeerCount { what: &'static str, count: usize, limit: usize },
    #[error(transparent)]
    Signature(#[from] IdentityError),
}

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(index_only)]
pub enum Role {
    /// Serves the HTTP API to renters.
    #[n(0)]
    Gateway,
    /// Rents machines.
    #[n(1)]
    Provider,
    /// Has a well-known address and lets others join through it.
    #[n(2)]
    Seed,
}

/// A node and where it may be dialled.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Contact {
    /// Its key.
    #[cbor(n(0), with = "name")]
    pub node: NodeId,
    /// Where to try, at most [`ADDRESSES`].
    #[n(1)]
    pub addresses: Vec<SocketAddr>,
}

/// What a node says of itself every few seconds.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Announcement {
    /// What it is for.
    #[n(0)]
    pub role: Role,
    /// Where it may be dialled, at most [`ADDRESSES`].
    #[n(1)]
    pub addresses: Vec<SocketAddr>,
    /// Nodes that hold a connection to it and can relay, at most [`NEIGHBOURS`].
    #[cbor(n(2), with = "names")]
    pub neighbours: Vec<NodeId>,
    /// How long this counts, in milliseconds from when it was made.
    #[n(3)]
    pub lifetime_ms: u64,
    /// Its uptime when this was made.
    #[n(4)]
    pub uptime_ms: u64,
}

/// What a node signs for everybody.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Statement {
    /// I am here.
    #[n(0)]
    Announce(#[n(0)] Announcement),
    /// I leave.
    #[n(1)]
    Leave,
    /// A neighbour of mine fell silent; let it object within the time of suspicion.
    #[n(2)]
    Silent(#[cbor(n(0), with = "name")] NodeId, #[n(1)] u64),
    /// Something for the users of the overlay.
    #[n(3)]
    Payload(#[cbor(n(0), with = "minicbor::bytes")] Vec<u8>),
}

/// A statement on its way through the network.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Rumour {
    /// Who signed it.
    #[cbor(n(0), with = "name")]
    pub origin: NodeId,
    /// The origin's incarnation: grows with each start.
    #[n(1)]
    pub epoch: u64,
    /// Grows with each statement of an incarnation.
    #[n(2)]
    pub nonce: u64,
    /// The encoded [`Statement`], as signed.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub body: Vec<u8>,
    /// Over epoch, nonce and body.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub signature: [u8; SIGNATURE_LEN],
}

impl Rumour {
    /// Signs a statement.
    pub fn new(identity: &Identity, epoch: u64, nonce: u64, statement: &Statement) -> Self {
        let body = to_bytes(statement);
        let signature = identity.sign(PURPOSE, &signed_bytes(epoch, nonce, &body));
        Self { origin: identity.id(), epoch, nonce, body, signature }
    }

    /// Checks the signature.
    pub fn verify(&self) -> Result<(), IdentityError> {
        let message = signed_bytes(self.epoch, self.nonce, &self.body);
        identity::verify(self.origin, PURPOSE, &message, &self.signature)
    }

    /// Reads the statement.
    pub fn statement(&self) -> Result<Statement, WireError> {
        let statement = from_bytes(&self.body, "statement")?;
        match &statement {
            Statement::Announce(announcement) => {
                at_most("addresses", announcement.addresses.len(), ADDRESSES)?;
                at_most("neighbours", announcement.neighbours.len(), NEIGHBOURS)?;
            }
            Statement::Payload(payload) => at_most("bytes of payload", payload.len(), PAYLOAD)?,
            Statement::Leave | Statement::Silent(..) => {}
        }
        Ok(statement)
    }
}

impl fmt::Debug for Rumour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, epoch, nonce, body, .. } = self;
        write!(f, "Rumour({} {epoch}/{nonce}, {} bytes)", origin.short(), body.len())
    }
}

/// A rumour and how long ago it was made, as far as whoever hands it on knows.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Heard {
    /// The rumour.
    #[n(0)]
    pub rumour: Rumour,
    /// Its age.
    #[n(1)]
    pub age_ms: u64,
}

/// The first thing that neighbours say to each other.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Hello {
    /// What the speaker is for.
    #[n(0)]
    pub role: Role,
    /// How many neighbours the speaker has. One without any is taken in before others.
    #[n(1)]
    pub neighbours: u32,
    /// Where the speaker sees the listener.
    #[n(2)]
    pub observed: SocketAddr,
}

/// What neighbours say to each other.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Frame {
    /// Opens a link, once from each side.
    #[n(0)]
    Hello(#[n(0)] Hello),
    /// I am alive.
    #[n(1)]
    Ping,
    /// Statements that may be new to you.
    #[n(2)]
    Rumours(#[n(0)] Vec<Heard>),
    /// Some nodes I know; tell me some of yours.
    #[n(3)]
    Shuffle(#[n(0)] Vec<Contact>),
    /// Some nodes I know, for those you told me.
    #[n(4)]
    ShuffleReply(#[n(0)] Vec<Contact>),
    /// I have too many neighbours; try these. Ends the link.
    #[n(5)]
    Goodbye(#[n(0)] Vec<Contact>),
}

impl Frame {
    /// Reads a frame's value.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let frame = from_bytes(bytes, "frame")?;
        match &frame {
            Self::Shuffle(contacts) | Self::ShuffleReply(contacts) | Self::Goodbye(contacts) => {
                at_most("contacts", contacts.len(), CONTACTS)?;
                for contact in contacts {
                    at_most("addresses", contact.addresses.len(), ADDRESSES)?;
                }
            }
            Self::Hello(_) | Self::Ping | Self::Rumours(_) => {}
        }
        Ok(frame)
    }
}

/// The first thing on a new stream, from whoever opened it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Opening {
    /// [`Frame`]s follow, both ways.
    #[n(0)]
    Link,
    /// A request, or one to hand on.
    #[n(1)]
    Request(#[n(0)] Parcel),
    /// Bytes follow, both ways, to and from the node that is spoken to.
    #[n(2)]
    Stream,
    /// Sealed chunks follow, both ways, to and from another node.
    #[n(3)]
    SealedStream(#[n(0)] Parcel),
}

impl Opening {
    /// Reads an opening's value.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        from_bytes(bytes, "stream opening")
    }
}

/// Something sealed from one node to another.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Parcel {
    /// Whose key sealed it.
    #[cbor(n(0), with = "name")]
    pub from: NodeId,
    /// Whose key opens it.
    #[cbor(n(1), with = "name")]
    pub to: NodeId,
    /// The sealed bytes.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub sealed: Vec<u8>,
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, sealed } = self;
        write!(f, "Parcel({} to {}, {} bytes)", from.short(), to.short(), sealed.len())
    }
}

/// What is inside a parcel.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Letter {
    /// The receiver's incarnation.
    #[n(0)]
    pub epoch: u64,
    /// The receiver's uptime when this was sealed, as far as the sender knows.
    #[n(1)]
    pub uptime_ms: u64,
    /// Random, to tell two letters apart.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub nonce: [u8; 16],
    /// The request; empty for a stream.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub body: Vec<u8>,
}

impl Letter {
    /// Reads a letter that was opened.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        from_bytes(bytes, "letter")
    }
}

impl fmt::Debug for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Letter({} bytes)", self.body.len())
    }
}

/// Why an opening was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Refusal {
    /// Too much to do; nothing was taken.
    #[n(0)]
    Busy,
    /// The relay holds no connection to the target; nothing was taken.
    #[n(1)]
    NoRoute,
    /// The target was given the request and did not answer it.
    #[n(2)]
    Unanswered,
    /// The target refuses what was sealed; the words say why.
    #[n(3)]
    Unacceptable,
}

/// The first thing back on a new stream.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Answer {
    /// The sealed answer to a request, or the start of the sealed bytes of a stream.
    #[n(0)]
    Sealed(#[cbor(n(0), with = "minicbor::bytes")] Vec<u8>),
    /// The bytes of a stream follow.
    #[n(1)]
    Accepted,
    /// Nothing follows.
    #[n(2)]
    Refused(#[n(0)] Refusal, #[n(1)] String),
}

impl Answer {
    /// Reads an answer's value.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let answer = from_bytes(bytes, "answer")?;
        if let Self::Refused(_, reason) = &answer {
            at_most("bytes of reason", reason.len(), REASON)?;
        }
        Ok(answer)
    }
}

/// Returns the bytes of a value.
pub fn to_bytes<T: Encode<()>>(value: &T) -> Vec<u8> {
    minicbor::to_vec(value).expect("writing to memory does not fail")
}

/// Returns a value as a frame.
pub fn to_frame<T: Encode<()>>(value: &T) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    minicbor::encode(value, &mut bytes).expect("writing to memory does not fail");
    let length = u32::try_from(bytes.len() - 4).expect("our own frames are below 4 GiB");
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// Reads the length in front of a frame.
pub fn frame_length(prefix: [u8; 4], limit: usize) -> Result<usize, WireError> {
    let length = usize::try_from(u32::from_be_bytes(prefix)).unwrap_or(usize::MAX);
    if length > limit {
        return Err(WireError::PeerLength { length, limit });
    }
    Ok(length)
}

const PURPOSE: &str = "rumour";

fn signed_bytes(epoch: u64, nonce: u64, body: &[u8]) -> Vec<u8> {
    [&epoch.to_be_bytes(), &nonce.to_be_bytes(), body].concat()
}

fn from_bytes<'b, T: Decode<'b, ()>>(
    bytes: &'b [u8],
    expected: &'static str,
) -> Result<T, WireError> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let value = decoder
        .decode()
        .map_err(|error| WireError::PeerValue { expected, reason: error.to_string() })?;
    if decoder.position() != bytes.len() {
        let reason = format!("{} bytes after its end", bytes.len() - decoder.position());
        return Err(WireError::PeerValue { expected, reason });
    }
    Ok(value)
}

fn at_most(what: &'static str, count: usize, limit: usize) -> Result<(), WireError> {
    if count > limit {
        return Err(WireError::PeerCount { what, count, limit });
    }
    Ok(())
}

/// A node's name as a byte string.
mod name {
    use minicbor::{
        Decoder, Encoder, bytes::ByteArray, decode::Error as Refused, encode::Error as Unwritten,
        encode::Write,
    };
    use types::ids::NodeId;

    pub(super) fn encode<C, W: Write>(
        node: &NodeId,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), Unwritten<W::Error>> {
        encoder.bytes(node.as_bytes())?.ok()
    }

    pub(super) fn decode<C>(decoder: &mut Decoder<'_>, context: &mut C) -> Result<NodeId, Refused> {
        let bytes: ByteArray<32> = decoder.decode_with(context)?;
        Ok(NodeId::from_bytes(bytes.into()))
    }
}

/// Names as an array of byte strings.
mod names {
    use minicbor::{
        Decoder, Encoder, bytes::ByteArray, decode::Error as Refused, encode::Error as Unwritten,
        encode::Write,
    };
    use types::ids::NodeId;

    pub(super) fn encode<C, W: Write>(
        nodes: &[NodeId],
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), Unwritten<W::Error>> {
        let count = u64::try_from(nodes.len()).map_err(|_| Unwritten::message("count"))?;
        encoder.array(count)?;
        for node in nodes {
            encoder.bytes(node.as_bytes())?;
        }
        Ok(())
    }

    pub(super) fn decode<C>(
        decoder: &mut Decoder<'_>,
        context: &mut C,
    ) -> Result<Vec<NodeId>, Refused> {
        let bytes: Vec<ByteArray<32>> = decoder.decode_with(context)?;
        Ok(bytes.into_iter().map(|bytes| NodeId::from_bytes(bytes.into())).collect())
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;

    use super::*;

    fn identity() -> Identity {
        Identity::new(SigningKey::from_bytes(&[4; 32]))
    }

    fn announcement() -> Announcement {
        Announcement {
            role: Role::Provider,
            addresses: vec!["192.0.2.1:4000".parse().expect("an address")],
            neighbours: vec![identity().id()],
            lifetime_ms: 12_000,
            uptime_ms: 7,
        }
    }

    #[test]
    fn frames_round_trip() {
        let rumour = Rumour::new(&identity(), 3, 9, &Statement::Announce(announcement()));
        let frame = Frame::Rumours(vec![Heard { rumour: rumour.clone(), age_ms: 5 }]);
        let bytes = to_frame(&frame);
        let prefix = bytes[..4].try_into().expect("four bytes");
        assert_eq!(frame_length(prefix, LINK_FRAME), Ok(bytes.len() - 4));
        assert_eq!(Frame::decode(&bytes[4..]), Ok(frame));
        assert_eq!(rumour.verify(), Ok(()));
        assert_eq!(rumour.statement(), Ok(Statement::Announce(announcement())));
        let parcel = Parcel { from: identity().id(), to: identity().id(), sealed: vec![1, 2] };
        let opening = Opening::Request(parcel);
        assert_eq!(Opening::decode(&to_bytes(&opening)), Ok(opening));
        let answer = Answer::Refused(Refusal::Busy, "later".to_owned());
        assert_eq!(Answer::decode(&to_bytes(&answer)), Ok(answer));
    }

    #[test]
    fn a_rumour_is_bound_to_its_place() {
        let rumour = Rumour::new(&identity(), 3, 9, &Statement::Leave);
        assert!(Rumour { nonce: 10, ..rumour.clone() }.verify().is_err());
        assert!(Rumour { epoch: 4, ..rumour.clone() }.verify().is_err());
        assert!(Rumour { body: to_bytes(&Statement::Payload(vec![])), ..rumour }.verify().is_err());
    }

    #[test]
    fn bounds_hold() {
        let contact = Contact { node: identity().id(), addresses: vec![] };
        let many = Frame::Shuffle(vec![contact; CONTACTS + 1]);
        assert!(matches!(Frame::decode(&to_bytes(&many)), Err(WireError::PeerCount { .. })));
        let long = Statement::Payload(vec![0; PAYLOAD + 1]);
        let rumour = Rumour::new(&identity(), 0, 0, &long);
        assert!(matches!(rumour.statement(), Err(WireError::PeerCount { .. })));
        let mut trailing = to_bytes(&Frame::Ping);
        trailing.push(0);
        assert!(matches!(Frame::decode(&trailing), Err(WireError::PeerValue { .. })));
        assert!(frame_length([0xff; 4], LINK_FRAME).is_err());
        assert!(Frame::decode(&[0x9f, 0x9f, 0x9f]).is_err());
    }
}
