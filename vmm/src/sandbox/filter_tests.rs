//! Each program decides as the one that rust-vmm's compiler makes of the same rules.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::*;
use crate::sandbox::{SYSCALLS, Syscall, ThreadKind};

const KINDS: [ThreadKind; 8] = [
    ThreadKind::Main,
    ThreadKind::Vcpu,
    ThreadKind::Block,
    ThreadKind::Api,
    ThreadKind::Event,
    ThreadKind::Plug,
    ThreadKind::Reset,
    ThreadKind::Timer,
];
const VERDICTS: Verdicts =
    Verdicts { listed: libc::SECCOMP_RET_ALLOW, other: libc::SECCOMP_RET_KILL_PROCESS };

/// What a filter is asked of.
#[derive(Debug, Clone, Copy)]
struct Call {
    number: u32,
    architecture: u32,
    arguments: [u64; 6],
}

impl Call {
    fn word(&self, offset: u32) -> u32 {
        let half = |value: u64, upper: bool| {
            let value = if upper { value >> 32 } else { value & u64::from(u32::MAX) };
            u32::try_from(value).expect("half of it")
        };
        match offset {
            NUMBER => self.number,
            ARCHITECTURE => self.architecture,
            _ => {
                let at = usize::try_from((offset - ARGUMENTS) / 8).expect("few");
                half(self.arguments[at], offset % 8 == 4)
            }
        }
    }
}

/// One instruction: code, jumps, operand.
type Step = (u16, u8, u8, u32);

fn ours(program: &[sock_filter]) -> Vec<Step> {
    program.iter().map(|step| (step.code, step.jt, step.jf, step.k)).collect()
}

fn theirs(program: &BpfProgram) -> Vec<Step> {
    program.iter().map(|step| (step.code, step.jt, step.jf, step.k)).collect()
}

/// Runs a program as the kernel does. Returns its verdict, and how many instructions it took.
fn run(program: &[Step], call: &Call) -> (u32, usize) {
    /// `BPF_ALU | BPF_AND | BPF_K`, and `BPF_JMP | BPF_JGT | BPF_K`.
    const MASK: u16 = 0x54;
    const IF_ABOVE: u16 = 0x25;
    let (mut at, mut loaded) = (0, 0);
    for steps in 1.. {
        let (code, jt, jf, k) = program[at];
        at += 1;
        let mut skip = |holds: bool| at += usize::from(if holds { jt } else { jf });
        match code {
            LOAD => loaded = call.word(k),
            MASK => loaded &= k,
            IF_EQUAL => skip(loaded == k),
            IF_NOT_BELOW => skip(loaded >= k),
            IF_ABOVE => skip(loaded > k),
            IF_ANY_BIT => skip(loaded & k != 0),
            JUMP => at += usize::try_from(k).expect("inside"),
            RETURN => return (k, steps),
            _ => panic!("instruction {code:#x}"),
        }
    }
    unreachable!("programs return")
}

fn rows(kind: ThreadKind) -> impl Iterator<Item = &'static Syscall> {
    SYSCALLS.iter().filter(move |row| row.kinds.contains(&kind))
}

fn own(kind: ThreadKind) -> Vec<Step> {
    let mut calls: BTreeMap<u32, Vec<Arguments>> = BTreeMap::new();
    for row in rows(kind) {
        let number = u32::try_from(row.number).expect("a number");
        calls.entry(number).or_default().push(row.arguments);
    }
    ours(&program(&calls, VERDICTS))
}

fn peers(kind: ThreadKind) -> Vec<Step> {
    let rule = |index, operator, value: u32| {
        let condition = SeccompCondition::new(index, Len::Dword, operator, value.into());
        SeccompRule::new(vec![condition.expect("valid")]).expect("valid")
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for row in rows(kind) {
        let alternatives = rules.entry(row.number).or_default();
        match row.arguments {
            Arguments::Any => {}
            Arguments::NotExecutable => alternatives.push(rule(2, Op::MaskedEq(4), 0)),
            Arguments::OwnProcess => alternatives.push(rule(0, Op::Eq, std::process::id())),
            Arguments::Request(requests) => {
                alternatives.extend(requests.iter().map(|request| rule(1, Op::Eq, *request)));
            }
            Arguments::Equals(index, value) => alternatives.push(rule(index, Op::Eq, value)),
        }
    }
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, kill, allow, TargetArch::x86_64).expect("valid");
    theirs(&filter.try_into().expect("short enough"))
}

/// Every value that a row names, its neighbours, and the same with other upper halves.
fn values() -> Vec<u64> {
    let mut named = vec![0, 2, 4, 6, std::process::id(), u32::MAX];
    for row in SYSCALLS {
        match row.arguments {
            Arguments::Request(requests) => named.extend_from_slice(requests),
            Arguments::Equals(_, value) => named.push(value),
            Arguments::Any | Arguments::NotExecutable | Arguments::OwnProcess => {}
        }
    }
    let near =
        named.iter().flat_map(|value| [value.wrapping_sub(1), *value, value.wrapping_add(1)]);
    let mut all: Vec<u64> = near.map(u64::from).collect();
    all.extend(all.clone().iter().map(|value| value | 1 << 40));
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn programs_decide_as_those_of_another_compiler() {
    let values = values();
    for kind in KINDS {
        let (own, peers) = (own(kind), peers(kind));
        let mut allowed = 0;
        // Beyond the last number that Linux has, and those of x32.
        for number in (0..=600).chain([0x4000_0000, 0x4000_0010, u32::MAX]) {
            // Arguments matter where there is a row.
            let listed = rows(kind).any(|row| row.number == i64::from(number));
            let tried = if listed { &values[..] } else { &[0] };
            for (index, value) in (0..3).flat_map(|index| tried.iter().map(move |v| (index, *v))) {
                let mut call = Call { number, architecture: X86_64, arguments: [0; 6] };
                call.arguments[index] = value;
                let verdict = run(&own, &call).0;
                assert_eq!(verdict, run(&peers, &call).0, "{kind:?}: {call:x?}");
                allowed += usize::from(verdict == VERDICTS.listed);
            }
        }
        assert!(allowed > 1000, "{kind:?} may do something");
    }
}

#[test]
fn another_architecture_is_no_way_around() {
    const I386: u32 = 0x4000_0003;
    for kind in KINDS {
        for number in 0..600 {
            let call = Call { number, architecture: I386, arguments: [0; 6] };
            assert_eq!(run(&own(kind), &call).0, VERDICTS.other, "{kind:?}: {number}");
        }
    }
}

#[test]
fn any_argument_will_do_beside_others_that_are_named() {
    let alternatives = vec![Arguments::Equals(0, 7), Arguments::Any];
    let program = ours(&program(&BTreeMap::from([(5, alternatives)]), VERDICTS));
    let call = |number, first| Call { number, architecture: X86_64, arguments: [first; 6] };
    assert_eq!(run(&program, &call(5, 1)).0, VERDICTS.listed);
    assert_eq!(run(&program, &call(6, 7)).0, VERDICTS.other);
}

/// The way to a number is short, whichever it is.
#[test]
fn numbers_are_found_by_halving() {
    for kind in KINDS {
        let program = own(kind);
        let calls = rows(kind).map(|row| row.number).collect::<std::collections::BTreeSet<_>>();
        let halvings = usize::try_from(calls.len().next_power_of_two().ilog2()).expect("few");
        for number in 0..600 {
            // Nothing that a request is: all requests of a call are looked at.
            let call = Call { number, architecture: X86_64, arguments: [u64::MAX; 6] };
            if number != u32::try_from(libc::SYS_ioctl).expect("a number") {
                assert!(run(&program, &call).1 <= 16 + 2 * halvings, "{kind:?}: {number}");
            }
        }
    }
}
