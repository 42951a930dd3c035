//! The encrypted volumes of the appliance's disk: STATE and DATA.
//!
//! `luks` is the header's format, `volume` a header on a disk, `recovery` the key that a person keeps,
//! `tpm` and `signature` what the TPM does, `unlock` what happens at the start. It leaves mounting to
//! `init`, and machines' disks to `machines::disk_keys`.

#[cfg(test)]
mod attest_tests;
mod descriptors;
#[cfg(test)]
mod descriptors_tests;
pub mod keys;
#[cfg(test)]
mod keys_tests;
pub mod locked;
pub mod luks;
#[cfg(test)]
mod luks_tests;
pub mod recovery;
pub mod signature;
pub mod superblock;
pub mod tpm;
#[cfg(test)]
pub(crate) mod tpm_tests;
pub mod unlock;
pub mod volume;
