//! The packet filter as nf_tables netlink messages.
//! Source: Linux `include/uapi/linux/netfilter/nf_tables.h`, `nfnetlink.h`, `nf_conntrack_common.h`.
//!
//! `netlink-packet-netfilter` types most expressions; connlimit, ct, dynset, limit, masq, reject and
//! counter are put together here from plain attributes.

mod sets;

use std::net::{Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{
    DefaultNla, Emitable, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_REQUEST, NetlinkMessage,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    NetfilterSubsystem,
    nftables::{
        Bitwise, ChainAttribute, ChainMessage, Cmp, DataAttribute, DevHookNumber,
        ExpressionAttribute, Expressions, Hook as HookAttribute, HookNumber, Immediate,
        InetHookNumber, ListAttribute, Meta, MetaKey, NfTablesMessage, Operator, Payload, Register,
        RuleAttribute, RuleMessage, TableAttribute, TableMessage, Verdict as VerdictCode,
        VerdictAttribute,
    },
    none::ControlMessage,
};

pub use self::sets::{BEGUN, FLOWS, SOURCES, SOURCES_KEPT};
use self::sets::{flows_faster, flows_over, note_source6, sources_set};
use super::{
    Address, Chain, Family, Flow, GuestBytes, Hook, Interface, Policy, Rule, Statement, TABLE,
    Test, Verdict,
};
use crate::net::{HardwareAddress, Ipv4Prefix};

/// `NFNL_SUBSYS_NFTABLES`, the argument of a batch.
const SUBSYSTEM: u16 = 10;
/// `NF_DROP` and `NF_ACCEPT`.
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
/// `enum nft_payload_bases`.
const LINK: u32 = 0;
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;
/// `NFPROTO_IPV4`, protocol numbers of TCP and UDP, Ethernet types.
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const ICMPV6: u8 = 58;
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;
const UDP: u8 = 17;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
/// `NFT_CT_STATE` and `NFT_CT_MARK`.
const CT_STATE: u32 = 0;
const CT_MARK: u32 = 3;
/// `NF_CT_STATE_INVALID_BIT`, and `NF_CT_STATE_BIT` of established (reply or not), related and new
/// packets.
const INVALID: u32 = 1 << 0;
const ESTABLISHED: u32 = 1 << 1;
const RELATED: u32 = 1 << 2;
const NEW: u32 = 1 << 3;
/// `NFT_LIMIT_PKT_BYTES`, `NFT_LIMIT_F_INV`.
const LIMIT_BYTES: u32 = 1;
const LIMIT_OVER: u32 = 1;
/// `NFT_REJECT_ICMPX_UNREACH` and `NFT_REJECT_ICMPX_ADMIN_PROHIBITED`.
const REJECT_ICMPX: u32 = 2;
const ADMIN_PROHIBITED: u8 = 3;
/// `IFNAMSIZ`.
const NAME_SIZE: usize = 16;
/// `NLA_F_NESTED` (`netlink.h`).
const NESTED: u16 = 1 << 15;
/// `IPCTNL_MSG_CT_DELETE`, `CTA_MARK`, `CTA_MARK_MASK`.
const CT_DELETE: u8 = 2;
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;

/// Messages that take effect together or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    messages: Vec<NetlinkMessage<NetfilterMessage>>,
}

impl Batch {
    /// Replaces a whole table.
    pub fn replace_table(family: Family, chains: &[Chain]) -> Self {
        let mut batch = Self { messages: Vec::new() };
        // Deleting what is not there fails, so it is made first.
        batch.push(family, NLM_F_CREATE, NfTablesMessage::NewTable(table()));
        batch.push(family, 0, NfTablesMessage::DeleteTable(table()));
        batch.push(family, NLM_F_CREATE, NfTablesMessage::NewTable(table()));
        // A jump needs its target, so every chain exists before the first rule.
        for chain in chains {
            batch.push_chain(family, chain);
        }
        for set in sets::wanted(chains) {
            batch.push(family, NLM_F_CREATE, NfTablesMessage::NewSet(set));
        }
        for chain in chains {
            batch.push_rules(family, chain);
        }
        batch
    }

    /// Adds a chain to a table, or replaces its rules. What it has noted of sources is kept.
    pub fn replace_chain(family: Family, chain: &Chain) -> Self {
        let mut batch = Self { messages: Vec::new() };
        batch.push(family, NLM_F_CREATE, NfTablesMessage::NewTable(table()));
        let mut statements = chain.rules.iter().flat_map(|rule| &rule.statements);
        if statements.any(|statement| matches!(statement, Statement::NoteSource6(_))) {
            let set = NfTablesMessage::NewSet(sources_set(&chain.name));
            batch.push(family, NLM_F_CREATE, set);
        }
        batch.push_chain(family, chain);
        let all_rules = RuleMessage {
            attributes: vec![
                RuleAttribute::Table(TABLE.to_owned()),
                RuleAttribute::Chain(chain.name.clone()),
            ],
        };
        batch.push(family, 0, NfTablesMessage::DeleteRule(all_rules));
        batch.push_rules(family, chain);
        batch
    }

    /// Removes a chain and its rules. Fails with `ENOENT` when there is none.
    pub fn delete_chain(family: Family, name: &str) -> Self {
        let mut batch = Self { messages: Vec::new() };
        let attributes =
            vec![ChainAttribute::Table(TABLE.to_owned()), ChainAttribute::Name(name.to_owned())];
        batch.push(family, 0, NfTablesMessage::DeleteChain(ChainMessage { attributes }));
        batch
    }

    /// Removes the set of sources of the chain of a guest, which must be gone before. Fails with `ENOENT`
    /// when there is none.
    pub fn delete_sources(family: Family, chain: &str) -> Self {
        let mut batch = Self { messages: Vec::new() };
        batch.push(family, 0, NfTablesMessage::DeleteSet(sets::named(&sets::sources(chain))));
        batch
    }

    /// Returns the bytes to send in one piece, and the sequence number of the last message, which
    /// asks for an answer.
    pub fn to_bytes(&self) -> (Vec<u8>, u32) {
        let control = |message| {
            let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, SUBSYSTEM);
            let mut message = NetlinkMessage::from(NetfilterMessage::new(header, message));
            message.header.flags = NLM_F_REQUEST;
            message
        };
        let mut messages = vec![control(ControlMessage::BatchBegin)];
        messages.extend(self.messages.iter().cloned());
        if let Some(last) = messages.last_mut() {
            last.header.flags |= NLM_F_ACK;
        }
        messages.push(control(ControlMessage::BatchEnd));
        let mut bytes = Vec::new();
        let mut sequence = 0;
        for mut message in messages {
            sequence += 1;
            message.header.sequence_number = sequence;
            append(&mut bytes, message);
        }
        (bytes, sequence - 1)
    }

    fn push(&mut self, family: Family, flags: u16, message: NfTablesMessage) {
        let family = match family {
            Family::Inet => NetfilterProtoFamily::Inet,
            Family::Netdev => NetfilterProtoFamily::NetDev,
        };
        let header = NetfilterHeader::new(family, 0, 0);
        let mut message = NetlinkMessage::from(NetfilterMessage::new(header, message));
        message.header.flags = NLM_F_REQUEST | flags;
        self.messages.push(message);
    }

    fn push_chain(&mut self, family: Family, chain: &Chain) {
        let mut attributes =
            vec![ChainAttribute::Table(TABLE.to_owned()), ChainAttribute::Name(chain.name.clone())];
        if let Some(hook) = &chain.hook {
            let kind = if let Hook::SourceNat { .. } = hook { "nat" } else { "filter" };
            attributes.push(ChainAttribute::Hook(hook_attributes(hook)));
            attributes.push(ChainAttribute::Policy(match chain.policy {
                Policy::Accept => NF_ACCEPT,
                Policy::Drop => NF_DROP,
            }));
            attributes.push(ChainAttribute::Type(kind.to_owned()));
        }
        let message = NfTablesMessage::NewChain(ChainMessage { attributes });
        self.push(family, NLM_F_CREATE, message);
    }

    fn push_rules(&mut self, family: Family, chain: &Chain) {
        for rule in &chain.rules {
            let attributes = vec![
                RuleAttribute::Table(TABLE.to_owned()),
                RuleAttribute::Chain(chain.name.clone()),
                RuleAttribute::Expressions(expressions(rule)),
            ];
            let message = NfTablesMessage::NewRule(RuleMessage { attributes });
            self.push(family, NLM_F_CREATE | NLM_F_APPEND, message);
        }
    }
}

/// Returns the message, with sequence number 1, that forgets every flow marked with a guest's bytes.
pub fn forget_flows(guest: [u8; 4]) -> Vec<u8> {
    let attributes = vec![
        DefaultNla::new(CTA_MARK, mark(guest).to_be_bytes().into()),
        DefaultNla::new(CTA_MARK_MASK, u32::MAX.to_be_bytes().into()),
    ];
    let inner = NetfilterMessageInner::Other {
        subsys: NetfilterSubsystem::Conntrack,
        message_type: CT_DELETE,
        attributes,
    };
    let header = NetfilterHeader::new(NetfilterProtoFamily::IPv4, 0, 0);
    let mut message = NetlinkMessage::from(NetfilterMessage::new(header, inner));
    message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    message.header.sequence_number = 1;
    let mut bytes = Vec::new();
    append(&mut bytes, message);
    bytes
}

/// [`Statement::MarkFlow`] copies the bytes; the mark is a number of the host.
fn mark(guest: [u8; 4]) -> u32 {
    u32::from_ne_bytes(guest)
}

fn append(bytes: &mut Vec<u8>, mut message: NetlinkMessage<NetfilterMessage>) {
    message.finalize();
    let start = bytes.len();
    bytes.resize(start + message.buffer_len(), 0);
    message.serialize(&mut bytes[start..]);
}

fn table() -> TableMessage {
    TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] }
}

fn hook_attributes(hook: &Hook) -> Vec<HookAttribute> {
    let (number, priority): (HookNumber, i32) = match hook {
        Hook::Input { priority } => (InetHookNumber::LocalIn.into(), *priority),
        Hook::Forward { priority } => (InetHookNumber::Forward.into(), *priority),
        Hook::SourceNat { priority } => (InetHookNumber::PostRouting.into(), *priority),
        Hook::Ingress { priority, .. } => (DevHookNumber::Ingress.into(), *priority),
    };
    let mut attributes = vec![
        HookAttribute::Number(number),
        HookAttribute::Priority(u32::from_ne_bytes(priority.to_ne_bytes())),
    ];
    if let Hook::Ingress { device, .. } = hook {
        attributes.push(HookAttribute::NetDeviceName(device.clone()));
    }
    attributes
}

fn expressions(rule: &Rule) -> Vec<ListAttribute<ExpressionAttribute>> {
    rule.statements.iter().flat_map(statement).map(ListAttribute::from).collect()
}

fn statement(statement: &Statement) -> Vec<Expressions> {
    match statement {
        Statement::Interface(which, test, name) => interface(*which, *test, name),
        Statement::Ipv4 => meta(MetaKey::Nfproto, Test::Is, vec![NFPROTO_IPV4]),
        Statement::NotIpv4 => meta(MetaKey::Nfproto, Test::IsNot, vec![NFPROTO_IPV4]),
        Statement::Ipv4Source(network) => [
            meta(MetaKey::Nfproto, Test::Is, vec![NFPROTO_IPV4]),
            address(Address::Source, *network),
        ]
        .concat(),
        Statement::Ipv6 => meta(MetaKey::Nfproto, Test::Is, vec![NFPROTO_IPV6]),
        Statement::EtherTypeIpv6 => field(LINK, 12, Test::Is, &ETHERTYPE_IPV6),
        Statement::Address6(which, network, length) => address6(*which, *network, *length),
        Statement::Icmp6(kind) => {
            [protocol(ICMPV6), field(TRANSPORT, 0, Test::Is, &[*kind])].concat()
        }
        Statement::OtherThanIcmp6 => meta(MetaKey::L4Proto, Test::IsNot, vec![ICMPV6]),
        Statement::Icmp6Target(target) => field(TRANSPORT, 8, Test::Is, &target.octets()),
        // The UDP header, and what is before the field.
        Statement::DhcpClient(client) => field(TRANSPORT, 8 + 28, Test::Is, &client.0),
        Statement::EtherTypeIpv4 => field(LINK, 12, Test::Is, &ETHERTYPE_IPV4),
        Statement::Address(which, network) => address(*which, *network),
        Statement::Hardware(test, hardware) => field(LINK, 6, *test, &hardware.0),
        Statement::ArpSender(hardware, sender) => arp_sender(*hardware, *sender),
        Statement::Udp { from, to } => [protocol(UDP), port(0, *from), port(2, *to)].concat(),
        Statement::UdpTo(to) => [protocol(UDP), port(2, *to)].concat(),
        Statement::TcpTo(to) => [protocol(TCP), port(2, *to)].concat(),
        Statement::Flow(state) => flow(*state),
        Statement::FlowsOver(guest, most) => vec![guest_bytes(*guest), flows_over(*most)],
        Statement::FlowsFaster(guest, rate) => {
            vec![guest_bytes(*guest), flows_faster(*guest, *rate)]
        }
        Statement::NoteSource6(guest) => vec![load(NETWORK, 8, 16), note_source6(guest)],
        Statement::MarkFlow(guest) => {
            vec![guest_bytes(*guest), other("ct", vec![number(2, CT_MARK), number(4, REGISTER)])]
        }
        Statement::Limit { per_second, burst } => vec![limit(*per_second, *burst, [0, 0])],
        Statement::BytesOver { per_second, burst } => {
            vec![limit(*per_second, *burst, [LIMIT_BYTES, LIMIT_OVER])]
        }
        Statement::Counter => vec![other("counter", vec![])],
        Statement::Masquerade => vec![other("masq", vec![])],
        Statement::Reject => {
            let code = DefaultNla::new(2, vec![ADMIN_PROHIBITED]);
            vec![other("reject", vec![number(1, REJECT_ICMPX), code])]
        }
        Statement::Verdict(verdict) => vec![immediate(*verdict)],
    }
}

fn interface(which: Interface, test: Test, name: &str) -> Vec<Expressions> {
    let key = match which {
        Interface::In => MetaKey::Iifname,
        Interface::Out => MetaKey::Oifname,
    };
    let value = match name.strip_suffix('*') {
        Some(prefix) => prefix.as_bytes().to_vec(),
        None => {
            let mut padded = name.as_bytes().to_vec();
            padded.resize(NAME_SIZE, 0);
            padded
        }
    };
    meta(key, test, value)
}

fn address(which: Address, network: Ipv4Prefix) -> Vec<Expressions> {
    let offset = match which {
        Address::Source => 12,
        Address::Destination => 16,
    };
    let mut expressions = vec![load(NETWORK, offset, 4)];
    if network.length() < 32 {
        expressions.push(mask(&network.mask().octets()));
    }
    expressions.push(compare(Test::Is, network.network().octets().to_vec()));
    expressions
}

fn address6(which: Address, network: Ipv6Addr, length: u8) -> Vec<Expressions> {
    let offset = match which {
        Address::Source => 8,
        Address::Destination => 24,
    };
    let kept = crate::net::machines::ipv6::mask(length);
    let wanted = Ipv6Addr::from_bits(network.to_bits() & kept);
    let mut expressions = vec![load(NETWORK, offset, 16)];
    if length < 128 {
        expressions.push(mask(&kept.to_be_bytes()));
    }
    expressions.push(compare(Test::Is, wanted.octets().to_vec()));
    expressions
}

/// RFC 826: hardware type 1, protocol IPv4, lengths 6 and 4, then operation, sender, target.
fn arp_sender(hardware: HardwareAddress, sender: Ipv4Addr) -> Vec<Expressions> {
    let form = [0, 1, ETHERTYPE_IPV4[0], ETHERTYPE_IPV4[1], 6, 4];
    [
        field(LINK, 12, Test::Is, &ETHERTYPE_ARP),
        field(NETWORK, 0, Test::Is, &form),
        field(NETWORK, 8, Test::Is, &hardware.0),
        field(NETWORK, 14, Test::Is, &sender.octets()),
    ]
    .concat()
}

/// RFC 791 §3.1, RFC 8200 §3: where addresses are.
fn guest_bytes(guest: GuestBytes) -> Expressions {
    let offset = match guest {
        GuestBytes::Source => 12,
        GuestBytes::Destination4 => 16,
        GuestBytes::Destination6 => 28,
    };
    load(NETWORK, offset, 4)
}

fn flow(state: Flow) -> Vec<Expressions> {
    let bit = match state {
        Flow::Established => ESTABLISHED,
        Flow::Invalid => INVALID,
        Flow::New => NEW,
        Flow::Related => RELATED,
    };
    vec![
        other("ct", vec![number(1, REGISTER), number(2, CT_STATE)]),
        mask(&bit.to_ne_bytes()),
        compare(Test::IsNot, vec![0; 4]),
    ]
}

fn limit(per_second: u64, burst: u32, which: [u32; 2]) -> Expressions {
    other("limit", rate(per_second, burst, which))
}

/// `kind` is what is counted, packets or bytes, `flags` which side of the rate matches.
fn rate(per_second: u64, burst: u32, [kind, flags]: [u32; 2]) -> Vec<DefaultNla> {
    vec![
        DefaultNla::new(1, per_second.to_be_bytes().into()),
        // The unit is a second.
        DefaultNla::new(2, 1_u64.to_be_bytes().into()),
        number(3, burst),
        number(4, kind),
        number(5, flags),
    ]
}

fn protocol(protocol: u8) -> Vec<Expressions> {
    meta(MetaKey::L4Proto, Test::Is, vec![protocol])
}

fn port(offset: u32, port: u16) -> Vec<Expressions> {
    field(TRANSPORT, offset, Test::Is, &port.to_be_bytes())
}

/// The register that every expression here uses: `NFT_REG_1`, sixteen bytes.
const REGISTER: u32 = 1;

fn meta(key: MetaKey, test: Test, value: Vec<u8>) -> Vec<Expressions> {
    let load = Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(Register::Reg1)]);
    vec![load, compare(test, value)]
}

fn field(base: u32, offset: u32, test: Test, value: &[u8]) -> Vec<Expressions> {
    vec![load(base, offset, value.len()), compare(test, value.to_vec())]
}

fn load(base: u32, offset: u32, len: usize) -> Expressions {
    Expressions::Payload(vec![
        Payload::DestinationRegister(Register::Reg1),
        Payload::Base(base),
        Payload::Offset(offset),
        Payload::Len(u32::try_from(len).expect("fields have at most sixteen bytes")),
    ])
}

fn mask(mask: &[u8]) -> Expressions {
    Expressions::Bitwise(vec![
        Bitwise::SourceRegister(Register::Reg1),
        Bitwise::DestinationRegister(Register::Reg1),
        Bitwise::Length(u32::try_from(mask.len()).expect("fields have at most sixteen bytes")),
        Bitwise::Mask(DataAttribute::Value(mask.to_vec())),
        Bitwise::Xor(DataAttribute::Value(vec![0; mask.len()])),
    ])
}

fn compare(test: Test, value: Vec<u8>) -> Expressions {
    let operator = match test {
        Test::Is => Operator::Equal,
        Test::IsNot => Operator::NotEqual,
    };
    Expressions::Cmp(vec![
        Cmp::SourceRegister(Register::Reg1),
        Cmp::Op(operator),
        Cmp::Data(DataAttribute::Value(value)),
    ])
}

fn immediate(verdict: Verdict) -> Expressions {
    let attributes = match verdict {
        Verdict::Accept => vec![VerdictAttribute::Code(VerdictCode::Other(NF_ACCEPT))],
        Verdict::Drop => vec![VerdictAttribute::Code(VerdictCode::Other(NF_DROP))],
        Verdict::Jump(chain) => vec![
            VerdictAttribute::Code(VerdictCode::Jump),
            VerdictAttribute::Chain(chain.to_owned()),
        ],
    };
    Expressions::Immediate(vec![
        Immediate::DestinationRegister(Register::Verdict),
        Immediate::Data(DataAttribute::Verdict(attributes)),
    ])
}

fn other(name: &str, attributes: Vec<DefaultNla>) -> Expressions {
    Expressions::Other { expression_type: name.to_owned(), attributes }
}

/// A string with its end.
fn text(kind: u16, value: &str) -> DefaultNla {
    DefaultNla::new(kind, [value.as_bytes(), &[0]].concat())
}

/// Attributes within an attribute, which the kernel wants marked as such (`NLA_F_NESTED`).
fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    DefaultNla::new(kind | NESTED, bytes)
}

fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_be_bytes().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::config::Inbound;

    use crate::net::{
        machines::ipv6::Exit,
        ruleset::{Guest, Shared, guest, shared},
    };

    fn hex(bytes: &[u8]) -> String {
        let lines = bytes
            .chunks(32)
            .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        lines.map(|line| line + "\n").collect()
    }

    fn check(bytes: &[u8], golden: &str, name: &str) {
        let found = hex(bytes);
        let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("HOLDFAST_BLESS").is_some() {
            std::fs::write(path, &found).expect("the golden file can be written");
            return;
        }
        assert_eq!(found, golden, "{name}: set HOLDFAST_BLESS=1 to accept a wanted change");
    }

    #[test]
    fn the_shared_table_is_as_checked_against_nft() {
        let shared = shared(&Shared {
            subnet: "10.77.0.0/16".parse().expect("a prefix"),
            dns: vec![Ipv4Addr::new(192, 168, 1, 1)],
            reachable: vec!["10.5.0.0/24".parse().expect("a prefix")],
            exit: Exit::Masquerade,
            inbound: Inbound::Closed,
            ipv6: None,
            dns6: Vec::new(),
        });
        let (bytes, _) = Batch::replace_table(Family::Inet, &shared).to_bytes();
        check(&bytes, include_str!("../../../tests/golden/shared.hex"), "shared.hex");
    }

    #[test]
    fn a_guests_chain_is_as_checked_against_nft() {
        let chain = guest(&Guest {
            interface: "hf0123456789ab".to_owned(),
            hardware: HardwareAddress([2, 0, 0, 0, 0, 1]),
            address: Ipv4Addr::new(10, 77, 1, 2),
            limit: None,
            network6: None,
        });
        let (bytes, _) = Batch::replace_chain(Family::Netdev, &chain).to_bytes();
        check(&bytes, include_str!("../../../tests/golden/guest.hex"), "guest.hex");
    }
}
