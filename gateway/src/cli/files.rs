//! Files that are named on the command line, read to a limit: a device or another file than was meant can have any
//! length.

use std::{fs::File, io::Read, path::Path};

use super::CliError;

/// Longest file of those that people or this command write, in bytes; what is in one has limits of its own.
pub(super) const SMALL: usize = 1 << 20;

/// Reads a file of at most so many bytes.
pub(super) fn bytes(path: &Path, most: usize) -> Result<Vec<u8>, CliError> {
    let failed = |source| CliError::File { operation: "read", path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() <= most {
        return Ok(bytes);
    }
    let path = path.display();
    let message = format!(
        "{path} has more than {most} bytes; that is more than is ever read of it: is it the right file?"
    );
    Err(CliError::Usage { message })
}

/// Reads a file of text.
pub(super) fn text(path: &Path) -> Result<String, CliError> {
    String::from_utf8(bytes(path, SMALL)?).map_err(|_| CliError::Usage {
        message: format!("{} is no text in UTF-8; is it the right file?", path.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_an_end_are_told() {
        let told = |path: &str| bytes(Path::new(path), SMALL).expect_err("refused").to_string();
        assert!(told("/dev/zero").contains("/dev/zero has more than 1048576 bytes"));
        assert!(told("/").contains("cannot read /"));
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"\xff").expect("written");
        assert!(text(file.path()).expect_err("refused").to_string().contains("no text in UTF-8"));
    }
}
