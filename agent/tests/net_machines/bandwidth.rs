//! Limits of machines' networks, by what arrives.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use agent::net::ruleset::ByteRate;

use crate::{
    netns::{Namespace, PATIENCE},
    world::World,
};

/// Bytes per second that arrive over a TCP connection, measured after the burst, for two seconds.
fn measure(listen: (&Namespace, &str), connect: (&Namespace, &str), from: Sender) -> f64 {
    let listener = listen.0.enter(|| TcpListener::bind(listen.1).unwrap());
    let address = connect.1.parse().unwrap();
    let other = connect.0.enter(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    let (accepted, _) = listener.accept().unwrap();
    let (mut sender, mut receiver) = match from {
        Sender::Listener => (accepted, other),
        Sender::Connector => (other, accepted),
    };
    std::thread::spawn(move || while sender.write_all(&[0; 16_384]).is_ok() {});
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut read_for = |time: Duration| {
        let (begin, mut count) = (Instant::now(), 0.0);
        let mut buffer = [0; 65_536];
        while begin.elapsed() < time {
            count += receiver.read(&mut buffer).unwrap() as f64;
        }
        count / begin.elapsed().as_secs_f64()
    };
    read_for(Duration::from_millis(700));
    read_for(Duration::from_secs(2))
}

#[derive(Clone, Copy)]
enum Sender {
    Listener,
    Connector,
}

#[test]
fn a_guest_gets_its_bandwidth_in_both_directions_and_no_more() {
    let Some(mut world) = World::new("bandwidth limits") else { return };
    let rate = ByteRate::from_mbit(20);
    world.limit = Some(rate);
    world.kill_agent();
    world.start_agent();
    let (one, server) = (world.guest(1), "203.0.113.80:5001");
    one.space.reaches("203.0.113.80");
    let share = |bytes: f64| bytes / rate.per_second as f64;
    let down = share(measure((&world.internet, server), (&one.space, server), Sender::Listener));
    assert!((0.50..1.05).contains(&down), "received {down} of its limit");
    let server = "203.0.113.80:5002";
    let up = share(measure((&world.internet, server), (&one.space, server), Sender::Connector));
    assert!((0.40..1.10).contains(&up), "sent {up} of its limit");
    // Without a limit, which a restarted agent takes away, it is far more.
    world.limit = None;
    world.kill_agent();
    world.start_agent();
    let server = "203.0.113.80:5003";
    let free = share(measure((&world.internet, server), (&one.space, server), Sender::Listener));
    assert!(free > 2.0, "received {free} of the former limit");
}
