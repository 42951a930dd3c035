//! The whole path in one place: authority, renter, gateway, and a host that boots the image and
//! joins. Tests and the demo stand on it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{
    guest::{self, Guest, SshKey},
    host::{Host, HostOptions, Medium, TEST_MACHINE},
    pace::Pace,
    programs::{Cli, Gateway},
};

/// How long an emulated host may take from power-on to the gateway's list of nodes.
pub const JOIN_LIMIT: Duration = Duration::from_secs(240);
/// How long a machine may take from the request to its guest being ready.
pub const GUEST_LIMIT: Duration = Duration::from_secs(480);

/// Returns the folder of the built image, or an error that says how to build it.
pub fn image_folder() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let folder = root.join("target/image");
    if !folder.join("holdfast.iso").is_file() {
        bail!("no image in {}; run `cargo xtask image`", folder.display());
    }
    Ok(folder)
}

/// A key in a file, and its public half.
#[derive(Debug, Clone)]
pub struct Key {
    /// File of the private key.
    pub file: PathBuf,
    /// Public key, 64 hexadecimal digits.
    pub public: String,
}

/// Everybody but the provider: three authority keys, a renter, an operator, a gateway.
pub struct Scene {
    /// Where everything of this scene lives.
    pub folder: PathBuf,
    /// Keys of the lease authority.
    pub authority: Vec<Key>,
    /// The renter's key.
    pub renter: Key,
    /// The key that looks after nodes.
    pub operator: Key,
    /// The renter's ssh key.
    pub ssh: SshKey,
    /// The gateway.
    pub gateway: Gateway,
    /// Where hosts see the gateway.
    pub seen_at: IpAddr,
    /// The command line without a key.
    pub cli: Cli,
    /// How fast everybody's clocks run.
    pub pace: Pace,
}

impl Scene {
    /// Makes keys and starts a gateway for hosts with [`super::host::Uplink::User`], all in
    /// `folder`.
    pub fn start(folder: &Path) -> Result<Self> {
        Self::start_at(folder, Ipv4Addr::LOCALHOST.into(), TEST_MACHINE.into())
    }

    /// The same, where everybody lives at `pace`: for guests with firmware.
    pub fn start_paced(folder: &Path, pace: Pace) -> Result<Self> {
        let addresses = [Ipv4Addr::LOCALHOST.into(), TEST_MACHINE.into()];
        Self::begin(folder, addresses, pace, "")
    }

    /// The same, with a gateway that listens at `listen` for hosts that see it at `seen_at`.
    pub fn start_at(folder: &Path, listen: IpAddr, seen_at: IpAddr) -> Result<Self> {
        Self::begin(folder, [listen, seen_at], Pace::Real, "")
    }

    /// The same as [`Self::start`], with `settings` in the gateway's file.
    pub fn start_with(folder: &Path, settings: &str) -> Result<Self> {
        let addresses = [Ipv4Addr::LOCALHOST.into(), TEST_MACHINE.into()];
        Self::begin(folder, addresses, Pace::Real, settings)
    }

    fn begin(
        folder: &Path,
        [listen, seen_at]: [IpAddr; 2],
        pace: Pace,
        settings: &str,
    ) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let cli = Cli::new()?;
        let key = |name: &str| -> Result<Key> {
            let file = folder.join(format!("{name}.key"));
            let path = file.to_str().context("a folder with a plain name")?;
            let made = cli.json(&["keygen", "--out", path])?;
            let public = made["public"].as_str().context("keygen told no public key")?.to_owned();
            Ok(Key { file, public })
        };
        let authority = ["authority-a", "authority-b", "authority-c"]
            .into_iter()
            .map(key)
            .collect::<Result<Vec<_>>>()?;
        let (renter, operator) = (key("renter")?, key("operator")?);
        let keys: Vec<&str> = authority.iter().map(|key: &Key| key.public.as_str()).collect();
        let gateway = Gateway::start(&folder.join("gateway"), listen, &keys, pace, settings)?;
        let cli = cli.with_gateway(&gateway.url).at(pace);
        let ssh = guest::ssh_key(folder)?;
        let folder = folder.to_owned();
        Ok(Self { folder, authority, renter, operator, ssh, gateway, seen_at, cli, pace })
    }

    /// Returns the command line with the renter's key.
    pub fn renter(&self) -> Cli {
        self.cli.with_key(&self.renter.file)
    }

    /// Returns the configuration of a node that joins this scene's gateway and honours leases that
    /// two of the three authority keys signed. `extra` is appended.
    pub fn node_config(&self, name: &str, extra: &str) -> String {
        let keys: Vec<String> =
            self.authority.iter().map(|k| format!("\"{}\"", k.public)).collect();
        format!(
            "version = 1\nname = \"{name}\"\noperators = [\"{}\"]\n\n\
             [authority]\nthreshold = 2\nkeys = [{}]\n\n\
             [[overlay.seeds]]\nnode = \"{}\"\naddress = \"{}:{}\"\n\n{extra}",
            self.operator.public,
            keys.join(", "),
            self.gateway.node,
            self.seen_at,
            self.gateway.overlay_port,
        )
    }

    /// Boots a node and waits until the gateway lists it; returns its name in the overlay too.
    pub fn boot(&self, name: &str, options: HostOptions) -> Result<(Host, String)> {
        let image = image_folder()?;
        let config = options.config.clone().unwrap_or_else(|| self.node_config(name, ""));
        let options = HostOptions { config: Some(config), pace: self.pace, ..options };
        let host = Host::start(&image, &self.folder.join(name), &options)?;
        let node = self.wait_for_node(name).with_context(|| {
            format!("{name} did not join; its last lines:\n{}", host.serial.tail(60))
        })?;
        Ok((host, node))
    }

    /// Waits until the gateway lists a node called `name`, and returns its key.
    pub fn wait_for_node(&self, name: &str) -> Result<String> {
        let listed = |nodes: &Value| node_named(nodes, name).is_some();
        let nodes = self.cli.wait(&["nodes"], JOIN_LIMIT, listed)?;
        node_named(&nodes, name).context("listed a moment ago")
    }

    /// Mints a lease for this scene's renter, signed by two of the three authority keys. Returns
    /// the envelope's file and the lease's id.
    pub fn lease(&self, request: &LeaseRequest<'_>) -> Result<(PathBuf, String)> {
        let envelope = self.folder.join(format!("lease-{}.json", request.name));
        let out = envelope.to_str().context("a folder with a plain name")?;
        let seconds = format!("{}", request.seconds);
        let (vcpus, serial) = (format!("{}", request.vcpus), format!("{}", request.serial));
        let start = request.start.map(|start| format!("{start}"));
        let memory = format!("{}", request.memory_mib);
        let disk = format!("{}", request.disk_mib);
        let price = format!("{}", request.micro_per_second);
        let mut arguments = vec![
            "lease",
            "sign",
            "--out",
            out,
            "--node",
            request.node,
            "--renter",
            &self.renter.public,
            "--duration",
            &seconds,
            "--vcpus",
            &vcpus,
            "--serial",
            &serial,
            "--memory-mib",
            &memory,
            "--disk-mib",
            &disk,
            "--price-unit",
            "EUR",
            "--price-micro-per-second",
            &price,
        ];
        for device in request.devices {
            arguments.extend(["--device", device]);
        }
        if let Some(start) = &start {
            arguments.extend(["--start", start]);
        }
        if let Some(id) = request.id {
            arguments.extend(["--id", id]);
        }
        self.cli.with_key(&self.authority[0].file).text(&arguments)?;
        let again = ["lease", "sign", "--add", out, "--out", out];
        self.cli.with_key(&self.authority[2].file).text(&again)?;
        let shown = self.cli.json(&["lease", "show", out])?;
        let id = shown["lease"]["id"].as_str().context("a lease without id")?.to_owned();
        Ok((envelope, id))
    }

    /// Makes a guest that this scene's renter can log in to, and uploads it, under a lease on
    /// some node that is good for nothing else here.
    pub fn push_guest(&self, script: Option<&str>) -> Result<PushedGuest> {
        self.push_made(&guest::make(&self.folder, &self.ssh.public, script)?)
    }

    /// The same, with `probe` among its programs, which tries what a guest should not be able to.
    pub fn push_probing_guest(&self) -> Result<PushedGuest> {
        self.push_made(&guest::make_probing(&self.folder, &self.ssh.public)?)
    }

    /// The same under a lease of the caller's.
    pub fn push_guest_under(&self, lease: &Path, script: Option<&str>) -> Result<PushedGuest> {
        self.push_under(lease, &guest::make(&self.folder, &self.ssh.public, script)?)
    }

    /// Uploads a guest that was made already.
    pub fn push_made(&self, guest: &Guest) -> Result<PushedGuest> {
        let nodes = self.cli.json(&["nodes"])?;
        let node = nodes[0]["node"].as_str().context("uploading needs a node to lease on")?;
        let request = LeaseRequest { name: "upload", node, ..LeaseRequest::default() };
        self.push_under(&self.lease(&request)?.0, guest)
    }

    fn push_under(&self, lease: &Path, guest: &Guest) -> Result<PushedGuest> {
        let lease = lease.to_str().context("a folder with a plain name")?;
        let push = |file: &Path| -> Result<String> {
            let path = file.to_str().context("a folder with a plain name")?;
            let pushed = self.renter().json(&["content", "push", path, "--lease", lease])?;
            Ok(pushed["content"].as_str().context("push told no digest")?.to_owned())
        };
        Ok(PushedGuest {
            kernel: push(&guest.kernel)?,
            initrd: push(&guest.initrd)?,
            kernel_file: guest.kernel.clone(),
        })
    }

    /// Uploads `content` and returns its digest.
    pub fn push(&self, name: &str, content: &[u8]) -> Result<String> {
        let file = self.folder.join(name);
        fs::write(&file, content)?;
        let path = file.to_str().context("a folder with a plain name")?;
        let pushed = self.renter().json(&["content", "push", path])?;
        Ok(pushed["content"].as_str().context("push told no digest")?.to_owned())
    }

    /// Asks for the machine of a lease, with `guest` to start from.
    pub fn create(&self, lease: &Path, guest: &PushedGuest) -> Result<Value> {
        self.create_with(lease, guest, &[])
    }

    /// Asks as [`Self::create`] does, with `more` arguments.
    pub fn create_with(&self, lease: &Path, guest: &PushedGuest, more: &[&str]) -> Result<Value> {
        self.ask(lease, guest, &[&["--cmdline", "console=ttyS0 quiet"], more].concat())
    }

    /// Asks as [`Self::create`] does, with a command line for the guest's kernel.
    pub fn create_on(&self, lease: &Path, guest: &PushedGuest, cmdline: &str) -> Result<Value> {
        self.ask(lease, guest, &["--cmdline", cmdline])
    }

    fn ask(&self, lease: &Path, guest: &PushedGuest, more: &[&str]) -> Result<Value> {
        let lease = lease.to_str().context("a folder with a plain name")?;
        let mut arguments = vec![
            "machines",
            "create",
            "--lease",
            lease,
            "--kernel",
            &guest.kernel,
            "--initrd",
            &guest.initrd,
        ];
        arguments.extend(more);
        self.renter().json(&arguments)
    }

    /// Runs `command` in the guest of machine `id` over ssh through gateway and overlay.
    pub fn ssh(&self, id: &str, command: &str) -> Result<String> {
        let identity = self.ssh.private.to_str().context("a folder with a plain name")?;
        self.renter().text(&[
            "ssh",
            id,
            "--",
            "-i",
            identity,
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=60",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
            "-l",
            "root",
            command,
        ])
    }

    /// Waits until the machine's console shows `pattern`, and returns all of the console.
    pub fn wait_for_console(&self, id: &str, pattern: &str, limit: Duration) -> Result<String> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            let console = self.renter().text(&["console", id]);
            if let Ok(text) = &console
                && text.contains(pattern)
            {
                return console;
            }
            if std::time::Instant::now() > deadline {
                let shown = console.unwrap_or_else(|error| format!("{error:#}"));
                bail!("no {pattern:?} on the console within {limit:?}; it shows\n{shown}");
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// What a lease is to say.
pub struct LeaseRequest<'a> {
    /// Names the file.
    pub name: &'a str,
    /// The node.
    pub node: &'a str,
    /// First second, since 1970; now when `None`.
    pub start: Option<u64>,
    /// Seconds from its start to its end.
    pub seconds: u64,
    /// Id of the lease it renews; a new one when `None`.
    pub id: Option<&'a str>,
    /// Higher for each renewal.
    pub serial: u64,
    /// Virtual CPUs of the machine.
    pub vcpus: u32,
    /// Memory of the machine.
    pub memory_mib: u32,
    /// Disk of the machine.
    pub disk_mib: u32,
    /// Price, in millionths of a euro for each second.
    pub micro_per_second: u64,
    /// Addresses of the devices it gets.
    pub devices: &'a [&'a str],
}

impl Default for LeaseRequest<'_> {
    fn default() -> Self {
        Self {
            name: "machine",
            node: "",
            start: None,
            seconds: 3600,
            id: None,
            serial: 1,
            vcpus: 1,
            memory_mib: 384,
            disk_mib: 0,
            micro_per_second: 0,
            devices: &[],
        }
    }
}

/// A guest whose files are in the gateway's content store.
#[derive(Debug, Clone)]
pub struct PushedGuest {
    /// Digest of the kernel.
    pub kernel: String,
    /// Digest of the initramfs.
    pub initrd: String,
    /// The kernel's own file.
    pub kernel_file: PathBuf,
}

/// A raw disk to rent out: an NVMe disk whose first bytes are `marker`. Returns the `-device`
/// argument and the arguments that go with it.
pub fn rented_nvme(folder: &Path, marker: &str) -> Result<(String, Vec<String>)> {
    fs::create_dir_all(folder)?;
    let disk = folder.join("rented.img");
    let mut content = vec![0u8; 16 << 20];
    content[..marker.len()].copy_from_slice(marker.as_bytes());
    fs::write(&disk, content)?;
    let drive = format!("if=none,id=rented,format=raw,file={}", disk.display());
    Ok(("nvme,drive=rented,serial=RENTED0".to_owned(), vec!["-drive".to_owned(), drive]))
}

/// Class code of an NVMe controller (PCI Code and ID Assignment 1.11 §1.2).
const CLASS_NVME: u64 = 0x01_08_02;

/// Returns the first NVMe disk that `node` offers for rent now, by its PCI address.
pub fn free_device(nodes: &Value, node: &str) -> Option<String> {
    let nodes = nodes.as_array()?;
    let found = nodes.iter().find(|entry| entry["node"] == node)?;
    let devices = found["devices"].as_array()?;
    let nvme = |device: &&Value| device["class"] == CLASS_NVME && device["state"]["is"] == "free";
    let free = devices.iter().find(nvme)?;
    Some(free["address"].as_str()?.to_owned())
}

/// A host's options with one NVMe disk to rent.
pub fn with_rented_nvme(folder: &Path, medium: Medium, marker: &str) -> Result<HostOptions> {
    let (device, arguments) = rented_nvme(folder, marker)?;
    Ok(HostOptions { medium, devices: vec![device], arguments, ..HostOptions::default() })
}

fn node_named(nodes: &Value, name: &str) -> Option<String> {
    let nodes = nodes.as_array()?;
    let found = nodes.iter().find(|entry| entry["name"] == name)?;
    Some(found["node"].as_str()?.to_owned())
}
