//! What `init` and `agent` report, as typed events.
//!
//! Each is one line, `holdfast: event=NAME key=value …`, in the kernel's log and therefore on the
//! console. Names and keys are an interface: tests and operators' tools wait for them. Values
//! hold no blank unless they are quoted.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use types::{
    ids::{ContentId, MachineId, NodeId, PublicKey},
    node::Bdf,
};

use update::channel::Release;

use crate::{assign::Rung, floors::Held as FloorsHeld};

/// Start of every event's line.
pub const PREFIX: &str = "holdfast: event=";

/// Something worth a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "names and keys say it; each is printed as it is declared")]
pub enum Event {
    /// init: the root is mounted and the mount table was read back and matched.
    MountsVerified { count: usize },
    /// init: a mount differs from the table.
    MountWrong { path: String, reason: String },
    /// init: nothing on disk to keep `path`; it is lost at power off.
    RamMode { path: &'static str, reason: String },
    /// init: what the consoles show goes to this serial port, too, which firmware has its console on.
    SerialLine { port: String, speed: u32 },
    /// init: a watchdog counts.
    WatchdogArmed { device: String, timeout_s: i32 },
    /// init: no watchdog at all.
    WatchdogAbsent,
    /// init: PID 1 is at work.
    InitReady { ms: u128 },
    /// init: the agent was started for the `starts`th time.
    AgentStarted { pid: i32, starts: u32 },
    /// init: the agent ended and is started again after a delay.
    AgentExited { status: String, restart_ms: u128 },
    /// init: the agent said nothing for so long, and is killed. Its threads, and what each waits for.
    AgentSilent { silent_s: u64, threads: String },
    /// init: a machine ran on after its end, which the agent did not see to, and was killed.
    MachineOverdue { machine: MachineId },
    /// init: the screen's program was started for the `starts`th time.
    Screen { pid: i32, starts: u32 },
    /// init: the node goes down.
    Shutdown { action: &'static str, because: &'static str },
    /// init: the last line before the kernel takes over.
    ShutdownDone { action: &'static str, unmounted: bool },
    /// agent: who this node is.
    Node { node: NodeId, release: String },
    /// agent: where the configuration came from.
    Config { source: String, name: String },
    /// agent: no usable configuration; the node shows itself and rents nothing.
    ConfigBad { source: String, reason: String },
    /// agent: a value of the configuration, and who said it.
    ConfigValue { key: String, value: String, source: String },
    /// agent: the document that DHCP or the command line names is there.
    ConfigFetched { source: String, bytes: usize },
    /// agent: it is not, and will be tried again.
    ConfigNotFetched { source: String, reason: String },
    /// agent: what the installer does.
    Installing { step: String },
    /// agent: the appliance is on this disk.
    Installed { disk: String, ms: u128 },
    /// agent: an installation was asked for and did not happen.
    NotInstalled { reason: String },
    /// agent: how far firmware and kernel are locked: `on`, `off`, `setup` or `unknown`; the lockdown;
    /// and what the boot program measured into the TPM.
    Trust { secure_boot: &'static str, lockdown: String, measured: String },
    /// agent: firmware has our keys, and checks signatures from the next start on.
    KeysEnrolled { from: String },
    /// agent: firmware should have got our keys and did not.
    KeysNotEnrolled { reason: String },
    /// agent: DATA has the length of its partition.
    DataGrown { bytes: u64 },
    /// agent: an address of more than link scope.
    Online { address: IpAddr },
    /// agent: the overlay listens.
    OverlayStarted { port: u16 },
    /// agent: how many other members are known.
    OverlayMembers { count: usize },
    /// agent: a device and what may be done with it.
    Device { address: Bdf, id: String, group: String, state: String },
    /// agent: an offer was broadcast.
    Offered { devices_free: usize, vcpus: u32, memory_mib: u64 },
    /// agent: everything is up.
    AgentReady { machines: usize },
    /// agent: a lease was accepted and the machine is being made.
    MachineAccepted { machine: MachineId, serial: u64, end: u64 },
    /// agent: a lease was renewed.
    MachineRenewed { machine: MachineId, serial: u64, end: u64 },
    /// agent: content arrived and has the right digest.
    ContentFetched { content: ContentId, bytes: u64, ms: u128 },
    /// agent: content that no machine needed went, because its room was wanted.
    ContentDropped { content: String, bytes: u64 },
    /// agent: the VMM runs; `ms` from the request to its first answer.
    MachineStarted { machine: MachineId, pid: i32, ms: u128 },
    /// agent: what /proc says of the VMM's sandbox.
    MachineSandbox { machine: MachineId, facts: String },
    /// agent: a machine that ran before this agent did.
    MachineAdopted { machine: MachineId, pid: i32 },
    /// agent: the VMM ends its machine by itself after so many seconds, unless it is told otherwise.
    MachineDeadline { machine: MachineId, left_s: u64 },
    /// agent: the lease is about to end.
    MachineWarned { machine: MachineId, left_s: u64 },
    /// agent: the ACPI power button was pressed.
    MachineButton { machine: MachineId, because: &'static str },
    /// agent: the VMM says nothing for so long; its machine can be stopped, and ends with its lease.
    MachineSilent { machine: MachineId, silent_s: u64 },
    /// agent: it says something again.
    MachineAnswers { machine: MachineId },
    /// agent: what the server keeps a machine's disk on failed so many requests of the guest by now.
    MachineStorage { machine: MachineId, failed: u64 },
    /// agent: the VMM was killed.
    MachineForced { machine: MachineId, because: &'static str },
    /// agent: the VMM ended.
    MachineExited { machine: MachineId, status: String },
    /// agent: the lease ended and the machine is gone.
    MachineEnded { machine: MachineId, late_s: u64 },
    /// agent: the machine's disk was destroyed.
    MachineDestroyed { machine: MachineId, because: &'static str },
    /// agent: a receipt was signed and kept.
    Receipt { machine: MachineId, running_s: u64, micro: u64 },
    /// agent: an operation on a machine failed.
    MachineFailed { machine: MachineId, reason: String },
    /// agent: somebody with the code on the console gave the node its configuration.
    Claimed { from: SocketAddr },
    /// agent: somebody tried to claim the node.
    ClaimRefused { from: SocketAddr, reason: String },
    /// unlock: how a volume of the disk is protected.
    Volume { volume: String, how: &'static str, notice: String },
    /// agent: the recovery key of a locked disk, as only this operator reads it.
    Escrowed { operator: PublicKey, sealed: String },
    /// agent: a volume is locked, and the recovery key is waited for.
    Locked { reason: String },
    /// agent: a device was reset and can be rented again.
    DeviceReset { address: Bdf, rung: Rung, ms: u128 },
    /// agent: what a renter wrote on a drive is being erased.
    DriveErasing { address: Bdf },
    /// agent: it was erased, in this way.
    DriveErased { address: Bdf, how: &'static str, ms: u128 },
    /// agent: a device did not come back, or was not erased.
    DeviceQuarantined { address: Bdf, reason: String },
    /// agent: a crash of the kernel is kept in this file.
    CrashKept { file: String, reason: String },
    /// agent: the boot before this one did not end as it should.
    EndedAbruptly { last: String },
    /// agent: the time and the release that this server does not go below, and who holds them.
    Floors { time: u64, release: Option<Release>, held: FloorsHeld },
    /// agent: something about releases.
    Update(UpdateEvent),
    /// agent: something failed that no machine is to blame for.
    Trouble { place: &'static str, reason: String },
}

/// What the node does about releases.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "names and keys say it; each is printed as it is declared")]
pub enum UpdateEvent {
    /// What it does now, or waits for.
    State(String),
    /// Another release is in a slot, read back; `fetched` bytes of it were not there before.
    Written { slot: &'static str, bytes: u64, ms: u128, fetched: u64 },
    /// What was tried in a slot is what firmware starts from now on.
    Promoted { slot: &'static str },
    /// The node restarts to try a release.
    Restart { release: String },
    /// What came of a trial.
    Judged { verdict: String },
}

impl fmt::Display for UpdateEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State(state) => write!(f, "update state={state:?}"),
            Self::Written { slot, bytes, ms, fetched } => {
                write!(f, "update-written slot={slot} bytes={bytes} ms={ms} fetched={fetched}")
            }
            Self::Promoted { slot } => write!(f, "update-promoted slot={slot}"),
            Self::Restart { release } => write!(f, "update-restart release={release:?}"),
            Self::Judged { verdict } => write!(f, "update-judged verdict={verdict:?}"),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        match self.about() {
            About::Init => self.write_init(f),
            About::Node => self.write_node(f),
            About::Machine => self.write_machine(f),
        }
    }
}

/// What an event is about.
enum About {
    Init,
    Node,
    Machine,
}

impl Event {
    fn about(&self) -> About {
        match self {
            Self::MountsVerified { .. }
            | Self::MountWrong { .. }
            | Self::RamMode { .. }
            | Self::SerialLine { .. }
            | Self::WatchdogArmed { .. }
            | Self::WatchdogAbsent
            | Self::InitReady { .. }
            | Self::Volume { .. }
            | Self::Escrowed { .. }
            | Self::Locked { .. }
            | Self::AgentStarted { .. }
            | Self::AgentExited { .. }
            | Self::AgentSilent { .. }
            | Self::MachineOverdue { .. }
            | Self::Screen { .. }
            | Self::Shutdown { .. }
            | Self::ShutdownDone { .. } => About::Init,
            Self::Node { .. }
            | Self::Config { .. }
            | Self::ConfigBad { .. }
            | Self::ConfigValue { .. }
            | Self::ConfigFetched { .. }
            | Self::ConfigNotFetched { .. }
            | Self::Installing { .. }
            | Self::Installed { .. }
            | Self::NotInstalled { .. }
            | Self::Claimed { .. }
            | Self::ClaimRefused { .. }
            | Self::Trust { .. }
            | Self::KeysEnrolled { .. }
            | Self::KeysNotEnrolled { .. }
            | Self::DataGrown { .. }
            | Self::Online { .. }
            | Self::OverlayStarted { .. }
            | Self::OverlayMembers { .. }
            | Self::Device { .. }
            | Self::Offered { .. }
            | Self::AgentReady { .. }
            | Self::Floors { .. }
            | Self::Update(_)
            | Self::CrashKept { .. }
            | Self::EndedAbruptly { .. }
            | Self::DeviceReset { .. }
            | Self::DriveErasing { .. }
            | Self::DriveErased { .. }
            | Self::DeviceQuarantined { .. }
            | Self::Trouble { .. } => About::Node,
            Self::ContentFetched { .. }
            | Self::ContentDropped { .. }
            | Self::MachineAccepted { .. }
            | Self::MachineRenewed { .. }
            | Self::MachineStarted { .. }
            | Self::MachineSandbox { .. }
            | Self::MachineAdopted { .. }
            | Self::MachineDeadline { .. }
            | Self::MachineWarned { .. }
            | Self::MachineButton { .. }
            | Self::MachineSilent { .. }
            | Self::MachineAnswers { .. }
            | Self::MachineStorage { .. }
            | Self::MachineForced { .. }
            | Self::MachineExited { .. }
            | Self::MachineEnded { .. }
            | Self::MachineDestroyed { .. }
            | Self::Receipt { .. }
            | Self::MachineFailed { .. } => About::Machine,
        }
    }
}

fn write_floors(
    f: &mut fmt::Formatter<'_>,
    time: u64,
    release: Option<Release>,
    held: FloorsHeld,
) -> fmt::Result {
    let release = release.map_or("any".to_owned(), |release| release.to_string());
    let held = match held {
        FloorsHeld::InTpm => "tpm",
        FloorsHeld::OnDiskOnly => "disk",
    };
    write!(f, "floors time={time} release={release} held={held}")
}

#[allow(clippy::wildcard_enum_match_arm, reason = "`fmt` names every variant and routes it here")]
impl Event {
    fn write_init(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MountsVerified { count } => write!(f, "mounts-verified count={count}"),
            Self::MountWrong { path, reason } => {
                write!(f, "mount-wrong path={path} reason={reason:?}")
            }
            Self::RamMode { path, reason } => write!(f, "ram-mode path={path} reason={reason:?}"),
            Self::SerialLine { port, speed } => write!(f, "serial-line port={port} speed={speed}"),
            Self::WatchdogArmed { device, timeout_s } => {
                write!(f, "watchdog-armed device={device:?} timeout_s={timeout_s}")
            }
            Self::WatchdogAbsent => f.write_str("watchdog-absent"),
            Self::Volume { volume, how, notice } => {
                write!(f, "volume name={volume} protection={how} notice={notice:?}")
            }
            Self::Escrowed { operator, sealed } => {
                write!(f, "recovery-key operator={operator} sealed={sealed}")
            }
            Self::Locked { reason } => write!(f, "locked reason={reason:?}"),
            Self::InitReady { ms } => write!(f, "init-ready ms={ms}"),
            Self::AgentStarted { pid, starts } => {
                write!(f, "agent-started pid={pid} starts={starts}")
            }
            Self::AgentExited { status, restart_ms } => {
                write!(f, "agent-exited status={status} restart_ms={restart_ms}")
            }
            Self::AgentSilent { silent_s, threads } => {
                write!(f, "agent-silent silent_s={silent_s} threads={threads:?}")
            }
            Self::MachineOverdue { machine } => write!(f, "machine-overdue machine={machine}"),
            Self::Screen { pid, starts } => write!(f, "screen pid={pid} starts={starts}"),
            Self::Shutdown { action, because } => {
                write!(f, "shutdown action={action} because={because}")
            }
            Self::ShutdownDone { action, unmounted } => {
                write!(f, "shutdown-done action={action} unmounted={unmounted}")
            }
            _ => Err(fmt::Error),
        }
    }

    fn write_node(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { node, release } => write!(f, "node id={node} release={release:?}"),
            Self::Claimed { from } => write!(f, "claimed from={from}"),
            Self::ClaimRefused { from, reason } => {
                write!(f, "claim-refused from={from} reason={reason:?}")
            }
            Self::Config { source, name } => write!(f, "config source={source:?} name={name:?}"),
            Self::ConfigBad { source, reason } => {
                write!(f, "config-bad source={source:?} reason={reason:?}")
            }
            Self::ConfigValue { key, value, source } => {
                write!(f, "config-value key={key} value={value:?} source={source:?}")
            }
            Self::ConfigFetched { source, bytes } => {
                write!(f, "config-fetched source={source:?} bytes={bytes}")
            }
            Self::ConfigNotFetched { source, reason } => {
                write!(f, "config-not-fetched source={source:?} reason={reason:?}")
            }
            Self::Installing { step } => write!(f, "installing step={step:?}"),
            Self::Installed { disk, ms } => write!(f, "installed disk={disk} ms={ms}"),
            Self::NotInstalled { reason } => write!(f, "not-installed reason={reason:?}"),
            Self::Trust { secure_boot, lockdown, measured } => write!(
                f,
                "trust secure_boot={secure_boot} lockdown={lockdown:?} measured={measured:?}"
            ),
            Self::KeysEnrolled { from } => write!(f, "keys-enrolled from={from:?}"),
            Self::KeysNotEnrolled { reason } => write!(f, "keys-not-enrolled reason={reason:?}"),
            Self::DataGrown { bytes } => write!(f, "data-grown bytes={bytes}"),
            Self::Online { address } => write!(f, "online address={address}"),
            Self::OverlayStarted { port } => write!(f, "overlay-started port={port}"),
            Self::OverlayMembers { count } => write!(f, "overlay-members count={count}"),
            Self::Device { address, id, group, state } => {
                write!(f, "device address={address} id={id} group={group} state={state:?}")
            }
            Self::Offered { devices_free, vcpus, memory_mib } => write!(
                f,
                "offered devices_free={devices_free} vcpus={vcpus} memory_mib={memory_mib}"
            ),
            Self::AgentReady { machines } => write!(f, "agent-ready machines={machines}"),
            Self::DeviceReset { address, rung, ms } => {
                let by = match rung {
                    Rung::Function => "function",
                    Rung::Bus => "bus",
                    Rung::Slot => "slot",
                };
                write!(f, "device-reset address={address} by={by} ms={ms}")
            }
            Self::DriveErasing { address } => write!(f, "drive-erasing address={address}"),
            Self::DriveErased { address, how, ms } => {
                write!(f, "drive-erased address={address} how={how} ms={ms}")
            }
            Self::DeviceQuarantined { address, reason } => {
                write!(f, "device-quarantined address={address} reason={reason:?}")
            }
            Self::CrashKept { file, reason } => {
                write!(f, "crash-kept file={file:?} reason={reason:?}")
            }
            Self::EndedAbruptly { last } => write!(f, "ended-abruptly last={last:?}"),
            Self::Floors { time, release, held } => write_floors(f, *time, *release, *held),
            Self::Update(event) => write!(f, "{event}"),
            Self::Trouble { place, reason } => write!(f, "trouble place={place} reason={reason:?}"),
            _ => Err(fmt::Error),
        }
    }

    fn write_machine(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ContentFetched { content, bytes, ms } => {
                write!(f, "content-fetched content={content} bytes={bytes} ms={ms}")
            }
            Self::ContentDropped { content, bytes } => {
                write!(f, "content-dropped content={content} bytes={bytes}")
            }
            Self::MachineAccepted { machine, serial, end } => {
                write!(f, "machine-accepted machine={machine} serial={serial} end={end}")
            }
            Self::MachineRenewed { machine, serial, end } => {
                write!(f, "machine-renewed machine={machine} serial={serial} end={end}")
            }
            Self::MachineStarted { machine, pid, ms } => {
                write!(f, "machine-started machine={machine} pid={pid} ms={ms}")
            }
            Self::MachineSandbox { machine, facts } => {
                write!(f, "machine-sandbox machine={machine} {facts}")
            }
            Self::MachineAdopted { machine, pid } => {
                write!(f, "machine-adopted machine={machine} pid={pid}")
            }
            Self::MachineDeadline { machine, left_s } => {
                write!(f, "machine-deadline machine={machine} left_s={left_s}")
            }
            Self::MachineWarned { machine, left_s } => {
                write!(f, "machine-warned machine={machine} left_s={left_s}")
            }
            Self::MachineButton { machine, because } => {
                write!(f, "machine-button machine={machine} because={because}")
            }
            Self::MachineSilent { machine, silent_s } => {
                write!(f, "machine-silent machine={machine} silent_s={silent_s}")
            }
            Self::MachineAnswers { machine } => write!(f, "machine-answers machine={machine}"),
            Self::MachineStorage { machine, failed } => {
                write!(f, "machine-storage machine={machine} failed={failed}")
            }
            Self::MachineForced { machine, because } => {
                write!(f, "machine-forced machine={machine} because={because}")
            }
            Self::MachineExited { machine, status } => {
                write!(f, "machine-exited machine={machine} status={status}")
            }
            Self::MachineEnded { machine, late_s } => {
                write!(f, "machine-ended machine={machine} late_s={late_s}")
            }
            Self::MachineDestroyed { machine, because } => {
                write!(f, "machine-destroyed machine={machine} because={because}")
            }
            Self::Receipt { machine, running_s, micro } => {
                write!(f, "receipt machine={machine} running_s={running_s} micro={micro}")
            }
            Self::MachineFailed { machine, reason } => {
                write!(f, "machine-failed machine={machine} reason={reason:?}")
            }
            _ => Err(fmt::Error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_that_can_be_found() {
        let event = Event::Trouble { place: "overlay", reason: "two\nlines".to_owned() };
        assert_eq!(
            event.to_string(),
            "holdfast: event=trouble place=overlay reason=\"two\\nlines\""
        );
    }
}
