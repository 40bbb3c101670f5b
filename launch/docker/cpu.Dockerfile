# syntax=docker/dockerfile:1
# The package with SGLang's CPU path and the built-in model, for machines without Linux x86-64. Its steps are
# those of the Makefile's virtual environment:
#
#   docker build -f launch/docker/cpu.Dockerfile -t kimi-w4a8-eagle3:cpu .
FROM python:3.11-slim-bookworm
# A compiler: torch and SGLang build small modules when they are imported.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/constraints.txt requirements/serve-cpu.txt requirements/
# torch from its own index: PyPI's brings several GB of CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements/constraints.txt)" \
 && pip install -c requirements/constraints.txt -r requirements/serve-cpu.txt \
 && pip install -c requirements/constraints.txt --no-deps sglang torchvision
COPY pyproject.toml README.md LICENSE ./
COPY requirements/wheel.py requirements/
COPY kimi_w4a8_eagle3 kimi_w4a8_eagle3
COPY kimi_w4a8_lab kimi_w4a8_lab
COPY kimi_w4a8_laptop kimi_w4a8_laptop
COPY launch launch
COPY patches patches
COPY bench bench
COPY eval eval
RUN pip install -c requirements/constraints.txt '.[serve,smg]' ./kimi_w4a8_laptop && rm -rf build kimi_w4a8_laptop/build

RUN useradd --create-home --uid 10001 kimi && install --directory --owner kimi --group kimi /models /runs
USER 10001
WORKDIR /runs
ENV HF_HOME=/models
EXPOSE 9527 9528
ENTRYPOINT ["kimi-w4a8"]
CMD ["serve", "--recipe", "tiny"]
