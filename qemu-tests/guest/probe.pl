#!/usr/bin/perl
# What a curious guest can try on its network, with nothing but perl's own functions: connections,
# datagrams, forged frames, listening for frames, and words to its host. Each attempt is told in one line.
# Sources: Linux include/linux/socket.h, uapi/linux/if_ether.h and if_packet.h; RFC 768, 791, 826,
# 8200; RFC 9000 section 17.2 for the datagram that every QUIC endpoint answers.
use constant { AF_INET => 2, AF_PACKET => 17, AF_VSOCK => 40 };
use constant { STREAM => 1, DATAGRAM => 2, RAW => 3 };
use constant { NONBLOCK => 2048, SOL_SOCKET => 1, SO_ERROR => 4, ETH_P_ALL => 3 };
use constant { IPV4 => 0x0800, ARP => 0x0806, VLAN => 0x8100, IPV6 => 0x86dd, UNKNOWN => 0x88b5 };
use constant { ECONNREFUSED => 111, EHOSTUNREACH => 113, EINPROGRESS => 115, OUTGOING => 4 };
$| = 1;

my %commands = (tcp => \&tcp, udp => \&udp, listen => \&overhear, forge => \&forge,
    tell => \&tell);
my $command = shift @ARGV;
$commands{$command}->(@ARGV);

# tcp ADDRESS PORT...: connects to all ports at once and waits four seconds for answers.
sub tcp {
    my ($address, @ports) = @_;
    my (%waiting, %outcome);
    for my $port (@ports) {
        socket(my $socket, AF_INET, STREAM | NONBLOCK, 6) or die "socket: $!";
        my $done = connect($socket, inet($address, $port)) || $! == EINPROGRESS;
        if ($done) { $waiting{$port} = $socket } else { $outcome{$port} = outcome($! + 0) }
    }
    my $end = time() + 4;
    while (%waiting && time() < $end) {
        my $ready = '';
        vec($ready, fileno($_), 1) = 1 for values %waiting;
        select(undef, $ready, undef, 0.2);
        for my $port (keys %waiting) {
            next unless vec($ready, fileno($waiting{$port}), 1);
            my $error = unpack('i', getsockopt($waiting{$port}, SOL_SOCKET, SO_ERROR));
            $outcome{$port} = $error ? outcome($error) : 'open';
            delete $waiting{$port};
        }
    }
    print "tcp $address $_ ", $outcome{$_} || 'silent', "\n" for @ports;
}

# udp ADDRESS PORT: sends what every QUIC endpoint and every echo server answers.
sub udp {
    my ($address, $port) = @_;
    socket(my $socket, AF_INET, DATAGRAM, 17) or die "socket: $!";
    connect($socket, inet($address, $port)) or die "connect: $!";
    my $outcome = 'silent';
    for (1 .. 2) {
        send($socket, payload('datagram'), 0);
        vec(my $ready = '', fileno($socket), 1) = 1;
        next unless select($ready, undef, undef, 1.5);
        $outcome = defined(recv($socket, my $answer, 2000, 0)) ? 'answered' : outcome($! + 0);
        last;
    }
    print "udp $address $port $outcome\n";
}

# listen SECONDS: names what arrived that any probe sent.
sub overhear {
    my $end = time() + shift;
    socket(my $socket, AF_PACKET, RAW, unpack('S', pack('n', ETH_P_ALL))) or die "socket: $!";
    my %heard;
    while (time() < $end) {
        vec(my $ready = '', fileno($socket), 1) = 1;
        next unless select($ready, undef, undef, 0.5);
        my $from = recv($socket, my $frame, 4096, 0);
        next if !defined($from) || unpack('x10 C', $from) == OUTGOING;
        $heard{$1} = 1 while $frame =~ /probe-is-([a-z0-9-]+);/g;
    }
    print "heard $_\n" for sort keys %heard;
    print "heard all\n";
}

# tell PORT: sends what it reads to the host, over vsock (struct sockaddr_vm of vm_sockets.h).
sub tell {
    my $port = shift;
    socket(my $socket, AF_VSOCK, STREAM, 0) or die "socket: $!";
    connect($socket, pack('S S L L x4', AF_VSOCK, 0, $port, 2)) or die "connect: $!";
    local $/;
    syswrite($socket, scalar <STDIN>) or die "write: $!";
    print "told $port\n";
}

# forge OWN OTHER OTHER-HARDWARE SERVER PORT: frames as this guest may send them, and as it may not,
# to a server and to another guest. They say by themselves which they are.
sub forge {
    my ($own, $other, $other_hardware, $server, $port) = @_;
    my $gateway = `ip route`;
    $gateway =~ /default via (\S+)/ and $gateway = $1;
    my ($near) = grep { /^\Q$gateway\E / } split /\n/, read_file('/proc/net/arp');
    my $gate = hardware((split ' ', $near)[3]);
    my $me = hardware(read_file('/sys/class/net/eth0/address'));
    my ($it, $nobody, $all) = (hardware($other_hardware), "\2\0\0\0\0\x99", "\xff" x 6);
    my $to_server = sub { ipv4($_[0], $server, $port, $_[1]) };
    my $to_guest = sub { ipv4($own, $_[0], $port, $_[1]) };
    my $advertise = "\x88\0\0\0\x20\0\0\0";
    emit($gate, $me, IPV4, $to_server->($own, 'as-itself'));
    emit($gate, $me, IPV4, $to_server->($other, 'as-the-other-address'));
    emit($gate, $me, IPV4, $to_server->('203.0.113.200', 'as-a-public-address'));
    emit($gate, $nobody, IPV4, $to_server->($own, 'as-unknown-hardware'));
    emit($gate, $it, IPV4, $to_server->($other, 'as-the-other-in-full'));
    emit($gate, $me, VLAN, pack('nn', 1, IPV4) . $to_server->($own, 'in-a-vlan'));
    emit($it, $me, IPV4, $to_guest->($other, 'straight'));
    emit($gate, $me, IPV4, $to_guest->($other, 'by-the-gateway'));
    emit($gate, $me, IPV4, ipv4($gateway, $other, $port, 'as-the-gateway'));
    emit($all, $me, IPV4, $to_guest->('255.255.255.255', 'broadcast'));
    emit($all, $me, IPV4, $to_guest->('10.77.255.255', 'subnet-broadcast'));
    emit($all, $me, ARP, arp(1, $me, $own, $other, 'arp-request'));
    emit($it, $me, ARP, arp(2, $me, $gateway, $other, 'arp-as-the-gateway'));
    emit($it, $me, IPV6, ipv6($me, $it, $advertise . payload('ipv6')));
    emit("\x33\x33\0\0\0\1", $me, IPV6, ipv6($me, undef, $advertise . payload('ipv6-all-nodes')));
    emit($all, $me, UNKNOWN, payload('unknown-protocol'));
    print "forged all\n";
}

sub emit {
    my ($to, $from, $type, $content) = @_;
    socket(my $socket, AF_PACKET, RAW, 0) or die "socket: $!";
    my $index = read_file('/sys/class/net/eth0/ifindex');
    my $link = pack('S n i S C C a8', AF_PACKET, $type, $index, 0, 0, 6, $to);
    send($socket, $to . $from . pack('n', $type) . $content, 0, $link) or die "send: $!";
}

# An IPv4 packet with a UDP datagram; 0 stands for no UDP checksum.
sub ipv4 {
    my ($from, $to, $port, $name) = @_;
    my $data = payload($name);
    my $udp = pack('nnnn', 4242, $port, 8 + length $data, 0) . $data;
    my $head = pack('CCnnnCCn', 0x45, 0, 20 + length $udp, 0, 0, 64, 17, 0) . ip($from) . ip($to);
    my $sum = 0;
    $sum += $_ for unpack('n*', $head);
    $sum = ($sum & 0xffff) + ($sum >> 16) for 1 .. 2;
    substr($head, 10, 2) = pack('n', ~$sum & 0xffff);
    return $head . $udp;
}

# An IPv6 packet with ICMPv6 between link-local addresses made of hardware addresses, or to all.
sub ipv6 {
    my ($from, $to, $content) = @_;
    my $all = "\xff\2" . "\0" x 13 . "\1";
    my $local = sub {
        my @bytes = unpack('C6', shift);
        return pack('n C6 C8', 0xfe80, (0) x 6, $bytes[0] ^ 2, @bytes[1, 2], 0xff, 0xfe, @bytes[3 .. 5]);
    };
    my $head = pack('NnCC', 6 << 28, length $content, 58, 255);
    return $head . $local->($from) . ($to ? $local->($to) : $all) . $content;
}

sub arp {
    my ($operation, $hardware, $sender, $target, $name) = @_;
    my $head = pack('nnCCn', 1, IPV4, 6, 4, $operation);
    return $head . $hardware . ip($sender) . "\0" x 6 . ip($target) . payload($name);
}

# A QUIC long header of a version that nobody knows, in a datagram as long as a first one must be.
sub payload {
    my $name = "probe-is-$_[0];";
    my $head = pack('C N C a8 C a8', 0xc0, 0x1a2a3a4a, 8, 'destinat', 8, 'sourceid');
    return $head . $name . "\0" x (1200 - length($head) - length $name);
}

# The guest's own kernel may give up, for want of an ARP answer, before the probe does.
sub outcome {
    my $error = shift;
    return $error == ECONNREFUSED ? 'refused' : $error == EHOSTUNREACH ? 'silent' : "error $error";
}
sub inet { return pack('S n a4 x8', AF_INET, $_[1], ip($_[0])) }
sub ip { return pack('C4', split /\./, $_[0]) }
sub hardware { return pack('H2' x 6, $_[0] =~ /([0-9a-f]{2})/g) }

sub read_file {
    open(my $file, '<', $_[0]) or die "$_[0]: $!";
    local $/;
    return scalar <$file>;
}
