//! Imported images hold what `qemu-img` says they hold, and hostile ones are refused.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "../fuzz/import_walk.rs"]
mod import_walk;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::Command,
};

use gateway::import::{self, Format, Imported};
use import_walk::walk;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

/// Size of the disks that are compared: more than one table of every format, not round.
const SIZE: u64 = (70 << 20) + 512 * 9;

/// A disk with data here and there; returns its path.
fn disk(folder: &Path) -> PathBuf {
    let path = folder.join("disk.raw");
    let file = File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    let mut seed = 0x1234_5678_u64;
    let places = [0, 65_536 - 512, 1 << 20, (8 << 20) + 4096, 33 << 20, SIZE - 1536];
    for (index, at) in places.into_iter().enumerate() {
        let length = [512, 1024, 300_000, 4096, 2 << 20, 1536][index];
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Half of it compresses.
            if seed >> 62 == 0 { 0x55 } else { (seed >> 33).to_le_bytes()[0] }
        })
        .take(length)
        .collect();
        file.write_all_at(&noise, at).unwrap();
    }
    path
}

/// Returns whether `qemu-img` is there, and says so if it is not.
fn has_qemu_img() -> bool {
    let there = Command::new("qemu-img").arg("--version").output().is_ok();
    if !there {
        println!("skipped: images made by qemu-img: qemu-img is not installed");
    }
    there
}

fn qemu_img(arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the folder of a format's corpus.
fn corpus(format: Format) -> PathBuf {
    let name = format!("import_{}", format.name().to_lowercase());
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)
}

fn digest(path: &Path) -> String {
    types::hex::encode(&<[u8; 32]>::from(Sha256::digest(fs::read(path).unwrap())))
}

/// Makes an image of `raw` by `qemu-img convert`, imports it, and compares with what `qemu-img`
/// makes of it again.
fn compare(folder: &Path, raw: &Path, (name, format): (&str, &str), options: &[&str]) -> Imported {
    let [image, back, out] =
        ["image", "back", "out"].map(|kind| folder.join(format!("{name}.{kind}")));
    let path = |path: &Path| path.display().to_string();
    let convert = ["convert", "-f", "raw", "-O", format];
    let files = [path(raw), path(&image)];
    let files = [files[0].as_str(), files[1].as_str()];
    qemu_img(&[&convert[..], options, &files[..]].concat());
    qemu_img(&["convert", "-f", format, "-O", "raw", &path(&image), &path(&back)]);
    let made = import::import(&image, None, &out).unwrap();
    assert_eq!(made.content.to_string(), digest(&back), "{name}");
    assert_eq!(digest(&out), digest(&back), "{name}: what is written is what is named");
    assert_eq!(made.size, fs::metadata(&back).unwrap().len(), "{name}");
    let held = fs::metadata(&out).unwrap().blocks() * 512;
    assert!(held < 4 << 20, "{name}: {held} bytes are held");
    assert!(made.data < 4 << 20, "{name}: {} bytes of data", made.data);
    made
}

#[test]
fn every_format_holds_what_qemu_img_put_into_it() {
    if !has_qemu_img() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let raw = disk(folder.path());
    let table: [(&str, &str, &[&str], Format); 20] = [
        ("v3", "qcow2", &[], Format::Qcow2),
        ("v2", "qcow2", &["-o", "compat=0.10"], Format::Qcow2),
        ("small", "qcow2", &["-o", "cluster_size=512"], Format::Qcow2),
        ("large", "qcow2", &["-o", "cluster_size=2M"], Format::Qcow2),
        ("zlib", "qcow2", &["-c"], Format::Qcow2),
        ("zstd", "qcow2", &["-c", "-o", "compression_type=zstd"], Format::Qcow2),
        ("full", "qcow2", &["-o", "preallocation=metadata"], Format::Qcow2),
        ("parts", "qcow2", &["-o", "extended_l2=on,cluster_size=128k"], Format::Qcow2),
        ("parts-zlib", "qcow2", &["-c", "-o", "extended_l2=on"], Format::Qcow2),
        ("sparse", "vmdk", &[], Format::Vmdk),
        ("stream", "vmdk", &["-o", "subformat=streamOptimized"], Format::Vmdk),
        ("zeroed", "vmdk", &["-o", "zeroed_grain=on"], Format::Vmdk),
        ("scsi", "vmdk", &["-o", "compat6=on,adapter_type=lsilogic"], Format::Vmdk),
        ("dynamic", "vpc", &[], Format::Vhd),
        ("exact", "vpc", &["-o", "force_size=on"], Format::Vhd),
        ("fixed", "vpc", &["-o", "subformat=fixed,force_size=on"], Format::Vhd),
        ("vhdx", "vhdx", &[], Format::Vhdx),
        ("vhdx-fixed", "vhdx", &["-o", "subformat=fixed"], Format::Vhdx),
        ("vhdx-small", "vhdx", &["-o", "block_size=1M"], Format::Vhdx),
        ("vhdx-large", "vhdx", &["-o", "block_size=256M"], Format::Vhdx),
    ];
    for (name, format, options, expected) in table {
        let made = compare(folder.path(), &raw, (name, format), options);
        assert_eq!(made.format, expected, "{name}");
    }
    let plain = compare(folder.path(), &raw, ("raw", "raw"), &[]);
    assert_eq!((plain.format, plain.size), (Format::Raw, SIZE));
}

#[test]
fn a_descriptor_names_flat_files_beside_it_and_nothing_else() {
    if !has_qemu_img() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let raw = disk(folder.path());
    let image = folder.path().join("flat.vmdk");
    let (from, to) = (raw.display().to_string(), image.display().to_string());
    for kind in ["monolithicFlat", "twoGbMaxExtentFlat", "twoGbMaxExtentSparse"] {
        let option = format!("subformat={kind}");
        qemu_img(&["convert", "-f", "raw", "-O", "vmdk", "-o", &option, &from, &to]);
        let out = folder.path().join(kind);
        let made = import::import(&image, None, &out).unwrap();
        assert_eq!((made.format, digest(&out)), (Format::Vmdk, digest(&raw)), "{kind}");
    }
    let piece = folder.path().join("flat-s001.vmdk");
    let error = import::import(&piece, None, &folder.path().join("no")).unwrap_err();
    assert!(error.to_string().contains("one piece of a disk"), "{error}");
    let text = fs::read_to_string(&image).unwrap();
    for name in ["/etc/passwd", "../flat-s001.vmdk", ".."] {
        let line = format!("RW 1 FLAT \"{name}\" 0\n");
        fs::write(&image, format!("# Disk DescriptorFile\n{line}")).unwrap();
        let error = import::import(&image, None, &folder.path().join("no")).unwrap_err();
        assert!(error.to_string().contains("elsewhere"), "{error}");
    }
    fs::write(&image, text.replace("parentCID=ffffffff", "parentCID=12345678")).unwrap();
    let error = import::import(&image, None, &folder.path().join("no")).unwrap_err();
    assert!(error.to_string().contains("has a parent"), "{error}");
    assert!(!folder.path().join("no").exists(), "nothing is left of an import that fails");
}

#[test]
fn a_descriptor_names_extents_of_every_kind_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(Format::Vmdk).join("sparse");
    let (image, out) = (folder.path().join("disk.vmdk"), folder.path().join("out"));
    fs::copy(&corpus, folder.path().join("disk-sparse.vmdk")).unwrap();
    let flat: Vec<u8> = (1..=4u8).flat_map(|sector| [sector; 512]).collect();
    fs::write(folder.path().join("disk-flat.vmdk"), &flat).unwrap();
    let text = "# Disk DescriptorFile\r\nversion=1\r\nparentCID=ffffffff\r\n\
                RW 2 FLAT \"disk-flat.vmdk\" 1 partitionUUID x\r\nRW 3 ZERO\r\n\
                RW 8192 SPARSE \"disk-sparse.vmdk\"\r\nRW 1 VMFS \"disk-flat.vmdk\"\r\n";
    fs::write(&image, text).unwrap();
    import::import(&image, None, &out).unwrap();
    let alone = folder.path().join("alone");
    import::import(&corpus, None, &alone).unwrap();
    let expected = [&flat[512..1536], &[0; 1536], &fs::read(alone).unwrap(), &flat[..512]].concat();
    assert!(fs::read(&out).unwrap() == expected);
    fs::write(&image, text.replace("\" 1 part", "\" one part")).unwrap();
    let error = import::import(&image, None, &folder.path().join("no")).unwrap_err();
    assert!(error.to_string().contains("makes no sense"), "{error}");
}

#[test]
fn one_piece_of_a_vmdk_is_not_taken_for_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("disk-s001.vmdk"), folder.path().join("out"));
    let whole = fs::read(corpus(Format::Vmdk).join("sparse")).unwrap();
    let mut without = whole.clone();
    without[28..44].fill(0);
    let mut blank = whole;
    blank[512..21 * 512].fill(0);
    for piece in [without, blank] {
        fs::write(&image, piece).unwrap();
        let error = import::import(&image, None, &out).unwrap_err().to_string();
        assert!(error.contains("is one piece of a disk"), "{error}");
    }
    // A header may carry the descriptor of other extents.
    let made = import::import(&corpus(Format::Vmdk).join("header"), None, &out).unwrap();
    assert_eq!((made.size, made.data), (11 * 512, 0));
}

/// Has a program make a file; returns whether the program is there, and says so if it is not.
fn produced(words: &[&str], out: &Path) -> bool {
    let Ok(output) = Command::new(words[0]).args(&words[1..]).output() else {
        println!("skipped: a file made by {0}: {0} is not installed", words[0]);
        return false;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if !output.stdout.is_empty() {
        fs::write(out, output.stdout).unwrap();
    }
    true
}

#[test]
fn archives_and_other_formats_are_not_taken_for_raw() {
    let folder = tempfile::tempdir().unwrap();
    let raw = folder.path().join("disk.raw");
    fs::write(&raw, b"disk".repeat(4096)).unwrap();
    let (from, file) = (raw.display().to_string(), folder.path().join("file"));
    let (to, out) = (file.display().to_string(), folder.path().join("out"));
    let convert = ["qemu-img", "convert", "-f", "raw", "-O"];
    let table: [(&[&str], &str); 10] = [
        (&["tar", "--format=ustar", "-cPf", &to, &from], "tar archive"),
        (&["tar", "--format=gnu", "-cPf", &to, &from], "tar archive"),
        (&["gzip", "-c", &from], "gzip"),
        (&["xz", "-c", &from], "xz"),
        (&["zstd", "-c", &from], "zstd"),
        (&["bzip2", "-c", &from], "bzip2"),
        (&["zip", "-q", "-", &from], "ZIP"),
        (&[&convert[..], &["vdi", &from, &to]].concat(), "VDI"),
        (&[&convert[..], &["qed", &from, &to]].concat(), "QED"),
        (&[&convert[..], &["parallels", &from, &to]].concat(), "Parallels"),
    ];
    for (words, kind) in table.into_iter().filter(|(words, _)| produced(words, &file)) {
        let error = import::import(&file, None, &out).unwrap_err().to_string();
        assert!(error.contains(kind), "{words:?}: {error}");
        assert!(!out.exists());
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn marks_decide_only_where_no_format_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("image"), folder.path().join("out"));
    let table: [(u64, &[u8], &str); 15] = [
        (0, b"\x04\x22\x4d\x18", "lz4"),
        (0, b"LZIP\x01", "lzip"),
        (0, b"Rar!\x1a\x07\x01\0", "RAR"),
        (0, b"<!DOCTYPE html>", "web page"),
        (0, b".encoding = \"UTF-8\"", "VMX"),
        (0, b"Bochs Virtual HD Image", "Bochs"),
        (0, b"\x3a\xff\x26\xed\x01\0", "Android"),
        (0, b"MSWIM\0\0\0", "WIM"),
        ((1 << 20) - 512, b"koly", "macOS"),
        (4096, b"EFI PART", "sectors of 4096 bytes"),
        (0, b"7z\xbc\xaf\x27\x1c", "7z"),
        (0, b"WithoutFreeSpace", "Parallels"),
        (0, b"COWD", "vmfsSparse"),
        (0, b"\xbe\xba\xfe\xca\0\0\0\0", "SEsparse"),
        (0, b"<?xml version=\"1.0\"?>", "the disk that it names"),
    ];
    for (at, bytes, kind) in table {
        let file = File::create(&image).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(bytes, at).unwrap();
        let error = import::import(&image, None, &out).unwrap_err().to_string();
        assert!(error.contains(kind), "{kind}: {error}");
    }
    let made = import::import(&image, Some(Format::Raw), &out).unwrap();
    assert_eq!((made.format, made.size), (Format::Raw, 1 << 20));
    // A table in the second sector of 512 bytes counts, whatever else there is.
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0; 512], 0).unwrap();
    file.write_all_at(b"EFI PART", 4096).unwrap();
    file.write_all_at(b"EFI PART", 512).unwrap();
    let made = import::import(&image, None, &folder.path().join("both")).unwrap();
    assert_eq!(made.format, Format::Raw);
    // ISO 9660 is what a drive reads.
    let file = File::create(&image).unwrap();
    file.write_all_at(b"\x01CD001\x01", 32_768).unwrap();
    let made = import::import(&image, None, &folder.path().join("medium")).unwrap();
    assert_eq!(made.format, Format::Raw);
}

#[test]
fn what_is_no_file_or_holds_nothing_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (empty, out) = (folder.path().join("empty"), folder.path().join("out"));
    File::create(&empty).unwrap();
    let error = import::import(&empty, None, &out).unwrap_err().to_string();
    assert!(error.contains("its disk is empty"), "{error}");
    let error = import::import(folder.path(), None, &out).unwrap_err().to_string();
    assert!(error.contains("a folder"), "{error}");
    // Nobody writes to it, so that opening it would wait for ever.
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let error = import::import(&pipe, None, &out).unwrap_err().to_string();
    assert!(error.contains("a pipe"), "{error}");
    assert!(!out.exists());
}

#[test]
fn compressed_clusters_and_grains_are_as_long_as_they_should_be() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("image"), folder.path().join("out"));
    // Streams of more bytes than a cluster and a grain have.
    let mut stream = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    stream.write_all(&[7; 4097]).unwrap();
    let stream = stream.finish().unwrap();
    let mut bytes = fs::read(corpus(Format::Qcow2).join("deflate")).unwrap();
    bytes[0x5000..0x5000 + stream.len()].copy_from_slice(&stream);
    fs::write(&image, bytes).unwrap();
    let error = import::import(&image, None, &out).unwrap_err().to_string();
    assert!(error.contains("compressed cluster at 0x5000: more or less"), "{error}");
    let mut stream = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    stream.write_all(&[7; 65_537]).unwrap();
    let stream = stream.finish().unwrap();
    let whole = fs::read(corpus(Format::Vmdk).join("stream")).unwrap();
    let mut bytes = whole.clone();
    bytes[0x1_000c..0x1_000c + stream.len()].copy_from_slice(&stream);
    fs::write(&image, bytes).unwrap();
    let error = import::import(&image, None, &out).unwrap_err().to_string();
    assert!(error.contains("compressed grain at 0x10000: more or less"), "{error}");
    // A grain that the end of the file cuts: its checksum is missing.
    let mut bytes = whole;
    bytes[0x1_0008..0x1_000c].copy_from_slice(&0x2_0000u32.to_le_bytes());
    fs::write(&image, bytes).unwrap();
    let error = import::import(&image, None, &out).unwrap_err().to_string();
    assert!(error.contains("past the end of the file"), "{error}");
    assert!(!out.exists());
}

#[test]
fn a_qcow2_says_how_it_compresses_and_ends_with_a_whole_sector() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("image"), folder.path().join("out"));
    let mut bytes = fs::read(corpus(Format::Qcow2).join("subclusters")).unwrap();
    bytes[24..32].copy_from_slice(&(300 * 1024 - 500u64).to_be_bytes());
    fs::write(&image, &bytes).unwrap();
    let made = import::import(&image, None, &out).unwrap();
    assert_eq!(made.size, 300 * 1024);
    bytes[104] = 1;
    fs::write(&image, bytes).unwrap();
    let error = import::import(&image, None, &folder.path().join("no")).unwrap_err().to_string();
    assert!(error.contains("not the feature"), "{error}");
}

#[test]
fn subclusters_are_data_or_zeroes_each() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let image = corpus(Format::Qcow2).join("subclusters");
    import::import(&image, None, &out).unwrap();
    let mut expected = vec![0; 300 << 10];
    expected[..512].fill(7);
    expected[20 << 10..23 << 10].fill(8);
    expected[64 << 10..80 << 10].fill(9);
    expected[70 << 10..72 << 10].fill(0);
    expected[307_100..].fill(5);
    assert!(fs::read(&out).unwrap() == expected);
}

#[test]
fn descriptors_are_known_however_they_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("disk.vmdk"), folder.path().join("out"));
    let made = import::import(&corpus(Format::Vmdk).join("loose"), None, &out).unwrap();
    assert_eq!((made.format, made.size), (Format::Vmdk, 3 * 512));
    let head = "#disk descriptorfile\nversion=1\n";
    for parent in ["parentCID = 12345678", "ParentCID=0", "parentFileNameHint = \"base.vmdk\""] {
        fs::write(&image, format!("{head}{parent}\nRW 3 ZERO\n")).unwrap();
        let error = import::import(&image, None, &folder.path().join("no")).unwrap_err();
        assert!(error.to_string().contains("has a parent"), "{parent}: {error}");
    }
}

#[test]
fn the_tables_of_all_extents_together_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.vmdk");
    // One table for each sector: what one directory may need at most.
    let sectors = 1u64 << 24;
    let mut head = fs::read(corpus(Format::Vmdk).join("sparse")).unwrap();
    head[12..20].copy_from_slice(&sectors.to_le_bytes());
    head[20..28].copy_from_slice(&1u64.to_le_bytes());
    head[44..48].copy_from_slice(&1u32.to_le_bytes());
    let piece = File::create(folder.path().join("disk-piece.vmdk")).unwrap();
    piece.write_all_at(&head[..512], 0).unwrap();
    piece.set_len(128 << 20).unwrap();
    let line = format!("RW {sectors} SPARSE \"disk-piece.vmdk\"\n");
    fs::write(&image, format!("# Disk DescriptorFile\n{line}{line}")).unwrap();
    let error = import::import(&image, None, &folder.path().join("no")).unwrap_err().to_string();
    assert!(error.contains("at most 67108864"), "{error}");
}

#[test]
fn what_needs_other_files_or_keys_is_refused_by_name() {
    if !has_qemu_img() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", &path("base"), "8M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &path("base"), "-F", "qcow2", &path("child")]);
    let data = format!("data_file={}", path("data"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &data, &path("external"), "8M"]);
    // Making a really encrypted one measures the CPU's speed, which fails on a busy one.
    qemu_img(&["create", "-q", "-f", "qcow2", &path("locked"), "8M"]);
    let locked = File::options().write(true).open(folder.path().join("locked")).unwrap();
    locked.write_all_at(&2u32.to_be_bytes(), 32).unwrap();
    // Its file holds it, and no node's.
    qemu_img(&["create", "-q", "-f", "qcow2", &path("large"), "16T"]);
    let words = [
        ("large", "several disks"),
        ("child", "backing file"),
        ("external", "in another file"),
        ("locked", "encrypted"),
    ];
    let out = folder.path().join("out");
    for (name, word) in words {
        let error = import::import(&folder.path().join(name), None, &out).unwrap_err().to_string();
        assert!(error.contains(word), "{name}: {error}");
    }
    assert!(!out.exists());
}

#[test]
fn raw_disks_are_rounded_up_to_whole_sectors_and_stay_sparse() {
    let folder = tempfile::tempdir().unwrap();
    let (image, sparse) = (folder.path().join("image"), folder.path().join("sparse"));
    let file = File::create(&image).unwrap();
    file.write_all_at(b"end", 2 << 30).unwrap();
    drop(file);
    let made = import::import(&image, None, &sparse).unwrap();
    let written = fs::metadata(&sparse).unwrap();
    assert_eq!((made.size, written.len()), ((2 << 30) + 512, (2 << 30) + 512));
    assert!(written.blocks() * 512 < 4 << 20, "{} blocks are held", written.blocks());
    let out = folder.path().join("out");
    let small = folder.path().join("small");
    fs::write(&small, b"x").unwrap();
    let made = import::import(&small, None, &out).unwrap();
    assert_eq!((made.size, fs::metadata(&out).unwrap().len()), (512, 512));
    // A result is never replaced.
    assert!(import::import(&small, None, &out).unwrap_err().to_string().contains("cannot create"));
}

#[test]
fn damaged_images_are_refused() {
    if !has_qemu_img() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let raw = disk(folder.path());
    let out = folder.path().join("out");
    let table: [(&str, &str, u64, &[u8], &str); 4] = [
        ("qcow2", "qcow2", 40, &[0xff; 8], "outside of the file"),
        ("clusters", "qcow2", 20, &[0, 0, 0, 99], "2^99"),
        ("corrupt", "qcow2", 72, &[0, 0, 0, 0, 0, 0, 0, 2], "marked it so"),
        ("vmdk", "vmdk", 73, b"\n\n\r\n", "transferred as text"),
    ];
    for (name, format, at, bytes, word) in table {
        let image = folder.path().join(name);
        let (from, to) = (raw.display().to_string(), image.display().to_string());
        qemu_img(&["convert", "-f", "raw", "-O", format, &from, &to]);
        let file = File::options().write(true).open(&image).unwrap();
        file.write_all_at(bytes, at).unwrap();
        let error = import::import(&image, None, &out).unwrap_err().to_string();
        assert!(error.contains(word), "{name}: {error}");
    }
}

#[test]
fn images_whose_last_block_is_cut_short_are_refused() {
    if !has_qemu_img() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let raw = disk(folder.path());
    let (from, out) = (raw.display().to_string(), folder.path().join("out"));
    // What is left of the last block is less than what the disk, which ends within it, needs.
    let table: [(&str, &[&str], u64); 4] = [
        ("qcow2", &[], (64 << 10) - 4096),
        ("vhdx", &["-o", "block_size=8M"], 3 << 20),
        ("vpc", &["-o", "force_size=on"], (2 << 20) + 512 - 4096),
        ("vmdk", &[], (64 << 10) - 4096),
    ];
    for (format, options, cut) in table {
        let image = folder.path().join(format);
        let to = image.display().to_string();
        let convert = ["convert", "-f", "raw", "-O", format];
        qemu_img(&[&convert[..], options, &[&from, &to]].concat());
        let file = File::options().write(true).open(&image).unwrap();
        file.set_len(file.metadata().unwrap().len() - cut).unwrap();
        let error = import::import(&image, None, &out).unwrap_err().to_string();
        assert!(error.contains("outside of the file"), "{format}: {error}");
    }
}

#[test]
fn what_a_vhdx_cannot_be_is_told() {
    let folder = corpus(Format::Vhdx);
    let out = tempfile::tempdir().unwrap();
    let table = [
        ("dirty", "changes in its log"),
        ("child", "has a parent"),
        ("huge", "several disks"),
        ("outside", "outside of the file"),
        ("unknown", "unknown region"),
    ];
    for (name, word) in table {
        let result = import::import(&folder.join(name), None, &out.path().join(name));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(word), "{name}: {error}");
    }
    let made = import::import(&folder.join("empty"), None, &out.path().join("empty")).unwrap();
    assert_eq!((made.format, made.size, made.data), (Format::Vhdx, 8 << 20, 0));
}

#[test]
fn a_vhdx_with_large_sectors_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (image, out) = (folder.path().join("image"), folder.path().join("out"));
    let mut bytes = fs::read(corpus(Format::Vhdx).join("empty")).unwrap();
    // The item of the logical sector size; metadata has no checksum.
    let size = (0x5_0000 + 0x1_0020)..(0x5_0000 + 0x1_0024);
    bytes[size].copy_from_slice(&4096u32.to_le_bytes());
    fs::write(&image, bytes).unwrap();
    let error = import::import(&image, None, &out).unwrap_err().to_string();
    assert!(error.contains("has sectors of 4096 bytes"), "{error}");
}

#[test]
fn a_differencing_vhd_is_told() {
    let folder = corpus(Format::Vhd);
    let out = tempfile::tempdir().unwrap();
    let error = import::import(&folder.join("child"), None, &out.path().join("no")).unwrap_err();
    assert!(error.to_string().contains("has a parent"), "{error}");
    import::import(&folder.join("dynamic"), None, &out.path().join("yes")).unwrap();
    let made = fs::read(out.path().join("yes")).unwrap();
    // The bitmap of each block says that its first, third, sixth and eighth sectors were written.
    assert_eq!((made[0], made[512], made[1024], made[8192]), (b'd', 0, b'd', b'e'));
}

const FORMATS: [Format; 4] = [Format::Qcow2, Format::Vhd, Format::Vhdx, Format::Vmdk];

#[test]
fn the_corpora_are_survived() {
    for format in FORMATS {
        let folder = corpus(format);
        let files: Vec<PathBuf> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 4, "{format:?}");
        files.iter().for_each(|path| walk(format, &fs::read(path).unwrap()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Images of the corpus with a few bytes changed.
    #[test]
    fn changed_images_are_survived(
        format in 0usize..4,
        pick in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let format = FORMATS[format];
        let folder = corpus(format);
        let mut files: Vec<PathBuf> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let mut bytes = fs::read(pick.get(&files)).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        walk(format, &bytes);
    }
}
