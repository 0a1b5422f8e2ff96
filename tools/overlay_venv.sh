#!/usr/bin/env bash
# Builds .venv-NAME from requirements/NAME.lock, on top of .venv; when it is up to date, does nothing.
#
#     tools/overlay_venv.sh bridge            # or modelopt
#     tools/overlay_venv.sh bridge --lock     # writes NAME.lock anew from NAME.in
#
# What such an environment does not have is taken from .venv, which must be up to date: packages, this
# repository's editable install, and commands such as odb-megatron and torchrun, which run in the
# environment that they are in. A line "# python: 3.12" of NAME.in says which Python it needs;
# packages behind "# alone: " are installed without what they ask for.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

readonly NAME=${1:-}
readonly LOCK=requirements/$NAME.lock
readonly INPUT=requirements/$NAME.in
readonly VENV=.venv-$NAME
readonly STAMP=$VENV/.lock.sha256

if [[ -z $NAME || $NAME == dev || ! -f $INPUT ]]; then
    echo "usage: tools/overlay_venv.sh NAME [--lock], where requirements/NAME.in is bridge.in or modelopt.in" >&2
    exit 2
fi

# What a "# $1: " line of NAME.in says.
said() {
    sed -n "s/^# $1: //p" "$INPUT"
}

# Makes an empty environment in $1 that sees the packages of .venv behind its own. The folder is added
# as site-packages is, not as a bare path, so that Python reads the .pth files in it: this repository
# is installed by one.
make_venv() {
    local found wanted
    found=$(.venv/bin/python -I -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    wanted=$(said python)
    if [[ -n $wanted && $found != "$wanted" ]]; then
        echo "$VENV needs Python $wanted, and .venv has $found: ODB_PYTHON=/path/to/python$wanted make venv" >&2
        return 1
    fi
    "$(tools/find_python.sh)" -m venv "$1"
    .venv/bin/python -I -c '
import sysconfig
print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))
' >"$1/lib/python$found/site-packages/zz_base.pth"
}

# Gives environment $1 the commands of .venv that it has not got from its own packages.
add_commands() {
    local base
    base=$(.venv/bin/python -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1/bin/python" -I - "$base" <<'EOF'
import logging
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from pip._vendor.distlib.scripts import ScriptMaker

logging.disable(logging.WARNING)  # one line of each command that is there already
maker = ScriptMaker(None, sysconfig.get_path("scripts"))  # none of those is replaced
maker.variants = {""}
for package in distributions(path=[sys.argv[1]]):
    for point in package.entry_points.select(group="console_scripts"):
        if not Path(maker.target_dir, point.name).exists():
            maker.make(f"{point.name} = {point.module}:{point.attr}")
EOF
}

pip_in() {
    local venv=$1
    shift
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input "$@"
}

lock() {
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf -- '$work'" EXIT
    make_venv "$work/venv"
    pip_in "$work/venv" install --quiet --requirement "$INPUT"
    said alone | pip_in "$work/venv" install --quiet --no-deps --requirement /dev/stdin
    {
        echo "# Written by tools/overlay_venv.sh $NAME --lock from $NAME.in; do not edit. On top of dev.lock."
        pip_in "$work/venv" list --format freeze --path "$work"/venv/lib/python3.*/site-packages |
            grep -v '^pip=='
    } >"$work/new.lock"
    if [[ -f $LOCK ]]; then diff -u "$LOCK" "$work/new.lock" || true; fi
    cp -- "$work/new.lock" "$LOCK"
}

digest() {
    { cat "$LOCK" .venv/.lock.sha256 tools/overlay_venv.sh && pwd -P; } | sha256sum | cut -d ' ' -f 1
}

if [[ ${2:-} == --lock ]]; then
    lock
    exit
fi
if [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$(digest)" ]]; then exit 0; fi
if command -v flock >/dev/null; then
    exec 9>"$VENV.lock"
    flock 9
fi
started=$SECONDS
echo "Building $VENV (up to 0.6 GB on disk, besides .venv)" >&2
rm -rf -- "$VENV"
make_venv "$VENV"
# The lock is complete, so nothing is resolved.
pip_in "$VENV" install --quiet --no-deps --requirement "$LOCK"
add_commands "$VENV"
digest >"$STAMP.new"
mv -f -- "$STAMP.new" "$STAMP"
echo "Built $VENV in $((SECONDS - started)) s" >&2
