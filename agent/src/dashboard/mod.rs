//! What somebody in front of the server sees: pages on the Linux console, keys to go through them,
//! and nothing that changes anything. A process of its own without privileges: it has the terminal
//! as its standard input and output, reads the agent's local interface, and that is all.
//!
//! `pages` and `keys` are pure, `text` makes what others say harmless; `client` asks, and `main`
//! draws. Only ASCII is drawn: the console's font is the firmware's.

mod client;
pub mod keys;
pub mod pages;
pub mod text;

use std::{
    io,
    process::ExitCode,
    sync::mpsc::{Receiver, TryRecvError},
    time::{Duration, Instant},
};

use ratatui::{
    DefaultTerminal, Terminal,
    backend::{Backend, CrosstermBackend},
    crossterm::event::{self, Event as Input, KeyEventKind},
};

use self::{
    keys::{Step, View},
    pages::Known,
};
use crate::init::boot::chain;

/// How long to wait for a key before looking for news.
const TURN: Duration = Duration::from_millis(500);

/// Everything is drawn anew this often: the kernel or a BMC may have written over it.
const REDRAW: Duration = Duration::from_secs(30);

/// Draws until the terminal is gone. Init starts the program again.
pub fn main() -> ExitCode {
    let (news, asking) = match client::start() {
        Ok(started) => started,
        Err(error) => {
            eprintln!("cannot start to ask: {}", chain(&error));
            return ExitCode::FAILURE;
        }
    };
    let result = ratatui::try_init().and_then(|_| draw(&news, &asking));
    ratatui::restore();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the terminal failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Clears the screen and returns a terminal that knows it to be empty. Ratatui's own clearing asks
/// the terminal where the cursor is, and waits for an answer that not all of them give.
fn cleared_terminal() -> io::Result<DefaultTerminal> {
    let mut backend = CrosstermBackend::new(io::stdout());
    backend.clear()?;
    Terminal::new(backend)
}

fn draw(news: &Receiver<client::News>, asking: &client::Asking) -> io::Result<()> {
    // The console has no other screen to draw on: what was there stays until it is cleared.
    let mut terminal = cleared_terminal()?;
    let (mut known, mut view) = (Known::default(), View::default());
    let mut cleared = Instant::now();
    loop {
        loop {
            match news.try_recv() {
                Ok(news) => news.tell(&mut known),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
        if cleared.elapsed() >= REDRAW {
            terminal = cleared_terminal()?;
            cleared = Instant::now();
        }
        terminal.draw(|frame| pages::draw(frame, &known, &mut view))?;
        if !event::poll(TURN)? {
            continue;
        }
        match event::read()? {
            Input::Key(key) if key.kind != KeyEventKind::Release => match view.handle_key(key.code)
            {
                Step::Stay => {}
                Step::Redraw => terminal = cleared_terminal()?,
                Step::Level(level) => asking.ask_level(level),
            },
            Input::Resize(..) => terminal = cleared_terminal()?,
            Input::Key(_)
            | Input::FocusGained
            | Input::FocusLost
            | Input::Mouse(_)
            | Input::Paste(_) => {}
        }
    }
}
