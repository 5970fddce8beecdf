# Sourced by the other scripts. environment REQUIREMENTS makes or reuses .venv with them and sets PYTHON.
# MEGATRON_WRAP_PYTHON names the interpreter to make it from (default: python3), VENV another folder.
environment() {
  local requirements=environment/wrap_environment/$1 venv=${VENV:-.venv} stamp
  PYTHON=$PWD/$venv/bin/python
  stamp=$(cat environment/wrap_environment/*.txt setup.py | cksum)
  [ "$(cat "$venv/.installed-$1" 2>/dev/null)" != "$stamp" ] || return 0
  echo "setting up $venv with $requirements (a few minutes the first time)" >&2
  [ -x "$PYTHON" ] || "${MEGATRON_WRAP_PYTHON:-python3}" -m venv "$venv"
  for what in "-r $requirements" "--no-deps -e ."; do  # pip's own words only where they are needed
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install -q --disable-pip-version-check $what > "$venv/install.log" 2>&1 ||
      { cat "$venv/install.log" >&2; return 1; }
  done
  echo "$stamp" > "$venv/.installed-$1"
}
