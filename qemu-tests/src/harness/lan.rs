//! A wired network of a host's own: a namespace of the test machine with a tap for the host and a
//! real dnsmasq, which serves DHCP, router advertisements, names and TFTP.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, unshare};

use super::{
    host::Uplink,
    serial::{Echo, Serial},
};

/// The network's interface of this machine: a tap, or one end of a cable.
const NEAR: &str = "up0";
/// The cable's other end, where there is one.
pub const FAR: &str = "up1";
/// The test machine, and the default gateway that dnsmasq tells. The network is none that guests
/// are kept from (RFC 5737), with 24 bits.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// A further address of the test machine, for servers that are told apart from the router.
pub const FURTHER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
/// Addresses that dnsmasq gives away, and for how long (its minimum).
const RANGE: &str = "203.0.113.50,203.0.113.99,120";
/// Seconds of [`RANGE`].
pub const LEASE_S: u64 = 120;
/// The network of router advertisements, with 64 bits (RFC 3849).
pub const PREFIX_V6: &str = "2001:db8:1:";
/// A name that dnsmasq knows, for [`FURTHER`].
pub const NAME: &str = "clock.holdfast.test";

/// A network that is there while this exists.
pub struct Lan {
    dnsmasq: Dnsmasq,
}

/// A second network, by a tap of its own: the test machine routes between the two.
pub struct SecondLan {
    _dnsmasq: Dnsmasq,
}

impl SecondLan {
    /// Its interface of the test machine.
    const NEAR: &str = "up2";
    /// The test machine there, with 24 bits (RFC 5737).
    pub const ROUTER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
    /// Its prefix for router advertisements, with 64 bits (RFC 3849).
    pub const PREFIX_V6: &str = "2001:db8:64:";
    /// Addresses that its dnsmasq gives away, and for how long (its minimum).
    const RANGE: &str = "198.51.100.50,198.51.100.99,120";
}

/// A server that ends with this.
struct Dnsmasq {
    process: Child,
    log: Serial,
}

impl Lan {
    /// Runs `body` on a network whose dnsmasq has these further options; its files live in
    /// `folder`. Programs that `body` starts are on the network too, and on no other. Says why and
    /// returns when this machine cannot have such a network.
    pub fn run(what: &str, folder: &Path, options: &[&str], body: impl FnOnce(&Lan) + Send) {
        Self::run_by(&format!("tuntap add dev {NEAR} mode tap"), (what, folder), options, body);
    }

    /// The same, for hosts that want an interface to read from and to write to: [`FAR`].
    pub fn run_cabled(what: &str, folder: &Path, body: impl FnOnce(&Lan) + Send) {
        let link = format!("link add {NEAR} type veth peer name {FAR}");
        Self::run_by(&link, (what, folder), &[], |lan| {
            ip(&format!("link set {FAR} up")).expect("the cable is there");
            body(lan);
        });
    }

    fn run_by(
        link: &str,
        (what, folder): (&str, &Path),
        options: &[&str],
        body: impl FnOnce(&Lan) + Send,
    ) {
        if let Some(reason) = missing() {
            println!("skipped: {what}: {reason}");
            return;
        }
        let done = std::thread::scope(|scope| {
            let thread = scope.spawn(|| Self::start(link, folder, options).map(|lan| body(&lan)));
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        if let Err(error) = done {
            panic!("no network for {what}: {error:#}");
        }
    }

    /// Moves the calling thread to a network of its own.
    fn start(link: &str, folder: &Path, options: &[&str]) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
        ip("link set lo up")?;
        ip(link)?;
        ip(&format!("addr add {ROUTER}/24 dev {NEAR}"))?;
        ip(&format!("addr add {FURTHER}/32 dev {NEAR}"))?;
        ip(&format!("addr add {PREFIX_V6}:1/64 dev {NEAR} nodad"))?;
        ip(&format!("link set {NEAR} up"))?;
        let name = format!("--address=/{NAME}/{FURTHER}");
        let range = format!("--dhcp-range={RANGE}");
        let options = [&[name.as_str(), &range], options].concat();
        Ok(Self { dnsmasq: Dnsmasq::start(NEAR, folder, &options)? })
    }

    /// Adds a network, with DHCP and router advertisements of its own.
    pub fn add_second(&self, folder: &Path) -> Result<SecondLan> {
        let (router, prefix) = (SecondLan::ROUTER, SecondLan::PREFIX_V6);
        let interface = SecondLan::NEAR;
        ip(&format!("tuntap add dev {interface} mode tap"))?;
        ip(&format!("addr add {router}/24 dev {interface}"))?;
        ip(&format!("addr add {prefix}:1/64 dev {interface} nodad"))?;
        // Until it has one, a router answers from another address, which counts for nothing (RFC 4861
        // section 6.1.2).
        ip(&format!("addr add fe80::1/64 dev {interface} nodad"))?;
        ip(&format!("link set {interface} up"))?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot route between networks")?;
        let ranges = [SecondLan::RANGE, &format!("{prefix}:,ra-only")];
        let ranges = ranges.map(|range| format!("--dhcp-range={range}"));
        let options = [ranges[0].as_str(), &ranges[1], "--enable-ra", "--port=0"];
        let folder = folder.join(interface);
        fs::create_dir_all(&folder)?;
        Ok(SecondLan { _dnsmasq: Dnsmasq::start(interface, &folder, &options)? })
    }

    /// What its dnsmasq tells it does.
    pub fn log(&self) -> &Serial {
        &self.dnsmasq.log
    }

    /// How a host is attached to it.
    pub fn uplink(&self) -> Uplink {
        Uplink::Tap(NEAR.to_owned())
    }

    /// How a host is attached to it and, by its second card, to the second network.
    pub fn uplinks(&self) -> Uplink {
        Uplink::Taps([NEAR, SecondLan::NEAR].map(str::to_owned))
    }

    /// Where a gateway listens, and hosts see it.
    pub fn gateway(&self) -> IpAddr {
        ROUTER.into()
    }
}

impl Dnsmasq {
    fn start(interface: &str, folder: &Path, options: &[&str]) -> Result<Self> {
        let mut process = Command::new(find("dnsmasq").context("no dnsmasq")?)
            .args(["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root"])
            .args(["--no-resolv", "--no-hosts", "--bind-interfaces", "--log-facility=-"])
            .args(["--log-queries", "--dhcp-authoritative", "--no-ping"])
            .arg(format!("--interface={interface}"))
            .arg(format!("--dhcp-leasefile={}", folder.join("leases").display()))
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start dnsmasq")?;
        let errors = process.stderr.take().context("dnsmasq has no output")?;
        let log = Serial::collect(errors, &folder.join("dnsmasq.log"), Echo::Quiet)?;
        Ok(Self { process, log })
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("dnsmasq's last lines:\n{}", self.log.tail(40));
        }
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new(find("ip").context("no ip")?).args(arguments.split(' ')).output()?;
    if !output.status.success() {
        bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Returns what this machine lacks for a network of its own.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root for a network namespace".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("needs /dev/net/tun".to_owned());
    }
    ["ip", "dnsmasq"].iter().find(|name| find(name).is_none()).map(|name| format!("needs {name}"))
}

/// Finds a program that may be root's alone.
fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.find_map(|folder| Some(folder.join(program)).filter(|file| file.is_file()))
}
