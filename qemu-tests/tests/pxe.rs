//! The image boots over the network, with real DHCP, TFTP and HTTP servers: OVMF's own PXE or HTTP
//! client loads the UKI, or iPXE the kernel and the initramfs; in each way the node joins.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use qemu_tests::harness::{
    host::{HostOptions, Medium},
    lan::{Lan, ROUTER},
    packages,
    scene::{Scene, image_folder},
    serial::{Echo, Serial},
};

/// How long dnsmasq may take to tell what it has done.
const SOON: Duration = Duration::from_secs(10);

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

/// Boots a node from the network; it has nothing else, but for its configuration.
fn join(lan: &Lan, folder: &Path) {
    join_with(lan, folder, &[]);
}

/// The same, of a host with these further QEMU arguments.
fn join_with(lan: &Lan, folder: &Path, arguments: &[&str]) {
    let scene = Scene::start_at(folder, lan.gateway(), lan.gateway()).unwrap();
    let options = HostOptions {
        medium: Medium::Network,
        memory_mib: 1024,
        uplink: lan.uplink(),
        arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        ..HostOptions::default()
    };
    scene.boot("network", options).unwrap();
}

#[test]
fn the_uki_by_the_firmwares_own_client() {
    let folder = tempfile::tempdir().unwrap();
    let root = serve(folder.path());
    let options = ["--enable-tftp", &root, "--dhcp-boot=holdfast.efi"];
    Lan::run("PXE", folder.path(), &options, |lan| {
        join(lan, folder.path());
        lan.log.wait("/holdfast.efi to 203.0.113.", SOON).unwrap();
    });
}

#[test]
fn the_uki_by_the_firmwares_http_client() {
    let folder = tempfile::tempdir().unwrap();
    let boot = format!("--dhcp-boot=tag:http,http://{ROUTER}:8000/holdfast.efi");
    let options = [
        "--dhcp-vendorclass=set:http,HTTPClient",
        "--dhcp-option-force=tag:http,60,HTTPClient",
        &boot,
    ];
    Lan::run("HTTP boot", folder.path(), &options, |lan| {
        let server = Command::new("python3")
            .args(["-u", "-m", "http.server", "--bind", &ROUTER.to_string(), "--directory"])
            .args([&image_folder().unwrap().join("pxe").display().to_string(), "8000"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut server = Server(server.unwrap());
        let told = server.0.stderr.take().unwrap();
        let told = Serial::collect(told, &folder.path().join("http.log"), Echo::Quiet).unwrap();
        // PXE comes first otherwise, and takes its time to give up.
        let no_pxe = ["4", "6"]
            .map(|version| format!("name=opt/org.tianocore/IPv{version}PXESupport,string=n"));
        join_with(lan, folder.path(), &["-fw_cfg", &no_pxe[0], "-fw_cfg", &no_pxe[1]]);
        told.wait("\"GET /holdfast.efi HTTP/1.1\" 200", SOON).unwrap();
    });
}

/// A server that ends with its test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Has OVMF load iPXE, and iPXE what the script says; a file's whole transfer is told by dnsmasq.
fn by_ipxe(folder: &Path, files: &[&str]) {
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
        join(lan, folder);
        files.iter().for_each(|file| {
            lan.log.wait(&format!("/{file} to 203.0.113."), SOON).unwrap();
        });
    });
}

#[test]
fn the_uki_by_ipxe_and_our_script() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    by_ipxe(folder.path(), &["boot.ipxe", "holdfast.efi"]);
}

#[test]
fn kernel_and_initramfs_by_ipxe_and_the_rest_of_our_script() {
    let folder = tempfile::tempdir().unwrap();
    serve(folder.path());
    let script = folder.path().join("tftp/boot.ipxe");
    let text = fs::read_to_string(&script).unwrap();
    let rest: Vec<&str> = text.lines().filter(|line| !line.contains("holdfast.efi")).collect();
    fs::write(&script, rest.join("\n") + "\n").unwrap();
    by_ipxe(folder.path(), &["boot.ipxe", "vmlinuz", "initrd"]);
}
