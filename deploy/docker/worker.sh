#!/usr/bin/env bash
# Brings the clone on the disk to the image's commit, registers the deployments of prefect.yaml, and works for them.
#   worker.sh process        # flows run in this container
#   worker.sh none           # registers only, for workers of deploy/pools that start containers or pods
# The clone is in $WORKSPACE (/workspace), which outlives the container. One with commits or changes in the way is kept as it is.
set -euo pipefail
kind=${1:?worker.sh: expected process or none}
image=${IMAGE_CODE:-/opt/rlhf-pipeline}
clone=${WORKSPACE:-/workspace}/rlhf-pipeline

test -d "$clone" || git clone "$image" "$clone"
git -C "$clone" pull --ff-only "$image" HEAD || git -C "$clone" log -1
cd "$clone"
export PREFECT_HOME="$clone/.prefect" PREFECT_LOGGING_SETTINGS_PATH="$clone/flows/logging.yml" PYTHONPATH="$clone"
git config user.name >/dev/null || git config user.name rlhf
git config user.email >/dev/null || git config user.email rlhf@localhost

ask() {
    timeout 600 prefect --no-prompt "$@" || {
        echo "worker.sh: expected prefect $1 $2 to succeed within 600 s; look at PREFECT_API_URL and the server's log" >&2
        exit 1
    }
}
if [ "$kind" = process ]; then
    ask work-pool create local --type process --overwrite
fi
ask deploy --all
if [ "$kind" = process ]; then
    exec prefect --no-prompt worker start --pool local --name "$(hostname)"
fi
