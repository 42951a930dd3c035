//! What the kernel left of its log in firmware's variables, which whoever boots the server can set.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    agent::evidence::parts::everything(bytes);
});
