//! The configuration's section `[updates]`, and what a node tells of its updates.

use std::{fmt::Display, ops::RangeInclusive};

use serde::{Deserialize, Deserializer, Serialize, de};

/// Most places of a repository that are configured.
pub const MAX_MIRRORS: usize = 16;

/// Where a node gets releases from. Without this section it is never updated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Updates {
    /// URLs of the repository, `https` or `http`, each with the folders `metadata` and `targets` below
    /// it; the first that answers is used. Nothing that they say is believed without signatures.
    /// Without any, releases come from other nodes and from volumes that somebody plugs in.
    #[serde(default, deserialize_with = "mirrors")]
    pub mirrors: Vec<String>,
    /// Root metadata of the repository (TUF), as its publisher handed it out: the text of its
    /// `root.json`.
    pub root: String,
    /// Channel to follow.
    #[serde(default = "Updates::default_channel")]
    pub channel: String,
    /// Seconds between two looks at the repository, 5 to 604800.
    #[serde(default = "Updates::default_check", deserialize_with = "check")]
    pub check_s: u64,
    /// Seconds that a new release has to bring everything up, 30 to 900, before the node goes back.
    #[serde(default = "Updates::default_gate", deserialize_with = "gate")]
    pub gate_s: u64,
    /// When the node may restart for an update; at any time when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<UpdateWindow>,
    /// Certificates, in PEM, that vouch for the mirrors; the public authorities when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authorities: Option<String>,
}

impl Updates {
    fn default_channel() -> String {
        "stable".to_owned()
    }

    /// An hour: a withdrawn release is left on the same day, and mirrors hardly notice.
    fn default_check() -> u64 {
        3600
    }

    /// Ten minutes: longer than firmware, DHCP and spanning tree take together on large servers.
    fn default_gate() -> u64 {
        600
    }
}

/// A time of each day, in UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpdateWindow {
    /// Its begin, as `02:30`.
    #[serde(deserialize_with = "time_of_day")]
    pub begin: String,
    /// Its length in minutes, 10 to 1440.
    #[serde(deserialize_with = "minutes")]
    pub minutes: u32,
}

impl UpdateWindow {
    /// Returns its begin in seconds after midnight.
    pub fn begin_s(&self) -> u64 {
        parse_time(&self.begin).unwrap_or(0)
    }
}

/// How a node's updates are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdatesView {
    /// In words: what the node does, or waits for; empty when it has no updates.
    #[serde(default)]
    pub state: String,
    /// The slot that it was started from, `A`, `B` or `fallback`; empty when it is not installed.
    #[serde(default)]
    pub slot: String,
    /// The release that is to run, if that is another one than the one that runs.
    #[serde(default)]
    pub offered: String,
    /// Whether the running release is on trial.
    #[serde(default)]
    pub trial: bool,
    /// Whether an operator wants the node to stay on what it runs.
    #[serde(default)]
    pub held: bool,
    /// What came of the last trial.
    #[serde(default)]
    pub last: String,
    /// Releases that failed on this node and are not tried again.
    #[serde(default)]
    pub failed: Vec<FailedRelease>,
    /// Why the repository could not be used when it was looked at last; empty when it could.
    #[serde(default)]
    pub trouble: String,
    /// Looks at the repository since the agent's start.
    #[serde(default)]
    pub checks: u64,
    /// Those that failed.
    #[serde(default)]
    pub failed_checks: u64,
    /// Bytes of programs that were written since the agent's start.
    #[serde(default)]
    pub written_bytes: u64,
    /// Bytes of programs that were fetched for that: less, when the rest was there already.
    #[serde(default)]
    pub fetched_bytes: u64,
    /// Volumes with a repository that are plugged in.
    #[serde(default)]
    pub volumes: Vec<String>,
}

/// A release that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedRelease {
    /// Its name.
    pub release: String,
    /// What was seen.
    pub reason: String,
}

fn mirrors<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let found = Vec::<String>::deserialize(from)?;
    if found.len() > MAX_MIRRORS {
        let found = found.len();
        return Err(de::Error::custom(format!("{found} mirrors; at most {MAX_MIRRORS} are right")));
    }
    let plain = |url: &&String| {
        let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
        rest.is_some_and(|rest| !rest.is_empty() && url.bytes().all(|b| b.is_ascii_graphic()))
    };
    match found.iter().find(|url| !plain(url)) {
        Some(url) => Err(de::Error::custom(format!("{url:?} is no http or https URL"))),
        None => Ok(found),
    }
}

fn check<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    within(from, 5..=604_800)
}

fn gate<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    within(from, 30..=900)
}

fn minutes<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    within(from, 10..=1440)
}

fn within<'de, D, T>(from: D, right: RangeInclusive<T>) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + PartialOrd + Display,
{
    let found = T::deserialize(from)?;
    let wrong = || {
        let (least, most) = (right.start(), right.end());
        de::Error::custom(format_args!("found {found}; {least} to {most} is right"))
    };
    if right.contains(&found) { Ok(found) } else { Err(wrong()) }
}

fn time_of_day<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let found = String::deserialize(from)?;
    match parse_time(&found) {
        Some(_) => Ok(found),
        None => Err(de::Error::custom(format!("{found:?} is no time of day, as 02:30"))),
    }
}

fn parse_time(text: &str) -> Option<u64> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |text: &str, limit: u64| {
        let digits = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|number| digits && *number < limit)
    };
    Some(number(hours, 24)? * 3600 + number(minutes, 60)? * 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rest: &str) -> Result<Updates, toml::de::Error> {
        toml::from_str(&format!("mirrors = [\"https://a.example/r\"]\nroot = '{{}}'\n{rest}"))
    }

    #[test]
    fn a_section_needs_mirrors_and_a_root() {
        let found = parse("").expect("a section");
        assert_eq!((found.channel.as_str(), found.check_s, found.gate_s), ("stable", 3600, 600));
        assert!(toml::from_str::<Updates>("root = ''").is_ok_and(|it| it.mirrors.is_empty()));
        assert!(toml::from_str::<Updates>("mirrors = [\"ftp://a/\"]\nroot = ''").is_err());
        assert!(toml::from_str::<Updates>("mirrors = [\"https://a/\"]").is_err());
    }

    #[test]
    fn times_have_limits() {
        let window = parse("[window]\nbegin = \"23:30\"\nminutes = 60").expect("a window").window;
        assert_eq!(window.map(|window| window.begin_s()), Some(23 * 3600 + 1800));
        for wrong in ["check_s = 4", "gate_s = 901", "windows = 1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        for begin in ["24:00", "2:30", "02:60", "0230", "+1:00"] {
            assert!(parse(&format!("[window]\nbegin = \"{begin}\"\nminutes = 60")).is_err());
        }
        assert!(parse("[window]\nbegin = \"02:00\"\nminutes = 9").is_err());
    }
}
