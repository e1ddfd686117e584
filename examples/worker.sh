#!/usr/bin/env bash
# A complete worker in bash 5.1 and psql, written from docs/worker-protocol.md: worker.sh HANDLERS [QUEUE...]
# Queues may be patterns; none: all. HANDLERS is a bash file that defines `handle TASK`, which reads the job's args
# from its stdin and writes a result, one JSON value, to its stdout, or an error to its stderr. Its exit status:
#   0 succeeded    65 failed for good    75 call again (stdout: nothing, or {"at", "needs", "message"})
#   127 this worker does not know the task    other: failed    above 128: killed by a signal
# Environment: psql's (PGHOST ...); CONCURRENCY; HEARTBEAT_EVERY, DEAD_AFTER and MAX_WAIT, the longest sleep,
# in seconds; DRAIN=1: exit when no job is left. SIGTERM or SIGINT: exit when the running jobs have ended; again,
# or SIGQUIT: give them back. psql receives notifications only with an answer, so this worker polls.
set -m
source "$1" || exit
worker='' stopping=0 to='' queues=null second=1000000
declare -A pid_of late_at outcome  # by "id.claim"
folder=$(mktemp -d) && mkfifo "$folder/ended" && exec {ended}<> "$folder/ended"
stop() { ((stopping++)) || tell stopping; }
trap stop TERM INT; trap 'stop; stop' QUIT; trap : PIPE; trap 'rm -rf "$folder"' EXIT
export WORKER_PID=$$
now() { echo "${EPOCHREALTIME//[!0-9]/}"; }  # in microseconds
tell() { local job=${2:-null.null}; printf '{"event":"%s","id":%s,"claim":%s,"what":"%s"}\n' "$1" "${job%.*}" "${job#*.}" "$3"; }
quote() { printf "'%s'" "${1//\'/\'\'}"; }
if (($# > 1)); then queues="array_remove(array[$(for queue in "${@:2}"; do quote "$queue"; echo ,; done)null], null)"; fi

# Sends a statement; sets rows, and state to its SQLSTATE, which is empty if the connection is lost.
ask() {
  rows=() state=''
  printf '%s;\n\\echo end :SQLSTATE\n' "$1" >&"$to"
  while IFS= read -r line <&"$from"; do
    if [[ $line == 'end '* ]]; then state=${line#end }; return; else rows+=("$line"); fi
  done
} 2> /dev/null
connect() {
  if [[ $to ]]; then exec {to}>&- {from}<&-; fi
  coproc PSQL { exec psql -XqAt -F $'\t'; }
  exec {to}>&"${PSQL[1]}" {from}<&"${PSQL[0]}"
  ask "set standard_conforming_strings = on; set statement_timeout = '20 s'"
} 2> /dev/null

# Judges the last answer: 0 done, 1 the statement itself is refused, 2 try again; or the worker exits.
judge() {
  case $state in
    00000) return 0 ;;
    QJ007) tell gone "$worker"; register; return 2 ;;
    QJ008 | QJ090 | 42* | 3F*) echo "refused: $state" >&2; exit 4 ;;
    '' | 08* | 25* | 40* | 53* | 55* | 57* | 58* | F0* | XX*) tell lost ;;
    *) return 1 ;;
  esac
  if ((stopping > 1)); then exit 3; fi
  if sleep 0.2; [[ ! $state ]]; then connect; fi
  return 2
}

# Others have the claims of an earlier registration by now: kill their jobs, drop their outcomes.
register() {
  for job in "${!pid_of[@]}"; do end "$job"; done
  outcome=()
  until ask "select queue.register_worker($(quote "$HOSTNAME:$$"), $queues,
    '{\"listen\": false, \"dead_after\": \"${DEAD_AFTER:-30} s\"}')"; judge; do (($? == 2)) || exit 2; done
  worker=${rows[0]} beat_at=$(now)
  tell ready "$worker"
}
# Sends a heartbeat, aborts the jobs that it names, gives back claims whose answer was lost.
beat() {
  local sent_at=$(now)
  ask "select id || '.' || claim, true from queue.heartbeat($worker)
    union all select id || '.' || claim, false from queue.claims($worker)"
  judge || return
  beat_at=$sent_at
  for row in "${rows[@]}"; do
    IFS=$'\t' read -r job is_abort <<< "$row"
    if [[ $is_abort == f && ! ${pid_of[$job]}${outcome[$job]} ]]; then report "$job" released
    elif [[ $is_abort == t && ${pid_of[$job]} ]]; then end "$job" aborted; fi
  done
}
report() {  # JOB OUTCOME [SQL of an object of further keys]: sent with the next call
  outcome[$1]="jsonb_build_object('id', ${1%.*}, 'claim', ${1#*.}, 'outcome', '$2')${3:+ || $3}"
  tell finished "$1" "$2"
}
error() { echo "jsonb_build_object('error', $(quote "${1:0:2000}"), 'options', '${2:-{\}}'::jsonb)"; }
end() {  # JOB [OUTCOME [SQL]]: kills a running job
  { kill -KILL -- "-${pid_of[$1]}"; wait "${pid_of[$1]}"; } 2> /dev/null
  unset "pid_of[$1]" "late_at[$1]"
  if [[ $2 ]]; then report "$@"; fi
}
start() {  # JOB LATE_AT TASK ARGS
  # It runs already; or this process was frozen, and another worker may have it by now, or soon.
  if ((stopping || $(now) - beat_at > ${DEAD_AFTER:-30} * second || $2 && $(now) > $2 + 5 * second)); then
    report "$1" released; return
  fi
  printf -v task %b "$3"
  tell started "$1"
  (exec {to}>&- {from}<&-; (handle "$task" <<< "$4" > "$folder/$1.out" 2> "$folder/$1.err" {ended}>&-)
    echo $? > "$folder/$1.new"; mv "$folder/$1.new" "$folder/$1.status"; echo >&"$ended") &
  pid_of[$1]=$!
  if (($2)); then late_at[$1]=$2; fi
}
finish() {  # JOB STATUS
  local out err
  out=$(tr -d '\0' < "$folder/$1.out") err=$(tr -d '\0' < "$folder/$1.err")
  unset "pid_of[$1]" "late_at[$1]"; rm -f "$folder/$1".*
  case $2 in
    0) report "$1" succeeded "${out:+jsonb_build_object('result', $(quote "$out")::jsonb)}" ;;
    75) report "$1" retry_later "$(quote "${out:-{\}}")::jsonb" ;;
    127) report "$1" unknown_task ;;
    65) report "$1" failed "$(error "$err" '{"retryable": false}')" ;;
    *) report "$1" "$( (($2 > 128)) && echo crashed || echo failed)" "$(error "${err:-exit status $2}")" ;;
  esac
}
send() {  # JOB...: sends their outcomes; a refused one is sent alone, then without its content
  local list='' job error
  for job; do list+="${list:+, }${outcome[$job]}"; done
  ask "select id || '.' || claim, error from queue.finish_many(to_jsonb(array[$list])) where error is not null"
  judge
  case $? in
    0) for job; do unset "outcome[$job]"; done
      for row in "${rows[@]}"; do
        IFS=$'\t' read -r job error <<< "$row"; tell refused "$job" "$error"
        if [[ $error == QJ005 || $error == QJ001 && $list == *"'id', ${job%.*}, 'claim', ${job#*.}, 'outcome', 'retry_later'"* ]]; then
          # its needs would make a circle, or do not exist
          report "$job" failed "$(error "refused: $error" '{"retryable": false}')"
        fi
      done ;;
    1) if (($# > 1)); then for job; do send "$job"; done; else list=${list%%" || "*}
      outcome[$1]="${list/retry_later/failed} || '{\"error\": \"the outcome could not be stored\", \"result\": {
        \"__pgdefer__\": \"unencodable\", \"value\": \"text\"}}'"; fi ;;
  esac
}
take() {  # SLOTS: starts the jobs that it gets; fails if there are none
  local asked_at=$(now)
  ask "select id || '.' || claim, (coalesce(extract(epoch from timeout), 0) * $second)::bigint,
    replace(replace(replace(task, '\\', '\\\\'), e'\\n', '\\n'), e'\\t', '\\t'), args from queue.fetch($worker, $queues, $1)"
  judge || return
  for row in "${rows[@]}"; do
    IFS=$'\t' read -r job timeout task args <<< "$row"
    start "$job" $((timeout ? asked_at + timeout : 0)) "$task" "$args"
  done
  ((${#rows[@]}))
}

connect
register
while ((! stopping || ${#pid_of[@]} || ${#outcome[@]})); do
  if (($(now) - beat_at >= ${HEARTBEAT_EVERY:-10} * second)); then beat; fi
  for job in "${!pid_of[@]}"; do
    if ((stopping > 1)); then end "$job" released
    elif ((${late_at[$job]:-0} && $(now) > late_at[$job])); then end "$job" failed "$(error 'timed out' '{"outcome": "timed_out"}')"; fi
  done
  if ((${#outcome[@]})); then send "${!outcome[@]}"; fi
  free=$((${CONCURRENCY:-4} - ${#pid_of[@]})) wait=0.2
  if ((! stopping && free > 0)) && ! take "$free"; then
    ask "select least(extract(epoch from wait_for), ${MAX_WAIT:-1}), is_drained from queue.before_sleep($worker, $queues)"
    judge && read -r wait drained <<< "${rows[0]}"
    if [[ $DRAIN$drained == 1t ]] && ! ((${#pid_of[@]})); then stop; fi
  fi
  # This only wakes the loop, as bash may lose what it reads at the instant of the time limit.
  while read -r -t "$wait" -u "$ended"; do wait=0.001; done
  for job in "${!pid_of[@]}"; do if [[ -e $folder/$job.status ]]; then finish "$job" "$(< "$folder/$job.status")"; fi; done
done
ask "select queue.deregister_worker($worker)"
tell ended "$worker"
