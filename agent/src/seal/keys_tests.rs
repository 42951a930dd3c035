//! Which secret opens a volume, with files as disks and swtpm as the TPM.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use ed25519_dalek::SigningKey;
use sha2::Digest;
use types::{
    ids::PublicKey,
    volumes::{Bound, Protection, Starts},
};

use super::{
    keys::{NewVolumes, Sealer, escrowed, open_data, open_state, recover, tpm_opens},
    luks::Header,
    recovery::RecoveryKey,
    signature::{Release, SignatureError},
    tpm::{LATCH_PCR, Opener, Tpm, TpmError, Transport},
    tpm_tests::{Emulated, Pair, policy_of, start_release},
    volume::Volume,
};

/// Files with the volumes of a new disk.
struct Disk {
    folder: tempfile::TempDir,
    new: NewVolumes,
}

impl Disk {
    fn install(mut sealer: Sealer) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let new = NewVolumes::invent(&mut sealer, &[operator(1), operator(2)]).expect("made");
        for (name, volume) in [("state", &new.state), ("data", &new.data)] {
            let mut file = File::create(folder.path().join(name)).expect("created");
            file.set_len(17 << 20).expect("grown");
            volume.write(&mut file).expect("written");
        }
        Self { folder, new }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn volume(&self, name: &str) -> Volume {
        Volume::open(&self.path(name)).expect("read").expect("encrypted")
    }

    /// Opens both volumes as a start does; returns how STATE is protected.
    fn start(&self, mut sealer: Sealer) -> Result<Protection, String> {
        let (key, protection) = open_state(&mut self.volume("state"), &mut sealer)?;
        assert_eq!(key, self.new.state.key);
        let data = open_data(&self.volume("data"), &key)?;
        assert_eq!(data, self.new.data.key);
        Ok(protection)
    }
}

fn operator_key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn operator(seed: u8) -> PublicKey {
    PublicKey::from_bytes(operator_key(seed).verifying_key().to_bytes())
}

#[test]
fn an_operator_opens_the_recovery_key_that_was_sealed_to_it() {
    let disk = Disk::install(without_tpm());
    let escrowed = escrowed(&disk.volume("state"));
    assert_eq!(escrowed.iter().map(|e| e.operator).collect::<Vec<_>>(), [1, 2].map(operator));
    let sealed = &escrowed[1].sealed;
    let opened = overlay::escrow::open(&operator_key(2), sealed).expect("opened");
    let text = std::str::from_utf8(&opened).expect("letters");
    let recovery = RecoveryKey::parse(text).expect("a recovery key");
    assert_eq!(recover(&disk.volume("state"), &recovery), Ok(disk.new.state.key.clone()));
    assert!(overlay::escrow::open(&operator_key(3), sealed).is_err());
}

fn without_tpm() -> Sealer {
    let tpm = Err(TpmError::Absent { path: "/dev/tpmrm0".into() });
    Sealer { tpm, release: None, additions: None }
}

fn with(tpm: Tpm, release: Option<&Release>) -> Sealer {
    Sealer { tpm: Ok(tpm), release: release.cloned().map(Ok), additions: None }
}

#[test]
fn without_a_tpm_the_disk_opens_and_says_that_it_is_not_sealed() {
    let disk = Disk::install(without_tpm());
    let protection = disk.start(without_tpm()).expect("opened");
    let Protection::Unsealed { reason } = &protection else { panic!("{protection:?}") };
    assert!(reason.contains("/dev/tpmrm0"), "{reason}");
    assert!(protection.notice(Starts::Signed).starts_with("NOT SEALED"));
}

#[test]
fn a_tpm_that_comes_later_is_used_and_the_key_in_clear_is_destroyed() {
    let Some(mut emulated) = Emulated::start() else { return };
    let disk = Disk::install(without_tpm());
    let sealed = disk.start(with(emulated.tpm(), None)).expect("opened");
    assert_eq!(sealed, Protection::Sealed { bound: Bound::Server });
    // And a release that signs its measurements makes it better still.
    let pair = Pair::make();
    emulated.restart();
    let mut tpm = emulated.tpm();
    let release = pair.release(&[policy_of(&start_release(&mut tpm, 1))]);
    let bound = Protection::Sealed { bound: Bound::Release };
    assert_eq!(disk.start(with(tpm, Some(&release))).expect("opened"), bound);
    emulated.restart();
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    assert_eq!(disk.start(with(tpm, Some(&release))).expect("opened"), bound);
    let locked = disk.start(without_tpm()).expect_err("the TPM is gone");
    assert!(locked.contains("no TPM"), "{locked}");
    // Another release of the same signer that is not what runs, one of another, and none.
    emulated.restart();
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 2);
    let locked = disk.start(with(tpm, Some(&release))).expect_err("altered");
    assert!(locked.contains("not started as it was built"), "{locked}");
    let other = Pair::make().release(&[]);
    let locked = disk.start(with(emulated.tpm(), Some(&other))).expect_err("another signer");
    assert!(locked.contains("signed by"), "{locked}");
    let locked = disk.start(with(emulated.tpm(), None)).expect_err("unsigned");
    assert!(locked.contains("carries no"), "{locked}");
}

#[test]
fn only_the_tpm_that_has_the_key_tells_whose_disk_it_is() {
    let (Some(mut own), Some(other)) = (Emulated::start(), Emulated::start()) else { return };
    let disk = Disk::install(without_tpm());
    let opens = |mut sealer: Sealer| tpm_opens(&disk.volume("state"), &mut sealer);
    // A renter can make this one, and it must not be sealed for that.
    assert!(!opens(with(own.tpm(), None)));
    own.restart();
    disk.start(with(own.tpm(), None)).expect("opened, and sealed");
    own.restart();
    assert!(opens(with(own.tpm(), None)));
    assert!(!opens(with(other.tpm(), None)));
    assert!(!opens(without_tpm()));
}

fn reason(protection: Protection) -> String {
    let Protection::Unsealed { reason } = protection else { panic!("{protection:?}") };
    reason
}

#[test]
fn what_no_start_could_open_is_not_sealed() {
    let Some(mut emulated) = Emulated::start() else { return };
    let release = Pair::make().release(&[[7; 32]]);
    // Firmware that measures nothing, and a release that was started as nobody predicted.
    let disk = Disk::install(with(emulated.tpm(), Some(&release)));
    let unmeasured = reason(disk.new.protection.clone());
    assert!(unmeasured.contains("PCR 11 is zero"), "{unmeasured}");
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    let again = reason(disk.start(with(tpm, Some(&release))).expect("opened"));
    assert!(again.contains("not started as it was built"), "{again}");
    // A key that this TPM does not take, and one that is not understood here.
    emulated.restart();
    let mut tpm = emulated.tpm();
    let long = Pair::of("4096").release(&[policy_of(&start_release(&mut tpm, 1))]);
    let refused = reason(disk.start(with(tpm, Some(&long))).expect("opened"));
    assert!(refused.contains("RSA keys of 2048 bits"), "{refused}");
    let unread =
        || Sealer { release: Some(Err(SignatureError::Key)), ..with(emulated.tpm(), None) };
    let disk = Disk::install(unread());
    let not_read = reason(disk.new.protection.clone());
    assert!(not_read.contains("no PEM of an RSA key"), "{not_read}");
    // A bank that is not the one of policies.
    emulated.keep_sha384_only();
    let disk = Disk::install(with(emulated.tpm(), None));
    let other_bank = reason(disk.new.protection.clone());
    assert!(other_bank.contains("no registers of SHA-256"), "{other_bank}");
    let again = reason(disk.start(with(emulated.tpm(), None)).expect("opened"));
    assert_eq!(again, other_bank);
}

#[test]
fn after_the_start_no_program_gets_the_key_from_the_tpm() {
    let Some(emulated) = Emulated::start() else { return };
    let disk = Disk::install(with(emulated.tpm(), None));
    disk.start(with(emulated.tpm(), None)).expect("opened");
    emulated.tpm().extend(LATCH_PCR, &[1; 32]).expect("extended");
    let locked = disk.start(with(emulated.tpm(), None)).expect_err("too late");
    assert!(locked.contains("PCR 15"), "{locked}");
}

#[test]
fn a_release_with_words_of_somebody_elses_gets_no_key_and_the_recovery_key_still_opens() {
    let Some(mut emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    let release = Pair::make().release(&[policy_of(&start_release(&mut tpm, 1))]);
    let disk = Disk::install(with(tpm, Some(&release)));
    emulated.restart();
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    let additions = Some("started with other words".to_owned());
    let with_words = Sealer { additions, ..with(tpm, Some(&release)) };
    assert_eq!(disk.start(with_words).expect_err("locked"), "started with other words");
    assert!(recover(&disk.volume("state"), &disk.new.recovery).is_ok());
    let bound = Protection::Sealed { bound: Bound::Release };
    assert_eq!(disk.start(with(emulated.tpm(), Some(&release))).expect("opened"), bound);
}

/// What happens to a command on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hiccup {
    /// The TPM does not carry it out: TPM_RC_NV_UNAVAILABLE.
    Busy,
    /// It is carried out, and its answer is lost: what a driver says after its time is over.
    Lost,
}

/// What happens to the next commands with a code, and how many with it the TPM was given.
#[derive(Debug, Default)]
struct Bus {
    unseal: VecDeque<Hiccup>,
    extend: VecDeque<Hiccup>,
    extended: u32,
}

/// A way to an emulated TPM, on which something happens.
struct Flaky {
    stream: UnixStream,
    bus: Arc<Mutex<Bus>>,
    now: Option<Hiccup>,
}

impl Write for Flaky {
    fn write(&mut self, command: &[u8]) -> io::Result<usize> {
        let mut bus = self.bus.lock().expect("one thread");
        self.now = match command[6..10] {
            [0, 0, 1, 0x5e] => bus.unseal.pop_front(),
            [0, 0, 1, 0x82] => bus.extend.pop_front(),
            _ => None,
        };
        if self.now == Some(Hiccup::Busy) {
            return Ok(command.len());
        }
        bus.extended += u32::from(command[6..10] == [0, 0, 1, 0x82]);
        self.stream.write(command)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Flaky {
    fn read(&mut self, answer: &mut [u8]) -> io::Result<usize> {
        const BUSY: [u8; 10] = [0x80, 1, 0, 0, 0, 10, 0, 0, 9, 0x23];
        if self.now == Some(Hiccup::Busy) {
            answer[..BUSY.len()].copy_from_slice(&BUSY);
            return Ok(BUSY.len());
        }
        let count = self.stream.read(answer)?;
        if self.now == Some(Hiccup::Lost) {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::TIME.raw_os_error()));
        }
        Ok(count)
    }
}

impl Transport for Flaky {
    fn ready(&self, _limit: Duration) -> io::Result<bool> {
        Ok(true)
    }
}

/// Opens an emulated TPM by its bus.
struct Way {
    socket: PathBuf,
    bus: Arc<Mutex<Bus>>,
}

impl Opener for Way {
    fn open(&self) -> io::Result<Box<dyn Transport>> {
        let stream = UnixStream::connect(&self.socket)?;
        Ok(Box::new(Flaky { stream, bus: Arc::clone(&self.bus), now: None }))
    }
}

#[test]
fn a_hiccup_of_the_tpm_locks_no_disk_and_leaves_the_key_to_nobody() {
    let Some(mut emulated) = Emulated::start() else { return };
    let disk = Disk::install(with(emulated.tpm(), None));
    emulated.restart();
    drop(emulated.tpm());
    let hiccups = || VecDeque::from([Hiccup::Busy, Hiccup::Lost]);
    let bus = Bus { unseal: hiccups(), extend: hiccups(), extended: 0 };
    let bus = Arc::new(Mutex::new(bus));
    let way = || Box::new(Way { socket: emulated.socket(), bus: Arc::clone(&bus) });
    let mut sealer = with(Tpm::behind(way()).expect("opened"), None);
    let opened = open_state(&mut disk.volume("state"), &mut sealer);
    let (key, protection) = opened.expect("opened in spite of it");
    assert_eq!((key, protection), (disk.new.state.key.clone(), disk.new.protection.clone()));
    let tpm = sealer.tpm.as_mut().expect("there");
    tpm.latch(&[1; 32]).expect("extended");
    let once = sha2::Sha256::digest([[0; 32], [1; 32]].concat());
    assert_eq!(tpm.register(LATCH_PCR).expect("read"), once.as_slice());
    drop(sealer);
    let bus = bus.lock().expect("one thread");
    assert_eq!((bus.extended, bus.unseal.len(), bus.extend.len()), (1, 0, 0));
}

#[test]
fn the_recovery_key_opens_both_volumes_and_another_does_not() {
    let disk = Disk::install(without_tpm());
    let recovery = RecoveryKey::parse(disk.new.recovery.as_str()).expect("as it was shown");
    assert_eq!(recover(&disk.volume("state"), &recovery), Ok(disk.new.state.key.clone()));
    assert_eq!(recover(&disk.volume("data"), &recovery), Ok(disk.new.data.key.clone()));
    let other = RecoveryKey::generate().expect("made");
    let refused = recover(&disk.volume("state"), &other).expect_err("another key");
    assert!(refused.contains("does not open"), "{refused}");
}

/// Bits of a volume's header and of the keys behind it. Where they are is decided by their number: the
/// golden ratio spreads them.
#[test]
fn an_altered_bit_of_a_header_is_mended_and_no_bit_opens_a_volume_with_another_key() {
    const BITS: u64 = 96;
    let headers = Header::bytes() as u64;
    let disk = Disk::install(without_tpm());
    let (mut told, mut opened) = (0, 0);
    for name in ["state", "data"] {
        let mut whole = std::fs::read(disk.path(name)).expect("read");
        // Slots' keys end there.
        let end = whole.iter().rposition(|byte| *byte != 0).expect("a header") + 1;
        whole.truncate(end);
        let file = File::options().write(true).open(disk.path(name)).expect("opened");
        for number in 1..=BITS {
            let within = if number % 2 == 0 { headers } else { end as u64 } * 8;
            let place = u128::from(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let bit = u64::try_from((place * u128::from(within)) >> 64).expect("below a bound");
            let at = usize::try_from(bit / 8).expect("small");
            let altered = whole[at] ^ (1 << (bit % 8));
            file.write_all_at(&[altered], bit / 8).expect("written");
            // A start checks the keys.
            match disk.start(without_tpm()) {
                Ok(_) => opened += 1,
                Err(reason) => {
                    assert!(bit / 8 >= headers && !reason.is_empty(), "{name}, {bit}: {reason}");
                    told += 1;
                }
            }
            // Behind the checksum there is room that nothing uses.
            let unused = (480..512).contains(&(at % (Header::bytes() / 2)));
            let volume = disk.volume(name);
            let damage = volume.mend().expect("written");
            assert_eq!(damage.is_some(), bit / 8 < headers && !unused, "{name}, {bit}: {damage:?}");
            assert_eq!(disk.volume(name).mend().expect("nothing to do"), None, "{name}, {bit}");
            file.write_all_at(&whole, 0).expect("written");
        }
    }
    assert!(opened >= BITS && told > 0, "{opened} opened, {told} told");
}

#[test]
fn a_volume_that_is_not_encrypted_is_told_from_a_damaged_one() {
    let disk = Disk::install(without_tpm());
    let path = disk.path("plain");
    std::fs::write(&path, vec![0; 1 << 20]).expect("written");
    assert!(Volume::open(&path).expect("read").is_none());
    let mut bytes = std::fs::read(disk.path("state")).expect("read");
    for at in [5000, 16384 + 5000] {
        bytes[at] ^= 1;
    }
    std::fs::write(&path, bytes).expect("written");
    let damaged = Volume::open(&path).expect_err("damaged").to_string();
    assert!(damaged.contains("checksum"), "{damaged}");
}
