//! Private keys in files: the Ed25519 seed (RFC 8032 §5.1.5) as 64 hexadecimal digits and a line
//! feed, readable by the owner alone.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use lease::{SigningKey, authority::public_key};

/// Most bytes that are read of a key file: more than one has.
const MAX_LENGTH: u64 = 4096;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum KeyFileError {
    #[error("{} is there already, and a key is never replaced: name another file{kept}", path.display())]
    Exists { path: PathBuf, kept: String },
    #[error("there is no key file {}; `holdfast keygen --out FILE` makes one", path.display())]
    Missing { path: PathBuf },
    #[error("cannot read the key file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write the key file {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is no key as `holdfast keygen` makes it, nor can keys of SSH or in PEM be used", path.display())]
    Form { path: PathBuf, source: types::hex::HexError },
    #[error(
        "the key file {0} can be read by others (mode {mode:o}): chmod 600 {0}, or make another key if they did",
        path.display()
    )]
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
    write().map_err(|source| {
        let path = path.to_owned();
        if source.kind() != io::ErrorKind::AlreadyExists {
            return KeyFileError::Write { path, source };
        }
        let told =
            |key: SigningKey| format!("; the public key of this one is {}", public_key(&key));
        let kept = read(&path).map(told).unwrap_or_default();
        KeyFileError::Exists { path, kept }
    })
}

/// Reads a key file.
pub fn read(path: &Path) -> Result<SigningKey, KeyFileError> {
    let read = || -> io::Result<(String, u32)> {
        let file = File::open(path)?;
        let mode = file.metadata()?.permissions().mode() & 0o777;
        let mut bytes = Vec::new();
        file.take(MAX_LENGTH).read_to_end(&mut bytes)?;
        Ok((String::from_utf8_lossy(&bytes).into_owned(), mode))
    };
    let (text, mode) = read().map_err(|source| {
        let path = path.to_owned();
        if source.kind() == io::ErrorKind::NotFound {
            return KeyFileError::Missing { path };
        }
        KeyFileError::Read { path, source }
    })?;
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
        let told = create(&path, &key).expect_err("there").to_string();
        assert!(told.contains("name another file") && told.contains(&public_key(&key).to_string()));
        assert!(matches!(create(folder.path(), &key), Err(KeyFileError::Exists { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("own file");
        assert!(matches!(read(&path), Err(KeyFileError::Open { mode: 0o644, .. })));
    }

    #[test]
    fn what_is_no_key_file_is_told_with_what_to_do() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.key");
        let told = |path: &Path| read(path).expect_err("refused").to_string();
        assert!(told(&path).contains("`holdfast keygen --out FILE` makes one"));
        fs::write(&path, "-----BEGIN OPENSSH PRIVATE KEY-----\n").expect("written");
        assert!(told(&path).contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("own file");
        assert!(told(&path).contains("as `holdfast keygen` makes it"));
        // Bytes of any kind and number are no key either; nothing waits for their end.
        fs::write(&path, [0xff; 100]).expect("written");
        assert!(told(&path).contains("as `holdfast keygen` makes it"));
        assert!(read(Path::new("/dev/zero")).is_err());
    }
}
