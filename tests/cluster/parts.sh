# Sourced by up, down, part, node and status: names of nodes' things, starting and ending processes, what is left.
# shellcheck shell=bash

netns() { printf 'dpin%d' "$1"; }
veth() { printf 'dpiv%d' "$1"; }

# start NAME NODE COMMAND...: run COMMAND in the network of NODE and note it, so that `part` can start it again.
# nsenter and not `ip netns exec`: that one hides the cgroup mounts.
start() {
  local name=$1 node=$2; shift 2
  { printf '#!/bin/sh\ncd %q\nexec nsenter --net=/run/netns/%s' "$STATE" "$(netns "$node")"; printf ' %q' "$@"; echo; } >"$STATE/part/$name"
  run_part "$name"
}
run_part() {
  setsid nohup sh "$STATE/part/$1" >>"$STATE/log/$1.log" 2>&1 </dev/null &
  echo $! >"$STATE/part/$1.pid"
}
# The process of part NAME, if it lives: a process id alone may since belong to somebody else.
part_pid() {
  local pid
  pid=$(cat "$STATE/part/$1.pid" 2>/dev/null) && grep -qa "$STATE/" "/proc/$pid/cmdline" 2>/dev/null && printf %s "$pid"
}
end_part() {
  local pid
  pid=$(part_pid "$1") || return 0
  kill -9 "$pid" 2>/dev/null || return 0
  within 5 gone "$pid"
}
gone() { [ ! -e "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
broken() { tail -n 15 "$STATE/log/$1.log" >&2; echo "error: $2; logs are in $STATE/log; make cluster-down removes it" >&2; exit 1; }

# What there is of a cluster on this machine, one thing a line; nothing after `down`.
leftovers() {
  local p g
  for p in /proc/[0-9]*; do
    # with a blank or slash behind it: the folder itself may be named by an editor or a shell
    if tr '\0' ' ' <"$p/cmdline" 2>/dev/null | grep -qE "^[^ ]*(kube|etcd|containerd|coredns|registry|nsenter)[^ ]* .*$STATE/"; then
      say "process ${p#/proc/} $(tr '\0' ' ' <"$p/cmdline" | cut -c1-100)"
    fi
  done 2>/dev/null
  for g in /sys/fs/cgroup/*/dpin*; do
    [ -d "$g" ] || continue
    say "cgroup $g"
    find "$g" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u | sed 's/^/process /; s/$/ (in a container)/'
  done
  awk -v s="$STATE/" 'index($2, s) == 1 {print "mount", $2}' /proc/mounts
  ip netns ls 2>/dev/null | awk '/^dpin[0-9]+/ {print "namespace", $1}'
  ip -o link 2>/dev/null | awk -F'[ :@]+' '$2 ~ /^dpi(v[0-9]+|br0)$/ {print "link", $2}'
  ip route 2>/dev/null | awk -v n="$NODE_NET." 'index($3, n) == 1 {print "route", $1}'
  [ ! -e "$STATE" ] || say "folder $STATE"
}
