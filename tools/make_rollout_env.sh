#!/usr/bin/env bash
# Makes the rollout environment: SGLang with what it needs, apart from the learner's (their requirements conflict).
#
#   tools/make_rollout_env.sh FOLDER            for GPUs: SGLang's own wheels, CUDA and kernels included
#   tools/make_rollout_env.sh --cpu FOLDER      without a GPU: the real server on torch's CPU kernels, for tests
#   tools/make_rollout_env.sh --print ... FOLDER  prints the commands and does nothing
#
# Then: rollout.engine = "sglang", rollout.python = "FOLDER/bin/python". PYTHON names the Python to use (3.11 or newer).
# The pins for GPUs are in constraints-rollout.txt; docs/gpu.md has the reasons.
# Measured for --cpu: 1.7 GB; about 4 minutes on 2 idle cores with a nearby package index, 99 s of processor time.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tools/environments.sh"
cpu=false
while [ $# -gt 1 ]; do
  case $1 in
    --print) printed=true ;;
    --cpu) cpu=true ;;
    *) usage "$0" ;;
  esac
  shift
done
folder=$(folder_of "$0" "$@")

make_venv "$folder"
if $cpu; then
  here=$root/tools
  # Without dependencies: SGLang's would bring CUDA, xgrammar's Triton. What the server imports is in the list.
  install "$folder" torch==2.13.0 -r "$here/sglang_cpu/requirements.txt"
  install "$folder" -c "$root/constraints-rollout.txt" --no-deps torchvision==0.28.0 sglang xgrammar==0.2.7
  do_ cp -r "$here/sglang_cpu/sgl_kernel" "$here/sglang_cpu/vcpo_sglang_cpu.py" "$here/sglang_cpu/vcpo_sglang_cpu.pth" \
    "$(site_of "$folder")/"
else
  install "$folder" -c "$root/constraints-rollout.txt" sglang
fi
do_ "$folder/bin/python" -c "import sglang; print('SGLang', sglang.__version__)"
if ! $printed; then echo "rollout.python = \"$folder/bin/python\""; fi
