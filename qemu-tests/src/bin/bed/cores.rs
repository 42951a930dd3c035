//! Which threads may share a core: core scheduling as the kernel has it.
//! Source: Linux Documentation/admin-guide/hw-vuln/core-scheduling.rst, "Usage".

use std::fs;

use anyhow::{Context, Result};
use qemu_tests::bed::protocol::{Answer, Thread};
use rustix::thread::{CoreSchedulingScope, Pid, core_scheduling_cookie};

/// Tells all threads of the host. One that ends meanwhile is left out.
pub(crate) fn threads() -> Result<Answer> {
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
    let mut threads = Vec::new();
    for process in fs::read_dir("/proc")?.flatten().filter_map(number) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for thread in tasks.flatten().filter_map(number) {
            let Ok(name) = fs::read_to_string(format!("/proc/{process}/task/{thread}/comm")) else {
                continue;
            };
            let id = Pid::from_raw(thread).context("threads have numbers")?;
            let cookie = core_scheduling_cookie(id, CoreSchedulingScope::Thread)
                .with_context(|| format!("the cookie of {}", name.trim()))?;
            let (process, name) = (process.unsigned_abs(), name.trim().to_owned());
            threads.push(Thread { process, name, cookie });
        }
    }
    Ok(Answer::Threads { threads })
}
