//! What the TPM will hold, compared with Debian's systemd-measure. Its sections come in the same order
//! as those of newer stubs, which measure more of them.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use image::pcr;

/// Where Debian keeps it.
const TOOL: &str = "/usr/lib/systemd/systemd-measure";

#[test]
fn another_tool_predicts_the_same() {
    if !Path::new(TOOL).exists() {
        println!("skipped: predictions of the TPM's state: {TOOL} is not there");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let sections = BTreeMap::from([
        (".linux", vec![9; 70_001]),
        (".osrel", b"ID=holdfast\n".to_vec()),
        (".cmdline", b"quiet".to_vec()),
        (".initrd", vec![7; 4096]),
        (".pcrpkey", b"-----BEGIN PUBLIC KEY-----\n".to_vec()),
    ]);
    let mut tool = Command::new(TOOL);
    tool.args(["calculate", "--bank=sha256", "--phase=:"]);
    for (name, content) in &sections {
        let path = folder.path().join(&name[1..]);
        fs::write(&path, content).unwrap();
        tool.arg(format!("--{}={}", &name[1..], path.display()));
    }
    let output = tool.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ours = pcr::measure(|name| sections.get(name).map(Vec::as_slice));
    let ours: String = ours.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(said.contains(&format!("sha256={ours}")), "{said}");
}
