#!/usr/bin/env bash
# Makes the learner's environment for GPUs: torch, TransformerEngine built against it, this package.
#
#   tools/make_gpu_env.sh FOLDER                               makes it; a C++ compiler is needed
#   tools/make_gpu_env.sh --without-transformer-engine FOLDER  leaves out what is built: Megatron's local layers do
#   tools/make_gpu_env.sh --print ... FOLDER                   prints the commands and does nothing
#
# PYTHON names the Python to use (3.11 or newer). The pins are in constraints-gpu.txt; docs/gpu.md has the reasons.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tools/environments.sh"
engine=true
while [ $# -gt 1 ]; do
  case $1 in
    --print) printed=true ;;
    --without-transformer-engine) engine=false ;;
    *) usage "$0" ;;
  esac
  shift
done
folder=$(folder_of "$0" "$@")
constraints=$root/constraints-gpu.txt

make_venv "$folder"
# First: what is built is built against the torch that is there.
install "$folder" -c "$constraints" torch
if $engine; then
  # Its build asks for nvcc and reads the headers of CUDA, cuDNN and NCCL: all of them come as packages beside torch's.
  install "$folder" -c "$constraints" "cuda-toolkit[nvcc,cccl,profiler]" setuptools wheel packaging ninja pybind11
  site=$(site_of "$folder")
  # Without isolation: an isolated build would fetch another torch, and fit that one.
  do_ env "CUDA_HOME=$site/nvidia/cu13" "CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include" \
    "NVTE_FRAMEWORK=pytorch" "$folder/bin/python" -m pip install --disable-pip-version-check --quiet \
    --no-build-isolation -c "$constraints" "transformer-engine[core_cu13,pytorch]"
fi
install "$folder" -c "$constraints" -e "$root"
if $engine; then do_ "$folder/bin/python" -c "import transformer_engine.pytorch"; fi
do_ "$folder/bin/python" -c "import torch, megatron.core; print('torch', torch.__version__, 'megatron-core', megatron.core.__version__)"
do_ "$folder/bin/vcpo" doctor
