//! `unpacked SUITE PACKAGE …`: unpacks Debian packages into the cache, where they are not installed and nothing
//! of them is started, and prints the folder.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((suite, packages)) = arguments.split_first().filter(|(_, rest)| !rest.is_empty())
    else {
        eprintln!("unpacked: SUITE PACKAGE … are wanted, as in: unpacked bookworm prometheus");
        return ExitCode::FAILURE;
    };
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    match image::unpacked(&image::default_cache(), suite, &packages) {
        Ok(folder) => {
            println!("{}", folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("unpacked: {error}");
            ExitCode::FAILURE
        }
    }
}
