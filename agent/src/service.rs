//! The agent's start: parts are made here and handed to each other, nothing else happens.

use crate::{events::Event, spawn, sys};

/// Runs the agent until it is told to end.
pub fn main() {
    let Some(init) = sys::descriptor::inherited(spawn::AGENT_FD) else {
        eprintln!("agent: descriptor 3 is not open; this program is started by init");
        std::process::exit(1);
    };
    eprintln!("{}", Event::AgentReady { machines: 0 });
    loop {
        let _ = spawn::send(&init, &spawn::Request::Alive, &[]);
        std::thread::sleep(std::time::Duration::from_secs(10));
    }
}
