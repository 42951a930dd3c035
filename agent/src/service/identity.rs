//! The key that the node goes by: made at its first start, kept in STATE, and never replaced by another one.

use std::{io, path::Path};

use ed25519_dalek::SigningKey;

use super::{NODE_KEY, STATE, volumes};
use crate::{config, events::Event, init::boot::chain, twice};

/// Returns the key that the node goes by, or why it has none; and why it may do no more than install, where
/// its STATE is out of reach.
pub(super) async fn own_key() -> Result<(SigningKey, Option<String>), String> {
    let lost = volumes::state_out_of_reach();
    if let Some(reason) = &lost {
        let found = config::settled(Path::new("/")).await;
        if volumes::asks_for_another_node(&found).is_none() {
            return Err(reason.clone());
        }
        eprintln!("{}", Event::Trouble { place: "state", reason: reason.clone() });
    }
    let key = node_key(Path::new(STATE))
        .map_err(|error| format!("the node's key cannot be read: {}", chain(&error)))?;
    Ok((key, lost))
}

/// Returns the node's key, which is made at the first start.
fn node_key(state: &Path) -> io::Result<SigningKey> {
    let path = state.join(NODE_KEY);
    if let Some(seed) = twice::read(&path)? {
        return Ok(SigningKey::from_bytes(&seed));
    }
    let mut seed = zeroize::Zeroizing::new([0; 32]);
    getrandom::fill(seed.as_mut()).map_err(io::Error::other)?;
    twice::write(&path, &seed)?;
    Ok(SigningKey::from_bytes(&seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_made_once_and_never_replaced() {
        let state = tempfile::tempdir().expect("a directory");
        let first = node_key(state.path()).expect("made");
        let again = node_key(state.path()).expect("read");
        assert_eq!(first.to_bytes(), again.to_bytes());
        std::fs::write(state.path().join("node.key"), [1; 31]).expect("damaged");
        assert_eq!(node_key(state.path()).expect("mended").to_bytes(), first.to_bytes());
        // A node whose key is lost for good does not become another one.
        for name in ["node.key", "node.key.copy"] {
            std::fs::write(state.path().join(name), [1; 31]).expect("damaged");
        }
        assert!(node_key(state.path()).is_err());
    }
}
