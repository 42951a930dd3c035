//! Both ends of a wire that is measured by round trips.
//!
//! `wire serve PORT` answers; `wire trips HOST:PORT SECONDS CONNECTIONS` sends a byte to and fro on each
//! connection, and prints how many round trips there were each second on all of them together.

#![forbid(unsafe_code)]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// Longest time without a byte.
const SILENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", port] => serve(port.parse().context("which port?")?),
        ["trips", address, seconds, connections] => {
            let seconds = seconds.parse().context("how many seconds?")?;
            let time = Duration::try_from_secs_f64(seconds).context("how many seconds?")?;
            let connections = connections.parse().context("how many connections?")?;
            println!("{}", measure(address, time, connections)?);
            Ok(())
        }
        _ => bail!("expected serve PORT, or trips HOST:PORT SECONDS CONNECTIONS"),
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
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// Returns how many round trips all connections together made each second.
fn measure(address: &str, time: Duration, connections: u32) -> Result<u64> {
    let start = Instant::now();
    let workers: Vec<_> = (0..connections)
        .map(|_| {
            let address = address.to_owned();
            thread::spawn(move || trips(&address, time))
        })
        .collect();
    let mut done = 0;
    for worker in workers {
        done += worker.join().map_err(|_| anyhow::anyhow!("a connection's thread died"))??;
    }
    let rate = u128::from(done) * 1_000_000 / start.elapsed().as_micros().max(1);
    Ok(u64::try_from(rate)?)
}

/// Returns how many round trips one connection made.
fn trips(address: &str, time: Duration) -> Result<u64> {
    let mut stream = TcpStream::connect(address).with_context(|| address.to_owned())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    let start = Instant::now();
    let mut byte = [0];
    let mut done = 0;
    while start.elapsed() < time {
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        done += 1;
    }
    Ok(done)
}
