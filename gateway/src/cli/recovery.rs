//! `holdfast node recovery-key`: opens a disk's recovery key with the operator's key that it was sealed to.

use base64::{Engine, engine::general_purpose::STANDARD};
use lease::api::RecoveryKeys;
use overlay::escrow;
use serde_json::json;

use super::{CliError, Context, arguments::RecoveryKeyArguments, calls, show};

pub(super) async fn run(context: &Context, wanted: &RecoveryKeyArguments) -> Result<(), CliError> {
    let key = context.key()?;
    let own = lease::authority::public_key(&key);
    let usage = |message: String| CliError::Usage { message };
    let sealed = match (&wanted.sealed, wanted.node) {
        (Some(text), _) => STANDARD
            .decode(text.trim())
            .map_err(|error| usage(format!("--sealed is no base64: {error}")))?,
        (None, Some(node)) => {
            let answer = context.client.parse(&context.ask(&calls::recovery_key(node)).await?)?;
            let answer: RecoveryKeys =
                serde_json::from_value(answer).map_err(|error| context.client.answer(error))?;
            let ours = answer.keys.into_iter().find(|escrowed| escrowed.operator == own);
            let none = || usage(format!("the recovery key of node {node} is not sealed to {own}"));
            ours.ok_or_else(none)?.sealed
        }
        (None, None) => return Err(usage("name a node, or give --sealed".to_owned())),
    };
    let opened = escrow::open(&key, &sealed).map_err(|error| CliError::Lease {
        what: format!("the recovery key does not open with {own}"),
        source: Box::new(error),
    })?;
    let text = String::from_utf8_lossy(&opened).into_owned();
    context.print(&json!({ "recovery_key": text }), |_| format!("{}\n", show::harmless(&text)))
}
