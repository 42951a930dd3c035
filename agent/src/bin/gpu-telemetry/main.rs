//! Reads what the driver tells of GPUs, and writes it: to standard output, to whoever connects to a
//! unix socket, or over vsock to the node that this guest runs on. Dynamically linked: NVIDIA's
//! library starts threads and needs the C library that the system has.

#![forbid(unsafe_code)]

mod nvml;

use std::{
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
    gpu::{Reader, show},
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
    \x20 --every       go on reading; once when left out\n\
    \x20 --listen      write a reading to everybody who connects to this unix socket\n\
    \x20 --host        send each reading to the node that this guest runs on, over vsock";

/// Shortest and longest time between readings, in seconds. A node forgets a guest after two minutes.
const EVERY_S: std::ops::RangeInclusive<u64> = 1..=60;

/// A reader of the socket takes a reading within this time.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

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
    let arguments = match parse(std::env::args().skip(1)) {
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

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let mut reader = Reader::new(Nvidia::load()?);
    if let Way::Listen(path) = &arguments.way {
        return serve(&mut reader, path, arguments.form);
    }
    loop {
        let text = form(&reader.read(now())?, arguments.form);
        match &arguments.way {
            Way::Host => send(text.as_bytes())?,
            Way::Output | Way::Listen(_) => {
                let mut output = io::stdout().lock();
                output.write_all(text.as_bytes())?;
                output.flush()?;
            }
        }
        let Some(seconds) = arguments.every_s else { return Ok(()) };
        std::thread::sleep(Duration::from_secs(seconds));
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

/// Writes a reading to everybody who connects, one after the other.
fn serve(
    reader: &mut Reader<Nvidia>,
    path: &Path,
    wanted: Form,
) -> Result<(), Box<dyn std::error::Error>> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        Err(_) | Ok(()) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        let text = form(&reader.read(now())?, wanted);
        // Whoever hung up does not want it.
        let _ = stream.write_all(text.as_bytes());
    }
}

/// Sends a reading to the host.
fn send(text: &[u8]) -> io::Result<()> {
    let socket = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &VsockAddr::new(HOST, READINGS_PORT))?;
    File::from(socket).write_all(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Result<Arguments, String> {
        parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_understood_or_refused() {
        assert_eq!(words(""), Ok(Arguments::default()));
        let wanted = Arguments { form: Form::Text, every_s: Some(5), ..Arguments::default() };
        assert_eq!(words("--text --every 5"), Ok(wanted));
        assert_eq!(words("--host").map(|arguments| arguments.way), Ok(Way::Host));
        for wrong in ["--every 0", "--every", "--listen", "--loud", "--host --text"] {
            assert!(words(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_real_gpu_is_read() {
        if !Path::new("/dev/nvidiactl").exists() {
            println!("skipped: a real GPU: there is no /dev/nvidiactl");
            return;
        }
        let mut reader = Reader::new(Nvidia::load().expect("a driver that answers"));
        let reading = reader.read(now()).expect("a reading");
        let gpu = reading.gpus.first().expect("a GPU");
        assert!(gpu.uuid.starts_with("GPU-"), "{gpu:?}");
        assert!(gpu.memory_total_bytes.is_some_and(|bytes| bytes > 1 << 30), "{gpu:?}");
        assert!(gpu.temperature_c.is_some_and(|degrees| (5..=110).contains(&degrees)), "{gpu:?}");
        let bytes = form(&reading, Form::Json);
        assert_eq!(GpuReading::parse(bytes.as_bytes()), Ok(reading));
    }
}
