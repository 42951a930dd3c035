//! The image boots over the network, with real DHCP, TFTP and HTTP servers: OVMF's own PXE or HTTP
//! client loads the UKI, or iPXE the kernel and the initramfs; in each way the node joins. Its
//! configuration may come from there, too, and it may install itself. A node that was started so proves by its
//! TPM which release it runs, unless it was given a command line of somebody else's.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium},
    lan::{Lan, ROUTER},
    packages,
    scene::{Scene, image_folder},
    serial::{Echo, Serial},
    tpm::Tpm,
};
use serde_json::Value;

/// How long dnsmasq may take to tell what it has done.
const SOON: Duration = Duration::from_secs(10);
/// From power-on to the end of an installation, or from there to the node's own start.
const UP: Duration = Duration::from_secs(240);
/// Bytes of a disk to be installed to.
const DISK: u64 = 3 << 30;

/// Puts what the image's PXE set holds into a folder for TFTP.
fn serve(folder: &Path) -> String {
    let target = folder.join("tftp");
    fs::create_dir_all(&target).unwrap();
    let set = fs::read_dir(image_folder().unwrap().join("pxe")).unwrap();
    set.map(Result::unwrap).for_each(|file| {
        fs::copy(file.path(), target.join(file.file_name())).unwrap();
    });
    format!("--tftp-root={}", target.display())
}

/// Boots a node with a TPM from the network; it has nothing else, but for its configuration. Returns the answer to
/// the question whether it runs the release that was built, or the refusal.
fn join(lan: &Lan, folder: &Path, arguments: &[&str]) -> Result<Value, String> {
    let tpm = Tpm::start(&folder.join("tpm")).unwrap();
    let scene = Scene::start_at(folder, lan.gateway(), lan.gateway()).unwrap();
    let further = arguments.iter().map(|&word| word.to_owned());
    let options = HostOptions {
        medium: Medium::Network,
        memory_mib: 1024,
        uplink: lan.uplink(),
        arguments: tpm.arguments().into_iter().chain(further).collect(),
        ..HostOptions::default()
    };
    let (_host, node) = scene.boot("network", options).unwrap();
    let described = image_folder().unwrap().join("measurements.json");
    let ask = ["node", "attest", &node, "--measurements", described.to_str().unwrap()];
    scene.cli.json(&ask).map_err(|refused| format!("{refused:#}"))
}

/// The node's TPM shows that it runs what was built, and that nothing was passed beside it.
fn is_attested(answer: Result<Value, String>) {
    let shown = answer.unwrap();
    let attested = &shown["attested"];
    assert_eq!(attested["endorsed"], true, "{shown}");
    assert_eq!(attested["registers"]["12"], "00".repeat(32), "{shown}");
}

/// What DHCP says where a node's configuration is.
fn named() -> String {
    format!("--dhcp-option=tag:node,224,http://{ROUTER}:8000/node.toml")
}

/// Boots a node that has nothing but the network; its configuration lies where DHCP says.
fn boot_bare(lan: &Lan, folder: &Path, medium: Medium, section: &str) -> (Host, Scene) {
    let scene = Scene::start_at(folder, lan.gateway(), lan.gateway()).unwrap();
    let config = scene.node_config("network", section);
    fs::write(folder.join("tftp/node.toml"), config).unwrap();
    let options =
        HostOptions { medium, memory_mib: 1024, uplink: lan.uplink(), ..HostOptions::default() };
    let host = Host::start(&image_folder().unwrap(), &folder.join("host"), &options).unwrap();
    (host, scene)
}

/// What dnsmasq is told so that firmware's own client starts the boot program from `root`, and nodes are
/// known by their class.
fn firmware_boots(root: &str) -> [&str; 4] {
    let class = "--dhcp-vendorclass=set:node,holdfast";
    ["--enable-tftp", root, "--dhcp-boot=holdfast.efi", class]
}

#[test]
fn the_uki_by_the_firmwares_own_client_and_the_configuration_by_dhcp() {
    let folder = tempfile::tempdir().unwrap();
    let root = serve(folder.path());
    let (boots, named) = (firmware_boots(&root), named());
    let options = [&boots[..], &[&named]].concat();
    Lan::run("PXE", folder.path(), &options, |lan| {
        let (_server, told) = web(folder.path());
        let (host, scene) = boot_bare(lan, folder.path(), Medium::Network, "");
        scene.wait_for_node("network").unwrap();
        lan.log().wait("/holdfast.efi to 203.0.113.", SOON).unwrap();
        told.wait("\"GET /node.toml HTTP/1.1\" 200", SOON).unwrap();
        let by = format!("DHCP option 224 from {ROUTER}: http://{ROUTER}:8000/node.toml");
        host.serial.wait(&format!("event=config source=\"{by}"), SOON).unwrap();
    });
}

/// The boot program's digest, as its publisher tells it.
fn digest() -> String {
    let sums = fs::read_to_string(image_folder().unwrap().join("SHA256SUMS")).unwrap();
    let line = sums.lines().find(|line| line.ends_with(" holdfast.efi")).unwrap();
    line.split(' ').next().unwrap().to_owned()
}

#[test]
fn it_installs_itself_from_there() {
    let folder = tempfile::tempdir().unwrap();
    let root = serve(folder.path());
    let (boots, named) = (firmware_boots(&root), named());
    let options = [&boots[..], &[&named]].concat();
    let section = format!(
        "[install]\nconfirm = \"unattended\"\n\
         program = \"http://{ROUTER}:8000/holdfast.efi#sha256={}\"\n",
        digest(),
    );
    let disk = folder.path().join("disk.img");
    File::create(&disk).unwrap().set_len(DISK).unwrap();
    Lan::run("installation by PXE", folder.path(), &options, |lan| {
        let (_server, _) = web(folder.path());
        let medium = Medium::NetworkAndDisk(disk.clone());
        let (host, scene) = boot_bare(lan, folder.path(), medium, &section);
        host.serial.wait("event=installed disk=nvme0n1", UP).unwrap();
        host.serial.wait("event=shutdown-done action=reboot", UP).unwrap();
        // The same server starts again, and takes its disk.
        let by = "event=config source=\"the installed disk\" name=\"network\"";
        host.serial.wait(by, UP).unwrap();
        scene.wait_for_node("network").unwrap();
    });
}

#[test]
fn the_uki_by_the_firmwares_http_client() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    let boot = format!("--dhcp-boot=tag:http,http://{ROUTER}:8000/holdfast.efi");
    let options = [
        "--dhcp-vendorclass=set:http,HTTPClient",
        "--dhcp-option-force=tag:http,60,HTTPClient",
        &boot,
    ];
    Lan::run("HTTP boot", folder.path(), &options, |lan| {
        let (_server, told) = web(folder.path());
        // PXE comes first otherwise, and takes its time to give up.
        let no_pxe = ["4", "6"]
            .map(|version| format!("name=opt/org.tianocore/IPv{version}PXESupport,string=n"));
        is_attested(join(lan, folder.path(), &["-fw_cfg", &no_pxe[0], "-fw_cfg", &no_pxe[1]]));
        told.wait("\"GET /holdfast.efi HTTP/1.1\" 200", SOON).unwrap();
    });
}

/// A web server for what is there by TFTP, and what it tells.
fn web(folder: &Path) -> (Server, Serial) {
    let server = Command::new("python3")
        .args(["-u", "-m", "http.server", "--bind", &ROUTER.to_string(), "--directory"])
        .args([&folder.join("tftp").display().to_string(), "8000"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut server = Server(server.unwrap());
    let told = server.0.stderr.take().unwrap();
    let told = Serial::collect(told, &folder.join("http.log"), Echo::Quiet).unwrap();
    (server, told)
}

/// A server that ends with its test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Has OVMF load iPXE, and iPXE what the script says; a file's whole transfer is told by dnsmasq. `judge` is given
/// what [`join`] returns.
fn by_ipxe(folder: &Path, files: &[&str], judge: impl FnOnce(Result<Value, String>) + Send) {
    let root = format!("--tftp-root={}", folder.join("tftp").display());
    fs::copy(packages::ipxe().unwrap(), folder.join("tftp/ipxe.efi")).unwrap();
    let options = [
        "--enable-tftp",
        &root,
        "--dhcp-userclass=set:ipxe,iPXE",
        "--dhcp-boot=tag:!ipxe,ipxe.efi",
        "--dhcp-boot=tag:ipxe,boot.ipxe",
    ];
    Lan::run("iPXE", folder, &options, |lan| {
        judge(join(lan, folder, &[]));
        files.iter().for_each(|file| {
            lan.log().wait(&format!("/{file} to 203.0.113."), SOON).unwrap();
        });
    });
}

/// Changes the lines of the script that iPXE gets from `folder`.
fn edit_script(folder: &Path, edit: impl Fn(&str) -> Option<String>) {
    let script = folder.join("tftp/boot.ipxe");
    let text = fs::read_to_string(&script).unwrap();
    let lines: Vec<String> = text.lines().filter_map(edit).collect();
    fs::write(&script, lines.join("\n") + "\n").unwrap();
}

#[test]
fn the_uki_by_ipxe_and_our_script() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    by_ipxe(folder.path(), &["boot.ipxe", "holdfast.efi"], is_attested);
}

#[test]
fn the_uki_by_ipxe_with_a_command_line_of_somebody_elses() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    let cmdline = fs::read_to_string(folder.path().join("tftp/cmdline")).unwrap();
    edit_script(folder.path(), |line| {
        let altered = format!("chain holdfast.efi loglevel=7 {}", cmdline.trim());
        Some(if line.contains("holdfast.efi") { altered } else { line.to_owned() })
    });
    by_ipxe(folder.path(), &["boot.ipxe", "holdfast.efi"], |answer| {
        let refused = answer.unwrap_err();
        assert!(refused.contains("register 12 is "), "{refused}");
    });
}

#[test]
fn kernel_and_initramfs_by_ipxe_and_the_rest_of_our_script() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    edit_script(folder.path(), |line| (!line.contains("holdfast.efi")).then(|| line.to_owned()));
    by_ipxe(folder.path(), &["boot.ipxe", "vmlinuz", "initrd"], |answer| {
        // Only the boot program's stub measures what a release is known by.
        let refused = answer.unwrap_err();
        assert!(refused.contains("register 11 is "), "{refused}");
    });
}
