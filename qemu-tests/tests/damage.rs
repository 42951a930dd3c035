//! What a disk gave back otherwise than it was written is mended or set aside, and said; the node comes up
//! as the same one, all by itself: a real agent over damaged files, without a virtual machine, and the image
//! over damaged file systems.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use image::disk::{gpt::ALIGNMENT, layout};
use qemu_tests::harness::{
    agent::LoneAgent,
    host::{Host, HostOptions, Medium, Uplink},
    programs::program,
    scene::image_folder,
};

const CONFIG: &str = "version = 1\nname = \"lone\"\n[machines]\ndevices = []\n[authority]\n\
    threshold = 1\nkeys = [\"d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a\"]\n";

/// Places in each file that are altered, in hundredths of its length.
const PLACES: [usize; 3] = [0, 45, 99];

/// How long a node that is ready may take to say something.
const SOON: Duration = Duration::from_secs(30);

/// A node's state as it lies on its disk.
type Files = BTreeMap<PathBuf, Vec<u8>>;

fn files(state: &Path) -> Files {
    let mut found = Files::new();
    let mut folders = vec![state.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(state).unwrap().to_owned();
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Starts an agent over `state`. Returns its node, what it said, and its files when its power is cut.
fn run(folder: &Path, state: &Files) -> (String, String, Files) {
    let own = folder.join("state");
    for (name, bytes) in state {
        let path = own.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let agent = LoneAgent::start(&program("agent").unwrap(), folder, CONFIG).unwrap();
    let said = agent.said();
    drop(agent);
    (node(&said), said, files(&own))
}

/// Returns which node speaks.
fn node(said: &str) -> String {
    said.split("event=node id=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

#[test]
fn a_node_comes_up_as_itself_whatever_file_of_its_state_is_altered() {
    if let Some(reason) = LoneAgent::missing() {
        println!("skipped: a node over damaged files: {reason}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (node, _, whole) = run(&folder.path().join("first"), &Files::new());
    assert!(whole.contains_key(Path::new("node.key")), "{:?}", whole.keys());
    let mut told = 0;
    for (number, (name, bytes)) in whole.iter().filter(|(_, bytes)| !bytes.is_empty()).enumerate() {
        for (round, place) in PLACES.iter().enumerate() {
            let mut altered = whole.clone();
            let at = bytes.len() * place / 100;
            altered.get_mut(name).unwrap()[at] ^= 1 << ((round + number) % 8);
            let (again, said, _) = run(&folder.path().join(format!("{number}-{round}")), &altered);
            assert_eq!(again, node, "{} at {at}", name.display());
            let trouble = said.contains("event=trouble place=state");
            println!("{} at {at}: told: {trouble}", name.display());
            assert!(trouble || !name.starts_with("node.key"), "{said}");
            told += usize::from(trouble);
        }
    }
    assert!(told > 2 * PLACES.len(), "{told}");
}

#[test]
fn a_configuration_that_the_disk_altered_is_made_anew_and_one_that_was_written_counts() {
    if let Some(reason) = LoneAgent::missing() {
        println!("skipped: a node over a damaged configuration: {reason}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let start = |number: u32| {
        // The same files as before, not others that hold the same.
        let (last, now) = (number - 1, folder.path().join(number.to_string()));
        fs::create_dir_all(&now).unwrap();
        fs::rename(folder.path().join(last.to_string()).join("state"), now.join("state")).unwrap();
        let agent = LoneAgent::start(&program("agent").unwrap(), &now, CONFIG).unwrap();
        (agent.said(), now.join("state/holdfast.toml"))
    };
    fs::create_dir_all(folder.path().join("0/state")).unwrap();
    fs::write(folder.path().join("0/state/holdfast.toml"), CONFIG).unwrap();
    let (said, path) = start(1);
    assert!(!said.contains("place=configuration"), "{said}");

    let then = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, CONFIG.replace("lone", "lomg")).unwrap();
    File::options().write(true).open(&path).unwrap().set_modified(then).unwrap();
    let (said, path) = start(2);
    assert!(said.contains("the disk had altered it, and was made anew of its copy"), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG);

    fs::write(&path, CONFIG.replace("lone", "other")).unwrap();
    let (said, path) = start(3);
    assert!(!said.contains("place=configuration"), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG.replace("lone", "other"));
}

/// A small file system that is unmounted at the end.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=2m", "none"];
        assert!(Command::new("mount").args(options).arg(at).status().unwrap().success());
        Self(at.to_owned())
    }

    /// Leaves no room.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[7; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        Command::new("umount").arg(&self.0).status().ok();
    }
}

#[test]
fn a_node_whose_state_is_full_comes_up_and_says_so() {
    if let Some(reason) = LoneAgent::missing() {
        println!("skipped: a node with a full disk: {reason}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("first");
    let agent = LoneAgent::start(&program("agent").unwrap(), &first, CONFIG).unwrap();
    let node = node(&agent.said());
    // A store that was cut off may find room in its own file.
    agent.end().unwrap();
    let whole = files(&first.join("state"));
    // A cut came when everything was written, or before what lies beside the store was.
    for missing in [&[][..], &["leases.used.copy"], &["leases.used", "leases.used.copy"]] {
        let full = folder.path().join(format!("full-{}", missing.len()));
        let small = Small::mount(&full.join("state"));
        for (name, bytes) in &whole {
            if !missing.iter().any(|missing| name == Path::new(missing)) {
                fs::write(full.join("state").join(name), bytes).unwrap();
            }
        }
        small.fill();
        let agent = LoneAgent::start(&program("agent").unwrap(), &full, CONFIG).unwrap();
        let begin = Instant::now();
        let space = "event=trouble place=space reason=\"/state is full: 0 of 2 MiB are left\"";
        while !agent.said().contains(space) {
            assert!(begin.elapsed() < SOON, "{}", agent.said());
            std::thread::sleep(Duration::from_millis(50));
        }
        let said = agent.said();
        assert!(said.contains(&format!("event=node id={node}")), "{said}");
        let told = said.contains("place=state reason=\"STATE is full: ");
        assert!(told || missing.is_empty(), "{said}");
    }
}

/// From power-on to the agent's answer, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(240);
/// Bytes of a block of the file systems.
const BLOCK: u64 = 4096;
/// Where the superblock says what a kernel must know to mount it (`s_feature_incompat`).
const FEATURES: u64 = 1024 + 0x60;

/// Where a folder's entry for `name` begins, in every block of a volume that lists `beside`, too: eight bytes
/// before its name. Source: the kernel's Documentation/filesystems/ext4/directory.rst.
fn entries_of(disk: &File, (start, length): (u64, u64), name: &str, beside: &str) -> Vec<u64> {
    let zeros = vec![0; usize::try_from(BLOCK).unwrap()];
    let mut block = zeros.clone();
    let find = |block: &[u8], text: &str| {
        block.windows(text.len()).position(|window| window == text.as_bytes())
    };
    let mut found = Vec::new();
    for at in (start..start + length).step_by(block.len()) {
        disk.read_exact_at(&mut block, at).unwrap();
        if block == zeros {
            continue;
        }
        if let (Some(place), Some(_)) = (find(&block, name), find(&block, beside)) {
            found.push(at + place as u64 - 8);
        }
    }
    found
}

/// Alters sixteen bytes at each of these places.
fn alter(disk: &File, places: &[u64]) {
    assert!(!places.is_empty());
    for at in places {
        disk.write_all_at(&[0xa5; 16], *at).unwrap();
    }
}

#[test]
fn a_disk_that_altered_its_file_systems_is_mended_before_they_are_mounted() {
    let folder = tempfile::tempdir().unwrap();
    let image = image_folder().unwrap();
    let disk = folder.path().join("disk.img");
    fs::copy(image.join("holdfast.img"), &disk).unwrap();
    let options = HostOptions {
        medium: Medium::InstalledDisk(disk.clone()),
        memory_mib: 1024,
        uplink: Uplink::None,
        config: Some(CONFIG.to_owned()),
        ..HostOptions::default()
    };
    let mut host = Host::start(&image, folder.path(), &options).unwrap();
    let first = host.serial.wait("event=node id=", UP).unwrap();
    // Told to end while it starts, it ends as it should, and its files have their names before it
    // goes down.
    host.serial.wait("event=overlay-started", UP).unwrap();
    host.press_power_button().unwrap();
    host.wait_for_end(UP).unwrap();
    assert!(!host.serial.text().contains("event=trouble place=state"), "{}", host.serial.text());
    drop(host);

    let state = (ALIGNMENT + layout::ESP_BYTES, layout::STATE_BYTES);
    let data = (state.0 + state.1, layout::DATA_BYTES);
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    alter(&file, &[state.0 + FEATURES]);
    alter(&file, &entries_of(&file, state, "node.key", "lost+found"));
    alter(&file, &entries_of(&file, data, "content", "lost+found"));
    drop(file);

    let mut host = Host::start(&image, folder.path(), &options).unwrap();
    for (place, told) in [
        ("state", "its superblock was altered, at byte 96 of it"),
        ("state", "its file system was damaged and is mended: "),
        ("data", "its file system was damaged and is mended: "),
        ("state", "lost their names and have them again: "),
    ] {
        let told = format!("event=trouble place={place} reason=\"{told}");
        host.serial.wait(&told, UP).unwrap();
    }
    host.serial.wait("event=agent-ready", UP).unwrap();
    let text = host.serial.text();
    assert!(!text.contains("event=ram-mode"), "{text}");
    let node = |text: &str| text.split("event=node id=").nth(1).unwrap()[..64].to_owned();
    assert_eq!(node(&text), node(&first));
    // It has looked back by the time it is off, at the latest.
    host.press_power_button().unwrap();
    host.wait_for_end(UP).unwrap();
    assert!(!host.serial.text().contains("event=ended-abruptly"), "SECOND {}", host.serial.text());
}
