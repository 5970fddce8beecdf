# Sourced by the other scripts. environment REQUIREMENTS makes or reuses .venv with them and sets PYTHON.
# MEGATRON_WRAP_PYTHON names the interpreter to make it from (default: python3), VENV another folder.
unset PYTHONDONTWRITEBYTECODE # uv leaves the compilation of a module to the first process that imports it
UV=0.13.9
environment() {
  local requirements=environment/wrap_environment/$1 venv=${VENV:-.venv} stamp
  PYTHON=$PWD/$venv/bin/python
  stamp=$(cat environment/wrap_environment/*.txt setup.py | cksum)
  [ "$(cat "$venv/.installed-$1" 2>/dev/null)" != "$stamp" ] || return 0
  echo "setting up $venv with $requirements (a few minutes the first time)" >&2
  [ -x "$PYTHON" ] || "${MEGATRON_WRAP_PYTHON:-python3}" -m venv "$venv"
  for what in "-r $requirements" "--no-deps -e ."; do  # the installer's own words only where they are needed
    # shellcheck disable=SC2086
    install_packages $what > "$venv/install.log" 2>&1 || { cat "$venv/install.log" >&2; return 1; }
  done
  echo "$stamp" > "$venv/.installed-$1"
}

install_packages() { # ARGUMENTS OF pip install...: with uv, in a third of pip's time; with pip where uv cannot
  local pip=("$PYTHON" -m pip --disable-pip-version-check) index links
  index=${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2> /dev/null || true)}
  links=${PIP_FIND_LINKS:-$("${pip[@]}" config get global.find-links 2> /dev/null || true)}
  # uv reads none of pip's settings; a list is separated by commas there
  (
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
    # shellcheck disable=SC2086
    [ -z "$links" ] || export UV_FIND_LINKS=$(printf '%s,' $links | sed 's/,$//')
    "$PYTHON" -c "import uv" 2> /dev/null || "${pip[@]}" install -q "uv==$UV"
    "$PYTHON" -m uv pip install -q --python "$PYTHON" "$@"
  ) || "${pip[@]}" install -q "$@"
}
