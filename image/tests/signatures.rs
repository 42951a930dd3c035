//! Signatures of boot programs, judged by another tool: Debian's sbverify.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use image::authenticode::{self, AuthenticodeError};
use image::keys::KeyFiles;
use image::signer::{Key, Signer, SignerError};
use image::{Artifacts, enrolment, uki};
use update::secure_boot::{self, Variable};

fn openssl(folder: &Path, arguments: &[&str]) {
    let output = Command::new("openssl").current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a key and its certificate in `folder`.
fn key(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let (key, certificate) = (format!("{name}.key"), format!("{name}.crt"));
    openssl(folder, &["genrsa", "-out", &key, "2048"]);
    let subject = format!("/CN={name}");
    let arguments = ["req", "-new", "-x509", "-subj", &subject, "-key", &key, "-out", &certificate];
    openssl(folder, &arguments);
    (folder.join(key), folder.join(certificate))
}

/// Whether sbverify takes `program` for signed by the owner of `certificate`.
fn verified(folder: &Path, program: &[u8], certificate: &Path) -> bool {
    let path = folder.join("program.efi");
    fs::write(&path, program).unwrap();
    let output = Command::new("sbverify").arg("--cert").arg(certificate).arg(&path).output();
    output.unwrap().status.success()
}

/// The boot program that was last built.
fn program() -> Option<Vec<u8>> {
    let folder = std::env::var_os("HOLDFAST_IMAGE").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/image"),
        PathBuf::from,
    );
    let built = Artifacts::in_folder(&folder).uki;
    let tools = ["/usr/bin/sbverify", "/usr/bin/openssl"].map(PathBuf::from);
    if let Some(path) = tools.iter().chain([&built]).find(|path| !path.exists()) {
        println!("skipped: signatures of boot programs: {} is not there", path.display());
        return None;
    }
    Some(authenticode::unsigned(&fs::read(built).unwrap()).unwrap())
}

#[test]
fn another_tool_agrees_and_every_flipped_bit_is_noticed() {
    let Some(program) = program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (key, certificate) = key(folder.path(), "ours");
    let signed = authenticode::sign(&program, &Signer::read(&key, &certificate).unwrap()).unwrap();
    assert!(verified(folder.path(), &signed, &certificate));
    assert!(!verified(folder.path(), &program, &certificate));
    assert_eq!(authenticode::digest(&signed).unwrap(), authenticode::digest(&program).unwrap());

    // One bit of the headers, and one in the middle of each section.
    let mut places = vec![0x40];
    for name in [".text", ".sdmagic", ".osrel", ".cmdline", ".uname", ".initrd", ".linux"] {
        let content = uki::section(&signed, name).unwrap();
        let at = signed.windows(content.len()).position(|window| window == content).unwrap();
        places.push(at + content.len() / 2);
    }
    let unnoticed: Vec<_> = places
        .into_iter()
        .filter(|at| {
            let mut altered = signed.clone();
            altered[*at] ^= 4;
            verified(folder.path(), &altered, &certificate)
        })
        .collect();
    assert_eq!(unnoticed, Vec::<usize>::new());
}

#[test]
fn a_signature_goes_without_a_trace_and_another_takes_its_place() {
    let Some(program) = program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (key(folder.path(), "first"), key(folder.path(), "second"));
    let signer = |(key, certificate): &(PathBuf, PathBuf)| Signer::read(key, certificate).unwrap();
    let signed = authenticode::sign(&program, &signer(&first)).unwrap();
    let twice = authenticode::sign(&signed, &signer(&first));
    assert!(matches!(twice, Err(AuthenticodeError::Signed)));
    let bare = authenticode::unsigned(&signed).unwrap();
    assert_eq!(bare, program);
    let again = authenticode::sign(&bare, &signer(&second)).unwrap();
    assert!(verified(folder.path(), &again, &second.1));
    assert!(!verified(folder.path(), &again, &first.1));
    // No time of the signing gets in.
    assert_eq!(authenticode::sign(&bare, &signer(&second)).unwrap(), again);
}

#[test]
fn keys_that_cannot_sign_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    if program().is_none() {
        return;
    }
    let (ours, theirs) = (key(folder.path(), "ours"), key(folder.path(), "theirs"));
    let read = |key: &Path, certificate: &Path| Signer::read(key, certificate).unwrap_err();
    assert!(matches!(read(&ours.0, &theirs.1), SignerError::Mismatch { .. }));
    assert!(matches!(read(&ours.0, &ours.0), SignerError::NotCertificate { .. }));
    assert!(matches!(read(&ours.1, &ours.1), SignerError::NotKey { .. }));
    openssl(folder.path(), &["ecparam", "-genkey", "-name", "prime256v1", "-out", "ec.key"]);
    assert!(matches!(read(&folder.path().join("ec.key"), &ours.1), SignerError::NotRsa { .. }));
    assert!(matches!(read(Path::new("/none"), &ours.1), SignerError::Read { .. }));
    // Firmware takes long keys, and not every TPM.
    let long = folder.path().join("long.key");
    openssl(folder.path(), &["genrsa", "-out", "long.key", "3072"]);
    assert!(Key::read(&long).is_ok() && Key::read_for_tpm(&ours.0).is_ok());
    let files = KeyFiles { pcr_key: Some(long), ..KeyFiles::default() };
    let refused = files.read().unwrap_err().to_string();
    assert!(refused.contains("3072 bits") && refused.contains("genrsa -out KEY 2048"), "{refused}");
}

#[test]
fn openssl_verifies_the_updates_of_firmwares_keys() {
    if !Path::new("/usr/bin/openssl").exists() {
        println!("skipped: updates of firmware's keys: openssl is not there");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let signer = |(key, certificate): (PathBuf, PathBuf)| Signer::read(&key, &certificate).unwrap();
    let owner = signer(key(folder.path(), "owner"));
    let programs = signer(key(folder.path(), "programs"));
    let others =
        [key(folder.path(), "cards").1, key(folder.path(), "more").1].map(|path| der(&path));
    let updates = enrolment::updates(&owner, &programs, &others, 1_761_955_200).unwrap();
    let names: Vec<&str> = updates.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(names, ["db", "KEK", "PK"].map(|name| format!("loader/keys/auto/{name}.auth")));
    for ((_, update), variable) in updates.iter().zip(Variable::ALL) {
        let trusted = match variable {
            Variable::Db => vec![programs.certificate(), &others[0], &others[1]],
            Variable::KeyExchange | Variable::Platform => vec![owner.certificate()],
        };
        assert_eq!(secure_boot::certificates(update), Some(trusted));
        let length = 16 + u32::from_le_bytes(update[16..20].try_into().unwrap()) as usize;
        let time: [u8; 16] = update[..16].try_into().unwrap();
        let message = secure_boot::message(variable, &time, &update[length..]);
        fs::write(folder.path().join("message"), message).unwrap();
        // OpenSSL wants the type in front, which firmware does not: lengths are of two bytes here.
        let signature = &update[40..length];
        let inner = [&[0xa0, 0x82][..], &length_of(signature.len()), signature].concat();
        let object = [0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x02];
        let outer = [&[0x30, 0x82][..], &length_of(object.len() + inner.len())].concat();
        fs::write(folder.path().join("signature"), [&outer[..], &object, &inner].concat()).unwrap();
        openssl(
            folder.path(),
            &["smime", "-verify", "-inform", "DER", "-in", "signature", "-content", "message"]
                .into_iter()
                .chain(["-binary", "-noverify", "-out", "/dev/null"])
                .collect::<Vec<_>>(),
        );
    }
}

/// The certificate of a file in PEM, in DER.
fn der(path: &Path) -> Vec<u8> {
    let folder = path.parent().unwrap();
    let file = path.to_str().unwrap();
    openssl(folder, &["x509", "-in", file, "-outform", "DER", "-out", "one.der"]);
    fs::read(folder.join("one.der")).unwrap()
}

#[test]
fn certificates_of_others_are_read_in_both_forms_and_nothing_else_is() {
    if !Path::new("/usr/bin/openssl").exists() {
        println!("skipped: certificates of others: openssl is not there");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (own, certificate) = key(folder.path(), "own");
    let whole = der(&certificate);
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let read = |db_certs: Vec<PathBuf>| {
        let files = KeyFiles {
            secure_boot_key: Some(own.clone()),
            secure_boot_cert: Some(certificate.clone()),
            db_certs,
            ..KeyFiles::default()
        };
        files.read()
    };
    let keys = read(vec![certificate.clone(), file("whole", &whole)]).unwrap();
    assert_eq!(keys.db, [whole.clone(), whole.clone()]);
    for (name, bytes) in
        [("cut", &whole[..whole.len() - 1]), ("two", &whole.repeat(2)), ("no", b"x")]
    {
        let refused = read(vec![file(name, bytes)]).unwrap_err();
        assert!(matches!(&refused, SignerError::NotDbCertificate { .. }), "{name}: {refused}");
    }
    let missing = read(vec![folder.path().join("none")]).unwrap_err();
    assert!(matches!(missing, SignerError::Read { .. }));
}

/// A length of two bytes, as DER has it.
fn length_of(length: usize) -> [u8; 2] {
    u16::try_from(length).unwrap().to_be_bytes()
}
