//! Configuration by DHCP: a real dnsmasq names a URL, and a real web server has the document.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use agent::{
    config::{
        self, Source,
        provision::{Origin, Provisioner, kept},
    },
    console::Page,
    net::{DocumentServer, Uplinks},
    time::nts::establish::Roots,
};
use netns::{Namespace, can_run, certificate::certify, wait_for};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::config::Network;

/// From the start to the document: an address, two attempts, and a busy machine.
const LONG: Duration = Duration::from_secs(40);
/// A web server with a certificate, when one is given.
const SERVER: &str = "
import functools, http.server, socket, ssl, sys
port, folder, certificate = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
server = Server(('::', port), handler)
if certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
";

/// A node, and a server at the other end of its cable.
struct World {
    node: Namespace,
    router: Namespace,
    runtime: Option<Runtime>,
    folder: TempDir,
    programs: Vec<Child>,
}

impl World {
    fn new(what: &str) -> Option<Self> {
        if !can_run(what, &["ip", "dnsmasq", "python3", "openssl"]) {
            return None;
        }
        let (node, router) = (Namespace::new(), Namespace::new());
        node.cable("eth0", &router, "eth0");
        node.ip("link set eth0 address 02:00:00:00:00:42");
        router.ip("addr add 192.168.50.1/24 dev eth0");
        router.ip("link set eth0 up");
        let runtime = Some(node.runtime());
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("web")).unwrap();
        let mut world = Self { node, router, runtime, folder, programs: Vec::new() };
        let web = world.web("");
        world.start("python3", &["-c", SERVER, "8000", &web.display().to_string()]);
        Some(world)
    }

    /// A path below what the server serves.
    fn web(&self, name: &str) -> PathBuf {
        self.folder.path().join("web").join(name)
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn start(&mut self, program: &str, arguments: &[&str]) {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.programs.push(self.router.enter(|| command.spawn().unwrap()));
    }

    /// Has DHCP name `url`, to nodes only.
    fn name(&mut self, url: &str) {
        let leases = format!("--dhcp-leasefile={}", self.folder.path().join("leases").display());
        let option = format!("--dhcp-option=tag:node,224,{url}");
        let arguments = [
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            "--interface=eth0",
            "--bind-interfaces",
            "--user=root",
            "--pid-file=",
            "--dhcp-authoritative",
            "--dhcp-range=192.168.50.100,192.168.50.100,2m",
            "--address=/boot.example/192.168.50.1",
            "--dhcp-vendorclass=set:node,holdfast",
            &leases,
            &option,
        ];
        self.start("dnsmasq", &arguments);
    }

    /// Runs a node without a configuration; returns its page.
    fn provision(&self, named: Option<&str>, authorities: Roots) -> watch::Receiver<Page> {
        let runtime = self.runtime.as_ref().unwrap();
        let (pages, page) = watch::channel(Page::default());
        let source =
            named.map_or(Source::Nowhere, |named| Source::CommandLineUrl(named.to_owned()));
        let root = self.root();
        self.node.enter(|| {
            let _inside = runtime.enter();
            let uplinks = Uplinks::start(&Network::default()).unwrap();
            let mut provisioner = Provisioner::new(&root, &source, &uplinks).unwrap();
            provisioner.authorities = authorities;
            runtime.spawn(async move {
                provisioner.run(&pages).await;
                drop(uplinks);
            });
        });
        page
    }

    /// Waits for what was fetched.
    fn fetched(&self, page: &watch::Receiver<Page>) -> (Origin, String) {
        wait_for(&format!("the document; {:?}", page.borrow().error), LONG, || {
            kept(&self.root()).is_some()
        });
        kept(&self.root()).unwrap()
    }

    /// Waits for an error that holds these words.
    fn refused(&self, page: &watch::Receiver<Page>, words: &str) {
        wait_for(words, LONG, || page.borrow().error.contains(words));
        assert_eq!(kept(&self.root()), None);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        for mut program in self.programs.drain(..) {
            program.kill().ok();
            program.wait().ok();
        }
    }
}

fn document(name: &str) -> String {
    let key = "01".repeat(32);
    format!("version = 1\nname = \"{name}\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
}

fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_node_gets_the_document_that_dhcp_names_for_it() {
    let Some(mut world) = World::new("configuration by DHCP") else { return };
    let url = "http://boot.example:8000/{mac}.toml";
    world.name(url);
    let page = world.provision(None, Roots::public());
    // The file is not there yet: somebody is still writing it.
    world.refused(&page, "02-00-00-00-00-42.toml: there is no such file");
    fs::write(world.web("02-00-00-00-00-42.toml"), document("by DHCP")).unwrap();
    let (origin, text) = world.fetched(&page);
    let server = "192.168.50.1".parse().unwrap();
    let server = DocumentServer::Ipv4(server);
    assert_eq!(origin, Origin::Dhcp { server, url: url.to_owned() });
    assert_eq!(text, document("by DHCP"));
    // Whoever starts next finds it, after everything that is nearer, and says where it is from.
    let found = config::load(&world.root());
    let told = found.source.to_string();
    assert!(told.contains("DHCP option 224 from 192.168.50.1"), "{told}");
    assert!(told.contains("NOT authenticated"), "{told}");
    assert_eq!(found.spec.unwrap().name, "by DHCP");
    let baked = world.root().join("etc");
    fs::create_dir_all(&baked).unwrap();
    fs::write(baked.join("holdfast.toml"), document("baked in")).unwrap();
    assert_eq!(config::load(&world.root()).source, Source::Image);
}

#[test]
fn a_network_without_ipv4_names_it_by_dhcpv6() {
    let Some(mut world) = World::new("configuration by DHCPv6") else { return };
    world.router.ip("addr add fd00:50::1/64 dev eth0 nodad");
    let url = "http://[fd00:50::1]:8000/{mac}.toml";
    let leases = format!("--dhcp-leasefile={}", world.folder.path().join("leases").display());
    let option = format!("--dhcp-option=option6:65224,{url}");
    let arguments = [
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--port=0",
        "--interface=eth0",
        "--bind-interfaces",
        "--user=root",
        "--pid-file=",
        "--enable-ra",
        "--ra-param=eth0,5,600",
        "--dhcp-range=fd00:50::100,fd00:50::1ff,64,2m",
        &leases,
        &option,
    ];
    world.start("dnsmasq", &arguments);
    fs::write(world.web("02-00-00-00-00-42.toml"), document("by DHCPv6")).unwrap();
    let page = world.provision(None, Roots::public());
    let (origin, text) = world.fetched(&page);
    let server = DocumentServer::Ipv6("eth0".to_owned());
    assert_eq!(origin, Origin::Dhcp { server, url: url.to_owned() });
    assert_eq!(text, document("by DHCPv6"));
    let told = config::load(&world.root()).source.to_string();
    assert!(told.contains("DHCPv6 option 65224 on eth0"), "{told}");
}

#[test]
fn a_digest_decides_and_so_does_what_the_document_says() {
    let Some(mut world) = World::new("a pinned configuration") else { return };
    let good = document("pinned");
    world.name(&format!("http://192.168.50.1:8000/node.toml#sha256={}", digest(&good)));
    fs::write(world.web("node.toml"), document("another")).unwrap();
    let page = world.provision(None, Roots::public());
    world.refused(&page, "its SHA-256 is another one");
    fs::write(world.web("node.toml"), &good).unwrap();
    assert_eq!(world.fetched(&page).1, good);
}

#[test]
fn what_is_no_document_is_refused_by_line_and_what_is_too_long_is_not_read() {
    let Some(mut world) = World::new("a wrong configuration by DHCP") else { return };
    world.name("http://192.168.50.1:8000/node.toml");
    fs::write(world.web("node.toml"), "version = 1\nnmae = 1\n").unwrap();
    let page = world.provision(None, Roots::public());
    world.refused(&page, "is no configuration: configuration line 2");
    fs::write(world.web("node.toml"), vec![b'#'; 1 << 20]).unwrap();
    world.refused(&page, "has more than 65536 bytes");
}

#[test]
fn an_option_that_means_something_else_is_told() {
    let Some(mut world) = World::new("another site's option 224") else { return };
    world.name("file:///etc/passwd");
    let page = world.provision(None, Roots::public());
    world.refused(&page, "does not begin with https:// or http://");
}

#[test]
fn the_command_line_names_it_over_https() {
    let Some(mut world) = World::new("a URL on the command line") else { return };
    certify(world.folder.path(), "boot.example", "DNS:boot.example");
    let (web, folder) = (world.web("").display().to_string(), world.folder.path().to_owned());
    let file = |name: &str| folder.join(name).display().to_string();
    world.start("python3", &["-c", SERVER, "8443", &web, &file("cert.pem"), &file("key.pem")]);
    world.name("http://192.168.50.1:8000/other.toml");
    fs::write(world.web("node.toml"), document("by https")).unwrap();
    let url = "https://boot.example:8443/node.toml";
    let cmdline = world.root().join("proc");
    fs::create_dir_all(&cmdline).unwrap();
    fs::write(cmdline.join("cmdline"), format!("quiet holdfast.config={url}\n")).unwrap();
    let found = config::load(&world.root());
    assert_eq!(found.source, Source::CommandLineUrl(url.to_owned()));
    assert!(found.spec.unwrap_err().to_string().contains("not fetched yet"));

    // Nobody whom the world trusts signed this certificate.
    let page = world.provision(Some(url), Roots::public());
    world.refused(&page, "cannot connect to boot.example");
    let authority = fs::read_to_string(folder.join("ca.pem")).unwrap();
    let page = world.provision(Some(url), Roots::from_pem(&authority).unwrap());
    world.fetched(&page);
    let found = config::load(&world.root());
    assert_eq!(found.source.to_string(), format!("kernel command line: {url}, by https"));
    assert_eq!(found.spec.unwrap().name, "by https");
}
