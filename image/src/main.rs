//! `image`: builds the appliance image from a checkout, with progress on the terminal.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use image::customise::{Changes, Lost};
use image::keys::KeyFiles;
use image::{BuildOptions, Outcome, Progress, Step};
use indicatif::{ProgressBar, ProgressStyle};

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
        None => run(&arguments).map_err(Box::from),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
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

fn run(arguments: &Arguments) -> Result<(), image::ImageError> {
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
        println!("{} ({} {})", kernel.image.display(), kernel.package, kernel.version);
        return Ok(());
    }
    let artifacts = image::build(&options, &terminal)?;
    println!("{}", artifacts.folder.display());
    Ok(())
}

fn customise(arguments: &Customise) -> Result<(), Box<dyn std::error::Error>> {
    let path = &arguments.config;
    let config = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
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
    let said = image::customise::customise(&arguments.image, &arguments.output, &changes)?;
    println!("{said:#}");
    Ok(())
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
