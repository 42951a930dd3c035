//! Both ends of a wire that is measured: TCP streams and round trips, counted where they arrive.
//!
//! `wire serve PORT` answers; `wire stream`, `wire fetch` and `wire trips`, each with HOST:PORT, SECONDS and
//! the number of connections, send, receive, and go to and fro, and print what they got done each second:
//! KiB, KiB, and round trips of one byte.

#![forbid(unsafe_code)]

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// First byte of a connection: what the server is to do.
const STREAM: u8 = b's';
const FETCH: u8 = b'f';
const TRIPS: u8 = b't';

/// Bytes that are handed to the kernel at a time.
const BLOCK: usize = 128 << 10;
/// Longest time without a byte.
const SILENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", port] => serve(port.parse().context("which port?")?),
        [what, address, seconds, connections] => {
            let what = match *what {
                "stream" => STREAM,
                "fetch" => FETCH,
                "trips" => TRIPS,
                other => bail!("{other}: expected stream, fetch or trips"),
            };
            let time = Duration::from_secs(seconds.parse().context("how many seconds?")?);
            let connections = connections.parse().context("how many connections?")?;
            println!("{}", measure(what, address, time, connections)?);
            Ok(())
        }
        _ => bail!("expected serve PORT, or stream, fetch or trips, HOST:PORT SECONDS CONNECTIONS"),
    }
}

fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    loop {
        let (stream, _) = listener.accept()?;
        // A client that goes away ends its own connection only.
        thread::spawn(move || answer(stream));
    }
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut what = [0];
    stream.read_exact(&mut what)?;
    match what {
        [STREAM] => {
            let mut block = vec![0; BLOCK];
            let mut count = 0u64;
            while let bytes @ 1.. = stream.read(&mut block)? {
                count += bytes as u64;
            }
            stream.write_all(&count.to_le_bytes())?;
        }
        [FETCH] => {
            let block = vec![0; BLOCK];
            loop {
                stream.write_all(&block)?;
            }
        }
        _ => {
            while stream.read(&mut what)? == 1 {
                stream.write_all(&what)?;
            }
        }
    }
    Ok(())
}

/// Returns what all connections together got done each second.
fn measure(what: u8, address: &str, time: Duration, connections: u32) -> Result<u64> {
    let start = Instant::now();
    let workers: Vec<_> = (0..connections)
        .map(|_| {
            let address = address.to_owned();
            thread::spawn(move || one(what, &address, time))
        })
        .collect();
    let mut done = 0;
    for worker in workers {
        done += worker.join().map_err(|_| anyhow::anyhow!("a connection's thread died"))??;
    }
    let unit = if what == TRIPS { 1 } else { 1024 };
    let rate = u128::from(done) * 1_000_000 / start.elapsed().as_micros().max(1) / unit;
    Ok(u64::try_from(rate)?)
}

/// Returns what one connection got done: bytes that arrived, or round trips.
fn one(what: u8, address: &str, time: Duration) -> Result<u64> {
    let mut stream = TcpStream::connect(address).with_context(|| address.to_owned())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    stream.write_all(&[what])?;
    let start = Instant::now();
    let mut block = vec![0; BLOCK];
    let mut done = 0;
    while start.elapsed() < time {
        match what {
            STREAM => stream.write_all(&block)?,
            FETCH => done += stream.read(&mut block)? as u64,
            _ => {
                stream.write_all(&[what])?;
                stream.read_exact(&mut block[..1])?;
                done += 1;
            }
        }
    }
    if what == STREAM {
        stream.shutdown(Shutdown::Write)?;
        let mut count = [0; 8];
        stream.read_exact(&mut count)?;
        done = u64::from_le_bytes(count);
    }
    Ok(done)
}
