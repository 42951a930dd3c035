//! A certificate for servers in tests, and the authority that vouches for it.

use std::{fs, path::Path, process::Command};

/// Makes `ca.pem`, and `cert.pem` with its `key.pem` for the server that is called `name`; `names` are
/// all of its names as OpenSSL writes them.
pub(crate) fn certify(folder: &Path, name: &str, names: &str) {
    let run = |arguments: &str| {
        let output = Command::new("openssl")
            .args(arguments.split_whitespace())
            .current_dir(folder)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "openssl {arguments}: {stderr}");
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    run(&format!("req -x509 {key} -keyout ca.key -out ca.pem -days 30 -subj /CN=ca"));
    run(&format!("req {key} -keyout key.pem -out request.pem -subj /CN={name}"));
    fs::write(folder.join("names"), format!("subjectAltName={names}\n")).unwrap();
    run("x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 9 \
         -extfile names -out cert.pem");
}
