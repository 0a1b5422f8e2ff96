#!/usr/bin/env bash
# Prints the path of an interpreter that can build an environment: of the first of the given versions
# that there is; by default those of .venv, Python 3.12, else 3.13.
#
# Each candidate is executed and asked for its version, since a name proves nothing: a pyenv shim
# called python3.12 fails when no such version is selected. ODB_PYTHON=/path/to/python overrides the
# search where no versions are given.
set -euo pipefail

override=
if (($# == 0)); then
    override=${ODB_PYTHON:-}
    set -- 3.12 3.13
fi
readonly VERSIONS=("$@")

# Prints the base interpreter behind candidate $1 if it is Python $2 and can make an environment.
# The base is taken because the candidate may lie in the very .venv that is about to be replaced.
probe() {
    "$1" -I -c '
import sys
if "%d.%d" % sys.version_info[:2] != sys.argv[1]:
    raise SystemExit(3)
import ctypes, ensurepip, ssl, venv
print(getattr(sys, "_base_executable", None) or sys.executable)
' "$2" 2>/dev/null </dev/null
}

candidates() {
    local version=$1
    type -ap "python$version" python3 python || true
    local pattern found=()
    shopt -s nullglob
    for pattern in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version"{,.*,-*}/bin/python \
        "${HOME:-}/.local/share/uv/python/cpython-$version"*"/bin/python$version"; do
        found+=("$pattern")
    done
    found+=(/opt/python*/bin/"python$version" /opt/python*/*/bin/"python$version")
    found+=(/usr/local/bin/"python$version" /usr/bin/"python$version")
    if ((${#found[@]})); then printf '%s\n' "${found[@]}"; fi
}

if [[ -n $override ]]; then
    for version in "${VERSIONS[@]}"; do
        if probe "$override" "$version"; then exit 0; fi
    done
    echo "ODB_PYTHON=$override is not a working Python 3.12 or 3.13 with venv, ensurepip and ssl:" \
        "point it at one, or unset it to search for one" >&2
    exit 1
fi

tried=()
for version in "${VERSIONS[@]}"; do
    while IFS= read -r candidate; do
        if [[ ! -x $candidate ]]; then continue; fi
        if probe "$candidate" "$version"; then exit 0; fi
        tried+=("$candidate (as $version)")
    done < <(candidates "$version" | awk '!seen[$0]++')
done

{
    if [[ ${VERSIONS[0]} == 3.12 ]]; then
        echo "No Python 3.12 or 3.13 found (megatron-core 0.19 needs 3.12 or later). Ways out, any one:"
        echo "  pyenv install 3.12"
        echo "  uv python install 3.12"
        echo "  apt-get install python3.13 python3.13-venv        (Debian 13)"
        echo "  apt-get install python3.12 python3.12-venv        (Ubuntu 24.04)"
        echo "  ODB_PYTHON=/path/to/python3.12 make venv          (one that is not on PATH)"
    else
        echo "No Python ${VERSIONS[*]} found. Ways out, any one:"
        echo "  pyenv install ${VERSIONS[0]}"
        echo "  uv python install ${VERSIONS[0]}"
        echo "  apt-get install python${VERSIONS[0]} python${VERSIONS[0]}-venv"
    fi
    if ((${#tried[@]})); then
        echo "Tried, and found to be of another version or without venv, ensurepip or ssl:"
        printf '  %s\n' "${tried[@]}"
    fi
} >&2
exit 1
