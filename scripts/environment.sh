# Finds Python 3.12 or newer, makes the virtual environment and installs into it, once.
# To be sourced by bash from the project's root: use_environment EXTRAS, e.g. "test" or "demo".
# It sets VENV_PYTHON. A second run with the same request installs nothing and needs no network.
#
#   ENGRAM_VENV          the environment's folder (.venv)
#   ENGRAM_PYTHON        the Python that makes it (found by itself)
#   ENGRAM_REQUIREMENTS  requirements besides the project's, e.g. "jax==0.11.2 torch"

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# True for a CPython from 3.12 to $2 that can make virtual environments.
is_usable_python() {
    "$1" -c '
import sys, sysconfig, venv, ensurepip
newest = tuple(int(part) for part in sys.argv[1].split("."))
free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
sys.exit(not ((3, 12) <= sys.version_info[:2] <= newest and not free_threaded))
' "$2" >/dev/null 2>&1
}

# Prints a usable Python. Releases that all dependencies are known for come first.
find_python() {
    if [ -n "${ENGRAM_PYTHON:-}" ]; then
        is_usable_python "$ENGRAM_PYTHON" 3.999 || fail \
            "ENGRAM_PYTHON=$ENGRAM_PYTHON is no Python 3.12 or newer with venv and ensurepip." \
            "Name another one, or unset it to have one found."
        printf '%s\n' "$ENGRAM_PYTHON"
        return
    fi
    local newest candidate
    local -a candidates=(python3 python3.14 python3.13 python3.12)
    for candidate in \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.*/bin/python3; do
        [ -x "$candidate" ] && candidates+=("$candidate")
    done
    for newest in 3.14 3.999; do
        for candidate in "${candidates[@]}"; do
            if command -v "$candidate" >/dev/null && is_usable_python "$candidate" "$newest"; then
                command -v "$candidate"
                return
            fi
        done
    done
    fail "no Python 3.12 or newer with venv and ensurepip was found (looked at python3," \
        "python3.14 to python3.12, pyenv's and uv's). Install one, for example with" \
        "'apt-get install python3.12 python3.12-venv', 'pyenv install 3.12' or" \
        "'uv python install 3.12', or name one: ENGRAM_PYTHON=/path/to/python3."
}

# use_environment EXTRAS: afterwards VENV_PYTHON has the project and these extras.
use_environment() {
    local extras=$1 venv=${ENGRAM_VENV:-.venv} python request stamp
    [[ $venv == /* ]] || venv=$PWD/$venv
    VENV_PYTHON=$venv/bin/python
    if ! "$VENV_PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1; then
        if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
            fail "$venv exists and is no virtual environment. Move it away, or name another" \
                "folder: ENGRAM_VENV=path."
        fi
        python=$(find_python) || exit 1
        echo "Making $venv with $python ($("$python" -V))"
        "$python" -m venv --clear "$venv" || fail \
            "$python could not make a virtual environment in $venv; its message is above."
    fi
    # The stamp is written last, so an interrupted installation is done again.
    request="$extras ${ENGRAM_REQUIREMENTS:-} $PWD $(cksum <pyproject.toml)"
    stamp=$venv/.engram-installed
    if [ -f "$stamp" ] && grep -qxF -- "$request" "$stamp"; then
        return
    fi
    echo "Installing engram-jax[$extras]${ENGRAM_REQUIREMENTS:+ $ENGRAM_REQUIREMENTS} into $venv (minutes, once)"
    # shellcheck disable=SC2086  # the requirements are words
    "$VENV_PYTHON" -m pip install --disable-pip-version-check \
        --editable ".[$extras]" ${ENGRAM_REQUIREMENTS:-} || fail \
        "pip could not install engram-jax[$extras]${ENGRAM_REQUIREMENTS:+ $ENGRAM_REQUIREMENTS} into $venv;" \
        "its message is above. It needs a package index (network, or PIP_INDEX_URL and" \
        "PIP_FIND_LINKS for a mirror). Run the same command again to go on."
    # Packages may have moved under another request's feet, except for the extras of one set.
    if [ -f "$stamp" ] && ! grep -qF -- "${request#* }" "$stamp"; then
        rm -f "$stamp"
    fi
    printf '%s\n' "$request" >>"$stamp"
}
