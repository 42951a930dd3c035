//! What keys do: go from page to page and up and down. Pure.

use ratatui::crossterm::event::KeyCode;
use types::logs::Level;

/// Lines that a page key moves.
const PAGE_STEP: u16 = 10;

/// The pages, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tab {
    /// Who and where the node is.
    #[default]
    Node,
    /// Devices, expected and found.
    Devices,
    /// Machines and leases.
    Machines,
    /// Other members.
    Overlay,
    /// The log.
    Log,
    /// The configuration's values.
    Config,
    /// What the keys do.
    Help,
}

impl Tab {
    /// Every page.
    pub const ALL: [Self; 7] = [
        Self::Node,
        Self::Devices,
        Self::Machines,
        Self::Overlay,
        Self::Log,
        Self::Config,
        Self::Help,
    ];

    /// Returns the page's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Devices => "Devices",
            Self::Machines => "Machines",
            Self::Overlay => "Overlay",
            Self::Log => "Log",
            Self::Config => "Config",
            Self::Help => "Help",
        }
    }

    fn turned(self, by: usize) -> Self {
        let at = Self::ALL.iter().position(|tab| *tab == self).unwrap_or(0);
        Self::ALL[(at + by) % Self::ALL.len()]
    }
}

/// Where the reader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The page.
    pub tab: Tab,
    /// Lines of it that are scrolled away: from its start, or on the log from its end.
    pub scroll: u16,
    /// Lines of the log that matter less are left out.
    pub level: Level,
}

impl Default for View {
    fn default() -> Self {
        Self { tab: Tab::Node, scroll: 0, level: Level::Notice }
    }
}

/// What follows from a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing beyond the view.
    Stay,
    /// The whole screen is drawn anew.
    Redraw,
    /// Lines of another level are wanted.
    Level(Level),
}

impl View {
    /// Handles a key.
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "all other keys do nothing, whatever they are"
    )]
    pub fn handle_key(&mut self, key: KeyCode) -> Step {
        let last = Tab::ALL.len() - 1;
        // The newest line of the log is at the bottom, so there up means further from its end.
        let log = self.tab == Tab::Log;
        let scrolled = |by: u16, up: Up| match (up, log) {
            (Up::Yes, true) | (Up::No, false) => self.scroll.saturating_add(by),
            (Up::No, true) | (Up::Yes, false) => self.scroll.saturating_sub(by),
        };
        match key {
            KeyCode::Tab | KeyCode::Right | KeyCode::Char('n') => self.open(self.tab.turned(1)),
            KeyCode::BackTab | KeyCode::Left | KeyCode::Char('p') => {
                self.open(self.tab.turned(last));
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.open(Tab::Help),
            KeyCode::Char(digit @ '1'..='7') => {
                let index = usize::from(u8::try_from(digit).unwrap_or(b'1') - b'1');
                self.open(Tab::ALL[index]);
            }
            KeyCode::Up | KeyCode::Char('k') => self.scroll = scrolled(1, Up::Yes),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = scrolled(1, Up::No),
            KeyCode::PageUp => self.scroll = scrolled(PAGE_STEP, Up::Yes),
            KeyCode::PageDown => self.scroll = scrolled(PAGE_STEP, Up::No),
            KeyCode::Home | KeyCode::End => self.scroll = 0,
            KeyCode::Char('l') if log => {
                let at = Level::ALL.iter().position(|level| *level == self.level).unwrap_or(0);
                self.level = Level::ALL[(at + 1) % Level::ALL.len()];
                self.scroll = 0;
                return Step::Level(self.level);
            }
            KeyCode::Char('r') => return Step::Redraw,
            _ => {}
        }
        Step::Stay
    }

    fn open(&mut self, tab: Tab) {
        (self.tab, self.scroll) = (tab, 0);
    }
}

#[derive(Clone, Copy)]
enum Up {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_go_round_the_pages() {
        let mut view = View::default();
        let visited: Vec<_> = Tab::ALL
            .iter()
            .map(|_| {
                view.handle_key(KeyCode::Tab);
                view.tab
            })
            .collect();
        assert_eq!(visited.last(), Some(&Tab::Node));
        assert_eq!(visited[..6], Tab::ALL[1..]);
        view.handle_key(KeyCode::BackTab);
        assert_eq!(view.tab, Tab::Help);
        view.handle_key(KeyCode::Char('3'));
        assert_eq!(view.tab, Tab::Machines);
    }

    #[test]
    fn scrolling_ends_at_the_start_and_starts_over_on_another_page() {
        let mut view = View::default();
        view.handle_key(KeyCode::Up);
        assert_eq!(view.scroll, 0);
        view.handle_key(KeyCode::PageDown);
        view.handle_key(KeyCode::Down);
        assert_eq!(view.scroll, 11);
        view.handle_key(KeyCode::Char('5'));
        assert_eq!((view.tab, view.scroll), (Tab::Log, 0));
        view.handle_key(KeyCode::PageUp);
        assert_eq!(view.scroll, 10);
    }

    #[test]
    fn levels_go_round_on_the_log_only() {
        let mut view = View::default();
        assert_eq!(view.handle_key(KeyCode::Char('l')), Step::Stay);
        view.handle_key(KeyCode::Char('5'));
        assert_eq!(view.handle_key(KeyCode::Char('l')), Step::Level(Level::Info));
        assert_eq!(view.handle_key(KeyCode::Char('r')), Step::Redraw);
    }
}
