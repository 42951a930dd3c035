//! The same kernel as a program of this machine: User-Mode Linux, for measurements at the speed of
//! the machine's own processors. It is never part of an image.
//!
//! Its configuration is the architecture's default with our fragments over it; what they ask for and
//! that architecture does not have is left out.
//! Source: Linux `Documentation/virt/uml/user_mode_linux_howto_v2.rst`.

use std::path::{Path, PathBuf};

use super::{
    Builder, KernelError, Target, file, fs, kconfig, key, read, read_fragments, requests,
    store_files, toolchain, tools, write,
};
use crate::{
    debian::Archive,
    progress::{Outcome, Progress, Step},
};

/// Raised when a change of this file changes what comes out for the same fragments and source.
const RECIPE: u32 = 1;
/// What only this architecture has: network interfaces over taps of the machine, and consoles.
const OWN: &str = "\
CONFIG_UML_NET_VECTOR=y
CONFIG_STDERR_CONSOLE=y
CONFIG_SSL=y
CONFIG_NULL_CHAN=y
";
/// Where programs are told where the vDSO is, and how that line begins. This architecture's has no
/// `getcpu`, which rustix insists on where there is a vDSO at all; without the line there is none.
const VDSO: (&str, &str) = ("arch/x86/um/asm/elf.h", "#define ARCH_DLINFO");
/// Makes a program of a kernel.
const PROGRAM: Target = Target {
    architecture: "um",
    out: "kernel-build/out-um",
    goal: "linux",
    log: "kernel-build/build-um.log",
};

impl Builder<'_> {
    /// The program for today's newest source, from the cache when it is there.
    pub(crate) fn build_program(
        &self,
        archive: &Archive,
        progress: &dyn Progress,
    ) -> Result<PathBuf, KernelError> {
        progress.started(Step::Kernel);
        let fragments = read_fragments(self.fragments)?;
        let (package, version) = archive.newest_kernel_source()?;
        let recipe = format!("um {RECIPE}\n{OWN}{}", toolchain()?);
        let entry = self.cache.join("kernel-um").join(key(&fragments, &package, &version, &recipe));
        let program = entry.join("linux");
        if program.is_file() {
            progress.finished(Step::Kernel, Outcome::Cached);
            return Ok(program);
        }
        let source = archive.fetch(&package, &version)?;
        let tree = self.source_tree(archive, &source, progress)?;
        without_line(&tree.join(VDSO.0), VDSO.1)?;
        let out = self.cache.join(PROGRAM.out);
        fs::create_dir_all(&out).map_err(file("create", &out))?;
        tools::output(self.make(&PROGRAM, &tree, &out).arg("defconfig"))?;
        let config = out.join(".config");
        let wanted = kconfig::merged(&requests(&fragments)?);
        write(&config, &format!("{}{wanted}{OWN}", read(&config)?))?;
        tools::output(self.make(&PROGRAM, &tree, &out).arg("olddefconfig"))?;
        self.run_make(&PROGRAM, &tree, &out, progress)?;
        store_files(&out, &entry, &[("linux", "linux"), (".config", "config")])?;
        progress.finished(Step::Kernel, Outcome::Built);
        Ok(program)
    }
}

/// Removes the lines of a file that begin so.
fn without_line(path: &Path, begin: &str) -> Result<(), KernelError> {
    let text = read(path)?;
    let kept: String = text.split_inclusive('\n').filter(|line| !line.starts_with(begin)).collect();
    if kept == text { Ok(()) } else { write(path, &kept) }
}
