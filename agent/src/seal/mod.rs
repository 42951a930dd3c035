//! The encrypted volumes of the appliance's disk: STATE and DATA.
//!
//! `luks` is the header's format, `stripes` what it writes a key as, `volume` a header on a disk, `recovery` the key that a person keeps,
//! `tpm` and `signature` what the TPM does, `unlock` what happens at the start, `check` and what it uses what
//! becomes of file systems that a disk altered, `names` of their files. It leaves mounting to `init`, and machines' disks to
//! `machines::disk_keys`.

#[cfg(test)]
mod attest_tests;
pub mod check;
mod descriptors;
#[cfg(test)]
mod descriptors_tests;
#[cfg(test)]
mod flips;
pub mod glance;
pub mod inodes;
#[cfg(test)]
mod inodes_tests;
pub mod keys;
#[cfg(test)]
mod keys_tests;
pub mod locked;
pub mod luks;
#[cfg(test)]
mod luks_tests;
pub mod names;
pub mod recovery;
pub mod signature;
mod stripes;
pub mod superblock;
pub mod tpm;
#[cfg(test)]
pub(crate) mod tpm_tests;
pub mod unlock;
pub mod volume;
