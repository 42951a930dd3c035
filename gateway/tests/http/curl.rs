//! The lines that `holdfast --curl` prints do with the real curl what the command does itself.

use std::path::{Path, PathBuf};

use lease::{
    SigningKey,
    api::{Machine, MachineState},
};
use serde_json::Value;
use tokio::process::Command;

use crate::harness::{
    Serving, lease,
    node::{Manner, Node},
    renter, signed_lease, within,
};

/// A renter with key, lease and kernel in files.
struct Desk {
    gateway: String,
    folder: tempfile::TempDir,
}

impl Desk {
    fn new(gateway: &Serving, key: &SigningKey) -> Self {
        let folder = tempfile::tempdir().unwrap();
        gateway::keyfile::create(&folder.path().join("renter.key"), key).unwrap();
        std::fs::write(folder.path().join("a kernel's file"), b"kernel").unwrap();
        Self { gateway: format!("http://{}", gateway.http), folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn holdfast(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command.args(["--gateway", &self.gateway, "--key"]).arg(self.file("renter.key"));
        within("holdfast", command.args(arguments).output()).await.unwrap()
    }

    /// Returns the lines that a command prints instead of sending anything.
    async fn lines(&self, arguments: &[&str]) -> Vec<String> {
        let output = self.holdfast(&[&["--curl"], arguments].concat()).await;
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// Runs the last of a command's lines in a shell, and the others before it.
    async fn run(&self, arguments: &[&str]) -> String {
        let lines = self.lines(arguments).await.join(" && echo && ");
        let output = shell(&lines).await;
        assert!(output.status.success(), "{lines}: {output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().last().unwrap_or_default().to_owned()
    }

    async fn machine(&self, arguments: &[&str]) -> Machine {
        let said = self.run(arguments).await;
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
    }
}

async fn shell(line: &str) -> std::process::Output {
    within("curl", Command::new("sh").args(["-c", line]).output()).await.unwrap()
}

/// Says so when this machine has no curl.
fn no_curl() -> bool {
    let found = std::process::Command::new("curl").arg("--version").output();
    let absent = found.is_err();
    if absent {
        println!("skipped: curl runs the printed lines: no curl here");
    }
    absent
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn each_printed_line_does_what_the_command_does() {
    if no_curl() {
        return;
    }
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 91, Manner::Prompt).await;
    let key = renter(92);
    let desk = Desk::new(&gateway, &key);
    let wanted = lease(1, node.id(), &key);
    let (envelope, kernel) = (desk.file("lease.json"), desk.file("a kernel's file"));
    std::fs::write(&envelope, serde_json::to_vec_pretty(&signed_lease(&wanted)).unwrap()).unwrap();
    let (envelope, kernel) = (text(&envelope), text(&kernel));

    let nodes: Vec<Value> = serde_json::from_str(&desk.run(&["nodes"]).await).unwrap();
    assert_eq!(nodes[0]["node"], node.id().to_string());
    let pushed = desk.run(&["content", "push", kernel, "--lease", envelope]).await;
    let pushed: Value = serde_json::from_str(&pushed).unwrap();
    let digest = pushed["content"].as_str().unwrap();
    let create =
        ["machines", "create", "--lease", envelope, "--kernel", digest, "--cmdline", "a'b c"];
    let made = desk.machine(&create).await;
    assert_eq!((made.id, made.image.cmdline.as_str()), (wanted.id, "a'b c"));
    // A line printed anew has the same idempotency key.
    assert_eq!(desk.machine(&create).await, made);
    assert_eq!(node.asked_to_create(), 1);
    let id = &wanted.id.to_string();
    let listed = desk.run(&["machines", "list"]).await;
    let listed: Vec<Machine> = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed, std::slice::from_ref(&made));
    assert_eq!(desk.machine(&["machines", "show", id]).await, made);
    let stopped = desk.machine(&["machines", "stop", id]).await;
    assert_eq!(stopped.state, MachineState::Stopping);
    let started = desk.machine(&["machines", "start", id]).await;
    assert_eq!(started.state, MachineState::Starting);
    desk.machine(&["machines", "restart", id]).await;
    desk.machine(&["machines", "renew", id, "--lease", envelope]).await;
    assert_eq!(desk.run(&["console", id]).await, "so far");
    let gone = desk.machine(&["machines", "delete", id]).await;
    assert_eq!(gone.state, MachineState::Destroyed);
    assert_eq!(desk.run(&["content", "remove", digest]).await, "");
}

#[tokio::test]
async fn a_printed_line_counts_once_and_sends_nothing_by_itself() {
    if no_curl() {
        return;
    }
    let gateway = Serving::start().await;
    let _node = Node::join(&gateway, 93, Manner::Prompt).await;
    let desk = Desk::new(&gateway, &renter(94));
    let lines = desk.lines(&["machines", "list"]).await;
    assert!(shell(&lines[0]).await.status.success());
    let again = shell(&lines[0]).await;
    // curl's status for an HTTP error (curl(1), --fail-with-body).
    assert_eq!(again.status.code(), Some(22));
    assert!(String::from_utf8_lossy(&again.stdout).contains("/problems/replayed"));
    let refused = desk.holdfast(&["--curl", "tunnel", &"01".repeat(16), "22"]).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
}

#[tokio::test]
async fn the_command_itself_uploads_creates_and_shows() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 95, Manner::Prompt).await;
    let key = renter(96);
    let desk = Desk::new(&gateway, &key);
    let wanted = lease(1, node.id(), &key);
    let (envelope, kernel) = (desk.file("lease.json"), desk.file("a kernel's file"));
    std::fs::write(&envelope, serde_json::to_vec(&signed_lease(&wanted)).unwrap()).unwrap();
    let (envelope, kernel) = (text(&envelope), text(&kernel));
    let early = desk.holdfast(&["content", "push", kernel]).await;
    assert_eq!(early.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&early.stderr).contains("knows no lease of your key"));
    let json = async |arguments: &[&str]| {
        let output = desk.holdfast(&[&["--json"], arguments].concat()).await;
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let pushed = json(&["content", "push", kernel, "--lease", envelope]).await;
    let digest = pushed["content"].as_str().unwrap();
    let made = json(&["machines", "create", "--lease", envelope, "--kernel", digest]).await;
    assert_eq!(made["id"], wanted.id.to_string());
    let id = made["id"].as_str().unwrap();
    assert_eq!(desk.holdfast(&["console", id]).await.stdout, b"so far\n");
    assert_eq!(json(&["machines", "list"]).await[0]["id"], made["id"]);
    let table = desk.holdfast(&["machines", "show", id]).await;
    assert!(String::from_utf8_lossy(&table.stdout).contains("pending"));
    // A machine that is gone is not shown as it was made.
    assert_eq!(json(&["machines", "delete", id]).await["state"], "destroyed");
    let again = json(&["machines", "create", "--lease", envelope, "--kernel", digest]).await;
    assert_eq!((&again["id"], &again["state"]), (&made["id"], &Value::from("destroyed")));
    assert_eq!(node.asked_to_create(), 1);
}
