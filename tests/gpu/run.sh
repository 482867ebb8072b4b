#!/usr/bin/env bash
# Checks and measures the Triton kernels on a CUDA device, in under six minutes. Needs torch and
# triton only; PYTHON names the interpreter that has them. Arguments go to measure.py (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
exec "${PYTHON:-python3}" tests/gpu/measure.py "$@"
