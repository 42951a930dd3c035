//! A node takes its configuration from each of its sources, in the order that the README states,
//! and waits for slow ones: a stick that is found late, or that somebody plugs in afterwards.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::Path, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use image::{BuildOptions, Silent};
use qemu_tests::harness::{
    host::{Host, HostOptions, Medium},
    programs::Cli,
    scene::image_folder,
    volume,
};
use serde_json::json;

/// From power-on to the line that says it, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The smallest configuration.
fn config(name: &str) -> String {
    let key = "01".repeat(32);
    format!("version = 1\nname = \"{name}\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
}

fn boot(image: &Path, folder: &Path, options: HostOptions) -> Host {
    let options = HostOptions { memory_mib: 1024, ..options };
    Host::start(image, folder, &options).unwrap()
}

/// QEMU's arguments for a stick with `name`'s configuration, and its file.
fn stick(folder: &Path, name: &str) -> String {
    let file = folder.join("stick.img");
    volume::write(&file, &config(name)).unwrap();
    format!("if=none,id=stick,format=raw,file={}", file.display())
}

#[test]
fn the_kernel_command_line_comes_before_a_volume() {
    let folder = tempfile::tempdir().unwrap();
    let words = format!("holdfast.config={}", STANDARD.encode(config("from the command line")));
    let medium = Medium::Kernel(words);
    let options =
        HostOptions { medium, config: Some(config("from the volume")), ..HostOptions::default() };
    let host = boot(&image_folder().unwrap(), folder.path(), options);
    let line = host.serial.wait("event=config ", LIMIT).unwrap();
    assert!(line.contains("from the command line"), "{line}");
}

#[test]
fn a_stick_comes_before_the_image_though_it_is_found_late() {
    let folder = tempfile::tempdir().unwrap();
    let document = folder.path().join("holdfast.toml");
    fs::write(&document, config("from the image")).unwrap();
    let mut build = BuildOptions::new(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    build.output = folder.path().join("image");
    build.config = Some(document);
    let image = image::build(&build, &Silent).unwrap().folder;

    let alone = boot(&image, &folder.path().join("alone"), HostOptions::default());
    let line = alone.serial.wait("event=config ", LIMIT).unwrap();
    assert!(line.contains("from the image"), "{line}");
    drop(alone);

    let arguments = ["-device", "qemu-xhci", "-drive", &stick(folder.path(), "from the stick")]
        .into_iter()
        .chain(["-device", "usb-storage,drive=stick"])
        .map(str::to_owned)
        .collect();
    let options = HostOptions { arguments, ..HostOptions::default() };
    let both = boot(&image, &folder.path().join("both"), options);
    let line = both.serial.wait("event=config ", LIMIT).unwrap();
    assert!(line.contains("from the stick"), "{line}");
}

/// What a person reads on the console: the address to claim the node at, and the code. Lines of the kernel
/// may cut a text short; it is shown again.
fn instructions(host: &Host) -> (String, String) {
    let mut from = 0;
    loop {
        let line = host.serial.wait_from(from, "holdfast node claim ", LIMIT).unwrap();
        from = host.serial.mark();
        let words: Vec<&str> =
            line.split_whitespace().skip_while(|word| *word != "claim").collect();
        if let ["claim", address, "--code", code, "--config", ..] = words[..]
            && address != "ADDRESS"
            && code.len() == 23
        {
            return (address.to_owned(), code.to_owned());
        }
    }
}

#[test]
fn a_node_without_configuration_is_claimed_with_the_code_on_its_console() {
    let folder = tempfile::tempdir().unwrap();
    let document = folder.path().join("claimed.toml");
    fs::write(&document, config("claimed over the network")).unwrap();
    let mut host = boot(&image_folder().unwrap(), folder.path(), HostOptions::default());
    let (address, code) = instructions(&host);
    assert!(address.starts_with("203.0.113."), "{address}");
    let port = host.forward_tcp(4600).unwrap();
    let (cli, address) = (Cli::new().unwrap(), format!("127.0.0.1:{port}"));
    let claim = |code: &str| {
        let document = document.to_str().unwrap();
        cli.text(&["node", "claim", &address, "--code", code, "--config", document])
    };
    let refused = format!("{:#}", claim("00000-00000-00000-00000").unwrap_err());
    assert!(refused.contains("did not take the code"), "{refused}");
    host.serial.wait("event=claim-refused from=", LIMIT).unwrap();
    let taken = claim(&code).unwrap();
    host.serial.wait("event=claimed from=", LIMIT).unwrap();
    let line = host.serial.wait("event=config ", LIMIT).unwrap();
    assert!(line.contains("the claim over the network"), "{line}");
    assert!(line.contains("claimed over the network"), "{line}");
    let node = host.serial.wait("event=node id=", LIMIT).unwrap();
    let node = node.split_once("id=").unwrap().1.split_whitespace().next().unwrap();
    assert!(taken.contains(node), "{taken}");
    // The code is for whoever stands there, and in no log.
    let text = host.serial.text();
    let logged = text.lines().filter(|line| line.contains("event=") || line.contains("status|"));
    assert!(!logged.into_iter().any(|line| line.contains(&code)), "the code is in the log");
}

#[test]
fn a_stick_that_is_plugged_in_later_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let drive = stick(folder.path(), "plugged in later");
    let arguments = ["-device", "qemu-xhci,id=usb", "-drive", &drive].map(str::to_owned).to_vec();
    let options = HostOptions { arguments, ..HostOptions::default() };
    let mut host = boot(&image_folder().unwrap(), folder.path(), options);
    let line = host.serial.wait("event=config-bad", LIMIT).unwrap();
    assert!(line.contains("holdfast.toml") && line.contains("HOLDFAST"), "{line}");
    // Whoever stands before it sees where it is meanwhile.
    host.serial.wait("status| addresses  203.0.113.", LIMIT).unwrap();
    let plugged = json!({ "driver": "usb-storage", "drive": "stick", "bus": "usb.0" });
    host.qmp.execute("device_add", plugged).unwrap();
    let line = host.serial.wait("event=config ", LIMIT).unwrap();
    assert!(line.contains("plugged in later"), "{line}");
}
