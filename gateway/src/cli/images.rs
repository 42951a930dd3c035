//! What a machine starts from, as the command line names it.

use std::path::Path;

use lease::api::{Image, Seed};

use super::{CliError, arguments::ImageArguments};

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
        keys.extend(lines(&read(path)?));
    }
    let seed = Seed {
        hostname: hostname.clone(),
        ssh_keys: keys,
        user_data: user_data.as_deref().map(read).transpose()?,
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

/// Returns the keys in an `authorized_keys` or `.pub` file.
fn lines(text: &str) -> impl Iterator<Item = String> {
    let lines = text.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned)
}

fn read(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path).map_err(|source| CliError::File {
        operation: "read",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn keys_are_the_lines_of_their_files() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("keys");
        std::fs::write(&file, "# mine\nssh-ed25519 AAAA me\n\n ssh-rsa BBBB\n").expect("written");
        let id = "01".repeat(32);
        let made = image(&["--kernel", &id, "--ssh-key", &file.display().to_string()]);
        let keys = made.expect("an image").seed.expect("a seed").ssh_keys;
        assert_eq!(keys, ["ssh-ed25519 AAAA me", "ssh-rsa BBBB"]);
    }
}
