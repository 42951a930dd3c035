//! Tries new network configurations, and brings the last good one back: files and a clock round
//! [`Trials`].

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;
use types::config::Network;

use crate::{
    events::Event,
    init::boot::chain,
    net::{
        Uplinks,
        trial::{Change, Contact, Record, Trials},
    },
};

/// What is remembered, in the state folder.
const FILE: &str = "network.toml";
/// How often the outside is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The network configurations of a node, and what is remembered of them.
#[derive(Debug)]
pub struct Keeper {
    trials: Trials,
    file: PathBuf,
}

impl Keeper {
    /// Begins with what the document wants. A record that cannot be read is as good as none.
    pub fn load(state: &Path, wanted: &Network) -> Self {
        let file = state.join(FILE);
        let record = match fs::read_to_string(&file) {
            Ok(text) => toml::from_str::<Record>(&text).unwrap_or_else(|error| {
                let reason = format!("{}: {}", file.display(), error.message());
                eprintln!("{}", Event::Trouble { place: "network", reason });
                Record::default()
            }),
            Err(_) => Record::default(),
        };
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let trials = Trials::new(wanted.clone(), record, boot.trim(), Instant::now());
        let mut keeper = Self { trials, file };
        keeper.save();
        keeper
    }

    /// Returns the configuration to start with.
    pub fn network(&self) -> &Network {
        self.trials.network()
    }

    /// Goes on until the process ends. `is_reached` tells whether the node is in touch with the
    /// gateway; `notice` is what people should know.
    pub async fn run(
        mut self,
        uplinks: Arc<Uplinks>,
        is_reached: impl Fn() -> bool,
        notice: watch::Sender<Option<String>>,
    ) {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            notice.send_if_modified(|told| {
                let now = self.trials.notice();
                let changed = *told != now;
                if let (true, Some(reason)) = (changed, &now) {
                    eprintln!("{}", Event::Trouble { place: "network", reason: reason.clone() });
                }
                *told = now;
                changed
            });
            tick.tick().await;
            let found = if is_reached() { Contact::Reached } else { Contact::Lost };
            self.trials.handle_look(Instant::now(), found);
            if self.trials.handle_timeout(Instant::now()) == Change::Other
                && let Err(error) = uplinks.reconfigure(self.trials.network())
            {
                eprintln!("{}", Event::Trouble { place: "network", reason: chain(&error) });
            }
            self.save();
        }
    }

    fn save(&mut self) {
        let Some(record) = self.trials.poll_record() else { return };
        if let Err(error) = write(&self.file, &record) {
            let reason = format!("{} is not written: {error}", self.file.display());
            eprintln!("{}", Event::Trouble { place: "network", reason });
        }
    }
}

fn write(file: &Path, record: &Record) -> io::Result<()> {
    let text = toml::to_string(record).map_err(io::Error::other)?;
    let partial = file.with_extension("new");
    let mut new = fs::File::create(&partial)?;
    new.write_all(text.as_bytes())?;
    new.sync_all()?;
    fs::rename(&partial, file)?;
    fs::File::open(file.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_outlives_the_process_and_rubbish_does_not_stop_it() {
        let state = tempfile::tempdir().expect("a directory");
        let named = |name: &str| Network { interface: Some(name.to_owned()), ..Network::default() };
        let mut first = Keeper::load(state.path(), &named("a"));
        let now = Instant::now();
        first.trials.handle_look(now, Contact::Reached);
        first.trials.handle_look(now + Duration::from_secs(60), Contact::Reached);
        first.save();
        let mut second = Keeper::load(state.path(), &named("b"));
        assert_eq!(second.network(), &named("b"));
        second.trials.handle_timeout(Instant::now() + Duration::from_secs(9999));
        second.save();
        assert_eq!(Keeper::load(state.path(), &named("b")).network(), &named("a"));
        fs::write(state.path().join(FILE), "rubbish").expect("written");
        assert_eq!(Keeper::load(state.path(), &named("b")).network(), &named("b"));
    }
}
