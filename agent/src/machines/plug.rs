//! Hands a device to a VMM that runs: `POST /v1/devices` over its socket, with its descriptors beside
//! the request's first bytes (SCM_RIGHTS, unix(7)). What needs no descriptor is `vmm`'s.

use std::{
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use types::{
    devices::{AttachRequest, AttachedDevice},
    forward::Problem,
    ids::MachineId,
    vm::MAX_DISK_QUEUES,
};

use super::vmm;

/// Longest that a VMM may take: a device may need two resets, and mapping memory takes its time.
const LIMIT: Duration = Duration::from_secs(310);

/// Most descriptors of a device: those of a disk.
const MAX_FILES: usize = MAX_DISK_QUEUES as usize;

/// Largest answer.
const MAX_ANSWER: u64 = 64 << 10;

/// Why a VMM did not take a device.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PlugError {
    #[error("cannot reach the machine's process")]
    Reach { source: io::Error },
    #[error("the machine's process refused it: {detail}")]
    Refused { detail: String },
    #[error("the answer of the machine's process cannot be read")]
    Answer { source: io::Error },
}

/// Plugs a device into a machine. Blocks until its VMM has taken it.
pub fn plug(
    machine: MachineId,
    request: &AttachRequest,
    device: &[OwnedFd],
) -> Result<AttachedDevice, PlugError> {
    plug_at(&vmm::socket_path(machine), request, device)
}

fn plug_at(
    socket: &Path,
    request: &AttachRequest,
    device: &[OwnedFd],
) -> Result<AttachedDevice, PlugError> {
    let reach = |source| PlugError::Reach { source };
    let body = serde_json::to_vec(request).map_err(|error| reach(error.into()))?;
    let mut stream = UnixStream::connect(socket).map_err(reach)?;
    stream.set_read_timeout(Some(LIMIT)).map_err(reach)?;
    let head = format!(
        "POST /v1/devices HTTP/1.1\r\nhost: vmm\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let message = [head.as_bytes(), &body].concat();
    send(&stream, &message, device).map_err(reach)?;
    let mut answer = Vec::new();
    let wrong = |source| PlugError::Answer { source };
    (&mut stream).take(MAX_ANSWER).read_to_end(&mut answer).map_err(wrong)?;
    read(&answer)
}

/// Sends all of `message`, the descriptors with its first byte.
fn send(stream: &UnixStream, message: &[u8], device: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<_> = device.iter().map(AsFd::as_fd).collect();
    let mut sent = 0;
    while sent < message.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other("no room for so many descriptors"));
        }
        let piece = [IoSlice::new(&message[sent..])];
        sent += rustix::net::sendmsg(stream, &piece, &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// Reads an HTTP answer whose body ends with the connection.
fn read(answer: &[u8]) -> Result<AttachedDevice, PlugError> {
    let wrong = |reason: &str| PlugError::Answer { source: io::Error::other(reason.to_owned()) };
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let (head, body) = answer.split_at(end.ok_or_else(|| wrong("it has no head"))?);
    let body = &body[4..];
    let status = head.split(|byte| *byte == b' ').nth(1).and_then(|word| word.first());
    if status == Some(&b'2') {
        return serde_json::from_slice(body)
            .map_err(|error| PlugError::Answer { source: error.into() });
    }
    let problem: Problem =
        serde_json::from_slice(body).map_err(|error| PlugError::Answer { source: error.into() })?;
    let detail = problem.detail.chars().filter(|c| !c.is_control()).take(500).collect();
    Err(PlugError::Refused { detail })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{IoSliceMut, Write},
        os::unix::net::UnixListener,
    };

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    use types::{devices::AttachDevice, vm::DiskModel};

    use super::*;

    /// Stands in for a VMM: returns what came, and how many descriptors came with it.
    fn serve(listener: &UnixListener, answer: &str) -> (String, usize) {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; 4096];
        let mut pieces = [IoSliceMut::new(&mut buffer)];
        let received = rustix::net::recvmsg(&stream, &mut pieces, &mut control, RecvFlags::empty());
        let bytes = received.expect("a request").bytes;
        let rights = |message| {
            if let RecvAncillaryMessage::ScmRights(files) = message { files.count() } else { 0 }
        };
        let files = control.drain().map(rights).sum();
        stream.write_all(answer.as_bytes()).expect("answered");
        (String::from_utf8_lossy(&buffer[..bytes]).into_owned(), files)
    }

    fn ask(answer: &'static str) -> (Result<AttachedDevice, PlugError>, String, usize) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vmm.sock");
        let listener = UnixListener::bind(&path).expect("bound");
        let served = std::thread::spawn(move || serve(&listener, answer));
        let device = AttachDevice::Disk {
            read_only: false,
            serial: "data".into(),
            model: DiskModel::Nvme,
            limit: None,
            key: None,
        };
        let request = AttachRequest { id: "data".into(), device };
        let files = [(); MAX_FILES].map(|()| tempfile::tempfile().expect("a file").into());
        let result = plug_at(&path, &request, &files);
        let (text, files) = served.join().expect("served");
        (result, text, files)
    }

    #[test]
    fn the_descriptors_travel_with_the_request() {
        let answer = "HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\n\r\n\
            {\"id\":\"data\",\"device\":{\"kind\":\"disk\",\"read_only\":false,\"serial\":\"data\"},\
            \"slot\":3,\"state\":{\"is\":\"waiting\"}}";
        let (result, text, files) = ask(answer);
        assert_eq!(result.expect("taken").slot, 3);
        assert!(text.starts_with("POST /v1/devices HTTP/1.1\r\n") && text.contains("\"nvme\""));
        assert_eq!(files, MAX_FILES);
    }

    #[test]
    fn a_refusal_says_why() {
        let answer = "HTTP/1.1 409 Conflict\r\n\r\n\
            {\"type\":\"about:blank\",\"title\":\"no\",\"status\":409,\"detail\":\"no spare port\"}";
        let (result, ..) = ask(answer);
        assert!(matches!(result, Err(PlugError::Refused { detail }) if detail == "no spare port"));
        assert!(matches!(ask("nonsense").0, Err(PlugError::Answer { .. })));
    }
}
