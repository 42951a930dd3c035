//! Whoever stands before the server sees the node's pages, and turns them by keys.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::Path,
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    scene::image_folder,
};
use serde_json::json;

/// From power-on to the screen's program at work, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(150);
/// From a key to the page.
const SOON: Duration = Duration::from_secs(40);

/// Height of a character of the console's font, in pixels.
const ROW: usize = 16;
/// The bars' colour.
const GRAY: [u8; 3] = [170, 170, 170];

/// A picture of the screen.
struct Picture {
    width: usize,
    pixels: Vec<[u8; 3]>,
}

impl Picture {
    /// Takes one. Source of the form: ppm(5).
    fn take(host: &mut Host, folder: &Path) -> Self {
        let file = folder.join("screen.ppm");
        host.qmp.execute("screendump", json!({ "filename": file })).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let mut words = bytes.split(u8::is_ascii_whitespace);
        assert_eq!(words.next(), Some(&b"P6"[..]));
        let mut number =
            || -> usize { std::str::from_utf8(words.next().unwrap()).unwrap().parse().unwrap() };
        let (width, height, _) = (number(), number(), number());
        let start = bytes.len() - 3 * width * height;
        let pixels = bytes[start..].chunks_exact(3).map(|rgb| [rgb[0], rgb[1], rgb[2]]).collect();
        Self { width, pixels }
    }

    /// Returns a line of text.
    fn row(&self, number: usize) -> &[[u8; 3]] {
        let size = self.width * ROW;
        &self.pixels[number * size..(number + 1) * size]
    }

    fn rows(&self) -> usize {
        self.pixels.len() / self.width / ROW
    }

    /// Whether a line of text is a bar: mostly gray, with something written on it.
    fn is_bar(&self, number: usize) -> bool {
        let gray = self.row(number).iter().filter(|pixel| **pixel == GRAY).count();
        let all = self.row(number).len();
        gray < all && gray > all / 2
    }

    /// The page between the bars.
    fn page(&self) -> Vec<[u8; 3]> {
        (1..self.rows() - 1).flat_map(|number| self.row(number).to_vec()).collect()
    }

    fn lit(&self) -> usize {
        self.page().iter().filter(|pixel| **pixel != [0; 3]).count()
    }
}

fn wait(host: &mut Host, folder: &Path, what: &str, wanted: impl Fn(&Picture) -> bool) -> Picture {
    let deadline = Instant::now() + SOON;
    loop {
        let picture = Picture::take(host, folder);
        if wanted(&picture) {
            return picture;
        }
        assert!(Instant::now() < deadline, "not on the screen: {what}");
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn the_screen_shows_pages_that_keys_turn() {
    let folder = tempfile::tempdir().unwrap();
    let options = HostOptions {
        medium: Medium::IsoCd,
        memory_mib: 1024,
        uplink: Uplink::None,
        arguments: vec!["-device".to_owned(), "VGA".to_owned()],
        ..HostOptions::default()
    };
    let mut host = Host::start(&image_folder().unwrap(), folder.path(), &options).unwrap();
    host.serial.wait("event=screen pid=", UP).unwrap();
    let bars = |picture: &Picture| {
        picture.is_bar(0) && picture.is_bar(picture.rows() - 1) && picture.lit() > 2000
    };
    let node = wait(&mut host, folder.path(), "the node's page", bars);
    // The node has no configuration, and says so in a colour that no kernel message has.
    let press = |host: &mut Host, key: &str| {
        let keys = json!({ "keys": [{ "type": "qcode", "data": key }] });
        host.qmp.execute("send-key", keys).unwrap();
    };
    press(&mut host, "6");
    let before = node.page();
    let help = wait(&mut host, folder.path(), "the help", |picture| {
        bars(picture) && picture.page() != before
    });
    press(&mut host, "1");
    let other = help.page();
    wait(&mut host, folder.path(), "the node again", |picture| {
        bars(picture) && picture.page() != other
    });
    let text = host.serial.text();
    assert!(!text.contains("the screen ended"), "{text}");
    assert!(text.contains("status| Holdfast"), "the page is on the serial port too");
}
