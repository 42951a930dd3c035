//! Network time security: time that nobody on the way can alter.
//! Source: RFC 8915; AES-SIV-CMAC-256 is RFC 5297 with two keys of 128 bits.
//!
//! [`records`] is the key establishment's form, [`extension`] that of the packets, both pure.
//! [`establish`] talks TLS to a server, once; after that each answer brings the cookie for the next
//! question, so that no two questions can be linked.

pub mod establish;
pub mod extension;
pub mod records;

use std::collections::VecDeque;

/// TCP port of key establishment.
pub const PORT: u16 = 4460;
/// As many cookies as a server gives (RFC 8915 §4.1.6), and are kept.
const MAX_COOKIES: usize = 8;
/// Longest cookie that is kept: eight of them still fit into a datagram that no path fragments.
const MAX_COOKIE: usize = 256;

/// What a client and a server have agreed on.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    to_server: [u8; 32],
    to_client: [u8; 32],
    cookies: VecDeque<Vec<u8>>,
    /// Host to ask for the time; the one that was asked for keys when `None`.
    pub server: Option<String>,
    /// UDP port there.
    pub port: u16,
    /// The last question had no answer that counts: the server may have lost the keys of its cookies.
    pub is_doubted: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("cookies", &self.cookies.len()).finish_non_exhaustive()
    }
}

impl Session {
    /// Returns whether another question can be asked.
    pub fn is_usable(&self) -> bool {
        !self.cookies.is_empty()
    }

    fn keep(&mut self, cookie: &[u8]) {
        if self.cookies.len() < MAX_COOKIES && (1..=MAX_COOKIE).contains(&cookie.len()) {
            self.cookies.push_back(cookie.to_vec());
        }
    }
}
