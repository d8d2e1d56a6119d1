#!/usr/bin/env bash
# Install a wheel into a clean environment, away from the checkout, and use it: scripts/try_wheel.sh [WHEEL]
#
# The newest wheel of dist/ by default. The study is a small one, seconds instead of minutes: what is tried is that the package is
# complete, not what the study shows. The environment lies in a temporary folder and is removed in the end.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheel=$(realpath "${1:-$(ls -t "$checkout"/dist/*.whl | head -1)}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
export SHAKETABLE_CACHE="$folder/cache"
started=$SECONDS

"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --constraint "$checkout/constraints.txt" "$wheel[train]" pytest hypothesis
echo "installed ${wheel##*/} in $((SECONDS - started)) s"

env/bin/python -c 'import shaketable; print(shaketable.__file__)' | grep -q "^$folder/env/" || { echo "this is not the wheel" >&2; exit 1; }
env/bin/shaketable --version
env/bin/shaketable locate nano --tokens 32
small=(seeds=1 train.steps=4 train.prompts=2 train.samples=2 evaluate.n=6 evaluate.every=0)
env/bin/shaketable study run guided-aqn "${small[@]/#/--set=}" --report guided.html
grep -qi "there is one seed" guided.html
mkdir tests
cp "$checkout"/tests/conftest.py "$checkout"/tests/test_plan.py tests/
env/bin/python -m pytest -q tests
echo "the wheel works without the checkout; $((SECONDS - started)) s in all"
