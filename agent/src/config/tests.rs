//! Where configuration is found, and what is told when it is not.

use std::io::{Cursor, Write};

use types::node::Bdf;

use super::*;
use crate::testing::root;

fn volume(label: [u8; 11], document: &str) -> Vec<u8> {
    let mut storage = Cursor::new(vec![0; 1 << 20]);
    let options = fatfs::FormatVolumeOptions::new().volume_label(label);
    fatfs::format_volume(&mut storage, options).expect("formatted");
    let volume = fatfs::FileSystem::new(&mut storage, FsOptions::new()).expect("a volume");
    let mut file = volume.root_dir().create_file(DOCUMENT).expect("created");
    file.write_all(document.as_bytes()).expect("written");
    drop(file);
    drop(volume);
    storage.into_inner()
}

#[test]
fn a_volume_without_an_end_is_told_and_given_up() {
    let mut bytes = vec![0; 40 << 20];
    let options = fatfs::FormatVolumeOptions::new().volume_label(*b"HOLDFAST   ");
    let options = options.fat_type(fatfs::FatType::Fat32).bytes_per_cluster(512);
    fatfs::format_volume(io::Cursor::new(&mut bytes), options).expect("formatted");
    let whole = fatfs::FileSystem::new(io::Cursor::new(&mut bytes), FsOptions::new());
    let whole = whole.expect("a volume");
    (0..16).for_each(|n| drop(whole.root_dir().create_file(&format!("F{n}")).expect("made")));
    whole.unmount().expect("written");
    // The top folder goes on at cluster 3; one flipped bit leads it back to 2, where it begins.
    let table = usize::from(u16::from_le_bytes([bytes[14], bytes[15]])) * 512;
    assert_eq!(bytes[table + 8], 3);
    bytes[table + 8] = 2;
    let refused = read_document(io::Cursor::new(&bytes)).expect_err("no document");
    assert!(refused.to_string().contains("the volume has no end"), "{refused}");
}

#[test]
fn whatever_bit_of_a_volume_is_flipped_it_is_read_or_refused() {
    let mut bytes = volume(*b"HOLDFAST   ", &document());
    let field = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    // Boot sector, table, top folder, and what the document says (FAT32 Specification 1.03, BPB).
    let table = field(14) * field(11);
    let folder = table + usize::from(bytes[16]) * field(22) * field(11);
    let text = bytes.windows(9).position(|nine| nine == b"version =").expect("the document");
    let whole = document().into_bytes();
    for place in (0..64).chain(table..table + 9).chain(folder..folder + 128).chain(text..text + 90)
    {
        for bit in 0..8 {
            bytes[place] ^= 1 << bit;
            // Nothing signs it; but what is read is the file's and no more.
            if let Ok(Some(found)) = read_document(io::Cursor::new(&bytes)) {
                assert!(found.len() <= MAX_CONFIG + 1, "byte {place}, bit {bit}");
            }
            bytes[place] ^= 1 << bit;
        }
    }
    let found = read_document(io::Cursor::new(&bytes)).expect("read");
    assert_eq!(found, Some(whole));
}

fn document() -> String {
    let key = "01".repeat(32);
    format!("version = 1\nname = \"n\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
}

#[test]
fn the_command_line_comes_first() {
    let line = format!("quiet {PARAMETER}{} x", STANDARD.encode(document()));
    let root = root(&[("proc/cmdline", line.as_bytes()), (BAKED, b"rubbish")]);
    let found = load(root.path());
    assert_eq!(found.source, Source::CommandLine);
    assert_eq!(found.spec.expect("valid").name, "n");
}

#[test]
fn a_volume_with_our_label_comes_before_the_image() {
    let image = volume(*b"HOLDFAST   ", &document());
    let other = volume(*b"OTHER      ", "rubbish");
    let root = root(&[
        ("sys/class/block/sda/x", b""),
        ("sys/class/block/sdb/x", b""),
        ("dev/sda", &other),
        ("dev/sdb", &image),
        (BAKED, b"rubbish"),
    ]);
    let found = load(root.path());
    assert!(found.source.to_string().ends_with("dev/sdb"), "{}", found.source);
    assert_eq!(found.spec.expect("valid").name, "n");
}

#[test]
fn a_volume_hides_none_from_whoever_asks_for_all() {
    let (wrong, right) = (volume(*b"HOLDFAST   ", "rubbish"), volume(*b"HOLDFAST   ", &document()));
    let root = root(&[
        ("sys/class/block/sda/x", b""),
        ("sys/class/block/sdb/x", b""),
        ("dev/sda", &wrong),
        ("dev/sdb", &right),
    ]);
    assert!(load(root.path()).spec.is_err());
    let found: Vec<bool> = volumes(root.path()).map(|found| found.spec.is_ok()).collect();
    assert_eq!(found, [false, true]);
}

#[test]
fn a_label_may_be_written_in_small_letters() {
    let image = volume(*b"Holdfast   ", &document());
    let root = root(&[("sys/class/block/sda/x", b""), ("dev/sda", &image)]);
    assert_eq!(load(root.path()).spec.expect("valid").name, "n");
}

/// A volume with our label and a file of this name.
fn with_file(name: &str) -> Vec<u8> {
    let mut storage = Cursor::new(vec![0; 1 << 20]);
    let options = fatfs::FormatVolumeOptions::new().volume_label(*b"HOLDFAST   ");
    fatfs::format_volume(&mut storage, options).expect("formatted");
    let volume = fatfs::FileSystem::new(&mut storage, FsOptions::new()).expect("a volume");
    let mut file = volume.root_dir().create_file(name).expect("created");
    file.write_all(document().as_bytes()).expect("written");
    drop(file);
    drop(volume);
    storage.into_inner()
}

#[test]
fn a_document_with_another_name_is_told_by_it() {
    let told = |name: &str| match load(root_with(&with_file(name)).path()).spec {
        Err(error @ LoadError::Volume { .. }) => lease::problem::chain(&error),
        other => panic!("{other:?}"),
    };
    let windows = told("holdfast.toml.txt");
    assert!(windows.contains("\"holdfast.toml.txt\", which must be called"), "{windows}");
    assert!(told("Holdfast.tml").contains("\"Holdfast.tml\", which must be called"));
    assert!(told("node.toml").contains("there is [\"node.toml\"]"));
    // Names are the same in any letters.
    assert_eq!(load(root_with(&with_file("Holdfast.TOML")).path()).spec.expect("read").name, "n");
}

#[test]
fn a_second_volume_that_says_something_else_is_told() {
    let first = volume(*b"HOLDFAST   ", &document());
    let told = |second: &[u8]| {
        let root = root(&[
            ("sys/class/block/sda/x", b""),
            ("sys/class/block/sdb/x", b""),
            ("dev/sda", &first),
            ("dev/sdb", second),
        ]);
        unreadable(root.path()).map(|error| error.to_string()).collect::<Vec<_>>()
    };
    assert!(told(&first).is_empty());
    let other = told(&volume(*b"HOLDFAST   ", "version = 1"));
    let [other] = &other[..] else { panic!("{other:?}") };
    assert!(other.contains("dev/sdb is labelled") && other.contains("dev/sda counts"), "{other}");
}

/// A file of a fuzz target's corpus.
fn corpus(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    fs::read(folder.join(name)).expect("the corpus is committed")
}

#[test]
fn a_document_is_read_from_an_iso() {
    for name in ["volume/iso", "volume/iso-level-1"] {
        let root = root(&[("sys/class/block/sr0/x", b""), ("dev/sr0", &corpus(name))]);
        let found = load(root.path());
        assert_eq!(found.spec.expect("valid").name, "n", "{name}");
        assert_eq!(unreadable(root.path()).count(), 0);
    }
    let bytes = corpus("volume/iso-folder-outside");
    let root = root(&[("sys/class/block/sr0/x", b""), ("dev/sr0", &bytes)]);
    let found = load(root.path());
    assert!(matches!(found.spec, Err(LoadError::Volume { .. })), "{found:?}");
}

#[test]
fn a_volume_that_was_meant_and_cannot_be_read_is_told() {
    let names = ["exfat", "ext4", "ntfs", "fat32-no-fsinfo", "fat32-small", "exfat-other"];
    for name in names {
        let bytes = corpus(&format!("label/{name}"));
        let root = root(&[("sys/class/block/sdb1/x", b""), ("dev/sdb1", &bytes)]);
        let told: Vec<String> = unreadable(root.path()).map(|error| error.to_string()).collect();
        if name == "exfat-other" {
            assert!(told.is_empty(), "{told:?}");
            continue;
        }
        let [told] = &told[..] else { panic!("{name}: {told:?}") };
        assert!(told.contains("/dev/sdb1 is labelled HOLDFAST and is "), "{told}");
        assert!(told.contains("mkfs.vfat -F 32"), "{told}");
        // Nothing else is there: this is what the screen says.
        assert!(matches!(load(root.path()).spec, Err(LoadError::Foreign { .. })), "{name}");
    }
    // It does not win over what is there.
    let root = root(&[
        ("sys/class/block/sdb1/x", b""),
        ("dev/sdb1", &corpus("label/exfat")),
        (BAKED, document().as_bytes()),
    ]);
    assert_eq!(load(root.path()).source, Source::Image);
    assert_eq!(unreadable(root.path()).count(), 1);
    // What is read is not told.
    let whole = volume(*b"HOLDFAST   ", &document());
    let root = root_with(&whole);
    assert_eq!(unreadable(root.path()).count(), 0);
}

fn root_with(volume: &[u8]) -> tempfile::TempDir {
    root(&[("sys/class/block/sda/x", b""), ("dev/sda", volume)])
}

#[tokio::test]
async fn an_installed_node_starts_at_once() {
    let root = root(&[("state/holdfast.toml", document().as_bytes())]);
    let found = settled(root.path()).await;
    assert_eq!(found.source, Source::Installed);
    // This machine came up long ago; nothing is waited for.
    assert!(!superseded(root.path(), &found.source).await);
    assert!(!volume_appears(root.path(), Duration::from_millis(10)).await);
}

#[tokio::test]
async fn but_a_volume_that_is_found_later_counts() {
    let stick = volume(*b"HOLDFAST   ", &document());
    let installed = document();
    let root = root(&[("state/holdfast.toml", installed.as_bytes()), ("dev/sdb", &stick)]);
    let path = root.path().to_owned();
    let plugged = tokio::spawn(async move {
        tokio::time::sleep(COMING_UP).await;
        fs::create_dir_all(path.join("sys/class/block/sdb")).expect("made");
    });
    assert!(volume_appears(root.path(), SETTLED).await);
    plugged.await.expect("plugged in");
}

#[test]
fn a_volume_on_a_drive_that_a_renter_had_does_not_count() {
    let drive: Bdf = "0000:01:00.0".parse().expect("an address");
    let disk = format!("sys/devices/pci0000:00/{drive}/nvme/nvme0/nvme0n1");
    let written = volume(*b"HOLDFAST   ", &document());
    let root = root(&[
        ("state/holdfast.toml", document().as_bytes()),
        ("dev/nvme0n1", &written),
        (&format!("{disk}/size"), b"8\n"),
        ("sys/class/block/.keep", b""),
    ]);
    let entry = root.path().join("sys/class/block/nvme0n1");
    std::os::unix::fs::symlink(root.path().join(disk), entry).expect("linked");
    let source = || load(root.path()).source;
    assert!(matches!(source(), Source::Volume(_)));
    // Power came back, and the drive is as the renter left it.
    lent::remember(root.path(), drive).expect("noted");
    assert_eq!(source(), Source::Installed);
}

#[test]
fn the_installed_document_comes_before_the_image() {
    let root = root(&[("state/holdfast.toml", document().as_bytes()), (BAKED, b"rubbish")]);
    let found = load(root.path());
    assert_eq!((found.source, found.document), (Source::Installed, document().into_bytes()));
    assert_eq!(found.spec.expect("valid").name, "n");
}

#[test]
fn a_customised_document_comes_before_the_one_that_was_built_in() {
    let root = root(&[(CUSTOMISED, document().as_bytes()), (BAKED, b"rubbish")]);
    let found = load(root.path());
    assert_eq!(found.source, Source::Customised);
    assert_eq!(found.spec.expect("valid").name, "n");
}

#[test]
fn a_wrong_document_hides_the_next_one() {
    let line = format!("{PARAMETER}{}", STANDARD.encode("version = 1\nnmae = 1\n"));
    let root = root(&[("proc/cmdline", line.as_bytes()), (BAKED, document().as_bytes())]);
    let refusal = load(root.path()).spec.expect_err("a typo").to_string();
    assert!(refusal.contains("line 2") && refusal.contains("nmae"), "{refusal}");
    assert!(matches!(load(Path::new("/nonexistent")).spec, Err(LoadError::Absent)));
}
