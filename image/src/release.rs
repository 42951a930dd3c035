//! Which release this is: version, commit and time, from the checkout.

use std::path::Path;

use crate::tools;

/// Time of a release whose checkout says nothing: 2025-11-01, before the first one.
const UNKNOWN_TIME: u64 = 1_761_955_200;

/// What a build says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Version of the workspace.
    pub version: String,
    /// Commit, with `-modified` when the checkout differs from it, or `unknown`.
    pub commit: String,
    /// Seconds since 1970 of the commit. No other time gets into the image.
    pub time: u64,
}

impl Release {
    /// Asks git about `workspace`.
    pub fn of(workspace: &Path) -> Self {
        let git = |arguments: &[&str]| {
            let mut command = tools::command("git");
            command.arg("-C").arg(workspace).args(arguments);
            tools::output(&mut command).ok()
        };
        let commit = git(&["rev-parse", "HEAD"]);
        let changes = git(&["status", "--porcelain"]);
        let time = git(&["log", "-1", "--format=%ct"]).and_then(|text| text.trim().parse().ok());
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: describe(commit.as_deref(), changes.as_deref()),
            time: time.unwrap_or(UNKNOWN_TIME),
        }
    }

    /// The text of `/etc/os-release` (os-release(5)), which the UKI carries too.
    pub fn os_release(&self) -> String {
        let Self { version, commit, time } = self;
        format!(
            "ID=holdfast\n\
             NAME=Holdfast\n\
             PRETTY_NAME=\"Holdfast {version}\"\n\
             VERSION_ID={version}\n\
             BUILD_ID={commit}\n\
             HOLDFAST_BUILD_TIME={time}\n"
        )
    }

    /// The time as RFC 3339.
    pub fn timestamp(&self) -> String {
        i64::try_from(self.time)
            .ok()
            .and_then(|seconds| jiff::Timestamp::from_second(seconds).ok())
            .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
            .to_string()
    }
}

/// Returns the time in the text of an `os-release`; that of a release that says nothing if there is none.
pub(crate) fn time_of(os_release: &str) -> u64 {
    let line = os_release.lines().find_map(|line| line.strip_prefix("HOLDFAST_BUILD_TIME="));
    line.and_then(|seconds| seconds.parse().ok()).unwrap_or(UNKNOWN_TIME)
}

fn describe(commit: Option<&str>, changes: Option<&str>) -> String {
    match (commit, changes) {
        (Some(commit), Some("")) => commit.trim().to_owned(),
        (Some(commit), _) => format!("{}-modified", commit.trim()),
        (None, _) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_checkout_says_so() {
        assert_eq!(describe(Some("abc\n"), Some("")), "abc");
        assert_eq!(describe(Some("abc\n"), Some(" M x\n")), "abc-modified");
        assert_eq!(describe(None, None), "unknown");
    }

    #[test]
    fn the_time_is_rfc_3339() {
        let release =
            Release { version: "1".to_owned(), commit: "c".to_owned(), time: UNKNOWN_TIME };
        assert_eq!(release.timestamp(), "2025-11-01T00:00:00Z");
        let text = Release { time: 77, ..release }.os_release();
        assert_eq!((time_of(&text), time_of("ID=other")), (77, UNKNOWN_TIME));
    }
}
