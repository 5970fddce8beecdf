#!/bin/bash
# @title@
# Written by megatron-wrap; `sbatch @file@` submits it again, and the run resumes.

#SBATCH --job-name=@job_name@
#SBATCH --chdir=@chdir@
#SBATCH --partition=@partition@
#SBATCH --account=@account@
#SBATCH --time=@time_limit@

# One task on each node: torchrun's agent, which starts the processes of its node.
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@cores@
#SBATCH --gpus-per-node=@gpus@

# What this script prints; a job that is queued again appends to the same files.
#SBATCH --output=@log@
#SBATCH --open-mode=append

# @signal_seconds@ s before the time limit, and only to this script.
#SBATCH --signal=B:USR1@@signal_seconds@
# Whether Slurm queues the job again, which then resumes, after the failure of a node.
#SBATCH --@requeue_option@
@sbatch_options@

# ---- this run ----
output=@output@
shared=(@shared@)  # folders that all nodes have to see
srun_options=(@srun_options@)
requeue=@requeue@
max_restarts=@max_restarts@
port=@port@  # of the rendezvous; empty: by the number of the job
export MEGATRON_WRAP_LAUNCHER=slurm  # that the commands for the next steps name
@setup@

# On each node.
run_node() {
    @python@ -m megatron_wrap.cli.main @command@ \
        --launcher local --nodes @nodes@ --gpus-per-node @processes@ \
        --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
}

# ---- from here on, the same for every run ----
set -u
mkdir -p "$output/logs" "$output/slurm"
log=$output/logs/slurm-$SLURM_JOB_ID            # of this script .log, of each node -node0.log, -node1.log, ...
mine=$output/slurm/$SLURM_JOB_ID                # files by which this script, its nodes and megatron-wrap jobs agree
rm -f "$mine".exit "$mine".stopped "$mine".failed

finish() { echo "$1" > "$mine.exit"; exit "$1"; }
say() { echo "$(date '+%m-%d %H:%M:%S') slurm job $SLURM_JOB_ID: $1"; }

# The first node of the allocation; without Slurm's answer there is no address that the others could use.
if ! nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") ||
    ! first=$(scontrol show node "$(head -n 1 <<< "$nodes")" | grep -o 'NodeAddr=[^ ]*'); then
    say "error: scontrol does not name the nodes of the allocation; it must be installed on the compute nodes"
    finish 2
fi
export RENDEZVOUS=${first#NodeAddr=}:${port:-$((20000 + SLURM_JOB_ID % 10000))}

export MINE=$mine SEEN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} FOLDER=$PWD

sees() {  # on each node: whether it finds what this script has written
    for folder in "$@"; do
        for attempt in 1 2 3 4 5; do  # network file systems may show a new file late
            [ "$PWD" = "$FOLDER" ] && [ "$(cat "$folder/.slurm-$SLURM_JOB_ID" 2> /dev/null)" = "$SEEN" ] && continue 2
            sleep 1
        done
        echo "error: node $SLURMD_NODENAME does not see the folder $folder of $FOLDER as the first node does;" \
            "start the run in a file system that all nodes share, and write save and output_dir there"
        exit 2
    done
}

on_node() {  # on each node: its processes
    trap : USR1 TERM  # meant for the run, for whose end this shell waits
    NODE_RANK=$SLURM_NODEID run_node
    code=$?
    case $code in
        0) ;;
        75) touch "$MINE.stopped" ;;  # it was asked to save and end: no failure for which the others are ended
        *)
            (set -C; echo "$SLURM_NODEID $code" > "$MINE.failed") 2> /dev/null  # the first one
            exit "$code"
            ;;
    esac
}
export -f sees on_node run_node

say "starts on ${nodes//$'\n'/ }, attempt $((${SLURM_RESTART_COUNT:-0} + 1))"
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    for folder in "${shared[@]}"; do mkdir -p "$folder" && echo "$SEEN" > "$folder/.slurm-$SLURM_JOB_ID"; done
    if ! seen=$(srun --ntasks-per-node=1 bash -c 'sees "$@"' node "${shared[@]}" 2>&1); then
        { grep '^error: ' <<< "$seen" || echo "$seen"; } | tail -n 1
        finish 2
    fi
    for folder in "${shared[@]}"; do rm -f "$folder/.slurm-$SLURM_JOB_ID"; done
fi

asked=0
trap 'asked=1; say "SIGUSR1, as before the time limit: the run is asked to save and end"; kill -USR1 "$step"' USR1
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --open-mode=append --output="$log-node%n.log" \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${srun_options[@]}" \
    bash -c on_node &
step=$!
while wait "$step"; code=$?; [ $asked = 1 ]; do asked=0; done  # a signal ends the wait, not the run

[ -s "$mine.failed" ] && read -r node code < "$mine.failed"
again=  # why the job is queued again
if [ "$code" -eq 0 ] && [ -e "$mine.stopped" ]; then
    code=75
    [ "$requeue" = 1 ] && again="the run has saved"
elif [ "$code" -eq 1 ] || [ "$code" -gt 2 ]; then  # 2: a mistake of the user
    # The processes of other nodes fail before Slurm knows that a node is dead.
    if [ "$requeue" = 1 ] && ! timeout 60 srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 true; then
        say "a node does not answer; Slurm queues the job again when it knows that (after its SlurmdTimeout)"
        sleep 900
    fi
    failures=$(($(cat "$mine.failures" 2> /dev/null) + 1))
    if [ "$failures" -le "$max_restarts" ]; then
        again="failure $failures, exit code $code"
        echo "$failures" > "$mine.failures"
    fi
fi
if [ -s "$mine.failed" ]; then
    say "failed on node $node with exit code $code; its log is $log-node$node.log"
    { grep '^error: ' "$log-node$node.log" || grep . "$log-node$node.log"; } | tail -n 1
elif [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then
    say "srun ended with exit code $code"
fi
if [ -n "$again" ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then  # it was not cancelled
    say "$again; the job is queued again, and resumes"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
    say "error: scontrol does not queue the job again"
fi
[ "$code" -eq 75 ] && say "the run has saved; sbatch $output/slurm/run.sbatch resumes it"
finish "$code"
