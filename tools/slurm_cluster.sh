#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for tests: own folder, ports, keys and configuration.
#
#   slurm_cluster.sh install      Debian: installs what is missing, starts no service
#   slurm_cluster.sh start DIR    starts it; `export SLURM_CONF=DIR/slurm.conf` then reaches it
#   slurm_cluster.sh stop DIR     ends every process that `start` and its jobs left
#
# DIR must be an absolute path, short enough for a socket's name (80 characters), without spaces. An
# installed Slurm is neither read nor touched. Run as root or not: the daemons then run as that user.
set -euo pipefail

readonly NODES=(odb1 odb2)

fail() {
    echo "slurm_cluster: $*" >&2
    exit 1
}

install() {
    local missing=()
    find_program slurmctld >/dev/null && find_program slurmd >/dev/null || missing+=(slurm-wlm)
    find_program munged >/dev/null || missing+=(munge)
    find_program ip >/dev/null || missing+=(iproute2)
    command -v shellcheck >/dev/null || missing+=(shellcheck)
    if ((${#missing[@]} == 0)); then return 0; fi
    command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]} (names of Debian packages); there is no apt-get here: install" \
            "slurmctld, slurmd, srun, munged, ip and shellcheck with this system's package manager"
    ((EUID == 0)) || fail "missing: ${missing[*]}; run as root once: apt-get install -y ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # Packages must not start services of their own beside the test's.
    local policy=/usr/sbin/policy-rc.d ours=
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        ours=$policy
    fi
    local status=0
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || status=$?
    if [[ -n $ours ]]; then rm -f -- "$ours"; fi
    return "$status"
}

# Daemons lie in /usr/sbin, which is not in every user's PATH.
find_program() {
    PATH=$PATH:/usr/sbin:/sbin command -v "$1"
}

free_ports() {
    python3 - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))
PYTHON
}

configure() {
    local dir=$1 user ports node
    user=$(id -un)
    read -ra ports < <(free_ports 3)
    # --gpus-per-node is asked for by the templates: a node counts one GPU, which no device stands for.
    cat >"$dir/slurm.conf" <<CONF
ClusterName=odb
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge.sock
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
JobRequeue=1
CONF
    echo 'Name=gpu File=/dev/null' >"$dir/gres.conf"
    local at=1
    for node in "${NODES[@]}"; do
        echo "NodeName=$node NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[at]} CPUs=2" \
            "RealMemory=1024 Gres=gpu:1 State=UNKNOWN" >>"$dir/slurm.conf"
        at=$((at + 1))
    done
    echo "PartitionName=test Nodes=$(IFS=,; echo "${NODES[*]}") Default=YES MaxTime=INFINITE State=UP" \
        >>"$dir/slurm.conf"
}

start() {
    local dir=$1 node munged
    [[ $dir == /* && $dir != *[[:space:]]* && ${#dir} -le 80 ]] ||
        fail "DIR is '$dir'; expected an absolute path of at most 80 characters, without spaces"
    if [[ -e $dir/slurm.conf ]]; then stop "$dir"; fi
    mkdir -p "$dir/state"
    chmod 755 "$dir"
    export SLURM_CONF=$dir/slurm.conf
    munged=$(find_program munged) || fail "munged is not installed: tools/slurm_cluster.sh install"
    find_program slurmctld >/dev/null || fail "slurmctld is not installed: tools/slurm_cluster.sh install"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    configure "$dir"
    "$munged" --force --socket="$dir/munge.sock" --key-file="$dir/munge.key" --num-threads=2 \
        --pid-file="$dir/munged.pid" --seed-file="$dir/munge.seed" --log-file="$dir/munged.log" \
        2>"$dir/munged.err" || fail "munged did not start: $(<"$dir/munged.err")"
    "$(find_program slurmctld)" -c
    for node in "${NODES[@]}"; do "$(find_program slurmd)" -N "$node"; done
    local waited=0
    until [[ $(sinfo --noheader --states=idle --format=%D 2>/dev/null) == "${#NODES[@]}" ]]; do
        waited=$((waited + 1))
        if ((waited > 300)); then
            sinfo >&2 || true
            tail -n 5 "$dir"/*.log >&2
            stop "$dir"
            fail "the nodes did not come up within 60 s; the daemons' last words are above"
        fi
        sleep 0.2
    done
}

# Prints the processes that belong to the cluster: its daemons, its job steps, and what runs in a job.
# All of them, and no others, have this SLURM_CONF in their environment.
processes() {
    local file pid
    for file in /proc/[0-9]*/environ; do
        pid=${file#/proc/}
        pid=${pid%/environ}
        if [[ $pid != "$$" && $pid != "$PPID" && $pid != "$BASHPID" ]] &&
            tr '\0' '\n' 2>/dev/null <"$file" | grep -qxF "SLURM_CONF=$1/slurm.conf"; then
            echo "$pid"
        fi
    done 2>/dev/null
    cat "$1/munged.pid" 2>/dev/null || true
}

stop() {
    local dir=$1 pids signal
    # Not those that call this: they may have SLURM_CONF set as well.
    for signal in TERM TERM KILL KILL; do
        mapfile -t pids < <(unset SLURM_CONF; processes "$dir")
        if ((${#pids[@]} == 0)); then break; fi
        kill "-$signal" "${pids[@]}" 2>/dev/null || true
        local waited=0
        while ((waited < 25)) && kill -0 "${pids[@]}" 2>/dev/null; do
            waited=$((waited + 1))
            sleep 0.2
        done
    done
    rm -f -- "$dir/munged.pid"
}

case "${1:-} $#" in
"install 1") install ;;
"start 2") start "$2" ;;
"stop 2") unset SLURM_CONF; stop "$2" ;;
*) fail "usage: slurm_cluster.sh install | start DIR | stop DIR" ;;
esac
