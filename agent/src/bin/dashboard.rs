//! The screen's program.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    agent::dashboard::main()
}
