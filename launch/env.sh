# shellcheck shell=bash
# Settings of a job, each with its default and the reason to change it.
#
# Set a variable before sbatch (`ODB_CACHE=/shared/cache sbatch launch/odb_pretrain.sbatch ...`), or copy
# this file, change it, and name the copy in ODB_ENV. What the cluster decides (partition, account,
# number of nodes, time) are options of sbatch. Assignments only; launch/job.sh does the work.

# --- what is run -------------------------------------------------------------------------------------

# The interpreter; must be the same path on all nodes. Change it for a conda or module environment.
if [[ -z ${ODB_PYTHON:-} ]]; then
    ODB_PYTHON=python3
    if [[ -x $PWD/.venv/bin/python ]]; then ODB_PYTHON=$PWD/.venv/bin/python; fi
fi

# What Python runs in each rank: a script, or `-m module`; split at spaces. Change it to your patched
# pretrain_gpt.py, or, for a trial without GPUs, to
#   ODB_SCRIPT="-m odb_megatron.cpu examples/pretrain_gpt_odb.py"
# with --transformer-impl local among the flags.
: "${ODB_SCRIPT:=examples/pretrain_gpt_odb.py}"

# Checkpoints, for --save and --load; on shared storage. The default goes by the job's name, so that a
# requeued, chained or resubmitted job of that name goes on. Empty: the flags you give are all there is.
ODB_CHECKPOINTS=${ODB_CHECKPOINTS-$PWD/checkpoints/${SLURM_JOB_NAME:-odb}}

# Ranks of a node under torch's launcher. Default: the GPUs that Slurm gave the job there, or, on a cluster
# that does not count GPUs, those that nvidia-smi lists on the first node; an error where neither says.
# (odb_pretrain_srun.sbatch: one per task.)
: "${ODB_RANKS_PER_NODE:=${SLURM_GPUS_ON_NODE:-}}"

# --- stopping and going on ---------------------------------------------------------------------------

# Times that a job may put itself back into the queue after a stop by signal. Lower it to bound what a
# job that never gets further can spend; 0: save and end.
: "${ODB_MAX_REQUEUES:=100}"

# --- finding each other ------------------------------------------------------------------------------

# Address and port of rank 0; default: the first node's, and 20000 + job id modulo 10000. Set the port
# where a firewall allows others only, or where two jobs share a node and clash.
: "${MASTER_ADDR:=}" "${MASTER_PORT:=}"

# Network interface for gloo (ODB's plans, Megatron's CPU groups) and for NCCL's bootstrap. Default: that
# of the first node's address. gloo by itself takes the one its host's name resolves to, often 127.0.1.1.
# Set it where interface names differ between nodes (NCCL takes a prefix: "ib"), or traffic should use
# another network. NCCL's data path over InfiniBand is chosen by NCCL_IB_HCA, not by this.
: "${GLOO_SOCKET_IFNAME:=}" "${NCCL_SOCKET_IFNAME:=}"

# --- CUDA --------------------------------------------------------------------------------------------

# Hardware queues of a process. Megatron wants 1 with tensor or context parallelism before Blackwell (so
# that communication starts before the computation it overlaps), not 1 with FSDP, and 32 with
# --overlap-moe-expert-parallel-comm. Default: by the first node's GPU and the flags; see job.sh.
: "${CUDA_DEVICE_MAX_CONNECTIONS:=}"

# Micro-batches of ODB differ in size: growing segments keep the allocator from fragmenting. Change it to
# expandable_segments:False with --nccl-ub or inference's unified memory, which cannot use them.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# Megatron demands 0 with growing segments and CUDA graphs (arguments.py 1879, core 0.19.2).
export NCCL_GRAPH_REGISTER=${NCCL_GRAPH_REGISTER:-0}

# A failed collective ends its process, with what it waited for. 0 only to attach a debugger.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}

# NCCL prints errors and warnings; INFO shows the interfaces and transports that it chose.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Threads of a rank. More than a few slow down many ranks on a node; data workers are processes.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# --- caches ------------------------------------------------------------------------------------------

# Folder on shared storage for what is read by all nodes: tokenizers and models of Hugging Face.
# (Megatron's index caches: add --data-cache-path "$ODB_CACHE/index" to your flags.)
: "${ODB_CACHE:=$PWD/.cache}"
export HF_HOME=${HF_HOME:-$ODB_CACHE/huggingface}

# Compute nodes often have no network, where every look at the Hub would wait for its time-out: what is not
# in HF_HOME is an error at once. Fetch it before (`hf download NAME`, with this HF_HOME), or set 0.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

# Folder on each node's own disk for kernels compiled there: file locks of these caches are slow and
# unreliable on NFS and Lustre. Set it to the cluster's scratch disk, or to shared storage that locks well
# to compile once only.
: "${ODB_LOCAL_CACHE:=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/odb-cache-$(id -u)}"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$ODB_LOCAL_CACHE/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$ODB_LOCAL_CACHE/inductor}

# --- container (enroot, by Slurm's plugin pyxis) -----------------------------------------------------

# Set it to run the job in a container, whichever script: a .sqsh file (`enroot import -o megatron.sqsh docker://nvcr.io#nvidia/pytorch:25.09-py3`), or an image's
# name, which every node then pulls anew. It must hold this package and what it needs.
: "${ODB_CONTAINER_IMAGE:=}"

# Folders to see inside, HOST:CONTAINER with commas between; data, checkpoints and caches must be under
# one of them, at the same path. The submit folder is added.
: "${ODB_CONTAINER_MOUNTS:=}"

# The interpreter inside; ODB_PYTHON is the host's.
: "${ODB_CONTAINER_PYTHON:=python3}"

# --- Megatron-Bridge (odb_bridge.sbatch) -------------------------------------------------------------

# A recipe of megatron.bridge.recipes; overrides are the arguments of the script.
: "${ODB_RECIPE:=llama32_1b_pretrain_config}"
