//! Waiting out what passes: a TPM on a slow bus, or one that is busy with itself, says so once in a while,
//! and a disk that stays locked for that waits for a person.
//! Source: TPM 2.0 Library, Part 2 §6.6.3 (warnings: the command was not carried out and may be repeated).

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{LATCH_PCR, Tpm, TpmError};

/// Time before each repetition: a busy TPM is ready within a second, and one whose driver waits for a lost
/// answer within a few.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(200),
    Duration::from_millis(800),
    Duration::from_secs(2),
    Duration::from_secs(5),
];
/// How long after the TPM was opened unsealing is begun anew. All of opening the volumes has 90 seconds, and a
/// single command may take 30 of them.
pub(super) const UNSEAL: Duration = Duration::from_secs(30);
/// The same for extending PCR 15, which is worth more than the rest of the time.
const LATCH: Duration = Duration::from_secs(60);

/// Response codes (TPM_RC), Part 2 §6.6.3.
const PCR_CHANGED: u32 = 0x128;
const WARNING: u32 = 0x900;
const WARNINGS: u32 = 0x7f;
/// The one warning that lasts: failures count against the TPM's owner.
const LOCKOUT: u32 = 0x921;

impl TpmError {
    /// Whether the same may go well a moment later.
    fn passes(&self) -> bool {
        match self {
            Self::Io { .. } | Self::Late | Self::Short | Self::Forged => true,
            Self::Refused { code, .. } => {
                *code == PCR_CHANGED || (code & !WARNINGS == WARNING && *code != LOCKOUT)
            }
            Self::Absent { .. }
            | Self::Strange { .. }
            | Self::Unsigned { .. }
            | Self::Unmeasured
            | Self::Latched => false,
        }
    }
}

impl Tpm {
    /// Extends PCR 15 by a digest, once and for all until the server is switched off: nothing is unsealed
    /// after that. What passes is waited out, and an answer that was lost is looked for in the register.
    pub fn latch(&mut self, digest: &[u8; 32]) -> Result<(), TpmError> {
        let mut is_again = false;
        self.patiently(LATCH, |tpm| {
            let is_done = is_again && tpm.register(LATCH_PCR)? != [0; 32];
            is_again = true;
            if is_done { Ok(()) } else { tpm.extend(LATCH_PCR, digest) }
        })
    }

    /// Does something and repeats it as long as its failure may pass, up to [`PAUSES`] and up to `limit` after
    /// the TPM was opened. Each time the TPM is opened again: nothing is left of the try before.
    pub(super) fn patiently<T>(
        &mut self,
        limit: Duration,
        mut action: impl FnMut(&mut Self) -> Result<T, TpmError>,
    ) -> Result<T, TpmError> {
        let end = self.opened + limit;
        for pause in PAUSES {
            let error = match action(self) {
                Err(error) if error.passes() && Instant::now() + pause < end => error,
                result => return result,
            };
            let reason = format!(
                "{}; trying again in {} ms",
                crate::init::boot::chain(&error),
                pause.as_millis()
            );
            crate::init::kmsg::event(&crate::events::Event::Trouble { place: "tpm", reason });
            thread::sleep(pause);
            // One that does not open now may do so the next time; the action says what is wrong.
            if let Some(Ok(transport)) = self.opener.as_ref().map(|opener| opener.open()) {
                self.transport = transport;
            }
        }
        action(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_told_from_what_lasts() {
        let passes = |code: u32| TpmError::Refused { command: 0, code }.passes();
        // Memory, testing, rate, retry, not available; a register that changed.
        for code in [0x902, 0x90a, 0x920, 0x922, 0x923, PCR_CHANGED] {
            assert!(passes(code), "{code:#x}");
        }
        // Lockout, policy, integrity, no start, a format one code of a session, a resource manager's own.
        for code in [LOCKOUT, 0x99d, 0x1df, 0x100, 0x98e, 0xb_0143] {
            assert!(!passes(code), "{code:#x}");
        }
        assert!(TpmError::Late.passes() && TpmError::Forged.passes());
        assert!(!TpmError::Latched.passes() && !TpmError::Unmeasured.passes());
    }
}
