//! What unit tests of several modules share.

use std::fs;

/// Makes a folder with these files, as a stand-in for the root of a server.
pub(crate) fn root(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, bytes) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, bytes).expect("written");
    }
    root
}
