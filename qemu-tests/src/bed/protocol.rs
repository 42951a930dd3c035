//! What a test and the bed's PID 1 say to each other: one JSON document per line, an answer for
//! each request, in order. Bytes travel as base64.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Descriptor of the first of a VMM's files; the others follow.
pub const FIRST_DESCRIPTOR: i32 = 10;

/// Returns where a VMM's standard error goes.
pub fn log_path(machine: u32) -> String {
    format!("/run/vmm-{machine}.log")
}

/// A file that is opened on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Opened {
    /// For reading only.
    Read {
        /// Path on the host.
        path: String,
    },
    /// For reading and writing.
    Write {
        /// Path on the host.
        path: String,
    },
    /// A memory file with these bytes, writable.
    Memory {
        /// Content.
        base64: String,
    },
    /// One queue of a tap that was made with as many.
    Tap {
        /// Name of the interface.
        name: String,
        /// How many queues it has.
        queues: u32,
        /// Which of them, from 0 on.
        queue: u32,
    },
    /// The listening socket of the VMM's API.
    Api,
}

/// What a test asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Request {
    /// Read a file.
    Read {
        /// Path.
        path: String,
    },
    /// Write to a file, which is made when it is not there.
    Write {
        /// Path.
        path: String,
        /// Content.
        base64: String,
    },
    /// Give a file a length.
    Grow {
        /// Path.
        path: String,
        /// Length in bytes.
        bytes: u64,
    },
    /// List a folder.
    List {
        /// Path.
        path: String,
    },
    /// Start a VMM in namespaces of its own.
    Launch {
        /// Its files, from descriptor [`FIRST_DESCRIPTOR`] on.
        files: Vec<Opened>,
        /// Its specification.
        spec: Value,
        /// Its user and group.
        uid: u32,
    },
    /// Call a VMM's API.
    Call {
        /// Which VMM.
        machine: u32,
        /// Method.
        method: String,
        /// Path and query.
        target: String,
        /// Body.
        base64: String,
        /// Descriptors that go with it.
        files: Vec<Opened>,
    },
    /// Start something, read what its guest says up to the last mark, and end it.
    Measure {
        /// What is started.
        subject: Subject,
        /// What is waited for, in this order.
        marks: Vec<String>,
        /// How long it may take to the last mark.
        limit_ms: u64,
    },
    /// Wait for a VMM's end.
    Wait {
        /// Which VMM.
        machine: u32,
        /// How long at most.
        limit_ms: u64,
    },
    /// Run a program to its end and tell what it wrote.
    Run {
        /// Path and arguments.
        words: Vec<String>,
    },
    /// Start a program that goes on while the host lives.
    Start {
        /// Path and arguments.
        words: Vec<String>,
    },
    /// Count the places in the memory of all running guests, at multiples of 64 bytes, that begin
    /// with a text.
    Search {
        /// The text, at most 64 bytes.
        needle: String,
    },
    /// Break each page of memory, of all running guests, that holds such a place.
    Break {
        /// The text, at most 64 bytes.
        needle: String,
    },
    /// Tell which threads may share a core with which.
    Cores,
    /// Connect to a guest's socket, send, and read to the end.
    Vsock {
        /// The guest's context id.
        cid: u32,
        /// Port.
        port: u32,
        /// What is sent.
        base64: String,
    },
}

/// What is started to be measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Subject {
    /// Our VMM, as [`Request::Launch`] starts it; its guest's console is what is read.
    Vmm {
        /// Its files, from descriptor [`FIRST_DESCRIPTOR`] on.
        files: Vec<Opened>,
        /// Its specification.
        spec: Value,
        /// Its user and group.
        uid: u32,
    },
    /// Any other program; its standard output is what is read.
    Program {
        /// Path and arguments.
        words: Vec<String>,
    },
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// When each mark was read, in microseconds after the program's process was started.
    pub marks_us: Vec<u64>,
    /// What was made for the process before it was started, in microseconds: a VMM's namespaces, which are init's
    /// work on a node. Nothing for other programs.
    pub before_us: u64,
    /// Resident memory at the last mark, shared memory apart, in KiB.
    pub resident_kib: u64,
    /// All that was read.
    pub output: String,
}

/// A thread of the host, and what the kernel lets it share a core with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Its process.
    pub process: u32,
    /// Its name.
    pub name: String,
    /// Its core-scheduling cookie: threads with the same one may run on one core at the same time. 0 for none.
    pub cookie: u64,
}

/// What the host answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// It is done.
    Done,
    /// It could not be done.
    Failed {
        /// What went wrong.
        reason: String,
    },
    /// Bytes.
    Bytes {
        /// The bytes.
        base64: String,
    },
    /// Names of files.
    Names {
        /// The names, sorted.
        names: Vec<String>,
    },
    /// All threads.
    Threads {
        /// The threads.
        threads: Vec<Thread>,
    },
    /// What was looked for in the memory of guests.
    Found {
        /// Places that hold it.
        places: u64,
        /// How much memory was looked at.
        bytes: u64,
    },
    /// Something was measured.
    Measured(Measured),
    /// A VMM was started.
    Launched {
        /// Its number.
        machine: u32,
    },
    /// A VMM ended.
    Exited {
        /// Its exit status; 128 and the signal when a signal ended it.
        status: i32,
    },
    /// An answer of HTTP.
    Http {
        /// Status code.
        status: u16,
        /// Head.
        head: String,
        /// Body.
        base64: String,
    },
}
