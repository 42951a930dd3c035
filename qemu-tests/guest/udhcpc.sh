#!/bin/busybox sh
# Applies what udhcpc learnt.
[ "$1" = bound ] || [ "$1" = renew ] || exit 0
ip addr replace "$ip/$mask" dev "$interface"
[ -n "$router" ] && ip route replace default via "${router%% *}" dev "$interface"
[ -n "$mtu" ] && ip link set "$interface" mtu "$mtu"
for server in $dns; do echo "nameserver $server"; done > /etc/resolv.conf
