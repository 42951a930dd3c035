//! Private keys in files: the Ed25519 seed (RFC 8032 §5.1.5) as 64 hexadecimal digits and a line
//! feed, readable by the owner alone.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use lease::SigningKey;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum KeyFileError {
    #[error("cannot read the key file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write the key file {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("the key file {} is not 64 hexadecimal digits", path.display())]
    Form { path: PathBuf, source: types::hex::HexError },
    #[error("the key file {} can be read by others (mode {mode:o}); expected mode 600", path.display())]
    Open { path: PathBuf, mode: u32 },
    #[error("the operating system gives no random bytes: {message}")]
    Random { message: String },
}

/// Makes a key from the operating system's randomness.
pub fn generate() -> Result<SigningKey, KeyFileError> {
    let mut seed = [0u8; 32];
    getrandom::fill(&mut seed)
        .map_err(|error| KeyFileError::Random { message: error.to_string() })?;
    Ok(SigningKey::from_bytes(&seed))
}

/// Writes a new key file; one that exists is never replaced.
pub fn create(path: &Path, key: &SigningKey) -> Result<(), KeyFileError> {
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let text = types::hex::encode(&key.to_bytes()) + "\n";
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).inspect_err(|_| {
            // Half a key would be in the way of the next try.
            let _ = fs::remove_file(path);
        })
    };
    write().map_err(|source| KeyFileError::Write { path: path.to_owned(), source })
}

/// Reads a key file.
pub fn read(path: &Path) -> Result<SigningKey, KeyFileError> {
    let read = || -> io::Result<(String, u32)> {
        let mode = fs::metadata(path)?.permissions().mode() & 0o777;
        Ok((fs::read_to_string(path)?, mode))
    };
    let (text, mode) =
        read().map_err(|source| KeyFileError::Read { path: path.to_owned(), source })?;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::Open { path: path.to_owned(), mode });
    }
    let seed = types::hex::decode(text.trim_end())
        .map_err(|source| KeyFileError::Form { path: path.to_owned(), source })?;
    Ok(SigningKey::from_bytes(&seed))
}

/// Reads a key file, making it first when there is none.
pub fn read_or_create(path: &Path) -> Result<SigningKey, KeyFileError> {
    if !path.exists() {
        create(path, &generate()?)?;
    }
    read(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_their_file_and_files_are_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.key");
        let key = read_or_create(&path).expect("made");
        assert_eq!(read(&path).expect("read").to_bytes(), key.to_bytes());
        assert!(matches!(create(&path, &key), Err(KeyFileError::Write { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("own file");
        assert!(matches!(read(&path), Err(KeyFileError::Open { mode: 0o644, .. })));
    }
}
