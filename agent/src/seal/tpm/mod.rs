//! The TPM 2.0: sealing a secret so that only this server's TPM gives it back, and only while the
//! registers are as they should be.
//!
//! Who reads it needs a release whose PCR 11 policy is signed with the key that the release carries
//! (PolicyAuthorize), and PCR 15 must still be zero, which it is only until the volumes are open. So
//! an update needs no new seal, and nothing that runs later gets the secret again.
//! Sources: TPM 2.0 Library, Parts 2 and 3; TCG EK Credential Profile for the storage key's template.

mod certificate;
mod nv;
mod patience;
mod quote;
mod session;
pub mod wire;

pub use certificate::{CERTIFICATE, Certificates};
pub use nv::INDEX;
pub use quote::{Question, Quoted};

use std::{
    io::{self, Read, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use self::{
    session::{DECRYPT, ENCRYPT, Kind, Protected, Session, StorageKey},
    wire::{NULL, Reader, SHA256, Writer},
};

/// The kernel's TPM with its resource manager.
pub const DEVICE: &str = "dev/tpmrm0";
/// Longest time for one command: making a key takes slow ones seconds.
const LIMIT: Duration = Duration::from_secs(30);
/// Longest answer, in bytes.
const MAX_ANSWER: usize = 4096;

const NULL_HANDLE: u32 = 0x4000_0007;
const OWNER: u32 = 0x4000_0001;
const PASSWORD: u32 = 0x4000_0009;
const AES: u16 = 0x0006;
const CFB: u16 = 0x0043;
const NO_SESSIONS: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;

const CREATE_PRIMARY: u32 = 0x131;
const CREATE: u32 = 0x153;
const LOAD: u32 = 0x157;
const UNSEAL: u32 = 0x15e;
const FLUSH: u32 = 0x165;
const LOAD_EXTERNAL: u32 = 0x167;
const POLICY_AUTHORIZE: u32 = 0x16a;
const VERIFY: u32 = 0x177;
const PCR_READ: u32 = 0x17e;
const POLICY_PCR: u32 = 0x17f;
const PCR_EXTEND: u32 = 0x182;

/// PCR that systemd-stub measures the release into.
pub const RELEASE_PCR: u8 = 11;
/// PCR that is extended once the volumes are open.
pub const LATCH_PCR: u8 = 15;

/// Why the TPM did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum TpmError {
    #[error("the server has no TPM 2.0 that the kernel drives ({path} is not there)")]
    Absent { path: String },
    #[error("cannot talk to the TPM")]
    Io { source: io::Error },
    #[error("the TPM did not answer within {} seconds", LIMIT.as_secs())]
    Late,
    #[error("the TPM's answer ends too early")]
    Short,
    #[error("the TPM's answer was altered on its way")]
    Forged,
    #[error("the TPM cannot be used: {what}")]
    Strange { what: &'static str },
    #[error("the TPM refused command {command:#05x}: {}", meaning(*code))]
    Refused { command: u32, code: u32 },
    #[error(
        "this release's signatures name no policy for PCR 11 as it is, {found}; it was not started as it was built"
    )]
    Unsigned { found: String },
    #[error(
        "PCR 11 is zero: the firmware told the TPM nothing of what it started; switch the TPM on for the firmware itself, too, in its setup (measured boot, TCG2)"
    )]
    Unmeasured,
    #[error("PCR 15 is not zero: the volumes were open already since the server was switched on")]
    Latched,
}

/// Returns what a response code means, for those that a provider meets. Source: TPM 2.0 Library, Part 2 §6.6.3.
fn meaning(code: u32) -> String {
    // Format one codes name a parameter, handle or session in other bits (Part 2 §6.6.2).
    let base = if code & 0x80 != 0 { code & 0xbf } else { code };
    let text = match base {
        0x084 => {
            "the TPM does not take a value, as the length of a key: all take RSA keys of 2048 bits, and many no longer ones"
        }
        0x085 => "the TPM's owner hierarchy is off; switch it on in the firmware's setup",
        0x09b => "the signature of the release's policy is not the key's",
        0x09d => "the server was not started as it was when the disk was sealed (policy failed)",
        0x09f => "the secret was sealed by another TPM, or this one was cleared since",
        0x08e | 0x0a2 => "the TPM's owner has set a password",
        0x0a1 => "the TPM knows no such attributes, it may be older than its specification",
        0x100 => {
            "the firmware did not start the TPM; update the firmware, or switch the TPM on in its setup"
        }
        0x101 => {
            "the TPM failed its self-test; switch the server off and on, and replace the TPM if that stays"
        }
        0x128 => "a register changed meanwhile",
        0x12d => "the TPM waits for the rest of an update of its own; finish that",
        0x14b => "the TPM has no room left for what lasts",
        0x920 => "the TPM takes no more writes for now, to last longer",
        0x921 => "too many failures, the TPM is locked for now",
        _ => return format!("code {code:#05x}"),
    };
    format!("{text} (code {code:#05x})")
}

/// Something that a TPM is behind.
pub trait Transport: Read + Write + Send {
    /// Waits until an answer can be read; `false` when there is none in time.
    fn ready(&self, limit: Duration) -> io::Result<bool>;
}

impl<T: Read + Write + Send + std::os::fd::AsFd> Transport for T {
    fn ready(&self, limit: Duration) -> io::Result<bool> {
        let mut watched = [PollFd::new(self, PollFlags::IN)];
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: 0 };
        Ok(poll(&mut watched, Some(&limit))? > 0)
    }
}

/// Opens what a TPM is behind, once more each time it is asked to.
pub trait Opener: Send {
    /// Opens it.
    fn open(&self) -> io::Result<Box<dyn Transport>>;
}

/// A device, by its path.
struct Device(PathBuf);

impl Opener for Device {
    fn open(&self) -> io::Result<Box<dyn Transport>> {
        Ok(Box::new(std::fs::File::options().read(true).write(true).open(&self.0)?))
    }
}

/// A TPM.
pub struct Tpm {
    transport: Box<dyn Transport>,
    /// How it is opened again.
    opener: Option<Box<dyn Opener>>,
    opened: Instant,
}

/// A secret that a TPM has sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// What may be seen of it (TPM2B_PUBLIC without its length).
    pub public: Vec<u8>,
    /// What only this TPM reads (TPM2B_PRIVATE without its length).
    pub private: Vec<u8>,
}

/// The key whose signatures on PCR 11's policies count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    /// The RSA modulus, big-endian; the exponent is 65537.
    pub modulus: Vec<u8>,
}

/// A signed policy of PCR 11.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedPolicy {
    /// The policy's digest.
    pub policy: [u8; 32],
    /// PKCS#1 v1.5 signature of it with SHA-256.
    pub signature: Vec<u8>,
}

/// What a secret is bound to, beside the TPM itself and PCR 15.
#[derive(Debug, Clone, Copy)]
pub enum Binding<'a> {
    /// Releases that this key signed.
    Release(&'a Signer),
    /// Nothing.
    Nothing,
}

impl Tpm {
    /// Opens the server's TPM below `root`.
    pub fn open(root: &std::path::Path) -> Result<Self, TpmError> {
        let path = root.join(DEVICE);
        match Self::behind(Box::new(Device(path.clone()))) {
            Err(TpmError::Io { source }) if source.kind() == io::ErrorKind::NotFound => {
                Err(TpmError::Absent { path: path.display().to_string() })
            }
            opened => opened,
        }
    }

    /// Opens a TPM that can be opened again, as a hiccup of its bus asks for.
    pub fn behind(opener: Box<dyn Opener>) -> Result<Self, TpmError> {
        let transport = opener.open().map_err(|source| TpmError::Io { source })?;
        Ok(Self { opener: Some(opener), ..Self::over(transport) })
    }

    /// Talks to a TPM over something else, which cannot be opened again.
    pub fn over(transport: Box<dyn Transport>) -> Self {
        Self { transport, opener: None, opened: Instant::now() }
    }

    /// Reads a register of SHA-256's bank.
    pub fn register(&mut self, register: u8) -> Result<[u8; 32], TpmError> {
        let answer = self.plain(PCR_READ, Writer::default().register(register).0)?;
        let mut reader = Reader(&answer);
        let (_updates, banks) = (reader.u32()?, reader.u32()?);
        for _ in 0..banks {
            let (_bank, length) = (reader.u16()?, reader.u8()?);
            reader.take(usize::from(length))?;
        }
        if reader.u32()? != 1 {
            let what =
                "it keeps no registers of SHA-256; activate that bank in the firmware's setup";
            return Err(TpmError::Strange { what });
        }
        reader.sized()?.try_into().map_err(|_| TpmError::Short)
    }

    /// Extends a register.
    pub fn extend(&mut self, register: u8, digest: &[u8; 32]) -> Result<(), TpmError> {
        let parameters = Writer::default().u32(1).u16(SHA256).raw(digest);
        self.authorized(PCR_EXTEND, register.into(), &password(), &parameters.0).map(drop)
    }

    /// Checks that a start like the running one, by a release with these `policies`, opens what is sealed with
    /// this binding: a seal that nothing opens would lock the disk. PCR 15 may be extended already.
    /// Errors: registers cannot be read, no policy is that of PCR 11, or the TPM does not take the signer's key
    /// (all need take 2048 bits only) or the signature.
    pub fn could_open(
        &mut self,
        binding: Binding<'_>,
        policies: &[SignedPolicy],
    ) -> Result<(), TpmError> {
        self.register(LATCH_PCR)?;
        match binding {
            Binding::Nothing => Ok(()),
            Binding::Release(signer) => {
                let signed = self.signed_policy(policies)?;
                self.ticket(signer, signed).map(drop)
            }
        }
    }

    /// Seals a secret of at most 128 bytes.
    pub fn seal(&mut self, secret: &[u8], binding: Binding<'_>) -> Result<Sealed, TpmError> {
        let parent = self.storage_key()?;
        let result = self.seal_below(&parent, secret, binding);
        self.flush(parent.handle);
        result
    }

    fn seal_below(
        &mut self,
        parent: &StorageKey,
        secret: &[u8],
        binding: Binding<'_>,
    ) -> Result<Sealed, TpmError> {
        let policy = policy(binding);
        // Fixed to this TPM and parent; no protection against guessing, which nobody can do.
        let public = Writer::default()
            .u16(0x0008)
            .u16(SHA256)
            .u32(0x0000_0412)
            .sized(&policy)
            .u16(NULL)
            .sized(&[]);
        let sensitive = Zeroizing::new(Writer::default().sized(&[]).sized(secret).0);
        let parameters = Writer::default().sized(&sensitive).sized(&public.0).sized(&[]).u32(0).0;
        let mut session = Session::start(self, Kind::Hmac, parent)?;
        let object = (parent.handle, &parent.name[..]);
        let command = Protected { code: CREATE, object, parameters, protect: DECRYPT };
        let made = session.run(self, command);
        self.flush(session.handle);
        let made = made?;
        let mut reader = Reader(&made);
        let (private, public) = (reader.sized()?.to_vec(), reader.sized()?.to_vec());
        Ok(Sealed { public, private })
    }

    /// Gives a secret back. `signer` and `policies` are those of the running release, if the secret
    /// is bound to releases. What passes is waited out: a node whose disk stays locked waits for a person.
    pub fn unseal(
        &mut self,
        sealed: &Sealed,
        release: Option<(&Signer, &[SignedPolicy])>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        self.patiently(patience::UNSEAL, |tpm| tpm.unseal_once(sealed, release))
    }

    fn unseal_once(
        &mut self,
        sealed: &Sealed,
        release: Option<(&Signer, &[SignedPolicy])>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        if self.register(LATCH_PCR)? != [0; 32] {
            return Err(TpmError::Latched);
        }
        let parent = self.storage_key()?;
        let result = self.unseal_below(&parent, sealed, release);
        self.flush(parent.handle);
        result
    }

    fn unseal_below(
        &mut self,
        parent: &StorageKey,
        sealed: &Sealed,
        release: Option<(&Signer, &[SignedPolicy])>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let parameters = Writer::default().sized(&sealed.private).sized(&sealed.public);
        let answer = self.authorized(LOAD, parent.handle, &password(), &parameters.0)?;
        let mut reader = Reader(&answer);
        let handle = reader.u32()?;
        let name = Reader(wire::authorized(reader.0)?.parameters).sized()?.to_vec();
        let result = self.unseal_loaded(parent, (handle, &name), release);
        self.flush(handle);
        result
    }

    fn unseal_loaded(
        &mut self,
        parent: &StorageKey,
        object: (u32, &[u8]),
        release: Option<(&Signer, &[SignedPolicy])>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let mut session = Session::start(self, Kind::Policy, parent)?;
        let result = (|| {
            if let Some((signer, policies)) = release {
                self.authorize(session.handle, signer, policies)?;
            }
            self.policy_register(session.handle, LATCH_PCR)?;
            let protect = ENCRYPT;
            let command = Protected { code: UNSEAL, object, parameters: Vec::new(), protect };
            session.run(self, command)
        })();
        self.flush(session.handle);
        Ok(Zeroizing::new(Reader(&result?).sized()?.to_vec()))
    }

    /// Satisfies the part of a policy that asks for a signed release.
    fn authorize(
        &mut self,
        session: u32,
        signer: &Signer,
        policies: &[SignedPolicy],
    ) -> Result<(), TpmError> {
        let signed = self.signed_policy(policies)?;
        self.policy_register(session, RELEASE_PCR)?;
        let (name, ticket) = self.ticket(signer, signed)?;
        let approval = Writer::default()
            .u32(session)
            .sized(&signed.policy)
            .sized(&[])
            .sized(&name)
            .raw(&ticket);
        self.plain(POLICY_AUTHORIZE, approval.0).map(drop)
    }

    /// Has the TPM check a signature. Returns its name of the key, and its word for it (TPMT_TK_VERIFIED).
    fn ticket(
        &mut self,
        signer: &Signer,
        signed: &SignedPolicy,
    ) -> Result<(Vec<u8>, Vec<u8>), TpmError> {
        let public = Writer::default().sized(&[]).sized(&signer.public()).u32(OWNER);
        let answer = self.plain(LOAD_EXTERNAL, public.0)?;
        let mut reader = Reader(&answer);
        let (key, name) = (reader.u32()?, reader.sized()?.to_vec());
        let check = Writer::default()
            .u32(key)
            .sized(&Sha256::digest(signed.policy))
            .u16(0x0014)
            .u16(SHA256)
            .sized(&signed.signature);
        let ticket = self.plain(VERIFY, check.0);
        self.flush(key);
        Ok((name, ticket?))
    }

    /// Returns the signed policy that is the one of PCR 11 as it is now.
    fn signed_policy<'a>(
        &mut self,
        policies: &'a [SignedPolicy],
    ) -> Result<&'a SignedPolicy, TpmError> {
        let found = self.register(RELEASE_PCR)?;
        let wanted = register_policy([0; 32], RELEASE_PCR, &found);
        let signed = policies.iter().find(|signed| signed.policy == wanted);
        signed.ok_or_else(|| {
            if found == [0; 32] {
                return TpmError::Unmeasured;
            }
            TpmError::Unsigned { found: types::hex::encode(&found) }
        })
    }

    fn policy_register(&mut self, session: u32, register: u8) -> Result<(), TpmError> {
        let parameters = Writer::default().u32(session).sized(&[]).register(register);
        self.plain(POLICY_PCR, parameters.0).map(drop)
    }

    /// Makes the storage key, the same each time.
    fn storage_key(&mut self) -> Result<StorageKey, TpmError> {
        let public = Writer::default()
            .u16(0x0023)
            .u16(SHA256)
            .u32(0x0003_0472)
            .sized(&[])
            .u16(AES)
            .u16(128)
            .u16(CFB)
            .u16(NULL)
            .u16(0x0003)
            .u16(NULL)
            .sized(&[])
            .sized(&[]);
        let (handle, public) = self.primary(OWNER, &public.0)?;
        Ok(StorageKey { handle, name: name_of(&public), public })
    }

    /// Makes a key of a hierarchy from its template, the same each time. Returns handle and public area.
    fn primary(&mut self, hierarchy: u32, template: &[u8]) -> Result<(u32, Vec<u8>), TpmError> {
        let sensitive = Writer::default().sized(&[]).sized(&[]);
        let parameters = Writer::default().sized(&sensitive.0).sized(template).sized(&[]).u32(0);
        let answer = self.authorized(CREATE_PRIMARY, hierarchy, &password(), &parameters.0)?;
        let mut reader = Reader(&answer);
        let handle = reader.u32()?;
        let public = Reader(wire::authorized(reader.0)?.parameters).sized()?.to_vec();
        Ok((handle, public))
    }

    /// Lets go of something. What stays costs room in the TPM until it is closed.
    fn flush(&mut self, handle: u32) {
        let _ = self.plain(FLUSH, Writer::default().u32(handle).0);
    }

    /// Runs a command without sessions; returns everything after the response's head.
    fn plain(&mut self, code: u32, rest: Vec<u8>) -> Result<Vec<u8>, TpmError> {
        self.transact(NO_SESSIONS, code, &rest)
    }

    /// Runs a command for one handle with one session. What it returns begins with the new handle,
    /// where the command makes one.
    fn authorized(
        &mut self,
        code: u32,
        handle: u32,
        session: &[u8],
        parameters: &[u8],
    ) -> Result<Vec<u8>, TpmError> {
        self.authorized_for(code, &[handle], session, parameters)
    }

    /// The same for several handles.
    fn authorized_for(
        &mut self,
        code: u32,
        handles: &[u32],
        sessions: &[u8],
        parameters: &[u8],
    ) -> Result<Vec<u8>, TpmError> {
        let length = u32::try_from(sessions.len()).unwrap_or(u32::MAX);
        let rest = handles.iter().fold(Writer::default(), |rest, handle| rest.u32(*handle));
        let rest = rest.u32(length).raw(sessions).raw(parameters);
        self.transact(SESSIONS, code, &rest.0)
    }

    fn transact(&mut self, tag: u16, code: u32, rest: &[u8]) -> Result<Vec<u8>, TpmError> {
        let size = u32::try_from(10 + rest.len()).unwrap_or(u32::MAX);
        let command = Writer::default().u16(tag).u32(size).u32(code).raw(rest);
        let failed = |source| TpmError::Io { source };
        self.transport.write_all(&command.0).map_err(failed)?;
        if !self.transport.ready(LIMIT).map_err(failed)? {
            return Err(TpmError::Late);
        }
        let mut answer = vec![0; MAX_ANSWER];
        let count = self.transport.read(&mut answer).map_err(failed)?;
        let (found, rest) = wire::response(&answer[..count])?;
        if found == 0 {
            Ok(rest.to_vec())
        } else {
            Err(TpmError::Refused { command: code, code: found })
        }
    }
}

impl Signer {
    /// The key's public area (TPMT_PUBLIC): it may sign, and nothing else is asked of it.
    fn public(&self) -> Vec<u8> {
        let bits = u16::try_from(self.modulus.len() * 8).unwrap_or(0);
        let head = Writer::default().u16(0x0001).u16(SHA256).u32(0x0004_0040).sized(&[]);
        head.u16(NULL).u16(NULL).u16(bits).u32(0).sized(&self.modulus).0
    }
}

/// An empty password for a handle that has none.
fn password() -> Vec<u8> {
    Writer::default().u32(PASSWORD).sized(&[]).u8(1).sized(&[]).0
}

fn name_of(public: &[u8]) -> Vec<u8> {
    [&SHA256.to_be_bytes()[..], &Sha256::digest(public)].concat()
}

/// The policy that a sealed secret is read under.
fn policy(binding: Binding<'_>) -> [u8; 32] {
    let before = match binding {
        Binding::Nothing => [0; 32],
        Binding::Release(signer) => {
            let code = POLICY_AUTHORIZE.to_be_bytes();
            let name = name_of(&signer.public());
            let digest = Sha256::new().chain_update([0; 32]).chain_update(code).chain_update(name);
            // And then the policy's reference, which is empty.
            Sha256::digest(digest.finalize()).into()
        }
    };
    register_policy(before, LATCH_PCR, &[0; 32])
}

/// Extends a policy by the value of a register.
pub fn register_policy(before: [u8; 32], register: u8, value: &[u8; 32]) -> [u8; 32] {
    let digest = Sha256::new()
        .chain_update(before)
        .chain_update(POLICY_PCR.to_be_bytes())
        .chain_update(Writer::default().register(register).0)
        .chain_update(Sha256::digest(value));
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_codes_mean_what_the_specification_says() {
        let means = |code: u32, words: &str| {
            let said = meaning(code);
            assert!(said.contains(words), "{code:#05x}: {said}");
        };
        // Of the first handle, of the second parameter, of the first session.
        means(0x2c4, "2048 bits");
        means(0x185, "owner hierarchy");
        means(0x2db, "signature of the release's policy");
        means(0x99d, "policy failed");
        means(0x0a1, "attributes");
        means(0x100, "did not start the TPM");
        means(0x101, "self-test");
        means(0x12d, "update");
        means(0x921, "locked");
        // A command that wants to be alone, which none of ours is.
        means(0x121, "code 0x121");
    }
}
