//! Which secrets open the volumes, and the tokens in which the header says where each comes from.
//!
//! | Token's type        | The secret                                                          |
//! |---------------------|---------------------------------------------------------------------|
//! | `holdfast-tpm2`     | in the token, sealed by this server's TPM                           |
//! | `holdfast-clear`    | in the token, in clear: the volume is not sealed, and the node says so |
//! | `holdfast-recovery` | the recovery key, which a person has                                |
//! | `holdfast-state`    | derived from STATE's key: DATA opens when STATE is open             |

use std::io;

use base64::{Engine, engine::general_purpose::STANDARD};
use overlay::escrow;
use serde_json::{Value, json};
use types::{
    disk_key::DiskKey,
    ids::PublicKey,
    install::MAX_ESCROW,
    volumes::{Bound, EscrowedKey, Protection},
};
use update::disk::gpt::Uuid;
use zeroize::Zeroizing;

use super::{
    luks::{HeaderError, descend, random},
    recovery::RecoveryKey,
    signature::{Release, SignatureError},
    tpm::{Binding, Sealed, Tpm, TpmError},
    volume::{NewVolume, Volume},
};

const TPM: &str = "holdfast-tpm2";
const CLEAR: &str = "holdfast-clear";
const RECOVERY: &str = "holdfast-recovery";
const STATE: &str = "holdfast-state";

/// What seals here: the TPM, or why there is none, and what the running release says of itself.
pub struct Sealer {
    /// The TPM.
    pub tpm: Result<Tpm, TpmError>,
    /// The release's signed policies, if it carries any.
    pub release: Option<Result<Release, SignatureError>>,
    /// What the release was started with besides what its publisher signed ([`crate::local::host::additions`]).
    /// Then the TPM is not asked for a key: words may name whom the node obeys.
    pub additions: Option<String>,
}

impl Sealer {
    /// Seals a secret. Returns the token for it; in clear, with the reason, where there is no TPM, none
    /// that would open the seal at the next start, or a release that cannot be understood: who signs releases
    /// takes a seal for bound to them.
    fn token(&mut self, secret: &[u8]) -> (Value, Protection) {
        let release = self.release.as_ref().and_then(|release| release.as_ref().ok());
        let sealed = match (&mut self.tpm, &self.release) {
            (Ok(_), Some(Err(error))) => Err(error.to_string()),
            (Ok(tpm), Some(Ok(_)) | None) => {
                let binding = release.map_or(Binding::Nothing, |r| Binding::Release(&r.signer));
                let policies = release.map_or(&[][..], |release| &release.policies[..]);
                tpm.could_open(binding, policies)
                    .and_then(|()| tpm.seal(secret, binding))
                    .map_err(|error| crate::init::boot::chain(&error))
            }
            (Err(error), _) => Err(crate::init::boot::chain(error)),
        };
        match sealed {
            Ok(Sealed { public, private }) => {
                let (public, private) = (STANDARD.encode(public), STANDARD.encode(private));
                let signer = release.map(|release| release.fingerprint.clone());
                let bound = if signer.is_some() { Bound::Release } else { Bound::Server };
                let token =
                    json!({"type": TPM, "public": public, "private": private, "signer": signer});
                (token, Protection::Sealed { bound })
            }
            Err(reason) => {
                let token = json!({"type": CLEAR, "secret": STANDARD.encode(secret)});
                (token, Protection::Unsealed { reason })
            }
        }
    }

    /// Has the TPM give back what a token holds.
    fn unseal(&mut self, token: &Value) -> Result<Zeroizing<Vec<u8>>, String> {
        if let Some(additions) = &self.additions {
            return Err(additions.clone());
        }
        let chain = |error: &TpmError| crate::init::boot::chain(error);
        let tpm = self.tpm.as_mut().map_err(|error| chain(error))?;
        let field = |name: &str| {
            let text = token.get(name).and_then(Value::as_str).unwrap_or_default();
            STANDARD.decode(text).map_err(|_| format!("{name} of its token is no base64"))
        };
        let sealed = Sealed { public: field("public")?, private: field("private")? };
        let signer = token.get("signer").and_then(Value::as_str);
        let release = match (signer, &self.release) {
            (None, _) => None,
            (Some(_), None) => {
                return Err("it is bound to signed releases, and the one that runs carries no \
                            signature of its measurements"
                    .to_owned());
            }
            (Some(_), Some(Err(error))) => return Err(error.to_string()),
            (Some(signer), Some(Ok(release))) if release.fingerprint != signer => {
                return Err(format!(
                    "it is bound to releases that key {signer} signed, and the one that runs is \
                     signed by {}",
                    release.fingerprint
                ));
            }
            (Some(_), Some(Ok(release))) => Some((&release.signer, &release.policies[..])),
        };
        tpm.unseal(&sealed, release).map_err(|error| chain(&error))
    }
}

/// The volumes of a disk that is being installed to.
#[derive(Debug)]
pub struct NewVolumes {
    /// STATE.
    pub state: NewVolume,
    /// DATA.
    pub data: NewVolume,
    /// What opens both without this server; shown once.
    pub recovery: RecoveryKey,
    /// How they are protected.
    pub protection: Protection,
}

impl NewVolumes {
    /// Invents keys for a new disk and seals them.
    /// The recovery key is sealed to `operators`, too: the configuration names no more than [`MAX_ESCROW`].
    pub fn invent(sealer: &mut Sealer, operators: &[PublicKey]) -> Result<Self, HeaderError> {
        let recovery = RecoveryKey::generate()?;
        let escrow = operators.iter().map(|operator| {
            let sealed = escrow::seal(*operator, recovery.as_str().as_bytes());
            let sealed = sealed.map_err(|_| HeaderError::Escrow { operator: *operator })?;
            Ok(EscrowedKey { operator: *operator, sealed })
        });
        let escrow = escrow.collect::<Result<Vec<_>, HeaderError>>()?;
        let mut state = NewVolume::invent(Uuid::new_v4().to_string())?;
        let secret = Zeroizing::new(random::<32>()?);
        let (token, protection) = sealer.token(secret.as_ref());
        state.add(secret.as_ref(), token)?;
        let name = Uuid::new_v4().to_string();
        let mut data = NewVolume::invent(name.clone())?;
        data.add(descend(&state.key, &name).as_ref(), json!({"type": STATE}))?;
        for volume in [&mut state, &mut data] {
            let token = json!({"type": RECOVERY, "escrow": escrow});
            volume.add(recovery.as_str().as_bytes(), token)?;
        }
        Ok(Self { state, data, recovery, protection })
    }
}

/// Returns to whom a volume's recovery key was sealed, and what. Anybody may read it: it is on the disk in
/// clear.
pub fn escrowed(volume: &Volume) -> Vec<EscrowedKey> {
    let listed = tokens(volume, RECOVERY).into_iter().filter_map(|(_, token)| {
        serde_json::from_value::<Vec<EscrowedKey>>(token.get("escrow")?.clone()).ok()
    });
    listed.flatten().take(MAX_ESCROW).collect()
}

/// Opens STATE without anybody's help, and improves its protection when that is possible by now.
pub fn open_state(
    volume: &mut Volume,
    sealer: &mut Sealer,
) -> Result<(DiskKey, Protection), String> {
    let mut reasons = Vec::new();
    let tokens: Vec<(u32, Value)> = tokens(volume, TPM);
    for (slot, token) in tokens {
        let opened = sealer
            .unseal(&token)
            .and_then(|secret| volume.unlock(slot, &secret).map_err(|error| error.to_string()));
        match opened {
            Ok(key) => {
                let bound = token.get("signer").and_then(Value::as_str);
                let bound = if bound.is_some() { Bound::Release } else { Bound::Server };
                let could_be_better =
                    bound == Bound::Server && matches!(sealer.release, Some(Ok(_)));
                let protection = Protection::Sealed { bound };
                if could_be_better && let Ok(better) = reseal(volume, &key, sealer) {
                    return Ok((key, better));
                }
                return Ok((key, protection));
            }
            Err(reason) => reasons.push(reason),
        }
    }
    for (slot, token) in self::tokens(volume, CLEAR) {
        let secret = token.get("secret").and_then(Value::as_str).unwrap_or_default();
        let Ok(secret) = STANDARD.decode(secret).map(Zeroizing::new) else { continue };
        match volume.unlock(slot, &secret) {
            Ok(key) => {
                let reason = match reseal(volume, &key, sealer) {
                    Ok(better) => return Ok((key, better)),
                    Err(reason) => reason,
                };
                return Ok((key, Protection::Unsealed { reason }));
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    reasons.dedup();
    let none = "no key of this server opens it".to_owned();
    Err(if reasons.is_empty() { none } else { reasons.join("; ") })
}

/// Whether this server's TPM opens STATE, which nobody can make it do for a disk of his own.
pub fn tpm_opens(volume: &Volume, sealer: &mut Sealer) -> bool {
    tokens(volume, TPM).into_iter().any(|(slot, token)| {
        sealer.unseal(&token).is_ok_and(|secret| volume.unlock(slot, &secret).is_ok())
    })
}

/// Opens DATA with STATE's key.
pub fn open_data(volume: &Volume, state: &DiskKey) -> Result<DiskKey, String> {
    let secret = descend(state, &volume.header.uuid);
    let opened = tokens(volume, STATE)
        .into_iter()
        .map(|(slot, _)| volume.unlock(slot, secret.as_ref()).map_err(|error| error.to_string()));
    let none = Err("no key on STATE opens it".to_owned());
    opened.reduce(Result::or).unwrap_or(none)
}

/// Opens a volume with the recovery key.
pub fn recover(volume: &Volume, key: &RecoveryKey) -> Result<DiskKey, String> {
    let opened = tokens(volume, RECOVERY).into_iter().map(|(slot, _)| {
        volume.unlock(slot, key.as_str().as_bytes()).map_err(|error| error.to_string())
    });
    let none = Err("the volume has no recovery key".to_owned());
    opened.reduce(Result::or).unwrap_or(none)
}

/// Seals STATE's key anew. What opened it without a person before is destroyed, once the new seal is
/// on the disk. Without a TPM nothing changes, and the reason comes back.
pub fn reseal(
    volume: &mut Volume,
    key: &DiskKey,
    sealer: &mut Sealer,
) -> Result<Protection, String> {
    let secret = Zeroizing::new(random::<32>().map_err(|error| error.to_string())?);
    let (token, protection) = sealer.token(secret.as_ref());
    if let Protection::Unsealed { reason } = protection {
        return Err(reason);
    }
    let old: Vec<u32> = [TPM, CLEAR]
        .into_iter()
        .flat_map(|kind| tokens(volume, kind))
        .map(|(slot, _)| slot)
        .collect();
    let change = |volume: &mut Volume| -> io::Result<()> {
        volume.add(key, secret.as_ref(), token)?;
        old.into_iter().try_for_each(|slot| volume.remove(slot))
    };
    change(volume).map_err(|error| format!("the header cannot be written: {error}"))?;
    Ok(protection)
}

fn tokens(volume: &Volume, kind: &str) -> Vec<(u32, Value)> {
    let found = volume.header.tokens(kind).into_iter();
    found.map(|(slot, token)| (slot, token.clone())).collect()
}
