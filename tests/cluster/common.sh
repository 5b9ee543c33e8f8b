# Sourced by build, up, load, down and status: versions, folders, addresses, messages.
# shellcheck shell=bash

# What the cluster is made of. A changed version is built beside the old one and takes its place.
KUBERNETES_VERSION=${KUBERNETES_VERSION:-1.37.2}
ETCD_VERSION=${ETCD_VERSION:-3.7.3}
CONTAINERD_VERSION=${CONTAINERD_VERSION:-2.4.2}
COREDNS_VERSION=${COREDNS_VERSION:-1.15.0}
HELM_VERSION=${HELM_VERSION:-4.3.1}
KWOK_VERSION=${KWOK_VERSION:-0.8.0}
PAUSE_VERSION=1

# Programs that Debian carries, named by the package that brings them.
DEBIAN_PACKAGES=(runc containernetworking-plugins buildah debootstrap iptables nftables conntrack ethtool iproute2 socat openssl prometheus docker-registry)

CACHE=${DPI_TEST_CACHE:-$HOME/.cache/dpinference}
KUBE=$CACHE/k8s                              # built programs: COMPONENT-VERSION/, bin/ links to the current ones
BIN=$KUBE/bin
STATE=${CLUSTER_STATE:-/var/lib/dpi-cluster} # the running cluster: keys, logs, node folders, admin.conf
NODES=${NODES:-2}

# Addresses: nodes on one bridge, pods of node i in POD_NET.i.0/24, Services in SERVICE_NET.
NODE_NET=10.89.0
POD_NET=10.88
SERVICE_NET=10.96.0.0/16
BRIDGE=dpibr0
BRIDGE_ADDRESS=$NODE_NET.254
API_ADDRESS=$NODE_NET.1
REGISTRY=$API_ADDRESS:5000
REGISTRY_DATA=$CACHE/images/registry # kept, so that an unchanged layer is stored once for all clusters

export STORAGE_DRIVER=${STORAGE_DRIVER:-overlay} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
export PATH=$BIN:$PATH

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
node_address() { printf '%s.%d' "$NODE_NET" "$(($1 + 1))"; }
# within SECONDS COMMAND...: run it until it succeeds; its last failure after the deadline
within() {
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do [ "$SECONDS" -lt "$end" ] || return 1; sleep 0.2; done
}
