//! The pages, drawn from what the agent told. Pure.

mod devices;
mod node;
mod rest;

use std::collections::VecDeque;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::Paragraph,
};
use types::{
    logs::{Level, LogLine},
    status::NodeStatus,
};

use super::{
    keys::{Tab, View},
    text::{plain, span},
};

/// Most lines of the log that are kept to be looked at.
const MAX_LINES: usize = 1000;

/// Columns that a page's words may take; nothing is wider than this.
const MAX_WIDTH: usize = 240;

/// Longest value that is shown, in characters: longer than any refusal, with its advice, of the node's own.
const MAX_VALUE: usize = 2000;

/// Width of the names before values.
const NAMES: usize = 13;

/// What the agent told.
#[derive(Debug, Default)]
pub struct Known {
    /// How the node is, when it was told last.
    pub status: Option<NodeStatus>,
    /// Why the agent does not answer now.
    pub silent: Option<String>,
    /// Lines of the log, the newest last.
    pub lines: VecDeque<LogLine>,
}

impl Known {
    /// The agent told how the node is.
    pub fn handle_status(&mut self, status: NodeStatus) {
        (self.status, self.silent) = (Some(status), None);
    }

    /// The agent did not answer.
    pub fn handle_silence(&mut self, reason: String) {
        self.silent = Some(reason);
    }

    /// The agent told lines of its log.
    pub fn handle_lines(&mut self, lines: Vec<LogLine>) {
        self.lines.extend(lines);
        let surplus = self.lines.len().saturating_sub(MAX_LINES);
        self.lines.drain(..surplus);
    }
}

/// Draws the page that the reader is on. A view that scrolled past the page's end is set back.
pub fn draw(frame: &mut Frame<'_>, known: &Known, view: &mut View) {
    let rows = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ]);
    let [title, tabs, page, foot] = rows.areas(frame.area());
    frame.render_widget(Paragraph::new(title_line(known, title.width)).style(BAR), title);
    frame.render_widget(Paragraph::new(tab_line(view.tab)), tabs);
    let lines = lines(known, view, page);
    let hidden = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(page.height);
    view.scroll = view.scroll.min(hidden);
    let from = if view.tab == Tab::Log { hidden - view.scroll } else { view.scroll };
    let shown: Vec<_> =
        lines.into_iter().skip(usize::from(from)).take(usize::from(page.height)).collect();
    frame.render_widget(Paragraph::new(shown), page);
    frame.render_widget(Paragraph::new(foot_line(view, hidden)).style(BAR), foot);
}

/// The bars at the top and the bottom.
const BAR: Style = Style::new().fg(Color::Black).bg(Color::Gray);
/// Names before values.
const NAME: Style = Style::new().fg(Color::Cyan);
/// What is as it should be.
const GOOD: Style = Style::new().fg(Color::Green);
/// What somebody should look at.
const LOOK: Style = Style::new().fg(Color::Yellow);
/// What does not work.
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
/// Everything else.
const WORDS: Style = Style::new();
/// Heads of tables.
const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);

fn title_line(known: &Known, width: u16) -> String {
    let width = usize::from(width);
    let Some(status) = &known.status else { return plain(" Holdfast", width) };
    let name = if status.name.is_empty() { "(no name)" } else { &status.name };
    let left = format!(" Holdfast {}  {name}", plain(&status.release, 20));
    let right =
        format!("up {}  {} UTC ", span(status.uptime_ms / 1000), super::text::time(status.time));
    let space = width.saturating_sub(right.len() + 1);
    format!("{:<space$} {right}", plain(&left, space))
}

fn tab_line(chosen: Tab) -> Line<'static> {
    let mut spans = vec![Span::raw(" ")];
    for (number, tab) in (1..).zip(Tab::ALL) {
        let style =
            if tab == chosen { Style::new().add_modifier(Modifier::REVERSED) } else { NAME };
        spans.push(Span::styled(format!(" {number} {} ", tab.name()), style));
    }
    Line::from(spans)
}

fn foot_line(view: &View, hidden: u16) -> String {
    let more = if hidden == 0 {
        String::new()
    } else {
        format!("  up/down: {} of {hidden} lines", view.scroll)
    };
    let level = if view.tab == Tab::Log {
        format!("  l: {} and worse", view.level.name())
    } else {
        String::new()
    };
    format!(" tab, 1-7: pages  r: redraw  ?: help{level}{more}")
}

fn lines(known: &Known, view: &View, area: Rect) -> Vec<Line<'static>> {
    let width = usize::from(area.width).min(MAX_WIDTH);
    let mut page = PageLines { width, lines: Vec::new() };
    if let Some(reason) = &known.silent {
        page.row("agent", &format!("does not answer: {reason}"), BAD);
    }
    match (view.tab, &known.status) {
        (Tab::Help, _) => rest::help(&mut page),
        (Tab::Log, _) => rest::log(&mut page, &known.lines),
        (_, None) if known.silent.is_none() => page.say("waiting for the agent ...", WORDS),
        (_, None) => {}
        (Tab::Node, Some(status)) => node::draw(&mut page, status),
        (Tab::Devices, Some(status)) => devices::draw(&mut page, status),
        (Tab::Machines, Some(status)) => rest::machines(&mut page, status),
        (Tab::Overlay, Some(status)) => rest::overlay(&mut page, status),
        (Tab::Config, Some(status)) => node::settings(&mut page, status),
    }
    page.lines
}

/// The lines of a page as they come.
struct PageLines {
    width: usize,
    lines: Vec<Line<'static>>,
}

impl PageLines {
    /// Adds a name and its value.
    fn row(&mut self, name: &str, value: &str, style: Style) {
        self.flow(Span::styled(format!(" {name:<NAMES$}"), NAME), value, style);
    }

    /// Adds a head and what it is about; what is too long for a line goes on below its own begin.
    fn flow(&mut self, mut head: Span<'static>, value: &str, style: Style) {
        let space = self.width.saturating_sub(head.width() + 1).max(8);
        let below = Span::raw(" ".repeat(head.width()));
        let value = plain(value, MAX_VALUE);
        let mut rest = value.as_str();
        loop {
            let (now, later) = wrapped(rest, space);
            self.lines.push(Line::from(vec![head, Span::styled(now.to_owned(), style)]));
            if later.is_empty() {
                return;
            }
            (head, rest) = (below.clone(), later);
        }
    }

    /// Adds a line of its own.
    fn say(&mut self, text: &str, style: Style) {
        let text = format!(" {}", plain(text, self.width.saturating_sub(2)));
        self.lines.push(Line::styled(text, style));
    }

    fn gap(&mut self) {
        self.lines.push(Line::raw(""));
    }
}

/// Splits what fits a line, at a blank where there is one.
fn wrapped(text: &str, space: usize) -> (&str, &str) {
    if text.len() <= space {
        return (text, "");
    }
    let head = &text[..space];
    let at = head.rfind(' ').filter(|at| *at > space / 2).unwrap_or(space);
    (&text[..at], text[at..].trim_start())
}

fn level_style(level: Level) -> Style {
    match level {
        Level::Error => BAD,
        Level::Warning => LOOK,
        Level::Notice | Level::Info | Level::Debug => WORDS,
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
