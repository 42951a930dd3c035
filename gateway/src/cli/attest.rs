//! `holdfast node attest`: has a node prove by its TPM which release it runs, and judges that here: the
//! gateway is only the way.

use std::path::Path;

use lease::attestation::{Attested, Authority, Challenge, Evidence, Inquiry, Known, Measurements};
use serde_json::json;
use types::ids::NodeId;

use super::{CliError, Context, arguments::AttestArguments, calls, files, show};
use crate::{attest, service::now};

pub(super) async fn run(context: &Context, wanted: &AttestArguments) -> Result<(), CliError> {
    let releases =
        wanted.measurements.iter().map(|path| release(path)).collect::<Result<Vec<_>, _>>()?;
    let tpms = wanted.tpms.iter().map(|tpm| tpm.to_ascii_lowercase()).collect();
    let authorities = wanted.tpm_authorities.iter().map(|path| authorities(path));
    let authorities = authorities.collect::<Result<Vec<_>, _>>()?.concat();
    let named = match (wanted.tpms.is_empty(), authorities.is_empty()) {
        (true, true) => "any TPM",
        (false, true) => "the TPMs that were named",
        (true, false) => "TPMs that a named authority vouches for",
        (false, false) => "TPMs that were named, or that a named authority vouches for",
    };
    let attested = ask(context, wanted.node, &Known { releases, tpms, authorities }).await?;
    let shown = json!({ "node": wanted.node, "attested": attested, "accepted": named });
    context.print(&shown, show::attested)
}

fn authorities(path: &Path) -> Result<Vec<Authority>, CliError> {
    attest::authorities(path).map_err(|reason| CliError::Usage {
        message: format!("--tpm-authority {} cannot be used: {reason}", path.display()),
    })
}

fn release(path: &Path) -> Result<Measurements, CliError> {
    let bytes = files::bytes(path, files::SMALL)?;
    Measurements::from_json(&bytes).map_err(|reason| CliError::Usage {
        message: format!("{} describes no release: {reason}", path.display()),
    })
}

async fn ask(context: &Context, node: NodeId, known: &Known) -> Result<Attested, CliError> {
    let random = attest::random().map_err(|message| CliError::Usage { message })?;
    let mut inquiry = Inquiry::new(node, now(), &random);
    let refused = |error| CliError::Lease {
        what: format!("node {node} did not prove what it runs"),
        source: Box::new(error),
    };
    let first = put(context, node, &inquiry.first()).await?;
    let second = inquiry.second(&first, known).map_err(refused)?;
    let second = put(context, node, &second).await?;
    inquiry.judge(&second, known).map_err(refused)
}

async fn put(context: &Context, node: NodeId, challenge: &Challenge) -> Result<Evidence, CliError> {
    let call = calls::attestation(node, &json!(challenge))?;
    let answer = context.client.parse(&context.ask(&call).await?)?;
    serde_json::from_value(answer).map_err(|error| context.client.answer(error))
}
