//! `release`: makes and maintains a repository of releases.
//!
//! ```text
//! release key new FILE | key show KEY
//! release init|stage|sign|publish|rotate|withdraw|verify --repository DIR …
//! ```
//!
//! A KEY is an encrypted key file, or a `pkcs11:` URI for a key in a token. `init`, `stage`, `rotate`
//! and `withdraw` change the folder `staged` only and need no secret; `sign` adds a signature to
//! what is staged, once for each key, on whatever machine has it; `publish` needs the online key.
//! Passphrases come from a file or the terminal.

#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    error::Error,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, Parser, Subcommand};
use jiff::Timestamp;
use rustix::termios::{self, LocalModes, OptionalActions, SpecialCodeIndex};
use update::{
    channel::{Release, Wave, Waves},
    delta::{self, Chunks, Piece},
    release::{
        KeyFile, Plan, PublicKey, Repository, Rotation, Signer, Staging, TIMESTAMP_DAYS, TokenKey,
        TopKeys,
    },
};
use zeroize::Zeroizing;

/// Makes and maintains a repository of releases.
#[derive(Parser)]
#[command(name = "release", version)]
struct Arguments {
    /// Folder of the repository; `metadata` and `targets` in it are for mirrors
    #[arg(long, global = true, value_name = "DIR", default_value = ".")]
    repository: PathBuf,
    /// File with the passphrase of key files; without it the terminal is asked
    #[arg(long, global = true, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make keys and look at them
    #[command(subcommand)]
    Key(KeyCommand),
    /// Stage the first version of a repository
    Init(Init),
    /// Stage a release: its UKI, its SBOM, and a manifest that binds them
    Stage(Stage),
    /// Sign what is staged with a key
    Sign {
        /// Key file or pkcs11 URI
        #[arg(long)]
        key: String,
    },
    /// Publish what is staged and signed; without anything staged, renew the timestamp
    Publish {
        /// Key of snapshot and timestamp
        #[arg(long)]
        key: Vec<String>,
        /// Days that the timestamp is good for
        #[arg(long, default_value_t = TIMESTAMP_DAYS)]
        days: i64,
    },
    /// Stage other keys for root, targets, snapshot, timestamp, or a channel
    Rotate {
        /// The role
        role: String,
        /// Key that may sign from then on
        #[arg(long)]
        add: Vec<String>,
        /// Id of a key that may not sign any longer
        #[arg(long)]
        remove: Vec<String>,
        /// How many keys must sign
        #[arg(long)]
        threshold: Option<u64>,
    },
    /// Stage the withdrawal of a release: nodes that run it leave it
    Withdraw {
        /// The channel that has it
        #[arg(long)]
        channel: String,
        /// The release, as 1.0.0
        #[arg(long)]
        release: Release,
    },
    /// Say how much of a program nodes fetch that run another one
    Compare {
        /// The program that nodes run
        old: PathBuf,
        /// The program that they are to run
        new: PathBuf,
    },
    /// Read the published repository as a client does, and every target
    Verify,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Make an Ed25519 key in an encrypted file
    New {
        /// File to write; never replaced
        file: PathBuf,
    },
    /// Print a key's id and its public part
    Show {
        /// Key file or pkcs11 URI
        key: String,
    },
}

#[derive(Args)]
struct Init {
    /// Offline key of root
    #[arg(long, required = true)]
    root: Vec<String>,
    /// How many of them must sign
    #[arg(long, default_value_t = 2)]
    root_threshold: u64,
    /// Offline key of targets
    #[arg(long, required = true)]
    targets: Vec<String>,
    /// How many of them must sign
    #[arg(long, default_value_t = 2)]
    targets_threshold: u64,
    /// Key of snapshot and timestamp
    #[arg(long, required = true)]
    online: Vec<String>,
    /// Channel and a key of it; the same channel again for a further key
    #[arg(long, value_name = "NAME=KEY", required = true)]
    channel: Vec<String>,
    /// How many keys of a channel must sign
    #[arg(long, default_value_t = 1)]
    channel_threshold: u64,
}

#[derive(Args)]
struct Stage {
    /// The channel whose nodes get it
    #[arg(long)]
    channel: String,
    /// Its number, as 1.0.0; higher than those before
    #[arg(long)]
    release: Release,
    /// The unified kernel image
    #[arg(long)]
    uki: PathBuf,
    /// The software bill of materials
    #[arg(long)]
    sbom: PathBuf,
    /// Another file of the release
    #[arg(long, value_name = "KIND=FILE")]
    file: Vec<String>,
    /// The oldest release that nodes may run from now on
    #[arg(long)]
    minimum: Option<Release>,
    /// Steps: seconds from now, and permille of the nodes that may update from then on
    #[arg(long, value_name = "SECONDS=PERMILLE", value_delimiter = ',')]
    waves: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
#[error("{what}")]
struct Wrong {
    what: String,
    source: Option<Box<dyn Error>>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read what was printed has had enough of it, as `head` has.
        Err(error) if is_reader_gone(error.as_ref()) => ExitCode::from(READER_GONE),
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(error) = source {
                text.push_str(&format!(": {error}"));
                source = error.source();
            }
            eprintln!("release: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Status of a process that SIGPIPE ended, as shells count it.
const READER_GONE: u8 = 128 + 13;

/// Standard output took no more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output; what was to be done is done")]
struct Unsaid(#[source] io::Error);

/// Prints a line.
fn say(line: &dyn std::fmt::Display) -> Result<(), Unsaid> {
    writeln!(io::stdout(), "{line}").map_err(Unsaid)
}

fn is_reader_gone(error: &(dyn Error + 'static)) -> bool {
    error
        .downcast_ref::<Unsaid>()
        .is_some_and(|Unsaid(why)| why.kind() == io::ErrorKind::BrokenPipe)
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let now = Timestamp::now();
    let open = || repository(arguments);
    match &arguments.command {
        Command::Key(KeyCommand::New { file }) => new_key(arguments, file)?,
        Command::Key(KeyCommand::Show { key }) => {
            let key = public(key)?;
            say(&format_args!("{}\n{}", key.id(), String::from_utf8(key.json().canonical())?))?;
        }
        Command::Init(init) => open()?.init(&plan(init)?, now)?,
        Command::Stage(stage) => open()?.stage(&staging(stage, now)?, now)?,
        Command::Sign { key } => {
            let signed = open()?.sign(signer(arguments, key)?.as_ref())?;
            let signed = if signed.is_empty() { "nothing".into() } else { signed.join(", ") };
            say(&format_args!("signed {signed}"))?;
        }
        Command::Publish { key, days } => {
            let online: Result<Vec<_>, _> = key.iter().map(|key| signer(arguments, key)).collect();
            let published = open()?.publish(&online?, *days, now)?;
            let published: String = published.iter().map(|role| format!("{role}, ")).collect();
            say(&format_args!("published {published}timestamp"))?;
        }
        Command::Rotate { add, remove, threshold: None, .. }
            if add.is_empty() && remove.is_empty() =>
        {
            return Err(wrong(
                "nothing is to change; give --add KEY, --remove ID or --threshold N",
            ));
        }
        Command::Rotate { role, add, remove, threshold } => {
            let (role, removed, threshold) = (role.clone(), remove.clone(), *threshold);
            open()?.rotate(&Rotation { role, added: keys(add)?, removed, threshold }, now)?;
        }
        Command::Withdraw { channel, release } => open()?.withdraw(channel, *release, now)?,
        Command::Compare { old, new } => compare(old, new)?,
        Command::Verify => {
            for target in open()?.verify(now)? {
                let (length, path, role) = (target.file.length, target.path, target.role);
                say(&format_args!("{length}\t{path}\t{role}"))?;
            }
        }
    }
    Ok(())
}

/// Opens the repository. Only `init` makes one; to sign, the folder `staged` is enough.
fn repository(arguments: &Arguments) -> Result<Repository, Box<dyn Error>> {
    let folder = &arguments.repository;
    let is_there = ["metadata", "staged"].iter().any(|name| folder.join(name).is_dir());
    if !is_there && !matches!(arguments.command, Command::Init(_)) {
        let folder = folder.display();
        return Err(wrong(&format!(
            "{folder} holds no repository: name its folder with --repository, or make it with `release init`"
        )));
    }
    Ok(Repository::open(folder)?)
}

fn compare(old: &Path, new: &Path) -> Result<(), Box<dyn Error>> {
    let read = |path: &Path| fs::read(path).map_err(|error| about(path, error));
    let (old, new) = (read(old)?, read(new)?);
    let plan = Chunks::of(&new).plan(&old);
    let fetches = plan
        .as_deref()
        .map_or(1, |pieces| pieces.iter().filter(|piece| matches!(piece, Piece::Fetch(_))).count());
    let fetched = plan.as_deref().map_or(new.len() as u64, delta::fetched);
    let percent = fetched * 100 / (new.len() as u64).max(1);
    let all = new.len();
    say(&format_args!("{fetched} of {all} bytes ({percent} %), in {fetches} pieces"))?;
    Ok(())
}

fn new_key(arguments: &Arguments, file: &Path) -> Result<(), Box<dyn Error>> {
    if file.symlink_metadata().is_ok() {
        let file = file.display();
        return Err(wrong(&format!(
            "{file} is there already, and a key is never replaced; name another file"
        )));
    }
    let passphrase = passphrase(arguments, "passphrase of the new key: ")?;
    if passphrase.is_empty() {
        return Err(wrong(
            "the passphrase is empty: whoever reads the key's file could sign with it",
        ));
    }
    if arguments.passphrase_file.is_none()
        && *passphrase != *self::passphrase(arguments, "the same again: ")?
    {
        return Err(wrong("the two are not the same"));
    }
    let key = KeyFile::generate(passphrase.as_bytes())?;
    let text = key.text()?;
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    let written = made.and_then(|mut made| {
        let written = made.write_all(text.as_bytes()).and_then(|()| made.sync_all());
        // Half a key would be in the way of the next try.
        written.inspect_err(|_| drop(fs::remove_file(file)))
    });
    written.map_err(|error| about(file, error))?;
    say(&key.public()?.id())?;
    Ok(())
}

fn plan(init: &Init) -> Result<Plan, Box<dyn Error>> {
    let mut channels: BTreeMap<String, (Vec<PublicKey>, u64)> = BTreeMap::new();
    for channel in &init.channel {
        let (name, key) = pair(channel)?;
        let entry = channels.entry(name.to_owned()).or_insert((Vec::new(), init.channel_threshold));
        entry.0.push(public(key)?);
    }
    let root = (keys(&init.root)?, init.root_threshold);
    let targets = (keys(&init.targets)?, init.targets_threshold);
    Ok(Plan { keys: TopKeys { root, targets, online: keys(&init.online)? }, channels })
}

fn staging(stage: &Stage, now: Timestamp) -> Result<Staging, Box<dyn Error>> {
    let mut files = BTreeMap::from([
        ("uki".to_owned(), stage.uki.clone()),
        ("sbom".to_owned(), stage.sbom.clone()),
    ]);
    for file in &stage.file {
        let (kind, path) = pair(file)?;
        files.insert(kind.to_owned(), PathBuf::from(path));
    }
    let steps: Result<Vec<Wave>, _> = stage.waves.iter().map(|text| wave(text)).collect();
    let start = Timestamp::from_second(now.as_second())?;
    let waves = Some(Waves { start, steps: steps? }).filter(|waves| !waves.steps.is_empty());
    let (channel, release, minimum) = (stage.channel.clone(), stage.release, stage.minimum);
    Ok(Staging { channel, release, files, minimum, waves })
}

fn wave(text: &str) -> Result<Wave, Box<dyn Error>> {
    let numbers = text.split_once('=').and_then(|(after, permille)| {
        Some(Wave { after_s: after.parse().ok()?, permille: permille.parse().ok()? })
    });
    let right = "SECONDS=PERMILLE is right, as 3600=100, and 1000 permille are all nodes";
    numbers
        .filter(|wave| wave.permille <= 1000)
        .ok_or_else(|| wrong(&format!("--waves: {text:?} is no step; {right}")))
}

fn keys(names: &[String]) -> Result<Vec<PublicKey>, Box<dyn Error>> {
    names.iter().map(|name| public(name)).collect()
}

fn public(name: &str) -> Result<PublicKey, Box<dyn Error>> {
    if name.starts_with("pkcs11:") {
        return Ok(TokenKey::open(name)?.public().clone());
    }
    Ok(key_file(name)?.public()?)
}

fn signer(arguments: &Arguments, name: &str) -> Result<Box<dyn Signer>, Box<dyn Error>> {
    if name.starts_with("pkcs11:") {
        return Ok(Box::new(TokenKey::open(name)?));
    }
    let passphrase = passphrase(arguments, &format!("passphrase of {name}: "))?;
    key_file(name)?.open(passphrase.as_bytes()).map_err(|error| about(Path::new(name), error))
}

fn key_file(name: &str) -> Result<KeyFile, Box<dyn Error>> {
    let path = Path::new(name);
    let bytes = fs::read(path).map_err(|error| about(path, error))?;
    KeyFile::parse(&bytes).map_err(|error| about(path, error))
}

fn passphrase(arguments: &Arguments, prompt: &str) -> Result<Zeroizing<String>, Box<dyn Error>> {
    if let Some(path) = &arguments.passphrase_file {
        let text = Zeroizing::new(fs::read_to_string(path).map_err(|error| about(path, error))?);
        return Ok(Zeroizing::new(text.trim_end_matches('\n').to_owned()));
    }
    ask(prompt).map_err(|error| {
        let what =
            "the passphrase cannot be asked for at the terminal; give --passphrase-file FILE";
        Box::new(Wrong { what: what.to_owned(), source: Some(error.into()) }) as Box<dyn Error>
    })
}

/// Asks at the terminal and shows nothing of the answer. An interrupt is a key like others meanwhile, so that the
/// terminal is given back whatever is pressed.
fn ask(prompt: &str) -> io::Result<Zeroizing<String>> {
    let mut terminal = OpenOptions::new().read(true).write(true).open("/dev/tty")?;
    terminal.write_all(prompt.as_bytes())?;
    let before = termios::tcgetattr(&terminal)?;
    let mut silent = before.clone();
    silent.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG);
    silent.special_codes[SpecialCodeIndex::VMIN] = 1;
    silent.special_codes[SpecialCodeIndex::VTIME] = 0;
    termios::tcsetattr(&terminal, OptionalActions::Flush, &silent)?;
    let line = typed(&mut terminal);
    termios::tcsetattr(&terminal, OptionalActions::Flush, &before)?;
    terminal.write_all(b"\n")?;
    line
}

/// Longest passphrase that is typed, in bytes.
const MAX_TYPED: usize = 1024;

/// Reads keys up to the end of a line, with the editing that people are used to (termios(3): INTR, QUIT, SUSP, EOF,
/// ERASE, KILL).
fn typed(keys: &mut impl io::Read) -> io::Result<Zeroizing<String>> {
    let mut line = Zeroizing::new(String::with_capacity(MAX_TYPED));
    let mut character = Vec::new();
    loop {
        let mut key = [0];
        keys.read_exact(&mut key)?;
        match key[0] {
            b'\r' | b'\n' => return Ok(line),
            0x03 | 0x1a | 0x1c => return Err(io::Error::other("no passphrase: interrupted")),
            0x04 if line.is_empty() => return Err(io::Error::other("no passphrase was typed")),
            0x08 | 0x7f => drop(line.pop()),
            0x15 => line.clear(),
            byte => {
                character.push(byte);
                if let Ok(text) = std::str::from_utf8(&character) {
                    line.push_str(text);
                    character.clear();
                }
                if character.len() > 4 || line.len() >= MAX_TYPED - 4 {
                    return Err(io::Error::other("no passphrase: too long, or no text in UTF-8"));
                }
            }
        }
    }
}

fn pair(text: &str) -> Result<(&str, &str), Box<dyn Error>> {
    text.split_once('=').ok_or_else(|| wrong(&format!("{text:?} is no NAME=KEY or KIND=FILE")))
}

fn wrong(what: &str) -> Box<dyn Error> {
    Box::new(Wrong { what: what.to_owned(), source: None })
}

fn about(path: &Path, source: impl Into<Box<dyn Error>>) -> Box<dyn Error> {
    Box::new(Wrong { what: path.display().to_string(), source: Some(source.into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_is_typed_with_the_usual_keys() {
        let typed = |keys: &str| typed(&mut keys.as_bytes()).map(|line| line.to_string()).ok();
        assert_eq!(typed("open sesame\nmore").as_deref(), Some("open sesame"));
        assert_eq!(typed("wrong\u{15}sä\u{7f}äm\u{8}\r").as_deref(), Some("sä"));
        assert_eq!(typed("\u{7f}a\u{4}b\n").as_deref(), Some("a\u{4}b"));
        assert_eq!(typed("half\u{3}\n"), None);
        assert_eq!(typed("\u{4}"), None);
        assert_eq!(typed("no end"), None);
        assert_eq!(typed(&("x".repeat(MAX_TYPED) + "\n")), None);
    }
}
