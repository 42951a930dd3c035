//! `holdfast console -i` on a real terminal: what is typed and shown, and that the terminal is given back at every
//! end.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};

use crate::harness::{
    Serving, lease,
    node::{Manner, Node},
    renter, show, until, within,
};

/// A console at a terminal: its keys, its screen, and the node's end.
struct Desk {
    child: Child,
    /// The terminal as the command has it.
    terminal: OwnedFd,
    keys: tokio::fs::File,
    console: Option<overlay::OverlayStream>,
    _folder: tempfile::TempDir,
}

/// Opens a terminal: the end that people see, and the one that programs do.
fn terminal() -> (OwnedFd, OwnedFd) {
    let people = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&people).unwrap();
    unlockpt(&people).unwrap();
    let name = ptsname(&people, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY;
    (people, rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap())
}

impl Desk {
    async fn open(gateway: &Serving, node: &mut Node, more: &[&str]) -> Self {
        let key = renter(61);
        gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("renter.key");
        gateway::keyfile::create(&file, &key).unwrap();
        let (people, terminal) = terminal();
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command.args(["--gateway", &format!("http://{}", gateway.http), "--key"]).arg(file);
        command.args(["console", "-i", &"01".repeat(16)]).args(more);
        command.stdin(terminal.try_clone().unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.kill_on_drop(true).spawn().unwrap();
        let (request, console) = node.accept().await;
        assert_eq!(request.target, format!("/v1/machines/{}/terminal", "01".repeat(16)));
        let keys = tokio::fs::File::from_std(File::from(people));
        let desk = Self { child, terminal, keys, console: Some(console), _folder: folder };
        until("the terminal is raw", async || !desk.is_cooked()).await;
        desk
    }

    /// Whether lines are edited, echoed, and interrupted by Ctrl-C here.
    fn is_cooked(&self) -> bool {
        let modes = tcgetattr(self.terminal.as_fd()).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn console(&mut self) -> &mut overlay::OverlayStream {
        self.console.as_mut().unwrap()
    }

    async fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).await.unwrap();
        self.keys.flush().await.unwrap();
    }

    async fn typed(&mut self, wanted: &[u8]) {
        let mut typed = vec![0; wanted.len()];
        within("what was typed", self.console().read_exact(&mut typed)).await.unwrap();
        assert_eq!(typed, wanted);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Waits for the command's end; returns its status and what it said.
    async fn ended(self) -> (Option<i32>, String) {
        let Self { child, terminal, keys, console, _folder } = self;
        let output = within("the end", child.wait_with_output()).await.unwrap();
        let modes = tcgetattr(terminal.as_fd()).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
        drop((keys, console));
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

#[tokio::test]
async fn every_key_goes_to_the_machine_and_the_escape_leaves_it() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 62, Manner::Prompt).await;
    let mut desk = Desk::open(&gateway, &mut node, &[]).await;
    desk.console().write_all(b"unlock: ").await.unwrap();
    desk.console().flush().await.unwrap();
    let mut shown = [0; 8];
    let screen = desk.child.stdout.as_mut().unwrap();
    within("the question", screen.read_exact(&mut shown)).await.unwrap();
    assert_eq!(&shown, b"unlock: ");
    // Ctrl-C, Ctrl-D and Ctrl-Z are for the guest; a key that is not the end of a line arrives at once.
    desk.press(b"p~.\x03\x04\x1a").await;
    desk.typed(b"p~.\x03\x04\x1a").await;
    desk.press(b"\r~~x\r").await;
    desk.typed(b"\r~x\r").await;
    desk.press(b"~.").await;
    let (status, said) = desk.ended().await;
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("~. at the start of a line leaves it"), "{said}");
    assert!(said.contains("the machine goes on"), "{said}");
}

#[tokio::test]
async fn another_escape_or_none_is_chosen() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 63, Manner::Prompt).await;
    let mut desk = Desk::open(&gateway, &mut node, &["--escape", "none"]).await;
    desk.press(b"\r~.").await;
    desk.typed(b"\r~.").await;
    desk.console().shutdown().await.unwrap();
    let (status, said) = desk.ended().await;
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("the console ended: the machine runs no more"), "{said}");
    let mut desk = Desk::open(&gateway, &mut node, &["--escape", "%"]).await;
    desk.press(b"~.%.").await;
    desk.typed(b"~.%.").await;
    desk.press(b"\r%.").await;
    assert_eq!(desk.ended().await.0, Some(0));
}

#[tokio::test]
async fn a_lost_connection_is_said_and_gives_the_terminal_back() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 64, Manner::Prompt).await;
    let mut desk = Desk::open(&gateway, &mut node, &[]).await;
    drop((desk.console.take(), node));
    let (status, said) = desk.ended().await;
    assert_eq!(status, Some(4), "{said}");
    assert!(said.contains("the connection to the console was lost: the machine's node"), "{said}");
}

#[tokio::test]
async fn a_signal_gives_the_terminal_back() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 66, Manner::Prompt).await;
    let desk = Desk::open(&gateway, &mut node, &[]).await;
    desk.signal(Signal::TERM);
    assert_eq!(desk.ended().await.0, Some(128 + 15));
    let desk = Desk::open(&gateway, &mut node, &[]).await;
    desk.signal(Signal::HUP);
    assert_eq!(desk.ended().await.0, Some(128 + 1));
    let desk = Desk::open(&gateway, &mut node, &[]).await;
    desk.signal(Signal::INT);
    assert_eq!(desk.ended().await.0, Some(128 + 2));
}

#[tokio::test]
async fn input_that_is_no_terminal_is_typed_as_it_is() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 67, Manner::Prompt).await;
    let key = renter(61);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("renter.key");
    gateway::keyfile::create(&file, &key).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(["--gateway", &format!("http://{}", gateway.http), "--key"]).arg(file);
    command.args(["console", "-i", &"01".repeat(16)]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    let (_, mut console) = node.accept().await;
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"~.\nroot\n").await.unwrap();
    drop(input);
    let mut typed = [0; 8];
    within("what was typed", console.read_exact(&mut typed)).await.unwrap();
    assert_eq!(&typed, b"~.\nroot\n");
    // What is shown after the end of the input is shown all the same.
    console.write_all(b"welcome").await.unwrap();
    console.shutdown().await.unwrap();
    let output = within("the end", child.wait_with_output()).await.unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"welcome"[..]));
}
