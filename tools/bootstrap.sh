#!/usr/bin/env bash
# Builds .venv from requirements/dev.lock; when it is up to date, does nothing, in a fraction of a second.
#
# A stamp is written last and only then, so an interrupted build has none and starts again. Calls that
# run at the same time wait for one another. ODB_PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

readonly LOCK=requirements/dev.lock
readonly STAMP=.venv/.lock.sha256            # the lock and the interpreter .venv was built from
readonly PROJECT_STAMP=.venv/.project.sha256 # the metadata and the folder of the editable install
readonly BUILDING=.venv/.building            # .venv is ours to replace, though it has no stamp

# Prints the kind of interpreter $1 is, for example "cpython-312 linux".
interpreter_of() {
    "$1" -I -S -c 'import sys; print(sys.implementation.cache_tag, sys.platform)' 2>/dev/null
}

lock_digest() {
    { interpreter_of "$1" && cat "$LOCK"; } | sha256sum | cut -d ' ' -f 1
}

project_digest() {
    { pwd -P && cat pyproject.toml setup.py odb_megatron/__init__.py; } | sha256sum | cut -d ' ' -f 1
}

stamped() {
    [[ -f $1 && $(<"$1") == "$2" ]]
}

write_stamp() {
    echo "$2" >"$1.new"
    mv -f "$1.new" "$1"
}

lock_is_current() {
    [[ -x .venv/bin/python && -f $STAMP ]] || return 1
    local digest
    digest=$(lock_digest .venv/bin/python) && stamped "$STAMP" "$digest" || return 1
    [[ -z ${ODB_PYTHON:-} || $(interpreter_of "$ODB_PYTHON") == "$(interpreter_of .venv/bin/python)" ]]
}

project_is_current() {
    stamped "$PROJECT_STAMP" "$(project_digest)"
}

venv_pip() {
    .venv/bin/python -I -m pip --disable-pip-version-check --no-input "$@"
}

build() {
    local python started=$SECONDS
    python=$(tools/find_python.sh)
    if [[ -L .venv || (-e .venv && ! -e $STAMP && ! -e $BUILDING) ]]; then
        local aside=.venv.old
        while [[ -e $aside || -L $aside ]]; do aside+=.old; done
        echo ".venv was not made by tools/bootstrap.sh: moved to $aside" >&2
        mv -- .venv "$aside"
    fi
    echo "Building .venv with $python (about 6 GB on disk; 2 to 3 minutes with a fast index)" >&2
    mkdir -p .venv
    touch "$BUILDING"
    rm -f "$STAMP" "$PROJECT_STAMP"
    find .venv -mindepth 1 -maxdepth 1 ! -path "$BUILDING" -exec rm -rf -- {} +
    "$python" -m venv .venv
    # The lock is complete, so nothing is resolved; `check` proves it.
    venv_pip install --quiet --no-deps --requirement "$LOCK"
    venv_pip check >&2
    write_stamp "$STAMP" "$(lock_digest .venv/bin/python)"
    rm -f "$BUILDING"
    echo "Built .venv in $((SECONDS - started)) s" >&2
}

install_project() {
    rm -f "$PROJECT_STAMP"
    local digest
    digest=$(project_digest)
    venv_pip install --quiet --no-deps --no-build-isolation --editable .
    write_stamp "$PROJECT_STAMP" "$digest"
}

if lock_is_current && project_is_current; then exit 0; fi

if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock --nonblock 9 || {
        echo "Waiting for another build of .venv" >&2
        flock 9
    }
fi
if ! lock_is_current; then build; fi
if ! project_is_current; then install_project; fi
