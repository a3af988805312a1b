#!/usr/bin/env bash
# Makes the rollout environment: SGLang with what it needs, apart from the learner's (their requirements conflict).
#
#   tools/make_rollout_env.sh FOLDER          for GPUs: SGLang's own wheels, CUDA and kernels included
#   tools/make_rollout_env.sh --cpu FOLDER    without a GPU: the real server on torch's CPU kernels, for tests
#
# Then: rollout.engine = "sglang", rollout.python = "FOLDER/bin/python". PYTHON names the Python to use (3.11 or newer).
# Measured for --cpu: 1.7 GB; about 4 minutes on 2 idle cores with a nearby package index, 99 s of processor time.
set -euo pipefail

version=0.5.23
here=$(cd "$(dirname "$0")" && pwd)
cpu=false
if [ "${1:-}" = --cpu ]; then cpu=true; shift; fi
if [ $# -ne 1 ] || [ "${1:0:1}" = - ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$1
python=${PYTHON:-$(command -v python3.11 || command -v python3)}

"$python" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vcpo: error: Python 3.11 or newer is needed; set PYTHON=")'
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --disable-pip-version-check --quiet)
if $cpu; then
  # Without dependencies: SGLang's would bring CUDA, xgrammar's Triton. What the server imports is in the list.
  "${pip[@]}" torch==2.13.0 -r "$here/sglang_cpu/requirements.txt"
  "${pip[@]}" --no-deps torchvision==0.28.0 "sglang==$version" xgrammar==0.2.7
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r "$here/sglang_cpu/sgl_kernel" "$here/sglang_cpu/vcpo_sglang_cpu.py" "$here/sglang_cpu/vcpo_sglang_cpu.pth" "$site/"
else
  "${pip[@]}" "sglang==$version"
fi
"$folder/bin/python" -c 'import sglang; print("SGLang", sglang.__version__)'
echo "rollout.python = \"$(cd "$folder" && pwd)/bin/python\""
