//! Devices that come and go: `/v1/devices`. A device's descriptor travels beside the request's bytes
//! (SCM_RIGHTS, unix(7)); the VMM opens nothing.

use std::{
    error::Error,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use types::{
    devices::{AttachRequest, AttachedDevice},
    vm::MAX_DISK_QUEUES,
};

use super::{
    Answer, BadQuery, Client, Request,
    answer::{json, problem},
    body,
};
use crate::machine::{
    Board,
    hotplug::{PlugError, Removal},
};

/// Most descriptors that are taken with a request: one more than any device has.
const MAX_FILES: usize = MAX_DISK_QUEUES as usize + 1;

/// Reads a piece of a request, and puts descriptors that come with it into `files`.
pub(super) fn read(
    stream: &UnixStream,
    buffer: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(buffer)];
    let received = recvmsg(stream, &mut pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            // What is over the limit is closed here; a request never has a use for it.
            files.extend(rights.take(MAX_FILES.saturating_sub(files.len())));
        }
    }
    Ok(received.bytes)
}

/// `GET /v1/devices`.
pub(super) fn list(_request: &Request, board: &Board) -> Answer {
    json(200, &board.hotplug.devices())
}

/// `POST /v1/devices`.
pub(super) fn attach(
    request: &Request,
    files: Vec<OwnedFd>,
    client: &Client<'_>,
    board: &Board,
) -> Answer {
    let expected = "{\"id\": …, \"device\": {\"kind\": \"pci\", \"address\": …} or \
                    {\"kind\": \"disk\", \"read_only\": …, \"serial\": …}}";
    let wanted: AttachRequest = match body::object(request, expected) {
        Ok(wanted) => wanted,
        Err(refusal) => return *refusal,
    };
    answer(client.plug(|gone| board.hotplug.attach(wanted, files, gone)))
}

/// `DELETE /v1/devices/{id}`; `?pull=1` does not ask the guest.
pub(super) fn detach(request: &Request, client: &Client<'_>, board: &Board) -> Answer {
    let removal = match request.number("pull") {
        Ok(None | Some(0)) => Removal::Asked,
        Ok(Some(1)) => Removal::Pulled,
        Ok(Some(_)) | Err(BadQuery) => {
            return problem(400, "bad query", "pull is 0 or 1, and there once, as ?pull=1");
        }
    };
    let id = request.last_segment();
    answer(client.plug(|gone| board.hotplug.detach(&id, removal, gone)))
}

fn answer(done: Option<Result<AttachedDevice, PlugError>>) -> Answer {
    match done.unwrap_or(Err(PlugError::Busy)) {
        Ok(device) => json(202, &device),
        Err(error) => refusal(&error),
    }
}

fn refusal(error: &PlugError) -> Answer {
    let (status, title) = match error {
        PlugError::Name { .. } => (400, "bad request"),
        PlugError::Unknown { .. } => (404, "not found"),
        PlugError::Descriptors { .. } => (409, "the device has to come along"),
        PlugError::Taken { .. }
        | PlugError::NoPort
        | PlugError::NoPassthrough
        | PlugError::Window { .. } => (409, "not possible on this machine"),
        PlugError::Assign(_) | PlugError::Disk(_) => (409, "the device cannot be used"),
        PlugError::Busy => (429, "busy"),
    };
    let mut detail = error.to_string();
    let mut next = match error {
        PlugError::Assign(assign) => assign.source(),
        PlugError::Disk(disk) => disk.source(),
        PlugError::Name { .. }
        | PlugError::Taken { .. }
        | PlugError::Unknown { .. }
        | PlugError::Descriptors { .. }
        | PlugError::NoPort
        | PlugError::NoPassthrough
        | PlugError::Window { .. }
        | PlugError::Busy => None,
    };
    while let Some(source) = next {
        detail.push_str(": ");
        detail.push_str(&source.to_string());
        next = source.source();
    }
    problem(status, title, &detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is asked for is as it should be; that nothing came beside it is no fault of the document.
    #[test]
    fn a_device_that_does_not_come_along_is_no_bad_request() {
        assert_eq!(refusal(&PlugError::Descriptors { found: 0, most: 1 }).status, 409);
        assert_eq!(refusal(&PlugError::Name { id: "a b".to_owned() }).status, 400);
    }
}
