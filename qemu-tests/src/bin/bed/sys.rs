//! Breaks memory of guests, as a bit that flips where no code can mend it does.
//! Source: madvise(2), `MADV_HWPOISON`.

use std::{fs::File, ptr};

use anyhow::Result;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Size of a page.
const PAGE: usize = 4096;

/// Breaks the page at `place` of the memory behind `file`.
pub(crate) fn break_page(file: &File, place: u64) -> Result<()> {
    let start = place - place % u64::try_from(PAGE)?;
    // SAFETY: the kernel chooses where; nobody else knows of the place, and nothing is read or written there.
    let mapped =
        unsafe { mmap(ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED, file, start)? };
    // SAFETY: that page is mapped, and touched by nobody before it is unmapped.
    unsafe {
        let told = madvise(mapped, PAGE, Advice::LinuxHwPoison);
        munmap(mapped, PAGE)?;
        Ok(told?)
    }
}
