//! What guest memory costs at the start: fetched from the host and mapped for a device, by the size
//! of its pages and the number of threads. Two machines that differ by one GiB tell what a GiB costs.
//! `docs/memory.md` says how it grows.

use std::time::Duration;

use anyhow::Result;
use types::{
    units::Mebibytes,
    vm::{HostMemory, MemoryBacking},
};

use super::{Bench, FIRST_BOOT, LIMIT, Medians, Row, payload};

/// Memory of the smaller and of the larger machine, in MiB.
const SIZES_MIB: [u64; 2] = [1024, 2048];
/// Where the host sets huge pages aside.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-";
/// Rows are `(backing, KiB of a page, threads, what)`.
const ROWS: [(MemoryBacking, u64, usize, &str); 6] = [
    (MemoryBacking::Memfd, 0, 1, "fetch and map 1 GiB, ordinary pages, 1 thread"),
    (MemoryBacking::Memfd, 0, 2, "fetch and map 1 GiB, ordinary pages, 2 threads"),
    (MemoryBacking::Hugetlb2M, 2048, 1, "fetch and map 1 GiB, pages of 2 MiB, 1 thread"),
    (MemoryBacking::Hugetlb2M, 2048, 2, "fetch and map 1 GiB, pages of 2 MiB, 2 threads"),
    (MemoryBacking::Hugetlb1G, 1 << 20, 1, "fetch and map 1 GiB, pages of 1 GiB, 1 thread"),
    (MemoryBacking::Hugetlb1G, 1 << 20, 2, "fetch and map 1 GiB, pages of 1 GiB, 2 threads"),
];

impl Bench {
    /// Takes the times of all kinds of pages that the host can set aside.
    pub(crate) fn memory(&mut self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        // The largest pages first: what the others leave behind lies all over the host's memory.
        for (backing, page_kib, threads, what) in ROWS.into_iter().rev() {
            let pages = (SIZES_MIB[1] << 10).checked_div(page_kib).unwrap_or(0);
            if page_kib > 0 && !self.reserve(page_kib, pages)? {
                println!("skipped: {what}: the host has not {pages} pages of that size together");
                continue;
            }
            let mut times = Vec::new();
            for mib in SIZES_MIB {
                times.push(self.start_with(backing, mib, threads)?.as_secs_f64());
            }
            if page_kib > 0 {
                self.reserve(page_kib, 0)?;
            }
            rows.push(Row { what, unit: "s", ours: times[1] - times[0], peers: None });
        }
        rows.reverse();
        Ok(rows)
    }

    /// Sets huge pages aside; false when the host has not got as many.
    fn reserve(&mut self, page_kib: u64, pages: u64) -> Result<bool> {
        let file = format!("{HUGE_PAGES}{page_kib}kB/nr_hugepages");
        self.bed.write(&file, pages.to_string().as_bytes())?;
        Ok(self.bed.text(&file)?.parse::<u64>()? == pages)
    }

    /// Returns how long a machine with a device of small BARs takes to its first instruction.
    fn start_with(&mut self, backing: MemoryBacking, mib: u64, threads: usize) -> Result<Duration> {
        let mut all = Vec::new();
        for _ in 0..self.runs {
            let mut plan = self.own_plan(FIRST_BOOT, 0)?;
            if let Some((address, path)) = self.paths.get(1) {
                plan.pass(address.parse()?, path);
            }
            plan.spec.memory_mib = Mebibytes(mib);
            plan.spec.memory_backing = backing;
            plan.spec.host_memory =
                vec![HostMemory { node: None, memory_mib: Mebibytes(mib), cpus: vec![0; threads] }];
            all.push(self.bed.measure(&plan, &[payload::FIRST], LIMIT)?);
        }
        Ok(Duration::from_secs_f64(Medians::of(&all)?.seconds))
    }
}
