//! `image`: builds the appliance image from a checkout, with progress on the terminal.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use image::customise::{Changes, CustomiseError, Lost};
use image::keys::KeyFiles;
use image::{BuildOptions, Outcome, Progress, Step};
use indicatif::{ProgressBar, ProgressStyle};
use types::config::{MAX_CONFIG, NodeSpec};

/// Builds kernel, root file system, UKI, ISO, disk image and PXE set.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The checkout.
    #[arg(long, default_value_os_t = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".."))]
    workspace: PathBuf,
    /// Where the image goes; `target/image` in the checkout unless given.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Kernels, packages and compiled programs, kept between builds.
    #[arg(long, env = "HOLDFAST_CACHE")]
    cache: Option<PathBuf>,
    /// A node configuration to bake in as /etc/holdfast.toml.
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    keys: KeyFiles,
    /// A folder with programs that are already built; they are built from the checkout unless given.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Parallel jobs of the compilers; all processors unless given.
    #[arg(long)]
    jobs: Option<usize>,
    /// Build only the kernel and print where it is.
    #[arg(long)]
    kernel_only: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Puts a configuration into a finished image and signs it again; nothing is built.
    Customise(Customise),
}

#[derive(Args)]
struct Customise {
    /// An ISO, a disk image or a boot program, as it was built or customised.
    image: PathBuf,
    /// The customised copy.
    #[arg(long, short)]
    output: PathBuf,
    /// The node's configuration.
    #[arg(long)]
    config: PathBuf,
    /// A key of the lease authority, 64 hexadecimal digits; all of them replace the configuration's.
    #[arg(long, value_name = "KEY")]
    authority: Vec<String>,
    /// How many of the authority's keys must have signed a lease.
    #[arg(long)]
    threshold: Option<u32>,
    /// The channel of releases in the place of the configuration's.
    #[arg(long)]
    channel: Option<String>,
    #[command(flatten)]
    keys: KeyFiles,
    /// Go without the signatures that the change undoes and that no given key makes anew.
    #[arg(long)]
    drop_signatures: bool,
}

/// What a running step looks like.
#[allow(
    clippy::literal_string_with_formatting_args,
    reason = "indicatif's template language looks like format!'s"
)]
const BAR: &str = "{spinner} {prefix:10} {elapsed_precise} {wide_msg}";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.command {
        Some(Command::Customise(arguments)) => customise(arguments),
        None => run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read what was printed has had enough of it, as `head` has.
        Err(error) if is_reader_gone(error.as_ref()) => ExitCode::from(READER_GONE),
        Err(error) => {
            eprintln!("image: {error}");
            let mut cause = error.source();
            while let Some(inner) = cause {
                eprintln!("  because: {inner}");
                cause = inner.source();
            }
            ExitCode::FAILURE
        }
    }
}

/// Status of a process that SIGPIPE ended, as shells count it.
const READER_GONE: u8 = 128 + 13;

/// Standard output took no more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output; what was to be made is made")]
struct Unsaid(#[from] io::Error);

/// Prints a line.
fn say(line: &dyn std::fmt::Display) -> Result<(), Unsaid> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

fn is_reader_gone(error: &(dyn std::error::Error + 'static)) -> bool {
    error
        .downcast_ref::<Unsaid>()
        .is_some_and(|Unsaid(why)| why.kind() == io::ErrorKind::BrokenPipe)
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let workspace =
        arguments.workspace.canonicalize().unwrap_or_else(|_| arguments.workspace.clone());
    let mut options = BuildOptions::new(&workspace);
    if let Some(output) = &arguments.output {
        options.output.clone_from(output);
    }
    if let Some(cache) = &arguments.cache {
        options.cache.clone_from(cache);
    }
    if let Some(jobs) = arguments.jobs {
        options.jobs = jobs;
    }
    options.config.clone_from(&arguments.config);
    options.keys.clone_from(&arguments.keys);
    options.programs.clone_from(&arguments.programs);
    let terminal = Terminal::default();
    if arguments.kernel_only {
        let kernel = image::build_kernel(&options, &terminal)?;
        let (image, package, version) = (kernel.image.display(), kernel.package, kernel.version);
        return Ok(say(&format_args!("{image} ({package} {version})"))?);
    }
    let artifacts = image::build(&options, &terminal)?;
    Ok(say(&artifacts.folder.display())?)
}

fn customise(arguments: &Customise) -> Result<(), Box<dyn std::error::Error>> {
    let config = config(&arguments.config)?;
    let keys = arguments.keys.read()?;
    for lack in keys.lacks() {
        eprintln!("customise: {lack}");
    }
    let signatures = if arguments.drop_signatures { Lost::Dropped } else { Lost::Refused };
    let changes = Changes {
        config,
        authority: arguments.authority.clone(),
        threshold: arguments.threshold,
        channel: arguments.channel.clone(),
        keys,
        signatures,
    };
    let made = image::customise::customise(&arguments.image, &arguments.output, &changes);
    let said = made.map_err(|error| -> Box<dyn std::error::Error> {
        // The reader of this wants to know which file to open.
        if let CustomiseError::Config(what) = error {
            return format!("{} cannot be used: {what}", arguments.config.display()).into();
        }
        error.into()
    })?;
    Ok(say(&format_args!("{said:#}"))?)
}

/// Reads a configuration, as far as a node would.
fn config(path: &Path) -> Result<String, String> {
    let unread = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(unread)?;
    let mut bytes = Vec::new();
    file.take(MAX_CONFIG as u64 + 1).read_to_end(&mut bytes).map_err(unread)?;
    let text = NodeSpec::text(&bytes);
    text.map(str::to_owned).map_err(|error| format!("{} cannot be used: {error}", path.display()))
}

/// One bar per step; a plain line at the end of each where there is no terminal.
#[derive(Default)]
struct Terminal {
    current: RefCell<Option<(ProgressBar, Instant)>>,
}

impl Progress for Terminal {
    fn started(&self, step: Step) {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template(BAR) {
            bar.set_style(style);
        }
        bar.set_prefix(step.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.current.borrow_mut() = Some((bar, Instant::now()));
    }

    fn advanced(&self, _step: Step, done: u64, total: Option<u64>, what: &str) {
        if let Some((bar, _)) = &*self.current.borrow() {
            let percent = total.filter(|total| *total > 0).map(|total| done * 100 / total);
            bar.set_message(match percent {
                Some(percent) => format!("{percent:3} %  {what}"),
                None => format!("{done:4}  {what}"),
            });
        }
    }

    fn note(&self, step: Step, text: &str) {
        eprintln!("{step}: {text}");
    }

    fn finished(&self, step: Step, outcome: Outcome) {
        if let Some((bar, started)) = self.current.borrow_mut().take() {
            bar.finish_and_clear();
            let how = match outcome {
                Outcome::Built => "done",
                Outcome::Cached => "from the cache",
            };
            eprintln!("{:10} {how} in {:.1} s", step.to_string(), started.elapsed().as_secs_f64());
        }
    }
}
