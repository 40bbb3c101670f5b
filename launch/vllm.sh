#!/usr/bin/env bash
# Serve Kimi-K2.5 in MXFP4 or MiniMax-M2.5 with vLLM on four GPUs of an MI355X node, as AMD's articles did.
# docs/recipes.md has their figures.
#
#   launch/vllm.sh NAME [OPTION...]          in the image of the figures, with docker
#   launch/vllm.sh --here NAME [OPTION...]   with the vLLM that is installed here
#
# NAME: mi355x-kimi-mxfp4, mi355x-kimi-mxfp4-eagle3-bf16, mi355x-kimi-mxfp4-eagle3-fp8, mi355x-minimax-m2.5,
# mi355x-minimax-m2.5-eagle3-bf16. OPTION: of `vllm serve`; the last value of an option counts.
# HF_HOME is the folder of the checkpoints. vLLM downloads what is missing, and runs the Python code that they bring.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" >&2
  exit 2
}

draft() { # REPOSITORY TOKENS
  printf '{"model":"%s","method":"eagle3","num_speculative_tokens":%d,"draft_tensor_parallel_size":1}' "$1" "$2"
}

here=
if [[ ${1-} == --here ]]; then
  here=yes
  shift
fi
name=${1-}
shift || usage

# Options of the published Kimi command. The articles have no command for MiniMax, only the image, TP 4 and expert
# parallelism. The host is ours: `--host 0.0.0.0` opens the server to the network, without any check of requests.
options=(--host 127.0.0.1 --port 8888 --tensor-parallel-size 4 --gpu-memory-utilization 0.90
  --no-enable-prefix-caching --trust-remote-code)
environment=(VLLM_ROCM_USE_AITER=1 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4)
images=vllm/vllm-openai-rocm
image=$images:v0.19.0
case $name in
  mi355x-kimi-mxfp4*)
    model=amd/Kimi-K2.5-MXFP4
    options+=(--mm-encoder-tp-mode data)
    # The target's MXFP4 GEMM in assembly. AITER's RMSNorm must be off below TP 8.
    environment+=(VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1 VLLM_ROCM_USE_AITER_RMSNORM=0)
    ;;
  mi355x-minimax-m2.5*)
    model=MiniMaxAI/MiniMax-M2.5
    options+=(--enable-expert-parallel --max-model-len 2304)
    image=$images:nightly-4eafc729285e459a5fc96efd6f7b313b155cad48
    ;;
esac
case $name in
  mi355x-kimi-mxfp4) options+=(--max-model-len 2248) ;;
  mi355x-kimi-mxfp4-eagle3-bf16)
    options+=(--max-model-len 2248 --speculative-config "$(draft lightseekorg/kimi-k2.5-eagle3 6)")
    ;;
  mi355x-kimi-mxfp4-eagle3-fp8) # the draft of `kimi-w4a8 quantize fp8-draft`, in the image that could load it
    options+=(--max-model-len 2304 --speculative-config "$(draft amd/kimi-k2.5-eagle3-fp8 6)")
    image=$images:nightly-fb1ac806c55a6dc96fe92261b80c8550e9c39d2f
    ;;
  mi355x-minimax-m2.5) ;;
  mi355x-minimax-m2.5-eagle3-bf16) # the article names MiniMax-M2.5-Eagle3 without an owner; vLLM 0.19.0 refuses it
    options+=(--speculative-config "$(draft thoughtworks/MiniMax-M2.5-Eagle3 3)")
    ;;
  *) usage ;;
esac

if [[ $here ]]; then
  exec env "${environment[@]}" vllm serve "$model" "${options[@]}" "$@"
fi
# The entry point is explicit, because images differ in theirs.
exec docker run --rm -it --device /dev/kfd --device /dev/dri --group-add video --ipc host --shm-size 16g --network host \
  -v "${HF_HOME:-$HOME/.cache/huggingface}:/models" -e HF_HOME=/models -e HF_TOKEN "${environment[@]/#/--env=}" \
  --entrypoint vllm "$image" serve "$model" "${options[@]}" "$@"
