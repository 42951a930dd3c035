use super::*;

const KEY: &str = "0101010101010101010101010101010101010101010101010101010101010101";

fn document(extra: &str) -> String {
    format!("version = 1\n{extra}\n[authority]\nthreshold = 1\nkeys = [\"{KEY}\"]\n")
}

#[test]
fn smallest_document_is_enough() {
    let spec = NodeSpec::parse(document("").as_bytes()).expect("valid");
    assert_eq!(spec.network.mode, NetworkMode::Auto);
    assert_eq!(spec.machines.retain_s, 864_000);
}

#[test]
fn unknown_key_is_named_with_its_line() {
    let refusal = NodeSpec::parse(document("nmae = \"x\"").as_bytes()).expect_err("typo");
    let ConfigError::Document(Explained { line, message, .. }) = refusal else {
        panic!("{refusal}")
    };
    assert_eq!(line, 2);
    assert!(message.contains("nmae"), "{message}");
}

/// The line, what it says, and what is right.
fn wrong(text: &str) -> (usize, String, String) {
    match NodeSpec::parse(text.as_bytes()) {
        Err(ConfigError::Value { line, said, right }) => (line, said, right),
        other => panic!("{other:?}"),
    }
}

/// The same of a value that none of its type is.
fn unreadable(text: &str) -> (usize, String) {
    match NodeSpec::parse(text.as_bytes()) {
        Err(ConfigError::Document(Explained { line, message, .. })) => (line, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn threshold_counts_different_keys() {
    let text = format!("version = 1\n[authority]\nthreshold = 2\nkeys = [\"{KEY}\", \"{KEY}\"]\n");
    let (line, said, right) = wrong(&text);
    assert_eq!((line, said.as_str()), (3, "authority.threshold = 2"));
    assert!(right.contains("1 to 1"), "{right}");
    let none = "version = 1\nauthority = { threshold = 1, keys = [] }\n";
    assert_eq!(wrong(none).1, "authority.keys");
}

#[test]
fn keys_that_can_check_no_signature_are_refused() {
    let bad = "02".repeat(32);
    let text =
        format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\n\"{KEY}\",\n\"{bad}\"]\n");
    let (line, said, right) = wrong(&text);
    assert_eq!((line, said), (6, format!("authority.keys[1] = \"{bad}\"")));
    assert!(right.contains("holdfast keygen"), "{right}");
    let said = |text: &str| wrong(&document(text)).1;
    assert!(said(&format!("operators = [\"{bad}\"]")).starts_with("operators[0]"));
    let escrow = said(&format!("[install]\nescrow = [\"{KEY}\", \"{bad}\"]"));
    assert!(escrow.starts_with("install.escrow[1]"), "{escrow}");
    let seed = |key: &str| {
        let address = "address = \"192.0.2.1:4600\"";
        document(&format!("[[overlay.seeds]]\nnode = \"{key}\"\n{address}"))
    };
    assert!(NodeSpec::parse(seed(KEY).as_bytes()).is_ok());
    let (line, said, _) = wrong(&seed(&bad));
    assert_eq!((line, said), (3, format!("overlay.seeds[0].node = \"{bad}\"")));
}

#[test]
fn the_recovery_key_is_sealed_to_eight_at_most() {
    let escrow = |count| {
        let keys = vec![format!("\"{KEY}\""); count].join(", ");
        document(&format!("[install]\nescrow = [{keys}]"))
    };
    assert!(NodeSpec::parse(escrow(8).as_bytes()).is_ok());
    let (line, said, right) = wrong(&escrow(9));
    assert_eq!((line, said.as_str()), (3, "install.escrow"));
    assert_eq!(right, "it names 9 keys; at most 8 are right");
}

#[test]
fn machines_need_an_ipv4_network_with_room() {
    let subnet = |text: &str| document(&format!("[machines]\nsubnet = \"{text}\""));
    for good in ["10.77.0.0/30", "10.77.3.9/22", "0.0.0.0/0"] {
        assert!(NodeSpec::parse(subnet(good).as_bytes()).is_ok(), "{good}");
    }
    for bad in ["2001:db8::/64", "10.77.0.0/31", "10.77.0.0/32", "10.77.0.0", "10.77.0.0/33"] {
        let (line, said, right) = wrong(&subnet(bad));
        assert_eq!((line, said), (3, format!("machines.subnet = \"{bad}\"")));
        assert!(right.contains("10.77.0.0/16"), "{right}");
    }
}

#[test]
fn what_is_linked_is_two_gpus_at_least() {
    let linked = |sets: &str| document(&format!("[machines]\nlinked = {sets}"));
    let (one, two) = ("\"0000:41:00.0\"", "\"0000:61:00.0\"");
    for good in ["[]".to_owned(), format!("[[{one}, {two}]]")] {
        assert!(NodeSpec::parse(linked(&good).as_bytes()).is_ok(), "{good}");
    }
    for bad in [format!("[[{one}, {two}], [{one}]]"), format!("[[{two}, {one}], [{one}, {one}]]")] {
        let (line, _, right) = wrong(&linked(&bad));
        assert_eq!((line, right.contains("two different GPUs")), (3, true), "{right}");
    }
}

#[test]
fn wrong_numbers_are_told_with_line_and_key() {
    let (line, said, right) = wrong(&document("[machines]\nnet_mbit = 0"));
    assert_eq!((line, said.as_str()), (3, "machines.net_mbit = 0"));
    assert_eq!(right, "it must be 1 to 400000");
    let (line, said, _) = wrong(&document("network = { trial_s = 29 }"));
    assert_eq!((line, said.as_str()), (2, "network.trial_s = 29"));
    let updates = "[updates]\nmirrors = []\nroot = '{}'\ncheck_s = 4";
    let (line, message) = unreadable(&document(updates));
    assert_eq!((line, message.as_str()), (5, "updates.check_s: found 4; 5 to 604800 is right"));
}

#[test]
fn what_is_no_address_is_told_with_what_would_be_one() {
    let seed = format!("[[overlay.seeds]]\nnode = \"{KEY}\"\naddress = \"gw.example:4600\"");
    let (line, message) = unreadable(&document(&seed));
    assert_eq!(line, 4);
    assert!(message.starts_with("overlay.seeds[0].address: \"gw.example:4600\""), "{message}");
    assert!(message.contains("names are not looked up"), "{message}");
    let (line, message) = unreadable(&document("[network]\ndns = [\"192.0.2.1\", \"ns\"]"));
    assert_eq!(line, 3);
    assert!(message.starts_with("network.dns: \"ns\""), "{message}");
    let (_, message) = unreadable(&document("[metrics]\nlisten = \":9100\""));
    assert!(message.starts_with("metrics.listen: \":9100\""), "{message}");
}

#[test]
fn static_mode_needs_addresses() {
    let (line, said, _) = wrong(&document("[network]\nmode = \"static\""));
    assert_eq!((line, said.as_str()), (2, "network.addresses is left out"));
    let (line, said, _) = wrong(&document("[network]\naddresses = [\"192.0.2.5/24\"]"));
    assert_eq!((line, said.as_str()), (3, "network.addresses"));
}

#[test]
fn a_gateway_needs_an_address_of_its_family() {
    let gateways = |gateways: &str| {
        document(&format!(
            "[network]\nmode = \"static\"\naddresses = [\"192.0.2.5/24\"]\ngateways = [{gateways}]"
        ))
    };
    assert!(NodeSpec::parse(gateways("\"192.0.2.1\"").as_bytes()).is_ok());
    let (line, said, _) = wrong(&gateways("\"192.0.2.1\", \"2001:db8::1\""));
    assert_eq!((line, said.as_str()), (5, "network.gateways[1] = \"2001:db8::1\""));
}

#[test]
fn other_encodings_are_told_what_is_read() {
    // As some editors save: UTF-16 with a byte order mark.
    let refusal = NodeSpec::parse(b"\xff\xfev\0e\0").expect_err("UTF-16");
    assert_eq!(refusal, ConfigError::Encoding { line: 1, found: "it is UTF-16" });
    assert!(refusal.to_string().contains("save it as UTF-8"), "{refusal}");
    // The same without the mark; and in Latin-1; and a text that somebody padded.
    let told = |bytes: &[u8]| NodeSpec::parse(bytes).expect_err("refused").to_string();
    assert!(told(b"v\0e\0").contains("UTF-16"));
    assert!(told(b"version = 1\nname = \"K\xf6ln\"\n").contains("line 2: it holds a character"));
    assert!(told(b"version = 1\n\0\0").contains("line 2: it holds a zero byte"));
    // A mark before UTF-8 and the ends of lines of Windows are none of the provider's business.
    let text = document("name = \"x\"").replace('\n', "\r\n");
    assert!(NodeSpec::parse(format!("\u{feff}{text}").as_bytes()).is_ok());
}

#[test]
fn only_routed_machines_can_be_open() {
    let parse = |text: &str| NodeSpec::parse(document(text).as_bytes());
    let routed = "[machines]\nnetwork = \"routed\"\nsubnet = \"192.0.2.0/24\"\ninbound = \"open\"";
    assert_eq!(parse(routed).expect("valid").machines.inbound, Inbound::Open);
    assert!(parse("[machines]\ninbound = \"open\"\nipv6 = \"2001:db8:1::/48\"").is_ok());
    for text in ["", "ipv6 = \"off\"\n"] {
        let refusal = parse(&format!("[machines]\n{text}inbound = \"open\"")).expect_err("nat");
        assert!(refusal.to_string().contains("machines.network"), "{refusal}");
    }
}

#[test]
fn machines_ipv6_has_room_for_a_network_each() {
    let open = document("[machines]\nipv6 = \"delegated\"\ninbound = \"open\"");
    let spec = NodeSpec::parse(open.as_bytes()).expect("valid");
    assert_eq!(spec.machines.ipv6.as_deref(), Some(DELEGATED));
    let parse = |prefix: &str| {
        let text = document(&format!("[machines]\nipv6 = \"{prefix}\""));
        NodeSpec::parse(text.as_bytes()).map_err(|refusal| refusal.to_string())
    };
    for prefix in ["off", "2001:db8::/48", "2001:db8::/56", "2001:db8::/57", "2001:db8::/63"] {
        assert_eq!(parse(prefix).expect("valid").machines.ipv6.as_deref(), Some(prefix));
    }
    for prefix in ["2001:db8::/64", "2001:db8::/80", "2001:db8::1/128"] {
        let refusal = parse(prefix).expect_err("one network");
        assert!(refusal.contains("machines.ipv6") && refusal.contains("/60"), "{refusal}");
    }
    for prefix in ["2001:db8::/47", "192.0.2.0/24", "on"] {
        let refusal = parse(prefix).expect_err("no such prefix");
        assert!(refusal.contains("48 to 63"), "{refusal}");
    }
}

#[test]
fn bridged_machines_need_an_uplink_of_their_own() {
    let parse = |machines: &str, uplink: &str| {
        let card = "card = { name = \"eth1\" }";
        let text = format!(
            "[machines]\nnetwork = \"bridged\"\n{machines}\n[[network.uplinks]]\nname = \"guests\"\n{card}\n{uplink}"
        );
        NodeSpec::parse(document(&text).as_bytes())
    };
    let off = "ipv4 = \"off\"\nipv6 = \"off\"";
    let spec = parse("uplink = \"guests\"", off).expect("valid");
    assert_eq!(spec.machines.network, MachineNetwork::Bridged);
    assert_eq!(spec.machines.neighbours, Neighbours::Apart);
    let told =
        |machines: &str, uplink: &str| parse(machines, uplink).expect_err("refused").to_string();
    assert!(told("", off).contains("set machines.uplink"));
    assert!(told("uplink = \"eth1\"", off).contains("[[network.uplinks]]"));
    assert!(told("uplink = \"guests\"", "ipv4 = \"off\"").contains("ipv6 = \"off\""));
    assert!(told("uplink = \"guests\"\nipv6 = \"off\"", off).contains("leave it out"));
    let alone = NodeSpec::parse(document("[machines]\nneighbours = \"together\"").as_bytes());
    assert!(alone.expect_err("nat").to_string().contains("bridged"));
}

#[test]
fn texts_that_name_what_they_must_be_are_refused() {
    let (line, said, right) = wrong(&document("[time]\nnts = [\"https://time.example\"]"));
    assert_eq!((line, said.as_str()), (3, "time.nts[0] = \"https://time.example\""));
    assert!(right.contains("no URL"), "{right}");
    assert_eq!(wrong(&document("[time]\nntp = [\"\"]")).1, "time.ntp[0] = \"\"");
    let roots = wrong(&document("[time]\nnts_roots = \"/etc/ca.pem\""));
    assert_eq!(roots.1, "time.nts_roots = \"/etc/ca.pem\"");
    let root = wrong(&document("[updates]\nmirrors = []\nroot = \"root.json\""));
    assert_eq!((root.0, root.1.as_str()), (4, "updates.root = \"root.json\""));
    let time = "[time]\nntp = [\"192.0.2.1\", \"2001:db8::1\"]\nnts = [\"a.example:4461\"]\n";
    assert!(NodeSpec::parse(document(time).as_bytes()).is_ok());
    let root = "[updates]\nmirrors = []\nroot = '''\n{}'''";
    assert!(NodeSpec::parse(document(root).as_bytes()).is_ok());
}

#[test]
fn faults_of_uplinks_name_their_key() {
    let card = "[[network.uplinks]]\nname = \"a\"\ncard = { name = \"eth0\" }\n";
    let vlan = |rest: &str| format!("{card}[[network.uplinks]]\nname = \"b\"\n{rest}");
    let bond = |rest: &str| {
        format!(
            "[[network.uplinks]]\nname = \"a\"\n[network.uplinks.bond]\nmode = \"802.3ad\"\n{rest}"
        )
    };
    let cases = [
        (vlan("over = \"a\"\nvlan = 4095"), "network.uplinks[1].vlan = 4095"),
        (vlan("over = \"a\""), "network.uplinks[1].vlan is left out"),
        (vlan("over = \"c\"\nvlan = 7"), "network.uplinks[1].over = \"c\""),
        (format!("{card}vlan = 7"), "network.uplinks[0].over is left out"),
        (bond("cards = []"), "network.uplinks[0].bond.cards"),
        (
            bond("cards = [{ mac = \"02-00-00-00-00-01\" }]"),
            "network.uplinks[0].bond.cards[0].mac = \"02-00-00-00-00-01\"",
        ),
        (format!("{card}ipv4 = \"static\""), "network.uplinks[0].ipv4 = \"static\""),
        (
            format!("{card}addresses = [\"192.0.2.1\"]"),
            "network.uplinks[0].addresses[0] = \"192.0.2.1\"",
        ),
        (
            format!("{card}gateways = [\"192.0.2.1\"]"),
            "network.uplinks[0].gateways[0] = \"192.0.2.1\"",
        ),
        (
            format!("{card}routes = [{{ to = \"192.0.2.0\" }}]"),
            "network.uplinks[0].routes[0].to = \"192.0.2.0\"",
        ),
    ];
    let found = cases.each_ref().map(|(text, _)| wrong(&document(text)).1);
    assert_eq!(found.each_ref().map(String::as_str), cases.each_ref().map(|(_, said)| *said));
}

#[test]
fn other_versions_are_refused() {
    let refusal = NodeSpec::parse(b"version = 2\n").expect_err("unknown version");
    assert!(matches!(refusal, ConfigError::Document(Explained { line: 1, .. })), "{refusal}");
}
