//! What a server of authenticated time answers when keys are agreed on.
#![no_main]

use agent::time::nts::records::{Keys, is_whole, parse};

libfuzzer_sys::fuzz_target!(|answer: &[u8]| {
    let session = parse(answer, Keys { to_server: [1; 32], to_client: [2; 32] });
    if let Ok(session) = session {
        assert!(session.is_usable() && is_whole(answer));
    }
});
