# kimi-w4a8-eagle3 on top of an SGLang ROCm image. docs/docker.md says what was checked and what was not.
#
#   docker build -t kimi-w4a8-eagle3 .
#
# The builder's own frontend reads this file: a "syntax" line would fetch another one by a tag that moves.
#
# Public documents name this tag. It was not pulled here and its digest is not known here. A tag can move:
# launch/pin-base.sh asks the registry for the digests of both images and writes them here, or moves to another tag.
ARG BASE_IMAGE=lmsysorg/sglang-rocm:v0.5.20-rocm724-mi30x-20260919
# Compiles the kernels, any Python 3.11 or 3.12.
ARG KERNELS_IMAGE=python:3.12-slim-bookworm

# Everything that is added is built in a stage of its own, with the Python of the base image.
FROM ${BASE_IMAGE} AS wheels
ARG BASE_IMAGE
COPY launch/docker/record_base.py /opt/kimi/
RUN python3 /opt/kimi/record_base.py /opt/kimi/base.json
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/docker-build.txt requirements/docker.txt requirements/
RUN python3 -m pip install --require-hashes --ignore-installed -r requirements/docker-build.txt \
 && python3 -m pip wheel --require-hashes --no-deps --no-build-isolation --wheel-dir /dependencies -r requirements/docker.txt
COPY pyproject.toml LICENSE ./
# The README is only the wheel's description. With an empty one, a change of the README rebuilds nothing.
RUN touch README.md
COPY requirements/wheel.py requirements/
COPY kimi_w4a8_eagle3 kimi_w4a8_eagle3
COPY kimi_w4a8_lab kimi_w4a8_lab
COPY launch launch
COPY patches patches
COPY bench bench
COPY eval eval
RUN python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# Our kernels as gfx942 code objects, by the compilers that they were proved with: AITER's FlyDSL in the base is another.
FROM ${KERNELS_IMAGE} AS kernels
WORKDIR /src
COPY requirements/kernels.txt requirements/
# torch is the package index's build, with 2.5 GB of CUDA that this stage alone has: the hashes of PyTorch's CPU builds are
# not known here.
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/kernels.txt
COPY --from=wheels /wheels/kimi_w4a8_eagle3-*.whl ./
# `warm` keeps objects whose sources and compilers are the same, so the next build compiles only kernels that changed.
RUN --mount=type=cache,target=/objects,sharing=locked \
    pip install --no-cache-dir --no-index --no-deps ./*.whl \
 && kimi-w4a8 warm --objects /objects \
 && mkdir --parents /opt/kimi \
 && cp --recursive /objects /opt/kimi/kernels

FROM ${BASE_IMAGE}
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
# Which of our extras the image must be able to run; the packages are there in any case.
ARG EXTRAS=bench,eval,smg
LABEL org.opencontainers.image.title="kimi-w4a8-eagle3" \
      org.opencontainers.image.description="amd/Kimi-K2.5-W4A8 with EAGLE3 on 8x AMD Instinct MI325X: SGLang plus a plugin, no fork" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

USER 0
# SGLang binds each rank to its GPU's NUMA node with numactl's library, and warns and goes on without it. The version is that
# of the base's distribution, which is not known here. The build prints it, and `--build-arg NUMACTL==VERSION` pins it.
ARG NUMACTL=
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends "numactl${NUMACTL}" \
 && dpkg-query --show numactl \
 && rm -rf /var/lib/apt/lists/*
# Our packages lie in two folders of their own at the end of sys.path: the versions of the base image always win, so
# nothing of it (sglang, torch, aiter, ...) can be upgraded or replaced.
# Ours come last, so that a change of them does not install the others again.
COPY --from=wheels /dependencies /opt/kimi/wheels
RUN python3 -m pip install --no-cache-dir --no-index --no-deps --target /opt/kimi/dependencies /opt/kimi/wheels/*.whl \
 && rm -r /opt/kimi/wheels
COPY --from=wheels /wheels /opt/kimi/wheels
RUN python3 -m pip install --no-cache-dir --no-index --no-deps --target /opt/kimi/packages /opt/kimi/wheels/*.whl \
 && rm -r /opt/kimi/wheels \
 && printf '%s\n' /opt/kimi/packages /opt/kimi/dependencies > "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kimi.pth"
ENV PATH=/opt/kimi/packages/bin:/opt/kimi/dependencies/bin:${PATH}
COPY launch/docker/check_closure.py launch/docker/healthcheck.py /opt/kimi/
RUN python3 /opt/kimi/check_closure.py "kimi-w4a8-eagle3[${EXTRAS}]"

COPY --from=wheels /opt/kimi/base.json /opt/kimi/base.json
COPY --from=kernels /opt/kimi/kernels /opt/kimi/kernels
ENV KIMI_KERNELS=/opt/kimi/kernels

# Patches of AITER's sources (docs/moe.md), by `git apply --check` and `git apply`. One that does not fit is named here
# and by `kimi-w4a8 doctor`, and the guard keeps its limit. Then what AITER would otherwise compile while serving: its own
# Dockerfile leaves these modules out.
ARG AITER_ARCH=gfx942
COPY launch/docker/build_aiter.py /opt/kimi/
RUN kimi-w4a8 patch \
 && python3 /opt/kimi/build_aiter.py "${AITER_ARCH}" \
 && kimi-w4a8 patch --check

# Kubernetes and compose run it as this user; docker-run.sh as the caller, whom no file here knows by number: hence the mode,
# and HOME and USER below. The numbers of the nodes' groups on the host come with `docker run --group-add`.
RUN groupadd --force --system video \
 && groupadd --force --system render \
 && useradd --create-home --uid 10001 --groups video,render kimi \
 && install --directory --owner kimi --group kimi --mode 777 /home/kimi /models /runs /trust \
 && chmod o+x /root # docker-run.sh mounts folders of the host at their own path
USER 10001
WORKDIR /runs
# transformers copies a checkpoint's own code before it runs it; serving needs /models and /trust read-only.
ENV HOME=/home/kimi \
    USER=kimi \
    HF_HOME=/models \
    HF_MODULES_CACHE=/home/kimi/.cache/huggingface/modules \
    KIMI_TRUSTED_CODE=/trust/trusted-code.json \
    HEALTHCHECK_URL=http://127.0.0.1:9528/live
VOLUME ["/models", "/runs", "/trust"]
EXPOSE 9527 9528

# /live of `kimi-w4a8 serve` is 200 while the engine loads or advances tokens, and 503 once they stop. `kimi-w4a8 fetch` and other
# commands have no such port: they show as unhealthy, which nothing acts upon.
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m --retries=3 CMD ["python3", "/opt/kimi/healthcheck.py"]
ENTRYPOINT ["kimi-w4a8"]
CMD ["--help"]
