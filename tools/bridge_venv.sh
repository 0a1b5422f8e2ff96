#!/usr/bin/env bash
# Builds .venv-bridge from requirements/bridge.lock, on top of .venv; when it is up to date, does nothing.
#
# Megatron-Bridge takes other versions of some packages than .venv has, so it gets an environment of
# its own, of 0.6 GB: what it does not have is taken from .venv. With --lock, bridge.lock is written
# anew from bridge.in. Needs Python 3.12, as Bridge does, and .venv to be up to date.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

readonly LOCK=requirements/bridge.lock
readonly INPUT=requirements/bridge.in
readonly VENV=.venv-bridge
readonly STAMP=$VENV/.lock.sha256

# Makes an empty environment in $1 that sees the packages of .venv behind its own.
make_venv() {
    [[ $(.venv/bin/python -I -c 'import sys; print("%d.%d" % sys.version_info[:2])') == 3.12 ]] || {
        echo "Megatron-Bridge needs Python 3.12, and .venv has another: ODB_PYTHON=/path/to/python3.12 make venv" >&2
        return 1
    }
    "$(tools/find_python.sh)" -m venv "$1"
    .venv/bin/python -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$1/lib/python3.12/site-packages/zz_base.pth"
}

pip_in() {
    local venv=$1
    shift
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input "$@"
}

# The packages of bridge.in that are installed without what they ask for.
alone() {
    sed -n 's/^# alone: //p' "$INPUT"
}

lock() {
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf -- '$work'" EXIT
    make_venv "$work/venv"
    pip_in "$work/venv" install --quiet --requirement "$INPUT"
    alone | pip_in "$work/venv" install --quiet --no-deps --requirement /dev/stdin
    {
        echo "# Written by tools/bridge_venv.sh --lock from bridge.in; do not edit. On top of dev.lock, Python 3.12 on Linux."
        pip_in "$work/venv" list --format freeze --path "$work/venv/lib/python3.12/site-packages" |
            grep -v '^pip=='
    } >"$work/bridge.lock"
    diff -u "$LOCK" "$work/bridge.lock" || true
    cp -- "$work/bridge.lock" "$LOCK"
}

digest() {
    { cat "$LOCK" .venv/.lock.sha256 && pwd -P; } | sha256sum | cut -d ' ' -f 1
}

if [[ ${1:-} == --lock ]]; then
    lock
    exit
fi
if [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$(digest)" ]]; then exit 0; fi
if command -v flock >/dev/null; then
    exec 9>.venv-bridge.lock
    flock 9
fi
started=$SECONDS
echo "Building $VENV (0.6 GB on disk, besides .venv)" >&2
rm -rf -- "$VENV"
make_venv "$VENV"
# The lock is complete, so nothing is resolved.
pip_in "$VENV" install --quiet --no-deps --requirement "$LOCK"
digest >"$STAMP.new"
mv -f -- "$STAMP.new" "$STAMP"
echo "Built $VENV in $((SECONDS - started)) s" >&2
