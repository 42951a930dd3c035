//! The disk on which cloud-init finds a machine's name, keys and user data; and the configuration for Ignition,
//! which looks for no disk.
//! Source: cloud-init documentation, "NoCloud": a FAT volume labelled `cidata` with the files
//! `meta-data` and `user-data`, and no `network-config`, so that the first card uses DHCP.
//!
//! `meta-data` is YAML, and JSON is YAML: what a renter gave is a JSON string in it and can be
//! nothing else. Names are told twice: tiny-cloud and Talos know `hostname`, FreeBSD's nuageinit `public_keys`.
//!
//! Source: Ignition docs/configuration-v3_4.md: a configuration is a JSON object, whose `ignition.version` is the
//! one thing that it has to have. docs/configuration-v3_0.md: what is generated, which all that read 3.x take.

use std::{
    borrow::Cow,
    io::{self, Cursor, Write},
};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};
use lease::api::Seed;
use serde_json::{Value, json};
use types::ids::MachineId;

/// Bytes of the volume: more than all that a seed may hold.
const SIZE: usize = 2 << 20;
/// Every release of cloud-init finds it in lower case; old ones find no other.
const LABEL: [u8; 11] = *b"cidata     ";
/// User data of renters who gave neither it nor keys: the file has to be there.
const NO_USER_DATA: &str = "#cloud-config\n{}\n";

/// Returns the volume for `machine`. The same seed makes the same bytes.
pub fn volume(machine: MachineId, seed: &Seed) -> io::Result<Vec<u8>> {
    let mut storage = Cursor::new(vec![0; SIZE]);
    let [a, b, c, d, ..] = *machine.as_bytes();
    let options =
        FormatVolumeOptions::new().volume_label(LABEL).volume_id(u32::from_le_bytes([a, b, c, d]));
    fatfs::format_volume(&mut storage, options)?;
    let files = FileSystem::new(&mut storage, FsOptions::new().update_accessed_date(false))?;
    let write = |name: &str, content: &[u8]| -> io::Result<()> {
        let mut file = files.root_dir().create_file(name)?;
        file.write_all(content)?;
        file.flush()
    };
    write("meta-data", meta_data(machine, seed).as_bytes())?;
    write("user-data", user_data(seed).as_bytes())?;
    files.unmount()?;
    Ok(storage.into_inner())
}

/// Returns the configuration for Ignition: the user data, if it is one, or one with keys and host name where there is
/// none.
pub fn ignition(seed: &Seed) -> Option<Cow<'_, str>> {
    match seed.user_data.as_deref() {
        Some(data) => is_ignition(data).then_some(Cow::Borrowed(data)),
        None => generated(seed).map(Cow::Owned),
    }
}

fn is_ignition(data: &str) -> bool {
    let document: Value = serde_json::from_str(data).unwrap_or_default();
    document.pointer("/ignition/version").is_some_and(Value::is_string)
}

/// Gives the keys to the usual user of Fedora CoreOS and Flatcar, and the machine its name, whose letters, digits,
/// hyphens and dots a URL takes as they are. Without any of them there is nothing to configure. A key that is there
/// twice is given once: Ignition refuses a configuration that repeats one, and the machine would not start.
fn generated(seed: &Seed) -> Option<String> {
    if seed.ssh_keys.is_empty() && seed.hostname.is_none() {
        return None;
    }
    let mut config = json!({"ignition": {"version": "3.0.0"}});
    let mut keys: Vec<&String> = Vec::new();
    for key in &seed.ssh_keys {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    if !keys.is_empty() {
        config["passwd"] = json!({"users": [{"name": "core", "sshAuthorizedKeys": keys}]});
    }
    if let Some(name) = &seed.hostname {
        let file = json!({
            "path": "/etc/hostname",
            "mode": 0o644,
            "overwrite": true,
            "contents": {"source": format!("data:,{name}")},
        });
        config["storage"] = json!({"files": [file]});
    }
    Some(config.to_string())
}

/// Returns the user data. What gives no keys to users by the meta-data does so by the generated one, whose YAML is
/// as simple as such systems read it; cloud-init takes a key that it finds in both once.
fn user_data(seed: &Seed) -> Cow<'_, str> {
    match seed.user_data.as_deref() {
        Some(data) => Cow::Borrowed(data),
        None if seed.ssh_keys.is_empty() => Cow::Borrowed(NO_USER_DATA),
        None => {
            let lines = seed.ssh_keys.iter().map(|key| format!("  - {}\n", json!(key)));
            let lines: String = lines.collect();
            Cow::Owned(format!("#cloud-config\nssh_authorized_keys:\n{lines}"))
        }
    }
}

/// Returns the meta-data. The instance is the machine: cloud-init does its work once.
fn meta_data(machine: MachineId, seed: &Seed) -> String {
    let id = machine.to_string();
    let hostname =
        seed.hostname.clone().unwrap_or_else(|| format!("holdfast-{}", id.get(..8).unwrap_or("")));
    let data = json!({
        "instance-id": id,
        "local-hostname": hostname,
        "hostname": hostname,
        "public-keys": seed.ssh_keys,
        "public_keys": seed.ssh_keys,
    });
    format!("{data:#}\n")
}

const _: () = {
    use lease::api::{MAX_HOSTNAME, MAX_SSH_KEY, MAX_SSH_KEYS, MAX_USER_DATA};
    // Keys are in there three times, escapes double a character at most, and the file system itself takes a
    // few clusters.
    const KEYS: usize = 3 * MAX_SSH_KEYS * (MAX_SSH_KEY + 8);
    assert!(2 * (KEYS + 2 * MAX_HOSTNAME) + MAX_USER_DATA < SIZE / 2);
};

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const MACHINE: MachineId = MachineId::from_bytes([0xab; 16]);

    fn file(volume: &[u8], name: &str) -> String {
        let files = FileSystem::new(Cursor::new(volume.to_vec()), FsOptions::new()).expect("FAT");
        // `blkid` tells the label in the root folder; the one in the boot sector goes by another name.
        let label = files.read_volume_label_from_root_dir().expect("a folder");
        assert_eq!(label.as_deref(), Some("cidata"));
        let mut text = String::new();
        let mut file = files.root_dir().open_file(name).expect("the file");
        file.read_to_string(&mut text).expect("text");
        text
    }

    #[test]
    fn the_volume_holds_name_keys_and_user_data() {
        let seed = Seed {
            hostname: Some("web-1".into()),
            ssh_keys: vec!["ssh-ed25519 AAAA \"me\": [x] # \u{fc}".into()],
            user_data: Some("#!/bin/sh\necho: '\"\n".into()),
        };
        let volume = volume(MACHINE, &seed).expect("made");
        assert_eq!(file(&volume, "user-data"), "#!/bin/sh\necho: '\"\n");
        let meta: serde_json::Value =
            serde_json::from_str(&file(&volume, "meta-data")).expect("JSON");
        assert_eq!(meta["instance-id"], "ab".repeat(16));
        for name in ["local-hostname", "hostname"] {
            assert_eq!(meta[name], "web-1", "{name}");
        }
        for keys in ["public-keys", "public_keys"] {
            assert_eq!(meta[keys], json!(["ssh-ed25519 AAAA \"me\": [x] # \u{fc}"]), "{keys}");
        }
    }

    #[test]
    fn keys_without_user_data_are_told_to_those_who_read_nothing_else() {
        let keys = ["ssh-ed25519 AAAA \"me\": [x] # \u{fc}", "ssh-rsa BBBB a\\b"];
        let seed = Seed { ssh_keys: keys.map(String::from).to_vec(), ..Seed::default() };
        let volume = volume(MACHINE, &seed).expect("made");
        let expected = "#cloud-config\nssh_authorized_keys:\n  \
                        - \"ssh-ed25519 AAAA \\\"me\\\": [x] # \u{fc}\"\n  \
                        - \"ssh-rsa BBBB a\\\\b\"\n";
        assert_eq!(file(&volume, "user-data"), expected);
        let config: Value = serde_json::from_str(&ignition(&seed).expect("one")).expect("JSON");
        let expected = json!({
            "ignition": {"version": "3.0.0"},
            "passwd": {"users": [{"name": "core", "sshAuthorizedKeys": keys}]},
        });
        assert_eq!(config, expected);
        let script = Seed { user_data: Some("#!/bin/sh\n".into()), ..seed };
        assert_eq!(ignition(&script), None, "its owner's user data says what is to be done");
    }

    #[test]
    fn a_key_that_is_there_twice_is_told_to_ignition_once() {
        let keys = ["ssh-rsa BBBB", "ssh-rsa AAAA", "ssh-rsa BBBB", "ssh-rsa AAAA me"];
        let seed = Seed { ssh_keys: keys.map(String::from).to_vec(), ..Seed::default() };
        let config: Value = serde_json::from_str(&ignition(&seed).expect("one")).expect("JSON");
        let told = config.pointer("/passwd/users/0/sshAuthorizedKeys");
        assert_eq!(told, Some(&json!(["ssh-rsa BBBB", "ssh-rsa AAAA", "ssh-rsa AAAA me"])));
    }

    #[test]
    fn a_name_without_user_data_is_told_to_ignition_with_keys_or_without() {
        let config = |seed: &Seed| -> Value {
            serde_json::from_str(&ignition(seed).expect("one")).expect("JSON")
        };
        let file = json!({
            "path": "/etc/hostname",
            "mode": 420,
            "overwrite": true,
            "contents": {"source": "data:,web-1.example"},
        });
        let named = Seed { hostname: Some("web-1.example".into()), ..Seed::default() };
        let expected =
            json!({"ignition": {"version": "3.0.0"}, "storage": {"files": [file.clone()]}});
        assert_eq!(config(&named), expected);
        let both = Seed { ssh_keys: vec!["ssh-rsa AAAA".into()], ..named.clone() };
        let expected = json!({
            "ignition": {"version": "3.0.0"},
            "passwd": {"users": [{"name": "core", "sshAuthorizedKeys": ["ssh-rsa AAAA"]}]},
            "storage": {"files": [file]},
        });
        assert_eq!(config(&both), expected);
        let script = Seed { user_data: Some("#!/bin/sh\n".into()), ..named };
        assert_eq!(ignition(&script), None, "its owner's user data says what is to be done");
    }

    #[test]
    fn an_empty_seed_names_the_machine() {
        let volume = volume(MACHINE, &Seed::default()).expect("made");
        assert!(file(&volume, "meta-data").contains("\"holdfast-abababab\""));
        assert_eq!(file(&volume, "user-data"), NO_USER_DATA);
    }

    #[test]
    fn user_data_that_names_a_version_of_ignition_is_its_configuration() {
        let is_one = |data: &str| {
            let seed = Seed { user_data: Some(data.into()), ..Seed::default() };
            ignition(&seed).is_some_and(|found| found == data)
        };
        assert!(is_one(r#"{"ignition": {"version": "3.4.0"}, "passwd": {"users": []}}"#));
        assert!(is_one("\n {\"ignition\":{\"version\":\"2.3.0\",\"config\":{}}}\n"));
        assert!(!is_one(r#"{"ignition": {"config": {}}}"#));
        assert!(!is_one(r#"{"ignition": {"version": 3}}"#));
        assert!(!is_one(r#"{"version": "3.4.0"}"#));
        assert!(!is_one(r#"["ignition", "version"]"#));
        assert!(!is_one(r#"{"ignition": {"version": "3.4.0"}"#));
        assert!(!is_one("#cloud-config\nignition: {version: 3.4.0}\n"));
        // However deep it is nested, it is a document or none.
        assert!(!is_one(&"[".repeat(128 << 10)));
        assert_eq!(ignition(&Seed::default()), None);
    }

    #[test]
    fn the_largest_seed_fits_and_the_same_seed_makes_the_same_bytes() {
        let seed = Seed {
            hostname: Some("a".repeat(63)),
            ssh_keys: vec!["\\".repeat(4096); 32],
            user_data: Some("x".repeat(128 << 10)),
        };
        let made = volume(MACHINE, &seed).expect("fits");
        assert_eq!(made, volume(MACHINE, &seed).expect("fits"));
        volume(MACHINE, &Seed { user_data: None, ..seed }).expect("keys fit three times");
    }
}
