//! The command line's words.

use std::{path::PathBuf, str::FromStr};

use clap::{ArgGroup, Args, Parser, Subcommand};
use types::{
    ids::{ContentId, MachineId, NodeId, PublicKey},
    node::Bdf,
};

/// The gateway where none is named: a gateway's own default, on this computer.
pub(crate) const GATEWAY: &str = "http://127.0.0.1:8460";

/// Heading of the options that every command has.
const EVERY: &str = "Options of every command";

/// Rents machines on Holdfast nodes.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version)]
pub(crate) struct Arguments {
    /// Where the gateway's HTTP API is: http://HOST:PORT or https://HOST.
    #[arg(
        long,
        env = "HOLDFAST_GATEWAY",
        default_value = GATEWAY,
        global = true,
        value_name = "URL",
        help_heading = EVERY
    )]
    pub(crate) gateway: String,
    /// Certificates (PEM) of those that may vouch for a gateway at https; the system's unless given.
    #[arg(long, env = "HOLDFAST_CA_FILE", global = true, value_name = "FILE", help_heading = EVERY)]
    pub(crate) ca_file: Option<PathBuf>,
    /// File of the private key that signs.
    #[arg(long, env = "HOLDFAST_KEY", global = true, value_name = "FILE", help_heading = EVERY)]
    pub(crate) key: Option<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) json: bool,
    /// Send nothing: print each request as a command line of curl, signed. It counts once and for
    /// five minutes.
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) curl: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a private key.
    Keygen {
        /// File to write; never replaced. `holdfast.key` unless given.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Sign, show, check and combine leases.
    Lease {
        #[command(subcommand)]
        command: LeaseCommand,
    },
    /// List the nodes that offer machines.
    Nodes,
    /// One node.
    Node {
        #[command(subcommand)]
        command: NodeCommand,
    },
    /// Files on the gateway; uploading needs a lease.
    Content {
        #[command(subcommand)]
        command: ContentCommand,
    },
    /// Disk images on this computer.
    Image {
        #[command(subcommand)]
        command: ImageCommand,
    },
    /// Machines.
    Machines {
        #[command(subcommand)]
        command: MachinesCommand,
    },
    /// Print a machine's console, or type at it.
    Console {
        /// The machine.
        machine: MachineId,
        /// Go on printing what it shows.
        #[arg(long, short)]
        follow: bool,
        /// Print what it showed last before its latest start.
        #[arg(long, conflicts_with = "follow")]
        previous: bool,
        /// Type at it too: each key goes to the machine as it is pressed. `~.` at the start of a line leaves it.
        #[arg(long, short, conflicts_with_all = ["follow", "previous"])]
        interactive: bool,
        /// Key that begins what is meant for this command, at the start of a line; `none` for none.
        #[arg(long, default_value = "~", requires = "interactive", value_name = "KEY")]
        escape: EscapeKey,
    },
    /// Print what a machine used, after checking its node's signatures.
    Receipts {
        /// The machine, there or gone.
        machine: MachineId,
        /// A lease of the machine, against which node, price and sums are checked too; repeat for
        /// each renewal.
        #[arg(long = "lease")]
        leases: Vec<PathBuf>,
        /// Check receipts that were kept, as `--json` printed them; nobody is asked then.
        #[arg(long, value_name = "FILE")]
        saved: Option<PathBuf>,
    },
    /// Connect standard input and output with a TCP port of a machine.
    Tunnel {
        /// The machine.
        machine: MachineId,
        /// The port.
        port: u16,
    },
    /// Log in to a machine with OpenSSH, as `holdfast ssh MACHINE -- -l root uname -a`.
    Ssh {
        /// The machine.
        machine: MachineId,
        /// Options and command for ssh.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
}

/// The key that begins what is meant for the command and not for the guest, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EscapeKey(pub(crate) Option<u8>);

impl FromStr for EscapeKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.as_bytes() {
            b"none" => Ok(Self(None)),
            // With these for keys, what comes behind would be one of two things.
            [key] if key.is_ascii_graphic() && !matches!(key, b'.' | b'?') => Ok(Self(Some(*key))),
            _ => Err("expected one character of ASCII, as ~ or %, and neither . nor ?; or none"
                .to_owned()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Sign a new lease made of flags or a file, or add a signature to an envelope.
    Sign(Box<SignArguments>),
    /// Show what an envelope says, without checking it.
    Show {
        /// The envelope.
        envelope: PathBuf,
    },
    /// Check that enough authority keys signed.
    Verify {
        /// The envelope.
        envelope: PathBuf,
        /// An authority key; repeat for each.
        #[arg(long = "authority", required = true)]
        authority: Vec<PublicKey>,
        /// How many of them must have signed.
        #[arg(long, default_value_t = 1)]
        threshold: u32,
    },
    /// Show a lease to the gateway, which then takes uploads and finds the machine. Needed once,
    /// and only for a machine that was made through another gateway.
    Register {
        /// The envelope.
        envelope: PathBuf,
    },
    /// Put the signatures of several envelopes over one lease together.
    Combine {
        /// The envelopes.
        #[arg(required = true)]
        envelopes: Vec<PathBuf>,
        /// File to write; standard output unless given.
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

/// What a signed lease is made from: `--add`, `--from`, or the other flags.
#[derive(Debug, Args)]
pub(crate) struct SignArguments {
    /// File to write; standard output unless given.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Add the signature to this envelope.
    #[arg(long, conflicts_with_all = ["from", "node"])]
    pub(crate) add: Option<PathBuf>,
    /// Take the lease from this file: TOML, or JSON when it ends in `.json`.
    #[arg(long, conflicts_with = "node")]
    pub(crate) from: Option<PathBuf>,
    /// The node on which it counts.
    #[arg(long)]
    pub(crate) node: Option<NodeId>,
    /// The renter's public key.
    #[arg(long)]
    pub(crate) renter: Option<PublicKey>,
    /// Id of the lease and its machine; random unless given, needed for a renewal.
    #[arg(long)]
    pub(crate) id: Option<MachineId>,
    /// Higher for each renewal.
    #[arg(long, default_value_t = 1)]
    pub(crate) serial: u64,
    /// First second, in seconds since 1970; now unless given.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) start: Option<u64>,
    /// Seconds from start to end.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<u64>,
    /// Virtual CPUs.
    #[arg(long, default_value_t = 1)]
    pub(crate) vcpus: u32,
    /// Memory.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(crate) memory_mib: u64,
    /// Disk; 0 for none.
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub(crate) disk_mib: u64,
    /// PCI device of the node, as 0000:01:00.0; repeat for each.
    #[arg(long = "device")]
    pub(crate) devices: Vec<Bdf>,
    /// Most MiB that its disks move each second, reads and writes together; unbounded unless given.
    #[arg(long)]
    pub(crate) disk_mib_per_second: Option<u64>,
    /// Most requests to its disks each second; unbounded unless given.
    #[arg(long)]
    pub(crate) disk_operations_per_second: Option<u64>,
    /// What the price is counted in.
    #[arg(long, default_value = "FREE")]
    pub(crate) price_unit: String,
    /// Millionths of it for each second.
    #[arg(long, default_value_t = 0)]
    pub(crate) price_micro_per_second: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// Show a node and its devices.
    Show {
        /// The node.
        node: NodeId,
    },
    /// Have a node prove by its TPM which release it runs. The answer is judged here, not by the gateway.
    Attest(AttestArguments),
    /// Give a node that has no configuration one, with the code that its console shows. No gateway is needed.
    Claim(ClaimArguments),
    /// Open the recovery key of a node's disk with the operator's key that it was sealed to.
    RecoveryKey(RecoveryKeyArguments),
    /// Reset a quarantined device once more, with an operator's key. It is offered again if it answers. A drive is
    /// erased, with what its last renter wrote.
    ReleaseDevice {
        /// The node.
        node: NodeId,
        /// The device's address on it, as 0000:41:00.0.
        device: Bdf,
    },
    /// Tell a node about its updates, with an operator's key.
    Update {
        /// What it is to do.
        word: UpdateWord,
        /// The node.
        node: NodeId,
    },
    /// Restart a node's service, with an operator's key. Its machines go on.
    RestartAgent {
        /// The node.
        node: NodeId,
    },
}

/// What a node is to prove.
#[derive(Debug, Args)]
pub(crate) struct AttestArguments {
    /// The node.
    pub(crate) node: NodeId,
    /// File that describes a release that counts: measurements.json, beside its image; repeat for each.
    #[arg(long, required = true)]
    pub(crate) measurements: Vec<PathBuf>,
    /// A TPM that counts, as this command shows it; repeat for each.
    #[arg(long = "tpm")]
    pub(crate) tpms: Vec<String>,
    /// File with certificates of authorities of TPMs' makers, PEM or DER; repeat for each. A TPM counts that one of
    /// them vouches for. Without this and --tpm any does, also one that is somebody's program.
    #[arg(long = "tpm-authority", value_name = "FILE")]
    pub(crate) tpm_authorities: Vec<PathBuf>,
}

/// A recovery key that was sealed to an operator.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whose").required(true).args(["node", "sealed"]))]
pub(crate) struct RecoveryKeyArguments {
    /// The node, which is asked for it.
    pub(crate) node: Option<NodeId>,
    /// The sealed key, as a locked node shows it in its event recovery-key; nobody is asked then.
    #[arg(long)]
    pub(crate) sealed: Option<String>,
}

/// A node that is claimed.
#[derive(Debug, Args)]
pub(crate) struct ClaimArguments {
    /// Its address or name, with a port if it is another than 4600.
    pub(crate) address: String,
    /// The code on its console.
    #[arg(long)]
    pub(crate) code: String,
    /// The configuration: holdfast.toml.
    #[arg(long)]
    pub(crate) config: PathBuf,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum UpdateWord {
    /// Restart into the offered release now, although machines run: they end
    Apply,
    /// Look at the repository now
    Check,
    /// Forget which releases failed, so that they are tried again
    Forget,
    /// Stay on the release that runs until told to resume; one that is withdrawn is left all the same
    Hold,
    /// Follow the repository again
    Resume,
}

impl UpdateWord {
    /// Returns the word as it travels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Check => "check",
            Self::Forget => "forget",
            Self::Hold => "hold",
            Self::Resume => "resume",
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ContentCommand {
    /// Upload a file and print its digest.
    Push {
        /// The file.
        file: PathBuf,
        /// A signed lease of the key, when the gateway has seen none yet.
        #[arg(long)]
        lease: Option<PathBuf>,
        /// Upload a file that machines cannot read as a disk, too.
        #[arg(long)]
        as_is: bool,
    },
    /// Remove an uploaded file.
    Remove {
        /// Its digest.
        content: ContentId,
    },
}

/// What a machine starts from: a kernel, or firmware and a disk.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("start").required(true).args(["kernel", "firmware"]))]
pub(crate) struct ImageArguments {
    /// Digest of the kernel.
    #[arg(long)]
    pub(crate) kernel: Option<ContentId>,
    /// Digest of the initramfs.
    #[arg(long, requires = "kernel")]
    pub(crate) initrd: Option<ContentId>,
    /// Digest of what the disk holds at first: a raw disk, as `image import` makes it.
    #[arg(long, visible_alias = "disk-image")]
    pub(crate) disk: Option<ContentId>,
    /// Kernel command line; `console=ttyS0` unless given.
    #[arg(long, requires = "kernel")]
    pub(crate) cmdline: Option<String>,
    /// What starts the disk.
    #[arg(long, value_enum, requires = "disk")]
    pub(crate) firmware: Option<Firmware>,
    /// File with public keys for the image's usual user, as authorized_keys; repeat for each file.
    #[arg(long = "ssh-key")]
    pub(crate) ssh_keys: Vec<PathBuf>,
    /// File with user data for cloud-init, or a configuration for Ignition (JSON): text, which gzip may have compressed.
    #[arg(long)]
    pub(crate) user_data: Option<PathBuf>,
    /// Host name, for cloud-init and, where there is no user data, for Ignition.
    #[arg(long)]
    pub(crate) hostname: Option<String>,
}

/// What is chosen of a machine's hardware.
#[derive(Debug, Args)]
pub(crate) struct HardwareArguments {
    /// What its disk looks like to the guest.
    #[arg(long, value_enum, default_value = "virtio-blk")]
    pub(crate) disk_model: Model,
    /// Offer the guest the interfaces that Windows knows from Hyper-V.
    #[arg(long)]
    pub(crate) hyperv: bool,
    /// Size of its own disk; what is left of the lease's disk space is for disks attached later.
    #[arg(long, value_name = "MIB")]
    pub(crate) own_disk_mib: Option<u64>,
    /// Empty ports for disks that are attached while it runs.
    #[arg(long, default_value_t = 0)]
    pub(crate) spare_ports: u8,
    /// Device of the lease that is attached later, as 0000:01:00.0; repeat for each.
    #[arg(long = "later")]
    pub(crate) plugged_later: Vec<Bdf>,
}

/// What a disk looks like to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Model {
    /// virtio-blk: the fastest, for guests that have its driver.
    VirtioBlk,
    /// An NVMe controller, for all others.
    Nvme,
}

/// What is attached.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("attached").required(true).args(["disk", "device"]))]
pub(crate) struct AttachArguments {
    /// The machine.
    pub(crate) machine: MachineId,
    /// Name of the disk: lower-case letters, digits and hyphens, 20 at most.
    #[arg(long)]
    pub(crate) disk: Option<String>,
    /// Size of a new disk. A disk that was detached comes back by its name alone.
    #[arg(long, value_name = "MIB", requires = "disk")]
    pub(crate) size_mib: Option<u64>,
    /// What it looks like to the guest.
    #[arg(long, value_enum, default_value = "virtio-blk", requires = "disk")]
    pub(crate) model: Model,
    /// Digest of what is on it; without a size, it can only be read.
    #[arg(long, requires = "disk")]
    pub(crate) content: Option<ContentId>,
    /// A device of the lease that `create --later` left out, as 0000:01:00.0.
    #[arg(long)]
    pub(crate) device: Option<Bdf>,
}

/// What starts a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Firmware {
    /// UEFI, with variables of the machine's own.
    Uefi,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Make a raw disk of an image and print its digest, under which `content push` uploads it.
    Import {
        /// The image: qcow2, VMDK, VHD, VHDX or raw. It is only read.
        file: PathBuf,
        /// Its format; told by its first bytes unless given. `raw` takes any file as it is.
        #[arg(long)]
        format: Option<crate::import::Format>,
        /// File to write; never replaced. Zeroes are holes in it.
        #[arg(long, short)]
        out: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum MachinesCommand {
    /// Make the machine of a lease.
    Create {
        /// The signed lease.
        #[arg(long)]
        lease: PathBuf,
        #[command(flatten)]
        image: Box<ImageArguments>,
        #[command(flatten)]
        hardware: Box<HardwareArguments>,
        /// Name of this request, under which it is done at most once; taken from the lease unless
        /// given.
        #[arg(long)]
        idempotency_key: Option<String>,
    },
    /// List the key's machines.
    List,
    /// Show one.
    Show {
        /// The machine.
        machine: MachineId,
    },
    /// Start it.
    Start {
        /// The machine.
        machine: MachineId,
    },
    /// Ask it to stop, then stop it.
    Stop {
        /// The machine.
        machine: MachineId,
    },
    /// Restart it.
    Restart {
        /// The machine.
        machine: MachineId,
    },
    /// Make its guest wait.
    Pause {
        /// The machine.
        machine: MachineId,
    },
    /// Let its guest go on.
    Resume {
        /// The machine.
        machine: MachineId,
    },
    /// Send its guest an interrupt that cannot be masked.
    Nmi {
        /// The machine.
        machine: MachineId,
    },
    /// What its process counted.
    Counters {
        /// The machine.
        machine: MachineId,
        /// As text that Prometheus reads.
        #[arg(long)]
        prometheus: bool,
    },
    /// What happened to its guest.
    Events {
        /// The machine.
        machine: MachineId,
        /// Number of the first event wanted.
        #[arg(long, default_value_t = 0)]
        from: u64,
    },
    /// Save registers and memory of its guest, which waits meanwhile, as an ELF core file.
    Dump {
        /// The machine.
        machine: MachineId,
        /// File to write; never replaced.
        #[arg(long)]
        out: PathBuf,
    },
    /// Attach a disk or a device while it runs, or for its next start.
    Attach(AttachArguments),
    /// Detach what was attached. What is on a disk is kept.
    Detach {
        /// The machine.
        machine: MachineId,
        /// Name of the disk, or address of the device.
        name: String,
        /// Pull it, whatever the guest does with it.
        #[arg(long)]
        pull: bool,
        /// Destroy what is kept of a disk that was detached.
        #[arg(long, conflicts_with = "pull")]
        erase: bool,
    },
    /// List what is attached.
    Devices {
        /// The machine.
        machine: MachineId,
    },
    /// End it and destroy its disk.
    Delete {
        /// The machine.
        machine: MachineId,
    },
    /// Bring a lease with a higher serial.
    Renew {
        /// The machine.
        machine: MachineId,
        /// The signed lease.
        #[arg(long)]
        lease: PathBuf,
    },
}
