# Sourced by scripts that measure in parts, with the folders kept and work, and end, the value of SECONDS at which all parts end.
# PARTS="NAME ..." runs these alone.
part() {  # NAME SECONDS COMMAND...: its lines with results, or the end of its log
  local name=$1 limit=$2 begun=$SECONDS; shift 2
  [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
  [ $((end - SECONDS)) -gt "$limit" ] || limit=$((end - SECONDS))
  [ "$limit" -gt 5 ] || { echo "$name: no time is left" | tee -a "$kept/results.txt"; return; }
  timeout -k 5 "$limit" "$@" > "$work/$name.log" 2>&1
  local code=$?
  {
    grep -a -E '^(RESULT|round|\|)|parameters on rank|trainable%' "$work/$name.log" | sed "s/^/$name: /"
    echo "$name: exit code $code after $((SECONDS - begun)) s"
  } | tee -a "$kept/results.txt"
  [ $code -eq 0 ] || tail -n 25 "$work/$name.log"
  tail -c 200000 "$work/$name.log" > "$kept/$name.log"
}
