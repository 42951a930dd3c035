//! What a machine starts from, as the command line names it.

use std::{fs::File, io::Read, path::Path};

use flate2::read::MultiGzDecoder;
use lease::api::{Image, MAX_USER_DATA, Seed};

use super::{CliError, arguments::ImageArguments, files};

/// Returns the image of `arguments`, with the files that they name read and everything checked.
pub(super) fn of(arguments: &ImageArguments) -> Result<Image, CliError> {
    let ImageArguments {
        kernel,
        initrd,
        disk,
        cmdline,
        firmware: _,
        ssh_keys,
        user_data,
        hostname,
    } = arguments;
    let default = if kernel.is_some() { "console=ttyS0" } else { "" };
    let mut keys = Vec::new();
    for path in ssh_keys {
        keys.extend(public_keys(path)?);
    }
    let seed = Seed {
        hostname: hostname.clone(),
        ssh_keys: keys,
        user_data: user_data.as_deref().map(read_user_data).transpose()?,
    };
    let image = Image {
        kernel: *kernel,
        initrd: *initrd,
        disk: *disk,
        cmdline: cmdline.clone().unwrap_or_else(|| default.to_owned()),
        seed: (seed != Seed::default()).then_some(seed),
    };
    image.check().map_err(|error| CliError::Usage { message: error.to_string() })?;
    Ok(image)
}

/// Returns the keys in an `authorized_keys` or `.pub` file. Another file goes nowhere: it may be the private key.
fn public_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let text = files::text(path)?;
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    let path = path.display();
    let message = if text.contains("PRIVATE KEY") || text.starts_with("PuTTY-User-Key-File") {
        format!(
            "{path} is a private key, which nobody else is to have; name the public one, as {path}.pub"
        )
    } else if keys.is_empty() {
        format!(
            "{path} holds no public key; name a file as `ssh-keygen` makes it, with .pub behind its name"
        )
    } else if let Some(at) = keys.iter().position(|line| !is_public_key(line)) {
        let number = at + 1;
        format!(
            "{path}: key {number} is no public key as OpenSSH writes it, as \"ssh-ed25519 AAAA... me\""
        )
    } else {
        return Ok(keys);
    };
    Err(CliError::Usage { message })
}

/// Whether a line has a type of keys, maybe behind options, and a key behind it (sshd(8), AUTHORIZED_KEYS FILE FORMAT).
fn is_public_key(line: &str) -> bool {
    let kinds = ["ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-"];
    let mut words = line.split_whitespace();
    words.any(|word| kinds.iter().any(|kind| word.starts_with(kind)))
        && words.next().is_some_and(|key| key.starts_with("AAAA"))
}

/// First bytes of what gzip compressed.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// What some editors begin text with: a byte order mark, which UTF-8 has no use for.
const MARK: char = '\u{feff}';

/// Returns user data, which is text on its way: what gzip compressed is unpacked. A byte order mark goes, as nothing
/// finds `#cloud-config`, `#!` or JSON behind one.
fn read_user_data(path: &Path) -> Result<String, CliError> {
    let file = File::open(path).map_err(failed("open", path))?;
    let mut bytes = bounded(file, path, "read")?;
    if bytes.starts_with(&GZIP) {
        bytes = bounded(MultiGzDecoder::new(&bytes[..]), path, "unpack")?;
    }
    let text = String::from_utf8(bytes).map_err(|_| CliError::Usage {
        message: format!(
            "{} is neither text in UTF-8 nor text that gzip compressed; cloud-init's user data is text",
            path.display()
        ),
    })?;
    Ok(text.strip_prefix(MARK).map(str::to_owned).unwrap_or(text))
}

/// Reads no more than user data may have.
fn bounded(input: impl Read, path: &Path, operation: &'static str) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let most = MAX_USER_DATA as u64 + 1;
    input.take(most).read_to_end(&mut bytes).map_err(failed(operation, path))?;
    if bytes.len() <= MAX_USER_DATA {
        return Ok(bytes);
    }
    let message = format!(
        "{} has more than {MAX_USER_DATA} bytes of user data; that is the most that is passed on",
        path.display()
    );
    Err(CliError::Usage { message })
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> CliError {
    let path = path.to_owned();
    move |source| CliError::File { operation, path, source }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Parser;

    use super::{super::arguments::*, *};

    fn image(words: &[&str]) -> Result<Image, String> {
        let all = ["holdfast", "machines", "create", "--lease", "x"].iter().chain(words);
        let parsed = Arguments::try_parse_from(all).map_err(|error| error.to_string())?;
        let Command::Machines { command: MachinesCommand::Create { image, .. } } = parsed.command
        else {
            return Err("another command".to_owned());
        };
        of(&image).map_err(|error| error.to_string())
    }

    #[test]
    fn a_kernel_has_a_command_line_and_a_disk_image_has_none() {
        let id = "01".repeat(32);
        let made = image(&["--kernel", &id]).expect("an image");
        assert_eq!((made.cmdline.as_str(), made.seed), ("console=ttyS0", None));
        let made = image(&["--disk-image", &id, "--firmware", "uefi", "--hostname", "web-1"]);
        let made = made.expect("an image");
        assert_eq!((made.kernel, made.cmdline.as_str()), (None, ""));
        assert_eq!(made.seed.and_then(|seed| seed.hostname).as_deref(), Some("web-1"));
    }

    #[test]
    fn what_does_not_go_together_is_told() {
        let id = "01".repeat(32);
        let wrong: [&[&str]; 5] = [
            &[],
            &["--firmware", "uefi"],
            &["--disk", &id],
            &["--kernel", &id, "--firmware", "uefi", "--disk", &id],
            &["--disk", &id, "--firmware", "uefi", "--cmdline", "quiet"],
        ];
        assert_eq!(wrong.map(|words| image(words).is_err()), [true; 5]);
        let host = image(&["--kernel", &id, "--hostname", "a b"]).expect_err("no host name");
        assert!(host.contains("hostname"), "{host}");
    }

    fn user_data(content: &[u8]) -> Result<String, String> {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("user-data");
        std::fs::write(&file, content).expect("written");
        let id = "01".repeat(32);
        let made = image(&["--kernel", &id, "--user-data", &file.display().to_string()])?;
        Ok(made.seed.and_then(|seed| seed.user_data).expect("user data"))
    }

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        packed.write_all(content).expect("in memory");
        packed.finish().expect("in memory")
    }

    #[test]
    fn user_data_is_text_whether_gzip_compressed_it_or_not() {
        assert_eq!(user_data(b"#!/bin/sh\n").as_deref(), Ok("#!/bin/sh\n"));
        assert_eq!(
            user_data(&gzip("#cloud-config é\n".as_bytes())).as_deref(),
            Ok("#cloud-config é\n")
        );
        let parts = [gzip(b"#!/bin/sh\n"), gzip(b"true\n")].concat();
        assert_eq!(user_data(&parts).as_deref(), Ok("#!/bin/sh\ntrue\n"));
        assert_eq!(
            user_data("\u{feff}#!/bin/sh\u{feff}".as_bytes()),
            Ok("#!/bin/sh\u{feff}".into())
        );
        assert_eq!(user_data(&gzip("\u{feff}#!".as_bytes())).as_deref(), Ok("#!"));
        let most = "x".repeat(MAX_USER_DATA);
        assert_eq!(user_data(&gzip(most.as_bytes())), Ok(most));
    }

    #[test]
    fn user_data_that_is_no_text_or_too_much_is_told() {
        let told = |content: &[u8]| user_data(content).expect_err("refused");
        let short = gzip(b"#!/bin/sh\n");
        assert!(told(b"\xff\xfe#").contains("neither text"));
        assert!(told(&gzip(b"\xff")).contains("neither text"));
        assert!(told(&short[..short.len() - 4]).contains("cannot unpack"));
        assert!(told(&vec![b'x'; MAX_USER_DATA + 1]).contains("more than 131072 bytes"));
        assert!(told(&gzip(&vec![b'x'; 64 << 20])).contains("more than 131072 bytes"));
    }

    #[test]
    fn keys_are_the_lines_of_their_files() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("keys");
        let text = "# mine\nssh-ed25519 AAAA me\n\n restrict,from=\"a b\" ssh-rsa AAAAB\n";
        std::fs::write(&file, text).expect("written");
        let id = "01".repeat(32);
        let made = image(&["--kernel", &id, "--ssh-key", &file.display().to_string()]);
        let keys = made.expect("an image").seed.expect("a seed").ssh_keys;
        assert_eq!(keys, ["ssh-ed25519 AAAA me", "restrict,from=\"a b\" ssh-rsa AAAAB"]);
    }

    #[test]
    fn what_is_no_public_key_goes_nowhere() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("id_ed25519");
        let told = |text: &str| {
            std::fs::write(&file, text).expect("written");
            let id = "01".repeat(32);
            image(&["--kernel", &id, "--ssh-key", &file.display().to_string()])
                .expect_err("refused")
        };
        let private =
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNza\n-----END OPENSSH PRIVATE KEY-----\n";
        assert!(
            told(private).contains("is a private key") && told(private).contains("id_ed25519.pub")
        );
        assert!(told("PuTTY-User-Key-File-3: ssh-ed25519\n").contains("is a private key"));
        assert!(told("").contains("holds no public key"));
        let other = told("ssh-ed25519 AAAA\n---- BEGIN SSH2 PUBLIC KEY ----\n");
        assert!(other.contains("key 2 is no public key"), "{other}");
    }
}
