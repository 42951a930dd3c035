//! User-Mode Linux as a second kernel for tests whose device drivers this machine's kernel lacks.
//!
//! The test program runs itself again inside, as root, on this machine's files (read-only), with
//! modules of its own. Nothing of the machine's network is touched.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Debian's package puts the kernel and its modules here.
const KERNEL: &str = "/usr/bin/linux.uml";
const MODULES: &str = "/usr/lib/uml/modules";
/// Is in the environment of a test that runs inside.
const INSIDE: &str = "HOLDFAST_INSIDE_UML";
/// What the script says when the test has passed.
const PASSED: &str = "uml: the test has passed";
/// What kernels before 6.13 say of processors whose registers are larger than their room for them
/// (arch/x86/um/os-Linux/registers.c); Debian 12's is one of them.
const TOO_LARGE: &str = "ptrace set fp regs failed, errno = 14";
/// Seconds; booting takes two.
const PATIENCE: &str = "170";

/// Returns whether the test goes on here: it does when this kernel has what is needed, which
/// `probe` tells, and inside. Otherwise it has been run inside by now, or is skipped.
pub(crate) fn is_here(test: &str, modules: &[&str], probe: impl Fn() -> bool) -> bool {
    if std::env::var_os(INSIDE).is_some() || probe() {
        return true;
    }
    if !Path::new(KERNEL).exists() {
        println!(
            "skipped: {test}: this kernel lacks {}; needs user-mode-linux",
            modules.join(" and ")
        );
        return false;
    }
    run_inside(test, modules);
    false
}

fn run_inside(test: &str, modules: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("init");
    let program = std::env::current_exe().unwrap();
    let load: String =
        load_order(modules).iter().map(|module| format!("insmod {}\n", module.display())).collect();
    let text = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin {INSIDE}=1 RUST_BACKTRACE=1\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run\n\
         {load}{} --exact {test} --nocapture --test-threads 1 2>&1 && echo '{PASSED}'\n\
         echo o > /proc/sysrq-trigger; sleep 20\n",
        program.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new("timeout")
        .args([PATIENCE, KERNEL, "mem=256M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"])
        .args(["con=null", "con0=fd:0,fd:1"])
        .arg(format!("init={}", script.display()))
        // Its sockets and memory go where they are removed.
        .env("TMPDIR", folder.path())
        .env("HOME", folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    if said.contains(TOO_LARGE) {
        println!(
            "skipped: {test}: {KERNEL} cannot run on a processor with AMX, whose registers do not fit"
        );
        return;
    }
    assert!(said.contains(PASSED), "inside User-Mode Linux:\n{said}");
    println!("{test}: passed inside User-Mode Linux");
}

/// Returns the files of the modules, each after those it needs.
fn load_order(modules: &[&str]) -> Vec<PathBuf> {
    let version = fs::read_dir(MODULES).unwrap().next().unwrap().unwrap().path();
    let list = fs::read_to_string(version.join("modules.dep")).unwrap();
    let mut order: Vec<PathBuf> = Vec::new();
    let mut seen = BTreeSet::new();
    for module in modules {
        let file = format!("/{module}.ko");
        let line = list.lines().find(|line| line.split(':').next().unwrap().ends_with(&file));
        let line = line.unwrap_or_else(|| panic!("there is no module {module}"));
        let (own, needs) = line.split_once(':').unwrap();
        // The list names what must be there first last.
        for part in needs.split_whitespace().rev().chain([own]) {
            if seen.insert(part.to_owned()) {
                order.push(version.join(part));
            }
        }
    }
    order
}
