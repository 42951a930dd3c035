//! Logs as firmware writes them, and what a node makes up.

use super::{log::*, *};

/// EFI_GLOBAL_VARIABLE in memory.
const GLOBAL: [u8; 16] =
    [0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0, 0xe0, 0x98, 0x03, 0x2b, 0x8c];
const VARIABLE: u32 = 0x8000_0001;
const ACTION: u32 = 0x8000_0007;

/// The first record, with the banks of SHA-1 and SHA-256.
fn head() -> Vec<u8> {
    let banks = [4_u16, 20, 0x0b, 32].map(u16::to_le_bytes).concat();
    let version = [0, 0, 0, 0, 0, 2, 0, 2];
    let event = [&b"Spec ID Event03\0"[..], &version, &2_u32.to_le_bytes(), &banks, &[0]].concat();
    let mut head = [[0_u32, 3].map(u32::to_le_bytes).concat(), vec![0; 20]].concat();
    head.extend(u32::try_from(event.len()).expect("short").to_le_bytes());
    [head, event].concat()
}

/// One event with the digest of `measured`.
fn event(register: u32, kind: u32, measured: &[u8], data: &[u8]) -> Vec<u8> {
    let mut event = [register, kind, 2].map(u32::to_le_bytes).concat();
    event.extend([&4_u16.to_le_bytes()[..], &[0; 20], &0x0b_u16.to_le_bytes()].concat());
    event.extend_from_slice(&Sha256::digest(measured));
    event.extend(u32::try_from(data.len()).expect("short").to_le_bytes());
    [&event, data].concat()
}

fn variable(vendor: [u8; 16], name: &str, value: &[u8]) -> Vec<u8> {
    let characters: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let lengths = [name.len() as u64, value.len() as u64].map(u64::to_le_bytes).concat();
    [&vendor[..], &lengths, &characters, value].concat()
}

/// What a register holds after these were measured.
fn extended(begin: u8, measured: &[&[u8]]) -> [u8; 32] {
    let mut value = [0; 32];
    value[31] = begin;
    for bytes in measured {
        let digest = Sha256::digest(bytes);
        value = Sha256::new().chain_update(value).chain_update(digest).finalize().into();
    }
    value
}

/// A log with Secure Boot in this state, and the registers that go with it.
fn start(secure_boot: u8) -> (Vec<u8>, BTreeMap<u8, [u8; 32]>) {
    let (checked, separator) = (variable(GLOBAL, "SecureBoot", &[secure_boot]), [0; 4]);
    let (version, calling) = (b"1\0.\x002\0\0\0", b"Calling EFI Application");
    let log = [
        head(),
        event(0, 3, b"", b"StartupLocality\0\x03"),
        event(u32::MAX, 3, b"", b"nowhere"),
        event(0, 8, version, version),
        event(7, VARIABLE, &checked, &checked),
        event(4, ACTION, calling, calling),
        event(4, 0x8000_0003, b"the program", b"where it was"),
        event(7, 4, &separator, &separator),
    ];
    let registers = BTreeMap::from([
        (0, extended(3, &[version])),
        (4, extended(0, &[calling, b"the program"])),
        (7, extended(0, &[&checked, &separator])),
        (11, [9; 32]),
    ]);
    (log.concat(), registers)
}

/// What firmware logs of a driver: where it was in memory, and its device path.
fn loaded(nodes: &[&[u8]]) -> Vec<u8> {
    let path = [&nodes.concat()[..], &[0x7f, 0xff, 4, 0]].concat();
    [&[7; 24][..], &(path.len() as u64).to_le_bytes(), &path].concat()
}

#[test]
fn drivers_of_cards_are_told_from_the_firmwares_own() {
    let root = |id: u8| [&[2, 1, 12, 0, 0xd0, 0x41, id, 0x0a][..], &2_u32.to_le_bytes()].concat();
    let pci = |device, function| [1, 1, 6, 0, function, device];
    let rom = [&[4, 8, 24, 0][..], &[0; 20]].concat();
    let volume = [&[4, 7, 20, 0][..], &[1; 16]].concat();
    let card = loaded(&[&root(3), &pci(0x1d, 2), &pci(0, 1), &rom]);
    let runtime = loaded(&[&root(8), &pci(3, 0)]);
    let file = loaded(&[&[4, 4, 8, 0, b'x', 0, 0, 0]]);
    let log = [
        head(),
        event(2, 0x8000_0004, b"rom", &card),
        event(2, 0x8000_0005, b"rom", &runtime),
        event(2, 0x8000_0004, b"own", &loaded(&[&volume])),
        event(2, 0x8000_0004, b"file", &file),
        event(2, 0x8000_0004, b"cut", &card[..33]),
        // A boot program, and what is measured elsewhere.
        event(2, 0x8000_0003, b"program", &card),
        event(0, 0x8000_0004, b"own", &card),
    ]
    .concat();
    let found = drivers(&log).expect("a log");
    let paths: Vec<_> = found.iter().map(|driver| &*driver.path).collect();
    let card = "PciRoot(0x2)/Pci(0x1d,0x2)/Pci(0x0,0x1)";
    assert_eq!(paths, [card, "PcieRoot(0x2)/Pci(0x3,0x0)", "x", ""]);
    assert_eq!((found[0].root, &found[0].hops[..]), (Some(2), &[(0x1d, 2), (0, 1)][..]));
    assert_eq!(drivers(&log[..log.len() - 1]), Err(LogError::Short));
    assert_eq!(drivers(&head()), Ok(Vec::new()));
}

#[test]
fn a_log_explains_registers_and_tells_whether_programs_are_checked() {
    for (state, shown) in [(1, true), (0, false)] {
        let (log, registers) = start(state);
        let found = judge(&log, &registers).expect("a log");
        assert_eq!((&found.explained[..], &found.unexplained[..]), (&[0, 4, 7][..], &[][..]));
        assert_eq!((found.secure_boot, found.unread), (Some(shown), None));
        let said: Vec<_> = found.events.iter().filter_map(|event| event.says.clone()).collect();
        let variable = format!("SecureBoot = {state}");
        assert_eq!(said, ["1.2", &variable, "Calling EFI Application"]);
        let kinds: Vec<_> = found.events.iter().map(|event| (&*event.kind, event.proved)).collect();
        let program = ("EV_EFI_BOOT_SERVICES_APPLICATION", false);
        assert_eq!((kinds[0], kinds[3]), (("EV_S_CRTM_VERSION", true), program));
    }
    assert_eq!(judge(&[], &BTreeMap::new()), None);
}

#[test]
fn what_a_node_makes_up_proves_nothing() {
    // The log of another start: its register is none that the TPM signed.
    let ((log, _), (_, registers)) = (start(1), start(0));
    let found = judge(&log, &registers).expect("a log");
    assert_eq!((&found.unexplained[..], found.secure_boot), (&[7][..], None));
    assert!(found.events.iter().all(|event| event.register != 7 || !event.proved));
    // The right digests, with other words beside them.
    let (log, registers) = start(0);
    let (on, off) = (variable(GLOBAL, "SecureBoot", &[1]), variable(GLOBAL, "SecureBoot", &[0]));
    let at = log.windows(off.len()).position(|window| window == off).expect("the variable");
    let mut lie = log.clone();
    lie[at..at + on.len()].copy_from_slice(&on);
    let found = judge(&lie, &registers).expect("a log");
    assert_eq!((&found.unexplained[..], found.secure_boot), (&[][..], None));
    // The true event under another kind or with other words, and one of the node's own after it.
    for (kind, data) in [(ACTION, &off), (VARIABLE, &on)] {
        let events = [event(7, kind, &off, data), event(7, VARIABLE, &on, &on)];
        let log = [head(), events.concat()].concat();
        let registers = BTreeMap::from([(7, extended(0, &[&off, &on]))]);
        let found = judge(&log, &registers).expect("a log");
        assert_eq!((&found.explained[..], found.secure_boot), (&[7][..], None));
    }
    // Another vendor's variable of that name, and the right one in another register.
    let checked = variable([7; 16], "SecureBoot", &[1]);
    for (register, checked) in [(7, &checked), (1, &on)] {
        let log = [head(), event(register, VARIABLE, checked, checked)].concat();
        let number = u8::try_from(register).expect("small");
        let registers = BTreeMap::from([(number, extended(0, &[checked]))]);
        let found = judge(&log, &registers).expect("a log");
        assert_eq!((&found.explained[..], found.secure_boot), (&[number][..], None));
    }
}

#[test]
fn a_log_that_is_none_says_why() {
    let (log, registers) = start(1);
    let unread = |log: &[u8]| judge(log, &registers).expect("a log").unread.unwrap_or_default();
    let ends = (1..log.len()).filter(|end| unread(&log[..*end]).is_empty()).count();
    assert_eq!(ends, 7, "after the head and after each event but the last");
    assert!(unread(&[1; 200]).contains("TPM 2.0"));
    let mut old = head();
    let last = old.len() - 5;
    old[last] = 0x0c;
    assert!(unread(&old).contains("SHA-256"));
    let strange = [head(), event(24, 4, b"", b"")].concat();
    assert!(unread(&strange).contains("register 24"));
    let many = [head(), event(5, 4, b"", b"").repeat(4097)].concat();
    assert!(unread(&many).contains("more than"));
}

#[test]
fn a_server_whose_hardware_measures_first_begins_in_locality_4() {
    let (hardware, version) = (b"HCRTM", b"1.2");
    let measured = [event(0, 0x8000_0010, hardware, hardware), event(0, 8, version, version)];
    let says = |locality| event(0, 3, b"", &[b"StartupLocality\0", &[locality][..]].concat());
    // Firmware that does not say so, that says it, and that says otherwise.
    for (said, begin) in [(Vec::new(), 4), (says(4), 4), (says(3), 3)] {
        let log = [head(), said, measured.concat()].concat();
        let registers = BTreeMap::from([(0, extended(begin, &[hardware, version]))]);
        let found = judge(&log, &registers).expect("a log");
        assert_eq!((&found.explained[..], found.unread), (&[0][..], None), "from {begin}");
    }
    // In another register it says nothing of the first one.
    let log = [head(), event(1, 0x8000_0010, b"", b""), event(0, 8, version, version)].concat();
    let registers = BTreeMap::from([(0, extended(0, &[version])), (1, extended(0, &[b""]))]);
    assert_eq!(judge(&log, &registers).expect("a log").explained, [0, 1]);
}

#[test]
fn what_extends_nothing_needs_no_digest() {
    let without = |kind: u32| {
        let begin = [0, kind, 1].map(u32::to_le_bytes).concat();
        let digest = [&4_u16.to_le_bytes()[..], &[0; 20]].concat();
        let data = b"StartupLocality\0\x03";
        let length = u32::try_from(data.len()).expect("short").to_le_bytes();
        [&begin[..], &digest, &length, data].concat()
    };
    let version = b"1.2";
    let registers = BTreeMap::from([(0, extended(3, &[version]))]);
    let log = |kind| [head(), without(kind), event(0, 8, version, version)].concat();
    let found = judge(&log(3), &registers).expect("a log");
    assert_eq!((&found.explained[..], found.unread), (&[0][..], None));
    let found = judge(&log(8), &registers).expect("a log");
    assert!(found.unread.unwrap_or_default().contains("SHA-256"));
}
