#!/usr/bin/env bash
# Start a Python script under torchrun, one process per GPU, on one node or many. `--help` prints the following.
#
#   launch/jobs/torchrun.sh [OPTION]... SCRIPT [ARGUMENT]...        every argument reaches the script exactly as given
#
# The first of these that is set decides where the script runs:
#   --hosts, --hostfile      from here, over ssh, one torchrun per host; if one fails, all are ended
#   PET_NNODES               a node of a Kubernetes PyTorchJob
#   OMPI_COMM_WORLD_SIZE     a node of Open MPI's:   mpirun --map-by ppr:1:node launch/jobs/torchrun.sh --master HOST ...
#   SLURM_STEP_NODELIST      a node of SLURM's:      srun --ntasks-per-node=1 launch/jobs/torchrun.sh ...
#   PMI_SIZE                 a node of MPICH's:      mpiexec -ppn 1 launch/jobs/torchrun.sh --master HOST ...
#   none of them             this machine alone
#
#   --hosts A,B,...    hosts, rank 0 on the first
#   --hostfile FILE    hosts, one per line, as DeepSpeed writes them (`node01 slots=8`; # starts a comment)
#   --nproc N          processes per node: a number, or gpu for one per GPU (default: the slots of a host file, else gpu)
#   --master HOST      where the ranks meet (default: the first host; under MPI also MASTER_ADDR)
#   --port N           the port there (default: 29500, in SLURM one made of the job's number, in Kubernetes the job's own)
#   --timeout SECONDS  how long nodes wait for each other (default: 600)
#   -m                 SCRIPT is the name of a module
#   --dry-run          print the commands, quoted for a shell, and run nothing
set -euo pipefail

fail() {
    printf 'torchrun.sh: %s\n' "$*" >&2
    exit 2
}

# quote words so that a POSIX shell reads them back unchanged
quoted() {
    local word separator='' quote="'" escaped="'\\''"
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=$quote${word//"$quote"/"$escaped"}$quote
        printf '%s%s' "$separator" "$word"
        separator=' '
    done
}

# the first host of a SLURM list: gpu[003-007,9],login -> gpu003
first_host() {
    local rest=$1 host='' range
    while [[ $rest == *'['* && ${rest%%'['*} != *,* ]]; do
        host+=${rest%%'['*}
        rest=${rest#*'['}
        range=${rest%%']'*}
        rest=${rest#*']'}
        range=${range%%,*}
        host+=${range%%-*}
    done
    printf '%s' "$host${rest%%,*}"
}

one_a_node() { # launcher, its processes on this node, the option to pass
    [[ $2 == 1 ]] || fail "$1 started $2 processes on this node, but torchrun starts the node's processes itself: pass $3"
}

number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 is '$2', but must be a whole number of at least 1"
}

hosts=() slots=()
nproc='' master='' port='' timeout=600 module=() dry_run='' given=''
while (($#)); do
    case $1 in
        --hosts | --hostfile | --nproc | --master | --port | --timeout)
            (($# > 1)) || fail "$1 needs a value"
            ;;&
        --hosts)
            IFS=, read -ra hosts <<<"$2"
            given=$1
            shift 2
            ;;
        --hostfile)
            [[ -r $2 ]] || fail "--hostfile is $2, which cannot be read"
            while read -r host rest || [[ $host ]]; do
                [[ -z $host || $host == '#'* ]] && continue
                hosts+=("$host")
                rest=${rest%%#*}
                rest=${rest//[[:space:]]/}
                [[ -z $rest || $rest =~ ^slots=[1-9][0-9]*$ ]] || fail "$2 says '$host $rest', but a line is HOST or HOST slots=N"
                slots+=("${rest#slots=}")
            done <"$2"
            given=$1
            shift 2
            ;;
        --nproc) nproc=$2 && shift 2 ;;
        --master) master=$2 && shift 2 ;;
        --port) port=$2 && shift 2 ;;
        --timeout) timeout=$2 && shift 2 ;;
        -m) module=(-m) && shift ;;
        --dry-run) dry_run=yes && shift ;;
        --help)
            sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --) shift && break ;;
        -*) fail "$1 is not an option of torchrun.sh (see --help); options of the script come after its name" ;;
        *) break ;;
    esac
done
(($#)) || fail 'no script is given (see --help)'
[[ -z $given || ${#hosts[@]} -gt 0 ]] || fail "$given names no host"
for ((n = 0; n < ${#hosts[@]}; n++)); do
    [[ -n ${hosts[n]} ]] || fail "$given has an empty host name"
    for ((m = 0; m < n; m++)); do
        [[ ${hosts[m]} != "${hosts[n]}" ]] || fail "$given names ${hosts[n]} twice, but a host runs one torchrun: raise --nproc"
    done
done
[[ -z $nproc || $nproc == gpu ]] || number --nproc "$nproc"
[[ -z $port ]] || number --port "$port"
((${port:-1} <= 65535)) || fail "--port is $port, but ports go to 65535"
number --timeout "$timeout"

nodes=1 node=0
if ((${#hosts[@]})); then
    nodes=${#hosts[@]}
    master=${master:-${hosts[0]##*@}}
elif [[ ${PET_NNODES:-} ]]; then
    number PET_NNODES "$PET_NNODES"
    nodes=$PET_NNODES node=${PET_NODE_RANK:-0} master=${master:-${PET_MASTER_ADDR:-}} port=${port:-${PET_MASTER_PORT:-}}
    nproc=${nproc:-${PET_NPROC_PER_NODE:-}}
    [[ $nproc != auto ]] || nproc=gpu
elif [[ ${OMPI_COMM_WORLD_SIZE:-} ]]; then
    one_a_node mpirun "${OMPI_COMM_WORLD_LOCAL_SIZE:-1}" '--map-by ppr:1:node'
    nodes=$OMPI_COMM_WORLD_SIZE node=$OMPI_COMM_WORLD_RANK
elif [[ ${SLURM_STEP_NODELIST:-} ]]; then
    nodes=${SLURM_STEP_NUM_NODES:-1} node=${SLURM_NODEID:-0}
    one_a_node srun "$((${SLURM_STEP_NUM_TASKS:-$nodes} / nodes))" --ntasks-per-node=1
    master=${master:-$(first_host "$SLURM_STEP_NODELIST")}
    port=${port:-$((15000 + (${SLURM_JOB_ID:-0} + ${SLURM_STEP_ID:-0}) % 10000))}
elif [[ ${SLURM_JOB_NODELIST:-} && ${SLURM_JOB_NUM_NODES:-1} != 1 ]]; then
    fail "the SLURM job has $SLURM_JOB_NUM_NODES nodes, but this is not one of srun's tasks: start it with srun --ntasks-per-node=1"
elif [[ ${PMI_SIZE:-} ]]; then
    one_a_node mpiexec "${MPI_LOCALNRANKS:-1}" '-ppn 1'
    nodes=$PMI_SIZE node=$PMI_RANK
fi
master=${master:-${MASTER_ADDR:-}}
((nodes == 1)) || [[ $master ]] || fail "$nodes nodes must know where to meet: pass --master HOST, the host of node 0"

# NVLink multicast stays off: this library does not use it, and it hangs on machines where it is only half set up
for setting in NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1; do
    name=${setting%%=*}
    if [[ ${!name-${setting#*=}} != "${setting#*=}" ]]; then
        printf 'torchrun.sh: %s is %s here, and is set to %s\n' "$name" "${!name}" "${setting#*=}" >&2
    fi
    export "${setting?}"
done

torchrun=$(command -v torchrun) || fail 'torchrun is not on the PATH: activate the environment that PyTorch is in'

command_of() { # fills the array `command` from the node's number, its processes, the script and its arguments
    local number=$1 processes=$2
    shift 2
    command=("$torchrun" --nnodes "$nodes" --nproc-per-node "$processes")
    if ((nodes == 1 && ${#hosts[@]} == 0)); then
        command+=(--standalone)
    else
        # static: node n gets the n-th ranks, so that neighbours in the ring are neighbours in the list of hosts
        command+=(--node-rank "$number" --rdzv-backend static --rdzv-endpoint "$master:${port:-29500}")
        command+=(--rdzv-id "ringattn-${SLURM_JOB_ID:-0}" --rdzv-conf "timeout=$timeout")
    fi
    command+=(${module[@]+"${module[@]}"} "$@")
}

if ((${#hosts[@]} == 0)); then
    command_of "$node" "${nproc:-gpu}" "$@"
    [[ $dry_run ]] || exec "${command[@]}"
    printf '%s\n' "$(quoted NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 "${command[@]}")"
    exit 0
fi

# settings for the processes on other hosts, because ssh passes no environment on
settings=()
for name in $(compgen -e | grep -E '^(NCCL|TORCH|GLOO|CUDA|TRITON|PYTORCH|OMP|HF)_|^(PATH|PYTHONPATH|LD_LIBRARY_PATH)$' | sort); do
    settings+=("$name=${!name}")
done

pids=()
stop() {
    # ssh -tt gives each torchrun a terminal, so that it is hung up, and ends, when its ssh ends
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill "$pid" 2>/dev/null || true
    done
    wait
}
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

for n in "${!hosts[@]}"; do
    processes=${nproc:-${slots[n]:-}}
    command_of "$n" "${processes:-gpu}" "$@"
    line="cd $(quoted "$PWD") && exec env $(quoted "${settings[@]}") $(quoted "${command[@]}")"
    start=(ssh -tt -o BatchMode=yes -o ConnectTimeout=20 -- "${hosts[n]}" "$line")
    if [[ $dry_run ]]; then
        printf '%s\n' "$(quoted "${start[@]}")"
    else
        "${start[@]}" </dev/null &
        pids+=($!)
    fi
done

status=0
while ((${#pids[@]})) && ((status == 0)); do
    for n in "${!pids[@]}"; do
        kill -0 "${pids[n]}" 2>/dev/null && continue
        wait "${pids[n]}" || status=$?
        unset "pids[n]"
        if ((status)); then
            printf 'torchrun.sh: node %d, %s, ended with status %d; ending the others\n' "$n" "${hosts[n]}" "$status" >&2
            sleep 2 # let the others print their last messages
            break
        fi
    done
    ((status)) || sleep 0.2
done
stop
exit "$status"
