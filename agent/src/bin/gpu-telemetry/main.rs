//! Reads what the driver tells of GPUs, and writes it: to standard output, to whoever connects to a
//! unix socket, or over vsock to the node that this guest runs on. Dynamically linked: NVIDIA's
//! library starts threads and needs the C library that the system has.

#![forbid(unsafe_code)]

mod nvml;

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent::{
    gpu::{Library, LibraryError, Reader, show},
    init::boot::chain,
    local::exposition::Exposition,
};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use nvml::Nvidia;
use types::{
    gpu::{GpuReading, READINGS_PORT},
    units::UnixSeconds,
};

const USAGE: &str = "usage: gpu-telemetry [--json | --text | --prometheus] \
    [--every SECONDS] [--listen PATH | --host]\n\
    \x20 --json        one JSON document per reading (the default)\n\
    \x20 --text        lines for people\n\
    \x20 --prometheus  metrics, format 0.0.4\n\
    \x20 --every       go on reading, also after a failure; once when left out\n\
    \x20 --listen      write a reading to everybody who connects to this unix socket\n\
    \x20 --host        send each reading to the node that this guest runs on, over vsock";

/// Shortest and longest time between readings, in seconds. A node forgets a guest after two minutes.
const EVERY_S: std::ops::RangeInclusive<u64> = 1..=60;

/// A reader of the socket takes a reading within this time.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a reader of the socket could not be answered.
const PAUSE: Duration = Duration::from_secs(1);

/// Context id of the host (`VMADDR_CID_HOST`).
const HOST: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Form {
    #[default]
    Json,
    Text,
    Prometheus,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Way {
    #[default]
    Output,
    Listen(PathBuf),
    Host,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Arguments {
    form: Form,
    way: Way,
    every_s: Option<u64>,
}

fn main() -> ExitCode {
    let words = words(std::env::args_os().skip(1));
    if asks_for_help(&words) {
        // Whoever does not read it has asked for nothing else.
        let _ = writeln!(std::io::stdout(), "{USAGE}");
        return ExitCode::SUCCESS;
    }
    let arguments = match parse(words.into_iter()) {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("gpu-telemetry: {wrong}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-telemetry: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Returns words that can be told; one of other bytes than text is none of ours, and is refused as such.
fn words(given: impl Iterator<Item = OsString>) -> Vec<String> {
    given.map(|word| word.to_string_lossy().into_owned()).collect()
}

fn asks_for_help(words: &[String]) -> bool {
    words.iter().any(|word| word == "--help" || word == "-h")
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--json" => arguments.form = Form::Json,
            "--text" => arguments.form = Form::Text,
            "--prometheus" => arguments.form = Form::Prometheus,
            "--host" => arguments.way = Way::Host,
            "--listen" => {
                let path = words.next().ok_or("--listen needs a path")?;
                arguments.way = Way::Listen(path.into());
            }
            "--every" => {
                let seconds = words.next().and_then(|word| word.parse().ok());
                let good = seconds.filter(|seconds| EVERY_S.contains(seconds));
                arguments.every_s = Some(good.ok_or("--every needs 1 to 60 seconds")?);
            }
            other => return Err(format!("{other:?} is not understood")),
        }
    }
    if arguments.way == Way::Host && arguments.form != Form::Json {
        return Err("the host understands JSON only".to_owned());
    }
    Ok(arguments)
}

type Failure = Box<dyn std::error::Error>;

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut reader = Reader::new(Nvidia::load);
    if let Way::Listen(path) = &arguments.way {
        return serve(&mut reader, path, arguments.form);
    }
    let mut told = Told::default();
    loop {
        let done = match (reader.read(now()), &arguments.way) {
            (Err(error), _) => Err(error.into()),
            (Ok(reading), Way::Host) => {
                send(form(&reading, arguments.form).as_bytes()).map_err(to_host)
            }
            // Whoever reads the output has gone, and nobody else comes.
            (Ok(reading), Way::Output | Way::Listen(_)) => {
                print(&form(&reading, arguments.form))?;
                Ok(())
            }
        };
        let Some(seconds) = arguments.every_s else { return done };
        told.tell(&done);
        std::thread::sleep(Duration::from_secs(seconds));
    }
}

fn to_host(error: io::Error) -> Failure {
    format!("the node did not take the reading (vsock port {READINGS_PORT} of the host): {error}")
        .into()
}

fn print(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// What was said of failures: one that stays is said once.
#[derive(Debug, Default)]
struct Told {
    last: Option<String>,
}

impl Told {
    /// Returns what is new: a failure that is not the last one, or that it is over.
    fn news(&mut self, done: &Result<(), Failure>) -> Option<String> {
        let failure = done.as_ref().err().map(|error| chain(&**error));
        if failure == self.last {
            return None;
        }
        self.last.clone_from(&failure);
        Some(failure.unwrap_or_else(|| "it works again".to_owned()))
    }

    fn tell(&mut self, done: &Result<(), Failure>) {
        if let Some(news) = self.news(done) {
            eprintln!("gpu-telemetry: {news}");
        }
    }
}

fn now() -> UnixSeconds {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixSeconds(now.as_secs())
}

fn form(reading: &GpuReading, form: Form) -> String {
    match form {
        Form::Json => {
            let text = serde_json::to_string(reading);
            text.expect("a reading holds nothing that JSON cannot") + "\n"
        }
        Form::Text => show::lines(reading).join("\n") + "\n",
        Form::Prometheus => {
            let mut out = Exposition::default();
            show::metrics(&mut out, &[show::Told { machine: "", reading }]);
            out.finish()
        }
    }
}

/// Writes a reading to everybody who connects, one after the other. Fails without a driver at its start; what
/// fails later is said, and whoever connected reads nothing.
fn serve<L: Library>(
    reader: &mut Reader<L, impl FnMut() -> Result<L, LibraryError>>,
    path: &Path,
    wanted: Form,
) -> Result<(), Failure> {
    reader.read(now())?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        Err(_) | Ok(()) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    let mut told = Told::default();
    loop {
        let done = answer(reader, &listener, wanted);
        told.tell(&done);
        if done.is_err() {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Writes a reading to the next who connects.
fn answer<L: Library>(
    reader: &mut Reader<L, impl FnMut() -> Result<L, LibraryError>>,
    listener: &UnixListener,
    wanted: Form,
) -> Result<(), Failure> {
    let (mut stream, _) = listener.accept()?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let text = form(&reader.read(now())?, wanted);
    // Whoever hung up does not want it.
    let _ = stream.write_all(text.as_bytes());
    Ok(())
}

/// Sends a reading to the host.
fn send(text: &[u8]) -> io::Result<()> {
    let socket = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &VsockAddr::new(HOST, READINGS_PORT))?;
    File::from(socket).write_all(text)
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream};

    use types::gpu::{Gpu, Origin, Xid};

    use super::*;

    fn parsed(text: &str) -> Result<Arguments, String> {
        parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_understood_or_refused() {
        assert_eq!(parsed(""), Ok(Arguments::default()));
        let wanted = Arguments { form: Form::Text, every_s: Some(5), ..Arguments::default() };
        assert_eq!(parsed("--text --every 5"), Ok(wanted));
        assert_eq!(parsed("--host").map(|arguments| arguments.way), Ok(Way::Host));
        for wrong in ["--every 0", "--every", "--listen", "--loud", "--host --text"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn help_is_no_mistake_and_other_bytes_are_one() {
        use std::os::unix::ffi::OsStringExt;
        let asked =
            |word: &str| asks_for_help(&words(["--text", word].map(OsString::from).into_iter()));
        assert_eq!(["--help", "-h", "--host"].map(asked), [true, true, false]);
        let bytes = words([OsString::from_vec(vec![0xff])].into_iter());
        assert!(parse(bytes.into_iter()).is_err());
    }

    #[test]
    fn a_failure_that_stays_is_said_once() {
        let mut told = Told::default();
        let failed = |text: &str| Err(Failure::from(text.to_owned()));
        assert_eq!(told.news(&Ok(())), None);
        assert_eq!(told.news(&failed("no node")).as_deref(), Some("no node"));
        assert_eq!(told.news(&failed("no node")), None);
        assert_eq!(told.news(&failed("no driver")).as_deref(), Some("no driver"));
        assert_eq!(told.news(&Ok(())).as_deref(), Some("it works again"));
        assert_eq!(told.news(&failed("no driver")).as_deref(), Some("no driver"));
    }

    /// A library whose driver is replaced after it was loaded first.
    struct Moody(u32);

    impl Library for Moody {
        fn origin(&self) -> Origin {
            Origin::Recorded
        }

        fn versions(&self) -> Result<(String, String), LibraryError> {
            Ok((format!("driver {}", self.0), String::new()))
        }

        fn count(&self) -> Result<u32, LibraryError> {
            let gone = || LibraryError::Gone { reason: "unloaded".to_owned() };
            if self.0 == 1 { Err(gone()) } else { Ok(0) }
        }

        fn gpu(&self, index: u32) -> Result<Gpu, LibraryError> {
            Err(LibraryError::Gpu { index, reason: "none is there".to_owned() })
        }

        fn failures(&mut self) -> Vec<Xid> {
            Vec::new()
        }
    }

    #[test]
    fn a_socket_is_served_again_after_the_driver_was_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let mut loads = 0;
        let mut reader = Reader::new(|| {
            loads += 1;
            Ok(Moody(loads))
        });
        let mut heard = || {
            let mut stream = UnixStream::connect(&path).expect("connected");
            let done = answer(&mut reader, &listener, Form::Text);
            let mut text = String::new();
            stream.read_to_string(&mut text).expect("read");
            (done.is_ok(), text)
        };
        assert_eq!(heard(), (false, String::new()));
        assert_eq!(heard(), (true, "driver driver 2, CUDA , 0 GPUs\n".to_owned()));
    }

    /// What NVIDIA's own program is asked for, and the same of a reading. Only what stays as it is: work, heat
    /// and power are other ones a moment later.
    type Asked = (&'static str, fn(&Gpu) -> Option<String>);
    const GPUS: [Asked; 14] = [
        ("index", |gpu| Some(gpu.index.to_string())),
        ("name", |gpu| Some(gpu.name.clone())),
        ("uuid", |gpu| Some(gpu.uuid.clone())),
        ("serial", |gpu| gpu.serial.clone()),
        ("pci.bus_id", |gpu| Some(gpu.address.clone())),
        ("vbios_version", |gpu| gpu.vbios.clone()),
        ("memory.total", |gpu| gpu.memory_total_bytes.map(|bytes| (bytes >> 20).to_string())),
        ("enforced.power.limit", |gpu| {
            gpu.power_limit_mw.map(|limit| format!("{}.{:02}", limit / 1000, limit % 1000 / 10))
        }),
        ("ecc.mode.current", |gpu| gpu.ecc.map(switched)),
        ("ecc.errors.corrected.volatile.total", |gpu| number(gpu.ecc_corrected)),
        ("ecc.errors.uncorrected.volatile.total", |gpu| number(gpu.ecc_uncorrected)),
        ("ecc.errors.uncorrected.aggregate.total", |gpu| number(gpu.ecc_uncorrected_ever)),
        ("pcie.link.width.current", |gpu| number(gpu.pcie_lanes.map(u64::from))),
        ("mig.mode.current", |gpu| gpu.mig.map(switched)),
    ];
    const ROWS: [Asked; 5] = [
        ("gpu_uuid", |gpu| Some(gpu.uuid.clone())),
        ("remapped_rows.correctable", |gpu| number(gpu.rows_corrected)),
        ("remapped_rows.uncorrectable", |gpu| number(gpu.rows_uncorrected)),
        ("remapped_rows.pending", |gpu| gpu.rows_pending.map(yes)),
        ("remapped_rows.failure", |gpu| gpu.rows_failed.map(yes)),
    ];

    /// Compares what is told by `query` with a reading.
    fn compare(reading: &GpuReading, query: &str, asked: &[Asked]) {
        let fields: Vec<_> = asked.iter().map(|(field, _)| *field).collect();
        let mut program = std::process::Command::new("nvidia-smi");
        program.arg(format!("--query-{query}={}", fields.join(",")));
        let output = program.arg("--format=csv,noheader,nounits").output();
        let output = output.expect("nvidia-smi, which comes with the driver");
        assert!(output.status.success(), "{output:?}");
        let told = String::from_utf8(output.stdout).expect("text");
        let lines: Vec<_> = told.lines().collect();
        assert_eq!(lines.len(), reading.gpus.len(), "{told}");
        for (gpu, line) in reading.gpus.iter().zip(lines) {
            let words: Vec<_> = line.split(", ").collect();
            assert_eq!(words.len(), asked.len(), "{line}");
            for ((field, ours), theirs) in asked.iter().zip(words) {
                let absent = theirs.starts_with('[');
                assert_eq!(
                    ours(gpu).as_deref(),
                    Some(theirs).filter(|_| !absent),
                    "{field} of {line}"
                );
            }
        }
    }

    fn yes(yes: bool) -> String {
        if yes { "Yes" } else { "No" }.to_owned()
    }

    fn switched(on: bool) -> String {
        if on { "Enabled" } else { "Disabled" }.to_owned()
    }

    fn number(value: Option<u64>) -> Option<String> {
        value.map(|value| value.to_string())
    }

    #[test]
    fn a_real_gpu_is_read() {
        if !Path::new("/dev/nvidiactl").exists() {
            println!("skipped: a real GPU: there is no /dev/nvidiactl");
            return;
        }
        let mut reader = Reader::new(Nvidia::load);
        let reading = reader.read(now()).expect("a reading");
        compare(&reading, "gpu", &GPUS);
        compare(&reading, "remapped-rows", &ROWS);
        for gpu in &reading.gpus {
            assert_eq!(gpu.error, None);
            assert!(
                gpu.temperature_c.is_some_and(|degrees| (5..=110).contains(&degrees)),
                "{gpu:?}"
            );
            let memory = gpu.memory_temperature_c;
            assert!(memory.is_none_or(|degrees| (5..=110).contains(&degrees)), "{gpu:?}");
            assert!(gpu.power_mw <= gpu.power_limit_mw.map(|limit| limit * 3 / 2), "{gpu:?}");
            assert!(gpu.memory_used_bytes <= gpu.memory_total_bytes, "{gpu:?}");
        }
        let bytes = form(&reading, Form::Json);
        assert_eq!(GpuReading::parse(bytes.as_bytes()), Ok(reading));
    }
}
