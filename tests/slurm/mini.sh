#!/usr/bin/env bash
# A Slurm cluster inside this machine, for tests: up in two seconds, changes nothing outside DIR.
#
#   mini.sh up DIR [NODES [CPUS [GPUS]]]   controller, and nodes n1.. of CPUS cores and fake GPUs
#   mini.sh run DIR COMMAND ...            run a command as a user would (srun, sbatch, squeue, ...)
#   mini.sh on DIR NODE COMMAND ...        run a command on a node
#   mini.sh crash DIR NODE                 the node dies: its processes are killed, its link ends
#   mini.sh boot DIR NODE                  it comes back
#   mini.sh down DIR                       end all of it
#
# Each node has namespaces of its own: an address (10.N.0.K) with a link to a bridge, a host name,
# processes and /dev/shm, so that no rank reaches the memory of another node. Needs root with
# CAP_NET_ADMIN and CAP_SYS_ADMIN and the Debian packages slurm-wlm munge iproute2 util-linux, but
# neither systemd nor cgroups.
# shellcheck disable=SC1090,SC2015,SC2016
set -euo pipefail
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
[ $# -ge 2 ] || usage
verb=$1 dir=$(mkdir -p "$2" && realpath "$2")
shift 2
state=$dir/state # sourced: id, net, nodes, cpus, gpus
export SLURM_CONF=$dir/slurm.conf
# Ports of nodes are in their own namespaces.
NODE_BASE_PORT=17000

start_node() { # NODE: slurmd with its own network, host name, processes, /dev/shm and hosts file
  setsid ip netns exec "r3s$id-$1" \
    unshare --uts --mount --pid --fork --mount-proc --propagation private bash -c '
    hostname "$1"
    mount --bind "$2/hosts" /etc/hosts
    mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
    exec slurmd -D -N "$1" -f "$2/slurm.conf"' node "$1" "$dir" </dev/null >"$dir/log/$1.out" 2>&1 &
  echo $! >"$dir/$1.starter"
}

init_of() { # NODE: its first process; when that dies, all of the node's do
  cat "/proc/$(cat "$dir/$1.starter")/task/"*/children 2>/dev/null | tr -d ' '
}

kill_node() { # NODE
  local pid
  pid=$(init_of "$1") && [ -n "$pid" ] && kill -KILL "$pid" 2>/dev/null || true
}

wait_for() { # SECONDS COMMAND...
  local until=$((SECONDS + $1)) 
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$until" ] || { echo "mini-slurm: gave up waiting for: $*" >&2; return 1; }
    sleep 0.1
  done
}

all_idle() { [ "$(timeout 2 sinfo -h -N -p main -o %T | grep -c '^idle$')" = "$nodes" ]; }

all_idle_or_dead() { ! kill -0 "$controller" || all_idle; }

free_network() { # an N whose 10.N.0.0/24 has no route here, as a cluster that was not ended has one
  local n=$((BASHPID % 200 + 20))
  while [ -n "$(ip -4 route show root "10.$n.0.0/16")" ]; do n=$((n == 219 ? 20 : n + 1)); done
  echo "$n"
}

free_port() {
  local port=16817
  while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
  echo "$port"
}

report() { # what is known of a cluster that does not come up
  timeout 2 sinfo -N -l || true
  ip -d link show type bridge || true
  ip link show type veth || true
  ip -4 route || true
  ip neigh || true
  tail -n 5 "$dir"/log/*
}

kill_file() { # PIDFILE
  local pid
  [ -f "$1" ] && pid=$(cat "$1") && kill "${2:--TERM}" "$pid" 2>/dev/null || true
}

case $verb in
up)
  nodes=${1:-2} cpus=${2:-8} gpus=${3:-2}
  id=$((BASHPID % 10000)) net=$(free_network)
  mkdir -p "$dir"/{ctl,spool,munge,log}
  chmod 755 "$dir"; chmod 700 "$dir/munge"
  echo "id=$id net=$net nodes=$nodes cpus=$cpus gpus=$gpus" >"$state"

  # Network: a bridge here (the controller and the user), a veth pair to every node.
  ip link add "r3s$id" type bridge
  ip addr add "10.$net.0.254/24" dev "r3s$id"
  ip link set "r3s$id" up
  { echo "127.0.0.1 localhost"; echo "10.$net.0.254 $(hostname) ctl"; } >"$dir/hosts"
  for k in $(seq "$nodes"); do
    ip netns add "r3s$id-n$k"
    ip link add "v$id.$k" type veth peer name eth0 netns "r3s$id-n$k"
    ip link set "v$id.$k" master "r3s$id" up
    ip -n "r3s$id-n$k" addr add "10.$net.0.$k/24" dev eth0
    ip -n "r3s$id-n$k" link set eth0 up
    ip -n "r3s$id-n$k" link set lo up
    echo "10.$net.0.$k n$k" >>"$dir/hosts"
  done

  head -c 128 /dev/urandom >"$dir/munge/key"
  chmod 400 "$dir/munge/key"
  chmod 711 "$dir/munge"
  munged --force --socket "$dir/munge/socket" --key-file "$dir/munge/key" \
    --pid-file "$dir/munge/pid" --log-file "$dir/log/munged.log" \
    --seed-file "$dir/munge/seed" --num-threads 2 >"$dir/log/munged.out" 2>&1

  fast=sched_min_interval=100000,bf_interval=2,batch_sched_delay=0,sched_interval=2
  cat >"$SLURM_CONF" <<CONF
ClusterName=mini
SlurmctldHost=ctl(10.$net.0.254)
SlurmctldPort=${MINI_PORT:-$(free_port)}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/ctl
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=${MINI_TASK_PLUGIN:-task/none}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=$fast,requeue_setup_env_fail
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=${MINI_SLURMD_TIMEOUT:-15}
MessageTimeout=10
KillWait=${MINI_KILLWAIT:-5}
MinJobAge=600
InactiveLimit=0
TCPTimeout=3
GresTypes=gpu
CONF
  gres=""
  [ "$gpus" = 0 ] || gres="Gres=gpu:$gpus"
  for k in $(seq "$nodes"); do
    echo "NodeName=n$k NodeHostname=n$k NodeAddr=10.$net.0.$k Port=$((NODE_BASE_PORT + k))" \
      "CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=20000 $gres" \
      "State=UNKNOWN" >>"$SLURM_CONF"
  done
  for partition in \
    "main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=${MINI_GRACE:-0}" \
    "urgent Default=NO PriorityTier=10 PreemptMode=OFF"; do
    echo "PartitionName=$partition Nodes=ALL MaxTime=INFINITE State=UP" >>"$SLURM_CONF"
  done
  # Fake GPUs are empty files: Slurm counts and hands them out.
  if [ "$gpus" != 0 ]; then
    mkdir -p "$dir/dev"
    for g in $(seq 0 $((gpus - 1))); do : >"$dir/dev/gpu$g"; done
    echo "NodeName=n[1-$nodes] Name=gpu File=$dir/dev/gpu[0-$((gpus - 1))]" >"$dir/gres.conf"
  fi
  # Named, so that slurmd looks for no cgroup file system; none is used.
  echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"

  # The controller has this machine's network, with the nodes' names in its hosts file.
  setsid unshare --mount --uts --propagation private bash -c '
    hostname ctl; mount --bind "$1" /etc/hosts; shift; exec "$@"' _ "$dir/hosts" \
    slurmctld -D -c -f "$SLURM_CONF" </dev/null >"$dir/log/slurmctld.out" 2>&1 &
  controller=$!
  for k in $(seq "$nodes"); do start_node "n$k"; done
  wait_for 20 all_idle_or_dead && all_idle || { report >&2; exit 1; }
  ;;
run)
  . "$state"
  exec unshare --mount --propagation private \
    bash -c 'mount --bind "$1" /etc/hosts; shift; exec "$@"' _ "$dir/hosts" "$@"
  ;;
on)
  . "$state"
  node=$1
  shift
  exec nsenter --target "$(init_of "$node")" --mount --uts --net --pid \
    bash -c 'cd "$1" && shift && exec "$@"' _ "$PWD" "$@"
  ;;
crash)
  . "$state"
  # First: the others must learn of it by silence, as from a machine without power.
  ip -n "r3s$id-$1" link set eth0 down
  kill_node "$1"
  ;;
boot)
  . "$state"
  ip -n "r3s$id-$1" link set eth0 up
  start_node "$1"
  ;;
down)
  [ -f "$state" ] || exit 0
  . "$state"
  kill_file "$dir/slurmctld.pid" -KILL
  for k in $(seq "$nodes"); do
    kill_node "n$k"
    ip netns del "r3s$id-n$k" 2>/dev/null || true
  done
  ip link del "r3s$id" 2>/dev/null || true
  kill_file "$dir/munge/pid"
  rm -f "$state"
  ;;
*) usage ;;
esac
