# shellcheck shell=bash
# What all scripts share: a Python, and a virtual environment in step with pyproject.toml and
# constraints.txt. To be sourced.
#
# Environment:
#   TRIOSERVE_PYTHON  the interpreter a new environment is made with (default: the first of
#                     python3, python3.14 ... python3.11, python that is 3.11 or newer)
#   TRIOSERVE_VENV    where the environment lies (default: .venv in the repository)
# pip finds its own settings (PIP_*, pip.conf) as always; nothing here overrides an index.

set -euo pipefail
unset CDPATH PYTHONHOME

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${TRIOSERVE_VENV:-$ROOT/.venv}
STAMP=$VENV/trioserve.stamp

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
    say "$@"
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the interpreter to make an environment with.
find_python() {
    local candidate
    if [[ -n ${TRIOSERVE_PYTHON:-} ]]; then
        command -v -- "$TRIOSERVE_PYTHON" >/dev/null ||
            die "TRIOSERVE_PYTHON=$TRIOSERVE_PYTHON: no such program"
        new_enough "$TRIOSERVE_PYTHON" ||
            die "TRIOSERVE_PYTHON=$TRIOSERVE_PYTHON: $("$TRIOSERVE_PYTHON" --version 2>&1 |
                head -n 1) is too old or does not run; Python 3.11 or newer is needed"
        command -v -- "$TRIOSERVE_PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            command -v -- "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer on PATH; install one, or name it with TRIOSERVE_PYTHON"
}

# Prints what an environment must have been made from to be used as it is. The folder is part of
# it because the programs in an environment hold its absolute path.
fingerprint() {
    {
        printf '%s\n%s\n' "$ROOT" "$VENV"
        cat -- "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
    } | sha256sum | cut -d ' ' -f 1
}

# up_to_date EXTRA: whether the environment can serve as it is; "dev" includes "runtime".
up_to_date() {
    local print extra
    [[ -r $STAMP && -x $VENV/bin/python ]] || return 1
    read -r print extra <"$STAMP" || return 1
    [[ $print == "$(fingerprint)" && ($extra == "$1" || $extra == dev) ]] || return 1
    "$VENV/bin/python" -c '' 2>/dev/null
}

# make_venv EXTRA: under the lock, brings the environment to EXTRA.
make_venv() {
    local extra=$1 python target=$ROOT quiet=()
    [[ -t 2 ]] || quiet=(--quiet)
    if [[ -r $STAMP && $(cut -s -d ' ' -f 2 "$STAMP") == dev ]]; then
        extra=dev # an environment that had the tools keeps them
    fi
    [[ $extra == dev ]] && target="$ROOT[dev]"
    rm -f -- "$STAMP"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || exit 1
        say "making $VENV with $("$python" --version)"
        "$python" -m venv --clear -- "$VENV" || die "cannot make $VENV; where Python comes" \
            "without the venv module, install it (Debian, Ubuntu: apt install python3-venv)"
    fi
    say "installing trioserve and what it needs into $VENV; torch makes this take minutes"
    # compat: a path entry. The default, an import hook, comes behind the search in directories, and
    # there a program beside the checkout finds the folder trioserve/ as a package without content.
    # The pinned setuptools builds trioserve, so that a build takes nothing unpinned from an index.
    PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" \
        --constraint "$ROOT/constraints.txt" setuptools &&
        PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" \
            --constraint "$ROOT/constraints.txt" --no-build-isolation \
            --config-settings editable_mode=compat --editable "$target" ||
        die "pip failed; its own words are above (index and proxy come from pip's settings)"
    printf '%s %s\n' "$(fingerprint)" "$extra" >"$STAMP"
}

# ensure_venv runtime|dev: returns with an environment that fits. Safe when several start at once:
# one installs, the others wait for it. All output goes to stderr.
ensure_venv() {
    up_to_date "$1" && return
    command -v flock >/dev/null || die "the program flock is missing; install util-linux"
    mkdir -p -- "$(dirname -- "$VENV")"
    (
        if ! flock --nonblock 9; then
            say "waiting for another script that is installing into $VENV"
            flock 9
        fi
        up_to_date "$1" || make_venv "$1" 9>&-
    ) 9>"$VENV.lock" >&2
}
