//! Kernel settings that the configuration and command line cannot make, one table.

use std::{fs, io};

/// One setting: file under /proc/sys, value, and why.
#[derive(Debug)]
pub struct Setting {
    /// Path under `/proc/sys`.
    pub path: &'static str,
    /// What is written.
    pub value: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// Every setting.
pub const SETTINGS: &[Setting] = &[
    Setting {
        path: "kernel/printk",
        value: "6 5 1 6",
        reason: "notices, as which our events are written, reach the consoles",
    },
    Setting {
        path: "kernel/printk_devkmsg",
        value: "on\n",
        reason: "init limits lines itself, per process, and counts what it leaves out",
    },
    Setting {
        path: "kernel/panic",
        value: "10",
        reason: "a kernel that panicked restarts after ten seconds",
    },
    Setting { path: "kernel/panic_on_oops", value: "1", reason: "damaged kernels stop" },
    Setting { path: "kernel/kptr_restrict", value: "2", reason: "no addresses for anybody" },
    Setting { path: "kernel/yama/ptrace_scope", value: "3", reason: "no process traces another" },
    Setting { path: "fs/protected_hardlinks", value: "1", reason: "only own files are linked to" },
    Setting { path: "fs/protected_symlinks", value: "1", reason: "/tmp holds no traps" },
    Setting { path: "fs/protected_fifos", value: "2", reason: "likewise" },
    Setting { path: "fs/protected_regular", value: "2", reason: "likewise" },
    Setting { path: "fs/suid_dumpable", value: "0", reason: "nothing of root's is dumped" },
    Setting {
        path: "vm/overcommit_memory",
        value: "0",
        reason: "guest memory is reserved by the VMM, the rest may be promised",
    },
    Setting {
        path: "vm/max_map_count",
        value: "1048576",
        reason: "many devices and memory regions in one VMM",
    },
];

/// Makes every setting. Returns those that could not be made.
pub fn apply() -> Vec<(&'static Setting, io::Error)> {
    let write = |setting: &'static Setting| {
        let result = fs::write(format!("/proc/sys/{}", setting.path), setting.value);
        result.err().map(|error| (setting, error))
    };
    SETTINGS.iter().filter_map(write).collect()
}
