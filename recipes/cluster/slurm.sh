#!/usr/bin/env bash
# A flow on a Ray cluster over the nodes of a Slurm job (docs/cluster.md). In the project's folder:
#   sbatch recipes/cluster/slurm.sh flows.full_pipeline --params recipes/cluster/grpo_70b.yaml --params my_data.yaml --run mine
# The flow runs on the first node. When time is up, it writes a checkpoint and Slurm queues the job again; the same happens when Slurm takes
# the nodes back or loses one. Options that are given to sbatch win over these:
#SBATCH --job-name=rlhf
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@330
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

# Settings, from the environment:
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} # on every node
export HF_HOME=${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface} # on a disk that all nodes see
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-0}     # models by their name on the hub; 1: only those in HF_HOME, for nodes without internet
head_ip=${HEAD_IP:-}                           # of the first node, as the other ones reach it; empty: as Ray finds it
ray_port=${RAY_PORT:-6379}
dashboard_port=${DASHBOARD_PORT:-8265}
start_timeout=${START_TIMEOUT:-300} # seconds until all nodes are there
stop_grace=${STOP_GRACE:-300}       # seconds for a checkpoint; --signal above has 30 more
end_timeout=${END_TIMEOUT:-60}      # seconds for Ray to end, half of which a node may drain

fail() {
    echo "slurm.sh: $1" >&2
    exit 1
}

# Ray on one node until SIGTERM. The token is read from a file, because stages don't see variables with secrets.
ray_node() {
    local folder stopped=no
    folder=$(mktemp -d /tmp/rlhf-ray-XXXXXX) # a short path, because Unix sockets in it have at most 107 characters
    printf %s "$RAY_AUTH_TOKEN" >"$folder/token"
    unset RAY_AUTH_TOKEN
    export RAY_AUTH_TOKEN_PATH=$folder/token PATH=${PYTHON%/*}:$PATH
    "$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats --temp-dir="$folder/ray" --num-cpus="$(nproc)" \
        --min-worker-port=0 --max-worker-port=0 --log-color=false "$@" >"$folder/output" 2>&1 &
    trap 'stopped=yes; kill -TERM $! 2>/dev/null' TERM INT
    while kill -0 $! 2>/dev/null; do wait $!; done
    [ $stopped = yes ] || { echo "Ray on $(hostname) ended by itself; its output ends with:" && tail -n 15 "$folder/output"; }
    rm -rf "$folder"
    [ $stopped = yes ]
}

# start_ray <nodes, separated by commas> <their number> <arguments of ray start>: a step of Slurm in the background.
start_ray() {
    local names=$1 count=$2
    shift 2
    RAY_AUTH_TOKEN=$token srun --nodelist="$names" --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --overlap --cpu-bind=none \
        --kill-on-bad-exit=0 bash -c "$(declare -f ray_node); ray_node \"\$@\"" ray_node "$@" &
    steps+=($!)
}

# wait_for <nodes>: until they are in the cluster; ends this script if they aren't in time or a step ends.
wait_for() {
    "$PYTHON" -m rlhf_core.engines.ray.wait "$address" "$1" "$start_timeout" &
    local waiting=$! code=0
    wait -n "$waiting" "${steps[@]}" || code=$?
    if kill "$waiting" 2>/dev/null || ((code > 0)); then # a step has ended first, or time is up
        fail "Ray: expected $1 of ${#nodes[@]} nodes, got the error above"
    fi
}

end_all() {
    trap - EXIT
    ((${#steps[@]} == 0)) || kill -TERM "${steps[@]}" 2>/dev/null || true
    for ((second = 0; second < end_timeout; second++)); do
        kill -0 "${steps[@]}" 2>/dev/null || break
        sleep 1
    done
    ((${#steps[@]} == 0)) || kill -KILL "${steps[@]}" 2>/dev/null || true
    rm -rf "$own"
}

(($# > 0)) || fail "expected a flow and its arguments, got none; such as: sbatch $0 flows.full_pipeline --params my_data.yaml"
[ -x "$PYTHON" ] || fail "PYTHON: expected the project's Python, got $PYTHON; run make setup, or set PYTHON"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ -n "$head_ip" ] || head_ip=$("$PYTHON" -c 'import ray; print(ray.util.get_node_ip_address())')
case $head_ip in
127.*) ((${#nodes[@]} == 1)) || [ -n "${HEAD_IP:-}" ] || fail "head: expected an address that other nodes reach, got $head_ip; set HEAD_IP" ;;
esac

own=$(mktemp -d "${TMPDIR:-/tmp}/rlhf-flow-XXXXXX")
steps=()
trap end_all EXIT
token=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
printf %s "$token" >"$own/token"
export RAY_AUTH_MODE=token
export RAY_JOB_STOP_WAIT_TIME_S=$((stop_grace - 5)) # from SIGTERM to SIGKILL of a stage's job; Ray's default is 3
export RAY_AUTH_TOKEN_PATH=$own/token
address=http://127.0.0.1:$dashboard_port
start_ray "${nodes[0]}" 1 --head --node-ip-address="$head_ip" --port="$ray_port" --include-dashboard=true \
    --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port"
wait_for 1 # or the other nodes give up
if ((${#nodes[@]} > 1)); then
    others=$(IFS=,; echo "${nodes[*]:1}")
    start_ray "$others" $((${#nodes[@]} - 1)) --address="$head_ip:$ray_port"
    wait_for ${#nodes[@]}
fi

"$PYTHON" -m "$@" --set cluster.address="$address" --set flow.stop_grace="$stop_grace" &
flow=$!
requeue=no
trap 'again=yes; requeue=yes; kill -TERM $flow' USR1
trap 'again=yes; kill -TERM $flow' TERM INT
again=yes
while [ $again = yes ]; do # a signal ends wait, not the flow
    again=no code=0
    wait "$flow" || code=$?
done
echo "slurm.sh: the flow ended with exit code $code"
if [ $requeue = yes ] && ((code != 0)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
