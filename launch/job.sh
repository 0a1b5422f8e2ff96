# shellcheck shell=bash
# Functions of the job scripts. They set what launch/env.sh leaves open, run the step and requeue the job.
#
# Must not choose partition, nodes or time, and must not change the flags that are given.

# Prints a line that a reader of the log can search for.
odb_say() {
    echo "odb: $*" >&2
}

# Prints the address by which other nodes reach node $1.
odb_address() {
    local found
    # NodeAddr is the node's name, unless the cluster was told better.
    found=$(scontrol --oneliner show node "$1" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
    echo "${found:-$1}"
}

# Prints the network interface of this host that has address or name $1; nothing if none can be told.
odb_interface() {
    local address=$1 found
    command -v ip >/dev/null || return 0
    if [[ ! $address =~ ^[0-9.]+$ ]]; then
        # /etc/hosts often has 127.0.1.1 for a host's own name: no other host reaches that.
        address=$(getent ahostsv4 "$address" | awk '$1 !~ /^127\./ && !n++ { print $1 }')
        [[ -n $address ]] || return 0
    fi
    found=$(ip -oneline -4 address show to "$address" | awk 'NR == 1 { print $2 }')
    [[ -z $found ]] || echo "$found"
}

# Prints CUDA_DEVICE_MAX_CONNECTIONS for compute capability $1 (9.0, 10.0; empty without a GPU) and the
# flags after it; nothing where Megatron is best left alone (megatron/training/arguments.py, core 0.19).
odb_max_connections() {
    local capability=${1:-0} flag major
    shift
    major=${capability%%.*}
    for flag in "$@"; do
        case $flag in
        --use-torch-fsdp2 | --use-megatron-fsdp) return 0 ;; # refuses 1
        --overlap-moe-expert-parallel-comm) echo 32; return 0 ;;
        esac
    done
    if ((major > 0 && major < 10)); then echo 1; fi
}

# Prints the compute capability of this node's first GPU; nothing without one.
odb_capability() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 || true
}

# Exports what the ranks need to find each other and to use their GPUs; $@ are the training flags.
odb_prepare() {
    local first interface
    # Not head: it leaves a long list's writer with a broken pipe, which would end this script.
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    MASTER_ADDR=${MASTER_ADDR:-$(odb_address "$first")}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    export MASTER_ADDR MASTER_PORT
    interface=$(odb_interface "$MASTER_ADDR")
    GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
    if [[ -n $GLOO_SOCKET_IFNAME ]]; then export GLOO_SOCKET_IFNAME; else unset GLOO_SOCKET_IFNAME; fi
    if [[ -n $NCCL_SOCKET_IFNAME ]]; then export NCCL_SOCKET_IFNAME; else unset NCCL_SOCKET_IFNAME; fi
    CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$(odb_max_connections "$(odb_capability)" "$@")}
    if [[ -n $CUDA_DEVICE_MAX_CONNECTIONS ]]; then
        export CUDA_DEVICE_MAX_CONNECTIONS
    else
        unset CUDA_DEVICE_MAX_CONNECTIONS
    fi
    # `sbatch --export=NONE` would hold for srun too: tasks without a PATH, which find no bash.
    export SLURM_EXPORT_ENV=ALL
    # srun does not take sbatch's --cpus-per-task over since Slurm 22.05.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    export PYTHONUNBUFFERED=1 # what a rank said last is in the log when it is killed
    odb_say "job $SLURM_JOB_ID ($SLURM_JOB_NAME), start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST," \
        "rank 0 at $MASTER_ADDR:$MASTER_PORT, interface ${GLOO_SOCKET_IFNAME:-not chosen}"
}

# Sets odb_container to srun's options for the image, and ODB_PYTHON to the interpreter inside; to nothing
# without one.
odb_container_options() {
    odb_container=()
    [[ -n $ODB_CONTAINER_IMAGE ]] || return 0
    # The image's own values must not replace what was chosen for this job.
    local names=MASTER_ADDR,MASTER_PORT,GLOO_SOCKET_IFNAME,NCCL_SOCKET_IFNAME,CUDA_DEVICE_MAX_CONNECTIONS
    names+=,PYTORCH_CUDA_ALLOC_CONF,NCCL_GRAPH_REGISTER,NCCL_DEBUG,TORCH_NCCL_ASYNC_ERROR_HANDLING
    names+=,OMP_NUM_THREADS,HF_HOME,HF_HUB_OFFLINE,TRITON_CACHE_DIR,TORCHINDUCTOR_CACHE_DIR
    odb_container=(
        --container-image="$ODB_CONTAINER_IMAGE"
        --container-mounts="$PWD:$PWD${ODB_CONTAINER_MOUNTS:+,$ODB_CONTAINER_MOUNTS}"
        --container-workdir="$PWD" --container-env="$names" --no-container-mount-home
    )
    ODB_PYTHON=$ODB_CONTAINER_PYTHON
}

# Runs torch's launcher once on each node, and it the node's ranks; $@ are the script and its flags.
odb_run_torchrun() {
    if [[ -z $ODB_RANKS_PER_NODE ]] && command -v nvidia-smi >/dev/null; then
        ODB_RANKS_PER_NODE=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || ODB_RANKS_PER_NODE=
    fi
    if [[ -z $ODB_RANKS_PER_NODE ]]; then
        odb_say "error: how many ranks a node has is not known: Slurm gave this job no GPUs (SLURM_GPUS_ON_NODE is" \
            "not set) and nvidia-smi lists none here; ask for them (sbatch --gpus-per-node N), or set ODB_RANKS_PER_NODE"
        exit 2
    fi
    odb_container_options
    # The static rendezvous keeps Slurm's order of nodes, hence its knowledge of the network. Restarts are
    # Slurm's. The launcher ignores SIGUSR1, which is for the ranks. Each task expands its node's number.
    # shellcheck disable=SC2016
    odb_run srun --kill-on-bad-exit=1 --label --ntasks-per-node=1 "${odb_container[@]}" \
        bash -c 'trap "" USR1; exec "$0" -m odb_megatron.elastic --node-rank="$SLURM_NODEID" "$@"' \
        "$ODB_PYTHON" \
        --rdzv-backend=static --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ODB_RANKS_PER_NODE" \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 "$@"
}

# Ends the script if flags $2... set where checkpoints are, in the form of extended regular expression $1:
# ODB_CHECKPOINTS does, and of two the last would win.
odb_refuse_checkpoint_flags() {
    local flag form=$1 pretrained
    shift
    for flag in "$@"; do
        if [[ $flag =~ $form ]]; then
            pretrained=--pretrained-checkpoint
            if [[ $flag == *checkpoint.* ]]; then pretrained=checkpoint.pretrained_checkpoint; fi
            odb_say "error: $flag: the job saves to and goes on from ODB_CHECKPOINTS=$ODB_CHECKPOINTS: set that" \
                "instead (a model to start from is given as $pretrained), or set ODB_CHECKPOINTS= to" \
                "give all flags yourself; the job is then not requeued"
            exit 2
        fi
    done
}

# Sets odb_flags to the training flags: $@, and those that make a stopped job save and go on.
odb_resume_flags() {
    odb_flags=("$@")
    if [[ -n $ODB_CHECKPOINTS ]]; then
        odb_refuse_checkpoint_flags '^--(save|load)(=|$)' "$@"
        mkdir -p -- "$ODB_CHECKPOINTS"
        odb_flags+=(--save "$ODB_CHECKPOINTS" --load "$ODB_CHECKPOINTS")
        odb_flags+=(--exit-signal-handler --exit-signal SIGUSR1)
    fi
}

# Prints $1 as a quoted value of Hydra's grammar.
odb_hydra_value() {
    local value=${1//\\/\\\\}
    echo "'${value//\'/\\\'}'"
}

# Takes SIGUSR1: the ranks get it. The controller of a large cluster does not always answer at once.
odb_stop() {
    odb_interrupted=1
    local try
    for try in 1 2 3 4 5; do
        if scancel --signal=USR1 "$SLURM_JOB_ID"; then
            if [[ -n $ODB_CHECKPOINTS ]]; then
                odb_stopped=1
                odb_say "SIGUSR1: the ranks save and end"
            else
                odb_say "SIGUSR1: passed on to the ranks; ODB_CHECKPOINTS is empty: the job is not requeued"
            fi
            return 0 # without a number it is that of the interrupted wait
        fi
        sleep "$try"
    done
    odb_say "SIGUSR1: scancel failed, see above: the ranks go on"
}

# Runs `srun ...`, ends the script with its exit code. On SIGUSR1 (--signal=B:USR1@300, or
# `scancel --batch --signal=USR1 JOB`) the ranks save and end, and the job goes back into the queue.
odb_run() {
    local step status=0 before='' folder reader
    odb_interrupted='' odb_stopped=''
    folder=$(mktemp -d)
    mkfifo "$folder/errors"
    odb_note_first_failure "$folder/first" <"$folder/errors" &
    reader=$!
    # Not SIGTERM: torch's launcher would kill its ranks 30 s later, in the middle of a save.
    trap odb_stop USR1
    "$@" 2>"$folder/errors" &
    step=$!
    while true; do
        odb_interrupted='' status=0
        wait "$step" || status=$?
        # Waited for before: the signal came when the step had ended already.
        if ((status == 127)) && [[ -n $before ]]; then status=$before; fi
        # A trapped signal interrupts wait, with a status of its own; the step's is still to come.
        [[ -n $odb_interrupted ]] || break
        before=$status
    done
    trap '' USR1
    wait "$reader" || true
    # srun's own exit code is the highest of its tasks': 143 of those that it ended after the first.
    if ((status != 0)) && [[ -s $folder/first ]]; then status=$(<"$folder/first"); fi
    rm -rf -- "$folder"
    if ((status != 0)); then
        odb_say "job $SLURM_JOB_ID failed: the step ended with exit code $status$(odb_meaning "$status");" \
            "the first failure is above"
        exit "$status"
    fi
    if [[ -z $odb_stopped ]]; then exit 0; fi
    if ((${SLURM_RESTART_COUNT:-0} >= ODB_MAX_REQUEUES)); then
        odb_say "job $SLURM_JOB_ID has saved, and has been requeued ODB_MAX_REQUEUES=$ODB_MAX_REQUEUES times: it ends"
        exit 0
    fi
    odb_say "job $SLURM_JOB_ID has saved, and goes back into the queue"
    # Slurm ends this script then; an end of its own before that would count as the job's.
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 60; fi
    odb_say "job $SLURM_JOB_ID was not requeued: does the cluster allow it (JobRequeue, --requeue)?" \
        "Submitted again under its name, it goes on from $ODB_CHECKPOINTS"
    exit 1
}

# Passes stdin on to stderr, and writes into file $1 the exit code of the first task that srun reports.
odb_note_first_failure() {
    local line noted=
    while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\n' "$line" >&2
        # Slurm's code for a task that could not be started is 2, ours for flags.
        if [[ $line =~ error:\ execve\(\): ]]; then noted=execve; echo 127 >"$1"; fi
        if [[ -z $noted && $line =~ ^srun:\ error:\ .*:\ tasks?\ [-0-9,]+:\ (.*) ]]; then
            noted=${BASH_REMATCH[1]}
            case $noted in
            "Exited with exit code "[0-9]*) echo "${noted//[^0-9]/}" >"$1" ;;
            Killed* | "Out Of Memory"*) echo 137 >"$1" ;;
            Aborted*) echo 134 >"$1" ;;
            "Bus error"*) echo 135 >"$1" ;;
            "Segmentation fault"*) echo 139 >"$1" ;;
            esac
        fi
    done
}

# Prints what exit code $1 means, where it says something.
odb_meaning() {
    case $1 in
    2) echo " (flags that cannot be used)" ;;
    75) echo " (another rank is gone or does not answer)" ;;
    127) echo " (the program could not be started: is it there on all nodes?)" ;;
    134) echo " (SIGABRT: NCCL or a library gave up)" ;;
    135) echo " (SIGBUS: often a full /dev/shm)" ;;
    137) echo " (SIGKILL: killed by hand, by Slurm, or for its memory)" ;;
    139) echo " (SIGSEGV: a crash in native code)" ;;
    143) echo " (SIGTERM: cancelled, or at its time limit)" ;;
    esac
}
