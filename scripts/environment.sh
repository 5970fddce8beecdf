# Sourced by the other scripts: makes or reuses .venv and sets PYTHON. VENV and MEGATRON_WRAP_PYTHON choose others.
_venv=${VENV:-.venv}
PYTHON=$PWD/$_venv/bin/python
_requirements=${REQUIREMENTS:-environment/wrap_environment/requirements.txt}
_stamp=$(cat "$_requirements" setup.py | cksum)
if [ "$(cat "$_venv/.installed" 2>/dev/null)" != "$_stamp" ]; then
  echo "setting up $_venv from $_requirements (a few minutes the first time)" >&2
  [ -x "$PYTHON" ] || "${MEGATRON_WRAP_PYTHON:-python3}" -m venv "$_venv"
  # shellcheck disable=SC2086
  "$PYTHON" -m pip install -q --disable-pip-version-check ${PIP_OPTIONS:-} -r "$_requirements"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
  echo "$_stamp" > "$_venv/.installed"
fi
