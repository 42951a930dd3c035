//! Filters of system calls in the kernel's form: programs of classic BPF over `struct seccomp_data`.
//! A call is found by halving, not row by row: the kernel tries every number there is when a filter is
//! installed, and runs the program at each `ioctl` that enters a guest.
//! Source: seccomp(2), "Filters"; Linux include/uapi/linux/{seccomp,filter,bpf_common,audit}.h.
//!
//! | Offset     | `struct seccomp_data`                                    |
//! |------------|----------------------------------------------------------|
//! | 0          | number of the call                                       |
//! | 4          | architecture                                             |
//! | 16 + 8 × n | argument n: its lower half, then its upper               |

use std::collections::BTreeMap;

use libc::sock_filter;

use super::Arguments;

/// `BPF_LD | BPF_W | BPF_ABS`.
const LOAD: u16 = 0x20;
/// `BPF_JMP | BPF_JEQ | BPF_K`.
const IF_EQUAL: u16 = 0x15;
/// `BPF_JMP | BPF_JGE | BPF_K`.
const IF_NOT_BELOW: u16 = 0x35;
/// `BPF_JMP | BPF_JSET | BPF_K`.
const IF_ANY_BIT: u16 = 0x45;
/// `BPF_JMP | BPF_JA`.
const JUMP: u16 = 0x05;
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 0x06;

const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// `AUDIT_ARCH_X86_64`. Calls of other tables, as of 32-bit programs, have other numbers.
const X86_64: u32 = 0xc000_003e;

/// What happens to calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdicts {
    /// To those that are listed, with arguments as listed.
    pub(super) listed: u32,
    /// To all others.
    pub(super) other: u32,
}

/// A filter. `calls` says by number what the arguments of a call may be, one of several.
pub(super) fn program(
    calls: &BTreeMap<u32, Vec<Arguments>>,
    verdicts: Verdicts,
) -> Vec<sock_filter> {
    let calls: Vec<(u32, &[Arguments])> =
        calls.iter().map(|(number, arguments)| (*number, arguments.as_slice())).collect();
    let mut code = vec![
        load(ARCHITECTURE),
        test(IF_EQUAL, X86_64, 1, 0),
        ret(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    code.extend(find(&calls, verdicts));
    code
}

/// Finds the call among `calls`, ascending, and returns.
fn find(calls: &[(u32, &[Arguments])], verdicts: Verdicts) -> Vec<sock_filter> {
    match calls {
        [] => vec![ret(verdicts.other)],
        [(number, arguments)] => {
            let mut code = vec![test(IF_EQUAL, *number, 1, 0), ret(verdicts.other)];
            code.extend(look_at(arguments, verdicts));
            code
        }
        _ => {
            let (below, rest) = calls.split_at(calls.len() / 2);
            let pivot = rest.first().map_or(u32::MAX, |(number, _)| *number);
            let below = find(below, verdicts);
            // Conditional jumps reach 255 instructions, the other kind everywhere.
            let length = u32::try_from(below.len()).unwrap_or(u32::MAX);
            let mut code = vec![test(IF_NOT_BELOW, pivot, 0, 1), instruction(JUMP, length)];
            code.extend(below);
            code.extend(find(rest, verdicts));
            code
        }
    }
}

/// Looks whether the arguments are as one of `alternatives` says, and returns.
fn look_at(alternatives: &[Arguments], verdicts: Verdicts) -> Vec<sock_filter> {
    let mut code = Vec::new();
    for alternative in alternatives {
        match *alternative {
            Arguments::Any => return vec![ret(verdicts.listed)],
            Arguments::NotExecutable => {
                // libc gives the bits as signed.
                let executable = libc::PROT_EXEC.unsigned_abs();
                code.extend([load(argument(2)), test(IF_ANY_BIT, executable, 1, 0)]);
                code.push(ret(verdicts.listed));
            }
            Arguments::OwnProcess => {
                code.push(load(argument(0)));
                code.extend(equals(std::process::id(), verdicts));
            }
            Arguments::Request(requests) => {
                code.push(load(argument(1)));
                code.extend(requests.iter().flat_map(|request| equals(*request, verdicts)));
            }
            Arguments::Equals(index, value) => {
                code.push(load(argument(index)));
                code.extend(equals(value, verdicts));
            }
        }
    }
    code.push(ret(verdicts.other));
    code
}

/// Returns if what is loaded is `value`.
fn equals(value: u32, verdicts: Verdicts) -> [sock_filter; 2] {
    [test(IF_EQUAL, value, 0, 1), ret(verdicts.listed)]
}

/// Where the lower half of an argument is: the kernel takes no more of those that are looked at.
fn argument(index: u8) -> u32 {
    ARGUMENTS + 8 * u32::from(index)
}

fn load(offset: u32) -> sock_filter {
    instruction(LOAD, offset)
}

fn ret(verdict: u32) -> sock_filter {
    instruction(RETURN, verdict)
}

fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// Skips `jt` instructions where the test holds, `jf` where not.
fn test(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
#[path = "filter_tests.rs"]
mod tests;
