# A stand-in for the ROCm image, without ROCm and its kernels: what `check-dockerfile.sh` builds the real Dockerfile on. It
# has the packages that the image is expected to provide, a CPU's torch, SGLang's and AITER's own files with a stand-in for
# the compiler, and what the image is awkward in: AITER's pin of FlyDSL, a constraint for every pip.
# Build context: the repository, with standin.Dockerfile.dockerignore.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}
ARG SGLANG
ARG TORCH_BACKEND=cpu
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ git \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/docker-base.txt tests/launch/standin_rocm.py /standin/
RUN grep -vE '^(#|torch$)' /standin/docker-base.txt > /standin/packages.txt \
 && python3 -m pip install uv==0.13.9 \
 && uv pip install --system --no-cache ${TORCH_BACKEND:+"--torch-backend=$TORCH_BACKEND"} \
      torch==2.11.0 einops ninja pybind11 "python-dateutil<3" -r /standin/packages.txt \
 && uv pip install --system --no-cache --no-deps "sglang==${SGLANG}" flydsl==0.3.1 \
      amd-aiter==0.1.7.post2.dev18
WORKDIR /standin
RUN site=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
 && python3 -c "import pathlib, standin_rocm as rocm; rocm.write_rocm(pathlib.Path('/opt/rocm')); \
rocm.import_little(pathlib.Path('$site/aiter'))" \
 && mkdir -p /etc/sglang/constraints \
 && echo "torch==$(python3 -c 'import torch; print(torch.__version__)')" > /etc/sglang/constraints/torch-rocm.txt
ENV PATH=/opt/rocm/bin:${PATH} CXX=/opt/rocm/bin/hipcc GPU_ARCH=gfx942-rocm724 \
    PIP_CONSTRAINT=/etc/sglang/constraints/torch-rocm.txt
