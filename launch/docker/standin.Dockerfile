# A stand-in for the ROCm image, without ROCm, torch and kernels: what `check-dockerfile.sh` builds the real Dockerfile
# on. It has the packages that the image is expected to provide, SGLang's Python files and a small tree in the place of
# AITER. Build context: the repository, with standin.Dockerfile.dockerignore.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}
ARG SGLANG
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY requirements/docker-base.txt tests/patching/patch_trees.py /standin/
# hadolint ignore=DL3013
RUN grep -vE '^(#|torch$)' /standin/docker-base.txt > /standin/packages.txt \
 && python3 -m pip install -r /standin/packages.txt "python-dateutil<3" pytest \
 && python3 -m pip install --no-deps "sglang==${SGLANG}" \
 && PYTHONPATH=/standin python3 -c "import patch_trees, sysconfig; patch_trees.write_aiter(sysconfig.get_path('purelib'))"
