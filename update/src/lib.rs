//! Updates: the appliance's disk and its slots, the TUF client, and the release tool.

pub mod disk;
pub mod efi;
