//! Signatures of boot programs, as firmware with Secure Boot asks for them.
//!
//! Pure but for the key. The digest leaves out what a signature changes: the checksum, the directory
//! entry of the certificate table, and that table, which is at the file's end.
//! Sources: Microsoft "Windows Authenticode Portable Executable Signature Format" (2008),
//! "Calculating the PE Image Hash"; "PE Format", "The Attribute Certificate Table"; UEFI 2.10 §32.2.
//!
//! | Field of a table entry | Offset | Here                                              |
//! |------------------------|--------|---------------------------------------------------|
//! | dwLength               | 0, u32 | of the whole entry                                |
//! | wRevision              | 4, u16 | 0x0200                                            |
//! | wCertificateType       | 6, u16 | 2: PKCS#7 `SignedData`                            |
//! | bCertificate           | 8      | zeros up to a multiple of eight bytes follow      |

use sha2::{Digest, Sha256};

use crate::der::{self, CONTEXT_0, INTEGER, OBJECT, OCTET_STRING, Reader, SEQUENCE, SET};
use crate::signer::{self, SHA256, Signed, Signer, SignerError};
use crate::uki::{self, COFF, ENTRY, Layout, UkiError};

/// SPC_INDIRECT_DATA: 1.3.6.1.4.1.311.2.1.4.
const INDIRECT_DATA: &[u8] = &[0x2b, 0x06, 0x01, 0x04, 0x01, 0x82, 0x37, 0x02, 0x01, 0x04];
/// SPC_PE_IMAGE_DATA: 1.3.6.1.4.1.311.2.1.15.
const PE_IMAGE_DATA: &[u8] = &[0x2b, 0x06, 0x01, 0x04, 0x01, 0x82, 0x37, 0x02, 0x01, 0x0f];
/// signedData: 1.2.840.113549.1.7.2.
const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x02];
/// contentType: 1.2.840.113549.1.9.3.
const CONTENT_TYPE: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x03];
/// messageDigest: 1.2.840.113549.1.9.4.
const MESSAGE_DIGEST: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x04];
/// SpcPeImageData without flags, whose file is an empty name: nobody reads either.
const NO_FILE: &[u8] = &[0x30, 0x09, 0x03, 0x01, 0x00, 0xa0, 0x04, 0xa2, 0x02, 0x80, 0x00];
/// Entries of the certificate table begin at multiples of this.
const ALIGNMENT: usize = 8;
/// Length of an entry without its certificate.
const HEADER: usize = 8;
/// wRevision 2.0 and the type for PKCS#7.
const REVISION_AND_TYPE: [u8; 4] = [0x00, 0x02, 0x02, 0x00];

/// Why a boot program cannot be signed, or its signature not be looked at.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum AuthenticodeError {
    #[error(transparent)]
    Program(#[from] UkiError),
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error("the program has {0}")]
    Layout(&'static str),
    #[error("the program is signed already")]
    Signed,
    #[error(
        "the program is not what was signed: {0}; it was altered, or cut off and put together, so fetch it again"
    )]
    Altered(&'static str),
}

/// The places in a program that its digest leaves out.
struct Places {
    checksum: usize,
    /// The directory entry of the certificate table.
    directory: usize,
    /// Where the table begins: the end of an unsigned program.
    table: usize,
}

impl Places {
    fn of(program: &[u8]) -> Result<Self, AuthenticodeError> {
        let layout = Layout::of(program)?;
        let optional = layout.pe + COFF;
        let entries = uki::get_u32(program, optional + 108).unwrap_or(0);
        let directory = optional + 112 + 4 * 8;
        if entries < 5 || directory + 8 > layout.table {
            return Err(AuthenticodeError::Layout("no room for a certificate table"));
        }
        let field = |at| uki::get_u32(program, at).unwrap_or(0) as usize;
        let table = match (field(directory), field(directory + 4)) {
            (0, 0) => program.len(),
            (at, length) if at.checked_add(length) == Some(program.len()) => at,
            _ => return Err(AuthenticodeError::Layout("bytes after its certificate table")),
        };
        let places = Self { checksum: optional + 64, directory, table };
        places.check_sections(program, &layout)?;
        Ok(places)
    }

    /// Firmware digests headers, sections by their place in the file, then the rest. With sections
    /// that lie one behind the other that is the file from its first byte to its last.
    fn check_sections(&self, program: &[u8], layout: &Layout) -> Result<(), AuthenticodeError> {
        let mut parts = Vec::new();
        for index in 0..usize::from(layout.sections) {
            let entry = layout.table + index * ENTRY;
            let field = |at| uki::get_u32(program, entry + at).unwrap_or(u32::MAX) as usize;
            if field(16) != 0 {
                parts.push((field(20), field(16)));
            }
        }
        parts.sort_unstable();
        let mut end = layout.headers as usize;
        for (start, length) in parts {
            if start != end {
                return Err(AuthenticodeError::Layout("a gap or an overlap between sections"));
            }
            end = start.saturating_add(length);
        }
        if end > self.table {
            return Err(AuthenticodeError::Layout("a section beyond its end"));
        }
        Ok(())
    }
}

/// Returns the digest that a signature of `program` is about, signed or not.
pub fn digest(program: &[u8]) -> Result<[u8; 32], AuthenticodeError> {
    let places = Places::of(program)?;
    let mut hash = Sha256::new();
    hash.update(&program[..places.checksum]);
    hash.update(&program[places.checksum + 4..places.directory]);
    hash.update(&program[places.directory + 8..places.table]);
    Ok(hash.finalize().into())
}

/// Returns the certificate table; empty when the program is not signed.
pub fn certificates(program: &[u8]) -> Result<&[u8], AuthenticodeError> {
    Ok(&program[Places::of(program)?.table..])
}

/// Checks that a program comes to its checksum and that each signature in it is one of these very bytes, by a key whose certificate came along;
/// whose key that is, firmware judges. A program without signatures passes.
pub fn check(program: &[u8]) -> Result<(), AuthenticodeError> {
    let digest = digest(program)?;
    let places = Places::of(program)?;
    uki::check_checksum(program, places.checksum)?;
    let mut table = &program[places.table..];
    while !table.is_empty() {
        let length = uki::get_u32(table, 0).unwrap_or(0) as usize;
        let entry = table.get(HEADER..length).ok_or(NO_ENTRY)?;
        if table[4..HEADER] != REVISION_AND_TYPE {
            return Err(NO_ENTRY);
        }
        check_signature(entry, &digest)?;
        table = table.get(length.next_multiple_of(ALIGNMENT)..).ok_or(NO_ENTRY)?;
    }
    Ok(())
}

const NO_ENTRY: AuthenticodeError =
    AuthenticodeError::Altered("an entry of its certificate table is none");

/// Checks the PKCS#7 message of a table's entry. Source of the structure: RFC 2315 §9.1 and §9.2.
fn check_signature(message: &[u8], digest: &[u8; 32]) -> Result<(), AuthenticodeError> {
    let form = AuthenticodeError::Altered("its signature is no PKCS#7 message about a program");
    let Some(read) = Message::read(message) else { return Err(form) };
    if read.digest != digest {
        return Err(AuthenticodeError::Altered("its bytes have another digest"));
    }
    if read.content_digest != Sha256::digest(read.content).as_slice() {
        return Err(AuthenticodeError::Altered("the signature is about another digest"));
    }
    let attributes = der::value(SET, read.attributes);
    if signer::verifies(read.certificates, read.signer, &attributes, read.signature) {
        Ok(())
    } else {
        Err(AuthenticodeError::Altered("no certificate with it verifies its signature"))
    }
}

/// What of a signature is compared.
struct Message<'a> {
    /// The program's digest, as it was signed.
    digest: &'a [u8],
    /// What the digest is in, which `content_digest` is of.
    content: &'a [u8],
    content_digest: &'a [u8],
    /// What the key signed, as the content of a SET.
    attributes: &'a [u8],
    certificates: &'a [u8],
    /// Issuer and serial number of the signer's certificate.
    signer: &'a [u8],
    signature: &'a [u8],
}

impl<'a> Message<'a> {
    fn read(message: &'a [u8]) -> Option<Self> {
        let mut outer = Reader(Reader(message).take(SEQUENCE)?.1);
        let signed = (outer.take(OBJECT)?.1 == SIGNED_DATA).then(|| outer.take(CONTEXT_0))??.1;
        let mut data = Reader(Reader(signed).take(SEQUENCE)?.1);
        data.take(INTEGER)?;
        data.take(SET)?;
        let mut info = Reader(data.take(SEQUENCE)?.1);
        let about = (info.take(OBJECT)?.1 == INDIRECT_DATA).then(|| info.take(CONTEXT_0))??.1;
        let content = Reader(about).take(SEQUENCE)?.1;
        let certificates = data.take(CONTEXT_0)?.1;
        let mut signer = Reader(Reader(data.take(SET)?.1).take(SEQUENCE)?.1);
        signer.take(INTEGER)?;
        let (_, name) = signer.take(SEQUENCE)?;
        signer.take(SEQUENCE)?;
        let (_, attributes) = signer.take(CONTEXT_0)?;
        signer.take(SEQUENCE)?;
        let (_, signature) = signer.take(OCTET_STRING)?;
        let mut parts = Reader(content);
        parts.take(SEQUENCE)?;
        let mut imprint = Reader(parts.take(SEQUENCE)?.1);
        let sha256 = Reader(imprint.take(SEQUENCE)?.1).take(OBJECT)?.1 == SHA256;
        let digest = sha256.then(|| imprint.take(OCTET_STRING))??.1;
        let content_digest = message_digest(attributes)?;
        let signer = name;
        Some(Self { digest, content, content_digest, attributes, certificates, signer, signature })
    }
}

/// Finds the digest of the content among a signer's attributes.
fn message_digest(attributes: &[u8]) -> Option<&[u8]> {
    let mut all = Reader(attributes);
    loop {
        let mut attribute = Reader(all.take(SEQUENCE)?.1);
        if attribute.take(OBJECT)?.1 == MESSAGE_DIGEST {
            return Some(Reader(attribute.take(SET)?.1).take(OCTET_STRING)?.1);
        }
    }
}

/// Returns the program without its signatures.
pub fn unsigned(program: &[u8]) -> Result<Vec<u8>, AuthenticodeError> {
    let places = Places::of(program)?;
    let mut bare = program[..places.table].to_vec();
    bare[places.directory..places.directory + 8].fill(0);
    uki::put_checksum(&mut bare, places.checksum);
    Ok(bare)
}

/// Signs a program that is not signed.
pub fn sign(program: &[u8], signer: &Signer) -> Result<Vec<u8>, AuthenticodeError> {
    let places = Places::of(program)?;
    if places.table != program.len() {
        return Err(AuthenticodeError::Signed);
    }
    let too_large = |_| AuthenticodeError::Layout("more than 4 GiB");
    let mut signed = program.to_vec();
    // The zeros count as part of the program.
    signed.resize(program.len().next_multiple_of(ALIGNMENT), 0);
    let table = u32::try_from(signed.len()).map_err(too_large)?;
    let signature = signature(&digest(&signed)?, signer)?;
    let length = u32::try_from(HEADER + signature.len()).map_err(too_large)?;
    signed.extend(length.to_le_bytes());
    signed.extend(REVISION_AND_TYPE);
    signed.extend(signature);
    signed.resize(signed.len().next_multiple_of(ALIGNMENT), 0);
    let size = u32::try_from(signed.len()).map_err(too_large)? - table;
    signed[places.directory..places.directory + 4].copy_from_slice(&table.to_le_bytes());
    signed[places.directory + 4..places.directory + 8].copy_from_slice(&size.to_le_bytes());
    uki::put_checksum(&mut signed, places.checksum);
    Ok(signed)
}

/// The PKCS#7 message about a digest.
fn signature(digest: &[u8; 32], signer: &Signer) -> Result<Vec<u8>, SignerError> {
    let data = der::nested(SEQUENCE, &[&der::value(OBJECT, PE_IMAGE_DATA), NO_FILE]);
    let imprint =
        der::nested(SEQUENCE, &[&der::algorithm(SHA256), &der::value(OCTET_STRING, digest)]);
    // What is signed is the content of this sequence, without its tag and length.
    let content = [data, imprint].concat();
    let indirect = der::value(OBJECT, INDIRECT_DATA);
    let info = der::nested(
        SEQUENCE,
        &[&indirect, &der::value(CONTEXT_0, &der::value(SEQUENCE, &content))],
    );
    let about = der::value(OCTET_STRING, &Sha256::digest(&content));
    let attributes =
        [signer::attribute(CONTENT_TYPE, &indirect), signer::attribute(MESSAGE_DIGEST, &about)]
            .concat();
    let signed = signer.signed_data(&Signed {
        content_info: &info,
        attributes: Some(&attributes),
        message: &der::value(SET, &attributes),
    })?;
    Ok(der::nested(SEQUENCE, &[&der::value(OBJECT, SIGNED_DATA), &der::value(CONTEXT_0, &signed)]))
}
