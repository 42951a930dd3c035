//! PID 1 of the appliance.

#![forbid(unsafe_code)]

fn main() {
    if std::process::id() != 1 {
        eprintln!("init: this program is PID 1 of the appliance and does nothing else");
        std::process::exit(1);
    }
    agent::init::boot::run()
}
