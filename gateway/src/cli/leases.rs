//! `holdfast lease …`: everything here happens without the gateway.

use std::path::Path;

use lease::{
    authority,
    document::{Envelope, LEASE_VERSION, Lease, Price},
    threshold::AuthoritySet,
};
use serde_json::json;
use types::{
    config::{Authority, explain},
    ids::MachineId,
    node::MachineShape,
    units::{Mebibytes, UnixSeconds},
    vm::{Rate, RateLimit},
};

use super::{
    CliError, Context,
    arguments::{LeaseCommand, SignArguments},
    files, http, show, write_out,
};
use crate::{service::now, whole};

pub(super) fn run(context: &Context, command: LeaseCommand) -> Result<(), CliError> {
    match command {
        LeaseCommand::Sign(arguments) => {
            let key = context.key()?;
            let envelope = match &arguments.add {
                Some(path) => authority::add_signature(&read(path)?, &key),
                None => authority::sign(&wanted(&arguments)?, &key),
            };
            let envelope = envelope.map_err(|error| wrong("cannot sign", error))?;
            write(arguments.out.as_deref(), &envelope)
        }
        LeaseCommand::Show { envelope } => {
            let envelope = read(&envelope)?;
            let lease = inside(&envelope)?;
            let keys: Vec<_> = envelope.signatures.iter().map(|s| s.keyid).collect();
            context.print(&json!({ "lease": lease, "signatures": keys }), show::lease)
        }
        LeaseCommand::Verify { envelope, authority, threshold } => {
            let set = AuthoritySet::new(&Authority { threshold, keys: authority })
                .map_err(|error| wrong("the authority cannot be used", error))?;
            let verified =
                set.verify(&read(&envelope)?).map_err(|e| wrong("the lease does not count", e))?;
            let found = json!({ "lease": verified.lease(), "signatures": verified.signers() });
            let standing = standing(verified.lease());
            context.print(&found, |value| format!("{standing}\n{}", show::lease(value)))
        }
        // The gateway answers this one.
        LeaseCommand::Register { .. } => Ok(()),
        LeaseCommand::Combine { envelopes, out } => {
            let envelopes = envelopes.iter().map(|p| read(p)).collect::<Result<Vec<_>, _>>()?;
            let combined =
                authority::combine(&envelopes).map_err(|e| wrong("cannot combine", e))?;
            write(out.as_deref(), &combined)
        }
    }
}

/// Says whether a lease that enough keys signed counts at this time.
fn standing(lease: &Lease) -> &'static str {
    match now() {
        now if now >= lease.end => "signed by enough keys, but its end has passed",
        now if now < lease.start => "valid from its start on",
        _ => "valid",
    }
}

/// Reads an envelope.
pub(super) fn read(path: &Path) -> Result<Envelope, CliError> {
    let bytes = files::bytes(path, files::SMALL)?;
    let what = || format!("{} is no lease as `holdfast lease sign` writes it", path.display());
    Envelope::from_json(&bytes).map_err(|error| wrong(&what(), error))
}

/// Returns the lease in an envelope, unchecked.
pub(super) fn inside(envelope: &Envelope) -> Result<Lease, CliError> {
    envelope.unverified_lease().map_err(|error| wrong("no lease inside", error))
}

fn write(out: Option<&Path>, envelope: &Envelope) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(envelope)
        .map_err(|error| wrong("cannot write the envelope", error))?
        + "\n";
    match out {
        None => write_out(text.as_bytes()),
        Some(path) => whole::write(path, text.as_bytes()).map_err(|source| CliError::File {
            operation: "write",
            path: path.to_owned(),
            source,
        }),
    }
}

fn wanted(arguments: &SignArguments) -> Result<Lease, CliError> {
    if let Some(path) = &arguments.from {
        return from_file(path);
    }
    let needed = |name: &str| CliError::Usage {
        message: format!("--{name} is missing; a new lease needs --node, --renter and --duration"),
    };
    let start = arguments.start.map_or_else(now, UnixSeconds);
    Ok(Lease {
        version: LEASE_VERSION,
        id: match arguments.id {
            Some(id) => id,
            None => random_id()?,
        },
        serial: arguments.serial,
        node: arguments.node.ok_or_else(|| needed("node"))?,
        renter: arguments.renter.ok_or_else(|| needed("renter"))?,
        shape: MachineShape {
            vcpus: arguments.vcpus,
            memory_mib: Mebibytes(arguments.memory_mib),
            disk_mib: Mebibytes(arguments.disk_mib),
            devices: arguments.devices.clone(),
            disk_limit: disk_limit(arguments),
        },
        start,
        end: start.plus(arguments.duration.ok_or_else(|| needed("duration"))?),
        price: Price {
            unit: arguments.price_unit.clone(),
            micro_per_second: arguments.price_micro_per_second,
        },
    })
}

/// Returns the lease's limit of disk traffic. What a disk saves up while it is idle is one second's.
fn disk_limit(arguments: &SignArguments) -> Option<RateLimit> {
    let rate = |per_second| Rate { per_second, burst: per_second };
    let bytes = arguments.disk_mib_per_second.map(|mib| rate(mib.saturating_mul(1 << 20)));
    let operations = arguments.disk_operations_per_second.map(rate);
    (bytes.is_some() || operations.is_some()).then_some(RateLimit { bytes, operations })
}

fn from_file(path: &Path) -> Result<Lease, CliError> {
    let text = files::text(path)?;
    let what = format!("{} does not say what a lease is to say", path.display());
    if path.extension().is_some_and(|extension| extension == "json") {
        return serde_json::from_str(&text).map_err(|error| wrong(&what, error));
    }
    toml::from_str(&text)
        .map_err(|error| CliError::Usage { message: format!("{what}: {}", explain(&text, &error)) })
}

fn random_id() -> Result<MachineId, CliError> {
    let text = http::nonce()?;
    text.parse().map_err(|error| wrong("no random id", error))
}

fn wrong(what: &str, source: impl std::error::Error + Send + Sync + 'static) -> CliError {
    CliError::Lease { what: what.to_owned(), source: Box::new(source) }
}
