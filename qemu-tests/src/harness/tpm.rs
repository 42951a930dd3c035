//! A TPM 2.0 for a host: Debian's swtpm, its state in a folder of its own; and who made it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::programs::program;

/// How long it may take to listen.
const LIMIT: Duration = Duration::from_secs(20);

/// A running TPM. It ends with the host that uses it, or when it is dropped.
pub struct Tpm {
    child: Child,
    socket: PathBuf,
}

impl Tpm {
    /// Starts one; what it remembers is in `folder`.
    pub fn start(folder: &Path) -> Result<Self> {
        let control = |path: &Path| vec!["--ctrl".to_owned(), unix(path)];
        Self::listen(folder, control, "startup-clear")
    }

    /// Starts one that whoever connects to its socket speaks to.
    fn alone(folder: &Path) -> Result<Self> {
        let control = folder.join("control.sock");
        let sockets = |path: &Path| {
            vec!["--server".to_owned(), unix(path), "--ctrl".to_owned(), unix(&control)]
        };
        Self::listen(folder, sockets, "not-need-init,startup-clear")
    }

    fn listen(folder: &Path, sockets: impl Fn(&Path) -> Vec<String>, flags: &str) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let socket = folder.join("tpm.sock");
        fs::remove_file(&socket).ok();
        let child = Command::new("swtpm")
            .args(["socket", "--tpm2", "--tpmstate"])
            .arg(format!("dir={}", folder.display()))
            .args(sockets(&socket))
            .args(["--flags", flags])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start swtpm (package swtpm)")?;
        let tpm = Self { child, socket };
        let deadline = Instant::now() + LIMIT;
        while !tpm.socket.exists() {
            if Instant::now() > deadline {
                bail!("swtpm does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(tpm)
    }

    /// Returns QEMU's arguments for a host with this TPM.
    pub fn arguments(&self) -> Vec<String> {
        let socket = format!("socket,id=tpm,path={}", self.socket.display());
        let words = ["-chardev", &socket, "-tpmdev", "emulator,id=tpm0,chardev=tpm"];
        let device = ["-device", "tpm-tis,tpmdev=tpm0"];
        words.into_iter().chain(device).map(str::to_owned).collect()
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn unix(path: &Path) -> String {
    format!("type=unixio,path={}", path.display())
}

/// What `openssl` writes into a maker's certificates.
const KINDS: &str = "
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign
[tpm]
basicConstraints = critical, CA:false
keyUsage = critical, keyAgreement
extendedKeyUsage = 2.23.133.8.1
subjectAltName = critical, dirName:tpm_name
[tpm_name]
# What is before the first dot only keeps the lines apart.
1.2.23.133.2.1 = id:54455354
2.2.23.133.2.2 = Emulated
3.2.23.133.2.3 = id:00010002
";

/// A maker of TPMs, with an authority of its own.
pub struct Maker {
    folder: PathBuf,
}

impl Maker {
    /// Makes its authority, called `name`, in `folder`.
    pub fn new(folder: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("kinds"), KINDS)?;
        let maker = Self { folder: folder.to_owned() };
        let key = "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out authority.key";
        maker.openssl(key)?;
        maker.openssl(&format!(
            "req -new -x509 -key authority.key -subj /O=Test/CN={name} -days 365 -config kinds \
             -extensions authority -out authority.pem"
        ))?;
        Ok(maker)
    }

    /// Returns the file of its authority's certificate.
    pub fn authority(&self) -> PathBuf {
        self.folder.join("authority.pem")
    }

    /// Makes the TPM in `folder`, which does not run, and leaves this maker's certificate in it.
    pub fn make(&self, folder: &Path) -> Result<()> {
        let tpm = Tpm::alone(folder)?;
        let speak = |file: Option<&Path>| {
            let mut command = Command::new(program("examples/maker")?);
            let output = command.arg(&tpm.socket).args(file).output()?;
            if !output.status.success() {
                bail!("the TPM's maker: {}", String::from_utf8_lossy(&output.stderr));
            }
            anyhow::Ok(output.stdout)
        };
        fs::write(self.folder.join("tpm.pem"), speak(None)?)?;
        self.openssl(
            "x509 -new -force_pubkey tpm.pem -subj / -CA authority.pem -CAkey authority.key \
             -set_serial 9 -days 300 -extfile kinds -extensions tpm -outform DER -out tpm.der",
        )?;
        speak(Some(&self.folder.join("tpm.der"))).map(drop)
    }

    fn openssl(&self, arguments: &str) -> Result<()> {
        let mut command = Command::new("openssl");
        let ran = command.args(arguments.split(' ')).current_dir(&self.folder).output()?;
        if !ran.status.success() {
            bail!("openssl {arguments}: {}", String::from_utf8_lossy(&ran.stderr));
        }
        Ok(())
    }
}
