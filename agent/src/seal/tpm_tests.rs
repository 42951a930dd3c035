//! Sealing and unsealing against swtpm, Debian's software TPM, over its socket.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{
    signature::{self, Release},
    tpm::{Binding, LATCH_PCR, RELEASE_PCR, Sealed, Tpm, TpmError, register_policy},
};

/// A TPM that lives as long as the test.
pub(crate) struct Emulated {
    process: Child,
    folder: tempfile::TempDir,
}

impl Emulated {
    /// Starts one; `None` where swtpm is not installed.
    pub(crate) fn start() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        Some(Self { process: spawn(folder.path())?, folder })
    }

    /// Switches it off and on: registers are zero again, what it sealed stays.
    pub(crate) fn restart(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.process = spawn(self.folder.path()).expect("it could be started before");
    }

    pub(crate) fn tpm(&self) -> Tpm {
        Tpm::over(Box::new(self.connect()))
    }

    /// Leaves SHA-384's registers as the only ones, as some firmware does, and restarts.
    /// Source: TPM 2.0 Library, Part 3, "TPM2_PCR_Allocate".
    pub(crate) fn keep_sha384_only(&mut self) {
        const PLATFORM: [u8; 4] = 0x4000_000c_u32.to_be_bytes();
        // An empty password: its handle, no nonce, attributes, nothing.
        const PASSWORD: [u8; 9] = [0x40, 0, 0, 9, 0, 0, 1, 0, 0];
        // SHA-1, SHA-256, SHA-384, SHA-512, each with three bytes of registers.
        let banks = [(0x04, 0), (0x0b, 0), (0x0c, 0xff), (0x0d, 0)];
        let banks = banks.map(|(bank, all)| [0, bank, 3, all, all, all]).concat();
        let body = [&PLATFORM[..], &[0, 0, 0, 9], &PASSWORD, &[0, 0, 0, 4], &banks].concat();
        let size = u32::try_from(10 + body.len()).expect("short").to_be_bytes();
        let head = [&[0x80, 0x02][..], &size, &0x12b_u32.to_be_bytes()].concat();
        let mut stream = self.connect();
        stream.write_all(&[head, body].concat()).expect("written");
        let mut answer = [0; 64];
        let count = stream.read(&mut answer).expect("answered");
        assert_eq!(answer[6..10], [0; 4], "refused: {:x?}", &answer[..count]);
        drop(stream);
        self.restart();
    }

    /// Where it listens. It serves one at a time.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("tpm.sock")
    }

    fn connect(&self) -> UnixStream {
        let path = self.socket();
        let begin = Instant::now();
        loop {
            match UnixStream::connect(&path) {
                Ok(stream) => return stream,
                Err(error) if begin.elapsed() > Duration::from_secs(20) => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(folder: &Path) -> Option<Child> {
    let socket = |name: &str| format!("type=unixio,path={}", folder.join(name).display());
    let _ = fs::remove_file(folder.join("tpm.sock"));
    let child = Command::new("swtpm")
        .args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear"])
        .args(["--tpmstate", &format!("dir={}", folder.display())])
        .args(["--server", &socket("tpm.sock"), "--ctrl", &socket("ctrl.sock")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    if child.is_err() {
        println!("skipped: sealing to a TPM: swtpm is not installed");
    }
    child.ok()
}

/// A key pair as `openssl` makes it.
pub(super) struct Pair(tempfile::TempDir);

impl Pair {
    pub(super) fn make() -> Self {
        Self::of("2048")
    }

    /// Makes one with a modulus of so many bits.
    pub(super) fn of(bits: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let run = |arguments: &[&str]| {
            let ran = Command::new("openssl").args(arguments).current_dir(folder.path()).output();
            assert!(ran.expect("openssl").status.success(), "{arguments:?}");
        };
        run(&["genrsa", "-out", "key.pem", bits]);
        run(&["rsa", "-in", "key.pem", "-pubout", "-out", "public.pem"]);
        Self(folder)
    }

    /// What a release says whose policies are these.
    pub(super) fn release(&self, policies: &[[u8; 32]]) -> Release {
        let path = |name: &str| self.0.path().join(name);
        let key = fs::read(path("public.pem")).expect("read");
        let fingerprint = signature::parse(&key, b"{}").expect("a key").fingerprint;
        let entry = |policy: &[u8; 32]| {
            fs::write(path("policy"), policy).expect("written");
            let signed = Command::new("openssl")
                .args(["dgst", "-sha256", "-sign", "key.pem", "policy"])
                .current_dir(self.0.path())
                .output()
                .expect("openssl");
            let (pol, sig) = (types::hex::encode(policy), STANDARD.encode(signed.stdout));
            serde_json::json!({"pcrs": [11], "pkfp": fingerprint, "pol": pol, "sig": sig})
        };
        let entries: Vec<_> = policies.iter().map(entry).collect();
        let document = serde_json::json!({"sha256": entries}).to_string();
        signature::parse(&key, document.as_bytes()).expect("understood")
    }
}

/// Starts the emulated server with a release: PCR 11 gets its measurement.
pub(super) fn start_release(tpm: &mut Tpm, release: u8) -> [u8; 32] {
    tpm.extend(RELEASE_PCR, &[release; 32]).expect("extended");
    tpm.register(RELEASE_PCR).expect("read")
}

pub(super) fn policy_of(register: &[u8; 32]) -> [u8; 32] {
    register_policy([0; 32], RELEASE_PCR, register)
}

fn open(tpm: &mut Tpm, sealed: &Sealed, release: &Release) -> Result<Vec<u8>, TpmError> {
    let result = tpm.unseal(sealed, Some((&release.signer, &release.policies)));
    result.map(|secret| secret.to_vec())
}

#[test]
fn a_later_release_of_the_same_signer_opens_what_an_earlier_one_sealed() {
    let Some(mut emulated) = Emulated::start() else { return };
    let pair = Pair::make();
    let mut tpm = emulated.tpm();
    let first = pair.release(&[policy_of(&start_release(&mut tpm, 1))]);
    let sealed = tpm.seal(b"secret", Binding::Release(&first.signer)).expect("sealed");
    assert_eq!(open(&mut tpm, &sealed, &first).expect("unsealed"), b"secret");
    drop(tpm);
    emulated.restart();
    let mut tpm = emulated.tpm();
    let measured = start_release(&mut tpm, 2);
    let second = pair.release(&[[9; 32], policy_of(&measured)]);
    assert_eq!(open(&mut tpm, &sealed, &second).expect("unsealed"), b"secret");
    let refused = open(&mut tpm, &sealed, &first).expect_err("not what runs");
    assert!(matches!(refused, TpmError::Unsigned { .. }), "{refused}");
    // Somebody else's signature of the very same state.
    let other = Pair::make().release(&[policy_of(&measured)]);
    let refused = open(&mut tpm, &sealed, &other).expect_err("another signer");
    assert!(refused.to_string().contains("policy failed"), "{refused}");
    // The right signer's name under another's signature.
    let forged = Release { signer: second.signer.clone(), ..other };
    let refused = open(&mut tpm, &sealed, &forged).expect_err("a forged signature");
    assert!(matches!(refused, TpmError::Refused { command: 0x177, .. }), "{refused}");
}

#[test]
fn once_the_volumes_are_open_the_secret_is_out_of_reach() {
    let Some(mut emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    let sealed = tpm.seal(b"secret", Binding::Nothing).expect("sealed");
    assert_eq!(tpm.unseal(&sealed, None).expect("unsealed").as_slice(), b"secret");
    tpm.extend(LATCH_PCR, &[3; 32]).expect("extended");
    assert!(matches!(tpm.unseal(&sealed, None), Err(TpmError::Latched)));
    drop(tpm);
    emulated.restart();
    let mut tpm = emulated.tpm();
    assert_eq!(tpm.unseal(&sealed, None).expect("unsealed").as_slice(), b"secret");
}

#[test]
fn another_tpm_opens_nothing() {
    let (Some(one), Some(other)) = (Emulated::start(), Emulated::start()) else { return };
    let sealed = one.tpm().seal(b"secret", Binding::Nothing).expect("sealed");
    let refused = other.tpm().unseal(&sealed, None).expect_err("another TPM");
    assert!(refused.to_string().contains("another TPM"), "{refused}");
    let mut altered = sealed.clone();
    altered.private[20] ^= 1;
    assert!(one.tpm().unseal(&altered, None).is_err());
}

#[test]
fn nothing_is_left_behind_in_the_tpm() {
    let Some(emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    let sealed = tpm.seal(b"secret", Binding::Nothing).expect("sealed");
    // It has room for three objects and as many sessions.
    let all: Result<Vec<_>, _> = (0..6).map(|_| tpm.unseal(&sealed, None)).collect();
    assert_eq!(all.expect("unsealed").len(), 6);
}
