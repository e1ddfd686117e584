# The tasks of README.md, for examples/worker.sh.

# The only member of the args, a text.
member() {
  local text=${args#*\": \"}
  text=${text%\"*}
  printf '%b' "${text//\\\"/\"}"
}

handle() {
  local args path
  IFS= read -r args
  path=$(member)
  case $1 in
    echo | *odd*) printf '%s' "$args" ;;
    none) ;;
    fail) member >&2; return 1 ;;
    fail_for_good) member >&2; return 65 ;;
    hold) touch "$path.began"; until [[ -e $path ]] || ! kill -0 "$WORKER_PID"; do sleep 0.02; done ;;
    stubborn) until [[ -e $path ]] || ! kill -0 "$WORKER_PID"; do sleep 0.02; done ;;
    crash) if [[ ! -e $path ]]; then touch "$path"; kill -KILL "$WORKER_PID"; sleep 1; fi ;;
    again) if [[ ! -e $path ]]; then touch "$path"; echo '{"message": "not yet"}'; return 75; fi ;;
    again_after_none) echo '{"needs": [999999999999]}'; return 75 ;;
    large) printf '"%*s"' 100000 '' | tr ' ' x ;;
    unstorable) echo '{"torn": ' ;;
    nul) printf 'a\0b' >&2; return 1 ;;
    *) return 127 ;;
  esac
}
