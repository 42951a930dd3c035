//! Certificates of endorsement keys, made by `openssl` as a maker of TPMs would, for the key of the TPM in the
//! recorded evidence, and what is wrong with others.

use std::{fs, process::Command};

use super::{
    tests::{asked, known, nonce, recorded},
    *,
};

/// What `openssl` writes into certificates.
const KINDS: &str = "
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign
[other_authority]
basicConstraints = critical, CA:true
extendedKeyUsage = serverAuth
[tpm]
basicConstraints = critical, CA:false
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
[is_authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
[no_purpose]
keyUsage = critical, keyAgreement
subjectAltName = critical, dirName:tpm_name
[other_purpose]
keyUsage = critical, keyAgreement
extendedKeyUsage = serverAuth
subjectAltName = critical, dirName:tpm_name
[no_usage]
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
[signs]
keyUsage = critical, digitalSignature
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
[no_name]
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
[host_name]
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
subjectAltName = DNS:tpm.example
[strange]
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
1.2.3.4 = critical, DER:0500
[tpm_name]
# What is before the first dot only keeps the lines apart.
1.2.23.133.2.1 = id:54455354
2.2.23.133.2.2 = Model 5
3.2.23.133.2.3 = id:00010002
";
const DAY: u64 = 24 * 3600;

/// A maker's folder with authorities and certificates.
struct Maker(tempfile::TempDir);

impl Maker {
    /// A maker with a root of its own, which counts for 7,300 days.
    fn new() -> Self {
        let maker = Self(tempfile::tempdir().expect("a folder"));
        fs::write(maker.0.path().join("kinds"), KINDS).expect("written");
        maker.key("root");
        maker.root("root", 7300);
        maker
    }

    /// A certificate of the root's key and name for as many days.
    fn root(&self, name: &str, days: u32) {
        self.run(&format!(
            "req -new -x509 -key root.key -subj /O=Maker/CN=Root -config kinds \
             -extensions authority -days {days} -out {name}.pem"
        ));
    }

    fn run(&self, arguments: &str) {
        let mut command = Command::new("openssl");
        command.args(arguments.split(' ')).current_dir(self.0.path());
        let ran = command.output().expect("openssl");
        assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    }

    fn key(&self, name: &str) {
        self.run(&format!(
            "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out {name}.key"
        ));
        self.run(&format!("pkey -in {name}.key -pubout -out {name}.pub"));
    }

    /// An authority called `name` below another, which counts for 1,000 days.
    fn authority(&self, (name, kind): (&str, &str), below: &str) {
        self.key(name);
        self.run(&format!(
            "x509 -new -force_pubkey {name}.pub -subj /CN={name} -CA {below}.pem \
             -CAkey {below}.key -set_serial 7 -days 1000 -extfile kinds -extensions {kind} \
             -out {name}.pem"
        ));
    }

    /// A certificate of that kind for a public key (DER), by one of the authorities; it counts for 3,650 days.
    fn certificate(&self, kind: &str, public: &[u8], by: &str) -> Vec<u8> {
        fs::write(self.0.path().join("tpm.der"), public).expect("written");
        self.run("pkey -pubin -inform DER -in tpm.der -out tpm.pub");
        self.run(&format!(
            "x509 -new -force_pubkey tpm.pub -subj / -CA {by}.pem -CAkey {by}.key -set_serial 9 \
             -days 3650 -extfile kinds -extensions {kind} -outform DER -out certificate"
        ));
        fs::read(self.0.path().join("certificate")).expect("made")
    }

    /// The same for the TPM of the recorded evidence, by the root.
    fn certificate_of_tpm(&self, kind: &str) -> Vec<u8> {
        self.certificate(kind, &tpm_key(), "root")
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.path().join(name)).expect("made")
    }

    fn der(&self, name: &str) -> Vec<u8> {
        self.run(&format!("x509 -in {name}.pem -outform DER -out {name}.der"));
        self.read(&format!("{name}.der"))
    }

    fn authorities(&self, name: &str) -> Vec<Authority> {
        Authority::read(&self.read(&format!("{name}.pem"))).expect("an authority")
    }
}

/// The recorded TPM's endorsement key as certificates have it.
fn tpm_key() -> Vec<u8> {
    let point = endorsement(&recorded().endorsement_key).expect("a key").point();
    let head = "3059301306072a8648ce3d020106082a8648ce3d030107034200";
    [&hex::decode::<26>(head).expect("digits")[..], &point].concat()
}

fn now() -> UnixSeconds {
    let second = jiff::Timestamp::now().as_second();
    UnixSeconds(second.try_into().expect("a time after 1970"))
}

/// Judges the recorded evidence with these certificates at a time.
fn judged(
    (own, chain): (Vec<u8>, Vec<u8>),
    authorities: Vec<Authority>,
    at: UnixSeconds,
) -> Result<Attested, AttestationError> {
    let evidence =
        Evidence { endorsement_certificate: own, endorsement_chain: chain, ..recorded() };
    let nonce = nonce();
    verify(&evidence, Asked { at, ..asked(&nonce) }, &Known { authorities, ..known() })
}

/// Why a certificate is refused.
fn refusal(own: Vec<u8>, authorities: Vec<Authority>, at: UnixSeconds) -> String {
    let refused = judged((own, Vec::new()), authorities, at).expect_err("refused");
    assert!(matches!(refused, AttestationError::Tpm { .. }), "{refused}");
    refused.to_string()
}

fn by(authority: &str) -> Option<TpmCertificate> {
    let tpm = "TEST Model 5 id:00010002".to_owned();
    Some(TpmCertificate::Checked { authority: authority.to_owned(), tpm })
}

#[test]
fn a_maker_vouches_for_its_tpm() {
    let maker = Maker::new();
    let own = maker.certificate_of_tpm("tpm");
    let authorities = maker.authorities("root");
    let attested = judged((own.clone(), Vec::new()), authorities.clone(), now()).expect("proved");
    assert_eq!(attested.certificate, by("CN=Root,O=Maker"));
    // Its place in the TPM is longer than it, and some makers fill it up with ones.
    let filled = |byte: u8| {
        judged(([&own[..], &[byte; 700]].concat(), Vec::new()), authorities.clone(), now())
    };
    assert_eq!(filled(0).expect("proved").certificate, attested.certificate);
    assert_eq!(filled(0xff).expect("proved").certificate, attested.certificate);
    // The authority's file as makers publish it.
    let binary = Authority::read(&maker.der("root")).expect("an authority");
    assert_eq!(binary, authorities);
}

#[test]
fn authorities_between_come_from_the_tpm_or_from_a_file() {
    let maker = Maker::new();
    maker.authority(("line", "authority"), "root");
    let own = maker.certificate("tpm", &tpm_key(), "line");
    let root = maker.authorities("root");
    let from_tpm = judged((own.clone(), maker.der("line")), root.clone(), now());
    assert_eq!(from_tpm.expect("proved").certificate, by("CN=Root,O=Maker"));
    let both = [maker.read("root.pem"), maker.read("line.pem")].concat();
    let both = Authority::read(&both).expect("authorities");
    let from_file = judged((own.clone(), Vec::new()), both.clone(), now());
    assert_eq!(from_file.expect("proved").certificate, by("CN=line"));
    let missing = refusal(own.clone(), root, now());
    assert!(missing.contains("its issuer, CN=line, is none of the authorities"), "{missing}");
    // One that ended between vouches for nothing, although the root counts on.
    let later = now().plus(1000 * DAY + 1);
    assert!(refusal(own, both, later).contains("ended at "));
    // Nor does one that is for something else.
    maker.authority(("web", "other_authority"), "root");
    let own = maker.certificate("tpm", &tpm_key(), "web");
    let refused = judged((own, maker.der("web")), maker.authorities("root"), now());
    let refused = refused.expect_err("refused").to_string();
    assert!(refused.contains("for other things than TPMs"), "{refused}");
}

#[test]
fn nobody_else_vouches_for_it() {
    let (maker, other) = (Maker::new(), Maker::new());
    let own = maker.certificate_of_tpm("tpm");
    // Another maker calls itself the same.
    let forged = refusal(own.clone(), other.authorities("root"), now());
    assert!(forged.contains("is not signed by whom it names"), "{forged}");
    other.authority(("stranger", "authority"), "root");
    let unknown = refusal(own.clone(), other.authorities("stranger"), now());
    assert!(unknown.contains("its issuer, CN=Root,O=Maker, is none of"), "{unknown}");
    let mut altered = own.clone();
    *altered.last_mut().expect("bytes") ^= 1;
    assert!(judged((altered, Vec::new()), maker.authorities("root"), now()).is_err());
    // A name in it, as long as before.
    let place = own.windows(5).position(|five| five == b"Model").expect("the model");
    let mut altered = own;
    altered[place] = b'N';
    let refused = refusal(altered, maker.authorities("root"), now());
    assert!(refused.contains("is not signed by whom it names"), "{refused}");
}

#[test]
fn certificates_count_for_their_time() {
    let maker = Maker::new();
    maker.root("short", 1);
    let own = maker.certificate_of_tpm("tpm");
    let at = |authority, at| refusal(own.clone(), maker.authorities(authority), at);
    let ended = at("root", now().plus(3650 * DAY + 1));
    assert!(ended.contains("ended at 20"), "{ended}");
    let early = at("root", UnixSeconds(now().0 - DAY));
    assert!(early.contains("counts from 20"), "{early}");
    // An authority's own time counts, too, although it was named.
    let late = at("short", now().plus(2 * DAY));
    assert!(late.contains("CN=Root,O=Maker counts from 20"), "{late}");
    assert!(late.contains("and now is 20"), "{late}");
}

#[test]
fn a_certificate_is_for_the_key_that_the_tpm_uses() {
    let maker = Maker::new();
    maker.key("other");
    maker.run("pkey -pubin -in other.pub -outform DER -out other.der");
    let own = maker.certificate("tpm", &maker.read("other.der"), "root");
    let refused = refusal(own, maker.authorities("root"), now());
    assert!(refused.contains("for another key than the endorsement key"), "{refused}");
    maker.run("genrsa -out rsa.key 2048");
    maker.run("rsa -in rsa.key -pubout -outform DER -out rsa.der");
    let own = maker.certificate("tpm", &maker.read("rsa.der"), "root");
    let refused = refusal(own, maker.authorities("root"), now());
    assert!(refused.contains("for another key than the endorsement key"), "{refused}");
}

#[test]
fn what_is_no_certificate_of_an_endorsement_key_is_refused() {
    let maker = Maker::new();
    let check = |kind: &str, reason: &str| {
        let found = refusal(maker.certificate_of_tpm(kind), maker.authorities("root"), now());
        assert!(found.contains(reason), "{kind}: {found}");
    };
    check("is_authority", "it is an authority's certificate and no TPM's");
    check("no_purpose", "extendedKeyUsage does not hold 2.23.133.8.1");
    check("other_purpose", "extendedKeyUsage does not hold 2.23.133.8.1");
    check("no_usage", "keyUsage holds neither");
    check("signs", "keyUsage holds neither");
    check("no_name", "it names no TPM");
    check("host_name", "it names no TPM");
    check("strange", "a critical extension that is not known here");
    // A TPM's certificate vouches for nobody, and neither does one of somebody who is no authority.
    let own = maker.certificate_of_tpm("tpm");
    let read = Authority::read(&own).expect_err("no authority");
    assert!(read.contains("is no authority"), "{read}");
}

#[test]
fn what_is_no_certificate_is_refused() {
    let maker = Maker::new();
    let authorities = maker.authorities("root");
    let check = |own: Vec<u8>, reason: &str| {
        let found = refusal(own, authorities.clone(), now());
        assert!(found.contains(reason), "{found}");
    };
    let own = maker.certificate_of_tpm("tpm");
    check(Vec::new(), "the node sent no maker's certificate");
    check(vec![0xff; 600], "is no certificate");
    check(own[..own.len() - 1].to_vec(), "is no certificate");
    check(vec![0x30; MAX_CERTIFICATE + 1], "longer than 8192 bytes");
    let mut inside = own.clone();
    inside[4] ^= 0x10;
    check(inside, "it cannot be used");
    let long = judged((own, vec![0; MAX_CHAIN + 1]), authorities, now()).expect_err("too long");
    assert!(long.to_string().contains("longer than 32768 bytes"), "{long}");
}

#[test]
fn files_of_authorities_say_what_is_wrong_with_them() {
    let maker = Maker::new();
    let read = |bytes: &[u8]| Authority::read(bytes).expect_err("no authorities");
    assert!(read(b"").contains("holds no certificate"));
    assert!(read(b"0 apples").contains("holds no certificate"));
    assert!(read(&[0x30, 0x82, 1, 0, 5]).contains("no X.509 certificate"));
    assert!(read(&vec![b' '; MAX_AUTHORITIES + 1]).contains("longer than"));
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let second = [maker.read("root.pem"), broken.into()].concat();
    assert!(read(&second).contains("certificate 2: it is no X.509 certificate"));
    let cut = b"-----BEGIN CERTIFICATE-----\nAAAA\n";
    assert!(read(cut).contains("certificate 1: it is no PEM"));
}

#[test]
fn a_tpm_counts_that_is_named_or_vouched_for() {
    let maker = Maker::new();
    let attested =
        judged((maker.certificate_of_tpm("tpm"), Vec::new()), maker.authorities("root"), now());
    let tpm = attested.expect("proved").tpm;
    let evidence = recorded();
    let nonce = nonce();
    let judge = |tpms: &[&str], authorities: Vec<Authority>| {
        let tpms = tpms.iter().map(|tpm| (*tpm).to_owned()).collect();
        let known = Known { tpms, authorities, ..known() };
        verify(&evidence, Asked { at: now(), ..asked(&nonce) }, &known)
    };
    let named = judge(&["00", &tpm], maker.authorities("root")).expect("named");
    assert_eq!(named.certificate, Some(TpmCertificate::Missing));
    let neither = judge(&["00"], maker.authorities("root")).expect_err("unknown").to_string();
    assert!(neither.contains("sent no maker's certificate"), "{neither}");
    let unnamed = judge(&["00"], Vec::new()).expect_err("unknown").to_string();
    assert!(unnamed.contains("none of those that were named"), "{unnamed}");
    assert_eq!(judge(&[], Vec::new()).expect("any").certificate, None);
}
