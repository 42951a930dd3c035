//! The ratchet of the kernel's hardening: its score never falls, and what is not met has a reason.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use image::Artifacts;
use image::hardening::{Kind, Subject, check, waivers};

const WAIVED: &str = include_str!("../../kernel-config/hardening.waived");
const SYSCTL: &str = include_str!("../../rootfs/sysctl.txt");

/// Checks that are met, of each kind. They may only grow.
const SCORE: [(Kind, usize); 3] = [(Kind::Kconfig, 229), (Kind::Cmdline, 59), (Kind::Sysctl, 37)];

#[test]
fn the_kernel_is_as_hard_as_it_was_and_what_it_lacks_has_a_reason() {
    let folder = std::env::var_os("HOLDFAST_IMAGE").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/image"),
        PathBuf::from,
    );
    let built = Artifacts::in_folder(&folder);
    let Ok(kconfig) = fs::read_to_string(&built.kernel_config) else {
        println!("skipped: the kernel's hardening: no image in {}", folder.display());
        return;
    };
    let cmdline = fs::read_to_string(&built.cmdline).unwrap();
    let subject = Subject { kconfig: &kconfig, cmdline: &cmdline, sysctl: SYSCTL };
    let work = tempfile::tempdir().unwrap();
    let verdicts = check(&image::default_cache(), work.path(), subject).unwrap();
    let waivers = waivers(WAIVED).unwrap();
    let unmet: BTreeSet<String> =
        verdicts.iter().filter(|verdict| !verdict.met).map(|v| v.check()).collect();
    let waived: BTreeSet<String> = waivers.into_iter().map(|waiver| waiver.check).collect();
    let score = SCORE.map(|(kind, _)| {
        let met = verdicts.iter().filter(|verdict| verdict.kind == kind && verdict.met).count();
        let all = verdicts.iter().filter(|verdict| verdict.kind == kind).count();
        println!("{kind:?}: {met} of {all} checks are met");
        (kind, met)
    });
    let without_reason: Vec<_> = unmet.difference(&waived).collect();
    assert!(without_reason.is_empty(), "not met, and without a reason: {without_reason:#?}");
    let met_by_now: Vec<_> = waived.difference(&unmet).collect();
    assert!(met_by_now.is_empty(), "met, so that no reason is needed: {met_by_now:#?}");
    assert_eq!(score, SCORE, "the score; if it grew, let it stay so");
}
