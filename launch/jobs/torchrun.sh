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
#   --env A,B,...      with hosts: further environment variables for them, such as HF_TOKEN. They, the settings of NCCL, Gloo, torch, CUDA,
#                      Triton and OpenMP, and the search paths go over ssh's standard input: no command line shows a value
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

# checked before bash computes with them: its arithmetic runs commands that it finds in a text
number() {
    [[ $2 =~ ^[1-9][0-9]{0,17}$ ]] || fail "$1 is '$2', but must be a whole number of at least 1"
}

index() {
    [[ $2 =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail "$1 is '$2', but must be a whole number of at least 0"
}

hosts=() slots=() named=()
nproc='' master='' port='' timeout=600 module=() dry_run='' given=''
while (($#)); do
    case $1 in
        --hosts | --hostfile | --nproc | --master | --port | --timeout | --env)
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
        --env)
            IFS=, read -ra more <<<"$2"
            for name in ${more[@]+"${more[@]}"}; do
                [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env is '$2', but takes names of variables, without their values"
                [[ ${!name+set} ]] || fail "--env names $name, which is not set here"
                named+=("$name")
            done
            shift 2
            ;;
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
number --timeout "$timeout"
((${#named[@]} == 0 || ${#hosts[@]})) || fail "--env is for --hosts and --hostfile: elsewhere the launcher decides what a job's environment is"
for name in SLURM_JOB_ID SLURM_STEP_ID; do
    [[ -z ${!name:-} ]] || index "$name" "${!name}"
done

nodes=1 node=0
if ((${#hosts[@]})); then
    nodes=${#hosts[@]}
    master=${master:-${hosts[0]##*@}}
elif [[ ${PET_NNODES:-} ]]; then
    nodes=$PET_NNODES node=${PET_NODE_RANK:-0} master=${master:-${PET_MASTER_ADDR:-}} port=${port:-${PET_MASTER_PORT:-}}
    number PET_NNODES "$nodes"
    index PET_NODE_RANK "$node"
    [[ -z $port ]] || number PET_MASTER_PORT "$port"
    nproc=${nproc:-${PET_NPROC_PER_NODE:-}}
    [[ $nproc != auto ]] || nproc=gpu
    [[ -z $nproc || $nproc == gpu ]] || number PET_NPROC_PER_NODE "$nproc"
elif [[ ${OMPI_COMM_WORLD_SIZE:-} ]]; then
    one_a_node mpirun "${OMPI_COMM_WORLD_LOCAL_SIZE:-1}" '--map-by ppr:1:node'
    nodes=$OMPI_COMM_WORLD_SIZE node=${OMPI_COMM_WORLD_RANK:-}
    number OMPI_COMM_WORLD_SIZE "$nodes"
    index OMPI_COMM_WORLD_RANK "$node"
elif [[ ${SLURM_STEP_NODELIST:-} ]]; then
    nodes=${SLURM_STEP_NUM_NODES:-1} node=${SLURM_NODEID:-0}
    number SLURM_STEP_NUM_NODES "$nodes"
    index SLURM_NODEID "$node"
    number SLURM_STEP_NUM_TASKS "${SLURM_STEP_NUM_TASKS:-$nodes}"
    one_a_node srun "$((${SLURM_STEP_NUM_TASKS:-$nodes} / nodes))" --ntasks-per-node=1
    master=${master:-$(first_host "$SLURM_STEP_NODELIST")}
    port=${port:-$((15000 + (${SLURM_JOB_ID:-0} + ${SLURM_STEP_ID:-0}) % 10000))}
elif [[ ${SLURM_JOB_NODELIST:-} && ${SLURM_JOB_NUM_NODES:-1} != 1 ]]; then
    fail "the SLURM job has $SLURM_JOB_NUM_NODES nodes, but this is not one of srun's tasks: start it with srun --ntasks-per-node=1"
elif [[ ${PMI_SIZE:-} ]]; then
    one_a_node mpiexec "${MPI_LOCALNRANKS:-1}" '-ppn 1'
    nodes=$PMI_SIZE node=${PMI_RANK:-}
    number PMI_SIZE "$nodes"
    index PMI_RANK "$node"
fi
((node < nodes)) || fail "this is node $node, counted from 0, but there are $nodes nodes"
((${port:-1} <= 65535)) || fail "the port is $port, but ports go to 65535"
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

if ((nodes == 1 && ${#hosts[@]} == 0)) && [[ -e /sys/class/net/lo ]]; then
    # ranks of one host need no network
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-lo}
fi

torchrun=$(command -v torchrun) || fail 'torchrun is not on the PATH: activate the environment that PyTorch is in'

command_of() { # fills the array `command` from the node's number, its processes, the script and its arguments
    local number=$1 processes=$2
    shift 2
    command=("$torchrun" --nnodes "$nodes" --nproc-per-node "$processes")
    if ((nodes == 1 && ${#hosts[@]} == 0)); then
        command+=(--standalone --local-addr localhost)
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

# Settings for the processes on other hosts, as a shell reads them: over standard input, because every user of a host can read command
# lines. Without a terminal, Python would hold its output back.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}
prefixes='^(NCCL|TORCH|GLOO|CUDA|TRITON|PYTORCH|OMP)_[A-Za-z0-9_]*$|^(PATH|PYTHONPATH|PYTHONUNBUFFERED|LD_LIBRARY_PATH)$'
names=$({
    compgen -e | grep -E "$prefixes"
    printf '%s\n' ${named[@]+"${named[@]}"}
} | sort -u | grep .)
settings=''
for name in $names; do
    settings+="export $(quoted "$name=${!name}")"$'\n'
done

# On a host: read the settings, run torchrun, and end it when standard input closes, which it does when ssh or this script ends.
# shellcheck disable=SC2016
remote='eval "$(head -c "$1")" && cd "$2" || exit; shift 2; exec 3<&0
"$@" </dev/null 3<&- & job=$!
{ cat <&3; kill "$job"; } >/dev/null 2>&1 & watch=$!
wait "$job"; status=$?; kill "$watch" 2>/dev/null; exit "$status"'

pids=() feeds=() pipes=''
stop() {
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill "$pid" 2>/dev/null || true
    done
    wait
}
trap '[[ -z $pipes ]] || rm -rf "$pipes"' EXIT
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM
[[ $dry_run ]] || pipes=$(mktemp -d)

for n in "${!hosts[@]}"; do
    processes=${nproc:-${slots[n]:-}}
    command_of "$n" "${processes:-gpu}" "$@"
    length=$(printf '%s' "$settings" | wc -c)
    line=$(quoted sh -c "$remote" sh "$((length))" "$PWD" "${command[@]}")
    start=(ssh -T -o BatchMode=yes -o ConnectTimeout=20 -- "${hosts[n]}" "$line")
    if [[ $dry_run ]]; then
        # shellcheck disable=SC2086
        printf '# standard input sets: %s\n%s\n' "$(printf '%s ' $names)" "$(quoted "${start[@]}")"
    else
        mkfifo "$pipes/$n"
        (
            for feed in ${feeds[@]+"${feeds[@]}"}; do
                exec {feed}>&-
            done
            exec "${start[@]}"
        ) <"$pipes/$n" &
        pids+=($!)
        exec {feed}>"$pipes/$n"
        feeds+=("$feed")
    fi
done
trap '' PIPE # an ssh that has ended already is told of below
for feed in ${feeds[@]+"${feeds[@]}"}; do
    printf '%s' "$settings" >&"$feed" 2>/dev/null || true
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
