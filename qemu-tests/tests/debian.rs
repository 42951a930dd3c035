//! A renter brings a whole Debian system that nobody made for us, as a qcow2 image; it starts by its own boot loader,
//! cloud-init makes it the renter's by what the machine was told, and the renter logs in through the gateway.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::Path, process::Command, time::Duration};

use qemu_tests::harness::{
    debian,
    host::HostOptions,
    pace::{Pace, steadily},
    scene::{LeaseRequest, Scene},
};

/// How long the image may take to its node, and the system to its login, two layers of emulation deep and beside
/// other tests.
const UP: Duration = Duration::from_secs(900);

/// What the system is told beside its name and its owner's key: root may log in, the names of languages were left
/// out of it, and a program runs at the first start.
const USER_DATA: &str = "#cloud-config\ndisable_root: false\nlocale: C.UTF-8\n\
                         runcmd:\n  - [sh, -c, 'echo first-start > /var/lib/renter']\n";

/// Waits until the first start is over, and tells what came of it: errors that cloud-init had; what systemd says of
/// the whole, and units that failed; the name; what the renter's program wrote; whether the disk is the system's to
/// its end.
const ASK: &str = "cloud-init status --wait --long | sed -n 's/^status: //p'; \
                   systemctl is-system-running --wait; systemctl --failed --plain --no-legend; \
                   hostname; cat /var/lib/renter; \
                   [ $(($(df --output=size -B1M / | tail -n 1))) -gt 1000 ] && echo grown";

#[test]
fn a_whole_debian_becomes_its_renters() {
    let disk = debian::disk().unwrap();
    steadily(|folder, pace| becomes_its_renters((folder, pace), &disk));
}

fn becomes_its_renters((folder, pace): (&Path, Pace), disk: &Path) {
    let scene = Scene::start_paced(folder, pace).unwrap();
    let options = HostOptions { memory_mib: 5120, ..HostOptions::default() };
    let (_host, node) = scene.boot("debian", options).unwrap();
    let (qcow2, imported) = (folder.join("debian.qcow2"), folder.join("debian.raw"));
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "qcow2"]).arg(disk).arg(&qcow2).status();
    assert!(converted.unwrap().success());
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    scene.cli.text(&["image", "import", &path(&qcow2), "-o", &path(&imported)]).unwrap();
    // It is large, and others test here, too.
    fs::remove_file(&qcow2).unwrap();

    let request =
        LeaseRequest { node: &node, memory_mib: 1024, disk_mib: 1280, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    let lease = path(&lease);
    let renter = scene.renter();
    let pushed = renter.json(&["content", "push", &path(&imported), "--lease", &lease]).unwrap();
    fs::remove_file(&imported).unwrap();
    let (keys, user_data) = (folder.join("keys"), folder.join("user-data"));
    fs::write(&keys, format!("{}\n", scene.ssh.public.trim())).unwrap();
    fs::write(&user_data, USER_DATA).unwrap();
    let (keys, user_data) = (path(&keys), path(&user_data));
    let image = ["--disk-image", pushed["content"].as_str().unwrap(), "--firmware", "uefi"];
    let seed = ["--hostname", "web-1", "--ssh-key", &keys, "--user-data", &user_data];
    let create = ["machines", "create", "--lease", &lease];
    renter.json(&[&create[..], &image, &seed].concat()).unwrap();

    scene.wait_for_console(&id, "web-1 login:", UP).unwrap();
    let told = scene.ssh(&id, ASK).unwrap();
    assert_eq!(told, "done\nrunning\nweb-1\nfirst-start\ngrown\n");
    // Host keys were made by it; the seed's disk is where cloud-init looked.
    let found = scene.ssh(&id, "cat /run/cloud-init/result.json; ls /etc/ssh/*_key.pub").unwrap();
    assert!(found.contains("DataSourceNoCloud") && found.contains("ed25519"), "{found}");
    // Its kernel finds no error in the machine.
    let errors = scene.ssh(&id, "journalctl -k -b -p err --no-pager -q -o cat").unwrap();
    assert_eq!(errors, "");
    scene.ssh(&id, "nohup systemctl poweroff >/dev/null 2>&1 &").unwrap();
    let gone = |shown: &serde_json::Value| shown["state"] == "stopped";
    renter.wait(&["machines", "show", &id], UP, gone).unwrap();
}
