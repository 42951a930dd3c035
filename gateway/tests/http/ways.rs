//! The command line's ways to a gateway: behind TLS, through a proxy, and out into a pipe that is closed.

use std::{net::SocketAddr, path::Path, process::Output, sync::Arc};

use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::mpsc,
};
use tokio_rustls::TlsAcceptor;

use crate::harness::{
    Serving, lease,
    node::{Manner, Node, receipts},
    renter, signed_lease, within,
};

/// A renter's folder: key, lease, a file, and what vouches for the gateway.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new(key: &lease::SigningKey, lease: &lease::document::Lease) -> Self {
        let folder = tempfile::tempdir().unwrap();
        gateway::keyfile::create(&folder.path().join("renter.key"), key).unwrap();
        let envelope = serde_json::to_vec(&signed_lease(lease)).unwrap();
        std::fs::write(folder.path().join("lease.json"), envelope).unwrap();
        std::fs::write(folder.path().join("kernel"), b"kernel").unwrap();
        Self(folder)
    }

    fn command(&self, url: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command.current_dir(self.0.path()).env_clear().kill_on_drop(true);
        command.args(["--gateway", url, "--key", "renter.key"]).args(arguments);
        command
    }

    async fn holdfast(&self, url: &str, arguments: &[&str]) -> Output {
        within("holdfast", self.command(url, arguments).output()).await.unwrap()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Makes an authority, `ca.pem`, and a certificate of it for `localhost` and `gw.example`.
fn certify(folder: &Path) -> TlsAcceptor {
    let names = "subjectAltName=DNS:localhost,DNS:gw.example";
    let request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2";
    let authority = "-subj /CN=authority -keyout ca.key -out ca.pem";
    let own = "-subj /CN=gateway -keyout tls.key -out tls.pem -CA ca.pem -CAkey ca.key";
    let own = format!("{own} -addext {names} -addext basicConstraints=critical,CA:FALSE");
    for more in [authority, &own] {
        let words = request.split(' ').chain(more.split(' '));
        let made = std::process::Command::new("openssl").args(words).current_dir(folder).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", said(&made));
    }
    let chain = vec![CertificateDer::from_pem_file(folder.join("tls.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(folder.join("tls.key")).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// Ends TLS before a gateway, as a reverse proxy does.
async fn front(acceptor: TlsAcceptor, gateway: SocketAddr) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // A client that does not trust us is gone, and has said so.
                let Ok(mut client) = acceptor.accept(stream).await else { return };
                let mut gateway = TcpStream::connect(gateway).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut gateway).await;
            });
        }
    });
    port
}

/// A proxy that connects everybody with port `target` here, whatever they name; and what they say.
async fn proxy(target: u16) -> (u16, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (heads, said) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(client.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            let known = head.contains("proxy-authorization: Basic bWU6c2VjcmV0\r\n");
            heads.send(head).unwrap();
            let answer = if known { "200 Connected" } else { "407 Who" };
            client.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes()).await.unwrap();
            if known {
                let mut there = TcpStream::connect(("127.0.0.1", target)).await.unwrap();
                tokio::spawn(async move { copy_bidirectional(&mut client, &mut there).await });
            }
        }
    });
    (port, said)
}

#[tokio::test]
async fn a_gateway_behind_tls_serves_commands_tunnels_and_curl() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 120, Manner::Prompt).await;
    let key = renter(121);
    let desk = Desk::new(&key, &lease(1, node.id(), &key));
    let port = front(certify(desk.0.path()), gateway.http).await;
    let url = format!("https://localhost:{port}");
    let trusting = ["--ca-file", "ca.pem"];
    let ask =
        async |arguments: &[&str]| desk.holdfast(&url, &[&trusting, arguments].concat()).await;
    let pushed = ask(&["content", "push", "kernel", "--lease", "lease.json"]).await;
    assert!(pushed.status.success(), "{}", said(&pushed));
    let machine = "01".repeat(16);
    let words = [&trusting[..], &["tunnel", &machine, "22"]].concat();
    let mut tunnel = desk.command(&url, &words);
    let tunnel = tunnel.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    let tunnel = tunnel.spawn().unwrap();
    let (_, mut guest) = node.accept().await;
    guest.write_all(b"SSH-2.0-guest\r\n").await.unwrap();
    guest.shutdown().await.unwrap();
    let shown = within("the tunnel's end", tunnel.wait_with_output()).await.unwrap();
    assert_eq!((shown.status.code(), &*shown.stdout), (Some(0), &b"SSH-2.0-guest\r\n"[..]));
    let line = ask(&["--curl", "nodes"]).await;
    let line = String::from_utf8(line.stdout).unwrap();
    assert!(line.contains("--cacert '/") && line.contains(&format!("'{url}/v1/nodes'")), "{line}");
}

#[tokio::test]
async fn what_is_wrong_with_tls_is_told_with_what_to_do() {
    let gateway = Serving::start().await;
    let key = renter(122);
    let desk = Desk::new(&key, &lease(1, gateway.gateway.overlay.node_id(), &key));
    let port = front(certify(desk.0.path()), gateway.http).await;
    // The tunnel is not tried again, so the mistakes are told at once.
    let machine = "01".repeat(16);
    let tunnel = async |url: &str, more: &[&str]| {
        let output = desk.holdfast(url, &[more, &["tunnel", &machine, "22"]].concat()).await;
        assert!(output.stdout.is_empty());
        (output.status.code(), said(&output))
    };
    let url = format!("https://localhost:{port}");
    // Nobody that it knows vouches: the gateway's own certificate is an authority's of nobody.
    let (status, why) = tunnel(&url, &["--ca-file", "renter.key"]).await;
    assert!(status == Some(1) && why.contains("renter.key") && why.contains("PEM"), "{why}");
    certify(desk.0.path());
    let (status, why) = tunnel(&url, &["--ca-file", "ca.pem"]).await;
    assert!(status == Some(4) && why.contains("--ca-file"), "{why}");
    let (status, why) =
        tunnel(&format!("https://{}", gateway.http), &["--ca-file", "ca.pem"]).await;
    assert!(status == Some(4) && why.contains("http://"), "{why}");
    let (status, why) = tunnel("gw.example:8080", &[]).await;
    assert!(status == Some(1) && why.contains("http://HOST:PORT"), "{why}");
}

#[tokio::test]
async fn a_proxy_of_the_environment_is_asked_to_connect() {
    let gateway = Serving::start().await;
    let key = renter(123);
    let desk = Desk::new(&key, &lease(1, gateway.gateway.overlay.node_id(), &key));
    let port = front(certify(desk.0.path()), gateway.http).await;
    let (proxy, mut heads) = proxy(port).await;
    let ask = async |user: &str, arguments: &[&str]| {
        let words = [&["--ca-file", "ca.pem"], arguments].concat();
        let mut command = desk.command("https://gw.example", &words);
        command.env("HTTPS_PROXY", format!("http://{user}127.0.0.1:{proxy}"));
        within("holdfast", command.output()).await.unwrap()
    };
    let listed = ask("me:secret@", &["nodes"]).await;
    assert!(listed.status.success(), "{}", said(&listed));
    let head = heads.recv().await.unwrap();
    assert!(head.starts_with("CONNECT gw.example:443 HTTP/1.1\r\n"), "{head}");
    let refused = ask("", &["tunnel", &"01".repeat(16), "22"]).await;
    assert!(refused.status.code() == Some(4) && said(&refused).contains("USER:PASSWORD@"));
}

#[tokio::test]
async fn a_tunnel_whose_node_dies_is_no_success() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 130, Manner::Prompt).await;
    let key = renter(131);
    let desk = Desk::new(&key, &lease(1, node.id(), &key));
    let url = format!("http://{}", gateway.http);
    let shown = desk.holdfast(&url, &["lease", "register", "lease.json"]).await;
    assert!(shown.status.success(), "{}", said(&shown));
    let mut tunnel = desk.command(&url, &["tunnel", &"01".repeat(16), "22"]);
    tunnel.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    let mut tunnel = tunnel.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let (_, mut guest) = node.accept().await;
    guest.write_all(b"half").await.unwrap();
    let output = tunnel.stdout.as_mut().unwrap();
    within("what came", output.read_exact(&mut [0; 4])).await.unwrap();
    drop((node, guest));
    let ended = within("the tunnel's end", tunnel.wait_with_output()).await.unwrap();
    assert_eq!(ended.status.code(), Some(4), "{}", said(&ended));
    assert!(said(&ended).contains("the tunnel broke off: the machine's node"), "{}", said(&ended));
}

#[tokio::test]
async fn an_upload_that_is_refused_is_told_and_not_sent() {
    let gateway = Serving::with(|config| config.max_per_renter = 1000).await;
    let key = renter(124);
    let desk = Desk::new(&key, &lease(1, gateway.gateway.overlay.node_id(), &key));
    let file = std::fs::File::create(desk.0.path().join("disk")).unwrap();
    file.set_len(256 << 20).unwrap();
    let (port, mut heads) = counting(gateway.http).await;
    let url = format!("http://127.0.0.1:{port}");
    let push = ["content", "push", "disk", "--lease", "lease.json"];
    let refused = desk.holdfast(&url, &push).await;
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
    assert!(said(&refused).contains("more than 1000 bytes"), "{}", said(&refused));
    heads.close();
    let mut sent = 0;
    while let Some(bytes) = heads.recv().await {
        sent += bytes;
    }
    assert!(sent < 1 << 20, "{sent} bytes went out");
    let pipe = desk
        .command(&url, &["content", "push", "/dev/stdin"])
        .stdin(std::process::Stdio::piped())
        .output();
    let pipe = within("holdfast", pipe).await.unwrap();
    assert!(pipe.status.code() == Some(1) && said(&pipe).contains("read twice"), "{}", said(&pipe));
}

/// Passes connections on and tells how many bytes clients sent over each.
async fn counting(gateway: SocketAddr) -> (u16, mpsc::UnboundedReceiver<u64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (counts, counted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(gateway).await.unwrap();
            let counts = counts.clone();
            let ((mut read, mut write), (mut from, mut to)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from, &mut write).await });
            tokio::spawn(async move {
                let mut chunk = vec![0; 64 << 10];
                while let Ok(length @ 1..) = read.read(&mut chunk).await {
                    // Nobody counts after the test.
                    let _ = counts.send(length as u64);
                    if to.write_all(&chunk[..length]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, counted)
}

#[tokio::test]
async fn a_list_that_lacks_a_nodes_machines_says_so() {
    let gateway = Serving::with(|config| config.limits.node_ms = 300).await;
    let node = Node::join(&gateway, 125, Manner::Silent).await;
    let key = renter(126);
    let desk = Desk::new(&key, &lease(1, node.id(), &key));
    let url = format!("http://{}", gateway.http);
    let shown = desk.holdfast(&url, &["lease", "register", "lease.json"]).await;
    assert!(shown.status.success(), "{}", said(&shown));
    let stands = String::from_utf8(shown.stdout).unwrap();
    let told = |row: &str| stands.lines().any(|line| line.split_whitespace().next() == Some(row));
    assert!(["lease", "serial", "end", "content", "quota"].into_iter().all(told), "{stands}");
    assert!(!stands.contains(" -"), "{stands}");
    let listed = desk.holdfast(&url, &["--json", "machines", "list"]).await;
    assert_eq!((listed.status.code(), &*listed.stdout), (Some(4), &b"[]\n"[..]));
    assert!(said(&listed).contains(&node.id().to_string()), "{}", said(&listed));
}

#[tokio::test]
async fn a_reader_that_has_enough_is_no_error() {
    let key = renter(127);
    let desk = Desk::new(&key, &lease(1, types::ids::NodeId::from_bytes([1; 32]), &key));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = desk.command("http://127.0.0.1:1", &["lease", "show", "lease.json"]);
    command.stdout(writer).stderr(std::process::Stdio::piped());
    let ended = within("holdfast", command.spawn().unwrap().wait_with_output()).await.unwrap();
    assert_eq!((ended.status.code(), &*said(&ended)), (Some(141), ""));
}

#[tokio::test]
async fn receipts_that_were_kept_are_checked_without_a_gateway() {
    let node = lease::SigningKey::from_bytes(&[128; 32]);
    let key = renter(129);
    let id = types::ids::NodeId::from(lease::authority::public_key(&node));
    let wanted = lease(1, id, &key);
    let desk = Desk::new(&key, &wanted);
    let mut meter = lease::metering::Meter::new(wanted.start);
    meter.handle_started(wanted.start);
    let receipt = meter.close(wanted.start.plus(60), &wanted).unwrap();
    let signed = lease::metering::sign(receipt, &node).unwrap();
    let keep = |receipts: &Value| {
        let text = json!({ "receipts": receipts, "checked": "anything" }).to_string();
        std::fs::write(desk.0.path().join("kept.json"), text).unwrap();
    };
    let machine = wanted.id.to_string();
    let words = ["receipts", &machine, "--lease", "lease.json", "--saved", "kept.json"];
    keep(&json!([signed]));
    let checked = desk.holdfast("http://127.0.0.1:1", &words).await;
    assert!(checked.status.success(), "{}", said(&checked));
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(text.contains("total      0.000000 FREE for 60 s"), "{text}");
    let mut other = json!([signed]);
    other[0]["receipt"]["running_s"] = json!(61);
    keep(&other);
    let refused = desk.holdfast("http://127.0.0.1:1", &words).await;
    assert!(refused.status.code() == Some(1) && said(&refused).contains("receipt 1"));
    // A fixed receipt of another node's is none of this lease's.
    keep(&json!(receipts(&wanted).receipts));
    assert_eq!(desk.holdfast("http://127.0.0.1:1", &words).await.status.code(), Some(1));
}
