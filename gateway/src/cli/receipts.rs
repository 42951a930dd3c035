//! `holdfast receipts`: what a machine used, checked before it is shown.

use std::path::{Path, PathBuf};

use lease::{
    api::Receipts,
    document::Lease,
    metering::{self, MeterError, SignedReceipt},
};
use serde::Deserialize;
use serde_json::json;
use types::ids::MachineId;

use super::{CliError, Context, calls, files, leases, show};

/// Most answers that are read: more than a node keeps.
const MAX_ANSWERS: usize = 200;

/// Longest file of kept receipts, in bytes: more than all that a node keeps take.
const MAX_SAVED: usize = 256 << 20;

/// Whose receipts, and against what they are checked.
pub(super) struct Wanted<'a> {
    pub(super) machine: MachineId,
    /// Its leases.
    pub(super) leases: &'a [PathBuf],
    /// Where the receipts are; the gateway is asked without it.
    pub(super) saved: Option<&'a Path>,
}

pub(super) async fn run(context: &Context, wanted: &Wanted<'_>) -> Result<(), CliError> {
    let leases = wanted
        .leases
        .iter()
        .map(|path| {
            leases::read(path)?
                .unverified_lease()
                .map_err(|error| wrong(format!("{} holds no lease", path.display()), error))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let receipts = match wanted.saved {
        Some(path) => read(path)?,
        None => fetch(context, wanted.machine).await?,
    };
    check(wanted.machine, &receipts, &leases)?;
    let checked = if leases.is_empty() {
        "signatures; give --lease to check node, price and sums"
    } else {
        "signatures, node, price and sums"
    };
    let shown = json!({ "receipts": receipts, "checked": checked });
    context.print(&shown, show::receipts)
}

/// Reads receipts that were kept: what this command prints with `--json`, or what the API answers.
fn read(path: &Path) -> Result<Vec<SignedReceipt>, CliError> {
    let bytes = files::bytes(path, MAX_SAVED)?;
    let kept: Kept = serde_json::from_slice(&bytes)
        .map_err(|error| wrong(format!("{} holds no receipts", path.display()), error))?;
    Ok(kept.receipts)
}

/// Receipts in a file, whatever stands beside them.
#[derive(Deserialize)]
struct Kept {
    receipts: Vec<SignedReceipt>,
}

async fn fetch(context: &Context, machine: MachineId) -> Result<Vec<SignedReceipt>, CliError> {
    let (mut all, mut after) = (Vec::new(), None);
    for _ in 0..MAX_ANSWERS {
        let answer = context.client.parse(&context.ask(&calls::receipts(machine, after)).await?)?;
        let answer: Receipts =
            serde_json::from_value(answer).map_err(|error| context.client.answer(error))?;
        all.extend(answer.receipts);
        let Some(next) = answer.next else { return Ok(all) };
        after = Some(next);
    }
    Err(context.client.answer("it has more receipts than a node keeps"))
}

/// Checks signatures, that each receipt begins where the one before ended, and what the leases say.
fn check(machine: MachineId, all: &[SignedReceipt], leases: &[Lease]) -> Result<(), CliError> {
    let mut before: Option<&metering::Receipt> = None;
    for (index, signed) in all.iter().enumerate() {
        let what = format!("receipt {} does not count", index + 1);
        let receipt = metering::verify(signed).map_err(|error| wrong(what.clone(), error))?;
        let differs = |field, found: String, expected: String| {
            wrong(what.clone(), MeterError::Lease { field, found, expected })
        };
        if receipt.lease != machine {
            return Err(differs("lease", receipt.lease.to_string(), machine.to_string()));
        }
        if let Some(before) = before
            && (before.to, before.node) != (receipt.from, receipt.node)
        {
            return Err(differs("from", receipt.from.0.to_string(), before.to.0.to_string()));
        }
        before = Some(receipt);
        if leases.is_empty() {
            continue;
        }
        let lease =
            leases.iter().find(|lease| lease.serial == receipt.serial).ok_or_else(|| {
                CliError::Usage {
                    message: format!(
                        "{what}: none of the leases has its serial {}",
                        receipt.serial
                    ),
                }
            })?;
        metering::check(receipt, lease).map_err(|error| wrong(what.clone(), error))?;
    }
    Ok(())
}

fn wrong(what: String, source: impl std::error::Error + Send + Sync + 'static) -> CliError {
    CliError::Lease { what, source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use lease::{SigningKey, authority::public_key, document::Price, metering::Meter};
    use types::{
        ids::NodeId,
        node::MachineShape,
        units::{Mebibytes, UnixSeconds},
    };

    use super::*;

    #[test]
    fn gaps_other_machines_and_other_prices_are_noticed() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let lease = Lease {
            version: lease::document::LEASE_VERSION,
            id: MachineId::from_bytes([9; 16]),
            serial: 1,
            node: NodeId::from(public_key(&key)),
            renter: public_key(&SigningKey::from_bytes(&[8; 32])),
            shape: MachineShape {
                vcpus: 1,
                memory_mib: Mebibytes(64),
                disk_mib: Mebibytes(0),
                devices: Vec::new(),
                disk_limit: None,
            },
            start: UnixSeconds(1000),
            end: UnixSeconds(2000),
            price: Price { unit: "EUR".to_owned(), micro_per_second: 5 },
        };
        let mut meter = Meter::new(UnixSeconds(1000));
        meter.handle_started(UnixSeconds(1100));
        let signed: Vec<_> = [1200, 1300, 1400]
            .into_iter()
            .map(|to| meter.close(UnixSeconds(to), &lease).expect("closed"))
            .map(|receipt| metering::sign(receipt, &key).expect("signed"))
            .collect();
        let dear = Lease { price: Price::default(), ..lease.clone() };
        let check = |all: &[SignedReceipt], lease: &Lease| {
            check(lease.id, all, std::slice::from_ref(lease))
        };
        assert!(check(&signed, &lease).is_ok());
        assert!(check(&[signed[0].clone(), signed[2].clone()], &lease).is_err(), "a gap");
        assert!(check(&signed, &dear).is_err(), "another price");
        let other = Lease { id: MachineId::from_bytes([1; 16]), ..lease };
        assert!(check(&signed, &other).is_err(), "another machine");
    }
}
