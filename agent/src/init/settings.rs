//! Kernel settings that the configuration and command line cannot make: the table in
//! `rootfs/sysctl.txt`, which carries the reasons.

use std::{fs, io};

/// The table: `file=value  # reason`, one in a line; comments and empty lines between.
const TABLE: &str = include_str!("../../../rootfs/sysctl.txt");

/// One setting.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// Path under `/proc/sys`.
    pub path: &'static str,
    /// What is written.
    pub value: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// Returns every setting.
pub fn all() -> impl Iterator<Item = Setting> {
    TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let (setting, reason) = line.split_once('#')?;
        let (path, value) = setting.trim().split_once('=')?;
        Some(Setting { path, value, reason: reason.trim() })
    })
}

/// Makes every setting. Returns those that could not be made.
pub fn apply() -> Vec<(Setting, io::Error)> {
    let write = |setting: Setting| {
        // Some files take a word only with the end of its line.
        let line = format!("{}\n", setting.value);
        let result = fs::write(format!("/proc/sys/{}", setting.path), line);
        result.err().map(|error| (setting, error))
    };
    all().filter_map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_a_setting_with_a_reason() {
        let lines = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        assert_eq!(all().count(), lines.count());
        assert!(all().all(|setting| !setting.path.is_empty() && !setting.reason.is_empty()));
        let printk = all().find(|setting| setting.path == "kernel/printk");
        assert_eq!(printk.map(|setting| setting.value), Some("6 5 1 6"));
    }
}
