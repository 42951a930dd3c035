//! QUIC with TLS 1.3 (RFC 9001) and raw Ed25519 public keys on both sides (RFC 7250).
//!
//! There are no certificates and no names: each side proves that it holds its key, and whoever
//! dials says which key must answer.

use std::{sync::Arc, time::Duration};

use quinn::{
    TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error as TlsError, SignatureScheme,
    client::{
        AlwaysResolvesClientRawPublicKeys,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature_with_raw_key},
    pki_types::{
        CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
    },
    server::{
        AlwaysResolvesServerRawPublicKeys,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};
use types::ids::NodeId;

use super::api::OverlayError;
use crate::{
    identity::{self, Identity},
    membership::{LINK_TIMEOUT, PING},
};

/// The protocol's name in the handshake.
const ALPN: &[u8] = b"holdfast/1";
/// Streams that a peer may hold open on one connection.
pub(super) const STREAMS: u32 = 256;
/// Bytes on their way on one stream: 100 MB/s at 40 ms.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
/// Bytes on their way on all streams of a connection.
const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;

/// What dials and answers with one node's key.
#[derive(Debug)]
pub(super) struct Tls {
    provider: Arc<CryptoProvider>,
    key: Arc<CertifiedKey>,
}

impl Tls {
    pub(super) fn new(identity: &Identity) -> Result<Self, OverlayError> {
        let pkcs8 = identity.pkcs8();
        let key = aws_lc_rs::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_slice()))
            .map_err(|source| OverlayError::HostTls { source })?;
        let info = CertificateDer::from(identity::public_key_info(identity.id()));
        Ok(Self {
            provider: Arc::new(aws_lc_rs::default_provider()),
            key: Arc::new(CertifiedKey::new(vec![info], key)),
        })
    }

    /// Returns what to answer with.
    pub(super) fn server(&self) -> Result<quinn::ServerConfig, OverlayError> {
        let verifier = Arc::new(AnyNode { provider: self.provider.clone() });
        let mut config = rustls::ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|source| OverlayError::HostTls { source })?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(self.key.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        let config = QuicServerConfig::try_from(config)
            .map_err(|source| OverlayError::HostQuic { source })?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(config));
        config.transport_config(transport());
        Ok(config)
    }

    /// Returns what to dial `node` with.
    pub(super) fn client(&self, node: NodeId) -> Result<quinn::ClientConfig, OverlayError> {
        let verifier = Arc::new(ThisNode { node, provider: self.provider.clone() });
        let mut config = rustls::ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|source| OverlayError::HostTls { source })?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                self.key.clone(),
            )));
        config.alpn_protocols = vec![ALPN.to_vec()];
        let config = QuicClientConfig::try_from(config)
            .map_err(|source| OverlayError::HostQuic { source })?;
        let mut config = quinn::ClientConfig::new(Arc::new(config));
        config.transport_config(transport());
        Ok(config)
    }
}

/// Returns the node at the other end of a connection.
pub(super) fn peer_of(connection: &quinn::Connection) -> Option<NodeId> {
    let identity = connection.peer_identity()?;
    let keys = identity.downcast_ref::<Vec<CertificateDer<'static>>>()?;
    identity::node_of_public_key_info(keys.first()?)
}

fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW))
        .send_window(u64::from(CONNECTION_WINDOW))
        .datagram_receive_buffer_size(None)
        .keep_alive_interval(Some(PING))
        .max_idle_timeout(Some(
            (LINK_TIMEOUT + Duration::from_secs(2))
                .try_into()
                .expect("eight seconds fit a QUIC timeout"),
        ));
    Arc::new(transport)
}

/// Admits any node that proves its key.
#[derive(Debug)]
struct AnyNode {
    provider: Arc<CryptoProvider>,
}

/// Admits one node.
#[derive(Debug)]
struct ThisNode {
    node: NodeId,
    provider: Arc<CryptoProvider>,
}

/// What both sides' verifiers say alike: raw Ed25519 keys sign the handshake of TLS 1.3.
macro_rules! raw_ed25519 {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            Err(TlsError::General("QUIC has no TLS 1.2".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            let info = SubjectPublicKeyInfoDer::from(key.as_ref());
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature_with_raw_key(message, &info, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for ThisNode {
    raw_ed25519!();

    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        match identity::node_of_public_key_info(end_entity) {
            Some(node) if node == self.node => Ok(ServerCertVerified::assertion()),
            Some(other) => Err(TlsError::General(format!(
                "expected the key of node {}, but {other} answered",
                self.node
            ))),
            None => Err(TlsError::General("the answer is no Ed25519 key".to_owned())),
        }
    }
}

impl ClientCertVerifier for AnyNode {
    raw_ed25519!();

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        identity::node_of_public_key_info(end_entity)
            .map(|_| ClientCertVerified::assertion())
            .ok_or_else(|| TlsError::General("the dialler shows no Ed25519 key".to_owned()))
    }
}
