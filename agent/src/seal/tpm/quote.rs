//! What the TPM says of its registers, signed by a key that it made for this node, and the proof that
//! this key and the TPM's endorsement key are in one TPM.
//! Sources: TPM 2.0 Library, Part 3 §18.4 (`TPM2_Quote`), §12.5 (`TPM2_ActivateCredential`), §23.4
//! (`TPM2_PolicySecret`); TCG EK Credential Profile 2.5 §B.3.4 (template L-2: ECC on P-256).
//!
//! Both keys are primary keys of the endorsement hierarchy: the TPM makes them from their templates
//! whenever they are needed, the same each time, so nothing of them is kept anywhere. The attestation
//! key's template holds a digest of the node's name: another node on the same server has another key.

use sha2::{Digest, Sha256};
use types::ids::NodeId;

use super::{
    AES, CFB, NULL_HANDLE, Tpm, TpmError, password,
    wire::{self, NULL, Reader, SHA256, Writer},
};

const ENDORSEMENT: u32 = 0x4000_000b;
const START_SESSION: u32 = 0x176;
const ACTIVATE_CREDENTIAL: u32 = 0x147;
const POLICY_SECRET: u32 = 0x151;
const QUOTE: u32 = 0x158;

const ECC: u16 = 0x0023;
const ECDSA: u16 = 0x0018;
const P256: u16 = 0x0003;
/// TPM_SE_POLICY.
const POLICY: u8 = 1;
/// The session is still there afterwards (TPMA_SESSION).
const CONTINUE: u8 = 1;

/// TPMA_OBJECT of the attestation key: `fixedTPM`, `fixedParent`, `sensitiveDataOrigin`, `userWithAuth`,
/// `noDA`, `restricted`, `sign`.
const SIGNING: u32 = 0x0005_0472;
/// TPMA_OBJECT of the endorsement key, by its template.
const STORING: u32 = 0x0003_00b2;
/// Its policy: who may use the endorsement hierarchy may use it (`PolicyA`).
const POLICY_A: [u8; 32] = [
    0x83, 0x71, 0x97, 0x67, 0x44, 0x84, 0xb3, 0xf8, 0x1a, 0x90, 0xcc, 0x8d, 0x46, 0xa5, 0xd7, 0x24,
    0xfd, 0x52, 0xd7, 0x6e, 0x06, 0x52, 0x0b, 0x64, 0xf2, 0xa1, 0xda, 0x1b, 0x33, 0x14, 0x69, 0xaa,
];

/// What is asked of the TPM.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The node in whose name it is asked.
    pub node: NodeId,
    /// What is signed beside the registers.
    pub qualifying: [u8; 32],
    /// The registers.
    pub registers: &'a [u8],
    /// A credential to give back: `TPM2B_ID_OBJECT` and `TPM2B_ENCRYPTED_SECRET` without their lengths.
    pub credential: Option<(&'a [u8], &'a [u8])>,
}

/// What the TPM answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quoted {
    /// `TPMS_ATTEST`.
    pub quote: Vec<u8>,
    /// `TPMT_SIGNATURE` of it.
    pub signature: Vec<u8>,
    /// `TPMT_PUBLIC` of the key that signed.
    pub attestation_key: Vec<u8>,
    /// `TPMT_PUBLIC` of the endorsement key.
    pub endorsement_key: Vec<u8>,
    /// The registers' values, in the order of the question.
    pub registers: Vec<[u8; 32]>,
    /// What was in the credential.
    pub activated: Option<Vec<u8>>,
}

impl Tpm {
    /// Has the TPM sign what its registers hold.
    pub fn quote(&mut self, question: &Question<'_>) -> Result<Quoted, TpmError> {
        let values = question.registers.iter().map(|register| self.register(*register));
        let registers = values.collect::<Result<_, _>>()?;
        let (endorsement, endorsement_key) = self.primary(ENDORSEMENT, &endorsement_template())?;
        let result = self.primary(ENDORSEMENT, &attestation_template(question.node)).and_then(
            |(key, attestation_key)| {
                let result = self.quote_with(key, question).and_then(|(quote, signature)| {
                    let activated = question
                        .credential
                        .map(|credential| self.activate((key, endorsement), credential))
                        .transpose()?;
                    Ok((quote, signature, activated))
                });
                self.flush(key);
                result.map(|said| (said, attestation_key))
            },
        );
        self.flush(endorsement);
        let ((quote, signature, activated), attestation_key) = result?;
        Ok(Quoted { quote, signature, attestation_key, endorsement_key, registers, activated })
    }

    fn quote_with(
        &mut self,
        key: u32,
        question: &Question<'_>,
    ) -> Result<(Vec<u8>, Vec<u8>), TpmError> {
        let parameters =
            Writer::default().sized(&question.qualifying).u16(NULL).registers(question.registers);
        let answer = self.authorized(QUOTE, key, &password(), &parameters.0)?;
        let mut reader = Reader(wire::authorized(&answer)?.parameters);
        Ok((reader.sized()?.to_vec(), reader.0.to_vec()))
    }

    /// Has the TPM open a credential that was made for both keys, given by their handles.
    fn activate(
        &mut self,
        (key, endorsement): (u32, u32),
        (blob, secret): (&[u8], &[u8]),
    ) -> Result<Vec<u8>, TpmError> {
        let session = self.endorsement_session()?;
        let by_policy = Writer::default().u32(session).sized(&[]).u8(CONTINUE).sized(&[]);
        let sessions = [password(), by_policy.0].concat();
        let parameters = Writer::default().sized(blob).sized(secret);
        let handles = [key, endorsement];
        let answer = self.authorized_for(ACTIVATE_CREDENTIAL, &handles, &sessions, &parameters.0);
        self.flush(session);
        let answer = answer?;
        Ok(Reader(wire::authorized(&answer)?.parameters).sized()?.to_vec())
    }

    /// Starts a session that satisfies the endorsement key's policy.
    fn endorsement_session(&mut self) -> Result<u32, TpmError> {
        // Nothing secret goes through it, so it is not salted; the nonce only has to be long enough.
        let start = Writer::default()
            .u32(NULL_HANDLE)
            .u32(NULL_HANDLE)
            .sized(&[0; 32])
            .sized(&[])
            .u8(POLICY)
            .u16(NULL)
            .u16(SHA256);
        let answer = self.plain(START_SESSION, start.0)?;
        let session = Reader(&answer).u32()?;
        // No nonce, no command, no reference, no end.
        let parameters = Writer::default().sized(&[]).sized(&[]).sized(&[]).u32(0);
        let handles = [ENDORSEMENT, session];
        let allowed = self.authorized_for(POLICY_SECRET, &handles, &password(), &parameters.0);
        if allowed.is_err() {
            self.flush(session);
        }
        allowed.map(|_| session)
    }
}

fn attestation_template(node: NodeId) -> Vec<u8> {
    let name =
        Sha256::new().chain_update(b"holdfast attestation key\0").chain_update(node.as_bytes());
    Writer::default()
        .u16(ECC)
        .u16(SHA256)
        .u32(SIGNING)
        .sized(&[])
        .u16(NULL)
        .u16(ECDSA)
        .u16(SHA256)
        .u16(P256)
        .u16(NULL)
        .sized(&name.finalize())
        .sized(&[0; 32])
        .0
}

fn endorsement_template() -> Vec<u8> {
    Writer::default()
        .u16(ECC)
        .u16(SHA256)
        .u32(STORING)
        .sized(&POLICY_A)
        .u16(AES)
        .u16(128)
        .u16(CFB)
        .u16(NULL)
        .u16(P256)
        .u16(NULL)
        .sized(&[0; 32])
        .sized(&[0; 32])
        .0
}
