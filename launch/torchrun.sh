#!/usr/bin/env bash
# Start a Python script under torchrun, one process a GPU, on one node or many. `--help` prints what follows.
#
#   launch/torchrun.sh [OPTION]... SCRIPT [ARGUMENT]...        every argument reaches the script exactly as given
#
# Where it runs is taken from the first of these that is there:
#   --hosts, --hostfile      from here, over ssh, one torchrun a host; ends all of them when one fails
#   PET_NNODES               a node of a Kubernetes PyTorchJob
#   OMPI_COMM_WORLD_SIZE     a node of Open MPI's:   mpirun --map-by ppr:1:node launch/torchrun.sh --master HOST ...
#   SLURM_STEP_NODELIST      a node of SLURM's:      srun --ntasks-per-node=1 launch/torchrun.sh ...
#   PMI_SIZE                 a node of MPICH's:      mpiexec -ppn 1 launch/torchrun.sh --master HOST ...
#   none of them             this machine alone
#
#   --hosts A,B,...    hosts, rank 0 on the first
#   --hostfile FILE    hosts, one a line, as DeepSpeed writes them (`node01 slots=8`; # starts a comment)
#   --nproc N          processes a node: a number, or gpu (default: as many as there are GPUs), or what a host file says
#   --master HOST      where the ranks meet (default: the first host; under MPI also MASTER_ADDR)
#   --port N           and on which port (default: 29500, in SLURM one made of the job's number, in Kubernetes the job's own)
#   --timeout SECONDS  how long nodes wait for each other (default: 600)
#   -m                 SCRIPT is a module's name
#   --dry-run          print the commands, a shell's words, and run nothing
set -euo pipefail

fail() {
    printf 'torchrun.sh: %s\n' "$*" >&2
    exit 2
}

# words as a POSIX shell reads them back
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

one_a_node() { # launcher, its processes on this node, what to pass
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
        -*) fail "$1 is no option of torchrun.sh (see --help); options of the script come after its name" ;;
        *) break ;;
    esac
done
(($#)) || fail 'no script is given (see --help)'
[[ -z $given || ${#hosts[@]} -gt 0 ]] || fail "$given names no host"
for ((n = 0; n < ${#hosts[@]}; n++)); do
    [[ -n ${hosts[n]} ]] || fail "$given has an empty name of a host"
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
    fail "the SLURM job has $SLURM_JOB_NUM_NODES nodes, but this is none of srun's tasks: start it by srun --ntasks-per-node=1"
elif [[ ${PMI_SIZE:-} ]]; then
    one_a_node mpiexec "${MPI_LOCALNRANKS:-1}" '-ppn 1'
    nodes=$PMI_SIZE node=$PMI_RANK
fi
master=${master:-${MASTER_ADDR:-}}
((nodes == 1)) || [[ $master ]] || fail "$nodes nodes must know where to meet: pass --master HOST, the host of node 0"

# NVLink multicast stays off: kernels and transports here do without, and where it is half set up, it hangs
for setting in NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1; do
    name=${setting%%=*}
    if [[ ${!name-${setting#*=}} != "${setting#*=}" ]]; then
        printf 'torchrun.sh: %s is %s here, and is set to %s\n' "$name" "${!name}" "${setting#*=}" >&2
    fi
    export "${setting?}"
done

torchrun=$(command -v torchrun) || fail 'torchrun is not on the PATH: activate the environment that PyTorch is in'

command_of() { # node's number, its processes, script and arguments -> the array `command`
    local number=$1 processes=$2
    shift 2
    command=("$torchrun" --nnodes "$nodes" --nproc-per-node "$processes")
    if ((nodes == 1 && ${#hosts[@]} == 0)); then
        command+=(--standalone)
    else
        # static: node n has the n-th ranks, so that neighbours in the ring are neighbours in the list of hosts
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

# what the processes elsewhere must know, as ssh carries no environment
settings=()
for name in $(compgen -e | grep -E '^(NCCL|TORCH|GLOO|CUDA|TRITON|PYTORCH|OMP|HF)_|^(PATH|PYTHONPATH|LD_LIBRARY_PATH)$' | sort); do
    settings+=("$name=${!name}")
done

pids=()
stop() {
    # with a terminal of its own (-tt) a host's torchrun is hung up on, and ends, when its ssh does
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
            sleep 2 # for what the others have to say
            break
        fi
    done
    ((status)) || sleep 0.2
done
stop
exit "$status"
