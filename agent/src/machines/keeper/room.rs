//! Space on DATA: what is free, what was promised to machines' disks, and what content may take of it.

use std::collections::BTreeSet;

use lease::hardware::Attach;
use types::ids::ContentId;

use super::{Entry, Keeper, Record, trouble};
use crate::machines::{
    attach::Seat,
    content,
    disk::{self, Places},
    plan::Released,
};

impl Keeper {
    /// Returns the disk space that no machine was promised, in MiB.
    pub(super) fn free_disk_mib(&self) -> u64 {
        if !self.forgetful.is_empty() {
            // Looking at a disk that is gone fills the kernel's log.
            return 0;
        }
        let tools = &self.config.tools;
        let Ok(volume) = rustix::fs::statvfs(&tools.disks.data) else { return 0 };
        let all = volume.f_blocks.saturating_mul(volume.f_frsize);
        let free = volume.f_bavail.saturating_mul(volume.f_frsize);
        // A machine that has all that is offered must get what it starts from still.
        let kept = content::kept_for_content(all).saturating_add(tools.cache.coming());
        let spare = self.spare_mib.saturating_mul(1 << 20);
        let free = free.saturating_add(spare).saturating_sub(kept) >> 20;
        free.saturating_sub(self.promised_disk_mib())
    }

    /// Returns what machines' disks may still grow by, in MiB.
    fn promised_disk_mib(&self) -> u64 {
        let data = &self.config.tools.disks.data;
        let promised = |entry: &Entry| {
            let lease = &entry.record.lease;
            lease.shape.disk_mib.0.saturating_sub(disk::allocated_mib(data, lease.id))
        };
        self.machines.values().map(promised).sum()
    }

    /// Lets content go that no machine needs, where it is in the way of what was promised.
    pub(super) fn make_room(&mut self) {
        if !self.forgetful.is_empty() {
            return;
        }
        let places = &self.config.tools.disks;
        let records = self.machines.values().map(|entry| &entry.record);
        let needed = records.flat_map(|record| needed(places, record)).collect();
        let promised = self.promised_disk_mib().saturating_mul(1 << 20);
        match self.config.tools.cache.settle(needed, promised) {
            Ok(spare) => self.spare_mib = spare >> 20,
            Err(error) => trouble("content", &error),
        }
    }
}

/// Returns the content that a machine's next start takes. A disk that was made needs its image no more.
fn needed(places: &Places, record: &Record) -> BTreeSet<ContentId> {
    if record.released == Released::Yes || record.deleted.is_some() {
        return BTreeSet::new();
    }
    let (machine, image) = (record.lease.id, &record.image);
    let mut needed: BTreeSet<ContentId> =
        [image.kernel, image.initrd].into_iter().flatten().collect();
    needed.extend(image.disk.filter(|_| !disk::is_made(places, machine)));
    for kept in record.attachments.iter().filter(|kept| kept.seat == Seat::In) {
        if let Attach::Disk(wanted) = &kept.device {
            let made =
                wanted.size_mib.is_some() && disk::is_extra_made(places, machine, &wanted.name);
            needed.extend(wanted.content.filter(|_| !made));
        }
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::plan::fixture;

    #[test]
    fn content_is_needed_until_its_disk_is_made_and_as_long_as_the_machine_may_start() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = Places { data: folder.path().join("data"), keys: folder.path().join("keys") };
        let mut record = fixture::record();
        let (kernel, image) =
            (record.image.kernel.expect("a kernel"), ContentId::from_bytes([8; 32]));
        record.image.disk = Some(image);
        assert_eq!(needed(&places, &record), [kernel, image].into());
        let size = types::units::Mebibytes(1);
        disk::open(&places, record.lease.id, size, None).expect("made");
        assert_eq!(needed(&places, &record), [kernel].into());
        record.released = Released::Yes;
        assert_eq!(needed(&places, &record), [].into());
    }
}
