#!/usr/bin/env bash
# Writes requirements/dev.lock: what pip chooses for requirements/dev.in today, each package with who asks for it.
#
# Nothing is installed: pip resolves in an empty environment. The pins are for Linux.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=$(tools/find_python.sh)
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -I -m pip --disable-pip-version-check --no-input install --quiet --dry-run \
    --ignore-installed --report "$work/report.json" --requirement requirements/dev.in

"$work/venv/bin/python" -I - "$work/report.json" >"$work/dev.lock" <<'PY'
import json
import sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

with open(sys.argv[1], encoding="utf-8") as file:
    report = json.load(file)
items = {canonicalize_name(item["metadata"]["name"]): item for item in report["install"]}
askers = {name: {"dev.in"} if item["requested"] else set() for name, item in items.items()}
extras = {name: {"", *item.get("requested_extras", [])} for name, item in items.items()}
needs = {name: list(map(Requirement, item["metadata"].get("requires_dist", []))) for name, item in items.items()}
waiting = list(items)
while waiting:  # an extra can ask for another one
    name = waiting.pop()
    for need in needs[name]:
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras[name]):
            other = canonicalize_name(need.name)
            askers[other].add(name)
            if not need.extras <= extras[other]:
                extras[other] |= need.extras
                waiting.append(other)
for name, names in askers.items():
    names.discard(name)

print("# Written by tools/lock.sh from dev.in; do not edit. Python 3.12 and 3.13 on Linux.")
for name in sorted(items):
    print(f"{name}=={items[name]['metadata']['version']}  # for {', '.join(sorted(askers[name]))}")
PY

if [[ -f requirements/dev.lock ]]; then diff -u requirements/dev.lock "$work/dev.lock" || true; fi
cp -- "$work/dev.lock" requirements/dev.lock
